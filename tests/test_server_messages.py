"""Anthropic's Messages API: the same conversations as the chat endpoint's, in blocks and events."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from typing import Any

import pytest
from serving import (
    SCHEMA,
    STORY,
    USED,
    Answer,
    Serving,
    glm_model,
    offline,
    open_engine,
    read_answer,
    request,
    scripted,
    serving,
    wait_for,
    written,
)

from colibri.errors import CoreError
from colibri.server import asked, messages, stream, tools
from colibri.server.message import MessageShape
from colibri.server.reply import Delta
from colibri.server.tools import ARGUMENTS, CALLED, ENDED, Event
from colibri.session import Session

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
LONG = [{"role": "user", "content": "Tell me. " * 200}]
TOOLS = [
    {"name": "read_file", "description": "Read.", "input_schema": SCHEMA},
    {"type": "custom", "name": "search", "input_schema": SCHEMA, "cache_control": {}},
]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "read_file", "description": "Read.",
                                      "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "search", "parameters": SCHEMA}},
]  # fmt: skip


@pytest.fixture(scope="module")
def server(demo_path, tmp_path_factory) -> Iterator[Serving]:
    """The demo with GLM-5.2's own template, which shows tools and has the switches."""
    target = glm_model(demo_path, tmp_path_factory.mktemp("messages") / "model")
    with serving(open_engine(model=str(target), model_id="glm", seed="7")) as running:
        yield running


def ask(server: Serving, **fields: Any) -> Answer:
    """Ask for a message."""
    body = {"max_tokens": 1000, "messages": STORY, **fields}
    return server.post(PATH, {name: value for name, value in body.items() if value is not None})


def error(answer: Answer) -> dict[str, Any]:
    """The error of a refusal, its shape checked."""
    assert answer.status >= 400 and set(answer.json) == {"type", "error"}
    assert answer.json["type"] == "error" and set(answer.json["error"]) == {"type", "message"}
    return answer.json["error"]


def events(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, but for pings; their names are their types."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.body.decode().strip().split("\n\n"):
        if not block.startswith(":"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return [event for event in found if event["type"] != "ping"]


def assembled(answer: Answer) -> dict[str, Any]:
    """The message that a stream's events make, every block opened and closed in turn."""
    first, *rest, last = events(answer)
    message, current, partial = first["message"], None, ""
    for event in rest:
        if event["type"] == "content_block_start":
            assert current is None and event["index"] == len(message["content"])
            current, partial = event["content_block"], ""
        elif event["type"] == "content_block_delta":
            kind, text = list(event["delta"].values())
            assert event["index"] == len(message["content"])
            if kind == "input_json_delta":
                partial += text
            else:
                current[kind.removesuffix("_delta")] += text
        elif event["type"] == "content_block_stop":
            if current["type"] == "tool_use":
                current["input"] = json.loads(partial)
            message["content"].append(current)
            current = None
        else:
            assert event["type"] == "message_delta" and current is None
            message |= {**event["delta"], "usage": event["usage"]}
    assert first["type"] == "message_start" and last["type"] == "message_stop"
    return message


def said(message: dict[str, Any]) -> str:
    """Reasoning and text."""
    return "".join(b.get("thinking", "") + b.get("text", "") for b in message["content"])


# ---- what is asked ------------------------------------------------------------------------------

CACHED = {"type": "text", "text": "Be kind. ", "cache_control": {"type": "ephemeral"}}
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": t} for t in ("Read ", "it.")]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Let me see.", "signature": "colibri"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "read_file", "input": USED},
        {"type": "tool_use", "id": "b", "name": "search", "input": {}, "cache_control": {}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": "code"},
        {"type": "tool_result", "tool_use_id": "b", "is_error": True,
         "content": [{"type": "text", "text": "not "}, {"type": "text", "text": "found"}]},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "Go on."},
    ]},
]  # fmt: skip
CHAT_HISTORY = [
    {"role": "user", "content": "Read it."},
    {"role": "assistant", "content": "I look.", "reasoning_content": "Let me see.", "tool_calls": [
        {"id": "a", "type": "function", "function": {
            "name": "read_file", "arguments": json.dumps(USED, ensure_ascii=False)}},
        {"id": "b", "type": "function", "function": {"name": "search", "arguments": "{}"}},
    ]},
    {"role": "tool", "tool_call_id": "a", "content": "code"},
    {"role": "tool", "tool_call_id": "b", "content": "Error: not found"},
    {"role": "tool", "tool_call_id": "c", "content": ""},
    {"role": "user", "content": "Go on."},
]  # fmt: skip
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


