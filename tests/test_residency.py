"""Expert slots: what is in memory changes nothing but the clock, and failures lose nothing."""

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import shardkit
import tiny

from colibri.container import Container, format_of
from colibri.convert import Formats, convert_directory
from colibri.errors import CoreError
from colibri.formats import Format
from colibri.model import Model
from colibri.session import Session

PROMPT = [(7 * i + 3) % 251 for i in range(30)]
WAYS = [
    ("mmap", 0), ("mmap-tight", 0),
    *((io, slots) for io in ("buffered", "direct") for slots in (1, 2, 3, 4, 9, 16)),
]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny checkpoint converted to int4 records."""
    source = tmp_path_factory.mktemp("plain")
    tiny.write(source, tiny.GROUPS, seed=5)
    target = tmp_path_factory.mktemp("own") / "model"
    convert_directory(source, target, Formats(experts=Format.parse("int4-g8")))
    return target


def run(model: Model, rows: int = 8) -> bytes:
    """Prefill, a verify batch of which two rows are kept, drafts, one more step: all outputs."""
    session = Session(model, 64, rows)
    seen = [session.prefill(PROMPT).copy(), session.step_all([5, 6, 7, 8]).copy()]
    hidden = session.hidden[:2].copy()
    session.rewind(len(PROMPT) + 2)
    draft = np.empty(model.config.hidden_size, np.float32)
    session.mtp_rewind(0)
    session.mtp_absorb(hidden, [6, 9], draft)
    seen += [session.mtp_draft(11, 1, draft).copy(), session.step_all([9]).copy()]
    return b"".join(array.tobytes() for array in seen)


def test_every_way_of_reading_gives_the_same_bits(directory):
    """Mapped or in 1..16 slots a layer, through the page cache or past it, on 1 or 2 threads."""
    results = set()
    for threads in (1, 2):
        model = Model.open(Container.open(directory), threads=threads)
        for io, slots in WAYS:
            model.set_residency(io, slots)
            results.add(run(model))
            model.set_residency(io, slots, "router")
            results.add(run(model))
    assert len(results) == 1


def test_loads_are_counted_once_per_miss(directory):
    """With a slot for every expert each distinct expert is read exactly once, byte for byte."""
    model = Model.open(Container.open(directory))
    model.set_residency("direct", 16)
    session = Session(model, 64, 8)
    session.prefill(PROMPT, prime=False)
    session.prefill(PROMPT, prime=False)
    counters = session.counters()
    assert counters["expert_loads"] == len(model.resident())
    sizes = [model.expert_bytes(layer) for layer, _ in model.resident()]
    assert counters["read_bytes"] == sum(sizes)
    assert counters["expert_uses"] > counters["expert_loads"]


def chosen(session: Session, rows: int) -> list[set[tuple[int, int]]]:
    """(layer, expert) pairs each row of the last step used."""
    layers = range(session.model.config.num_hidden_layers)
    found = [(layer, session.experts(layer, rows)) for layer in layers]
    return [
        {(layer, int(e)) for layer, table in found if table is not None for e in table[row]}
        for row in range(rows)
    ]


def test_rejected_rows_do_not_count_as_use(directory):
    """Experts that only rejected rows asked for are as cold as those not counted yet."""
    model = Model.open(Container.open(directory), mtp=False)
    model.set_residency("direct", 16)
    session = Session(model, 64, 8)
    session.step_all(PROMPT[:2])
    before = set(model.resident())
    session.step_all([41, 42, 43])
    kept, *rejected = chosen(session, 3)
    session.rewind(3)
    session.step_all([41])
    order, last = model.resident(), chosen(session, 1)[0]
    only_rejected = set().union(*rejected) - kept - before - last
    cold = only_rejected | (last - kept - before)
    assert only_rejected and cold > only_rejected
    assert set(order[-len(cold) :]) == cold


def test_coldest_goes_first(directory):
    """After many tokens the slots hold the experts that uses, half forgotten after eight tokens,
    would keep there, the hottest first; fewer slots than one token's experts, too."""
    for slots in (2, 9):
        model = Model.open(Container.open(directory), mtp=False)
        model.set_residency("direct", slots)
        room = slots * sum(model.container.sparse[: model.config.num_hidden_layers])
        session = Session(model, 64, 1)
        heat: defaultdict[tuple[int, int], float] = defaultdict(float)
        there: dict[tuple[int, int], int] = {}  # minus when it was read, or its heat last changed
        before: list[tuple[int, int]] = []
        clock = count(0, -1)
        for token in range(3, 60):
            session.step_all([token])
            for pair in before:  # a step's use counts once the next one shows that it was kept
                heat[pair] += 2 ** (token / 8)
                there |= {pair: next(clock)} if pair in there else {}
            before = sorted(chosen(session, 1)[0])
            for layer in sorted({layer for layer, _ in before}):
                wanted = [pair for pair in before if pair[0] == layer]
                for pair in [pair for pair in wanted if pair not in there]:
                    free = [old for old in there if old not in wanted]
                    if len(there) == room:
                        del there[min(free, key=lambda old: (heat[old], there[old]))]
                    there[pair] = next(clock)
        hottest = sorted(there, key=lambda pair: (heat[pair], there[pair]), reverse=True)
        assert model.resident() == hottest and len(hottest) == room


