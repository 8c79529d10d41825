"""What the parts of a speculative step cost: assumed, or measured as the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from colibri.ledger import ABSORB, DRAFT, PLAIN, VERIFY, Lap


class Costs(Protocol):
    """Seconds, or any unit proportional to them: only ratios decide."""

    absorb: float  # the first draft of a step
    draft: float  # each further one

    def begin(self) -> None:
        """The controller starts afresh."""

    def wants_plain(self, long_ago: bool) -> bool:
        """Whether a plain step is due, to know its cost; `long_ago`: there was none for long."""

    def passes(self, rows: int) -> list[float]:
        """Cost of a main-model pass with 1, 2, .. `rows` rows; never falling."""

    def record(self, laps: Sequence[Lap]) -> None:
        """The parts of one step, in order."""


class FixedCosts:
    """Relative costs that no clock can change."""

    RESIDENT, STREAMED = 0.5, 0.8  # of one more row: experts in memory; experts from disk

    def __init__(self, row: float = RESIDENT, absorb: float = 0.2, draft: float = 0.15) -> None:
        self.row, self.absorb, self.draft = row, absorb, draft

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
    """A mean that forgets, and that no single slow value moves far: after `memory` values the
    oldest count for little; a value above WILD means counts as that; a mean of few values gives
    way to one far below it (the first pass after a start is often slow).
    """

    WILD, FEW = 1.5, 4.0

    def __init__(self, memory: float) -> None:
        self.keep = 1.0 - 1.0 / memory
        self.total = self.weight = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        if self.weight > 0.0:
            most = self.WILD * self.total / self.weight
            if self.weight < self.FEW and value * self.WILD * self.WILD < most:
                self.total = self.weight = 0.0
            value = min(value, most)
        self.total = self.total * self.keep + value
        self.weight = self.weight * self.keep + 1.0

    def age(self, values: int) -> None:
        """So many values went elsewhere meanwhile: what is known is trusted less."""
        keep = self.keep**values
        self.total *= keep
        self.weight *= keep

    def value(self, otherwise: float) -> float:
        """The mean, or `otherwise` before the first value."""
        return self.total / self.weight if self.weight > 0.0 else otherwise


class MeasuredCosts:
    """Seconds from the ledger's stopwatch; waits for expert reads are part of them.

    Depths that were not tried lately are read off a line through those that were.
    """

    ROW = 0.35  # slope of the line before two depths were seen, in single-row passes
    MEMORY = 48.0  # passes
    BLEND = 3.0  # passes that the line is worth against a depth's own mean
    CHEAPER = 0.7  # a further draft, in first drafts, before one was measured

    def __init__(self) -> None:
        self._pass: list[Mean] = []  # by rows, from 1
        self._last: list[int] = []  # passes made when each mean was brought up to date
        self._passes = 0
        self._absorb, self._draft = Mean(self.MEMORY), Mean(self.MEMORY)

    def begin(self) -> None:
        """What was measured stays true."""

    def wants_plain(self, long_ago: bool) -> bool:
        """At first, and then once in a while."""
        return long_ago or not self._pass

    @property
    def absorb(self) -> float:
        """Seconds to absorb the last rows and make the first draft of them."""
        return self._absorb.value(0.0)

    @property
    def draft(self) -> float:
        """Seconds of each further draft."""
        return self._draft.value(self.CHEAPER * self.absorb)

    def record(self, laps: Sequence[Lap]) -> None:
        """A step's first draft is its last absorb before the pass: older ones are keys only."""
        absorbed = 0.0
        for name, rows, seconds in laps:
            if name == PLAIN:
                self._passed(1, seconds)
            elif name == ABSORB:
                absorbed = seconds
            elif name == DRAFT:
                self._draft.add(seconds)
            elif name == VERIFY:
                self._passed(rows, seconds)
                if absorbed:
                    self._absorb.add(absorbed)

    def _passed(self, rows: int, seconds: float) -> None:
        while len(self._pass) < rows:
            self._pass.append(Mean(self.MEMORY))
            self._last.append(self._passes)
        mean = self._pass[rows - 1]
        if self._last[rows - 1] != self._passes:
            mean.age(self._passes - self._last[rows - 1])
        mean.add(seconds)
        self._passes += 1
        self._last[rows - 1] = self._passes

    def _up_to_date(self) -> None:
        for n, mean in enumerate(self._pass):
            if self._last[n] != self._passes:
                mean.age(self._passes - self._last[n])
                self._last[n] = self._passes

    def passes(self, rows: int) -> list[float]:
        """Each depth's own mean, drawn towards the line where it is not well known."""
        self._up_to_date()
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
        """Weighted least squares through the means, with one pass's worth of the assumed slope."""
        means = [(n, mean.weight, mean.total) for n, mean in enumerate(self._pass)]
        known = [(n, weight, total / weight) for n, weight, total in means if weight > 0]
        if not known:
            return 1.0, self.ROW
        total = sum(w for _, w, _ in known)
        x = sum(n * w for n, w, _ in known) / total
        y = sum(w * t for _, w, t in known) / total
        assumed = self.ROW * y / (1.0 + self.ROW * x)
        spread = sum(w * (n - x) ** 2 for n, w, _ in known)
        along = sum(w * (n - x) * (t - y) for n, w, t in known)
        slope = max((along + assumed) / (spread + 1.0), 0.0)
        return max(y - slope * x, 0.05 * y), slope