@pytest.mark.parametrize(
    ("ours", "chats"),
    [
        ({}, {}),
        ({"system": "Be kind."}, {"messages": [{"role": "system", "content": "Be kind."}, *STORY]}),
        ({"system": [CACHED, CACHED]},
         {"messages": [{"role": "system", "content": "Be kind. Be kind. "}, *STORY]}),
        ({"system": [], "messages": HISTORY}, {"messages": CHAT_HISTORY}),
        ({"tools": TOOLS}, {"tools": CHAT_TOOLS}),
        ({"tools": TOOLS, "tool_choice": {"type": "none"}},
         {"tools": CHAT_TOOLS, "tool_choice": "none"}),
        ({"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
         {"tools": CHAT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "search"}},
         {"tools": CHAT_TOOLS,
          "tool_choice": {"type": "function", "function": {"name": "search"}}}),
        ({"max_tokens": 10**12, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "stream": True},
         {"max_tokens": 10**9, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "stream": True}),
        ({"stop_sequences": ["a", "b"], "metadata": {"user_id": "me"}, "seed": 3, "min_p": 0.1},
         {"stop": ["a", "b"], "user": "me", "seed": 3, "min_p": 0.1}),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}},
         {"thinking": {"type": "enabled"}}),
        ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
        ({"thinking": {"type": "adaptive"}, "context_management": KEEP_ALL,
          "output_config": {"effort": "medium"}},
         {"thinking": None, "chat_template_kwargs": {"clear_thinking": False},
          "reasoning_effort": "medium"}),
    ],
)  # fmt: skip
def test_the_same_is_asked(ours, chats):
    """A request is, field for field, the one that the chat endpoint makes of the same wishes."""
    body = {"messages": STORY, "max_tokens": 9}
    assert messages.message(body | ours) == asked.chat(body | chats)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "god", "content": ""}]}, 'messages[0].role is "god"'),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": 1}]}, "expected text or a list of blocks"),
        ({"messages": [*STORY, {"role": "assistant", "content": "Once"}]}, "the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         'messages[0].content[0].type is "image"'),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
         'messages[0].content[0].type is "document"'),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                                     "content": [{"type": "image"}]}]}]},
         'messages[0].content[0].content[0].type is "image"'),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "content[0].type is null"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         'tools[0].type is "web_search_20250305"'),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "the same name"),
        ({"tools": [TOOLS[0] | {"strict": True}]}, "tokenizer has no <arg_key>, so no tool can be"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "run"}}, "none of the tools"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": "auto"}, "tool_choice is"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"pattern": "(?!x)"}}}},
         "output_config.format.schema.pattern cannot be kept to"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "edits[0].type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temperature": "hot"}, "temperature is"),
        ({"n": 2}, "n is not supported"),
    ],
)  # fmt: skip
def test_refused_by_name(server, body, word):
    """What cannot be honoured, contradictions and wrong types: 400 in Anthropic's shape."""
    answer = ask(server, **body)
    assert answer.status == 400 and error(answer)["type"] == "invalid_request_error"
    assert word in error(answer)["message"]


def test_an_answer_by_a_schema(server):
    """output_config.format: the text is JSON that keeps to the schema."""
    both = {"path": {"const": "a.py"}, "line": {"enum": [7]}}
    schema = {"properties": both, "required": ["line"]}
    answer = ask(
        server, output_config={"format": {"type": "json_schema", "schema": schema}},
        thinking={"type": "disabled"}, max_tokens=100,
    )  # fmt: skip
    (block,) = answer.json["content"]
    assert json.loads(block["text"]) in ({"path": "a.py", "line": 7}, {"line": 7})