def test_coldest_goes_first_when_heats_are_gone(directory):
    """So too after 11,000 tokens, when what was not used since is 0, all of it alike."""
    model = Model.open(Container.open(directory), mtp=False)
    session = Session(model, 520, 512)

    def ask(rounds: int) -> None:
        for _ in range(rounds):
            session.step_all([7] * 512, "none")
            session.step_all([7], "none")  # a step counts the uses of the one before
            session.rewind(0)

    model.set_residency("buffered", 16)
    ask(1)
    used = model.resident()
    config = model.config
    sparse = [n for n in range(config.num_hidden_layers) if model.container.sparse[n]]
    pairs = [(layer, expert) for layer in sparse for expert in range(config.n_routed_experts)]
    model.set_residency("buffered", 12)
    room = 12 * len(sparse)
    unused = [pair for pair in pairs if pair not in used]
    model.warm([*used, *unused[: room - len(used)]])
    ask(21)
    before = model.resident()
    assert len(before) == room and set(used) < set(before)
    for pair in [pair for pair in pairs if pair not in before]:
        model.warm([pair])
        assert set(before) - set(model.resident()) == {before[-1]}
        before = model.resident()


def test_what_was_hot_long_ago_is_cold_when_heats_were_divided(directory):
    """Heats are divided every 2,048 tokens, in slots as in the table."""
    model = Model.open(Container.open(directory), mtp=False)
    model.set_residency("buffered", 16)
    session = Session(model, 520, 512)
    used = []
    for token, rounds in ((7, 3), (9, 2), (9, 1)):
        for _ in range(rounds):
            session.rewind(0)
            session.step_all([token] * 512, "none")
            session.step_all([token], "none")
        session.rewind(512)
        used.append(set().union(*chosen(session, 1)))
        session.step_all([token], "none")
    order = model.resident()
    old, new = used[0] - used[1] - used[2], used[2]
    assert old and max(map(order.index, new)) < min(map(order.index, old))


def test_too_few_slots_still_hit(directory):
    """With fewer slots than a token uses experts, one token after another finds some of its
    experts: the others pass through a few slots."""
    model = Model.open(Container.open(directory), mtp=False)
    model.set_residency("direct", 3)  # a token uses 4 a layer
    session = Session(model, 64, 1)
    for _ in range(40):
        session.step_all([7])
    counters = session.counters()
    assert counters["expert_loads"] < 0.75 * counters["expert_uses"]


def test_weights_that_choose_keys_are_counted_where_keys_are_chosen(directory):
    """Up to index_topk keys a step attends to all of them and does not read what would choose."""
    container = Container.open(directory)
    model = Model.open(container, mtp=False)
    session = Session(model, 64, 8)
    read = []
    for token in range(container.config.index_topk + 2):
        before = session.counters()["dense_bytes"]
        session.step_all([token], "none")
        read.append(session.counters()["dense_bytes"] - before)
    refs = [
        container.matrix(entry.name)
        for entry in container.entries
        if entry.role in ("index_q", "index_weights")
        and entry.layer < container.config.num_hidden_layers
    ]
    choosing = sum(format_of(ref).nbytes(ref.rows, ref.cols) for ref in refs)
    few, many = read[: container.config.index_topk], read[container.config.index_topk :]
    assert set(few) == {read[0]} and set(many) == {read[0] + choosing} and choosing > 0


