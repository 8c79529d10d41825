"""Answers that keep to a form: valid, the same with any drafts, ended where the form ends."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from colibri.answer import Prompt
from colibri.cli import main
from colibri.engine import Engine
from colibri.form import FormSampler, Guide
from colibri.grammar import Matcher, Node, text
from colibri.json_grammar import OBJECT, answer
from colibri.knobs import Settings
from colibri.sampling import Sampler, SamplingParams
from colibri.schema import compile_schema
from colibri.tokenizer import Tokenizer
from colibri.vocabulary import Vocabulary

ASKED = [{"role": "user", "content": "Tell me about a fox, as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "colours": {"type": "array", "items": {"enum": ["red", "grün"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
}
FORM = answer(compile_schema(SCHEMA, "schema"))


@pytest.fixture(scope="module")
def tokenizer(demo_path) -> Tokenizer:
    """The demo's."""
    return Tokenizer.load(demo_path)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The demo."""
    return Engine.open(Settings.resolve({"threads": "1"}, {}))


def guide(tokenizer: Tokenizer, form: Node = FORM, **options: Any) -> Guide:
    return Guide(form, tokenizer, tokenizer.eos_ids, **options)


def say(engine: Engine, form: Node | None, most: int = 200, **knobs: str) -> tuple[str, str]:
    """The demo's answer in a form, and why it ended."""
    given = {"threads": "1", "seed": "11"} | knobs
    engine.settings = Settings.resolve(given, {})
    engine.slot = engine.new_slot()
    params = SamplingParams(temperature=float(given.get("temperature", 1)), seed=11)
    turn = engine.answer(replace(engine.chat(ASKED), form=form), sampling=params, max_tokens=most)
    said = "".join(piece.text for piece in turn)
    return said, turn.finish_reason


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_any_drafts_give_the_same_valid_answer(engine, temperature):
    """Greedy and sampled, at any depth and in any mode, the answer is one, and valid."""
    plain, reason = say(engine, FORM, temperature=temperature, draft="0")
    assert reason == "stop"
    jsonschema.validate(json.loads(plain), SCHEMA)
    for knobs in ({"draft": "1"}, {"draft": "5"}, {}, {"mode": "rejection", "draft": "3"},
                  {"mode": "probabilistic", "draft": "3"}):  # fmt: skip
        assert say(engine, FORM, temperature=temperature, **knobs)[0] == plain, knobs


def test_nothing_is_run_for_the_end(engine):
    """Where nothing may follow, the model is not asked: its last token is picked and never run."""
    engine.settings, engine.slot = Settings.resolve({"draft": "0"}, {}), engine.new_slot()
    asked, params = replace(engine.chat(ASKED), form=FORM), SamplingParams(1, seed=11)
    turn = engine.answer(asked, sampling=params, max_tokens=200)
    assert json.loads("".join(piece.text for piece in turn)) and turn.finish_reason == "stop"
    assert turn.session.tokens == [*turn.prompt.ids, *turn.token_ids[:-1]]


def test_any_object(engine):
    """Without a schema the answer is an object."""
    said, reason = say(engine, answer(OBJECT), temperature="0")
    assert reason == "stop" and isinstance(json.loads(said), dict)


def test_a_limit_cuts(engine):
    """An answer that is cut off keeps to the form as far as it goes."""
    whole, cut = say(engine, FORM, temperature="0")[0], say(engine, FORM, 5, temperature="0")
    assert cut[1] == "length" and whole.startswith(cut[0])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_logits_break_the_form(tokenizer, temperature, seed):
    """Whatever the model says, with top-k and top-p or without, the text is valid where it ends."""
    params = SamplingParams(temperature, top_k=seed % 3 * 5, top_p=1 - seed % 2 / 10, seed=seed)
    chance, ids = np.random.default_rng(seed), []
    sampler = FormSampler(params, guide(tokenizer), tokenizer.vocab_used)
    while not ids or ids[-1] not in tokenizer.eos_ids:
        logits = 3 * chance.standard_normal(tokenizer.vocab_used + 8, np.float32)
        ids.append(sampler.pick(logits, 100 + len(ids)))
    said = b"".join(tokenizer.text_bytes[i] for i in ids).decode()
    jsonschema.validate(json.loads(said), SCHEMA)


