"""A simulated engine for depth policies: what drafts cost and how often they stand is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from colibri.depth import DepthPolicy

ROOM = 15  # drafts a step at most


@dataclass(frozen=True)
class Machine:
    """Seconds of the parts of a step; noise is the log deviation of each measurement.

    A shared machine has spells, some `spell` seconds each, in which all takes `slow` times as long.
    """

    row: float  # of each row after the first, in single-row passes
    absorb: float
    draft: float
    noise: float = 0.05
    bend: float = 0.0  # further rows cost more (or less) by this much each
    slow: float = 1.0
    spell: float = 40.0

    def seconds(self, rows: int) -> float:
        """A pass of so many rows."""
        extra = rows - 1
        return 1.0 + self.row * extra + self.bend * extra * (extra - 1) / 2


@dataclass(frozen=True)
class Text:
    """How sure a drafter is, and how often it is right: confidence ~ Beta(a, b)."""

    a: float
    b: float
    right: Callable[[float], float] = lambda confidence: confidence
    fade: float = 1.0  # confidence of each further draft of a step


def run(policy: DepthPolicy | None, machine: Machine, text: Text, tokens: int, seed: int) -> float:
    """Tokens per second over a turn of so many tokens, the spells taken out."""
    rng = np.random.default_rng(seed)
    weather = np.random.default_rng(seed)  # the same for every policy
    clock, work, made = 0.0, 0.0, 0
    spell, changes = 1.0, float(weather.exponential(machine.spell))

    def spend(seconds: float) -> float:
        nonlocal clock, work, spell, changes
        seconds *= rng.lognormal(0.0, machine.noise)
        work += seconds
        seconds *= spell
        clock += seconds
        while clock > changes:
            spell = machine.slow if spell == 1.0 else 1.0
            changes += float(weather.exponential(machine.spell))
        return seconds

    if policy:
        policy.begin()
    recent: list[tuple[str, int, float]] = []
    while made < tokens:
        laps: list[tuple[str, int, float]] = []
        resting = policy is None or policy.rest > 0
        limit = 0 if resting else policy.plan(ROOM)
        chances: list[float] = []
        for step in range(limit):
            name = "draft" if step else "absorb"
            laps.append((name, 1, spend(machine.draft if step else machine.absorb)))
            confidence = float(rng.beta(text.a, text.b)) * text.fade**step
            if not policy.keep(step, confidence):
                break
            chances.append(text.right(confidence))
            if step + 1 < limit and not policy.deeper(step + 1):
                break
        kept = len(chances)
        laps.append(("verify" if kept else "plain", kept + 1, spend(machine.seconds(kept + 1))))
        accepted = 0
        while accepted < kept and rng.random() < chances[accepted]:
            accepted += 1
        made += accepted + 1
        if policy and resting:
            policy.rest -= 1
            recent = (recent + laps)[-24:]
        elif policy:
            laps, recent = recent + laps, []
            policy.record(kept, min(accepted + 1, kept), accepted, laps)
    return made / work