def test_two_sessions_share_slots_fairly(directory):
    """A draft that one session refused does not age what another has just read."""
    orders = []
    for others in (0, 5):  # steps before, so that the sessions' own counts are equal or not
        model = Model.open(Container.open(directory), threads=1, mtp=False)
        model.set_residency("buffered", 9)
        first, second = Session(model, 64, 8), Session(model, 64, 8)
        for _ in range(others):
            second.step_all([3])
        second.rewind(0)
        model.set_residency("buffered", 9)
        first.step_all([10])
        second.step_all([10])
        first.step_all([20])
        second.step_all([30, 20])
        second.rewind(2)
        second.step_all([31])
        orders.append(model.resident())
    assert orders[0] == orders[1]


def test_guesses_of_every_layer_are_needed(directory):
    """Fewer rows of fed guesses than layers would be read past their end."""
    model = Model.open(Container.open(directory))
    model.set_residency("direct", 4, "fed")
    model.feed_pilot(np.zeros((model.config.num_hidden_layers, 2), np.int32))
    with pytest.raises(CoreError, match="not of every layer"):
        model.feed_pilot(np.zeros((1, 2), np.int32))


FORBID = """
import ctypes, struct, sys

def forbid(number, errno, *first):  # a system call fails, if its first argument is one of these
    passes = len(first) + 1 if first else 0
    lines = [(0x20, 0, 0, 0), (0x15, 0, passes + 1, number)]
    lines += [(0x20, 0, 0, 16)] * bool(first)
    for left, value in zip(range(len(first) - 1, -1, -1), first):
        lines += [(0x15, left, int(left == 0), value)]
    lines += [(0x06, 0, 0, 0x00050000 | errno), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0):
        sys.exit("no filter")
"""

WITHOUT_RING = f"""
{FORBID}
import hashlib
from colibri import demo
from colibri.container import Container
from colibri.model import Model
from colibri.session import Session

model = Model.open(Container.open(demo.MODEL))
def run(io, pilot):
    model.set_residency(io, 3, pilot)
    session = Session(model, 256, 8)
    seen = session.prefill(range(5, 45)).tobytes() + session.step_all([7, 8]).tobytes()
    return hashlib.sha256(seen).hexdigest()

ways = [(io, pilot) for io in ("direct", "buffered") for pilot in ("off", "router")]
before = [run(*way) for way in ways]
forbid(int(sys.argv[1]), 1)
after = [run(*way) for way in ways]
print(len({{*before, *after}}))
"""

REFUSED = f"""
{FORBID}
import os, platform
from colibri import demo
from colibri.container import Container
from colibri.model import Model
from colibri.session import Session

model = Model.open(Container.open(demo.MODEL))
expected = Session(model, 96, 8).prefill(range(5, 45)).tobytes()
forbid(425, 1)  # no io_uring: threads read, by pread
direct = []
for fd in os.listdir("/proc/self/fdinfo"):
    try:
        flags = int(open("/proc/self/fdinfo/" + fd).read().split()[3], 8)
    except OSError:
        continue  # the directory's own
    direct += [int(fd)] * bool(flags & os.O_DIRECT)
if not direct:
    sys.exit("no direct reads")
forbid({{"x86_64": 17, "aarch64": 67}}[platform.machine()], 22, *direct)  # EINVAL
model.set_residency("direct", 3)
session = Session(model, 96, 8)
same = session.prefill(range(5, 45)).tobytes() == expected
counters = session.counters()
print(same, 0 < counters["repeated_reads"] <= 12, counters["expert_loads"] > 50)
"""


