"""The engine across turns: prefixes reused, turns cancelled and taken up, stops from everywhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from colibri import engine as engines
from colibri.answer import Prompt
from colibri.contents import Contents
from colibri.engine import Engine
from colibri.errors import ConfigError, ContextFull, UsageError
from colibri.interrupt import Interrupts
from colibri.knobs import Settings
from colibri.memory import Memory
from colibri.model import Model
from colibri.session import more_rows
from colibri.turn import Turn

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module", params=["auto", "0"])
def engine(request) -> Engine:
    """The demo, greedy, with and without drafting."""
    return Engine.open(
        Settings.resolve({"temperature": "0", "threads": "1", "draft": request.param}, {})
    )


@pytest.fixture
def copy(demo_path, tmp_path) -> Path:
    """A copy of the demo whose side files may be changed."""
    directory = tmp_path / "model"
    directory.mkdir()
    for path in demo_path.iterdir():
        if path.suffix == ".safetensors":
            (directory / path.name).symlink_to(path)
        else:
            shutil.copy(path, directory)
    return directory


def change(path: Path, **fields: object) -> None:
    """Set fields of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def finish(turn: Turn) -> str:
    """Run a turn to its end."""
    return "".join(piece.text for piece in turn)


def test_turns_reuse_what_they_share(engine):
    """A second question runs only what is new, and answers what a fresh engine answers."""
    slot = engine.new_slot()
    first = finish(engine.answer(engine.chat(STORY), slot))
    messages = [
        *STORY,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "More."},
    ]
    turn = engine.answer(engine.chat(messages), slot)
    second = finish(turn)
    assert turn.receipt.reused_tokens > len(engine.chat(STORY).ids)
    fresh = engine.answer(engine.chat(messages), engine.new_slot())
    assert finish(fresh) == second and fresh.receipt.reused_tokens == 0


def test_the_same_question_again(engine):
    """Asked twice, one or two rows are run, and the answer is the same."""
    slot = engine.new_slot()
    turns = [engine.answer(engine.chat(STORY), slot) for _ in range(2)]
    assert finish(turns[0]) == finish(turns[1])
    assert turns[1].receipt.prefill_tokens <= 2


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancelled_turns(engine, after):
    """A cancelled turn ends with a receipt, and the next one is as if it had never been."""
    slot = engine.new_slot()
    turn = engine.answer(engine.chat(STORY), slot)
    if after == 0:
        turn.cancel()
    shown = []
    for piece in turn:
        shown.append(piece.text)
        if len(shown) == after:
            turn.cancel()
    assert turn.finish_reason == turn.receipt.finish_reason == "interrupted"
    assert turn.receipt.answer_tokens == len(turn.token_ids) and len(shown) <= after + 1
    whole = finish(engine.answer(engine.chat(STORY), engine.new_slot()))
    assert whole.startswith("".join(shown))
    assert finish(engine.answer(engine.chat(STORY), slot)) == whole


def test_cancelled_in_the_middle_of_a_prompt(engine):
    """Rows read before the cancellation are kept and reused."""
    slot = engine.new_slot()
    long = [{"role": "user", "content": "Tell me. " * 150}]

    def stop(what: str, done: int, total: int) -> None:
        if done >= 256:
            turn.cancel()

    turn = engine.answer(engine.chat(long), slot, max_tokens=8, progress=stop)
    assert finish(turn) == "" and turn.finish_reason == "interrupted"
    receipt = turn.receipt
    assert receipt.prefill_tokens == receipt.prompt_counters["rows"] == 256
    assert receipt.prompt_tokens > 256 and not any(receipt.answer_counters.values())
    again = engine.answer(engine.chat(long), slot, max_tokens=8)
    fresh = engine.answer(engine.chat(long), engine.new_slot(), max_tokens=8)
    assert finish(again) == finish(fresh) and again.receipt.reused_tokens >= 256


@pytest.mark.parametrize("ram", ["99M", "100M"])
def test_what_does_not_fit_is_not_loaded(ram, monkeypatch):
    """Too little memory is told before the dense part is read, which may take minutes."""
    monkeypatch.setattr(Model, "load", lambda self, progress: pytest.fail("loaded"))
    with pytest.raises(UsageError, match=f"there is {ram[:-1]} MiB|do not fit {ram[:-1]} MiB"):
        Engine.open(Settings.resolve({"ram": ram, "io": "direct"}, {}))


