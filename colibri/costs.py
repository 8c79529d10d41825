"""What the parts of a speculative step cost: assumed, or measured as the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from colibri.ledger import ABSORB, DRAFT, PLAIN, VERIFY, Lap

STEP_ROWS = 8  # an absorb of up to so many rows is one step's; a larger one has rows that waited


class Costs(Protocol):
    """In any unit proportional to seconds: only ratios decide."""

    absorb: float  # the first draft of a step
    draft: float  # each further one
    waiting: float  # a row that waited for drafting to be tried again

    def begin(self) -> None:
        """The controller starts afresh."""

    def wants_plain(self, long_ago: bool) -> bool:
        """Whether a plain step is due, to know its cost; `long_ago`: there was none for long."""

    def passes(self, rows: int) -> list[float]:
        """Cost of a main-model pass with 1, 2, .. `rows` rows; never falling."""

    def record(self, laps: Sequence[Lap]) -> None:
        """The parts of a step, in order; before them the latest of steps that were not recorded."""


class FixedCosts:
    """Relative costs that neither a clock nor the machine's memory can change."""

    SMALL, LARGE = 0.5, 0.8  # of one more row: experts in memory; experts from disk
    FROM = 64 << 30  # bytes of a model that is taken to stream, wherever it runs
    waiting = 0.0

    def __init__(self, row: float = SMALL, absorb: float = 0.2, draft: float = 0.15) -> None:
        self.row, self.absorb, self.draft = row, absorb, draft

    @classmethod
    def of_model(cls, nbytes: int) -> FixedCosts:
        """Of a model with so many bytes in its files."""
        return cls(cls.LARGE if nbytes >= cls.FROM else cls.SMALL)

    def begin(self) -> None:
        """Nothing to forget."""

    def wants_plain(self, long_ago: bool) -> bool:
        """Never."""
        return False

    def passes(self, rows: int) -> list[float]:
        """One plus `row` for each further row."""
        return [1.0 + self.row * i for i in range(rows)]

    def record(self, laps: Sequence[Lap]) -> None:
        """Nothing to learn."""


class Mean:
    """A mean with exponential forgetting that outliers move little.

    After `memory` values the oldest count for little. A value is clipped to [mean / WILD,
    mean * WILD]; but while the weight is below FEW, one below mean / WILD^3 starts the mean anew (a
    first pass is often slow).
    """

    WILD, FEW = 1.5, 4.0

    def __init__(self, memory: float) -> None:
        self.forgets = 1.0 / memory
        self.total = self.weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """One more value, which may count for less than one."""
        if self.weight > 0.0:
            mean = self.total / self.weight
            if self.weight < self.FEW and value * self.WILD**3 < mean:
                self.total = self.weight = 0.0
            else:
                value = min(max(value, mean / self.WILD), mean * self.WILD)
        self.age(weight)
        self.total += value * weight
        self.weight += weight

    def age(self, values: float) -> None:
        """So many values went here or elsewhere meanwhile: what is known is trusted less."""
        keep = 1.0 - self.forgets * values
        self.total *= keep
        self.weight *= keep

    def value(self, otherwise: float) -> float:
        """The mean, or `otherwise` before the first value."""
        return self.total / self.weight if self.weight > 0.0 else otherwise