def test_what_may_come_is_picked_as_ever(tokenizer):
    """A pick that the form allows is the plain sampler's; else the likeliest of those allowed."""
    sampler = FormSampler(SamplingParams(0), guide(tokenizer), tokenizer.vocab_used)
    logits = np.zeros(tokenizer.vocab_used, np.float32)
    (brace,), (letter,), (space,) = (tokenizer.encode(char) for char in "{a ")
    logits[letter], logits[space], logits[brace] = 3, 2, 1
    assert sampler.pick(logits, 7) == space
    assert sampler.pick(logits, 8) == brace
    assert sampler.pick(logits, 8) == brace  # again, after a draft that fell
    params = SamplingParams(1, seed=3)
    plain, follows = Sampler(params, tokenizer.vocab_used), guide(tokenizer, reasons=True)
    formed, chance = FormSampler(params, follows, tokenizer.vocab_used), np.random.default_rng(1)
    for position in range(20):
        logits = chance.standard_normal(tokenizer.vocab_used, np.float32)
        logits[[*tokenizer.eos_ids, tokenizer.id_of("</think>")]] = -50
        assert formed.pick(logits, position) == plain.pick(logits, position)


def test_reasoning_comes_before_the_form(tokenizer):
    """Reasoning is free but cannot end the answer; the form begins behind </think>."""
    follows, (stop, *_) = guide(tokenizer, reasons=True), tokenizer.eos_ids
    state = follows.start
    for token in tokenizer.encode("Hm, {!"):
        assert follows.after(state, token) is state
    assert follows.after(state, stop) is None and not follows.mask(state)[stop]
    assert follows.mask(state).sum() == tokenizer.vocab_used - len(tokenizer.eos_ids)
    state = follows.after(state, tokenizer.id_of("</think>"))
    assert follows.after(state, tokenizer.encode("H")[0]) is None
    assert follows.after(state, stop) is None
    for token in tokenizer.encode('{"name":"x","age":1,"colours":[]}'):
        state = follows.after(state, token)
    assert follows.after(state, stop) == state and follows.mask(state).sum() == len(
        tokenizer.eos_ids
    )


def test_a_call_instead_of_the_form(glm):
    """Where tools are there the answer may be calls of them, whole ones, and nothing besides."""
    tokenizer = glm
    call, key, shut = map(tokenizer.id_of, ("<tool_call>", "<arg_key>", "</tool_call>"))
    tools = {"find": None, "f": None}
    follows, (stop, *_) = guide(tokenizer, calls=tools), tokenizer.eos_ids
    (space,), letter = tokenizer.encode("\n"), tokenizer.encode("g")[0]
    for begun in (follows.start, follows.after(follows.start, space)):
        state = follows.after(begun, call)
        assert follows.mask(begun)[call] and follows.after(state, key) is None
        assert follows.after(state, stop) is None and follows.after(state, letter) is None
    for token in tokenizer.encode("find\n"):
        state = follows.after(state, token)
    assert follows.mask(state)[[key, shut]].all() and not follows.mask(state)[stop]
    state = follows.after(state, key)
    for token in (*tokenizer.encode("anything"), call):
        assert follows.after(state, token) is state
    assert follows.after(state, stop) is None and follows.mask(state).sum() > 100
    state = follows.after(state, shut)
    assert follows.mask(state)[[stop, call, space]].all() and not follows.mask(state)[letter]
    assert follows.after(state, stop) and follows.after(follows.after(state, call), shut) is None
    assert guide(tokenizer).after(guide(tokenizer).start, call) is None
    inside = follows.after(follows.start, tokenizer.encode("{")[0])
    assert follows.after(inside, call) is None


