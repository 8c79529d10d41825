"""How often an expert is still in memory: what is known of texts, or a trace tells."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from colibri.trace import Trace

# Of the experts of a token, those the token before it used in the same layer: published for
# GLM-5.2 (28 to 36%).
OVERLAP = 0.32
HALF_LIFE = 8  # tokens after which a use of an expert counts half: csrc/experts.c


@dataclass(frozen=True)
class Locality:
    """Hit rates of slots whose coldest expert makes room, by slots a layer.

    With as many as a token uses, what hits is what two tokens share; with fewer, that many fewer.
    Between there and all experts the rate is read off (slots / experts) to a power, or between the
    measured `points`.
    """

    name: str = f"text, tokens sharing {100 * OVERLAP:.0f}% of their experts"
    overlap: float | None = OVERLAP  # None: every expert is as likely as another
    points: Sequence[tuple[int, float]] = field(default=())  # (slots a layer, hit rate)

    def hits(self, slots: float, experts: int, used: int) -> float:
        """The part of a token's `used` experts a layer that are in one of `slots` slots."""
        if slots >= experts:
            return 1.0
        if self.points:
            return self._measured(slots, experts)
        share = slots / experts
        if self.overlap is None or used >= experts:
            return share
        if slots < used:
            return self.overlap * slots / used
        return share ** (math.log(self.overlap) / math.log(used / experts))

    def _measured(self, slots: float, experts: int) -> float:
        points = [(0.0, 0.0), *((float(n), rate) for n, rate in self.points), (float(experts), 1.0)]
        for (a, low), (b, high) in pairwise(points):
            if a <= slots < b:
                return low + (high - low) * (slots - a) / (b - a)
        return 1.0


TEXT = Locality()


def of_trace(trace: "Trace", name: str) -> Locality:
    """Hit rates that the engine's own rule would have had on a recorded trace."""
    used = trace.experts.shape[2]
    sizes = sorted({max(1, round(trace.count * part / 16)) for part in range(1, 16)} | {used})
    points = [(slots, lrfu(trace, slots)) for slots in sizes if slots < trace.count]
    return Locality(f"as in {name}", None, points)


def one_more_use(heat: float, rows: int) -> float:
    """log2 of an expert's heat, after one more use in row number `rows`.

    Heat is the sum of 2^(row / HALF_LIFE) over an expert's uses, so that those long ago count less
    (LRFU: Lee et al., IEEE Trans. Computers 50:12, 2001; csrc/experts.c).
    """
    now = rows / HALF_LIFE
    return now + math.log2(1 + 2.0 ** (heat - now))


def lrfu(trace: "Trace", slots: int) -> float:
    """Hit rate of one pool of `slots` experts a layer, of which the coldest makes room; of the
    trace's second half, the first fills it."""
    layers = trace.experts.shape[1]
    room, half = slots * layers, len(trace.experts) // 2
    keys = trace.experts.astype(int) + trace.count * np.arange(layers)[:, None]
    pool = _Pool()
    hits = looks = 0
    for row, table in enumerate(keys.tolist()):
        for wanted in table:
            missing = [key for key in wanted if key not in pool.ranks]
            pool.take_in(missing, wanted, room)
            if row >= half:
                looks += len(wanted)
                hits += len(wanted) - len(missing)
        pool.use(row, chain.from_iterable(table))
    return hits / looks if looks else 0.0


class _Pool:
    """Experts in slots. The least (heat, -when it was set) leaves first."""

    def __init__(self) -> None:
        self.ranks: dict[int, tuple[float, int]] = {}
        self._heat: defaultdict[int, float] = defaultdict(lambda: -math.inf)
        self._heap: list[tuple[tuple[float, int], int]] = []  # holds ranks of the past, too
        self._clock = count(0, -1)

    def _rank(self, key: int) -> None:
        self.ranks[key] = self._heat[key], next(self._clock)
        heappush(self._heap, (self.ranks[key], key))

    def take_in(self, missing: list[int], wanted: list[int], room: int) -> None:
        """Those missing take slots, none of them that of another one that is wanted now."""
        kept = []
        for key in missing:
            while len(self.ranks) >= room and self._heap:
                rank, coldest = heappop(self._heap)
                if self.ranks.get(coldest) != rank:
                    continue
                if coldest in wanted:
                    kept.append((rank, coldest))
                else:
                    del self.ranks[coldest]
            self._rank(key)
        for entry in kept:
            heappush(self._heap, entry)

    def use(self, row: int, keys: Iterable[int]) -> None:
        """A row is over; these are what it used."""
        for key in keys:
            self._heat[key] = one_more_use(self._heat[key], row)
            if key in self.ranks:
                self._rank(key)