# ---- what is answered ---------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"temperature": 0.5, "seed": 5}])
def test_text_is_that_of_chat(server, streams, sampling):
    """The text is run's and the chat endpoint's, by the server's own seed or another."""
    answer = ask(server, stream=streams, max_tokens=40, system="", **sampling)
    message = assembled(answer) if streams else answer.json
    choice = server.post("/v1/chat/completions", {"messages": STORY, "max_tokens": 40, **sampling})
    chat = choice.json["choices"][0]["message"]
    assert said(message) == chat.get("reasoning_content", "") + chat["content"]
    usual = {"temperature": server.engine.sampling.temperature}
    assert said(message) == offline(server.engine, STORY, 40, **(usual | sampling))
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "glm")
    assert message["usage"]["output_tokens"] == choice.json["usage"]["completion_tokens"] == 40


def test_order_of_events(server, monkeypatch):
    """Reasoning, text and two calls: each block begins, grows and ends before the next."""
    text = f"Hm.</think>I look.\n{written('read_file')}{written('search')}"
    with scripted(monkeypatch, server, text):
        answer = ask(server, tools=TOOLS, stream=True)
        whole = ask(server, tools=TOOLS).json
    order: list[str] = []
    for event in events(answer):
        name = event["type"].removeprefix("content_")
        name += ":" + event.get("content_block", event.get("delta", {})).get("type", "")
        if name not in order[-1:]:
            order.append(name)
    call = ["block_start:tool_use", "block_delta:input_json_delta", "block_stop:"]
    assert order == [
        "message_start:",
        "block_start:thinking", "block_delta:thinking_delta", "block_delta:signature_delta",
        "block_stop:", "block_start:text", "block_delta:text_delta", "block_stop:", *call, *call,
        "message_delta:", "message_stop:",
    ]  # fmt: skip
    message = assembled(answer)
    assert [{**b, "id": ""} for b in message["content"]] == [
        {**b, "id": ""} for b in whole["content"]
    ]
    assert message["stop_reason"] == whole["stop_reason"] == "tool_use"
    start = events(answer)[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] > 0 == start["usage"]["output_tokens"]


@pytest.mark.parametrize("streams", [False, True])
def test_tool_round_trip(server, monkeypatch, streams):
    """Calls with parsed input, and back with results: the prompt is the chat endpoint's."""
    text = f"Hm.</think>I look.\n{written('read_file')}{written('search')}"
    with scripted(monkeypatch, server, text):
        answer = ask(server, tools=TOOLS, stream=streams)
    message = assembled(answer) if streams else answer.json
    thought, saying, *uses = message["content"]
    assert (thought["thinking"], saying["text"], message["stop_reason"]) == (
        "Hm.", "I look.", "tool_use",
    )  # fmt: skip
    assert [(use["name"], use["input"]) for use in uses] == [("read_file", USED), ("search", USED)]
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "ok"} for use in uses]
    history = [
        *STORY,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": results},
    ]
    usage = ask(server, messages=history, tools=TOOLS, max_tokens=1).json["usage"]
    calls = [
        {"id": use["id"], "function": {"name": use["name"], "arguments": json.dumps(USED)}}
        for use in uses
    ]
    chat = [
        *STORY,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
         "tool_calls": calls},
        *({"role": "tool", "tool_call_id": use["id"], "content": "ok"} for use in uses),
    ]  # fmt: skip
    same = server.chat(messages=chat, tools=CHAT_TOOLS, max_tokens=1).json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == same["prompt_tokens"]
    assert same["prompt_tokens_details"]["cached_tokens"] == same["prompt_tokens"] - 1


