"""How many tokens to draft: a fixed depth, or a controller that weighs gain against cost.

A clock never chooses a token. Where the depth of a step can change the text (`rejection` and
`probabilistic` sampling), the controller runs on `FixedCosts`, reads no clock and forgets
everything when a turn begins: the same seed gives the same text twice.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Protocol

from colibri.costs import Costs, FixedCosts, MeasuredCosts
from colibri.ledger import Lap

CAP = 7  # drafts a step at most, unless asked for more: the depth GLM-5.2's MTP was trained for


class DepthPolicy(Protocol):
    """Decides before, during and after drafting; one policy may serve many turns of one session."""

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

    The rule: of at least 24 drafts verified, fewer than a tenth stood.
    """

    PROPOSED, TENTH, PAUSE = 24, 10, 256
    MEMORY = 192  # counts are halved here, so that a long good past cannot hide a bad present

    def __init__(self, policy: DepthPolicy) -> None:
        self.policy = policy
        self.proposed = self.accepted = self.pause = 0

    @property
    def state(self) -> str:
        """The policy's, or for how long it is paused."""
        if self.pause:
            return f"paused for {self.pause} tokens (fewer than 1 in {self.TENTH} drafts stood)"
        return self.policy.state

    def begin(self) -> None:
        """A pause lasts beyond the turn if the policy itself remembers; see `Controller.begin`."""
        self.policy.begin()

    def plan(self, limit: int) -> int:
        """Nothing during a pause."""
        return 0 if self.pause else self.policy.plan(limit)

    def keep(self, step: int, confidence: float) -> bool:
        """As the policy says."""
        return self.policy.keep(step, confidence)

    def deeper(self, step: int) -> bool:
        """As the policy says."""
        return self.policy.deeper(step)

    def record(self, proposed: int, judged: int, accepted: int, laps: Sequence[Lap]) -> None:
        """Count, and start or shorten the pause."""
        self.policy.record(proposed, judged, accepted, laps)
        self.pause = max(0, self.pause - accepted - 1)
        self.proposed += proposed
        self.accepted += accepted
        if self.proposed >= self.PROPOSED and self.accepted * self.TENTH < self.proposed:
            self.proposed = self.accepted = 0
            self.pause = self.PAUSE
        elif self.proposed >= self.MEMORY:
            self.proposed //= 2
            self.accepted //= 2


class Acceptance:
    """The chance that a draft stands, given its place in the step and the drafter's confidence.

    Counts per (step, band of confidence) fade with a memory of about 50 drafts. Where they are
    few, the band's own record counts more, and where that is short, the confidence itself.
    """

    EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
    MIDDLE = (0.05, 0.15, 0.28, 0.43, 0.58, 0.73, 0.86, 0.93, 0.975, 0.995)
    FADE = 0.98
    PRIOR = 3.0  # drafts that the less specific record is worth

    def __init__(self, steps: int) -> None:
        bands = len(self.MIDDLE)
        self.chance = [list(self.MIDDLE) for _ in range(steps)]  # [step][band]
        self._stood = [[0.0] * bands for _ in range(steps)]
        self._judged = [[0.0] * bands for _ in range(steps)]
        self._band_stood, self._band_judged = [0.0] * bands, [0.0] * bands

    def band(self, confidence: float) -> int:
        """The band a confidence falls into; NaN counts as none at all."""
        return bisect(self.EDGES, confidence) if confidence == confidence else 0

    def judged(self, step: int, band: int, stood: bool) -> None:
        """One draft was decided."""
        for sums, counts, at in (
            (self._band_stood, self._band_judged, band),
            (self._stood[step], self._judged[step], band),
        ):
            sums[at] = sums[at] * self.FADE + stood
            counts[at] = counts[at] * self.FADE + 1.0
        self._estimate(step, band)

    def fade(self, factor: float) -> None:
        """Trust the past less: a draft that is never kept would otherwise never be judged anew."""
        for row in (self._band_stood, self._band_judged, *self._stood, *self._judged):
            row[:] = [value * factor for value in row]
        for step in range(len(self.chance)):
            for band in range(len(self.MIDDLE)):
                self._estimate(step, band)

    def _estimate(self, step: int, band: int) -> None:
        prior = self.PRIOR
        general = (self._band_stood[band] + prior * self.MIDDLE[band]) / (
            self._band_judged[band] + prior
        )
        self.chance[step][band] = (self._stood[step][band] + prior * general) / (
            self._judged[step][band] + prior
        )


