"""Warm restarts: the experts that were in memory are there again, as hot as before."""

from __future__ import annotations

import threading

import pytest

from colibri.engine import Engine
from colibri.errors import CoreError
from colibri.knobs import Settings
from colibri.resident import BLOCK, Resident
from colibri.state import State

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


def opened(ram: str = "108M", **flags: str) -> Engine:
    """The demo with few slots of its own."""
    given = {"temperature": "0", "threads": "1", "io": "buffered", "ram": ram} | flags
    return Engine.open(Settings.resolve(given, {}))


@pytest.fixture
def state(tmp_path) -> State:
    """A state directory."""
    return State(tmp_path / "state", lambda text: pytest.fail(text))


def finish(engine: Engine) -> str:
    """A turn."""
    return "".join(piece.text for piece in engine.answer(engine.chat(STORY)))


def test_what_was_there_is_there_again(state):
    """Same experts, same order: so the same ones will leave first. The text is the same too."""
    first = opened()
    text = finish(first)
    Resident(first, state).save()
    before = first.model.resident()
    slots = first.plan.slots_per_layer * sum(first.container.sparse[:-1])
    assert len(before) >= min(slots, 40) and len(before) > BLOCK // 2
    second, said = opened(), []
    resident = Resident(second, state)
    assert resident.fill(lambda *what: said.append(what)) == len(before)
    assert second.model.resident() == before
    assert said[-1] == ("reading experts", len(before), len(before))
    assert finish(second) == text


def test_a_warm_start_reads_less(state):
    """The first answer of a warm engine finds in memory what a cold one reads."""
    first = opened("300M", draft="0")
    finish(first)
    Resident(first, state).save()
    loads = []
    for warm in (False, True):
        engine = opened("300M", draft="0")
        if warm:
            Resident(engine, state).fill()
        turn = engine.answer(engine.chat(STORY))
        assert "".join(piece.text for piece in turn)
        counters = turn.receipt.prompt_counters, turn.receipt.answer_counters
        loads.append(sum(counts["expert_loads"] for counts in counters))
    assert loads[1] == 0 < loads[0]


def test_fewer_slots_than_before(state):
    """The hottest ones come; what has no place is left out, of drafts' experts too."""
    large = opened("300M")
    finish(large)
    Resident(large, state).save()
    small = opened("107M")
    wanted = Resident(small, state).remembered()
    mtp = small.container.config.num_hidden_layers
    main = [pair for pair in large.model.resident() if pair[0] < mtp]
    slots = small.plan.slots_per_layer
    assert [pair for pair in wanted if pair[0] < mtp] == main[: round(slots * 5)]
    assert sum(pair[0] == mtp for pair in wanted) <= slots
    Resident(small, state).fill()
    assert set(small.model.resident()) == set(wanted)


def test_without_drafts(state):
    """Experts of the MTP layer are of no use to an engine that does not have it."""
    first = opened("300M")
    finish(first)
    Resident(first, state).save()
    plain = opened("300M", mtp="off")
    assert all(layer < 6 for layer, _ in Resident(plain, state).remembered())
    Resident(plain, state).fill()
    assert finish(plain)


def test_in_the_background(state, monkeypatch):
    """A start that is stopped has read whole blocks, the newest first, and keeps their order."""
    monkeypatch.setattr("colibri.resident.BLOCK", 8)
    first = opened("300M")
    finish(first)
    Resident(first, state).save()
    newest = first.model.resident()
    second = opened("300M")
    resident, real = Resident(second, state), second.model.warm
    begun, go = threading.Event(), threading.Event()

    def gated(pairs: list) -> None:
        real(pairs)
        begun.set()
        go.wait(60)

    monkeypatch.setattr(second.model, "warm", gated)
    resident.start()
    assert begun.wait(60)
    resident._stop.set()
    go.set()
    resident.stop()
    there = second.model.resident()
    assert 8 <= len(there) < len(newest) and set(there) == set(newest[: len(there)])
    assert there == [pair for pair in newest if pair in set(there)]
    resident.save()  # what was yet to come is not forgotten
    assert Resident(first, state).remembered() == newest


def test_another_container_has_its_own(state, monkeypatch):
    """What is remembered is known by the container's fingerprint."""
    first = opened()
    finish(first)
    Resident(first, state).save()
    other = opened()
    monkeypatch.setitem(other.container.__dict__, "fingerprint", "0" * 32)
    assert Resident(other, state).remembered() == []


@pytest.mark.parametrize("damage", [b"", b"{}\n", b'{"experts":[[0]]}', b'{"experts":7}'])
def test_damage_costs_nothing(state, damage):
    """It only ever saves time: a file that cannot be read is as good as none."""
    engine = opened()
    path = Resident(engine, state).path
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    assert Resident(engine, state).fill() == 0


def test_mapped_experts_are_not_remembered(state):
    """Where the page cache holds the experts there is nothing to remember."""
    engine = Engine.open(Settings.resolve({"threads": "1"}, {}))
    resident = Resident(engine, state)
    resident.save()
    resident.start()
    assert resident.fill() == 0 and not state.root.exists()


def test_a_disk_that_fails(state, monkeypatch):
    """An error while reading ahead is left to the turn that needs the expert."""
    first = opened()
    finish(first)
    Resident(first, state).save()
    engine = opened()

    def failing(pairs: list) -> None:
        raise CoreError("the disk is gone")

    monkeypatch.setattr(engine.model, "warm", failing)
    resident = Resident(engine, state)
    resident.start()
    resident.stop()
    assert finish(engine)


def test_the_commands(command, tmp_path):
    """run and chat remember; run --warm begins warm, as a chat with someone who types does."""
    env = {"COLIBRI_STATE": str(tmp_path / "state"), "COLIBRI_IO": "buffered",
           "COLIBRI_RAM": "300M"}  # fmt: skip
    prompt = ("run", "-p", STORY[0]["content"], "--temp", "0", "--json", "--stats")
    cold = command(*prompt, env=env)
    warm = command(*prompt, "--warm", env=env)
    talked = command("chat", "--temp", "0", "--warm", stdin=b"/quit\n", env=env)
    assert (cold.status, warm.status, talked.status) == (0, 0, 0)
    assert cold.out.split('"token_ids"')[0] == warm.out.split('"token_ids"')[0]
    assert len(list((tmp_path / "state" / "resident").iterdir())) == 1