@pytest.mark.parametrize("mebibytes", [101, 102, 103, 105])
def test_a_chosen_context_fits(mebibytes):
    """Without --ctx one conversation fits beside the weights wherever a small one does."""
    small = Engine.open(Settings.resolve({"ram": f"{mebibytes}M", "context": "16"}, {}))
    chosen = Engine.open(Settings.resolve({"ram": f"{mebibytes}M"}, {}))
    assert 16 <= chosen.context < 1024 and small.plan.io == chosen.plan.io
    with pytest.raises(UsageError, match="a smaller --ctx"):
        Engine.open(Settings.resolve({"ram": f"{mebibytes}M", "context": "1024"}, {}))


@pytest.mark.parametrize("mode", ["rejection", "probabilistic"])
def test_memory_does_not_choose_the_sample(mode):
    """Where the depth of drafts can change the text, it does not depend on where experts lie."""
    texts = set()
    for flags in ({}, {"io": "buffered", "ram": "110M", "context": "256"}):
        settings = {"temperature": "1", "threads": "1", "mode": mode, "seed": "5"} | flags
        engine = Engine.open(Settings.resolve(settings, {}))
        texts.add(finish(engine.answer(engine.chat(STORY), max_tokens=200)))
    assert len(texts) == 1


def test_a_model_larger_than_memory_reads_prompts_in_larger_chunks(engine, monkeypatch):
    """Each chunk of a prompt reads nearly all experts, so there are fewer; the text is the same."""
    monkeypatch.setattr(Contents, "bytes", 1 << 50)
    other = Engine.open(Settings.resolve({"temperature": "0", "threads": "1"}, {}))
    assert other.slot.session.max_rows == other.context > engine.slot.session.max_rows
    long = [{"role": "user", "content": "Tell me. " * 150}]
    turns = [e.answer(e.chat(long), e.new_slot(), max_tokens=8) for e in (engine, other)]
    assert finish(turns[0]) == finish(turns[1])
    forwards = [turn.receipt.prompt_counters["forwards"] for turn in turns]
    assert forwards == [5, 1] and turns[0].receipt.prompt_tokens == 606


def test_more_memory_than_there_is(monkeypatch):
    """A plan for more than is free is told with both numbers; one that needs less is not."""
    settings = Settings.resolve({"threads": "1", "ram": "1G", "io": "direct"}, {})
    assert not [note for note in Engine.open(settings).notes if "--ram" in note]
    monkeypatch.setattr(engines, "available", lambda: Memory(100 << 20, "free memory"))
    (note,) = [note for note in Engine.open(settings).notes if "lower --ram" in note]
    assert "only 100 MiB are free" in note


def test_a_context_that_memory_cut_short(engine):
    """Who asked for no context is sent for memory, who did is told how far --ctx goes."""
    short = Engine.open(Settings.resolve({"ram": "101M", "threads": "1", "io": "direct"}, {}))
    with pytest.raises(ContextFull, match="no more; free some, raise --ram, or use --kv-dtype f16"):
        short.require_room(1000)
    small = Engine.open(Settings.resolve({"context": "64", "threads": "1"}, {}))
    with pytest.raises(ContextFull, match="--ctx raises it, to 1024 at most"):
        small.require_room(1000)


def test_conversations_pay_for_one_scratch():
    """However many conversations there are, memory is set aside for one step of one of them."""
    settings = Settings.resolve({"threads": "1"}, {})
    one, four = (Engine.open(settings, conversations=n) for n in (1, 4))
    session = four.new_slot().session
    assert session.scratch is four.slot.session.scratch
    assert four.demand().caches == 4 * one.demand().caches == 4 * session.bytes
    assert four.demand().scratch == one.demand().scratch == session.scratch.bytes


def test_larger_chunks_take_little_of_the_room():
    """Rows double while the scratch that it takes more is at most 1/32 of what is left for experts;
    steps that are not of many rows stay as they are."""

    def taken(rows: int) -> int:
        return 1000 + rows

    wanted = [1000 + 512 + 32 * more for more in (511, 512, 1535, 1536, 100_000)]
    assert [more_rows(512, room, taken) for room in wanted] == [512, 1024, 1024, 2048, 2048]
    assert more_rows(128, 1 << 40, taken) == 128 and more_rows(512, 0, taken) == 512


def test_a_cancel_as_the_turn_begins(engine, monkeypatch):
    """Whoever cancels while the turn takes back an older cancel is heard."""
    turn = engine.answer(engine.chat(STORY), engine.new_slot())
    real, early = turn.session.cancel, [turn.cancel]

    def cancel(on: bool = True) -> None:
        if early and not on:
            early.pop()()
        real(on)

    monkeypatch.setattr(turn.session, "cancel", cancel)
    assert finish(turn) == "" and turn.finish_reason == "interrupted"


