"""A session's promises: prefixes are reused without a trace, stopping and failing lose nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest

import numpy as np
import pytest
import tiny
from colibri._core import ffi, lib

from colibri.container import Container, format_of
from colibri.errors import Cancelled, ContextFull, CoreError
from colibri.model import Model, _core_config
from colibri.scratch import Scratch
from colibri.session import Session, common_prefix

CONTEXT, ROWS = 96, 8
PROMPT = list(range(100, 140))


@pytest.fixture(scope="module", params=["with MTP", "without MTP"])
def model(request, demo_container, demo_model) -> Model:
    """The demo with and without its MTP layer: reuse has one rule more with it."""
    return demo_model if request.param == "with MTP" else Model.open(demo_container, mtp=False)


@pytest.fixture
def session(model) -> Session:
    """An empty session with small chunks."""
    return Session(model, CONTEXT, ROWS)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Read and write ends."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def state(session: Session) -> tuple[list[int], list[bytes]]:
    """Tokens and the filled bytes of every cache."""
    found = []
    for layer in range(session.model.layers):
        length = session.length
        if layer == session.model.config.num_hidden_layers:
            length = session.mtp_length
        for kind in ("kv", "index"):
            rows = session.cache(layer, kind)
            found.append(b"" if rows is None else rows[:length].tobytes())
    return list(session.tokens), found


def fresh(model: Model, ids: list[int]) -> tuple[bytes, tuple[list[int], list[bytes]]]:
    """Logits and state of a session that runs `ids` from nothing."""
    session = Session(model, CONTEXT, ROWS)
    return session.prefill(ids).tobytes(), state(session)


def continued(session: Session, ids: list[int]) -> tuple[bytes, tuple[list[int], list[bytes]]]:
    """The same, on top of what the session already knows."""
    logits = session.prefill(ids[session.reuse(ids) :])
    return logits.tobytes(), state(session)


# ---- prefix reuse -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        [*PROMPT, 7, 8, 9],
        PROMPT,
        PROMPT[:-1],
        [*PROMPT[:17], 1, 2, 3],
        PROMPT[:1],
        [5, *PROMPT],
        PROMPT[:8] + PROMPT[:30],
    ],
    ids=["longer", "equal", "shorter", "other end", "one", "other start", "loop"],
)
def test_reuse_leaves_no_trace(session, model, ids):
    """After any earlier prompt, a prompt gives the bytes of a session that began with it."""
    session.prefill(PROMPT)
    assert continued(session, ids) == fresh(model, ids)


def test_reuse_keeps_what_it_can(session, model):
    """Only what differs is run again; rows whose hidden states are gone, with MTP, as well."""
    session.prefill(PROMPT)
    longer = [*PROMPT, 7]
    assert session.reuse(longer) == len(PROMPT)
    session.restore(PROMPT, (len(PROMPT) - 1) * model.has_mtp)
    assert session.reuse(longer) == len(PROMPT) - model.has_mtp
    session.prefill(longer[session.length :])
    assert session.reuse(PROMPT) == len(PROMPT) - 1
    assert session.reuse([3]) == 0


def test_reuse_after_tokens_the_mtp_layer_never_saw(session, model):
    """Decoding without drafts leaves the MTP caches behind; reuse still ends without a gap."""
    session.prefill(PROMPT)
    for token in (7, 8, 9):
        session.step_all([token])
    ids = [*PROMPT, 7, 8, 9, 10]
    assert continued(session, ids) == fresh(model, ids)


@pytest.mark.parametrize("ids", [[*PROMPT, 7, 8], PROMPT, PROMPT[:11], [*PROMPT[:17], 1], [5, 6]])
def test_rows_are_copied_from_others(session, model, ids):
    """What another session has of a prompt, at any chunk of it, need not be run; all else is as in
    a session that ran everything."""
    other, third = Session(model, CONTEXT, ROWS), Session(model, CONTEXT, ROWS)
    third.prefill(PROMPT[:3])
    ran = []
    for rows in session.read(ids, others=lambda: (third, session, other)):
        ran.append(rows)
        if not other.length:  # from the second chunk on
            other.prefill(PROMPT)
    shared = min(common_prefix(PROMPT, ids), len(ids) - 1)
    assert session.length == len(ids)
    assert ran[-1] <= len(ids) - max(shared - 1, 0) + ROWS
    assert (session.logits[0].tobytes(), state(session)) == fresh(model, ids)
    assert state(other) == fresh(model, PROMPT)[1]


def test_hidden_states_that_are_gone(session, model):
    """Of rows taken back, or run elsewhere, nothing is shown; before the first there are none."""
    width = model.config.hidden_size
    assert session.hidden.shape == (0, width)
    session.step_all(PROMPT[:5], "none")
    session.step_all(PROMPT[5 : 5 + ROWS], "none")
    kept = session.hidden.copy()
    session.rewind(5 + 2)
    assert np.array_equal(session.hidden, kept[:2])
    session.rewind(0)
    assert session.hidden.shape == (0, width)
    session.restore(PROMPT, 0)
    with pytest.raises(CoreError, match="is not kept"):
        session.hidden  # noqa: B018


def test_rewind(session, model):
    """Rewinding and running again gives the same bytes; rewinding forward is refused."""
    session.prefill(PROMPT)
    session.rewind(20)
    assert session.tokens == PROMPT[:20]
    assert continued(session, PROMPT) == fresh(model, PROMPT)
    for length in (-1, len(PROMPT) + 1):
        with pytest.raises(CoreError, match="cannot rewind"):
            session.rewind(length)
    assert state(session) == fresh(model, PROMPT)[1]


# ---- cancelling ---------------------------------------------------------------------------------


def test_cancelled_step_changes_nothing(session, model):
    """A cancelled step commits nothing; re-armed, the session goes on as if it had not been."""
    session.prefill(PROMPT)
    before = state(session)
    session.cancel()
    for _ in range(2):
        with pytest.raises(Cancelled):
            session.step_all([7, 8])
    assert state(session) == before
    session.cancel(False)
    assert continued(session, [*PROMPT, 7, 8]) == fresh(model, [*PROMPT, 7, 8])


def test_cancel_in_prefill_keeps_whole_chunks(session, model):
    """A prefill cancelled between chunks keeps those done; the prompt can be taken up again."""

    def stop(done: int, total: int) -> None:
        if done == 2 * ROWS:
            session.cancel()

    with pytest.raises(Cancelled):
        session.prefill(PROMPT, stop)
    assert session.tokens == PROMPT[: 2 * ROWS]
    session.cancel(False)
    assert session.reuse(PROMPT) > ROWS
    assert continued(session, PROMPT) == fresh(model, PROMPT)


def test_cancel_inside_a_layer(demo_container, demo_model):
    """A layer that waits for experts is left at once; nothing is committed, and all goes on."""
    model = Model.open(demo_container)
    model.set_residency("direct", 1)
    session, told = Session(model, CONTEXT, CONTEXT), []

    def stop(done: int, total: int) -> None:
        told.append(done)
        if len(told) == 2:
            session.cancel()

    with pytest.raises(Cancelled):
        session.prefill(PROMPT, stop)
    dense, sparse = (len(PROMPT) * layers // model.config.num_hidden_layers for layers in (1, 2))
    assert told[0] == dense and len(told) == 2 and dense <= told[1] < sparse
    assert session.tokens == []
    session.cancel(False)
    assert continued(session, PROMPT) == fresh(demo_model, PROMPT)


def test_progress_of_a_prompt(session):
    """Rows are told as layers pass, never fewer than before, and each chunk's end exactly."""
    told: list[int] = []
    session.prefill(PROMPT, lambda done, total: told.append(done))
    assert told == sorted(told) and len(told) > 5 * len(PROMPT) // ROWS
    assert set(range(ROWS, len(PROMPT) + 1, ROWS)) <= set(told)
    session.prefill([7])
    assert told[-1] == len(PROMPT)


