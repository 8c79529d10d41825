"""How many tokens to draft: a fixed depth, or a controller that weighs gain against cost.

A clock never chooses a token. Where the depth of a step can change the text (`rejection` and
`probabilistic` sampling), the controller runs on `FixedCosts`, reads no clock, asks for no memory
and forgets everything when a turn begins: the same seed gives the same text twice, anywhere.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from colibri.costs import Costs, FixedCosts, MeasuredCosts
from colibri.ledger import Lap

CAP = 7  # drafts a step at most, unless asked for more: deeper ones hardly ever stand


class DepthPolicy(Protocol):
    """Decides before, during and after drafting; one policy may serve many turns of one session.

    While `rest` is not 0 it wants no drafts and is not asked: whoever decodes counts it down, one
    a token, and neither plans nor records. So a loop without drafts costs hardly more than without
    a policy.
    """

    rest: int

    @property
    def state(self) -> str:
        """What it does now, for people."""

    def begin(self) -> None:
        """A turn starts."""

    def plan(self, limit: int) -> int:
        """The most drafts to ask for in this step, at most `limit`; 0: a plain step."""

    def keep(self, step: int, confidence: float) -> bool:
        """Whether draft number `step` (from 0) is worth a row to verify; if not, it is the last."""

    def deeper(self, step: int) -> bool:
        """Whether draft number `step` is worth making, given those kept before it."""

    def record(self, proposed: int, judged: int, accepted: int, laps: Sequence[Lap]) -> None:
        """What became of the step: see `Ledger.judged`; `laps`: the seconds of its parts."""


class Fixed:
    """Always `depth` drafts, as far as there is room."""

    rest = 0

    def __init__(self, depth: int) -> None:
        self.depth = depth

    @property
    def state(self) -> str:
        """The depth."""
        return f"depth {self.depth}"

    def begin(self) -> None:
        """Nothing to forget."""

    def plan(self, limit: int) -> int:
        """The fixed depth."""
        return min(self.depth, limit)

    def keep(self, step: int, confidence: float) -> bool:
        """Every draft."""
        return True

    def deeper(self, step: int) -> bool:
        """All the way."""
        return True

    def record(self, proposed: int, judged: int, accepted: int, laps: Sequence[Lap]) -> None:
        """Nothing to learn."""


class Guard:
    """Stops a policy whose drafts are nearly all refused; tries again 256 tokens later.

    The rule: of at least PROPOSED drafts verified, fewer than one in ONE_IN stood.
    """

    PROPOSED, ONE_IN, PAUSE = 24, 10, 256
    MEMORY = 192  # counts are halved here, so that a long good past cannot hide a bad present

    def __init__(self, policy: DepthPolicy, remembers: bool = True) -> None:
        self.policy = policy
        self._remembers = remembers
        self._forget()

    def _forget(self) -> None:
        self.proposed = self.accepted = self.rest = 0
        self._paused = False

    @property
    def state(self) -> str:
        """The policy's, or for how long it is paused."""
        if self._paused and self.rest:
            return f"paused for {self.rest} tokens (fewer than 1 in {self.ONE_IN} drafts stood)"
        return self.policy.state

    def begin(self) -> None:
        """A pause outlives the turn, unless each turn must start alike."""
        if not self._remembers:
            self._forget()
        self.policy.begin()

    def plan(self, limit: int) -> int:
        """As the policy says."""
        return self.policy.plan(limit)

    def keep(self, step: int, confidence: float) -> bool:
        """As the policy says."""
        return self.policy.keep(step, confidence)

    def deeper(self, step: int) -> bool:
        """As the policy says."""
        return self.policy.deeper(step)

    def record(self, proposed: int, judged: int, accepted: int, laps: Sequence[Lap]) -> None:
        """Count, and perhaps start a pause; else rest as the policy does."""
        self.policy.record(proposed, judged, accepted, laps)
        self.rest, self.policy.rest = self.policy.rest, 0
        self.proposed += proposed
        self.accepted += accepted
        self._paused = self._useless
        if self._paused:
            self.proposed = self.accepted = 0
            self.rest = self.PAUSE
        elif self.proposed >= self.MEMORY:
            self.proposed //= 2
            self.accepted //= 2

    @property
    def _useless(self) -> bool:
        return self.proposed >= self.PROPOSED and self.accepted * self.ONE_IN < self.proposed