def test_forced_and_single(server, monkeypatch):
    """A tool that must be called is begun in the prompt; parallel calls can be turned off."""
    with scripted(monkeypatch, server, written("", USED).removeprefix(tools.OPEN) * 2):
        message = ask(server, tools=TOOLS, tool_choice={
            "type": "tool", "name": "search", "disable_parallel_tool_use": True,
        }).json  # fmt: skip
    (use,) = message["content"]
    assert (use["name"], use["input"], message["stop_reason"]) == ("search", USED, "tool_use")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("script", "stops", "ended"),
    [
        ("Once upon a time", ["zebra"], ("Once upon a time", "end_turn", None)),
        ("Once upon a time", ["x", " a t"], ("Once upon", "stop_sequence", " a t")),
        (f"{tools.OPEN}search", [], (f"{tools.OPEN}search", "end_turn", None)),
    ],
)
def test_reasons(server, monkeypatch, script, stops, ended, streams):
    """Why an answer ended, and at which stop; a call that is none is text."""
    with scripted(monkeypatch, server, f"</think>{script}"):
        answer = ask(server, stop_sequences=stops, tools=TOOLS, stream=streams)
    message = assembled(answer) if streams else answer.json
    assert (said(message), message["stop_reason"], message["stop_sequence"]) == ended


def test_text_after_a_call():
    """Steps that were put together: the open call ends before text begins, no block is reopened."""
    shape = MessageShape("glm")
    first = [Event(CALLED, "run", 0, "a"), Event(ARGUMENTS, "{", 0)]
    rest = [Event(ARGUMENTS, "}", 0), Event(ENDED, "", 0), Event(CALLED, "run", 1, "b")]
    found = [*shape.chunks(Delta(calls=first)), *shape.chunks(Delta(content="Hm.", calls=rest))]
    stages = [(e["type"].removeprefix("content_block_"), e["index"]) for e in found]
    call = [("start", 0), ("delta", 0), ("delta", 0), ("stop", 0)]
    assert stages == [*call, ("start", 1), ("delta", 1), ("stop", 1), ("start", 2)]


def test_counting(server):
    """count_tokens is what the answer's usage says was read and found in caches, tools included."""
    news = [{"role": "user", "content": "What has nobody asked before?"}]
    for fields in ({"messages": news}, {"system": [CACHED], "tools": TOOLS, "messages": HISTORY}):
        counted = server.post(COUNT, {"model": "glm", **fields}).json
        for cached in (False, True):
            usage = ask(server, **fields, max_tokens=1).json["usage"]
            read, found = usage["input_tokens"], usage["cache_read_input_tokens"]
            assert counted == {"input_tokens": read + found}
            assert read == 1 if cached else read > 1
    answer = server.post(COUNT, {"messages": STORY, "max_tokens": 1})
    assert "max_tokens is not supported" in error(answer)["message"]


# ---- errors, headers and clients ----------------------------------------------------------------


def test_errors(server):
    """Each status has Anthropic's name for it; the other endpoints keep OpenAI's shape."""
    long = [{"role": "user", "content": "fox " * 1500}]
    answer = ask(server, messages=long, stream=True)
    assert answer.status == 400 and "prompt is too long" in error(answer)["message"]
    for answer, status, kind in (
        (ask(server, model="claude"), 404, "not_found_error"),
        (server.post(f"{PATH}/batches", {}), 404, "not_found_error"),
        (server.get(PATH), 405, "invalid_request_error"),
        (server.post(PATH, b"{"), 400, "invalid_request_error"),
        (server.get(PATH, host="evil.example"), 403, "permission_error"),
    ):
        assert (answer.status, error(answer)["type"]) == (status, kind)


def test_models(server):
    """The list is Anthropic's too: what its client shows of a model, and that there is no more."""
    found = server.get("/v1/models").json
    (model,) = found["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", "glm", "glm")
    assert (
        datetime.fromisoformat(model["created_at"].replace("Z", "+00:00")).timestamp()
        == model["created"]
    )
    assert model["max_input_tokens"] == model["context_length"] == server.engine.context
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("glm", "glm", False)
    assert server.get("/v1/models/glm").json == model


@pytest.mark.parametrize("streams", [False, True])
def test_threads_are_not_kept(server, streams):
    """The tool runner of Anthropic's client asks for a thread, and does without one when told so
    in the details of the error."""
    answer = ask(server, thread={"type": "create"}, stream=streams)
    refused = answer.json["error"]
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (
        answer.status == 400 and refused["details"] == details and "thread is" in refused["message"]
    )
    with closing(server.connect()) as sock:
        sock.sendall(f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                     f"content-length: {10**12}\r\n\r\n".encode())  # fmt: skip
        answer = read_answer(sock)
    assert (answer.status, error(answer)["type"]) == (413, "request_too_large")
    assert server.post("/v1/completions", {}).error["param"] == "prompt"


