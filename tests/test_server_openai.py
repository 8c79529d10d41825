"""The official `openai` client against the server, a coding agent's long request included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from serving import STORY, Serving, add_tags, glm_model, offline, open_engine, scripted, serving

from colibri import turn as turns
from colibri.server import tools

if TYPE_CHECKING:  # importing it takes a second, in every process that collects tests
    import openai

MODEL = "colibri-demo"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something, with care and attention. " * 4,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where."},
                    "text": {"type": "string"},
                    "line": {"type": "integer"},
                },
                "required": ["path"],
            },
            "strict": True,
        },
    }
    for name in ("read_file", "write_file", "edit_file", "list_files", "search", "run")
]


@pytest.fixture(scope="module")
def agent(demo_path, tmp_path_factory) -> Iterator[Serving]:
    """The demo with room for 16,384 tokens and GLM-5.2's own template, which shows tools."""
    target = tmp_path_factory.mktemp("agent") / "model"
    kinds = ["full", *["shared"] * 5]  # one indexer and few keys: a long prompt in seconds
    glm_model(demo_path, target, max_position_embeddings=16384, index_topk=64, indexer_types=kinds)
    add_tags(target)
    engine = open_engine(model=str(target), conversations="2", model_id=MODEL)
    with serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def client(agent) -> openai.OpenAI:
    """The client, as anyone sets it up."""
    import openai

    return openai.OpenAI(base_url=f"{agent.url}/v1", api_key="none", max_retries=0, timeout=120)


def said(part: Any) -> str:
    """Reasoning and content of a message or a delta."""
    return (getattr(part, "reasoning_content", None) or "") + (part.content or "")


def history(repeat: int) -> list[dict]:
    """A coding agent's conversation: instructions, files read, edits made."""
    code = Path(turns.__file__).read_text()[:4900]
    messages: list[dict] = [
        {"role": "system", "content": "You are a coding agent. Use the tools."},
        {"role": "user", "content": [{"type": "text", "text": "Make the tests pass."}]},
    ]
    for i in range(repeat):
        arguments = json.dumps({"path": f"src/turn{i}.py", "line": i})
        call = {
            "id": f"call_{i}", "type": "function",
            "function": {"name": "read_file", "arguments": arguments},
        }  # fmt: skip
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": code})
    return messages


