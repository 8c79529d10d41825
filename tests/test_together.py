"""Sessions that step together: company changes no bit, and what a pass cost is shared out."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import tiny

from colibri.container import Container
from colibri.convert import Formats, convert_directory
from colibri.errors import Cancelled, ColibriError, ContextFull, CoreError
from colibri.formats import Format
from colibri.model import Model
from colibri.scratch import Scratch
from colibri.session import Session, step_together

CONTEXT, ROWS = 96, 12
SIZES = ((96, 12), (64, 5), (80, 8))  # context and rows of each session
READS = [("mmap", 0), ("direct", 1), ("direct", 5)]


@pytest.fixture(scope="module")
def few_keys(tmp_path_factory) -> Model:
    """A tiny model in int4 whose rows attend to a few of the keys before them."""
    source = tmp_path_factory.mktemp("plain")
    tiny.write(source, tiny.GROUPS, seed=5)
    target = tmp_path_factory.mktemp("own") / "model"
    convert_directory(source, target, Formats(experts=Format.parse("int4-g8")))
    return Model.open(Container.open(target), threads=2)


@pytest.fixture(params=["all keys", "chosen keys"])
def model(request, few_keys, demo_model) -> Model:
    """The demo, and the tiny model."""
    return few_keys if request.param == "chosen keys" else demo_model


def company(model: Model) -> list[Session]:
    """Three conversations of different lengths in one scratch."""
    scratch = Scratch(model, CONTEXT, ROWS)
    sessions = [Session(model, *size, scratch) for size in SIZES]
    begin(sessions)
    return sessions


def begin(sessions: list[Session]) -> None:
    for number, session in enumerate(sessions):
        session.prefill([(7 * n + number) % 251 for n in range((3, 17, 30)[number])])


def state(session: Session) -> tuple[list[int], list[bytes]]:
    """Tokens, and the filled bytes of every cache."""
    main, found = session.model.config.num_hidden_layers, []
    for layer in range(session.model.layers):
        length = session.length if layer < main else session.mtp_length
        for kind in ("kv", "index"):
            rows = session.cache(layer, kind)
            found.append(b"" if rows is None else rows[:length].tobytes())
    return list(session.tokens), found


def seen(session: Session) -> Iterator[object]:
    """All that a session shows of its last step."""
    rows, layers = session.rows, range(session.model.config.num_hidden_layers)
    yield session.logits[:rows].tobytes()
    yield session.hidden.tobytes()
    chosen = [session.experts(layer, rows) for layer in layers]
    yield [None if experts is None else experts.tobytes() for experts in chosen]
    yield [session.captured(layer, row) for layer in layers for row in range(rows)]


def follow(session: Session, kept: int) -> bytes:
    """Take back all but some of the last rows, and draft from them: as verification does."""
    session.rewind(session.length - session.rows + kept)
    state = np.empty(session.model.config.hidden_size, np.float32)
    logits = session.catch_up(9, state)
    return b"" if logits is None else logits.tobytes() + session.mtp_draft(3, 1, state).tobytes()


@pytest.mark.parametrize(("io", "slots"), READS, ids=lambda value: str(value))
def test_company_changes_no_bit(model, io, slots):
    """Rounds of 1 to 4 rows each, of which some are taken back, drafts in between: every logit,
    hidden state, expert, index set and cache is as in sessions that step alone."""
    rng = random.Random(slots)
    model.set_residency(io, slots)
    shared, alone = company(model), [Session(model, *size) for size in SIZES]
    begin(alone)
    for session in (*shared, *alone):
        session.capture(True)
    for _ in range(6):
        group = rng.sample(range(3), rng.choice((2, 3)))
        for number in group:
            shared[number].staged = [rng.randrange(250) for _ in range(rng.randint(1, 4))]
            alone[number].step_all(shared[number].staged)
        step_together([shared[number] for number in group])
        for number in group:
            mine, other = shared[number], alone[number]
            assert list(seen(mine)) == list(seen(other)) and not mine.staged
            kept = rng.randint(1, mine.rows)
            assert follow(mine, kept) == follow(other, kept)
    assert [state(session) for session in shared] == [state(session) for session in alone]
    model.set_residency("mmap", 0)


def test_what_a_pass_cost_is_shared_out(few_keys):
    """Bytes, experts and waits of a pass are its sessions' by their rows and add up to the whole; a
    row's own keys and scores are its session's; weights count once and not for each."""
    few_keys.set_residency("direct", 4)
    shared, alone = company(few_keys), [Session(few_keys, *size) for size in SIZES]
    begin(alone)
    before = [session.counters() for session in (*shared, *alone)]
    works = [session.work() for session in shared]
    for session, other, rows in zip(shared, alone, (1, 4, 2), strict=True):
        session.staged = [5] * rows
        other.step_all(session.staged)
    step_together(shared)
    spent = [
        {name: value - old[name] for name, value in session.counters().items()}
        for session, old in zip((*shared, *alone), before, strict=True)
    ]
    mine, apart = spent[:3], spent[3:]
    for name in ("forwards", "rows", "attended", "index_scores"):
        assert [one[name] for one in mine] == [one[name] for one in apart]
    for name in ("dense_bytes", "head_bytes"):
        assert sum(one[name] for one in mine) == max(one[name] for one in apart) > 0
    layers = [
        layer for layer in range(few_keys.layers - 1) if shared[0].experts(layer, 1) is not None
    ]
    union = [{e for s in shared for e in s.experts(layer, s.rows).flat} for layer in layers]
    assert sum(one["expert_uses"] for one in mine) == sum(map(len, union)) > 0
    assert mine[1]["dense_bytes"] == pytest.approx(4 * mine[0]["dense_bytes"], abs=4)
    for session, old, rows, whole in zip(shared, works, (1, 4, 2), mine, strict=True):
        kind = "verify" if rows > 1 else "plain"
        assert {k: v - old[kind][k] for k, v in session.work()[kind].items()} == whole
    few_keys.set_residency("mmap", 0)


def refused(sessions: list[Session], error: type[ColibriError], words: str) -> None:
    """The pass fails and has changed nothing."""
    before = [(state(session), list(session.staged)) for session in sessions]
    with pytest.raises(error, match=words):
        step_together(sessions)
    assert [(state(session), session.staged) for session in sessions] == before


def test_one_that_cannot_step_stops_all(few_keys):
    """A full context, an unknown token, a cancelled session, a stranger to the scratch, a session
    twice or too many rows: an error, nothing is changed, and the others can go on."""
    first, second, third = sessions = company(few_keys)
    for session in sessions:
        session.staged = [1, 2]
    second.staged = [1, few_keys.config.vocab_size]
    refused(sessions, CoreError, "outside the vocabulary")
    second.staged = [1] * 6
    refused(sessions, CoreError, "6 rows asked for, 1 to 5 possible")
    second.staged = [1] * 5
    first.staged = third.staged = [1] * 8
    refused(sessions, CoreError, "rows together, in a scratch for 12")
    first.staged = second.staged = third.staged = [1]
    refused([first, second, first], CoreError, "with itself")
    stranger = Session(few_keys, 32, 4)
    stranger.staged = [1]
    refused([first, stranger], CoreError, "share a scratch")
    second.cancel()
    refused(sessions, Cancelled, "cancelled")
    second.cancel(False)
    second.prefill([1] * (second.context - second.length))
    refused(sessions, ContextFull, "no room for 1 more")
    step_together([first, third])
    assert first.tokens[-1] == third.tokens[-1] == 1
