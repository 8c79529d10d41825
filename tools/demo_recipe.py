"""The schedule of a training run (demo_recipe.json), in fractions of its minutes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).with_name("demo_recipe.json")


@dataclass(frozen=True)
class Block:
    """One kind of step, taken in `share` of the steps: `rows` rows of `length` tokens."""

    share: float
    length: int
    rows: int
    draft_rows: int
    mix: dict[str, float]


@dataclass(frozen=True)
class Phase:
    """A stretch of the schedule, up to the fraction `until` of the minutes."""

    until: float
    blocks: tuple[Block, ...]

    @staticmethod
    def of(raw: dict[str, Any]) -> Phase:
        return Phase(raw["until"], tuple(Block(**block) for block in raw["blocks"]))

    def shares(self) -> list[float]:
        """The shares of the blocks, scaled to a sum of one."""
        total = sum(block.share for block in self.blocks)
        return [block.share / total for block in self.blocks]


@dataclass(frozen=True)
class Recipe:
    """demo_recipe.json: rates are the peak learning rates of the parameter groups."""

    minutes: float
    finish_minutes: float
    decay_from: float
    warm_steps: int
    adam_rate: float
    expert_rate: float
    muon_rate: float
    bias_rate: float
    draft_weight: float
    phases: tuple[Phase, ...]

    @staticmethod
    def load(path: Path) -> Recipe:
        raw = json.loads(path.read_text())
        raw["phases"] = tuple(Phase.of(phase) for phase in raw["phases"])
        return Recipe(**raw)

    def phase_at(self, fraction: float) -> int:
        """Index of the phase that holds `fraction`."""
        ends = [phase.until for phase in self.phases[:-1]]
        return sum(fraction >= end for end in ends)

    def rate_at(self, step: int, fraction: float) -> float:
        """Warm-up, plateau, linear decay to 2 % (WSD)."""
        warm = min(1.0, (step + 1) / self.warm_steps)
        if fraction < self.decay_from:
            return warm
        left = (1.0 - fraction) / (1.0 - self.decay_from)
        return warm * max(0.02, left)
