"""Verification leaves the text's distribution alone: every random branch is walked and summed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from toy import VOCAB, ToyDrafter, ToySession, Walk, WalkedSampler, drawn, exact, generate

from colibri.costs import FixedCosts
from colibri.depth import Controller, Fixed
from colibri.ledger import Ledger
from colibri.sampling import Sampler, SamplingParams
from colibri.speculation import Limits
from colibri.verification import Matching, Mode, Probabilistic, Rejection, verification

PROMPT = [3]
MODES = [mode.value for mode in Mode]
TOKENS = 4  # the first is certain, so that three are drawn and up to two of them drafted


def model(tokens):
    """The main model: a certain first token, then eight possible ones."""
    row = drawn("model", tokens) * 2
    if len(tokens) == 1:
        row[:7] = -np.inf
    return row


def few(tokens):
    """A drafter that knows three tokens only, chosen and weighed without regard to the model."""
    row = drawn("few", tokens)
    row[np.argsort(row)[:5]] = -np.inf
    return row


def wrong(tokens):
    """A drafter that believes in the two least likely tokens."""
    row = -model(tokens)
    row[np.argsort(row)[:6]] = -np.inf
    return row


DRAFTERS = {"right": model, "wrong": wrong, "random": few}


class Moody(Fixed):
    """Stops and starts by confidence, as capriciously as a policy may."""

    def __init__(self) -> None:
        super().__init__(3)

    def keep(self, step: int, confidence: float) -> bool:
        return int(confidence * 1000) % 3 > 0

    def deeper(self, step: int) -> bool:
        return True


POLICIES = {
    "fixed": lambda: Fixed(3),
    "moody": Moody,
    "controller": lambda: Controller(FixedCosts(), 3, remembers=False),
}


def distance(p: dict, q: dict) -> float:
    """Total variation."""
    return 0.5 * sum(abs(p.get(key, 0.0) - q.get(key, 0.0)) for key in p.keys() | q.keys())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mode", MODES)
def test_no_branch_changes_the_distribution(mode, drafter, policy):
    """Summed over all random branches, the text is distributed as in plain sampling (1e-12)."""
    params = SamplingParams(temperature=0.9, seed=1)

    def run(walk: Walk):
        session = ToySession(model, PROMPT)
        depth, limits = POLICIES[policy](), Limits(TOKENS)
        toy, sampler = ToyDrafter(DRAFTERS[drafter]), WalkedSampler(params, walk)
        return tuple(generate(session, sampler, toy, depth, limits, Ledger(), mode)[0])

    table: Counter = Counter()
    for text, chance in Walk.paths(run):
        table[text] += chance
    assert sum(table.values()) == pytest.approx(1, abs=1e-12)
    assert distance(table, exact(model, params, PROMPT, TOKENS)) < 1e-12