def test_chat(agent, client):
    """Messages in, text out, streamed and not; the model list names what to ask for."""
    assert [m.id for m in client.models.list()] == [MODEL]
    whole = client.chat.completions.create(
        model=MODEL, messages=STORY, temperature=0, max_tokens=40, extra_body={"top_k": 0}
    )
    text = offline(agent.engine, STORY, 40)
    assert said(whole.choices[0].message) == text
    assert whole.usage.completion_tokens == 40
    stream = client.chat.completions.create(
        model=MODEL, messages=STORY, temperature=0, max_tokens=40, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert "".join(said(c.choices[0].delta) for c in chunks) == text
    assert last.usage.completion_tokens == 40


@pytest.mark.parametrize("thinking", [True, False, None])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_apart(agent, client, monkeypatch, thinking, stream):
    """With thinking on the answer begins as reasoning, with it off as content (B-6 72)."""
    closed = "" if thinking is False else "Let me see.</think>"
    body = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    with scripted(monkeypatch, agent, closed + "Hello."):
        result = client.chat.completions.create(
            model=MODEL, messages=STORY, stream=stream, extra_body=body
        )
        parts = [c.choices[0].delta for c in result] if stream else [result.choices[0].message]
    reasoning = "".join(getattr(p, "reasoning_content", None) or "" for p in parts)
    assert "".join(p.content or "" for p in parts) == "Hello."
    assert reasoning == ("" if thinking is False else "Let me see.")


def test_agent_request(agent, client):
    """Thousands of tokens of instructions, tools and results: read, answered, read again fast."""
    messages = history(1)
    asked = {"model": MODEL, "messages": messages, "tools": TOOLS, "tool_choice": "auto",
             "parallel_tool_calls": True, "temperature": 0, "max_tokens": 24}  # fmt: skip
    first = client.chat.completions.create(**asked)
    assert 3_000 < first.usage.prompt_tokens < 4_500 and first.usage.completion_tokens > 0
    again = client.chat.completions.create(**asked, stream=True)
    text = "".join(said(c.choices[0].delta) for c in again)
    assert text == said(first.choices[0].message)
    follow = [*messages, {"role": "assistant", "content": "Done."}, *STORY]
    third = client.chat.completions.create(**(asked | {"messages": follow, "max_tokens": 1}))
    assert third.usage.prompt_tokens_details.cached_tokens > 3_000


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(agent, client, monkeypatch, stream):
    """Content, then two calls with text and numbers as arguments, and back into the history."""
    written = "".join(
        f"{tools.OPEN}{name}{tools.KEY}path{tools.KEY_END}{tools.VALUE}a {name}.py{tools.VALUE_END}"
        f"{tools.KEY}line{tools.KEY_END}{tools.VALUE}7{tools.VALUE_END}{tools.CLOSE}"
        for name in ("read_file", "search")
    )
    asked = {"model": MODEL, "messages": STORY, "tools": TOOLS}
    with scripted(monkeypatch, agent, f"Hm.</think>I look.\n{written}"):
        if stream:
            with client.chat.completions.stream(**asked) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**asked).choices[0]
    message = choice.message
    assert (message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert [c.function.name for c in message.tool_calls] == ["read_file", "search"]
    for call in message.tool_calls:
        wanted = {"path": f"a {call.function.name}.py", "line": 7}
        assert json.loads(call.function.arguments) == wanted and call.type == "function"
    results = [{"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in message.tool_calls]
    # The client's helper adds what it parsed; users send its message back as it is.
    answer = message.model_copy(deep=True)
    answer.tool_calls[0].function.parsed_arguments = {"path": "a read_file.py", "line": 7}
    client.chat.completions.create(
        **(asked | {"messages": [*STORY, answer, *results], "max_tokens": 1})
    )


def test_one_call_at_a_time(agent, client, monkeypatch):
    """parallel_tool_calls false ends the answer with its first call."""
    two = f"{tools.OPEN}run{tools.CLOSE}" * 2
    with scripted(monkeypatch, agent, f"</think>{two}"):
        result = client.chat.completions.create(
            model=MODEL, messages=STORY, tools=TOOLS, parallel_tool_calls=False
        )
    assert len(result.choices[0].message.tool_calls) == 1
    assert result.choices[0].finish_reason == "tool_calls"


def test_call_cut_off(agent, client, monkeypatch):
    """A call that breaks off is shown as it was written, not dropped (B-6 71)."""
    cut = f"{tools.OPEN}write_file{tools.KEY}text{tools.KEY_END}{tools.VALUE}half"
    with scripted(monkeypatch, agent, "</think>" + cut):
        result = client.chat.completions.create(model=MODEL, messages=STORY, tools=TOOLS)
    message = result.choices[0].message
    assert (message.content, message.tool_calls) == (cut, None)


def test_call_cut_off_in_a_stream(agent, client, monkeypatch):
    """What was streamed of it can be sent back, with the error that a framework makes of it."""
    cut = f"{tools.OPEN}write_file{tools.KEY}text{tools.KEY_END}{tools.VALUE}half"
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "max_tokens": 1}
    with scripted(monkeypatch, agent, "</think>" + cut):
        stream = client.chat.completions.create(messages=STORY, stream=True, **asked)
        deltas = [d for chunk in stream for d in chunk.choices[0].delta.tool_calls or []]
    arguments = "".join(d.function.arguments for d in deltas)
    assert arguments == '{"text": "half'
    function = {"name": "write_file", "arguments": arguments}
    call = {"id": deltas[0].id, "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": deltas[0].id, "content": "Error: no JSON"}
    history = [*STORY, {"role": "assistant", "tool_calls": [call]}, result]
    client.chat.completions.create(messages=history, **asked)


def test_forced_call(agent, client, monkeypatch):
    """A call that must be made is begun in the prompt; its name is the one asked for."""
    seen = []
    real = agent.engine.answer
    monkeypatch.setattr(
        agent.engine, "answer", lambda p, *a, **k: seen.append(p) or real(p, *a, **k)
    )
    rest = f"{tools.KEY}path{tools.KEY_END}{tools.VALUE}x{tools.VALUE_END}{tools.CLOSE}"
    choice = {"type": "function", "function": {"name": "search"}}
    with scripted(monkeypatch, agent, rest):
        result = client.chat.completions.create(
            model=MODEL, messages=STORY, tools=TOOLS, tool_choice=choice
        )
    (call,) = result.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("search", '{"path": "x"}')
    tokenizer = agent.engine.tokenizer
    end = tokenizer.encode_template("<think></think><tool_call>") + tokenizer.encode("search")
    assert seen[0].ids[-len(end) :] == end


def test_characters_over_tokens(agent, client, monkeypatch):
    """A character split over tokens arrives whole, in content and in arguments (B-1 1, 5)."""
    written = f"{tools.OPEN}run{tools.KEY}path{tools.KEY_END}{tools.VALUE}北🦊{tools.VALUE_END}"
    with scripted(monkeypatch, agent, f"</think>ď🦊 {written}{tools.CLOSE}"):
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=STORY, tools=TOOLS, stream=True, extra_body={"min_p": 0}
            )
        )
    deltas = [c.choices[0].delta for c in chunks]
    assert "".join(d.content or "" for d in deltas) == "ď🦊"
    calls = [t.function.arguments or "" for d in deltas for t in d.tool_calls or []]
    assert json.loads("".join(calls)) == {"path": "北🦊"}
    assert not any("�" in (d.content or "") for d in deltas)


