"""How often an expert is still in memory: what is known of texts, or a trace tells."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from colibri.lrfu import hit_rate

if TYPE_CHECKING:
    from colibri.trace import Trace

Report = Callable[[int, int], None]  # (numbers of slots replayed, of how many)

# Of the experts of a token, those the token before it used in the same layer: published for
# GLM-5.2 (28 to 36%).
OVERLAP = 0.32


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


def of_trace(trace: "Trace", name: str, report: Report | None = None) -> Locality:
    """Hit rates that the engine's own rule would have had on a recorded trace."""
    used = trace.experts.shape[2]
    sizes = sorted({max(1, trace.count * part // 16) for part in (1, 2, 3, 4, 6, 8, 12)} | {used})
    points = []
    for slots in [size for size in sizes if size < trace.count]:
        points.append((slots, hit_rate(trace, slots)))
        if report:
            report(len(points), len(sizes))
    return Locality(f"as in {name}", None, points)
