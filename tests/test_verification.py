"""Verification leaves the text's distribution alone: every random branch is walked and summed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from toy import (
    VOCAB,
    ToyDrafter,
    ToySession,
    Walk,
    WalkedSampler,
    drawn,
    exact,
    generate,
    remembered,
)

from colibri.costs import FixedCosts
from colibri.depth import Controller, Fixed
from colibri.drafting import Drafts
from colibri.ledger import Ledger
from colibri.noise import Purpose
from colibri.sampling import Sampler, SamplingParams
from colibri.speculation import Limits
from colibri.verification import Matching, Mode, Probabilistic, Rejection, verification

PROMPT = [3]
MODES = [mode.value for mode in Mode]
TOKENS = 4  # the first is certain, so that three are drawn and up to two of them drafted


@remembered
def model(tokens):
    """The main model: a certain first token, then eight possible ones."""
    row = drawn("model", tokens) * 2
    if len(tokens) == 1:
        row[:7] = -np.inf
    return row


@remembered
def few(tokens):
    """A drafter that knows two tokens only, chosen and weighed without regard to the model."""
    row = drawn("few", tokens)
    row[np.argsort(row)[:6]] = -np.inf
    return row


@remembered
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
    # Where the policy is the subject, or all drafts stand, four of the eight tokens are enough.
    top_k = 4 if policy != "fixed" or drafter == "right" else 0
    params = SamplingParams(temperature=0.9, top_k=top_k, seed=1)

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


CUTS = {
    "top_p": SamplingParams(temperature=1.4, top_p=0.7, seed=1),
    "top_k": SamplingParams(temperature=0.5, top_k=3, seed=1),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3, seed=1),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mode", MODES)
def test_cut_distributions_are_kept(mode, cut):
    """Temperature, top-p, top-k and min-p shape drafts and text alike: still the same to 1e-12."""
    params = CUTS[cut]

    def run(walk: Walk):
        session = ToySession(model, PROMPT)
        toy, sampler = ToyDrafter(few), WalkedSampler(params, walk)
        return tuple(generate(session, sampler, toy, Fixed(3), Limits(TOKENS), Ledger(), mode)[0])

    table: Counter = Counter()
    for text, chance in Walk.paths(run):
        table[text] += chance
    assert distance(table, exact(model, params, PROMPT, TOKENS)) < 1e-12


@remembered
def shy(tokens):
    """A drafter that is right, but doubts more than the model does."""
    return model(tokens) / 4


@remembered
def odd(tokens):
    """A drafter whose drafts are likelier than it thinks, or less likely, by chance."""
    return 0.4 * model(tokens) + 0.7 * drawn("shy3", tokens)


@pytest.mark.parametrize("drafter", [shy, odd])
def test_a_doubtful_drafter_changes_nothing(drafter):
    """A draft likelier than its drafter thinks makes no later one likelier than it is; one that is
    less likely, and stands, counts in what replaces the next."""
    params = SamplingParams(temperature=0.9, top_k=3, seed=1)

    def run(walk: Walk):
        session, sampler = ToySession(model, PROMPT), WalkedSampler(params, walk)
        loop = (session, sampler, ToyDrafter(drafter), Fixed(3), Limits(TOKENS), Ledger())
        return tuple(generate(*loop, "probabilistic")[0])

    table: Counter = Counter()
    for text, chance in Walk.paths(run):
        table[text] += chance
    assert distance(table, exact(model, params, PROMPT, TOKENS)) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_among_drafts_changes_nothing(mode):
    """Texts that end at a stop are as probable as in plain sampling, wherever it was drafted."""
    params, stop = SamplingParams(temperature=1.2, top_k=5, seed=1), 2

    def run(walk: Walk):
        session = ToySession(model, PROMPT)
        toy, sampler = ToyDrafter(few), WalkedSampler(params, walk)
        limits = Limits(TOKENS, frozenset({stop}))
        tokens, ended = generate(session, sampler, toy, Fixed(3), limits, Ledger(), mode)
        return (*tokens, stop) if ended == "stop" else tuple(tokens)

    table: Counter = Counter()
    for text, chance in Walk.paths(run):
        table[text] += chance
    plain: Counter = Counter()
    for text, chance in exact(model, params, PROMPT, TOKENS).items():
        plain[text[: text.index(stop) + 1] if stop in text else text] += chance
    assert any(stop in text for text in plain)
    assert distance(table, plain) < 1e-12


class OneByOne(Probabilistic):
    """The rule that block verification improves on: min(1, p/q) for one draft after the other."""

    def judge(self, logits, position, drafts, q):
        for i, draft in enumerate(drafts):
            p = self.sampler.distribution(logits[i])
            if not self.sampler.accept(p.prob(draft) / q[i].prob(draft), position + i):
                return i, self.sampler.draw(p.minus(q[i]), position + i, Purpose.RESIDUAL)
        return len(drafts), None


def near(tokens):
    """A drafter that mostly agrees with the model."""
    return 0.6 * model(tokens) + 0.8 * drawn("near", tokens)


@pytest.mark.parametrize(("drafter", "gain"), [(model, 0), (wrong, 0), (few, 0), (near, 0.07)])
def test_a_block_accepts_more(drafter, gain):
    """Three drafts judged together stand at least as often as one by one, all branches summed; a
    drafter that mostly agrees loses fewer."""

    def expected(rule: type[Probabilistic]) -> float:
        def run(walk: Walk) -> int:
            judge = rule(WalkedSampler(SamplingParams(1.2, top_k=4, seed=1), walk))
            text, drafts, rows = [*PROMPT, 7], Drafts(), []
            for step in range(3):
                rows.append(model(text + drafts.ids))
                proposal = judge.propose(drafter(text + drafts.ids), step, step)
                drafts.add(*proposal)
            return judge.judge(np.stack(rows), 0, drafts.ids, drafts.q)[0]

        return sum(stand * chance for stand, chance in Walk.paths(run))

    assert expected(Probabilistic) - expected(OneByOne) > gain - 1e-12


class Sorting(Fixed):
    """Drops drafts by what was drawn, which a policy must not see."""

    def __init__(self, rule: Probabilistic) -> None:
        super().__init__(3)
        self._propose = rule.propose
        rule.propose = self.propose  # type: ignore[method-assign]

    def propose(self, logits, position, step):
        proposal = self._propose(logits, position, step)
        return proposal[0], float(proposal[0] % 2), proposal[2]

    def keep(self, step: int, confidence: float) -> bool:
        return confidence > 0


def test_the_walk_sees_a_biased_policy(monkeypatch):
    """Keeping drafts by their drawn value is caught, so the walk would see such a mistake."""
    params = SamplingParams(temperature=0.9, seed=1)
    made: list[Probabilistic] = []

    def keep_rule(sampler, mode):
        made.append(Probabilistic(sampler))
        return made[-1]

    monkeypatch.setattr("colibri.speculation.verification", keep_rule)

    class Late(Fixed):
        """Builds the sorting policy once the rule exists."""

        def begin(self) -> None:
            self.inner = Sorting(made[-1])

        def keep(self, step: int, confidence: float) -> bool:
            return self.inner.keep(step, confidence)

    def run(walk: Walk):
        session = ToySession(model, PROMPT)
        toy, sampler = ToyDrafter(few), WalkedSampler(params, walk)
        return tuple(generate(session, sampler, toy, Late(3), Limits(3), Ledger(), "")[0])

    table: Counter = Counter()
    for text, chance in Walk.paths(run):
        table[text] += chance
    assert distance(table, exact(model, params, PROMPT, 3)) > 1e-3


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mode", MODES)
def test_the_real_generator_agrees(mode, drafter):
    """Texts of 500 seeds follow the exact distribution by a chi-square test at one in 10^4."""
    runs, params = 500, SamplingParams(temperature=0.9)
    expected = exact(model, params, PROMPT, 3)
    seen: Counter = Counter()
    for seed in range(runs):
        sampler = Sampler(SamplingParams(temperature=0.9, seed=seed), VOCAB)
        session, toy = ToySession(model, PROMPT), ToyDrafter(DRAFTERS[drafter])
        text, _ = generate(session, sampler, toy, Fixed(2), Limits(3), Ledger(), mode)
        seen[tuple(text)] += 1
    assert seen.keys() <= expected.keys()
    common = {text for text, p in expected.items() if p * runs >= 5}
    cells = [(seen[text], expected[text] * runs) for text in common]
    rest = sum(p for text, p in expected.items() if text not in common)
    cells.append((runs - sum(n for n, _ in cells), rest * runs))
    chi2 = sum((n - e) ** 2 / e for n, e in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty: the cube root of chi2 / freedom is nearly normal; 3.72 is one in 10^4.
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 3.72


def test_coupled_text_depends_on_the_seed_alone():
    """The same seed gives the same text without drafts and with any drafter at any depth."""
    for seed in range(6):
        texts = set()
        for toy in (None, *map(ToyDrafter, DRAFTERS.values())):
            for depth in (1, 2, 5):
                sampler = Sampler(SamplingParams(temperature=1.1, top_p=0.9, seed=seed), VOCAB)
                session = ToySession(model, PROMPT)
                turn = generate(
                    session, sampler, toy, Fixed(depth), Limits(12), Ledger(), "coupled"
                )
                texts.add(tuple(turn[0]))
        assert len(texts) == 1


@pytest.mark.parametrize("mode", MODES)
def test_greedy_is_exact_in_every_mode(mode):
    """At temperature 0 every drafter and depth gives the arg max text."""
    expected = [7]
    while len(expected) < 12:
        expected.append(int(model(PROMPT + expected).argmax()))
    for logits in DRAFTERS.values():
        for depth in (1, 2, 3, 7):
            session, sampler = ToySession(model, PROMPT), Sampler(SamplingParams(0), VOCAB)
            turn = generate(
                session, sampler, ToyDrafter(logits), Fixed(depth), Limits(12), Ledger(), mode
            )
            assert turn == (expected, "length")
            assert session.tokens == PROMPT + expected[:-1]


def test_rules_by_mode():
    """Greedy sampling always matches; a mode that does not exist is refused."""
    warm, cold = Sampler(SamplingParams(1.0, seed=1), 8), Sampler(SamplingParams(0), 8)
    kinds = {"rejection": Rejection, "coupled": Matching, "probabilistic": Probabilistic}
    for mode, kind in kinds.items():
        assert type(verification(warm, mode)) is kind
        assert type(verification(cold, mode)) is Matching
    with pytest.raises(ValueError):
        verification(warm, "hopeful")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_draft_logits_without_a_finite_value_end_the_drafting(mode, temperature):
    """A drafter whose logits are all NaN drafts nothing; padding rows are never drafted."""
    sampler = Sampler(SamplingParams(temperature, seed=1), 6)
    rule = verification(sampler, mode)
    assert rule.propose(np.full(8, np.nan, np.float32), 5, 0) is None
    row = np.array([0, 1, 2, 1, 0, 1, 9, 9], np.float32)  # the two best are padding
    for position in range(50):
        token, confidence, _ = rule.propose(row, position, 0)
        assert token < 6 and 0 < confidence <= 1


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_confidence_is_the_drafters_probability(temperature):
    """How sure a draft is: softmax of its logits over the real tokens, at the temperature."""
    logits = np.random.default_rng(3).normal(0, 4, 60).astype(np.float32)
    rule = Matching(Sampler(SamplingParams(temperature, seed=1), 50))
    token, confidence, q = rule.propose(logits, 7, 0)
    z = logits[:50].astype(np.float64) / (temperature or 1.0)
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    assert confidence == pytest.approx(p[token], rel=1e-5) and q is None


@pytest.mark.parametrize("mode", ["rejection", "probabilistic"])
def test_confidence_does_not_tell_the_draft(mode):
    """Where the depth can change the text: the favourite's probability, whatever was drawn."""
    row = np.array([0, 1, 2, 3, 2.5, -1, 0, 1], np.float32)
    p = np.exp(row / 0.5) / np.exp(row / 0.5).sum()
    rule = verification(Sampler(SamplingParams(temperature=0.5, seed=3), VOCAB), mode)
    for position in range(9):
        assert rule.propose(row, position, 0)[1] == pytest.approx(p.max(), rel=1e-5)