def filtered(program: str, *arguments: str) -> str:
    """What a program prints that forbids itself system calls."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.stderr.startswith("no "):
        pytest.skip(f"this system has {done.stderr.strip()}")
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("number", [425, 426], ids=["setup", "enter"])
def test_without_io_uring(number):
    """Refused from the start (io_uring_setup), as in many containers, or for every read
    (io_uring_enter): reads go another way, and the bits are the same."""
    assert filtered(WITHOUT_RING, str(number)) == "1\n"


def test_direct_reads_that_are_refused():
    """A file system that opens files for direct reads and refuses every one is asked by those in
    flight, not forever: the page cache serves it, and the bits are the same."""
    assert filtered(REFUSED) == "True True True\n"


def test_files_that_end_anywhere(directory, tmp_path):
    """The last read of a file whose end is not aligned is as long as it has to be."""
    arrays = sorted(shardkit.weights(tiny.GROUPS).items(), key=lambda item: ".experts." in item[0])
    shardkit.directory(tmp_path, {"model.safetensors": dict(arrays)}, tiny.GROUPS)
    container = Container.open(tmp_path)
    assert container.shards[0].size % 4096
    model = Model.open(container)
    layers = [layer for layer in range(model.layers) if container.sparse[layer]]
    pairs = [(layer, expert) for layer in layers for expert in range(16)]
    for io in ("direct", "buffered"):
        model.set_residency(io, 16)
        model.warm(pairs)
        assert sorted(model.resident()) == pairs


def test_what_is_there_does_not_make_room(directory):
    """The coldest expert of all stays for the token that uses it, whatever that misses."""
    model = Model.open(Container.open(directory), mtp=False)
    session = Session(model, 64, 1)
    session.step_all([7])
    sparse = model.container.sparse[: model.config.num_hidden_layers]
    first = sparse.index(True)
    used = sorted(expert for layer, expert in chosen(session, 1)[0] if layer == first)
    others = [expert for expert in range(model.config.n_routed_experts) if expert not in used]
    model.set_residency("direct", 1)
    model.warm([(first, expert) for expert in (used[-1], *others[: sum(sparse) - 1])])
    session = Session(model, 64, 1)
    session.step_all([7])
    counters = session.counters()
    assert counters["expert_loads"] == counters["expert_uses"] - 1


def test_uses_from_before_a_restore_do_not_count(directory):
    """A session whose caches were replaced ages experts as a new one with them does."""
    orders = []
    for again in (False, True):
        model = Model.open(Container.open(directory), mtp=False)
        model.set_residency("direct", 4)
        session = Session(model, 64, 8)
        session.step_all(PROMPT[:3])
        if again:
            session = Session(model, 64, 8)
        for layer in range(model.layers):
            session.cache(layer, "kv")[:] = 0
        session.restore(PROMPT, 0)
        session.step_all([7])
        orders.append(model.resident())
    assert orders[0] == orders[1]


def test_warm_set_is_restored_in_order(directory):
    """A saved resident set, loaded oldest first, has the same order and needs no further reads."""
    model = Model.open(Container.open(directory), mtp=False)
    model.set_residency("direct", 9)
    run_once = Session(model, 64, 8)
    run_once.prefill(PROMPT)
    saved = model.resident()
    model.set_residency("direct", 9)
    model.warm(saved[::-1])
    assert model.resident() == saved
    assert Session(model, 64, 8).counters()["expert_loads"] == 0


def test_warming_cools_nothing(directory):
    """Experts of many uses are hotter than those of a later one, warmed in between or not."""
    model = Model.open(Container.open(directory), mtp=False)
    model.set_residency("direct", 16)
    session = Session(model, 64, 1)
    used = []
    for token in [7] * 12 + [9, 9]:
        if token == 9:
            model.warm(sorted(set.intersection(*used[4:12])))
        session.step_all([token])
        used += chosen(session, 1)
    hot, later = set.intersection(*used[4:12]), used[12] - set().union(*used[:12])
    order = model.resident()
    assert max(map(order.index, hot)) < min(map(order.index, later))


def test_warm_ignores_what_the_model_does_not_have(directory):
    """Pairs from another model are skipped."""
    model = Model.open(Container.open(directory), mtp=False)
    model.set_residency("direct", 2)
    model.warm([(0, 0), (99, 0), (2, 9999), (-1, -1), (2, 3)])
    assert model.resident() == [(2, 3)]


def before_the_cut(directory: Path, copy: Path) -> tuple[Model, bytes, Path, bytes]:
    """A copied model, what it makes of PROMPT, and a shard of its experts with its bytes."""
    shutil.copytree(directory, copy)
    model = Model.open(Container.open(copy), mtp=False)
    expected = Session(model, 64, 8).prefill(PROMPT).tobytes()
    experts = next(s.path for s in model.container.shards if "experts" in s.path.name)
    return model, expected, experts, experts.read_bytes()


def test_cut_file_is_an_error_and_nothing_is_lost(directory, tmp_path):
    """A shard cut under a running engine raises CoreError naming it; once whole, it goes on."""
    model, expected, experts, whole = before_the_cut(directory, tmp_path / "model")
    model.set_residency("direct", 3)
    session = Session(model, 64, 8)
    session.step_all(PROMPT[:8])
    os.truncate(experts, 8192)
    with pytest.raises(CoreError, match=rf"{experts.name} ends at byte .* early"):
        session.prefill(PROMPT[8:])
    assert session.tokens == PROMPT[: session.length]
    with experts.open("r+b") as file:
        file.write(whole)
    rest = PROMPT[session.length :]
    assert session.prefill(rest).tobytes() == expected


def test_a_warm_start_from_a_cut_file_leaves_nothing_behind(directory, tmp_path):
    """Slots whose reads failed are read again, or hold other experts, once the file is whole."""
    model, expected, experts, whole = before_the_cut(directory, tmp_path / "model")
    model.set_residency("direct", 2)
    os.truncate(experts, 8192)
    model.warm([(layer, 0) for layer, sparse in enumerate(model.container.sparse[:-1]) if sparse])
    assert model.resident() == []
    experts.write_bytes(whole)
    assert Session(model, 64, 8).prefill(PROMPT).tobytes() == expected


def test_slots_must_be_some(directory):
    """No slots is refused rather than dividing by it."""
    model = Model.open(Container.open(directory))
    with pytest.raises(CoreError, match="0 expert slots cannot work"):
        model.set_residency("direct", 0)


def decode_with_guesses(model: Model, guesses) -> tuple[bytes, dict[str, int]]:
    """Logits and counters of 24 decode steps, `guesses(token)` fed before each."""
    model.set_residency("direct", 5, "fed" if guesses else "off")
    session = Session(model, 64, 4)
    seen = []
    for token in range(3, 27):
        if guesses:
            model.feed_pilot(guesses(token))
        seen.append(session.step_all([token]).tobytes())
    return b"".join(seen), session.counters()


def test_guesses_change_no_bit_and_true_ones_are_used(directory):
    """True guesses are used, nonsense makes the pilot stop, and neither changes a bit."""
    model = Model.open(Container.open(directory), mtp=False)
    layers, k = model.config.num_hidden_layers, model.config.num_experts_per_tok
    trace = {}
    plain = Session(model, 64, 4)
    for token in range(3, 27):
        plain.step_all([token])
        table = np.full((layers, k), -1, np.int32)
        for layer in range(layers):
            chosen_here = plain.experts(layer, 1)
            if chosen_here is not None:
                table[layer] = chosen_here[0]
        trace[token] = table
    noise = np.random.default_rng(1)
    off, base = decode_with_guesses(model, None)
    true, told = decode_with_guesses(model, trace.__getitem__)
    wrong, misled = decode_with_guesses(
        model, lambda token: np.where(trace[token] < 0, -1, noise.integers(0, 16, (layers, k)))
    )
    assert off == true == wrong
    assert told["pilot_useful"] > 0.9 * told["pilot_reads"] > 0
    assert told["expert_loads"] < 0.5 * base["expert_loads"]
    assert misled["pilot_reads"] < told["pilot_reads"] / 2
    for found in (base, told, misled):  # what was read ahead is read, too
        one = found["expert_bytes"] // found["expert_uses"]
        assert found["pilot_bytes"] == one * found["pilot_reads"]
        assert found["read_bytes"] == one * (found["expert_loads"] + found["pilot_reads"])
