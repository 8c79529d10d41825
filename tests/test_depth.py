"""Depth policies: the guard's rule, what the controller learns, and that no clock picks a token."""

from __future__ import annotations

from math import sqrt

import market
import pytest
from market import Machine, Text
from toolbox import TOOLS, tool

from colibri.costs import FixedCosts, Mean, MeasuredCosts
from colibri.depth import CAP, Acceptance, Controller, Fixed, Guard, depth_policy


def controller() -> Guard:
    """What DRAFT unset means for greedy text."""
    return Guard(Controller(MeasuredCosts()))


# ---- the guard --------------------------------------------------------------------------------


def test_the_guard_stops_nearly_useless_drafts():
    """Of 24 drafts verified fewer than a tenth stood: no drafts for 256 tokens, then again."""
    guard = Guard(Fixed(3))
    for _ in range(8):
        assert guard.plan(9) == 3
        guard.record(3, 1, 0, [])
    assert guard.rest == 256 and "paused for 256" in guard.state
    guard.rest = 0  # whoever decodes counts it down
    assert guard.plan(9) == 3 and guard.state == "depth 3"


def test_the_guard_waits_for_24_drafts_and_for_less_than_a_tenth():
    """23 refused drafts do not stop it, nor do 2 accepted ones of 24 with 1 in 10 and more."""
    guard = Guard(Fixed(1))
    for _ in range(23):
        guard.record(1, 1, 0, [])
    assert guard.rest == 0
    guard = Guard(Fixed(10))
    guard.record(20, 3, 2, [])
    guard.record(10, 2, 1, [])
    assert guard.rest == 0  # 3 of 30 is a tenth
    guard.record(1, 1, 0, [])
    assert guard.rest == 256


def test_a_good_past_does_not_hide_a_bad_present():
    """After a thousand accepted drafts the guard still notices useless ones within 400."""
    guard = Guard(Fixed(4))
    for _ in range(250):
        guard.record(4, 4, 4, [])
    refused = 0
    while not guard.rest:
        guard.record(4, 1, 0, [])
        refused += 4
    assert refused <= 2 * Guard.MEMORY


def test_a_pause_outlives_the_turn_only_where_text_cannot_depend_on_it():
    """A paused guard stays paused in the next turn, but starts afresh where depth changes text."""
    for clock_free, rest in ((False, 256), (True, 0)):
        guard = depth_policy(2, clock_free=clock_free, guarded=True)
        for _ in range(12):
            guard.record(2, 1, 0, [])
        assert guard.rest == 256
        guard.begin()
        assert guard.rest == rest


# ---- what is learned --------------------------------------------------------------------------


def test_acceptance_follows_the_record_not_the_claim():
    """A sure drafter that is always wrong is soon not believed, in bands not yet seen either."""
    acceptance = Acceptance(3)
    sure, other = acceptance.band(0.95), acceptance.band(0.85)
    assert acceptance.chance(0, sure) > 0.9
    for _ in range(15):
        acceptance.judged(0, sure, False)
    assert acceptance.chance(0, sure) < 0.1
    assert acceptance.chance(1, sure) < 0.25
    assert acceptance.chance(0, other) < 0.5
    assert acceptance.chance(0, acceptance.band(float("nan"))) < 0.1


def test_acceptance_differs_by_position():
    """The first draft may be good and the third bad at the same confidence."""
    acceptance, band = Acceptance(3), 7
    for _ in range(60):
        acceptance.judged(0, band, True)
        acceptance.judged(2, band, False)
    assert acceptance.chance(0, band) > 0.85 and acceptance.chance(2, band) < 0.15


def test_measured_costs_interpolate_and_never_fall():
    """Depths between and beyond those seen lie on a line through them; more rows cost more."""
    costs = MeasuredCosts()
    for _ in range(40):
        costs.record([("plain", 1, 1.0)])
        costs.record([("absorb", 2, 0.2), ("draft", 1, 0.1), ("pick", 0, 9.0), ("verify", 5, 3.0)])
    passes = costs.passes(8)
    assert passes == sorted(passes)
    for rows, seconds in ((1, 1.0), (3, 2.0), (5, 3.0), (8, 4.5)):
        assert passes[rows - 1] == pytest.approx(seconds, rel=0.06)
    assert costs.absorb == pytest.approx(0.2) and costs.draft == pytest.approx(0.1)


