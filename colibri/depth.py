"""How many tokens to draft: a fixed depth, or a controller that weighs gain against cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from colibri.ledger import Lap

CAP = 7  # drafts a step, at most, unless asked otherwise: the depth GLM-5.2's MTP was trained for


class DepthPolicy(Protocol):
    """Decides before, during and after drafting; one policy may serve many turns of one session."""

    def begin(self) -> None:
        """A turn starts."""

    def plan(self, limit: int) -> int:
        """The most drafts to ask for in this step, at most `limit`; 0: a plain step."""

    def keep(self, step: int, confidence: float) -> bool:
        """Whether draft number `step` (from 0), given its confidence, is worth a row to verify."""

    def deeper(self, step: int) -> bool:
        """Whether draft number `step` is worth making, given those kept before it."""

    def record(self, proposed: int, judged: int, accepted: int, laps: Sequence[Lap]) -> None:
        """What became of the step: see `Ledger.judged`; `laps`: the seconds of its parts."""


class Fixed:
    """Always `depth` drafts."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def begin(self) -> None:
        """Nothing to forget."""

    def plan(self, limit: int) -> int:
        """The fixed depth, as far as there is room."""
        return min(self.depth, limit)

    def keep(self, step: int, confidence: float) -> bool:
        """Every draft."""
        return True

    def deeper(self, step: int) -> bool:
        """All the way."""
        return True

    def record(self, proposed: int, judged: int, accepted: int, laps: Sequence[Lap]) -> None:
        """Nothing to learn."""