def test_an_empty_prompt_is_refused(engine):
    """A template that makes nothing of the messages is no reason to answer somebody else's."""
    with pytest.raises(UsageError, match="prompt is empty"):
        engine.answer(Prompt([]))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(engine, limit):
    """0 tokens are not taken for as many as there is room for."""
    with pytest.raises(UsageError, match=f"max_tokens is {limit}; expected 1 or more"):
        engine.answer(engine.chat(STORY), max_tokens=limit)


def test_interrupts(engine):
    """SIGINT reaches a turn through the descriptor even if no Python handler could run."""
    with Interrupts() as interrupts:
        turn = engine.answer(engine.chat(STORY), engine.new_slot())
        turn.session.watch(interrupts.fd)
        os.write(interrupts._write, b"\x00")  # what the interpreter does for a signal
        assert finish(turn) == "" and turn.finish_reason == "interrupted"
        assert not interrupts.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_signals_during_one_core_call(engine):
    """Python learns of two signals in one call; the pipe has both, and two mean quit."""
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        os.write(interrupts._write, bytes([signal.SIGINT]))
        os.kill(os.getpid(), signal.SIGINT)


def test_room(engine):
    """A prompt must leave room for one token; the last one that does gets exactly one."""
    base = len(engine.raw("").ids)
    word = engine.tokenizer.encode("fox")[0]
    prompt = engine.raw("")
    prompt.ids.extend([word] * (engine.context - 1 - base))
    turn = engine.answer(prompt, engine.new_slot())
    finish(turn)
    assert (len(turn.token_ids), turn.finish_reason) in [(1, "context"), (0, "stop")]
    prompt.ids.append(word)
    with pytest.raises(ContextFull, match="the prompt has 1024 tokens and the context holds 1024"):
        engine.answer(prompt)


# ---- side files ---------------------------------------------------------------------------------


def settings(directory: Path, **flags: str) -> Settings:
    """Settings for a model directory."""
    return Settings.resolve({"model": str(directory), "threads": "1", **flags}, {})


def test_stops_come_from_everywhere(copy):
    """The stops are the union of config.json, generation_config.json and the tokenizer."""
    change(copy / "config.json", eos_token_id=11)
    change(copy / "generation_config.json", eos_token_id=[12])
    engine = Engine.open(settings(copy))
    assert engine.stops == {11, 12} | engine.tokenizer.eos_ids
    assert len(engine.tokenizer.eos_ids) == 3


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p"])
@pytest.mark.parametrize("value", ["0.5", -1, True, 1e9])
def test_bad_recommendations_are_named(copy, name, value):
    """A generation_config.json that recommends nonsense is refused by field and file."""
    change(copy / "generation_config.json", **{name: value})
    with pytest.raises(ConfigError, match=rf"generation_config.json: {name} is"):
        Engine.open(settings(copy))


def test_without_recommendations(copy):
    """Without the file sampling is plain: temperature 1, nothing cut off."""
    (copy / "generation_config.json").unlink()
    engine = Engine.open(settings(copy))
    params = engine.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert engine.recommended == frozenset()


def test_tokenizer_of_another_model(copy):
    """A tokenizer with more tokens than the model has rows is refused."""
    path = copy / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 2048, "content": "<|more|>"})
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="2049 tokens, the model 2048"):
        Engine.open(settings(copy))


def test_without_mtp(copy):
    """--no-mtp and --draft 0 do not even read the MTP layer; drafts then come from the text."""
    whole = Engine.open(settings(copy)).model.dense_bytes
    for flags in ({"mtp": "0"}, {"draft": "0"}):
        engine = Engine.open(settings(copy, **flags))
        assert not engine.model.has_mtp and engine.model.dense_bytes < whole
    drafter, _ = Engine.open(settings(copy, mtp="0")).speculation(engine.slot, engine.sampling)
    assert drafter.name == "ngram"


def test_steps_in_between(engine):
    """Two turns run step by step in turns write what each writes alone; closing one ends it."""
    prompts = [engine.chat([{"role": "system", "content": "Hello. " * 90}, *STORY]),
               engine.chat(STORY)]  # fmt: skip
    alone = [finish(engine.answer(p, engine.new_slot(), max_tokens=30)) for p in prompts]
    turns = [engine.answer(p, engine.new_slot(), max_tokens=30) for p in prompts]
    running = [turn.steps() for turn in turns]
    while running:
        running = [steps for steps in running if next(steps, None)]
    assert [turn.text for turn in turns] == alone
    turns[0].waited(9.0)  # for others, when all is counted
    assert turns[0].receipt.ledger.others == 0.0
    turn = engine.answer(prompts[1], engine.new_slot())
    steps = turn.steps()
    while not next(steps).tokens:
        pass
    steps.close()
    assert turn.finish_reason == turn.receipt.finish_reason == "stop"
    assert turn.receipt.answer_tokens == len(turn.token_ids) > 0