def test_rows_that_wait_are_not_the_price_of_a_draft():
    """An absorb that only catches up (no drafts follow) does not count as a draft's cost."""
    costs = MeasuredCosts()
    costs.record([("absorb", 64, 50.0), ("plain", 1, 1.0)])
    costs.record([("absorb", 64, 50.0), ("absorb", 2, 0.2), ("verify", 2, 1.5)])
    assert costs.absorb == pytest.approx(0.2)
    assert costs.waiting == pytest.approx(50 / 64)
    costs = MeasuredCosts()  # nine may be a long step's with a draft, or nine that waited
    costs.record([("plain", 1, 1.0), ("absorb", 9, 0.9), ("verify", 2, 1.5)])
    assert costs.absorb == costs.waiting == 0.0


def test_one_wild_measurement_is_not_believed():
    """A pass during which the machine slept hardly counts; a slow first pass is soon forgotten."""
    mean = Mean(32)
    for _ in range(32):
        mean.add(1.0)
    mean.add(3600.0)
    assert mean.value(0) < 1.05
    mean = Mean(32)
    for value in (9.0, 1.0, 1.1):
        mean.add(value)
    assert mean.value(0) == pytest.approx(1.05, rel=0.01)


def test_a_machine_that_became_slower_is_noticed():
    """When every pass takes twice as long, the mean follows within its memory."""
    mean = Mean(32)
    for value in [1.0] * 64 + [2.0] * 64:
        mean.add(value)
    assert mean.value(0) > 1.7


@pytest.mark.parametrize("clock", [lambda n: 0.0, lambda n: 1e-4 if n % 7 else 0.0,
                                   lambda n: 1e-9 if n % 5 else 1e9])  # fmt: skip
def test_no_clock_ends_a_turn(clock):
    """A clock that stands still, now and then or always, or jumps by ages, raises nothing."""
    policy, number = Controller(MeasuredCosts()), 0
    for _ in range(200):
        depth = policy.plan(3)
        laps = [("absorb", 1, clock(number + 1))] * bool(depth) + [("draft", 1, clock(number + 2))]
        number += 3
        kept = sum(policy.keep(i, 0.9) for i in range(depth))
        end = ("verify", kept + 1) if kept else ("plain", 1)
        policy.record(kept, kept, kept, [*(laps if depth else []), (*end, clock(number))])
        policy.rest = 0
    assert policy.costs.passes(4) == sorted(policy.costs.passes(4))


# ---- the controller -----------------------------------------------------------------------------

MACHINES = {
    "cached": Machine(0.35, 0.25, 0.2),
    "cheap rows": Machine(0.1, 0.05, 0.05),
    "streaming": Machine(0.95, 0.15, 0.12, noise=0.2),
    "between": Machine(0.6, 0.2, 0.15, noise=0.1),
    "bend": Machine(0.2, 0.1, 0.1, bend=0.1),
    "shared": Machine(0.35, 0.25, 0.2, slow=1.7),
    "shared, long spells": Machine(0.35, 0.25, 0.2, slow=1.7, spell=300.0),
}
TEXTS = {
    "story": Text(12, 1),
    "chat": Text(4, 1.5),
    "prose": Text(1.5, 1.5),
    "noise": Text(0.5, 8),
    "overconfident": Text(8, 1, lambda confidence: 0.1),
    "modest": Text(3, 3, sqrt),
    "fading": Text(12, 1, fade=0.8),
}


def mean_rate(make, machine: Machine, text: Text) -> float:
    """Tokens per second over a few turns of 600 tokens."""
    return sum(market.run(make(), machine, text, 600, seed) for seed in range(2)) / 2


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_controller_is_near_the_best_fixed_depth(machine, text):
    """From a cold start: at least 94% of the best fixed depth, and 97.5% of no drafts at all."""
    rates = {
        depth: mean_rate(lambda depth=depth: Fixed(depth), MACHINES[machine], TEXTS[text])
        for depth in (0, 1, 3, 7)
    }
    found = mean_rate(controller, MACHINES[machine], TEXTS[text])
    assert found > 0.94 * max(rates.values())
    assert found > 0.975 * rates[0]


def test_the_controller_drafts_deep_only_where_it_pays():
    """Cheap rows and sure drafts: deep. Dear rows: none, but for rare attempts."""
    policy = Controller(MeasuredCosts())
    market.run(policy, MACHINES["cheap rows"], TEXTS["story"], 600, 1)
    assert policy.state == f"up to {CAP}" and policy.plan(15) == CAP
    policy = Controller(MeasuredCosts())
    market.run(policy, MACHINES["streaming"], TEXTS["noise"], 600, 1)
    assert policy.state.startswith("waiting")
    depths, rests = [], []
    for _ in range(5):
        rests.append(policy.rest)
        depths.append(policy.plan(15))
        policy.record(0, 0, 0, [("plain", 1, 1.0)])
    assert max(depths) <= 1 and min(rests[1:]) > 40


