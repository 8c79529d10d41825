"""The server under raw sockets: what clients get wrong or leave behind, and who waits for whom."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from contextlib import closing

import pytest
from serving import (
    LIMIT,
    STORY,
    Serving,
    offline,
    open_engine,
    read_answer,
    request,
    serving,
    wait_for,
)
from starlette.datastructures import Headers

from colibri.knobs import Settings
from colibri.server import stream
from colibri.server.guard import Guard
from colibri.server.refusal import Refusal
from colibri.session import Session

LONG = [{"role": "user", "content": "Tell me. " * 200}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    """The demo model behind HTTP."""
    with serving(open_engine()) as running:
        yield running


@pytest.fixture(autouse=True)
def _alive(server):
    """After every test the server is idle and still answers."""
    yield
    server.settle()
    assert server.chat(max_tokens=1).status == 200


def start(server: Serving, **fields: object) -> socket.socket:
    """Send a streaming request and leave the answer unread."""
    sock = server.connect()
    body = {"messages": STORY, "temperature": 0, "stream": True, **fields}
    sock.sendall(request("POST", CHAT, body))
    return sock


def read_until(sock: socket.socket, word: bytes) -> bytes:
    """Read up to and including a word."""
    data = b""
    while word not in data:
        piece = sock.recv(4096)
        assert piece, f"{word!r} not in {data!r}"
        data += piece
    return data


def slam(sock: socket.socket) -> None:
    """Close with a reset, as a killed client's kernel may."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# ---- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream_it", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 7}])
def test_text_is_that_of_run(server, command, stream_it, sampling):
    """The text is `colibri run`'s, greedy and sampled, streamed or not, with drafts on."""
    flags = {"temperature": "--temp", "seed": "--seed"}
    given = [str(w) for k, v in ({"temperature": 0} | sampling).items() for w in (flags[k], v)]
    run = command.answer("-p", STORY[0]["content"], *given)
    answer = server.chat(**sampling, stream=stream_it)
    text = answer.delta("content") if stream_it else answer.text
    assert text == run["text"] and len(text) > 100


@pytest.mark.parametrize("mode", ["rejection", "coupled", "probabilistic"])
def test_every_mode_is_that_of_run(command, mode):
    """In each mode a seed's text is run's, the first time and from a slot that others used."""
    prompt = STORY[0]["content"]
    run = command.answer("-p", prompt, "--mode", mode, "--seed", "3", "--temp", "0.9")
    with serving(open_engine(mode=mode, conversations="1")) as other:
        for _ in range(2):
            assert other.chat(temperature=0.9, seed=3).text == run["text"]
            other.chat(messages=[{"role": "user", "content": "Who are you?"}], temperature=1)