class Controller:
    """Chooses the depth of each step by marginal gain: a draft is made, and verified, when the
    tokens it is expected to add are worth more than the seconds it is expected to take.

    A token's worth is the seconds it takes at the best rate known (Dinkelbach's rule for ratios):
    what maximises gain at that price maximises tokens per second.
    """

    REFRESH = 4  # steps between two recomputations of the thresholds
    PROBE_FIRST, PROBE_LAST = 8, 64  # plain tokens before drafting is tried again, doubling
    CHECK = 64  # steps with drafts before one plain step, to know what plain steps cost now
    OPTIMISM = 0.7  # acceptance assumed where nothing is known

    def __init__(self, costs: Costs, cap: int = CAP, remembers: bool = True) -> None:
        self.cap = cap
        self.costs = costs
        self._remembers = remembers
        self._start()

    def _start(self) -> None:
        self.acceptance = Acceptance(self.cap)
        self._mean = [self.OPTIMISM] * self.cap  # expected chance of a draft not yet made
        self._seen: list[int] = []  # bands of the drafts of this step
        self._survival = 1.0
        self._steps = self._drafted = self._idle = 0
        self._probe = self.PROBE_FIRST
        self._probing = False
        self.costs.begin()
        self._refresh()

    @property
    def state(self) -> str:
        """Whether drafting pays at present."""
        return f"up to {self.cap}" if self._make[0] <= 1.0 else "waiting: drafts do not pay now"

    def begin(self) -> None:
        """A policy that must give the same text twice starts each turn alike."""
        if not self._remembers:
            self._start()

    def plan(self, limit: int) -> int:
        """The cap when a first draft is worth making, or tried again; else 0."""
        self._seen.clear()
        self._survival = 1.0
        self._probing = False
        if self._make[0] <= 1.0:
            if self._drafted < self.CHECK or not self.costs.measured:
                return min(self.cap, limit)
            return 0
        if self._idle < self._probe:
            return 0
        self._probing = True
        self.acceptance.fade(0.5)
        return min(self.cap, limit)

    def keep(self, step: int, confidence: float) -> bool:
        """Whether the tokens expected of this draft, and those behind it, pay for its row."""
        band = self.acceptance.band(confidence)
        chance = self.acceptance.chance[step][band]
        self._mean[step] += 0.05 * (chance - self._mean[step])
        self._survival *= chance
        if self._survival < self._worth[step]:
            return False
        self._seen.append(band)
        return True

    def deeper(self, step: int) -> bool:
        """Whether another draft pays, by the mean chance of drafts in its place."""
        return self._survival >= self._make[step]

    def record(self, proposed: int, judged: int, accepted: int, laps: Sequence[Lap]) -> None:
        """Learn from the step; once in a while, recompute the thresholds."""
        for step in range(min(judged, len(self._seen))):
            self.acceptance.judged(step, self._seen[step], step < accepted)
        self.costs.record(laps)
        if self._probing:
            self._idle = 0
            self._probe = min(2 * self._probe, self.PROBE_LAST)
        self._drafted = self._drafted + 1 if proposed else 0
        self._idle += accepted + 1
        self._steps += 1
        if self._probing or self._steps % self.REFRESH == 0:
            self._refresh()
            if self._make[0] <= 1.0:
                self._probe, self._idle = self.PROBE_FIRST, 0

    def _refresh(self) -> None:
        """Thresholds on the survival chance: `_make[i]` to make draft i, `_worth[i]` to keep it."""
        rows = self.costs.passes(self.cap + 1)  # seconds of a pass with 1.. rows
        made = [self.costs.absorb] + [self.costs.draft] * (self.cap - 1)
        rate = self._best_rate(rows, made)
        self._make, self._worth = [2.0] * self.cap, [2.0] * self.cap
        for i in range(self.cap):
            gain, survival, price = 0.0, 1.0, 0.0
            for j in range(i, self.cap):  # make and keep drafts i..j
                survival *= self._mean[j]
                gain += survival
                price += rate * (made[j] + rows[j + 1] - rows[j])
                self._make[i] = min(self._make[i], price / gain)
        for i in range(self.cap):
            row = rate * (rows[i + 1] - rows[i])
            gain, survival, price = 1.0, 1.0, row
            self._worth[i] = row
            for j in range(i + 1, self.cap):  # keep draft i, make and keep i+1..j
                survival *= self._mean[j]
                gain += survival
                price += rate * (made[j] + rows[j + 1] - rows[j])
                self._worth[i] = min(self._worth[i], price / gain)

    def _best_rate(self, rows: Sequence[float], made: Sequence[float]) -> float:
        """Tokens per second of the best fixed depth, 0 included."""
        best, tokens, survival, seconds = 1.0 / rows[0], 1.0, 1.0, 0.0
        for i in range(self.cap):
            survival *= self._mean[i]
            tokens += survival
            seconds += made[i]
            best = max(best, tokens / (seconds + rows[i + 1]))
        return best


def depth_policy(draft: int | None, *, clock_free: bool, guarded: bool) -> DepthPolicy | None:
    """The policy of DRAFT: 0 none, n at most n drafts, None (unset) the controller.

    `clock_free` when the depth may change the text (sampling that is not `coupled`); `guarded`
    for the MTP layer, whose drafts cost something even when they are not verified.
    """
    if draft == 0:
        return None
    policy: DepthPolicy
    if draft is not None:
        policy = Fixed(draft)
    elif clock_free:
        policy = Controller(FixedCosts(), remembers=False)
    else:
        policy = Controller(MeasuredCosts())
    return Guard(policy) if guarded else policy
