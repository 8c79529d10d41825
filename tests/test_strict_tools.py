"""Tools that are strict: whatever the model says, a call of one has arguments that are valid."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import jsonschema
import numpy as np
import pytest
from serving import STORY, Serving, add_tags, glm_model, open_engine, serving
from walks import any_schema, letters

from colibri.answer import MARK, TEXT, Piece, Prompt, Splitter
from colibri.arguments import Arguments, compile_arguments
from colibri.calls import CLOSE, KEY, KEY_END, OPEN, TAGS, VALUE, VALUE_END, letter
from colibri.errors import UsageError
from colibri.form import FormSampler, Guide
from colibri.grammar import Matcher
from colibri.json_grammar import answer
from colibri.knobs import Settings
from colibri.sampling import Sampler, SamplingParams
from colibri.schema import compile_schema
from colibri.server.asked import chat
from colibri.server.tools import ARGUMENTS, CALLED, ENDED, ToolParser
from colibri.tokenizer import Tokenizer

BOOK = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "seats": {"type": "integer", "minimum": 1, "maximum": 12},
        "kind": {"$ref": "#/$defs/Kind"},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "days": {"type": "array", "items": {"type": "string", "format": "date"}, "maxItems": 2},
    },
    "required": ["name", "seats", "kind"],
    "additionalProperties": False,
    "$defs": {"Kind": {"type": "string", "enum": ["table", "room", "12"]}},
}
NOTHING = {"type": "object", "maxProperties": 0}
TAG_OF = {letter(tag): tag for tag in TAGS}


def pieces_of(found: list[int]) -> Iterator[Piece]:
    """What a Splitter makes of these letters, where all that is text comes at once."""
    for tag, run in groupby(found, TAG_OF.get):
        if tag is None:
            yield Piece(TEXT, bytes(run).decode())
        else:
            yield from (Piece(MARK, tag) for _ in run)


def argue(arguments: Arguments, matcher: Matcher, seed: int) -> Any:
    """Arguments by chance, as their grammar has them and the parser reads them."""
    parser = ToolParser({"f": {}}, TAGS, "f", {"f": arguments})
    pieces = pieces_of(letters(matcher, seed))
    events = [event for piece in pieces for event in parser.push(piece)]
    assert (events[0].kind, events[-1].kind) == (CALLED, ENDED)
    return json.loads("".join(event.text for event in events[1:-1]))


PARAMETERS: dict[str, Any] = {
    "book": BOOK,
    "nothing": {},
    "required only": {"required": ["x", "y"], "additionalProperties": {"type": "number"}},
    "what is no text": {"properties": {
        "a": {"enum": [1, "1", "2", None, "null"]},
        "b": {"enum": [1.5, True, {"k": [1]}, "x", "\ud800"]},
        "c": {"type": ["string", "integer"], "maximum": 5}, "d": {"type": ["boolean", "null"]},
        "e": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "f": {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "number", "minimum": 300}]},
        "g": {"const": "null"}, "h": {"const": None}, "i": {"type": ["object", "string"]}, "j": {},
    }},
    "patterns": {"properties": {
        "a": {"pattern": r'^["\\<é]{1,3}\s[\w/]$'}, "b": {"type": "string", "pattern": "^<"},
        "c": {"items": {"type": "string", "pattern": r'^["\\\n]+$'}, "type": ["array", "string"]},
    }},
    "of itself": {"properties": {"name": {"type": "string"}, "inner": {"$ref": "#"},
                                 "no": False}},
    "by reference": {"$ref": "#/$defs/a", "$defs": {"a": BOOK | {"properties": {
        "name": {"minLength": 1}, "seats": True, "kind": {"allOf": [{"type": "string"}]}}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_any_walk_is_valid(name):
    """Whatever the grammar allows is read as arguments that are valid by the schema."""
    schema = PARAMETERS[name]
    arguments, seen = compile_arguments(schema, "here"), set()
    matcher, check = Matcher(arguments.node), jsonschema.Draft202012Validator(schema)
    for seed in range(80):
        found = argue(arguments, matcher, seed)
        check.validate(found)
        assert set(found) <= {*schema.get("properties", BOOK["properties"]), "x", "y"}
        seen.add(json.dumps(found))
    assert len(seen) > 20 or name == "nothing"


def test_parameters_by_chance():
    """Whatever a schema says, it is refused, or any arguments of its grammar are valid by it."""
    taken = 0
    for seed in range(150):
        chance = random.Random(seed)
        names = "abcde"[: chance.randint(1, 5)]
        schema = {"$defs": {name: any_schema(chance, 2) for name in "abc"}, "type": "object",
                  "properties": {name: any_schema(chance, 1) for name in names},
                  "required": chance.sample(names, chance.randint(0, len(names)))}  # fmt: skip
        try:
            arguments = compile_arguments(schema, "here")
        except UsageError:
            continue
        taken += 1
        matcher, check = Matcher(arguments.node), jsonschema.Draft202012Validator(schema)
        for walked in range(4):
            found = argue(arguments, matcher, walked)
            with contextlib.suppress(RecursionError):  # not if a schema is what it is itself
                assert check.is_valid(found), (schema, found)
    assert taken > 40


def test_texts_are_streamed():
    """What can only be a text is sent as it comes, also where its schema is a reference."""
    parser, sent = ToolParser({"f": BOOK}, TAGS, "f", {"f": compile_arguments(BOOK, "here")}), []
    for key, value in (("kind", "ro"), ("seats", "12"), ("note", "null")):
        for tag, text in ((KEY, key), (KEY_END, ""), (VALUE, value[:1]), (None, value[1:])):
            pieces = [Piece(MARK, tag)] if tag else []
            events = [e for p in (*pieces, Piece(TEXT, text)) for e in parser.push(p)]
            sent += [e.text for e in events if e.kind == ARGUMENTS]
        sent += [e.text for e in parser.push(Piece(MARK, VALUE_END))]
    said = ['{"kind": "', "r", "o", '"', ', "seats": ', "12", ', "note": ', "null"]
    assert [each for each in sent if each] == said


@pytest.mark.parametrize(("schema", "words"), [
    ({"properties": {"a": {"pattern": "(?!x)"}}}, "^here.a.pattern cannot be kept to: a look-"),
    ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "^here.a.items.uniqueItems cannot"),
    ({"patternProperties": {}}, "^here.patternProperties cannot be kept to; leave it out"),
    ({"anyOf": [{}]}, "^here.anyOf cannot be kept to beside a tool's properties"),
    ({"type": "array"}, "^here allows no object"),
    ({"allOf": [{"type": "object"}, {"type": "null"}]}, "^here allows no object"),
    ({"required": ["a"], "additionalProperties": False}, "^here requires what no value is valid"),
    ({"properties": {"a": {"items": {"$ref": "#/properties/a"}, "type": "array", "minItems": 1}},
      "required": ["a"]}, "^here requires what no value is valid by, or none that ever ends"),
    ({"properties": {"a": {"$ref": "#/properties/a"}}}, "^here is nested too deeply, or a ref"),
    ({"additionalProperties": {"type": "null"}}, "^here names no properties"),
    ({"properties": {" a": {}}}, "^here has a property ' a', which a call has no way to write"),
    ({"properties": {"\ud800": {}}}, "which a call has no way to write"),
    ({"allOf": [{"$ref": "#"}]}, "^here is nested too deeply, or a reference leads"),
])  # fmt: skip
def test_parameters_that_are_refused(schema, words):
    """What cannot be kept to, or written, is refused by its place."""
    with pytest.raises(UsageError, match=words):
        compile_arguments(schema, "here")


# ---- tokens -------------------------------------------------------------------------------------

STRICT = {"book": compile_arguments(BOOK, "here"), "now": compile_arguments({}, "here")}
TOOLS = {"book": STRICT["book"].node, "now": STRICT["now"].node, "booking": None}


def guide(tokenizer: Tokenizer, **options: Any) -> Guide:
    return Guide(None, tokenizer, tokenizer.eos_ids, calls=TOOLS, **options)


def follow(tokenizer: Tokenizer, follows: Guide, text: str) -> Any:
    """Where the tokens of a text lead, each of which may come."""
    state = follows.start
    for token in tokenizer.encode_template(text):
        state = follows.after(state, token)
        assert state is not None
    return state


def entry(key: str, value: str) -> str:
    return f"{KEY}{key}{KEY_END}{VALUE}{value}{VALUE_END}"


@pytest.mark.parametrize("thought", ["", f"<think>{OPEN}booking{KEY}</think>", f"{OPEN}?</think>"])
def test_all_else_is_free(glm, thought):
    """Text, reasoning and the arguments of other tools are free, and so is their end."""
    follows = guide(glm, reasons=thought.startswith(OPEN))
    said = f" Hm{KEY} <think>{OPEN}"
    loose = f"booking\n{entry('x', f'{OPEN}book{KEY}')}"
    for text in ("", thought[:-8], thought, thought + said[: -len(OPEN)],
                 f"{thought}{said}booking{KEY}", thought + said + loose,
                 f"{thought}{said}{loose}{CLOSE} So{CLOSE}."):  # fmt: skip
        assert follows.mask(follow(glm, follows, text)).all()
    state = follow(glm, follows, thought + said)
    allowed = {glm.text_bytes[token] for token in np.flatnonzero(follows.mask(state))}
    assert all(any(name.startswith(each.strip()) for name in (b"booking", b"now"))
               for each in allowed)  # fmt: skip
    state = follow(glm, follows, f"{thought}{said}booking")
    after = {*np.flatnonzero(follows.mask(state))} - {*glm.encode(" "), *glm.encode("\n")}
    assert after >= {glm.id_of(KEY), glm.id_of(CLOSE), *glm.eos_ids}
    assert not any(glm.text_bytes[token].strip() for token in after)


def test_a_strict_call_is_whole(glm):
    """It ends when all is there that is required; each argument comes once, in any order."""
    follows, stop = guide(glm, begun="book"), next(iter(glm.eos_ids))
    key, shut = glm.id_of(KEY), glm.id_of(CLOSE)
    said = [entry("kind", "12"), entry("name", "Bo 北"), entry("seats", "7"), entry("note", "a<b")]
    for count in range(5):
        state = follow(glm, follows, "".join(said[:count]))
        assert follows.after(state, stop) is None and follows.after(state, key)
        assert (follows.after(state, shut) is not None) == (count > 2)
        mask = follows.mask(state)
        assert all(mask[i] == (follows.after(state, i) is not None) for i in range(mask.size))
    state = follow(glm, follows, "".join(said) + KEY)
    assert {glm.text_bytes[i][:1] for i in np.flatnonzero(follows.mask(state))} == {b"d"}
    state = follow(glm, follows, "".join(said) + f"{CLOSE}. And {OPEN}now{CLOSE}")
    assert follows.mask(state).all()


def test_a_form_beside_strict_tools(glm):
    """With a form the answer is that, or calls, and those of strict tools keep to their schema."""
    form = answer(compile_schema({"type": "null"}, "here"))
    follows = Guide(form, glm, glm.eos_ids, calls=TOOLS)
    assert not follows.mask(follow(glm, follows, f"{OPEN}book"))[glm.id_of(CLOSE)]
    for text in ("null", f"{OPEN}now{CLOSE}\n{OPEN}booking{KEY}x{OPEN}{CLOSE}"):
        assert follows.mask(follow(glm, follows, text))[[*glm.eos_ids]].all()


@pytest.mark.parametrize(("temperature", "begun"), [(1.0, None), (1.0, ""), (0.0, "book")])
def test_no_logits_break_a_call(glm, temperature, begun):
    """Whatever the model says, all calls of strict tools are valid."""
    params = SamplingParams(temperature, top_p=0.9, seed=7)
    sampler = FormSampler(params, guide(glm, begun=begun), glm.vocab_used)
    chance, marks = np.random.default_rng(7), {glm.id_of(tag): tag for tag in TAGS}
    likely, never = [glm.id_of(tag) for tag in (OPEN, CLOSE, VALUE_END)], glm.id_of("<think>")
    ids: list[int] = []
    while len(ids) < 300:
        logits = 2 * chance.standard_normal(glm.vocab_used + 8, np.float32)
        logits[likely] += 5
        logits[[*glm.eos_ids, never]] = -np.inf
        ids.append(sampler.pick(logits, 100 + len(ids)))
    splitter, parser = Splitter(glm, Prompt([], marks=marks)), ToolParser({}, TAGS, begun, STRICT)
    events = [e for piece in splitter.push(ids) for e in parser.push(piece)]
    told = {e.index: "" for e in events if e.kind == ENDED}
    for event in events:
        if event.kind == ARGUMENTS and event.index in told:
            told[event.index] += event.text
    names = {e.index: e.text for e in events if e.kind == CALLED}
    assert {"book", "now"} <= {*names.values()} <= {*TOOLS}
    for index, text in told.items():
        if names[index] != "booking":
            jsonschema.validate(json.loads(text), BOOK if names[index] == "book" else NOTHING)


# ---- requests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(demo_path, tmp_path_factory) -> Iterator[Serving]:
    """The demo with GLM-5.2's own template and the tags of calls."""
    target = tmp_path_factory.mktemp("strict") / "model"
    glm_model(demo_path, target, max_position_embeddings=4096)
    add_tags(target)
    with serving(open_engine(model=str(target), conversations="2", model_id="demo")) as running:
        yield running