def test_half_a_character_at_the_limit(agent, client, monkeypatch):
    """max_tokens inside a character: 200, valid JSON, a replacement character (B-1 3)."""
    half = agent.engine.tokenizer.encode("🦊")[:1]
    monkeypatch.setattr(turns, "spec_decode", lambda *a, **k: _yield(half))
    result = client.completions.create(model=MODEL, prompt="x", max_tokens=1)
    assert result.choices[0].text == "�" and result.choices[0].finish_reason == "length"


def _yield(ids: list[int]):
    yield ids
    return "length"


def test_completions(agent, client):
    """Text or token ids continued; log-probabilities in the older shape add up."""
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 12, "logprobs": 2}
    first = client.completions.create(prompt="Once upon", **asked).choices[0]
    ids = agent.engine.raw("Once upon").ids
    assert client.completions.create(prompt=ids, **asked).choices[0].text == first.text
    assert "".join(first.logprobs.tokens) == first.text
    assert first.logprobs.text_offset[1] == len(first.logprobs.tokens[0])
    assert len(first.logprobs.top_logprobs) == len(first.logprobs.token_logprobs) == 12
    stream = client.completions.create(prompt="Once upon", stream=True, **asked)
    parts = [c.choices[0] for c in stream]
    assert "".join(p.text for p in parts) == first.text
    offsets = [o for p in parts if p.logprobs for o in p.logprobs.text_offset]
    assert offsets == first.logprobs.text_offset


def test_seeds(client):
    """The same seed is the same text, another one another; none is drawn and told."""
    asked = {"model": MODEL, "messages": STORY, "temperature": 1.0, "max_tokens": 24}

    def text(**more: int) -> str:
        return said(client.chat.completions.create(**asked, **more).choices[0].message)

    assert text(seed=5) == text(seed=5) != text(seed=6)
    drawn = client.chat.completions.create(**asked)
    assert text(seed=drawn.seed) == said(drawn.choices[0].message)