@pytest.mark.parametrize("calls", [2, 6])
def test_what_progress_raises_ends_the_prompt(session, model, calls):
    """An exception inside a step, or after a chunk, reaches the caller; whole chunks are kept."""
    told: list[int] = []

    def fail(done: int, total: int) -> None:
        told.append(done)
        if len(told) == calls:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill(PROMPT, fail)
    assert len(told) == calls
    assert session.tokens == PROMPT[: told[-1] // ROWS * ROWS]
    assert continued(session, PROMPT) == fresh(model, PROMPT)


def test_a_report_cannot_call_its_model(session, model):
    """A step within a step is an error that reaches the caller, not a wait for itself."""
    other = Session(model, CONTEXT, ROWS)
    with pytest.raises(CoreError, match="cannot call the model"):
        session.prefill(PROMPT, lambda done, total: other.step_all([1]))
    assert continued(session, PROMPT) == fresh(model, PROMPT)


def test_an_exception_after_the_core_has_committed(session, model, monkeypatch):
    """A Ctrl-C between the core's commit and ours costs the step and nothing else."""
    session.prefill(PROMPT[:ROWS])
    monkeypatch.setattr(session, "tokens", Unwilling(session.tokens))
    with pytest.raises(KeyboardInterrupt):
        session.step_all(PROMPT[ROWS : 2 * ROWS])
    monkeypatch.setattr(session, "tokens", list(session.tokens))
    session.step_all(PROMPT[ROWS : 2 * ROWS])
    session.mtp_rewind(0)
    assert session.tokens == PROMPT[: 2 * ROWS]
    again = Session(model, CONTEXT, ROWS)
    again.prefill(PROMPT[: 2 * ROWS], prime=False)
    assert state(session) == state(again)
    assert np.array_equal(session.step_all([7]), again.step_all([7]))  # at the same place


class Unwilling(list[int]):
    """Tokens that cannot be added to."""

    def __iadd__(self, other):
        raise KeyboardInterrupt


def test_arrays_that_the_core_would_misread_are_refused(demo_model):
    """A state that is too short would be written past its end, other numbers be taken for f32."""
    session = Session(demo_model, CONTEXT, ROWS)
    session.prefill(PROMPT[:ROWS])
    hidden, size = session.last_hidden.copy(), demo_model.config.hidden_size
    calls = (
        lambda state: session.mtp_absorb(hidden, [1], state),
        lambda state: session.mtp_draft(1, 1, state),
    )
    for call in calls:
        with pytest.raises(CoreError, match=rf"of shape \[{size}\], not \[3\]"):
            call(np.empty(3, np.float32))
        with pytest.raises(CoreError, match="float32 is needed, not of float64"):
            call(np.empty(size))
    with pytest.raises(CoreError, match="float32 is needed"):
        session.mtp_absorb(hidden.astype(np.float64), [1])
    with pytest.raises(CoreError, match="is not kept"):
        session.captured(0, 0)
    assert session.mtp_length == ROWS - 1


def test_nothing_runs_on_a_model_that_is_not_loaded(demo_container):
    """A step and an absorb are errors before the weights are in memory."""
    session = Session(Model.open(demo_container, load=False), CONTEXT, ROWS)
    hidden = np.zeros((1, session.model.config.hidden_size), np.float32)
    for call in (lambda: session.step_all([7]), lambda: session.mtp_absorb(hidden, [7])):
        with pytest.raises(CoreError, match="not loaded"):
            call()


def test_rows_that_do_not_match_are_refused(session, model):
    """Hidden states for fewer tokens than follow, and experts of more rows than a step has."""
    session.prefill(PROMPT[:ROWS])
    with pytest.raises(CoreError, match="tokens do not follow"):
        session.mtp_absorb(session.hidden[:1].copy(), [1, 2, 3])
    for rows in (0, ROWS + 1):
        with pytest.raises(CoreError, match="a step has no"):
            session.experts(1, rows)


INTERRUPTED = """
import os, signal, threading
from colibri import demo
from colibri.container import Container
from colibri.model import Model
from colibri.scratch import Scratch
from colibri.session import Session

session, raised = Session(Model.open(Container.open(demo.MODEL)), 96, 8), 0
for _ in range(10):
    try:
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        for _ in range(2000):
            session.rewind(0)
            session.prefill(range(40), lambda done, total: None)
    except KeyboardInterrupt:
        raised += 1
print(raised)
"""


def test_a_signal_that_waits_for_the_core():
    """A Ctrl-C kept while the core was at work, which Python raises on the way into a report,
    reaches the caller."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("10\n", "")


def test_watched_descriptor(session, model, pipe):
    """A readable descriptor cancels like the flag; an unreadable one, or none, does not."""
    reads, writes = pipe
    session.watch(reads)
    session.prefill(PROMPT)
    os.write(writes, b"x")
    with pytest.raises(Cancelled):
        session.step_all([7])
    session.watch(-1)
    session.step_all([7])
    assert session.tokens == [*PROMPT, 7]


def test_a_large_index_topk_costs_a_short_context_nothing(tmp_path):
    """No more keys are chosen than a context holds, so a session has no room for more."""
    sizes = set()
    for index_topk in (CONTEXT, 1 << 24):
        directory = tmp_path / str(index_topk)
        tiny.write(directory, tiny.GROUPS | {"index_topk": index_topk}, seed=1)
        sizes.add(Session(Model.open(Container.open(directory)), CONTEXT, ROWS).bytes)
    assert len(sizes) == 1


# ---- limits -------------------------------------------------------------------------------------


def test_context_can_be_filled_and_no_more(session, model):
    """The last row fits, the next is refused with nothing changed, and the session lives on."""
    ids = (PROMPT * 3)[:CONTEXT]
    session.prefill(ids)
    before = state(session)
    with pytest.raises(ContextFull, match=f"{CONTEXT}"):
        session.step_all([7])
    assert state(session) == before
    session.rewind(CONTEXT - 4)
    with pytest.raises(ContextFull):
        session.step_all([1, 2, 3, 4, 5])
    assert session.step_all(ids[-4:])[-1].tobytes() == fresh(model, ids)[0]


def test_long_prompt_is_refused_before_it_runs(session):
    """A prompt longer than the context is refused with both numbers, nothing is run."""
    with pytest.raises(ContextFull, match=rf"{CONTEXT + 1} tokens.*{CONTEXT}"):
        session.prefill([5] * (CONTEXT + 1))
    assert session.length == 0 and session.counters()["forwards"] == 0


@pytest.mark.parametrize("ids", [[], [-1], [2048], [5] * (ROWS + 1)])
def test_impossible_steps(session, ids):
    """No rows, too many rows and ids outside the vocabulary are errors that change nothing."""
    session.prefill(PROMPT)
    before = state(session)
    with pytest.raises(CoreError):
        session.step_all(ids)
    assert state(session) == before


def test_the_core_checks_where_a_tensor_lies(demo_container):
    """Up to the last byte of its shard, whatever read the header before."""
    model = Model.open(demo_container, load=False)
    ref = demo_container.matrix("model.norm.weight")
    size = demo_container.shards[ref.shard].size
    last = size - format_of(ref).nbytes(ref.rows, ref.cols)
    error = ffi.new("clb_error *")
    for offset, code in (
        (last, lib.CLB_OK), (last + 1, lib.CLB_INVALID), (size + 1, lib.CLB_INVALID),
        (-1, lib.CLB_INVALID), ((1 << 63) - 1, lib.CLB_INVALID),
    ):  # fmt: skip
        tensor = ffi.new("clb_tensor *", ref._asdict() | {"offset": offset})
        assert lib.clb_model_set(model.handle, -1, lib.CLB_NORM, tensor, error) == code


def test_shared_experts_as_one_are_no_wider_than_others(demo_container):
    """A width that overflows once it is multiplied by a step's rows is refused."""
    config, _arrays = _core_config(demo_container, False)
    config.moe_intermediate = config.shared_experts = 1 << 24
    out, error = ffi.new("clb_model **"), ffi.new("clb_error *")
    assert lib.clb_model_new(config, ffi.NULL, 1, out, error) == lib.CLB_INVALID


def test_impossible_sessions(model):
    """Contexts that cannot be are errors, also when only memory says so."""
    with pytest.raises(CoreError, match="context of 0"):
        Session(model, 0)
    with pytest.raises(CoreError, match="context of"):
        Session(model, 1 << 30)


def test_sessions_do_not_share(model):
    """Two sessions of one model, interleaved, each give the bytes of a session alone."""
    first, second = Session(model, CONTEXT, ROWS), Session(model, CONTEXT, ROWS)
    others = PROMPT[::-1]
    for at in range(0, len(PROMPT), 4):
        one = first.step_all(PROMPT[at : at + 4])[-1].tobytes()
        two = second.step_all(others[at : at + 4])[-1].tobytes()
    assert (one, two) == (fresh(model, PROMPT)[0], fresh(model, others)[0])


def test_a_session_outlives_its_model(demo_container):
    """The collector frees what is garbage in any order: a session does not look at its model then
    (`make sanitize` sees whether it does)."""
    model = Model.open(demo_container, threads=1)
    session = Session(model, 16, 4)
    session.step_all([3, 4], "last")
    ffi.release(model.handle)
    ffi.release(session.handle)


FORKED = """
import os, signal
from colibri import demo
from colibri.container import Container
from colibri.errors import CoreError
from colibri.model import Model
from colibri.session import Session

model = Model.open(Container.open(demo.MODEL), threads=2)
model.set_residency("direct", 3, "router")
session = Session(model, 96, 8)
session.prefill(range(5, 45))
child = os.fork()
if child == 0:
    signal.alarm(60)  # rather than wait for threads that are not here
    try:
        session.step_all([7])
    except CoreError as error:
        print(error, flush=True)
    del session, model
    os._exit(0)
print(os.waitpid(child, 0)[1], session.step_all([7]).shape)
"""


def test_a_fork_cannot_use_the_model():
    """It has no threads and would take its parent's reads: an error, and an end without waiting."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert "a fork of the process" in first and second == "0 (1, 2048)"


FEW_FILES = """
import os, resource, sys
from colibri import demo
from colibri.container import Container
from colibri.errors import CoreError
from colibri.model import Model

container = Container.open(demo.MODEL)
at = os.dup(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (at + 2 * len(container.shards) - int(sys.argv[1]),) * 2)
os.close(at)
try:
    Model.open(container)
except CoreError as error:
    print(error)
"""


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_too_few_open_files(lacking):
    """A shard that can be opened through the page cache alone is an error, not a slower one."""
    program = [sys.executable, "-c", FEW_FILES, str(lacking)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert ("Too many open files" in done.stdout) == bool(lacking)


def test_counters(session):
    """The core counts what it did: forwards, rows, and at most k experts for each row and layer."""
    session.prefill(PROMPT)
    counters = session.counters()
    config = session.model.config
    sparse = sum(kind == "sparse" for kind in config.mlp_types) + session.model.has_mtp
    assert counters["forwards"] == len(PROMPT) / ROWS
    assert counters["rows"] == len(PROMPT)
    most = len(PROMPT) * config.num_experts_per_tok * sparse
    assert 0 < counters["expert_uses"] <= most
    assert counters["expert_bytes"] > 0


def test_work_is_counted_by_what_was_asked_for(demo_model):
    """A pass of one row, of several, an absorb and a draft each add to their own counters."""
    session = Session(demo_model, CONTEXT, ROWS)
    state = np.empty(demo_model.config.hidden_size, np.float32)
    for name, ask in (
        ("plain", lambda: session.step_all([7])),
        ("verify", lambda: session.step_all([8, 9])),
        ("absorb", lambda: session.mtp_absorb(session.last_hidden, [5], state)),
        ("draft", lambda: session.mtp_draft(6, 1, state)),
    ):
        before = session.work()
        ask()
        after = session.work()
        assert [key for key in after if after[key] != before[key]] == [name]


def test_logits_wanted(session):
    """want="last" and "none" give the same rows as "all", fewer of them."""
    rows = session.step_all(PROMPT[:ROWS]).copy()
    assert rows.shape == (ROWS, session.model.config.vocab_size)
    session.rewind(0)
    last = session.step_all(PROMPT[:ROWS], "last").copy()
    session.rewind(0)
    assert session.step_all(PROMPT[:ROWS], "none").shape[0] == 0
    assert np.array_equal(last, rows[-1:])


# ---- one scratch -------------------------------------------------------------------------------


def strokes(session: Session, ids: list[int]) -> Iterator[bytes]:
    """A prompt, a verified batch of which one row is kept, drafts and a last step, one by one; all
    that each gives."""
    yield session.prefill(ids).tobytes()
    yield session.step_all([5, 6, 7]).tobytes()
    kept = session.hidden[:1].copy()
    session.rewind(len(ids) + 1)
    yield kept.tobytes()
    if session.model.has_mtp:
        recycled = np.empty(session.model.config.hidden_size, np.float32)
        session.mtp_rewind(0)
        hidden = np.repeat(kept, ROWS, axis=0)
        for begin in range(0, len(ids), ROWS):
            yield session.mtp_absorb(hidden, ids[begin : begin + ROWS], recycled).tobytes()
        for step in (1, 2):
            yield session.mtp_draft(9, step, recycled).tobytes() + recycled.tobytes()
    yield session.step_all([8]).tobytes()


@pytest.mark.parametrize("choosing", [False, True], ids=["all keys", "chosen keys"])
def test_conversations_that_share_a_scratch(choosing, model, tmp_path):
    """Sessions of different sizes that take turns in one scratch, a call each, give the bits that
    each gives alone in its own; also where rows attend to few of the keys."""
    if choosing:
        tiny.write(tmp_path, tiny.GROUPS, seed=7)
        model = Model.open(Container.open(tmp_path), mtp=model.has_mtp)
    prompts = [[n % model.config.vocab_size for n in (*ids, *ids)] for ids in (PROMPT, range(80))]
    sizes = [(96, ROWS), (192, 5 * ROWS)]
    alone = [Session(model, *size) for size in sizes]
    expected = [list(strokes(one, ids)) for one, ids in zip(alone, prompts, strict=True)]
    scratch = Scratch(model, 192, 5 * ROWS)
    shared = [Session(model, *size, scratch) for size in sizes]
    turns = [strokes(one, ids) for one, ids in zip(shared, prompts, strict=True)]
    found: list[list[bytes]] = [[], []]
    for both in zip_longest(*turns):
        for mine, given in zip(found, both, strict=True):
            mine += [given] if given is not None else []
    assert found == expected
    assert [state(one) for one in shared] == [state(one) for one in alone]


def test_a_scratch_that_is_too_small(model):
    """A session asks for no more context and rows than its scratch is for."""
    scratch = Scratch(model, CONTEXT, ROWS)
    for context, rows in ((CONTEXT + 1, ROWS), (CONTEXT, ROWS + 1)):
        with pytest.raises(CoreError, match=r"not possible in a scratch for 96 with 8$"):
            Session(model, context, rows, scratch)
    with pytest.raises(CoreError, match="is not possible"):
        Scratch(model, 1 << 25, 1)