def tool(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


ASKED = {
    "messages": STORY,
    "tools": [tool("book", BOOK, strict=True), tool("now", {"type": "object"}, strict=True)],
    "tool_choice": {"type": "function", "function": {"name": "book"}},
    "parallel_tool_calls": False,
    "max_tokens": 300,
}


@pytest.mark.parametrize("temperature", [0, 1])
def test_forced_calls(server, temperature):
    """A call that must be made of a strict tool is whole and valid, streamed or not."""
    asked = ASKED | {"temperature": temperature, "seed": 5}
    (choice,) = server.chat(**asked).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "book")
    jsonschema.validate(json.loads(call["function"]["arguments"]), BOOK)
    events = server.chat(**asked, stream=True).events[:-1]
    calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", ())]
    streamed = "".join(c["function"].get("arguments", "") for c in calls)
    assert streamed == call["function"]["arguments"]
    (choice,) = server.chat(**asked | {"tool_choice": "required"}).json["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] in ("book", "now")


@pytest.mark.parametrize("temperature", [0, 1])
def test_any_drafts_give_the_same_calls(server, monkeypatch, temperature):
    """Greedy and sampled, at any depth and in any mode, the tokens are the same ones."""
    engine, asked = server.engine, chat(dict(ASKED))
    prompt, _ = server.service.chat(asked)
    params, found = SamplingParams(temperature, seed=3), set()
    for knobs in ({"draft": "0"}, {"draft": "1"}, {"draft": "5"}, {"mode": "rejection"}):
        settings = Settings.resolve({"threads": "1", **knobs}, {})
        monkeypatch.setattr(engine, "settings", settings)
        turn = engine.answer(prompt, engine.new_slot(), params, 90)
        list(turn)
        found.add(tuple(turn.token_ids))
    assert len(found) == 1


def test_messages(server):
    """The Messages API knows strict tools too, and answers with their input."""
    strict = [{"name": "book", "input_schema": BOOK, "strict": True}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {"messages": STORY, "max_tokens": 300, "tools": strict, "tool_choice": choice}
    content = server.post("/v1/messages", asked).json["content"]
    jsonschema.validate(content[-1]["input"], BOOK)
    strict[0]["input_schema"] = {"properties": {"a": {"pattern": "(?!x)"}}}
    error = server.post("/v1/messages", asked).json["error"]
    assert error["message"].startswith("tools[0].input_schema.a.pattern cannot be kept to")


def test_what_cannot_be_kept_to_is_refused(server):
    """Of a strict tool, by its place; of others nothing is asked."""
    for strict in (True, False):
        tools = [*ASKED["tools"], tool("f", {"properties": {"a": {"not": {}}}}, strict=strict)]
        answer = server.chat(**ASKED | {"tools": tools, "max_tokens": 1})
        assert answer.status == (400 if strict else 200)
        if strict:
            where = "tools[2].function.parameters"
            assert answer.error["param"] == where
            assert answer.error["message"].startswith(f"{where}.a.not cannot be kept to")


def test_without_strict_tools_nothing_is_guided(server):
    """Requests whose tools are not strict are answered as ever."""
    tools = [tool("book", BOOK), tool("now", {}, strict=False)]
    for choice in ("auto", "required"):
        prompt, _ = server.service.chat(chat({"messages": STORY, "tools": tools,
                                              "tool_choice": choice}))  # fmt: skip
        assert type(server.engine.answer(prompt).sampler) is Sampler