def test_errors_are_the_clients_own(client):
    """Refusals arrive as the exceptions that users of the client catch."""
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=STORY, n=2)
    assert caught.value.param == "n" and caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=STORY)
    with pytest.raises(openai.BadRequestError) as caught:
        messages = [{"role": "user", "content": "fox " * 20000}]
        client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    assert caught.value.code == "context_length_exceeded" and "16384" in caught.value.message


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "legs": {"enum": [2, 4]}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [True, None])
def test_json_by_a_schema(client, strict, stream):
    """The answer is JSON that keeps to the schema, whole or in pieces."""
    named = {"name": "animal", "schema": SCHEMA} | ({"strict": strict} if strict else {})
    form = {"type": "json_schema", "json_schema": named}
    asked = {"model": MODEL, "messages": STORY, "seed": 3, "response_format": form}
    if stream:
        pieces = client.chat.completions.create(**asked, stream=True)
        text = "".join(said(c.choices[0].delta) for c in pieces if c.choices)
    else:
        text = said(client.chat.completions.create(**asked).choices[0].message)
    assert sorted(json.loads(text)) == ["legs", "name"] and json.loads(text)["legs"] in (2, 4)


def test_json_by_a_pattern(client):
    """Texts match their pattern, which is what OpenAI's strict schemas may have."""
    import jsonschema

    code = {"type": "string", "pattern": r"^[A-Z]{2}-\d{4}( \(.{1,8}\))?$"}
    schema = SCHEMA | {"properties": {"code": code}, "required": ["code"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    for seed in range(4):
        answered = client.chat.completions.create(
            model=MODEL, messages=STORY, seed=seed, response_format=form
        )
        jsonschema.validate(json.loads(said(answered.choices[0].message)), schema)


def test_a_schema_of_any_object(client):
    """A json_object takes a schema too, as other servers do and instructor asks for."""
    form = {"type": "json_object", "schema": SCHEMA}
    answered = client.chat.completions.create(
        model=MODEL, messages=STORY, seed=3, response_format=form
    )
    assert sorted(json.loads(said(answered.choices[0].message))) == ["legs", "name"]


def test_json_of_any_kind(client):
    """json_object is any object, and so is a schema that is left out."""
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x"}}):
        answered = client.chat.completions.create(
            model=MODEL, messages=STORY, max_tokens=200, response_format=form, temperature=0
        )
        assert answered.choices[0].finish_reason == "stop"
        assert isinstance(json.loads(said(answered.choices[0].message)), dict)


@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        ({"type": "grammar"}, "response_format.type", "it takes text, json_object, json_schema"),
        ({"type": "json_schema"}, "response_format.json_schema", "is missing"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "text"}}},
         "response_format.json_schema.schema", 'schema.type is "text"; there are string'),
        ({"type": "json_object", "schema": {"type": "text"}},
         "response_format.schema", 'schema.type is "text"; there are string'),
        ({"type": "json_schema", "json_schema": {"strict": True, "schema": {"not": {}}}},
         "response_format.json_schema.schema", "schema.not cannot be kept to; leave it out."),
    ],
)  # fmt: skip
def test_forms_that_are_refused(client, form, param, words):
    """What is no form, or cannot be kept to, is refused by its place."""
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=STORY, response_format=form)
    assert caught.value.param == param and words in caught.value.message


def test_a_form_that_cannot_be_followed(client):
    """A form that can be read in too many ways is the client's mistake, and ends no more."""
    import openai

    many = [{"type": "string", "minLength": n} for n in range(6000)]
    form = {"type": "json_schema", "json_schema": {"strict": True, "schema": {"anyOf": many}}}
    with pytest.raises(openai.BadRequestError, match="in too many ways; make it simpler"):
        client.chat.completions.create(model=MODEL, messages=STORY, response_format=form)
    asked = {"model": MODEL, "messages": STORY, "max_tokens": 5}
    assert client.chat.completions.create(**asked).usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", " /v1/chat/completions is: look at the client's base URL."),
        ("/v1/v1/messages", " /v1/messages is: look at the client's base URL."),
        ("/responses", " /v1/responses is: look at the client's base URL."),
        ("/v1/embeddings", ""),
        ("/health", ""),
    ],
)
def test_what_was_meant(agent, path, hint):
    """The usual mistakes of who sets a client up are told, and what is right."""
    answer = agent.post(path, {})
    told = (
        f"{path} is not there for POST." if answer.status == 404 else f"{path} does not take POST."
    )
    assert answer.error["message"] == told + hint
