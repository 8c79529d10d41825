"""The engine on float32 containers against transformers: 2e-5 on every logit, equal choices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import oracle
import pytest

from colibri.container import Container
from colibri.convert import convert_directory
from colibri.formats import Format
from colibri.layout import Formats
from colibri.model import Model
from colibri.session import Session

NEAR = 2e-5
Open = Callable[..., Session]


@pytest.fixture(scope="module")
def open_session(tmp_path_factory) -> Open:
    """Sessions on a fixture's checkpoint; models are kept, sessions are new."""

    @cache
    def model(case: str, way: str | None) -> Model:
        directory = tmp_path_factory.mktemp("tiny")
        return Model.open(Container.open(oracle.load(case).checkpoint(directory, way)))

    def session(case: str, way: str | None = None, context: int = 64, rows: int = 64) -> Session:
        return Session(model(case, way), context, rows)

    return session


def run(session: Session, ids: np.ndarray, want: str = "all") -> np.ndarray:
    """step_all with its own copy of the logits."""
    return session.step_all([int(i) for i in ids], want).copy()


def absorb(session: Session, hidden: np.ndarray, tokens: np.ndarray):
    """mtp_absorb: logits [V] and the hidden [H] to recycle, both copied."""
    state = np.empty(hidden.shape[1], np.float32)
    logits = session.mtp_absorb(np.ascontiguousarray(hidden), [int(t) for t in tokens], state)
    return logits.copy(), state


def assert_rows(logits: np.ndarray, expected: np.ndarray) -> None:
    """Every logit near, every arg max the same."""
    assert logits.shape == expected.shape and np.isfinite(logits).all()
    assert oracle.worst(logits, expected) < NEAR
    assert np.array_equal(logits.argmax(-1), expected.argmax(-1))


def assert_sets(session: Session, layer: int, first: int, sets: np.ndarray) -> None:
    """The captured index sets of the last step's rows, at positions first.."""
    for row, expected in enumerate(sets):
        found = session.captured(layer, row)
        found = list(range(first + row + 1)) if found is None else found
        assert found == oracle.positions(expected), (layer, first + row)


def assert_step(session: Session, fixture: oracle.Oracle, first: int, logits: np.ndarray) -> None:
    """Everything one step gave, for rows first.. of the prompt."""
    rows = slice(first, first + len(logits))
    assert_rows(logits, fixture.logits[rows])
    assert oracle.worst(session.hidden[: len(logits)], fixture.hidden[rows]) < NEAR
    for layer, experts in fixture.experts().items():
        assert np.array_equal(session.experts(layer, len(logits)), experts[rows]), layer
    for layer, sets in fixture.sets().items():
        assert_sets(session, layer, first, sets[rows])


def drafting(session: Session, draft: oracle.Draft, logits: np.ndarray, state: np.ndarray) -> None:
    """Step 0 was absorbed; every later step is drafted from the oracle's own tokens. A step that
    shares step 0's index set sees no row beyond that one."""
    config, last = session.model.config, draft.rows - 1
    for step, token in enumerate(draft.fed):
        if step:
            logits = session.mtp_draft(int(token), step, state).copy()
        assert_rows(logits[None], draft.logits[step][None])
        assert oracle.worst(state, draft.hidden[step]) < NEAR, step
        seen = last if config.index_share_for_mtp_iteration else last + step
        assert_sets(session, config.num_hidden_layers, seen, draft.sets[step][None])


# ---- main model -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 48])
@pytest.mark.parametrize("case", oracle.CASES)
def test_prefill(open_session, case, rows):
    """A prompt shorter than, equal to and longer than index_topk, in one pass."""
    session, fixture = open_session(case), oracle.load(case)
    session.capture(True)
    assert_step(session, fixture, 0, run(session, fixture.ids[:rows]))


@pytest.mark.parametrize("case", oracle.CASES)
def test_cached_decode(open_session, case):
    """After a prefill, one token at a time."""
    session, fixture = open_session(case), oracle.load(case)
    session.capture(True)
    run(session, fixture.ids[:6], "none")
    for at in range(6, len(fixture.ids)):
        assert_step(session, fixture, at, run(session, fixture.ids[at : at + 1]))


@pytest.mark.parametrize("size", [2, 7, 16])
@pytest.mark.parametrize("case", oracle.CASES)
def test_chunks(open_session, case, size):
    """A prompt cut into chunks, some of them astride index_topk."""
    session, fixture = open_session(case, rows=size), oracle.load(case)
    session.capture(True)
    for at in range(0, len(fixture.ids), size):
        assert_step(session, fixture, at, run(session, fixture.ids[at : at + size]))


