"""OpenAI's Responses API: the same conversations as the chat endpoint's, in items and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
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
from colibri.sampling import SamplingParams
from colibri.server import asked, responses, stream, tools
from colibri.server.reply import Delta
from colibri.server.response import ResponseShape
from colibri.server.tools import ARGUMENTS, CALLED, ENDED, Event
from colibri.session import Session

PATH, COUNT = "/v1/responses", "/v1/responses/input_tokens"
SEALED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
LONG = "Tell me. " * 200
READ = {"type": "function", "name": "read_file", "description": "Read.", "parameters": SCHEMA}
SEARCH = {"type": "function", "name": "search", "parameters": SCHEMA, "strict": False}
TOOLS = [READ, {"type": "namespace", "name": "web", "description": "Far.", "tools": [SEARCH]}]
CHAT_READ = {
    "type": "function",
    "function": {"name": "read_file", "description": "Read.", "parameters": SCHEMA},
}
CHAT_SEARCH = {
    "type": "function",
    "function": {"name": "web.search", "parameters": SCHEMA, "strict": False},
}
CHAT_TOOLS = [CHAT_READ, CHAT_SEARCH]
WORK = f"Hm.</think>I look.\n{written('read_file')}{written('web.search')}"


@pytest.fixture(scope="module")
def server(demo_path, tmp_path_factory) -> Iterator[Serving]:
    """The demo with GLM-5.2's own template, which shows tools and has the switches."""
    target = glm_model(demo_path, tmp_path_factory.mktemp("responses") / "model")
    with serving(open_engine(model=str(target), model_id="glm", seed="7")) as running:
        yield running


def ask(server: Serving, **fields: Any) -> Answer:
    """Ask for a response."""
    return server.post(PATH, {"input": STORY[0]["content"], **fields})


