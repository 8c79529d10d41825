"""How often an expert is still in memory: what is known of texts, or a trace tells."""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from colibri.trace import Trace

# Of the experts of a token, those the token before it used in the same layer: published for
# GLM-5.2 (28 to 36%).
OVERLAP = 0.32
GROWTH = 2 ** (1 / 8)  # of what a use counts, with every token: csrc/experts.c
LARGE = 2.0**256  # what reaches it is divided by it


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


def lrfu(trace: "Trace", slots: int) -> float:
    """Hit rate of `slots` experts a layer that all layers share; of the trace's second half, the
    first fills them."""
    layers = trace.experts.shape[1]
    room, half = slots * layers, len(trace.experts) // 2
    keys = trace.experts.astype(int) + trace.count * np.arange(layers)[:, None]
    pool = Lrfu()
    hits = looks = 0
    for row, table in enumerate(keys.tolist()):
        for wanted in table:
            missing = [key for key in wanted if key not in pool]
            for key in missing:
                while len(pool) >= room and (pool.evict(wanted) or pool.evict(())):
                    continue
                pool.admit(key)
            if row >= half:
                looks += len(wanted)
                hits += len(wanted) - len(missing)
        pool.row()
        for key in chain.from_iterable(table):
            pool.used(key)
    return hits / looks if looks else 0.0


class Lrfu:
    """Experts in slots, the coldest of which makes room, to the bit as in csrc/experts.c.

    Heat is the sum of GROWTH^row over an expert's uses, so that those long ago count less (LRFU:
    Lee et al., IEEE Trans. Computers 50:12, 2001). Of equals the one that changed last is colder.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[float, int]] = {}  # of those in slots: heat, -when it changed
        self._heap: list[tuple[tuple[float, int], int]] = []  # ranks, those of the past too
        self._heat: defaultdict[int, float] = defaultdict(float)
        self._use = 1.0
        self._clock = count(0, -1)

    def __contains__(self, key: int) -> bool:
        return key in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def admit(self, key: int) -> None:
        """An expert takes a slot."""
        self._ranks[key] = self._heat[key], next(self._clock)
        heappush(self._heap, (self._ranks[key], key))

    def evict(self, pinned: Collection[int]) -> bool:
        """Free the slot of the coldest that is not pinned; False when there is none."""
        passed, found = [], False
        while self._heap and not found:
            rank, key = heappop(self._heap)
            if self._ranks.get(key) != rank:
                continue
            if key in pinned:
                passed.append((rank, key))
            else:
                del self._ranks[key]
                found = True
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def row(self) -> None:
        """A row is over; its uses follow."""
        self._use *= GROWTH
        if self._use < LARGE:
            return
        self._use /= LARGE
        self._heat = defaultdict(float, ((key, heat / LARGE) for key, heat in self._heat.items()))
        self._ranks = {key: (heat / LARGE, at) for key, (heat, at) in self._ranks.items()}
        self._heap = [(rank, key) for key, rank in self._ranks.items()]
        heapify(self._heap)

    def used(self, key: int) -> None:
        """The row used an expert, in a slot or not."""
        self._heat[key] += self._use
        if key in self:
            self.admit(key)