def test_an_error_of_the_core(server, monkeypatch):
    """What goes wrong in a turn is a 500, or the stream's last event."""

    def broken(self, ids, want="all"):
        raise CoreError("a shard could not be read")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step_all", broken)
        answer = ask(server)
        first, last = events(ask(server, stream=True))
    assert answer.status == 500 and error(answer)["type"] == "api_error"
    assert first["type"] == "message_start" and last == answer.json


def test_full_and_closing():
    """A full queue is 429 with a time to come back, a server that ends 529."""
    with serving(open_engine(queue="0", conversations="1")) as small:
        sock = start(small, messages=LONG, max_tokens=400)
        wait_for(lambda: small.service.scheduler.active == 1)
        answer = ask(small)
        assert (answer.status, error(answer)["type"]) == (429, "rate_limit_error")
        assert answer.headers["retry-after"] == "5"
        small.service.scheduler.close()
        with closing(sock):
            assert events(read_answer(sock))[-1]["error"]["type"] == "overloaded_error"
        answer = ask(small)
        assert (answer.status, error(answer)["type"]) == (529, "overloaded_error")


def test_keys_and_origins():
    """The key comes in either header; a page that is let in may send Anthropic's own."""
    site = "https://app.example"
    with serving(open_engine(api_key="s3cret", allow_origin=site)) as guarded:
        body = {"messages": STORY}
        for wrong in ({}, {"x_api_key": "x"}, {"authorization": "s3cret"}, {"x_api_key": ""}):
            answer = guarded.post(COUNT, body, **wrong)
            assert (answer.status, error(answer)["type"]) == (401, "authentication_error")
        versions = {"anthropic_version": "2023-06-01", "anthropic_beta": "a-1,b-2"}
        for right in (
            {"x_api_key": "s3cret"},
            {"authorization": "Bearer s3cret", "x_api_key": "x"},
        ):
            assert guarded.post(f"{COUNT}?beta=true", body, **right, **versions).status == 200
        with closing(guarded.connect()) as sock:
            wanted = {"access_control_request_headers": "x-api-key, anthropic-version"}
            sock.sendall(request("OPTIONS", PATH, None, origin=site, **wanted))
            allowed = read_answer(sock).headers["access-control-allow-headers"]
        assert allowed == wanted["access_control_request_headers"]
        answer = guarded.post(COUNT, body, origin="https://evil.example", x_api_key="s3cret")
        assert (answer.status, error(answer)["type"]) == (403, "permission_error")


def test_signs_of_life(server, monkeypatch):
    """While a prompt is read, pings come, each with a comment that says how far it is."""
    monkeypatch.setattr(stream, "SILENCE", 0.001)
    monkeypatch.setattr(stream, "PACE", 0.0)
    answer = ask(server, stream=True, messages=LONG, max_tokens=1, temperature=0)
    life = b' prompt tokens read\n\nevent: ping\ndata: {"type":"ping"}\n\n'
    assert life in answer.body and said(assembled(answer)) == offline(server.engine, LONG, 1)


def test_leaving(server):
    """A client that leaves, streaming or not, ends its turn; the next answer is only its own."""
    for streams in (False, True):
        sock = start(server, messages=LONG, max_tokens=400, stream=streams)
        wait_for(lambda: server.service.scheduler.active)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        server.settle()
    message = ask(server, temperature=0, max_tokens=8).json
    assert said(message) == offline(server.engine, STORY, 8)
    assert b'colibri_requests_total{finish="gone"}' in server.service.metrics.text()


def start(server: Serving, **fields: object) -> socket.socket:
    """Send a request and leave the answer unread."""
    sock = server.connect()
    sock.sendall(request("POST", PATH, {"messages": STORY, "stream": True, **fields}))
    return sock