class Acceptance:
    """The chance that a draft stands, given its place in the step and the drafter's confidence.

    Counts per (step, band of confidence) fade with a memory of about 50 drafts. Where they are
    few, the band's own record counts; where that is short, GUESS: about the square root of the
    confidence (a drafter names the verifier's favourite more often than it thinks), scaled by the
    ratio of drafts that stood to those expected so far.
    """

    EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
    GUESS = (0.22, 0.39, 0.53, 0.66, 0.76, 0.85, 0.93, 0.96, 0.985, 0.995)
    FADE = 0.98
    PRIOR = 3.0  # drafts that the less specific record is worth

    def __init__(self, steps: int) -> None:
        bands = len(self.GUESS)
        self._cells = [[[0.0, 0.0] for _ in range(bands)] for _ in range(steps)]  # stood, judged
        self._bands = [[0.0, 0.0] for _ in range(bands)]
        self._all = [4.0, 4.0]  # stood, expected by confidence alone

    def band(self, confidence: float) -> int:
        """The band a confidence falls into; NaN is no confidence at all."""
        return bisect(self.EDGES, confidence) if confidence == confidence else 0

    def chance(self, step: int, band: int) -> float:
        """The chance that such a draft stands, given that those before it did."""
        guess = min(self.GUESS[band] * self._all[0] / self._all[1], 0.995)
        stood, judged = self._bands[band]
        guess = (stood + self.PRIOR * guess) / (judged + self.PRIOR)
        stood, judged = self._cells[step][band]
        return (stood + self.PRIOR * guess) / (judged + self.PRIOR)

    def judged(self, step: int, band: int, stood: bool) -> None:
        """One draft was decided."""
        for sums, count in (
            (self._all, self.GUESS[band]),
            (self._bands[band], 1.0),
            (self._cells[step][band], 1.0),
        ):
            sums[0] = sums[0] * self.FADE + stood
            sums[1] = sums[1] * self.FADE + count


