"""The ledger: every second and every counted thing belongs to exactly one segment."""

from __future__ import annotations

from itertools import count
from time import perf_counter

import pytest
from serving import STORY, open_engine
from toy import VOCAB, ToyDrafter, ToySession, drawn, remembered

from colibri import turn as turns
from colibri.depth import Fixed
from colibri.drafting import MtpDrafter
from colibri.ledger import ABSORB, DRAFT, PICK, PLAIN, SEGMENTS, TEXT, VERIFY, Balance, Ledger
from colibri.sampling import Sampler, SamplingParams
from colibri.session import Session
from colibri.speculation import Limits, spec_decode


class Core:
    """Counters that a test moves by hand."""

    def __init__(self) -> None:
        self.now = {name: {"expert_uses": 100} for name in SEGMENTS[:4]}

    def work(self) -> dict[str, dict[str, int]]:
        return {name: dict(counters) for name, counters in self.now.items()}


def test_time_and_counters_go_to_the_segment_that_was_open():
    """A stopwatch with one hand: segments get what passed while they were open, laps in order."""
    ticks, core = count(), Core()
    ledger = Ledger(clock=lambda: float(next(ticks)))
    ledger.begin(core)
    for name, rows, uses in ((PLAIN, 1, 5), (ABSORB, 3, 2), (DRAFT, 1, 1), (VERIFY, 4, 11)):
        ledger.enter(name, rows)
        core.now[name]["expert_uses"] += uses
        ledger.enter(PICK)
    ledger.enter(TEXT)
    ledger.end()
    assert ledger.wall == sum(segment.seconds for segment in ledger.segments.values())
    used = {name: ledger.segments[name].core.get("expert_uses", 0) for name in SEGMENTS}
    assert used == {DRAFT: 1, VERIFY: 11, ABSORB: 2, PLAIN: 5, PICK: 0, TEXT: 0}
    laps = [(PLAIN, 1, 1.0), (ABSORB, 3, 1.0), (DRAFT, 1, 1.0), (VERIFY, 4, 1.0)]
    assert ledger.laps() == laps
    assert ledger.laps() == []
    assert ledger.as_dict()["segments"][VERIFY]["forwards"] == 1


def test_acceptance_by_position_and_the_equation():
    """Means per step with drafts, tokens per step, and the gain over plain steps."""
    ticks, core = count(), Core()
    ledger = Ledger(clock=lambda: float(next(ticks)))
    assert ledger.balance() is None and ledger.tokens_per_forward is None
    ledger.begin(core)
    for accepted in (2, 0, 1, 2):
        ledger.enter(ABSORB, 1)
        ledger.enter(DRAFT, 1)
        ledger.enter(VERIFY, 3)
        ledger.enter(PICK)
        ledger.judged(2, min(accepted + 1, 2), accepted)
        ledger.emitted(VERIFY, accepted + 1)
    without = ledger.balance()
    assert without.plain is None and without.gain is None
    assert "no plain step" in without.lines()[1]
    ledger.enter(PLAIN, 1)
    ledger.enter(PICK)
    ledger.emitted(PLAIN, 1)
    ledger.end()
    assert (ledger.offered, ledger.accepted, ledger.proposed) == ([4, 3], [3, 2], 8)
    assert ledger.acceptance_length == 9 / 4
    assert ledger.tokens_per_forward == 10 / 5
    balance = ledger.balance()
    assert balance == Balance(4, 1.0, 1.0, 1.0, 9 / 4, 1.0)
    assert balance.gain == pytest.approx(0.75)
    assert "did not pay, 0.75 times" in balance.lines()[1]


def test_the_parts_of_a_real_turn_add_up(demo_model, demo_tokenizer):
    """On the demo model: the parts are the whole, within a clock outside; counters to the last."""
    session = Session(demo_model, 256, 64)
    ids = demo_tokenizer.encode_template("[gMASK]<sop><|user|>Hello<|assistant|><think></think>")
    logits, ledger = session.prefill(ids), Ledger()
    for name, total in session.counters().items():
        assert sum(work[name] for work in session.work().values()) == total, name
    before, begun = session.counters(), perf_counter()
    sampler = Sampler(SamplingParams(0), demo_model.config.vocab_size)
    loop = spec_decode(session, logits, sampler, MtpDrafter(session), Fixed(3), Limits(150), ledger)
    tokens = [token for block in loop for token in block]
    outside, after = perf_counter() - begun, session.counters()
    parts = sum(segment.seconds for segment in ledger.segments.values())
    assert parts == pytest.approx(ledger.wall, rel=1e-6)
    assert parts <= outside
    assert ledger.tokens == len(tokens) == 150
    for name in before:
        total = sum(segment.core.get(name, 0) for segment in ledger.segments.values())
        assert total == after[name] - before[name], name
    main = [ledger.segments[name] for name in (VERIFY, PLAIN)]
    assert sum(s.rows for s in main) == after["rows"] - before["rows"]
    assert sum(s.core.get("forwards", 0) for s in main) == sum(s.forwards for s in main)
    assert ledger.segments[VERIFY].core["head_bytes"] > 0
    draft, absorb = ledger.segments[DRAFT], ledger.segments[ABSORB]
    assert draft.rows == draft.forwards
    # two passes a verification, but the last one may be cut short by the limit
    assert 0 <= 2 * ledger.segments[VERIFY].forwards - draft.forwards <= 2
    assert absorb.rows == session.mtp_length - (len(ids) - 1)