def test_drafts_are_on(server):
    """Speculation is on in the server, and usage tells of it."""
    with serving(open_engine(draft="3")) as drafting:
        answer = drafting.chat()
    assert answer.text == server.chat().text
    details = answer.json["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20 < answer.json["usage"]["completion_tokens"]


def test_events(server):
    """Role first and once, one finish reason, usage when asked for, [DONE] at the end."""
    answer = server.chat(stream=True, max_tokens=4, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.events
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    deltas = [event["choices"][0] for event in events]
    assert [d["delta"].get("role") for d in deltas[:2]] == ["assistant", None]
    assert [d["finish_reason"] for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1


def test_prefix_is_reused(server):
    """A second turn runs only what is new and answers as if it ran everything."""
    first = server.chat()
    messages = [*STORY, first.json["choices"][0]["message"], {"role": "user", "content": "More."}]
    for field in ("refusal", "logprobs"):
        messages[1].pop(field, None)
    second = server.chat(messages=messages)
    cached = second.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > first.json["usage"]["total_tokens"] - 8
    assert second.text == offline(server.engine, messages)


# ---- limits (B-6: 62, 63, 64) -------------------------------------------------------------------


@pytest.mark.parametrize("stream_it", [False, True])
def test_too_long(server, stream_it):
    """Refused with both numbers, before any 200, in words by which frameworks know the reason."""
    messages = [{"role": "user", "content": "fox " * 1500}]
    count = len(server.engine.chat(messages).ids)
    answer = server.chat(messages=messages, stream=stream_it)
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
    numbers = f"prompt has {count} tokens and the context holds 1024"
    assert numbers in answer.error["message"] and count > 1500
    for word in ("prompt is too long", "exceed context limit"):
        assert word in answer.error["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_far_too_long(server, path, monkeypatch):
    """Megabytes that cannot fit are refused with their size, and nothing of them is encoded."""
    text = "fox " * 800_000
    field = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.tokenizer, "_core", None)
        answer = server.post(path, field)
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
    assert answer.error["param"] == next(iter(field))
    numbers = r"prompt has 32000\d\d bytes, at least \d{6} tokens, and the context holds 1024"
    assert re.search(numbers, answer.error["message"])


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [None, 1e9, 10**12, 100000])
def test_missing_and_huge_limits(server, name, value):
    """No limit, or one beyond the room, is the room."""
    assert server.chat(**{name: value}).text == offline(server.engine, STORY)


@pytest.mark.parametrize("value", [0, -1, "abc", 1.5, [], True])
def test_bad_limits(server, value):
    """Anything else that is no whole number from 1 is refused by name."""
    answer = server.chat(max_tokens=value)
    assert answer.status == 400 and answer.error["param"] == "max_tokens"
    assert "expected a whole number from 1" in answer.error["message"]


def test_small_prompt_huge_limit(server):
    """An answer that fills the context ends with "length", not with an error."""
    prompt = "Once upon a time, " * 160
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 10**6}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200 and answer.json["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer.json["usage"]["total_tokens"] <= 1024


def test_a_long_name_is_cut(server):
    """The name of a field that is not supported comes back in brief, however long it is."""
    answer = server.chat(**{"x" * 100_000: 1})
    assert answer.status == 400 and answer.error["param"] == "x" * 57 + "..."
    assert len(answer.error["message"]) < 200


# ---- malformed requests (65, 77) ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "not valid JSON"),
        (b"{:", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b'"text"', "expected a JSON object"),
        (b"\xff{}", "not UTF-8"),
        (b'{"messages": NaN}', "not a JSON number"),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested"),
        (b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}", "nested"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        ({}, "messages is missing"),
        ({"messages": []}, "messages is []; expected a list that is not empty"),
        ({"messages": "hi"}, "expected a list"),
        ({"messages": [STORY]}, "messages[0] is"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "god", "content": "x"}]}, "expected one of system"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content is"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "assistant's"),
        ({"messages": STORY, "temperature": "hot"}, "temperature is"),
        ({"messages": STORY, "temperature": 1e400}, "not valid JSON"),
        ({"messages": STORY, "top_p": 1.5}, "top_p is 1.5; expected a number from 0 to 1"),
        ({"messages": STORY, "stop": [""]}, "stop[0]"),
        ({"messages": STORY, "stop": ["a"] * 17}, "at most 16"),
        ({"messages": STORY, "stream": "yes"}, "true or false"),
        ({"messages": STORY, "top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"messages": STORY, "stream_options": {}}, "stream_options needs stream"),
        ({"messages": STORY, "tool_choice": "required"}, "there are no tools"),
        ({"messages": STORY, "reasoning_effort": "low", "chat_template_kwargs":
          {"reasoning_effort": "high"}}, "reasoning_effort is given in more than one way"),
        ({"messages": STORY, "reasoning_effort": "none", "thinking": {"type": "enabled"}},
         "thinking is given in more than one way"),
        ({"messages": STORY, "thinking": {"type": "enabled", "clear_thinking": True},
          "chat_template_kwargs": {"clear_thinking": False}},
         "clear_thinking is given in more than one way"),
        ({"messages": STORY, "model": "gpt-4"}, "this server has 'colibri-demo'"),
    ],
)  # fmt: skip
def test_malformed(server, body, word):
    """Bad JSON, wrong types and contradictions are refused with the reason."""
    if isinstance(body, dict) and body.get("temperature") == 1e400:
        body, word = (
            b'{"messages": [{"role": "user", "content": ""}], "temperature": 1e400}',
            "temp",
        )
    answer = server.post(CHAT, body)
    assert answer.status in (400, 404) and word in answer.error["message"]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("thinking", {"thinking": {"type": "enabled"}}),
        ("reasoning_effort", {"reasoning_effort": "none"}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
def test_a_switch_that_is_missing(server, field, body):
    """A template without a switch for reasoning: the field that was sent is named."""
    answer = server.chat(**body)
    assert answer.status == 400 and answer.error["param"] == field
    assert f"leave {field} out" in answer.error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("logit_bias", {"5": 1}), ("presence_penalty", 0.5), ("frequency_penalty", -1),
        ("modalities", ["audio"]), ("functions", []), ("best_of", 3),
        ("audio", {}), ("top_a", 1), ("store", True), ("suffix", "x"), ("prediction", {}),
    ],
)  # fmt: skip
def test_unsupported_fields(server, field, value):
    """What cannot be honoured is refused by name; null and neutral values pass."""
    answer = server.chat(**{field: value})
    assert answer.status == 400 and field in answer.error["param"]
    assert answer.error["code"] == "unsupported_parameter"
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {},
               "response_format": {"type": "text"}, "store": False, "stop": None,
               "prediction": None, "no_such_field": None, "logprobs": False,
               "top_logprobs": 0}  # fmt: skip
    assert server.chat(**neutral, max_tokens=1).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"POST / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: " + b"b" * 200000,
    ],
)  # fmt: skip
def test_what_is_no_http(server, data):
    """Bytes that are no request get a 4xx or a closed connection."""
    with closing(server.connect()) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = sock.recv(4096)
        except OSError:
            answer = b""
    assert not answer or answer.split()[1].startswith(b"4")


