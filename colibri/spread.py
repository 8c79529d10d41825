"""Repeated measurements of one thing: the median, and how far apart the others lie."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from colibri.errors import UsageError


@dataclass(frozen=True)
class Spread:
    """Values in the order they were measured; there is at least one."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise UsageError("nothing was measured, so there is nothing to report")

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of any iterable."""
        return cls(tuple(float(value) for value in values))

    @property
    def median(self) -> float:
        """The middle one; of an even number, the mean of the middle two."""
        return median(self.values)

    @property
    def least(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The largest."""
        return max(self.values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "median": self.median,
            "min": self.least,
            "max": self.most,
            "values": list(self.values),
        }

    def show(self, unit: str = "", scale: float = 1.0) -> str:
        """`12.3 GB/s (11.9..12.5)`: values divided by `scale`."""
        middle, least, most = (
            _short(value / scale) for value in (self.median, self.least, self.most)
        )
        text = f"{middle} {unit}".rstrip()
        return text if len(self.values) == 1 else f"{text} ({least}..{most})"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