def test_calls_in_tags_of_text(tokenizer):
    """Where a tokenizer has no <arg_key>, all is free from <tool_call> to </tool_call>."""
    follows, (stop, *_) = guide(tokenizer, calls={"f": None}), tokenizer.eos_ids
    assert tokenizer.id_of("<arg_key>") is None
    called = follows.after(follows.start, tokenizer.id_of("<tool_call>"))
    for token in tokenizer.encode("anything"):
        assert follows.after(called, token) is called
    assert follows.after(called, stop) is None
    assert follows.mask(follows.after(called, tokenizer.id_of("</tool_call>")))[stop]


def test_masks_are_the_steps(tokenizer):
    """A mask has just the tokens that a step allows, in the middle of a string and elsewhere."""
    follows = guide(tokenizer)
    state = follows.start
    for token in [None, *tokenizer.encode('{"name": "Bo", "age": 3, "colours": ["gr')]:
        state = state if token is None else follows.after(state, token)
        mask = follows.mask(state)
        for at in range(0, mask.size, 7):
            assert mask[at] == (follows.after(state, at) is not None)
        assert mask.any()


def test_the_receipt_tells_the_rule(engine):
    """A form is verified as in coupled, whatever the setting, and the receipt says so."""
    engine.settings = Settings.resolve({"mode": "rejection"}, {})
    for form, mode in ((FORM, "coupled"), (None, "rejection")):
        turn = engine.answer(replace(engine.chat(ASKED), form=form), max_tokens=2)
        list(turn)
        assert turn.receipt.mode == mode


def test_the_last_bytes():
    """Tokens are passed over by their beginnings, to the last byte there is."""
    table = [b"\xff", b"\xff\xff", b"", b"\xfe\xff", b"\xfe\xffa", b"a", b"ab"]
    for data, allowed in ((b"\xff\xff", [0, 1]), (b"\xfe\xffb", [3]), (b"ac", [5]), (b"z", [])):
        matcher = Matcher(text(data))
        found = Vocabulary(table).mask(matcher, matcher.start)
        assert np.flatnonzero(found).tolist() == allowed


def test_prompts_say_what_form(engine):
    """A prompt without a form is answered as ever."""
    ids = engine.chat(ASKED).ids
    assert type(engine.answer(Prompt(ids)).sampler) is Sampler
    assert isinstance(engine.answer(Prompt(ids, form=FORM)).sampler, FormSampler)


def test_run_with_a_schema(tmp_path, capsys):
    """`run --schema` prints JSON that keeps to the file's schema; {} is any object."""
    path = tmp_path / "schema.json"
    for schema in (SCHEMA, {}):
        path.write_text(json.dumps(schema))
        assert main(["run", "-p", "A fox?", "--schema", str(path), "--temp", "0"]) == 0
        jsonschema.validate(json.loads(capsys.readouterr().out), schema or {"type": "object"})


def test_run_that_is_cut_off(tmp_path, capsys):
    """JSON that a limit cut off is no JSON, and a note says so; one that ended has none."""
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    for limit, cut in ((3, True), (200, False)):
        asked = ["run", "-p", "A fox?", "--schema", str(path), "--temp", "0", "-n", str(limit)]
        assert main(asked) == 0
        assert ("the JSON is cut off before its end" in capsys.readouterr().err) == cut


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{", "--schema {}: not valid JSON"),
        ("[]", "--schema {}: expected a JSON object, found list"),
        ('{"type": "text"}', '{}.type is "text"; there are string'),
        ('{"not": {}}', "{}.not cannot be kept to; leave it out"),
        (None, "--schema {}: No such file or directory"),
    ],
)
def test_run_with_a_wrong_schema(tmp_path, capsys, written, words):
    """A schema that cannot be used is told by its place before the model is loaded."""
    path = tmp_path / "schema.json"
    if written is not None:
        path.write_text(written)
    assert main(["run", "-p", "A fox?", "--schema", str(path)]) == 2
    assert words.replace("{}", str(path)) in capsys.readouterr().err
