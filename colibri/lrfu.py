"""The core's rule of which expert makes room, in Python: for traces, and to prove the core's."""

from collections import defaultdict
from collections.abc import Collection
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, count
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from colibri.trace import Trace

GROWTH = 2 ** (1 / 8)  # of what a use counts, with every token
LARGE = 2.0**256  # heats that reach it are divided by it, and so are all
LATEST = 1024  # rows of a trace that a hit rate is taken from

_Rank = tuple[float, int]  # heat, minus when it changed: the least leaves first


class Lrfu:
    """Experts in slots, the coldest of which makes room: to the bit as in csrc/experts.c.

    Heat is the sum of GROWTH^row over an expert's uses, so that those long ago count less (LRFU:
    Lee et al., IEEE Trans. Computers 50:12, 2001). Of equals the one that changed last is colder.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}  # of those in slots
        self._heap: list[tuple[_Rank, int]] = []  # the same, but ranks may have grown since
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
            rank, key = self._heap[0]
            if self._ranks[key] != rank:
                heapreplace(self._heap, (self._ranks[key], key))
                continue
            heappop(self._heap)
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
        if key in self._ranks:
            self._ranks[key] = self._heat[key], next(self._clock)


def hit_rate(trace: "Trace", slots: int) -> float:
    """Of the look-ups of a trace's latest rows, with `slots` experts a layer that all layers share;
    the first half of them fills the slots and does not count."""
    experts = trace.experts[-LATEST:].astype(int)
    layers, half = experts.shape[1], len(experts) // 2
    keys = experts + trace.count * np.arange(layers)[:, None]
    pool, room = Lrfu(), slots * layers
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