class MeasuredCosts:
    """From the ledger's stopwatch, in passes of one row made at about the same time.

    A shared machine changes its speed within milliseconds, so seconds are never compared with
    those of long ago: a pass is held against the few just before it that had other rows. Depths
    that were not tried lately are read off a line through those that were. Waits for expert reads
    are part of all of it.
    """

    ROW = 0.35  # of one more row, before two depths were seen
    MEMORY = 48.0  # comparisons
    BLEND = 3.0  # comparisons that the line is worth against a depth's own mean
    CHEAPER = 0.7  # a further draft, in first drafts, before one was measured
    NEAR = 0.8  # what a pass counts in the speed of now, against the one after it
    FAINT = 0.1  # passes of other rows that count for less than this are too long ago

    def __init__(self) -> None:
        self._pass: list[Mean] = []  # by rows, from 1
        self._near: list[list[float]] = []  # by rows: decayed sums: seconds per unit, count
        self._absorb, self._draft = Mean(self.MEMORY), Mean(self.MEMORY)
        self._waiting = Mean(self.MEMORY)
        self._plain = 0

    def begin(self) -> None:
        """What was measured stays true."""

    def wants_plain(self, long_ago: bool) -> bool:
        """At first (twice: the first pass after a start is often slow), then once in a while."""
        return long_ago or self._plain < 2

    @property
    def absorb(self) -> float:
        """Cost of absorbing a step's rows and making the first draft of them."""
        return self._absorb.value(0.0)

    @property
    def draft(self) -> float:
        """Cost of each further draft."""
        return self._draft.value(self.CHEAPER * self.absorb)

    @property
    def waiting(self) -> float:
        """Cost of the keys of a row that waited."""
        return self._waiting.value(0.0)

    def record(self, laps: Sequence[Lap]) -> None:
        """Passes first, for the other parts are held against them."""
        laps = [lap for lap in laps if lap[2] > 0.0]  # a clock that stood still measured nothing
        for name, rows, seconds in laps:
            if name == PLAIN:
                self._plain += 1
                self._passed(1, seconds)
            elif name == VERIFY:
                self._passed(rows, seconds)
        if len(laps) > 1 and self._near:
            self._drafted(laps)

    def _drafted(self, laps: Sequence[Lap]) -> None:
        unit = sum(near[0] for near in self._near) / sum(near[1] for near in self._near)
        for name, rows, seconds in laps:
            if name == DRAFT:
                self._draft.add(seconds / unit)
            elif name == ABSORB and rows <= STEP_ROWS:
                self._absorb.add(seconds / unit)
            elif name == ABSORB and rows > STEP_ROWS + 1:  # STEP_ROWS + 1 can be either
                self._waiting.add(seconds / unit / rows)

    def _passed(self, rows: int, seconds: float) -> None:
        while len(self._pass) < rows:
            self._pass.append(Mean(self.MEMORY))
            self._near.append([0.0, 0.0])
        mean, own = self._pass[rows - 1], self._near[rows - 1]
        total = weight = 0.0
        for near in self._near:
            near[0] *= self.NEAR
            near[1] *= self.NEAR
            if near is not own:
                total += near[0]
                weight += near[1]
        if weight > self.FAINT:
            self._compared(mean, seconds * weight / total, min(weight, 1.0))
        own[0] += seconds / mean.value(1.0 + self.ROW * (rows - 1))
        own[1] += 1.0

    def _compared(self, mean: Mean, cost: float, weight: float) -> None:
        for other in self._pass:
            if other is not mean:
                other.age(weight)
        mean.add(cost, weight)

    def passes(self, rows: int) -> list[float]:
        """Each depth's own mean, drawn towards the line where it is not well known."""
        base, slope = self._line()
        costs, least = [], 0.0
        for n in range(1, rows + 1):
            cost = base + slope * (n - 1)
            if n <= len(self._pass):
                mean = self._pass[n - 1]
                cost = (mean.total + self.BLEND * cost) / (mean.weight + self.BLEND)
            least = max(least * 1.005, cost)
            costs.append(least)
        return costs

    def _line(self) -> tuple[float, float]:
        """Weighted least squares through the means and the unit, with the assumed slope as one."""
        known = [(0, 1.0, 1.0)]
        known += [(n, m.weight, m.total / m.weight) for n, m in enumerate(self._pass) if m.weight]
        total = sum(w for _, w, _ in known)
        x = sum(n * w for n, w, _ in known) / total
        y = sum(w * t for _, w, t in known) / total
        assumed = self.ROW * y / (1.0 + self.ROW * x)
        spread = sum(w * (n - x) ** 2 for n, w, _ in known)
        along = sum(w * (n - x) * (t - y) for n, w, t in known)
        slope = max((along + assumed) / (spread + 1.0), 0.0)
        return max(y - slope * x, 0.05 * y), slope