class Controller:
    """Chooses the depth of each step by marginal gain: a draft is made, and verified, when the
    tokens it is expected to add are worth more than the seconds it is expected to take.

    A token's worth is the seconds it takes at the best rate known (Dinkelbach's rule for ratios):
    what maximises gain at that price maximises tokens per second. While drafts do not pay, one is
    made and verified now and then, because texts and machines change: so rarely that what it is
    expected to lose is a hundredth of the time.
    """

    REFRESH = 8  # steps between recomputations of the thresholds
    TRIES = 0.01  # of the time is what drafts that do not pay may cost
    REST_LEAST, REST_MOST = 16, 1024  # plain tokens before drafting is tried again
    CHECK_FIRST, CHECK_LAST = 8, 64  # steps with drafts before a plain one, to know its cost now
    OPTIMISM = 0.7  # chance of a draft where nothing is known
    # Least weight of a new draft in the mean chance of its step; its weight during a try.
    LEARN, RELEARN = 0.05, 0.3
    # Drafting goes on while a first draft breaks even at a chance of PAYS or less; a try verifies
    # drafts down to 1 / HOPELESS of the chance at which verifying them breaks even.
    PAYS, HOPELESS = 0.985, 3.0

    def __init__(self, costs: Costs, cap: int = CAP, remembers: bool = True) -> None:
        self.cap = cap
        self.costs = costs
        self._remembers = remembers
        self._start()

    def _start(self) -> None:
        self.acceptance = Acceptance(self.cap)
        self._mean = [self.OPTIMISM] * self.cap  # expected chance of a draft not yet made
        self._made = [0] * self.cap
        self._seen: list[int] = []  # bands of the drafts of this step
        self._survival = 1.0
        self._reach = 1  # twice the deepest step so far: depth is earned
        self._steps = 0
        self._drafted, self._check = 0, self.CHECK_FIRST
        self.rest = 0  # tokens until drafting is tried again
        self._probing = False
        self.costs.begin()
        self._refresh()

    @property
    def state(self) -> str:
        """Whether drafting pays at present."""
        return f"up to {self.cap}" if self._pays else "waiting: drafts do not pay now"

    @property
    def _pays(self) -> bool:
        return self._make[0] <= self.PAYS

    def begin(self) -> None:
        """A policy that must give the same text twice starts each turn alike."""
        if not self._remembers:
            self._start()

    def plan(self, limit: int) -> int:
        """As deep as was earned when a first draft pays, one to try again, else none."""
        self._seen.clear()
        self._survival = 1.0
        self._probing = not self._pays
        if self._probing:
            return min(1, limit)
        if self.costs.wants_plain(self._drafted >= self._check):
            return 0
        return min(self.cap, limit, self._reach)

    def keep(self, step: int, confidence: float) -> bool:
        """Whether the tokens expected of this draft, and those behind it, pay for its row."""
        band = self.acceptance.band(confidence)
        chance = self.acceptance.chance(step, band)
        self._made[step] += 1
        weight = self.RELEARN if self._probing else max(self.LEARN, 1.0 / (4.0 + self._made[step]))
        self._mean[step] += weight * (chance - self._mean[step])
        self._survival *= chance
        least = self._worth[step] / (self.HOPELESS if self._probing else 1.0)
        if self._survival < least:
            return False
        self._seen.append(band)
        return True

    def deeper(self, step: int) -> bool:
        """Whether another draft pays, by the mean chance of drafts in its place."""
        return self._survival >= self._make[step]

    def record(self, proposed: int, judged: int, accepted: int, laps: Sequence[Lap]) -> None:
        """Learn from the step; once in a while, recompute the thresholds."""
        self.costs.record(laps)
        for step in range(min(judged, len(self._seen))):
            self.acceptance.judged(step, self._seen[step], step < accepted)
        self._reach = max(self._reach, 2 * proposed)
        if proposed:
            self._drafted += 1
        else:
            if self._drafted >= self._check:
                self._check = min(2 * self._check, self.CHECK_LAST)
            self._drafted = 0
        self._steps += 1
        if self._probing or self._steps % self.REFRESH == 0 or self._steps < 2 * self.cap:
            self._refresh()
            self.rest = 0 if self._pays else self._until_a_try()

    def _until_a_try(self) -> int:
        """Plain tokens after which one more draft is expected to have lost TRIES of their time.

        The rows that wait meanwhile are part of what a try costs.
        """
        plain, two = self.costs.passes(2)
        loss = (self.costs.absorb + two - plain) / plain - self._mean[0]
        share = self.TRIES - self.costs.waiting / plain
        rest = loss / share if share > 0.0 else self.REST_MOST
        return round(min(max(rest, self.REST_LEAST), self.REST_MOST))

    def _refresh(self) -> None:
        """Thresholds on the survival chance: `_make[i]` to make draft i, `_worth[i]` to keep it."""
        rows = self.costs.passes(self.cap + 1)  # of a pass with 1.. rows
        made = [self.costs.absorb] + [self.costs.draft] * (self.cap - 1)
        rate = self._best_rate(rows, made)
        row = [rate * (b - a) for a, b in pairwise(rows)]
        both = [rate * m + r for m, r in zip(made, row, strict=True)]
        self._make = [self._least(i, 0.0, 0.0, both) for i in range(self.cap)]
        self._worth = [
            min(price, self._least(i + 1, 1.0, price, both)) for i, price in enumerate(row)
        ]

    def _least(self, first: int, gain: float, price: float, both: Sequence[float]) -> float:
        """The least survival at which making and keeping drafts `first`.. up to some depth pays."""
        least, survival = 2.0, 1.0
        for i in range(first, self.cap):
            survival *= self._mean[i]
            gain += survival
            price += both[i]
            least = min(least, price / gain)
        return least

    def _best_rate(self, rows: Sequence[float], made: Sequence[float]) -> float:
        """Tokens per second of the best fixed depth, 0 included."""
        best, tokens, survival, seconds = 1.0 / rows[0], 1.0, 1.0, 0.0
        for i in range(self.cap):
            survival *= self._mean[i]
            tokens += survival
            seconds += made[i]
            best = max(best, tokens / (seconds + rows[i + 1]))
        return best


def depth_policy(
    draft: int | None, *, clock_free: bool, guarded: bool, nbytes: int = 0
) -> DepthPolicy | None:
    """The policy of DRAFT: 0 none, n at most n drafts, None (unset) the controller.

    `clock_free` when the depth may change the text (sampling that is not `coupled`); `guarded`
    for the MTP layer, whose drafts cost something even when they are not verified; `nbytes`: of the
    model's files, by which the clock-free controller guesses what a row costs.
    """
    if draft == 0:
        return None
    policy: DepthPolicy
    if draft is not None:
        policy = Fixed(draft)
    elif clock_free:
        policy = Controller(FixedCosts.of_model(nbytes), remembers=False)
    else:
        policy = Controller(MeasuredCosts())
    return Guard(policy, remembers=not clock_free) if guarded else policy
