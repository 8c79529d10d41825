"""Traces of routed experts: recorded as they happened, replayed by policies checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from toolbox import tool

from colibri.container import Container
from colibri.convert import convert_directory
from colibri.errors import UsageError
from colibri.formats import Format
from colibri.layout import Formats
from colibri.model import Model
from colibri.session import Session
from colibri.trace import Trace, TraceWriter

replay_trace = tool("replay_trace")
replay = replay_trace.replay


def trace_of(rows, count=8, step=None, kept=None) -> Trace:
    """A trace of rows [layers][k]; without `step` every row is a step, without `kept` all stay."""
    experts = np.array(rows, np.uint16)
    steps = np.arange(len(rows)) if step is None else np.array(step)
    flags = np.ones(len(rows), bool) if kept is None else np.array(kept)
    return Trace(experts, steps, flags, np.arange(experts.shape[1]), count)


def line(*experts: int) -> Trace:
    """One layer, one expert a row."""
    return trace_of([[[expert]] for expert in experts])


# Two slots; "2-0" is 2 taking the slot of 0. LRU: 0 1 2-0 0-1 1-2 3-0 0-1 1-3, no hit.
# LFU: 0 1 2-0 0-1 1-2, then 0 and 1 have two uses: 3-0 0-3 (3 has one), and 1 is hit.
# Belady: 0 1 2-1 (0 is due sooner), 0 is hit, 1-2 3-1 (0 is due sooner), 0 is hit, 1-3.
LOOP = (0, 1, 2, 0, 1, 3, 0, 1)


@pytest.mark.parametrize(("policy", "hits"), [("lru", 0), ("lfu", 1), ("belady", 2)])
def test_policies_on_a_loop(policy, hits):
    """Three policies on eight look-ups, as worked out by hand above."""
    result = replay(line(*LOOP), policy, 2)
    assert (result.lookups, result.hits) == (8, hits)


def test_lru_and_lfu_part_on_an_old_favourite():
    """0 was used four times, then 1 and 2 once each: LRU drops 0 for 2, LFU drops 1."""
    favourite = line(0, 0, 0, 0, 1, 2, 0)
    assert replay(favourite, "lru", 2).hits == 3
    assert replay(favourite, "lfu", 2).hits == 4


def test_lrfu_forgets_what_lfu_keeps():
    """After 200 uses of 0, rows of 1 and 2 in turn share what 0 leaves in two slots. With LFU they
    throw each other out for ever; LRFU lets go of 0 when its uses have faded."""
    faded = line(*[0] * 200, *[1, 2] * 100)
    assert replay(faded, "lfu", 2).hits == 199
    assert replay(faded, "lrfu", 2).hits > 199 + 160


def test_lrfu_hits_where_lru_only_passes_through():
    """Three layers of one expert in turn, two slots: LRU drops each before its turn comes again;
    LRFU keeps one and lets the others pass through the second slot."""
    loop = trace_of([[[0], [0], [0]]] * 20)
    two = [replay(loop, policy, 1, "shared") for policy in ("lru", "lrfu")]
    assert [result.slots for result in two] == [1, 1]  # a layer: three in all, so all fit
    rows = trace_of([[[0, 1], [0, 1], [0, 1]]] * 20)
    assert replay(rows, "lru", 1, "shared").hits == 0
    assert replay(rows, "lrfu", 1, "shared").hits >= 19


def test_slru_protects_what_was_hit_from_a_scan():
    """Five slots, four of them protected: 0 was hit once, so five new experts do not remove it."""
    scan = line(0, 0, 1, 2, 3, 4, 5, 0)
    assert replay(scan, "slru", 5).hits == 2
    assert replay(scan, "lru", 5).hits == 1


def test_layers_share_slots_or_have_their_own():
    """Layer 0 always asks for one expert, layer 1 for three in turn: with two slots a layer of its
    own, layer 1 never hits; sharing four, every expert stays."""
    rows = [[[0], [i % 3]] for i in range(6)]
    trace = trace_of(rows)
    assert replay(trace, "lru", 2, "own").hits == 5
    assert replay(trace, "lru", 2, "shared").hits == 5 + 3


def test_a_step_looks_an_expert_up_once():
    """Two rows of one step that share an expert are one look-up of it."""
    trace = trace_of([[[0, 1]], [[1, 2]], [[0, 2]]], step=[0, 0, 1])
    result = replay(trace, "lru", 3)
    assert (result.lookups, result.hits) == (5, 2)


def test_hits_of_a_layer_do_not_leave_for_its_misses():
    """0 and 1 are in two slots; a row that asks for 1 and 2 replaces 0 and hits 1."""
    trace = trace_of([[[0, 1]], [[1, 2]]])
    assert replay(trace, "lru", 2).hits == 1


def test_rejected_rows_do_not_count_as_use():
    """A rejected row read 3 for 0: then 3 is the first to leave, and 1 and 2 stay."""
    rows = [[[0]], [[1]], [[2]], [[3]], [[4]], [[1]], [[2]]]
    step = [0, 1, 2, 2, 3, 4, 5]
    rejected = trace_of(rows, step=step, kept=[1, 1, 1, 0, 1, 1, 1])
    assert replay(rejected, "lru", 3).hits == 2
    assert replay(trace_of(rows, step=step), "lru", 3).hits == 0


def test_fewer_slots_than_a_layer_needs_still_replays():
    """Three experts a row in two slots: one of them leaves within the step, by any policy."""
    trace = trace_of([[[0, 1, 2]], [[0, 1, 2]]])
    for policy in replay_trace.POLICIES:
        result = replay(trace, policy, 2)
        assert (result.lookups, result.hits) == (6, 2)


def test_no_policy_beats_belady():
    """On random traces, with any slots, in both scopes, Belady hits at least as often as all."""
    random = np.random.default_rng(3)
    rows = [[np.sort(random.permutation(8)[:2]).tolist() for _ in range(3)] for _ in range(60)]
    trace = trace_of(rows)
    for scope in replay_trace.SCOPES:
        for slots in (2, 3, 5):
            best = replay(trace, "belady", slots, scope).hits
            assert all(
                replay(trace, policy, slots, scope).hits <= best for policy in replay_trace.POLICIES
            )


def test_enough_slots_miss_each_expert_once():
    """With a slot for every expert the only misses are the first look-ups."""
    random = np.random.default_rng(4)
    rows = [[[int(random.integers(8))] for _ in range(2)] for _ in range(40)]
    trace = trace_of(rows)
    distinct = sum(len(np.unique(trace.experts[:, layer])) for layer in range(2))
    for policy in replay_trace.POLICIES:
        result = replay(trace, policy, 8)
        assert result.lookups - result.hits == distinct


# ---- traces of a real session -----------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model, its experts in records."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("plain", "own"))
    tiny.write(source, tiny.GROUPS, seed=5)
    convert_directory(source, target / "model", Formats(experts=Format.parse("int4-g8")))
    return Model.open(Container.open(target / "model"))


@pytest.fixture(scope="module")
def recorded(model):
    """Steps of one and of several rows, some rejected: for each number of slots the trace and the
    loads that the core counted."""
    found = {}
    for slots in (3, 5, 9, 16):
        model.set_residency("buffered", slots)
        session = Session(model, 128, 8)
        writer = TraceWriter(session)
        for i in range(40):
            rows = (1, 1, 4)[i % 3]
            session.step_all([(7 * i + j) % 250 for j in range(rows)], "last")
            kept = rows - i % 2 if rows > 1 else 1
            writer.add(rows, kept)
            session.rewind(session.length - (rows - kept))
        found[slots] = (writer.trace(), session.counters())
    return found


def test_replayed_lrfu_is_the_core(recorded):
    """The replay counts the look-ups and the loads that csrc/experts.c counted, one for one."""
    for slots, (trace, counters) in recorded.items():
        result = replay(trace, "lrfu", slots, "shared")
        assert result.lookups == counters["expert_uses"]
        assert result.lookups - result.hits == counters["expert_loads"]


def test_replayed_lrfu_is_the_core_after_a_day(model):
    """So too after 4,500 tokens, when all heats have been divided twice."""
    model.set_residency("buffered", 5)
    session, draw = Session(model, 32, 16), np.random.default_rng(8)
    writer = TraceWriter(session)
    for _ in range(4500 // 16):
        session.step_all(draw.integers(3, 250, 16).tolist(), "none")
        writer.add(16)
        session.step_all([7], "none")  # a step counts the uses of the one before
        writer.add(1, 0)
        session.rewind(0)
    trace, counters = writer.trace(), session.counters()
    result = replay(trace, "lrfu", 5, "shared")
    assert result.lookups == counters["expert_uses"]
    assert result.lookups - result.hits == counters["expert_loads"] < 0.9 * result.lookups


def test_saved_traces_come_back(recorded, tmp_path):
    """A trace file holds every array, exactly, under exactly its name, and nothing beside it."""
    trace, _ = recorded[9]
    path = tmp_path / "a.trace"
    trace.save(path)
    again = Trace.load(path)
    for name in ("experts", "step", "kept", "layers"):
        assert np.array_equal(getattr(again, name), getattr(trace, name))
    assert again.count == trace.count == 16
    assert trace.experts.shape[1:] == (6, 4) and list(trace.layers) == [2, 3, 4, 5, 6, 7]
    assert [p.name for p in tmp_path.iterdir()] == ["a.trace"]


def test_damaged_traces(recorded, tmp_path):
    """A flipped bit anywhere, or a missing end, is refused or changes nothing that is read."""
    path = tmp_path / "a.trace"
    recorded[9][0].save(path)
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), max(1, len(whole) // 300)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            Trace.load(path)
        except UsageError as why:
            refused += "a.trace" in str(why)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"a\.trace"):
        Trace.load(path)
    assert refused > 200


def test_other_files_are_no_traces(tmp_path):
    """A missing file, text, and a NumPy file of something else are refused by name."""
    (tmp_path / "text").write_text("hello")
    np.savez(tmp_path / "other.npz", x=np.arange(3))
    np.save(tmp_path / "array.npy", np.arange(3))
    line(0).save(tmp_path / "counts.npz")
    with np.load(tmp_path / "counts.npz") as file:
        np.savez(tmp_path / "counts.npz", **{**file, "count": np.arange(2)})
    for name in ("none", "text", "other.npz", "array.npy", "counts.npz"):
        with pytest.raises(UsageError, match=name):
            Trace.load(tmp_path / name)


def test_parts_must_fit_together():
    """A trace with too few steps, or an expert beyond the layer's, is refused."""
    with pytest.raises(UsageError, match="belong together"):
        trace_of([[[0]], [[1]]], step=[0])
    for expert in (8, -1):
        with pytest.raises(UsageError, match="beyond 8"):
            Trace(np.array([[[expert]]]), np.arange(1), np.ones(1, bool), np.arange(1), 8)
    for experts in (np.zeros((1, 1)), np.zeros((1, 1), int), np.array([[["a"]]])):
        with pytest.raises(UsageError, match="no table"):
            Trace(experts, np.arange(1), np.ones(1, bool), np.arange(1), 8)


def test_command_line(recorded, tmp_path, capsys):
    """The table has a line per scope and slots, a column per policy; --json keeps the counts."""
    recorded[9][0].save(tmp_path / "t")
    args = [str(tmp_path / "t"), "--slots", "4,9", "--json", str(tmp_path / "out.json")]
    assert replay_trace.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["slots/layer", *replay_trace.POLICIES]
    assert [row.split()[:2] for row in lines[2:]] == [
        ["own", "4"], ["own", "9"], ["shared", "4"], ["shared", "9"],
    ]  # fmt: skip
    assert '"lookups"' in (tmp_path / "out.json").read_text()
    assert replay_trace.main([str(tmp_path / "none")]) == 1
    assert "there is no such trace" in capsys.readouterr().err