@pytest.mark.parametrize(
    "waiting, least, most", [(0.0, 50, 70), (0.008, 250, 350), (0.02, 1024, 1024)]
)
def test_what_a_try_would_lose_decides_when_it_is_made(waiting, least, most):
    """A draft of 0.6 passes more than it gives is tried again after some 60 tokens; after more when
    rows that wait cost as well, and never in a text of 1,000 when they alone cost too much."""
    costs = FixedCosts(row=0.9, absorb=0.1)
    costs.waiting = waiting
    policy = Controller(costs)
    policy._mean[0] = 0.4  # the chance of a first draft
    policy.record(0, 0, 0, [])
    assert least <= policy.rest <= most


def test_the_controller_notices_that_a_text_becomes_easy():
    """After a long stretch of noise, good drafts are found again within 300 tokens."""
    policy = controller()
    market.run(policy, MACHINES["cached"], TEXTS["noise"], 1500, 2)
    before = market.run(Fixed(0), MACHINES["cached"], TEXTS["story"], 300, 3)
    market.run(policy, MACHINES["cached"], TEXTS["story"], 300, 3)
    assert market.run(policy, MACHINES["cached"], TEXTS["story"], 600, 3) > 1.15 * before


def test_depth_is_earned():
    """However cheap drafts are: one at first, then at most twice the deepest step so far."""
    policy, planned = Controller(FixedCosts(0.01, 0.01, 0.01)), []
    for _ in range(5):
        planned.append(policy.plan(9))
        kept = sum(policy.keep(step, 1.0) for step in range(planned[-1]))
        policy.record(kept, kept, kept, [])
    assert planned == [1, 2, 4, CAP, CAP]


def test_depth_is_never_more_than_asked():
    """The limit of the step and the cap bound every plan."""
    for policy in (Fixed(5), controller(), Controller(FixedCosts(), 2)):
        for limit in range(1, 5):
            assert policy.plan(limit) <= limit


# ---- no clock picks a token ---------------------------------------------------------------------


def test_the_clock_free_policy_gives_the_same_depths_on_any_machine():
    """Its plans depend on confidences and acceptances alone, and each turn starts alike."""

    def plans(machine: Machine) -> list[int]:
        policy = depth_policy(None, clock_free=True, guarded=True)
        made: list[int] = []
        inner = policy.plan
        policy.plan = lambda limit: made.append(inner(limit)) or made[-1]
        for _ in range(2):
            market.run(policy, machine, TEXTS["chat"], 200, 4)
        return made

    quiet = Machine(0.35, 0.25, 0.2, noise=0.0)
    slow = Machine(3.0, 2.0, 1.0, noise=0.0)
    assert plans(quiet) == plans(slow)
    assert plans(quiet)[: len(plans(quiet)) // 2] == plans(quiet)[len(plans(quiet)) // 2 :]


def test_draft_settings():
    """DRAFT=0 is no policy, DRAFT=n a fixed one, unset the controller; MTP is guarded."""
    assert depth_policy(0, clock_free=False, guarded=True) is None
    fixed = depth_policy(4, clock_free=False, guarded=False)
    assert isinstance(fixed, Fixed) and fixed.depth == 4
    guarded = depth_policy(None, clock_free=False, guarded=True)
    assert isinstance(guarded, Guard) and isinstance(guarded.policy, Controller)
    assert isinstance(guarded.policy.costs, MeasuredCosts)
    near, far = (
        depth_policy(None, clock_free=True, guarded=False, nbytes=nbytes).costs
        for nbytes in (10 << 20, 400 << 30)
    )
    assert isinstance(near, FixedCosts) and isinstance(far, FixedCosts)
    assert near.row < far.row


def test_the_table_knows_when_its_bars_are_met(monkeypatch):
    """A cell of tools/bench_spec.py is met by a controller as fast as the best depth, and missed by
    a slower one or by one text that differs."""
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = tool("bench_spec")

    def met(seconds: float, last: int) -> bool:
        runs = {depth: spec.Run(None, [1, 2, 3], 1.0, 3) for depth in (0, 1)}
        return spec.line("cell", [runs | {None: spec.Run(None, [1, 2, last], seconds, 3)}])[1]

    assert met(1.0, 3) and met(1.01, 3)
    assert not met(1.05, 3) and not met(1.0, 4)