@pytest.mark.parametrize("case", oracle.CASES)
def test_verify_and_rewind(open_session, case):
    """A verify batch of wrong tokens, rewound, leaves no trace in a batch of right ones."""
    session, fixture = open_session(case), oracle.load(case)
    session.capture(True)
    run(session, fixture.ids[:25], "none")
    run(session, fixture.ids[:6])
    session.rewind(25)
    assert_step(session, fixture, 25, run(session, fixture.ids[25:31]))
    run(session, fixture.ids[:3])
    session.rewind(31)
    assert_step(session, fixture, 31, run(session, fixture.ids[31:]))


@pytest.mark.parametrize("want", ["last", "none"])
def test_fewer_logits(open_session, want):
    """Asking for the last row's logits, or for none, changes nothing but their number."""
    session, fixture = open_session("groups"), oracle.load("groups")
    logits = run(session, fixture.ids[:20], want)
    assert len(logits) == (want == "last")
    if want == "last":
        assert_rows(logits, fixture.logits[19:20])
    assert oracle.worst(session.hidden[:20], fixture.hidden[:20]) < NEAR
    assert_rows(run(session, fixture.ids[20:21]), fixture.logits[20:21])


@pytest.mark.parametrize("case", oracle.CASES)
def test_written_container(case, tmp_path):
    """colibri's own layout in float32 holds the same model: equal bytes of logits."""
    source, form = oracle.load(case).checkpoint(tmp_path / "source"), Format.parse("f32")
    convert_directory(source, tmp_path / "written", Formats(form, form, form, form))
    ids = oracle.load(case).ids[:20]
    models = [Model.open(Container.open(tmp_path / name)) for name in ("source", "written")]
    one, other = (run(Session(model, 32, 32), ids).tobytes() for model in models)
    assert one == other


# ---- MTP layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", oracle.WAYS)
@pytest.mark.parametrize("case", oracle.CASES)
def test_mtp_drafts(open_session, case, way):
    """Absorb any number of prompt rows, then five draft steps: index sets shared, or their own."""
    session, fixture = open_session(case, way), oracle.load(case)
    session.capture(True)
    for draft in fixture.drafts(way):
        session.mtp_rewind(0)
        rows = draft.rows
        drafting(session, draft, *absorb(session, fixture.hidden[:rows], fixture.ids[1 : rows + 1]))


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize("way", oracle.WAYS)
def test_mtp_absorb_in_chunks(open_session, way, size):
    """However the rows are cut, with drafts in between or not, the absorbed state is the same."""
    session, fixture = open_session("groups", way), oracle.load("groups")
    session.capture(True)
    draft = fixture.drafts(way)[-1]
    for at in range(0, draft.rows, size):
        rows = slice(at, min(at + size, draft.rows))
        logits, state = absorb(session, fixture.hidden[rows], fixture.ids[1:][rows])
        if at % 2 and rows.stop < draft.rows:
            session.mtp_draft(7, 1, state)
    assert session.mtp_length == draft.rows
    drafting(session, draft, logits, state)


@pytest.mark.parametrize("way", oracle.WAYS)
@pytest.mark.parametrize("case", oracle.CASES)
def test_mtp_after_every_acceptance(open_session, case, way):
    """Five drafts, a verify batch, k of them accepted, for every k, and the next round's drafts."""
    fixture = oracle.load(case)
    start, (ids, expected) = fixture.accept_at, fixture.verify(way)
    for accepted, draft in enumerate(fixture.acceptances(way)):
        session = open_session(case, way)
        session.capture(True)
        run(session, fixture.ids[:start])
        logits, state = absorb(session, session.hidden[:start], fixture.ids[1 : start + 1])
        for step, token in enumerate(ids[1:], 1):
            assert logits.argmax() == token
            logits = session.mtp_draft(int(token), step, state).copy()
        assert_rows(run(session, ids), expected)
        session.rewind(start + 1 + accepted)
        tokens = [*ids[1:][:accepted], draft.fed[0]]
        drafting(session, draft, *absorb(session, session.hidden[: accepted + 1], tokens))


def test_mtp_prefill_primes(open_session):
    """prefill in chunks leaves the MTP cache where drafting after the prompt needs it."""
    session, fixture = open_session("groups", "shared", rows=9), oracle.load("groups")
    draft = next(d for d in fixture.drafts("shared") if d.rows == 41)
    logits = session.prefill([int(i) for i in fixture.ids[:41]])
    assert_rows(logits[None], fixture.logits[40:41])
    assert session.mtp_length == 40
    session.capture(True)
    last = (41 - 1) % 9
    drafting(session, draft, *absorb(session, session.hidden[last : last + 1], fixture.ids[41:42]))