def test_body_that_never_comes(server):
    """A client that leaves in the middle of its body costs nothing."""
    with closing(server.connect()) as sock:
        whole = request("POST", CHAT, {"messages": STORY})
        sock.sendall(whole[:-10])
    assert server.service.scheduler.active == 0


def test_a_length_that_is_too_much(server):
    """A body that is promised to be too long is refused before it is sent."""
    with closing(server.connect()) as sock:
        fields = f"host: localhost\r\ncontent-length: {10**12}\r\ncontent-type: application/json"
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\n{fields}\r\n\r\n".encode())
        assert b" 413 " in read_until(sock, b"\r\n")


def test_odd_messages(server):
    """Only a system message, whitespace, empty text: answered, not refused."""
    for messages in (
        [{"role": "system", "content": "Be kind."}],
        [{"role": "user", "content": "  "}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    ):
        answer = server.chat(messages=messages, max_tokens=4)
        assert answer.status == 200


def test_markup_stays_text(server):
    """Control tokens in what a user wrote reach the model as text."""
    messages = [{"role": "user", "content": "Repeat: </think> <|user|> <tool_call>"}]
    assert server.chat(messages=messages, max_tokens=8).text == offline(server.engine, messages, 8)


def test_lone_surrogates(server):
    """JSON may hold half a character; it becomes a replacement, in the answer and in errors."""
    body = json.dumps({"messages": [{"role": "user", "content": "a\ud800"}], "max_tokens": 1})
    assert server.post(CHAT, body.encode()).status == 200
    body = json.dumps({"messages": STORY, "\udfff": 1})
    assert server.post(CHAT, body.encode()).status == 400


# ---- clients that leave (67, 68) ----------------------------------------------------------------


def test_leaving_in_prefill(server):
    """A client gone while its prompt is read ends the turn between two layers."""
    ends = server.service.metrics.text
    for _ in range(3):
        before = ends().count(b'finish="gone"')
        sock = start(server, messages=LONG)
        read_until(sock, b": accepted")
        slam(sock)
        server.settle()
        assert before <= ends().count(b'finish="gone"')
    assert b'colibri_requests_total{finish="gone"}' in ends()


def test_leaving_ends_a_prompt_at_once(server, monkeypatch):
    """The chunk that runs when a client leaves is not finished, and none is begun after it."""
    reached, left = threading.Event(), threading.Event()
    step, cancel = Session.step_all, Session.cancel

    def slow_step(self, ids, want="all"):
        if self.length == 128:
            reached.set()
            assert left.wait(LIMIT)
        return step(self, ids, want)

    def noticed(self, on=True):
        cancel(self, on)
        if on:
            left.set()

    with serving(open_engine()) as other, monkeypatch.context() as patch:
        patch.setattr(Session, "step_all", slow_step)
        patch.setattr(Session, "cancel", noticed)
        sock = start(other, messages=LONG)
        assert reached.wait(LIMIT)
        slam(sock)
        other.settle()
        assert other.service.scheduler.kept == [128]


def test_leaving_midway(server):
    """Killed in the middle of a stream: the next answer is whole and only its own."""
    for _ in range(3):
        sock = start(server)
        read_until(sock, b"Once")
        slam(sock)
        assert server.chat().text == offline(server.engine, STORY)


def test_leaving_without_stream(server):
    """A client that waits for a whole answer may leave too."""
    sock = server.connect()
    sock.sendall(request("POST", CHAT, {"messages": LONG, "max_tokens": 300}))
    wait_for(lambda: server.service.scheduler.active)
    slam(sock)
    server.settle()


def test_leaving_the_queue(server):
    """Those who leave while they wait are forgotten."""
    socks = [start(server, messages=LONG, max_tokens=200) for _ in range(12)]
    wait_for(lambda: server.service.scheduler.waiting)
    for sock in socks:
        slam(sock)
    server.settle()


# ---- others wait for nobody ---------------------------------------------------------------------


def test_slow_reader(server):
    """A client that reads nothing keeps neither the engine nor another client waiting."""
    socks = [start(server, logprobs=True, top_logprobs=8) for _ in range(3)]
    server.settle()  # their answers are made although nobody reads
    assert server.chat().text == offline(server.engine, STORY)
    for sock in socks:
        with closing(sock):
            assert read_answer(sock).delta("content") == offline(server.engine, STORY)


def test_queue_is_bounded(server):
    """More than the queue holds are refused with 429 and a time to come back."""
    with serving(open_engine(queue="1", conversations="1")) as small:
        socks = [start(small, messages=LONG, max_tokens=400)]
        wait_for(lambda: small.service.scheduler.active == 1)
        socks.append(start(small, max_tokens=1))
        wait_for(lambda: small.service.scheduler.waiting == 1)
        answer = small.chat()
        assert answer.status == 429 and answer.headers["retry-after"] == "5"
        assert answer.error["code"] == "queue_full"
        for sock in socks:
            slam(sock)
        small.settle()


def test_signs_of_life(server, monkeypatch):
    """While nothing comes, comments tell how far it is; events are as ever."""
    monkeypatch.setattr(stream, "SILENCE", 0.001)
    monkeypatch.setattr(stream, "PACE", 0.0)
    answer = server.chat(stream=True, messages=LONG, max_tokens=20)
    assert re.search(rb"\n: (\d+ of \d+ prompt tokens read|waiting for others)\n\n", answer.body)
    assert answer.delta("content") == offline(server.engine, LONG, 20)


# ---- stop strings (69) --------------------------------------------------------------------------


@pytest.mark.parametrize("stream_it", [False, True])
@pytest.mark.parametrize("stop", [" time, there", ["\n"], ["\n", "fox named"], ["zebra"]])
def test_stop_strings(server, stop, stream_it):
    """Cut before the first stop, over token borders, in both ways of answering."""
    whole = offline(server.engine, STORY)
    stops = [stop] if isinstance(stop, str) else stop
    found = [whole.find(s) for s in stops if s in whole]
    answer = server.chat(stop=stop, stream=stream_it)
    text = answer.delta("content") if stream_it else answer.text
    assert text == whole[: min(found)] if found else text == whole


def test_one_stop_policy(server):
    """Role tokens end an answer, tool calls do not (B-6 70); the stops are those of run."""
    id_of, stops = server.engine.tokenizer.id_of, server.engine.stops
    assert {id_of(t) for t in ("<|user|>", "<|observation|>", "<|endoftext|>")} <= stops
    assert id_of("<tool_call>") not in stops
    for seed in (1, 2):
        assert "<|" not in server.chat(max_tokens=400, seed=seed, temperature=1.2).text


def test_stops_count_the_same_with_drafts(server):
    """Tokens and text up to a stop do not depend on what was drafted beyond it."""
    usages = []
    for draft in ("0", "7"):
        with serving(open_engine(draft=draft)) as other:
            answer = other.chat(stop="named")
            usages.append((answer.text, answer.json["usage"]["completion_tokens"]))
    assert usages[0] == usages[1]


# ---- log-probabilities (39) ---------------------------------------------------------------------


def test_logprobs_do_not_depend_on_drafts(server):
    """The target model's own log-probabilities, bit for bit, with and without drafts."""
    found = []
    for draft in ("0", "7"):
        with serving(open_engine(draft=draft)) as other:
            answer = other.chat(logprobs=True, top_logprobs=5, max_tokens=60)
            found.append(answer.json["choices"][0]["logprobs"])
    assert found[0] == found[1] and len(found[0]["content"]) == 60
    for entry in found[0]["content"]:
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0  # greedy: the best


# ---- who is let in (75) -------------------------------------------------------------------------


def test_host_header(server):
    """Another name for this machine is refused with the flag that allows it."""
    for host in (
        "localhost",
        "127.0.0.1:8000",
        "[::1]:1",
        "10.0.0.5",
        "x.localhost",
        "LOCALHOST:1",
        "localhost.",
        "localhost.:8000",
        "x.localhost.:1",
    ):
        assert server.get("/health", host=host).status == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", ".:8000"):
        answer = server.get("/health", host=host)
        assert answer.status == 403 and "--allow-host" in answer.error["message"]


def test_origin(server):
    """Pages of other sites are refused, the server's own is not."""
    own = server.get("/v1/models", origin="http://localhost", host="localhost")
    assert own.status == 200 and "access-control-allow-origin" not in own.headers
    for origin in ("https://evil.example", "null", "http://[", "http://[::1", "//["):
        answer = server.get("/v1/models", origin=origin)
        assert answer.status == 403 and "--allow-origin" in answer.error["message"]


def test_key_hosts_and_origins():
    """With a key everything but the page and /health needs it; allowed names and sites get in."""
    flags = {"api_key": "s3cret", "allow_host": "box.lan", "allow_origin": "https://app.example"}
    with serving(open_engine(**flags)) as guarded:
        assert guarded.get("/health").status == guarded.get("/").status == 200
        for path in ("/v1/models", "/metrics", "/debug/state", "/openapi.json", "/nope"):
            answer = guarded.get(path)
            assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
        for wrong in ("Bearer", "Bearer x", "Basic s3cret", "s3cret", "Bearer s3crét"):
            assert guarded.get("/v1/models", authorization=wrong).status == 401
        assert guarded.chat().status == 401
        right = {"authorization": "Bearer s3cret"}
        assert guarded.get("/v1/models", host="box.lan:80", **right).status == 200
        answer = guarded.get("/v1/models", origin="https://app.example", **right)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        with closing(guarded.connect()) as sock:
            wanted = "authorization,content-type,x-stainless-os"
            named = {"access-control-request-headers": wanted}
            sock.sendall(request("OPTIONS", CHAT, None, origin="https://app.example", **named))
            preflight = read_answer(sock)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-headers"] == wanted


@pytest.mark.parametrize("key", ["schlüssel", "klíč", "à", "Å", "ключ\u00a0"])
def test_key_of_any_letters(key):
    """A key of any letters is known by its UTF-8, and by its Latin-1 if it has one; no other is."""
    guard = Guard.of(Settings.resolve({"api_key": key}, {}))
    forms = [key.encode()] + ([key.encode("latin-1")] if max(key) < "\u0100" else [])

    def check(sent: bytes) -> None:
        raw = [(b"host", b"localhost"), (b"authorization", b"Bearer " + sent)]
        guard.check("GET", "/v1/models", Headers(raw=raw))

    for form in forms:
        check(form)
        for wrong in (form[:-1], form + b"x", key.encode("utf-16-le"), b"\xff", b""):
            with pytest.raises(Refusal) as refused:
                check(wrong)
            assert refused.value.status == 401


# ---- the rest -----------------------------------------------------------------------------------


def test_other_paths(server):
    """Models, health, metrics, the description; what is not there is a 404 in the same shape."""
    assert server.get("/v1/models").json["data"][0]["id"] == "colibri-demo"
    assert server.get("/v1/models/colibri-demo").json["context_length"] == 1024
    assert server.get("/v1/models/other").error["code"] == "model_not_found"
    assert server.get("/health").json == {"status": "ok"}
    assert b"colibri_tokens_total" in server.get("/metrics").body
    assert server.get("/openapi.json").json["openapi"].startswith("3.")
    assert server.get("/nope").status == 404 and server.get("/nope").error
    assert server.get(CHAT).status == 405 and server.get(CHAT).error


def test_state(server):
    """What the page draws: receipts of turns, and the layers' experts."""
    server.get("/debug/state")
    server.chat()

    def ended() -> dict | None:
        turns = server.get("/debug/state").json["turns"]
        return next((t for t in turns[:1] if not t["running"] and t["answer_tokens"] > 50), None)

    wait_for(ended)
    state, turn = server.get("/debug/state").json, ended()
    assert turn["answer_tokens_per_second"] > 0
    assert sum(turn["segments"].values()) > 0 and turn["experts"]["used"] > 0
    rows = state["residency"]["rows"]
    assert len(rows) == 5 and all(len(row) == 32 for row in rows)


def test_state_of_slots():
    """With experts in slots of our own the map shows those in memory, the last used brightest."""
    with serving(open_engine(io="buffered")) as other:
        assert other.chat(max_tokens=8).status == 200
        other.get("/debug/state")
        wait_for(lambda: "9" in "".join(other.get("/debug/state").json["residency"]["rows"]))
        residency = other.get("/debug/state").json["residency"]
    resident = other.engine.model.resident()
    lit = sum(cell != "0" for row in residency["rows"] for cell in row)
    assert residency["kind"] == "resident" and lit == len(resident) > 0
    layer, expert = resident[0]
    assert residency["rows"][residency["layers"].index(layer)][expert] == "9"


def test_an_error_of_the_core(server, monkeypatch):
    """What goes wrong in one turn is that request's 500; the next one is answered."""
    from colibri.errors import CoreError

    real = Session.step_all

    def broken(self, ids, want="all"):
        if want == "all":
            raise CoreError("a shard could not be read")
        return real(self, ids, want)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step_all", broken)
        answer = server.chat()
        assert answer.status == 500 and answer.error["message"] == "a shard could not be read"
        events = server.chat(stream=True).events
        assert events[-1]["error"]["code"] == "engine_error"
    assert server.chat().text == offline(server.engine, STORY)


def test_shutting_down():
    """Those who are being answered when the server ends are told so."""
    with serving(open_engine(conversations="1")) as ending:
        sock = start(ending, messages=LONG, max_tokens=400)
        wait_for(lambda: ending.service.scheduler.active)
        other = start(ending)
        wait_for(lambda: ending.service.scheduler.waiting)
        ending.service.scheduler.close()
        for waiting in (sock, other):
            with closing(waiting):
                assert read_answer(waiting).events[-1]["error"]["code"] == "shutting_down"
        assert ending.chat().status == 503 and ending.get("/health").status == 503