def events(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream: numbered, and named by their types."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.body.decode().strip().split("\n\n"):
        if not block.startswith(":"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def assembled(answer: Answer) -> dict[str, Any]:
    """The response that a stream's events make, which its last one has, too."""
    output: list[dict[str, Any]] = []
    first, *rest, last = events(answer)
    for event in rest:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
        elif event["type"] == "response.content_part.added":
            output[-1]["content"].append(event["part"])
        elif event["type"].endswith(".delta"):
            part = output[-1].get("content", [output[-1]])[event.get("content_index", 0)]
            part["arguments" if "arguments" in part else "text"] += event["delta"]
            if "logprobs" in event:
                part["logprobs"] += event["logprobs"]
        elif event["type"] == "response.output_item.done":
            grown = {**output[-1], "status": event["item"]["status"]}
            sealed = {k: v for k, v in event["item"].items() if k == "encrypted_content"}
            assert {**grown, **sealed} == event["item"] and event["item"]["id"] == grown["id"]
            output[-1] = event["item"]
    assert first["type"] == "response.created" and first["response"]["output"] == []
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == output
    return last["response"]


def nameless(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The output without ids, which are drawn."""
    return [{k: v for k, v in i.items() if k not in ("id", "call_id")} for i in response["output"]]


def texts(response: dict[str, Any]) -> str:
    """Reasoning and text."""
    parts = [part for item in response["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts)


# ---- what is asked ------------------------------------------------------------------------------

ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("Read ", "it.")]},
    {"type": "reasoning", "id": "rs_1", "summary": [],
     "content": [{"type": "reasoning_text", "text": "Let me see."}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
        {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "read_file",
     "arguments": json.dumps(USED), "status": "completed", "caller": None},
    {"type": "function_call", "call_id": "b", "name": "search", "namespace": "web",
     "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "code"},
    {"type": "function_call_output", "call_id": "b", "id": None,
     "output": [{"type": "input_text", "text": "not "}, {"type": "input_text", "text": "found"}]},
    {"type": "reasoning", "summary": [], "encrypted_content": "gAAA-of-others"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]},
    {"role": "assistant", "content": "I will."},
    {"role": "developer", "content": "Go on."},
]  # fmt: skip
CHAT_ITEMS = [
    {"role": "user", "content": "Read it."},
    {"role": "assistant", "content": "I look.", "reasoning_content": "Let me see.", "tool_calls": [
        {"id": "a", "type": "function",
         "function": {"name": "read_file", "arguments": json.dumps(USED)}},
        {"id": "b", "type": "function", "function": {"name": "web.search", "arguments": "{}"}},
    ]},
    {"role": "tool", "tool_call_id": "a", "content": "code"},
    {"role": "tool", "tool_call_id": "b", "content": "not found"},
    {"role": "assistant", "content": "I will not."},
    {"role": "assistant", "content": "I will.", "reasoning_content": "Short."},
    {"role": "developer", "content": "Go on."},
]  # fmt: skip
NAMED = {"type": "function", "name": "search", "namespace": "web"}
TAKEN = {
    "store": True, "background": False, "truncation": "disabled", "metadata": {"a": "b"},
    "include": [SEALED], "reasoning": {"summary": "auto"}, "prompt_cache_key": "k",
    "client_metadata": {"x": "y"}, "max_tool_calls": 3, "service_tier": "auto",
    "previous_response_id": None, "top_logprobs": 0, "text": {"format": {"type": "text"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "chats"),
    [
        ({}, {}),
        (TAKEN, {}),
        ({"instructions": ""}, {}),
        ({"instructions": "Be kind."},
         {"messages": [{"role": "system", "content": "Be kind."}, *STORY]}),
        ({"input": ITEMS}, {"messages": CHAT_ITEMS}),
        ({"tools": TOOLS, "parallel_tool_calls": False},
         {"tools": CHAT_TOOLS, "parallel_tool_calls": False}),
        ({"tools": TOOLS, "tool_choice": "required"},
         {"tools": CHAT_TOOLS, "tool_choice": "required"}),
        ({"tools": TOOLS, "tool_choice": NAMED},
         {"tools": CHAT_TOOLS,
          "tool_choice": {"type": "function", "function": {"name": "web.search"}}}),
        ({"tools": TOOLS,
          "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}},
         {"tools": [CHAT_SEARCH], "tool_choice": "required"}),
        ({"max_output_tokens": 10**12, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 3,
          "min_p": 0.1, "stream": True, "user": "me"},
         {"max_tokens": 10**9, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 3,
          "min_p": 0.1, "stream": True, "user": "me"}),
        ({"reasoning": {"effort": "medium", "context": "all_turns"}},
         {"reasoning_effort": "medium", "chat_template_kwargs": {"clear_thinking": False}}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        ({"include": [LOGPROBS], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ],
)  # fmt: skip
def test_the_same_is_asked(ours, chats):
    """A request is, field for field, the one that the chat endpoint makes of the same wishes."""
    found = vars(responses.response({"input": STORY[0]["content"], **ours}))
    chat = {"chat_template_kwargs": {}, "messages": STORY, **chats}
    assert {k: v for k, v in found.items() if k != "given"} == vars(asked.chat(chat))


def one(item: dict[str, Any]) -> dict[str, Any]:
    """A conversation of this item."""
    return {"input": [item]}


UNKEPT = {"type": "function", "name": "u", "strict": True,
          "parameters": {"properties": {"a": {"not": {}}}}}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"input": None}, "input", "input is missing"),
        ({"input": []}, "input", "input is []"),
        ({"input": 1}, "input", "expected text or a list of items"),
        (one({"role": "tool", "content": ""}), "input[0].role", "expected one of user, assistant"),
        (one({"role": "user"}), "input[0].content", "is missing"),
        (one({"role": "user", "content": [{"type": "input_image"}]}), "input[0].content[0].type",
         "it takes input_text"),
        (one({"type": "item_reference", "id": "msg_1"}), "input[0].type", "send the item itself"),
        (one({"type": "custom_tool_call", "id": "a"}), "input[0].type", "it takes message"),
        (one({"type": "function_call_output", "call_id": "a", "output": [{"type": "input_file"}]}),
         "input[0].output[0].type", '"input_file"'),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "leave it out"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "offer a function"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"tools": [READ, READ]}, "tools", "the same name"),
        ({"tools": [{"type": "namespace", "name": "n" * 128, "tools": [SEARCH]}]}, "tools",
         "at most 128"),
        ({"tools": [{"type": "namespace", "tools": [SEARCH]}]}, "tools[0].name", "is missing"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "search"}}, "tool_choice",
         'names "search", which is none'),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                          "tools": [{"type": "function", "name": "search"}]}},
         "tool_choice", 'allows "search", which is none'),
        ({"tool_choice": "any"}, "tool_choice", "expected one of none, auto, required"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send all items as input"),
        ({"conversation": "conv_1"}, "conversation", "send all items as input"),
        ({"background": True}, "background", "send false"),
        ({"truncation": "auto"}, "truncation", 'send "disabled"'),
        ({"include": ["file_search_call.results"]}, "include[0]", "expected one of"),
        ({"top_logprobs": 2}, "top_logprobs", f'needs include: ["{LOGPROBS}"]'),
        ({"text": {"verbosity": "low"}}, "text.verbosity", 'send "medium"'),
        ({"text": {"format": {"type": "json_schema", "strict": True,
                              "schema": {"pattern": "(?!x)"}}}},
         "text.format.schema", "pattern cannot be kept to"),
        (one({"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}),
         "input[0].arguments", "the text of a JSON object"),
        (one({"type": "function_call", "call_id": "a", "name": "f", "arguments": "[" * 9000}),
         "input[0].arguments", "the text of a JSON object"),
        ({"tools": [READ, {"type": "namespace", "name": "n", "tools": [SEARCH, UNKEPT]}]},
         "tools[1].tools[1].parameters", "tools[1].tools[1].parameters.a.not cannot be kept to"),
        ({"tools": [READ, UNKEPT], "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                                   "tools": [{"type": "function", "name": "u"}]}},
         "tools[1].parameters", "a.not cannot be kept to"),
        ({"messages": STORY}, "messages", "not supported"),
        ({"input": "fox " * 1500}, "input", "prompt is too long"),
    ],
)  # fmt: skip
def test_refused_by_name(server, body, param, word):
    """What cannot be honoured, contradictions and wrong types: 400, the field, and what to do."""
    answer = ask(server, **body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert word in answer.error["message"]


def test_what_the_template_lacks():
    """A model whose template has no degrees of reasoning: the field has this API's name."""
    with serving(open_engine()) as plain:
        refused = ask(plain, reasoning={"effort": "low"}).error
    assert refused["param"] == "reasoning.effort"
    assert refused["message"].endswith("; leave reasoning.effort out.")


# ---- what is answered ---------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"temperature": 0.5, "seed": 5}])
def test_text_is_that_of_chat(server, streams, sampling):
    """The text is run's and the chat endpoint's, by the server's own seed or another."""
    answer = ask(server, stream=streams, max_output_tokens=40, **sampling)
    response = assembled(answer) if streams else answer.json
    chat = server.post("/v1/chat/completions", {"messages": STORY, "max_tokens": 40, **sampling})
    message, used = chat.json["choices"][0]["message"], chat.json["usage"]
    assert texts(response) == message.get("reasoning_content", "") + message["content"]
    usual = {"temperature": server.engine.sampling.temperature}
    assert texts(response) == offline(server.engine, STORY, 40, **(usual | sampling))
    assert (response["status"], response["output"][-1]["status"]) == ("incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["seed"] == chat.json["seed"]
    usage = response["usage"]
    assert usage["input_tokens"] == used["prompt_tokens"]
    assert usage["output_tokens"] == used["completion_tokens"] == 40
    assert usage["total_tokens"] == used["total_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"] - 1


def test_types(server, monkeypatch):
    """Every field and event is as the official client's types demand, settings are repeated."""
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    wish = {
        "input": ITEMS, "tools": TOOLS, "tool_choice": NAMED, "instructions": "Be kind.",
        "metadata": {"a": "b"}, "reasoning": {"effort": "high"}, "max_output_tokens": 99,
        "temperature": 0.25, "top_p": 0.5, "parallel_tool_calls": False, "user": "me",
    }  # fmt: skip
    with scripted(monkeypatch, server, written("").removeprefix(tools.OPEN)):
        whole = ask(server, **wish).json
    with scripted(monkeypatch, server, WORK):
        streamed = events(ask(server, tools=TOOLS, stream=True))
    Response.model_validate(whole)
    TypeAdapter(list[ResponseStreamEvent]).validate_python(streamed)
    (call,) = whole["output"]
    assert (call["name"], call["namespace"], json.loads(call["arguments"])) == (
        "search",
        "web",
        USED,
    )
    repeated = {name: whole[name] for name in wish if name not in ("input", "reasoning")}
    assert repeated == {name: wish[name] for name in repeated}
    assert whole["reasoning"] == {"effort": "high", "summary": None}
    assert (whole["store"], whole["model"], whole["status"]) == (False, "glm", "completed")


def test_order_of_events(server, monkeypatch):
    """Reasoning, text and two calls: each begins, grows and ends before the next."""
    with scripted(monkeypatch, server, WORK):
        answer = ask(server, tools=TOOLS, stream=True)
        whole = ask(server, tools=TOOLS).json
    order: list[str] = []
    for event in events(answer):
        name = event["type"].removeprefix("response.")
        if name not in order[-1:]:
            order.append(name)
    said = ["output_item.added", "content_part.added", "*.delta", "*.done", "content_part.done",
            "output_item.done"]  # fmt: skip
    call = [stage.replace("*", "function_call_arguments") for stage in said if "part" not in stage]
    assert order == [
        "created", "in_progress",
        *(stage.replace("*", "reasoning_text") for stage in said),
        *(stage.replace("*", "output_text") for stage in said),
        *call, *call, "completed",
    ]  # fmt: skip
    assert nameless(assembled(answer)) == nameless(whole)
    assert [item["status"] for item in whole["output"]] == ["completed"] * 4
    assert [item.get("namespace") for item in whole["output"]] == [None, None, None, "web"]


@pytest.mark.parametrize("keeps", ["content", "encrypted_content"])
def test_tool_round_trip(server, monkeypatch, keeps):
    """Calls, and back with results: the prompt is the chat endpoint's, reasoning and all, also
    where the client keeps only what it takes to be encrypted."""
    with scripted(monkeypatch, server, WORK):
        output = ask(server, tools=TOOLS, include=[SEALED]).json["output"]
    thought, _, *calls = output
    kept = {name: thought[name] for name in ("type", "summary", keeps)}
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
        for call in calls
    ]
    history = [*STORY, kept, *output[1:], *results]
    counted = server.post(COUNT, {"input": history, "tools": TOOLS}).json
    assert counted["object"] == "response.input_tokens"
    usage = ask(server, input=history, tools=TOOLS, max_output_tokens=1).json["usage"]
    made = [
        {"id": call["call_id"], "function": {"name": name, "arguments": json.dumps(USED)}}
        for call, name in zip(calls, ("read_file", "web.search"), strict=True)
    ]
    chat = [
        *STORY,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
         "tool_calls": made},
        *({"role": "tool", "tool_call_id": call["call_id"], "content": "ok"} for call in calls),
    ]  # fmt: skip
    same = server.chat(messages=chat, tools=CHAT_TOOLS, max_tokens=1).json["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] == same["prompt_tokens"]
    assert same["prompt_tokens_details"]["cached_tokens"] == same["prompt_tokens"] - 1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("script", "kinds", "text"),
    [
        ("Hm.</think>Once.", ["reasoning", "message"], "Hm.Once."),
        ("Hm.</think>", ["reasoning", "message"], "Hm."),
        ("</think>", ["message"], ""),
        (f"</think>{tools.OPEN}search", ["message"], f"{tools.OPEN}search"),
    ],
)
def test_items(server, monkeypatch, script, kinds, text, streams):
    """There is a message in an answer without calls; a call that is none is text."""
    with scripted(monkeypatch, server, script):
        answer = ask(server, tools=TOOLS, stream=streams)
    response = assembled(answer) if streams else answer.json
    assert [item["type"] for item in response["output"]] == kinds
    assert texts(response) == text and response["status"] == "completed"


def test_text_after_a_call():
    """Steps that were put together: the open call ends before text begins, no item is reopened;
    one that broke off is incomplete."""
    wish = responses.response({"input": "x"})
    shape = ResponseShape("glm", None, SamplingParams(), wish)
    first = [Event(CALLED, "run", 0, "a"), Event(ARGUMENTS, "{", 0)]
    rest = [Event(ARGUMENTS, "}", 0), Event(ENDED, "", 0), Event(CALLED, "run", 1, "b")]
    broken = [Event(tools.BROKEN, "", 1)]
    deltas = (Delta(calls=first), Delta(content="Hm.", calls=rest), Delta(calls=broken))
    found = [event for delta in deltas for event in shape.chunks(delta)]
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in items] == [
        ("function_call", "completed"), ("message", "completed"), ("function_call", "incomplete"),
    ]  # fmt: skip
    assert [item.get("arguments") for item in items] == ["{}", None, ""]


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs(server, streams):
    """Those of the text are the chat endpoint's."""
    wish = {"temperature": 0, "reasoning": {"effort": "none"}}
    answer = ask(server, **wish, stream=streams, max_output_tokens=9, include=[LOGPROBS],
                 top_logprobs=2)  # fmt: skip
    response = assembled(answer) if streams else answer.json
    chat = server.chat(max_tokens=9, logprobs=True, top_logprobs=2, reasoning_effort="none")
    (message,) = response["output"]
    assert message["content"][0]["logprobs"] == chat.json["choices"][0]["logprobs"]["content"]
    assert len(message["content"][0]["logprobs"]) == 9


@pytest.mark.parametrize("schema", [None, {"properties": {"line": {"enum": [7]}}}])
def test_an_answer_in_json(server, schema):
    """text.format: the text is an object, or what keeps to the schema; as the chat endpoint's."""
    form: dict[str, Any] = {"type": "json_object"}
    same = form
    if schema:
        form = {"type": "json_schema", "name": "x", "schema": schema}
        same = {"type": "json_schema", "json_schema": {"schema": schema}}
    wish = {"temperature": 0, "reasoning": {"effort": "none"}, "max_output_tokens": 60}
    answer = ask(server, text={"format": form}, **wish).json
    chat = server.chat(response_format=same, reasoning_effort="none", max_tokens=60)
    assert texts(answer) == chat.text and isinstance(json.loads(chat.text), dict)
    assert answer["text"] == {"format": form, "verbosity": "medium"}


# ---- errors and signs of life -------------------------------------------------------------------


def test_nothing_is_stored(server):
    """Who asks for a response of before is told so."""
    with closing(server.connect()) as sock:
        sock.sendall(request("DELETE", f"{PATH}/resp_1", None))
        deleted = read_answer(sock)
    found = server.get(f"{PATH}/resp_1"), server.get(f"{PATH}/resp_1/input_items")
    for answer in (*found, server.post(f"{PATH}/resp_1/cancel", None), deleted):
        assert (answer.status, answer.error["code"]) == (404, "not_stored")
    assert server.get(PATH).status == 405


def test_an_error_of_the_core(server, monkeypatch):
    """What goes wrong in a turn is a 500, or the stream's last event."""

    def broken(self, ids, want="all"):
        raise CoreError("a shard could not be read")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step_all", broken)
        answer = ask(server)
        *_, last = events(ask(server, stream=True))
    assert answer.status == 500
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {
        "code": "server_error", "message": answer.error["message"],
    }  # fmt: skip


def test_full():
    """A full queue is 429 with a time to come back; a server that ends fails its streams."""
    with serving(open_engine(queue="0", conversations="1")) as small:
        sock = small.connect()
        sock.sendall(request("POST", PATH, {"input": LONG, "stream": True}))
        wait_for(lambda: small.service.scheduler.active == 1)
        answer = ask(small)
        assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
        small.service.scheduler.close()
        with closing(sock):
            assert events(read_answer(sock))[-1]["response"]["error"]["code"] == "server_error"


def test_signs_of_life(server, monkeypatch):
    """While a prompt is read, events come that clients know, for some wait only so long."""
    monkeypatch.setattr(stream, "SILENCE", 0.001)
    monkeypatch.setattr(stream, "PACE", 0.0)
    answer = ask(server, stream=True, input=LONG, max_output_tokens=1, temperature=0)
    kinds = [event["type"] for event in events(answer)]
    assert kinds.count("response.in_progress") > 2 and b"prompt tokens read" in answer.body
    assert texts(assembled(answer)) == offline(server.engine, [{**STORY[0], "content": LONG}], 1)