class Clock:
    """Time passes only when someone says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def passes(self, seconds: float) -> None:
        self.now += seconds


class TimedSession(ToySession):
    """A pass takes a second and half a second more for each further row."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(remembered(lambda tokens: drawn("clock", tokens)), [3, 1])
        self.clock = clock

    def step_all(self, ids, want="all"):
        self.clock.passes(0.5 + 0.5 * len(ids))
        return super().step_all(ids, want)


class TimedDrafter(ToyDrafter):
    """Absorbs in 0.25 seconds a step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda tokens: drawn("clock" if len(tokens) % 3 else "other", tokens))
        self.clock = clock

    def draft(self, pending, limit, rule, depth, ledger):
        ledger.enter(ABSORB, 1)
        self.clock.passes(0.25)
        return super().draft(pending, limit, rule, depth, ledger)


@pytest.mark.parametrize("depth", [0, 2, 5])
def test_every_second_of_a_turn_is_in_exactly_one_segment(depth):
    """Against a clock outside the loop: passes, drafts and the caller's own time."""
    clock = Clock()
    session, ledger = TimedSession(clock), Ledger(lambda: clock.now)
    sampler, drafter = Sampler(SamplingParams(0), VOCAB), TimedDrafter(clock)
    logits, begun = session.logits(), clock.now
    for _ in spec_decode(session, logits, sampler, drafter, Fixed(depth), Limits(30), ledger):
        clock.passes(0.125)  # to show the tokens
    seconds = {name: segment.seconds for name, segment in ledger.segments.items()}
    rows = [len(step) for step in session.steps]
    assert sum(seconds.values()) == ledger.wall == clock.now - begun
    assert seconds[PLAIN] == rows.count(1)
    assert seconds[VERIFY] == sum(0.5 + 0.5 * n for n in rows if n > 1)
    assert seconds[TEXT] == 0.125 * (len(rows) + 1)
    assert seconds[ABSORB] == 0.25 * len(rows) * (depth > 0) - 0.25 * late(rows, depth)


def test_what_other_turns_take_is_in_no_segment():
    """Seconds that `waited` tells of are in the wall clock beside the segments, in no lap."""
    clock = Clock()
    ledger = Ledger(lambda: clock.now)
    ledger.begin(Core())
    for _ in range(3):
        ledger.enter(PLAIN, 1)
        clock.passes(1)
        ledger.enter(TEXT)
        clock.passes(0.5)
        for seconds in (2, 4):
            clock.passes(seconds)
            ledger.waited(seconds)
        clock.passes(0.25)
        ledger.enter(PICK)
    ledger.end()
    seconds = {name: segment.seconds for name, segment in ledger.segments.items()}
    assert seconds == dict.fromkeys(SEGMENTS, 0) | {PLAIN: 3, TEXT: 2.25}
    assert (ledger.others, ledger.wall) == (18, 18 + 5.25) == (18, clock.now)
    assert ledger.laps() == [(PLAIN, 1, 1.0)] * 3
    assert ledger.as_dict()["others_seconds"] == 18


def test_a_turn_left_early_has_a_finished_ledger(monkeypatch):
    """Whoever still holds the decoding loop, its ledger has ended before the receipt is made."""
    held, loop = [], turns.spec_decode
    monkeypatch.setattr(turns, "spec_decode", lambda *given: held.append(loop(*given)) or held[-1])
    engine = open_engine(temperature="0")
    turn = engine.answer(engine.chat(STORY))
    steps = turn.steps()
    while not next(steps).tokens:
        continue
    steps.close()
    assert held[0].gi_frame is None and turn.receipt.answer_seconds == turn.ledger.wall > 0
    assert turn.ledger.others == 0


def late(rows: list[int], depth: int) -> int:
    """Steps for which there was no room to draft: the last one, when one token was left."""
    return int(depth > 0 and rows[-1] == 1)
