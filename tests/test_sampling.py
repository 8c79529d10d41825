"""Which token comes out of which logits, why, and that a seed means the same text every time."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colibri import elementary, noise
from colibri.errors import SamplingError, UsageError
from colibri.noise import Purpose
from colibri.sampling import FLOOR, Distribution, Sampler, SamplingParams

BAD = [math.nan, math.inf]
FINITE = st.floats(-30, 30, width=32)


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def sampler(vocab: int, **params) -> Sampler:
    return Sampler(SamplingParams(**{"seed": 1} | params), vocab)


def expected(logits, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, **_) -> dict[int, float]:
    """The documented pipeline in plain Python: sort, cut, renormalise."""
    top = float(max(logits))
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    order = order[:top_k] if top_k else order
    z = {i: (float(logits[i]) - top) / temperature for i in order}
    weights = {i: math.exp(v) for i, v in z.items() if v >= FLOOR}
    total = math.fsum(weights.values())
    if top_p < 1:
        kept, mass = {}, 0.0
        for i, w in weights.items():
            if mass >= top_p * total and kept:
                break
            kept[i] = w
            mass += w
        weights = kept
    weights = {i: w for i, w in weights.items() if w >= min_p}
    total = math.fsum(weights.values())
    return {i: w / total for i, w in weights.items()}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(["temperature"], [-1, math.nan, math.inf, "1", None, True]),
        *itertools.product(["top_p", "min_p"], [-0.1, 1.1, math.nan, None]),
        *itertools.product(["top_k"], [-1, 1.5, True, None]),
        *itertools.product(["seed"], [1.5, "7", True]),
    ],
)
def test_wrong_parameters_are_named(name, value):
    """A parameter out of range is one error with its name and value."""
    with pytest.raises(UsageError, match=f"{name} is {value!r}"):
        SamplingParams(**{name: value})


def test_greedy_takes_the_lowest_of_the_best():
    """Greedy is argmax over real tokens; ties go to the lower id, padding rows never win."""
    greedy = sampler(4, temperature=0)
    assert greedy.params.greedy
    assert greedy.pick(row(1, 5, 5, 2, 99, 99), 0) == 1


def test_greedy_verification_is_equality():
    """At temperature 0 a draft stands exactly when it is the argmax."""
    greedy = sampler(4, temperature=0)
    p = greedy.distribution(row(1, 5, 5, 2))
    assert [p.prob(t) for t in range(4)] == [0, 1, 0, 0]
    assert all(greedy.accept(p.prob(1), n) and not greedy.accept(p.prob(2), n) for n in range(500))


def test_padding_rows_are_never_sampled():
    """Rows at and beyond vocab_used have no probability at any temperature."""
    hot = sampler(3, temperature=100.0)
    logits = row(0, 0, 0, 50, 50)
    assert {hot.pick(logits, n) for n in range(200)} == {0, 1, 2}
    assert hot.distribution(logits).dense(5)[3:].tolist() == [0, 0]


@pytest.mark.parametrize("where", [0, 3, 7])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1e-4}, {"top_p": 0.0}])
def test_a_bad_logit_is_skipped_with_one_warning(where, bad, params):
    """NaN or +Inf anywhere: the best finite token is taken, and one warning tells of it."""
    logits = row(*range(8))
    logits[where] = bad
    one = sampler(8, **params)
    assert {one.pick(logits, n) for n in range(5)} == {6 if where == 7 else 7}
    assert len(one.warnings) == 1
    assert f"1 of 8 logits are NaN or infinite (first: token {where})" in one.warnings[0]


def test_bad_logits_have_no_probability():
    """With NaN, +Inf and -Inf in the row the rest is sampled as if they were not there."""
    logits = row(math.nan, 1, -math.inf, 2, math.inf)
    some = Sampler(SamplingParams(seed=1), 5)
    assert some.distribution(logits).ids.tolist() == [1, 3]
    assert {some.pick(logits, n) for n in range(100)} == {1, 3}
    assert len(some.warnings) == 1


def test_minus_infinity_is_only_a_mask():
    """-Inf rules a token out without a warning."""
    some = sampler(3)
    assert {some.pick(row(-math.inf, 0, 0), n) for n in range(50)} == {1, 2}
    assert some.warnings == []


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("bad", [*BAD, -math.inf])
def test_no_finite_logit_is_an_error(params, bad):
    """When nothing can be chosen the request fails with a reason instead of token 0 for ever."""
    with pytest.raises(SamplingError, match="all 3 logits"):
        sampler(3, **params).pick(row(bad, bad, bad, 1.0), 0)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-4},
        {"temperature": 5e-324},
        {"temperature": 1e-310, "top_k": 3, "min_p": 0.5},
        {"top_p": 1e-4},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"top_k": 1},
        {"temperature": 5e-324, "top_p": 1e-300, "min_p": 5e-324},
    ],
)
def test_extreme_parameters_keep_the_top_token(params):
    """Tiny temperature, tiny or zero top-p, min-p 1: always the best token, never NaN."""
    logits = np.random.default_rng(0).permutation(np.arange(2048.0)).astype(np.float32)
    some = sampler(2048, **params)
    with np.errstate(all="raise", under="ignore"):
        p = some.distribution(logits)
        assert p.ids.tolist() == [int(logits.argmax())] and p.p.tolist() == [1.0]
        assert some.pick(logits, 3) == int(logits.argmax())


def test_huge_temperature_is_uniform():
    """At temperature 1e300 every real token has the same probability."""
    p = sampler(5, temperature=1e300).distribution(row(-9, 0, 3, 8, 1))
    assert p.p.tolist() == [0.2] * 5


@settings(max_examples=70, deadline=None)
# two weights of 1, one of them from the better logit
@example(logits=[0.0, 2.9e-37], temperature=0.01, top_p=0.0, top_k=0, min_p=0.0)
@given(
    logits=st.lists(st.one_of(FINITE, st.sampled_from([0.0, 1.0, 2.0])), min_size=1, max_size=40),
    temperature=st.sampled_from([0.01, 0.3, 0.7, 1.0, 2.5]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
    top_k=st.integers(0, 45),
    min_p=st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]),
)
def test_the_pipeline_is_the_documented_one(logits, temperature, top_p, top_k, min_p):
    """Temperature, top-k, top-p, min-p in that order, ties to the lower id, to 1e-12."""
    params = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    logits = np.array(logits, dtype=np.float32)
    p = sampler(len(logits), **params).distribution(logits)
    want = expected(logits, **params)
    assert p.ids.tolist() == sorted(want)
    for token, probability in want.items():
        assert math.isclose(p.prob(token), probability, rel_tol=1e-12)
    assert math.isclose(math.fsum(p.p), 1.0, rel_tol=1e-12)


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02}, {}])
def test_big_vocabulary_pipeline(params):
    """The same at 30,000 tokens, for a peaked and for a flat row."""
    rng = np.random.default_rng(5)
    for scale in (0.3, 3.0):
        logits = (rng.standard_normal(30_000) * scale).astype(np.float32)
        p = sampler(30_000, **params).distribution(logits)
        want = expected(logits, **params)
        assert p.ids.tolist() == sorted(want)
        assert np.allclose(p.p, [want[i] for i in sorted(want)], rtol=1e-11, atol=0)


def test_ties_at_the_cut_keep_the_lower_ids():
    """Equal logits at the edge of top-k or of the nucleus: the lower ids stay."""
    flat = row(*[1.0] * 10)
    assert sampler(10, top_k=3).distribution(flat).ids.tolist() == [0, 1, 2]
    assert sampler(10, top_p=0.45).distribution(flat).ids.tolist() == [0, 1, 2, 3, 4]
    assert sampler(4, top_k=2).distribution(row(1, 2, 1, 1)).ids.tolist() == [0, 1]


def test_top_k_comes_before_top_p():
    """top_p counts the mass of what top_k left, not of the whole vocabulary."""
    logits = np.log(np.array([0.3, 0.2, *[0.05] * 10])).astype(np.float32)
    p = sampler(12, top_k=2, top_p=0.55).distribution(logits)
    assert p.ids.tolist() == [0]
    assert sampler(4, top_k=3).distribution(row(1, 2, 3, 4)).ids.tolist() == [1, 2, 3]


def test_top_p_comes_before_min_p():
    """top_p counts the mass of the whole vocabulary, also of what min_p drops."""
    logits = np.log(np.array([0.4, 0.3, *[0.05] * 6])).astype(np.float32)
    assert sampler(8, top_p=0.5, min_p=0.5).distribution(logits).ids.tolist() == [0, 1]


@settings(max_examples=70, deadline=None)
@given(
    logits=st.lists(FINITE, min_size=2, max_size=300),
    position=st.integers(0, 10**6),
    seed=st.integers(-5, 2**64),
    params=st.sampled_from([{}, {"temperature": 0.3}, {"top_p": 0.9}, {"top_k": 7, "min_p": 0.1}]),
)
def test_pick_is_the_race_of_exponentials(logits, position, seed, params):
    """pick is argmin of -ln(u)/p over every candidate; the shortcut for hopeless ones is exact."""
    logits = np.array(logits, dtype=np.float32)
    some = sampler(len(logits), seed=seed, **params)
    p = some.distribution(logits)
    u = noise.uniforms(seed, position, Purpose.PICK, p.ids)
    waits = [-elementary.log(x) / w for x, w in zip(u.tolist(), p.weights.tolist(), strict=True)]
    naive = int(p.ids[waits.index(min(waits))])
    assert some.pick(logits, position) == some.draw(p, position) == naive


def chi_square(counts: dict[int, int], p: Distribution) -> tuple[float, float]:
    """The statistic and a bound it exceeds once in ten million (Wilson-Hilferty)."""
    n = sum(counts.values())
    assert set(counts) <= set(p.ids.tolist())
    terms = [
        (counts.get(t, 0) - n * q) ** 2 / (n * q) for t, q in zip(p.ids.tolist(), p.p, strict=True)
    ]
    freedom = max(len(terms) - 1, 1)
    bound = freedom * (1 - 2 / (9 * freedom) + 5.2 * math.sqrt(2 / (9 * freedom))) ** 3
    return math.fsum(terms), bound


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"temperature": 3.0}],
)
def test_picks_follow_the_distribution(params):
    """2,500 picks at as many positions: chi-square against the processed distribution."""
    logits = row(*(np.random.default_rng(9).standard_normal(12) * 1.5))
    some = sampler(12, seed=987654321, **params)
    picks = [some.pick(logits, n) for n in range(2500)]
    counts = {t: picks.count(t) for t in set(picks)}
    statistic, bound = chi_square(counts, some.distribution(logits))
    assert statistic < bound


def test_picks_follow_the_distribution_over_seeds():
    """The same over 2,500 seeds at one position."""
    logits = row(0, 1, 2, 0.5)
    picks = [sampler(4, seed=seed).pick(logits, 17) for seed in range(2500)]
    statistic, bound = chi_square(
        {t: picks.count(t) for t in set(picks)}, sampler(4).distribution(logits)
    )
    assert statistic < bound


def test_successive_picks_are_independent():
    """Pairs of picks at neighbouring positions follow the product of the distributions."""
    logits = row(0, 0.5, 1)
    some = sampler(3, seed=77)
    p = some.distribution(logits)
    picks = [some.pick(logits, n) for n in range(2500)]
    pairs = [3 * a + b for a, b in itertools.pairwise(picks)]
    product = Distribution.of(np.arange(9), np.outer(p.p, p.p).ravel())
    statistic, bound = chi_square({t: pairs.count(t) for t in set(pairs)}, product)
    assert statistic < bound


def test_accept_has_its_probability():
    """accept(p) is true with frequency p; 0 never, 1 always."""
    some = sampler(4, seed=3)
    for p in (0.0, 0.1, 0.5, 0.93, 1.0):
        hits = sum(some.accept(p, n) for n in range(4000))
        assert abs(hits - 4000 * p) <= 5 * math.sqrt(4000 * p * (1 - p))


def test_a_seed_is_honoured_and_nobody_disturbs_it():
    """Same seed, same picks, whatever happens in between; another seed gives other picks."""
    logits = np.random.default_rng(1).standard_normal((60, 50)).astype(np.float32)
    alone = sampler(50, seed=5)
    text = [alone.pick(r, n) for n, r in enumerate(logits)]
    mine, other = sampler(50, seed=5), sampler(50, seed=6)
    mixed, others = [], []
    for n, r in enumerate(logits):
        others.append(other.pick(r, n))
        other.accept(0.5, n)
        random.random(), np.random.random()
        mixed.append(mine.pick(r, n))
        mine.pick(r, n)
    assert mixed == text and others != text
    backwards = [mine.pick(logits[n], n) for n in reversed(range(60))]
    assert backwards[::-1] == text


def test_sampling_leaves_global_generators_alone():
    """Neither Python's nor NumPy's global generator is read or moved."""
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    some = sampler(3, seed=None)
    some.pick(row(0, 0, 0), 0)
    some.accept(0.5, 1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_fresh_seed_can_be_replayed():
    """Without a seed one is drawn and kept; giving it back gives the same picks."""
    first = Sampler(SamplingParams(), 50)
    logits = row(*[0.0] * 50)
    again = Sampler(SamplingParams(seed=first.seed), 50)
    assert [first.pick(logits, n) for n in range(40)] == [again.pick(logits, n) for n in range(40)]
    assert Sampler(SamplingParams(), 50).seed != first.seed


def test_picks_are_these_on_every_machine():
    """A fixed seed over fixed logits gives this very sequence."""
    logits = (np.arange(64, dtype=np.float32) * 37 % 64) / np.float32(16)
    some = sampler(64, seed=2024, temperature=0.8, top_p=0.95)
    assert [some.pick(logits, n) for n in range(16)] == [
        5,
        19,
        57,
        57,
        48,
        38,
        22,
        12,
        8,
        5,
        12,
        12,
        19,
        5,
        55,
        1,
    ]


DISTRIBUTIONS = st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=8).map(
    lambda w: Distribution.of(np.arange(len(w)), np.array(w))
)


@settings(deadline=None)
@given(p=DISTRIBUTIONS)
def test_rejection_is_lossless(p):
    """Accept d with p(d), else draw without d: for every d the outcome is exactly p."""
    for draft in p.ids.tolist():
        stands = p.prob(draft)
        outcome = (1 - stands) * p.without(draft).dense(8)
        outcome[draft] += stands
        assert np.abs(outcome - p.dense(8)).max() < 1e-15


@settings(deadline=None)
@given(p=DISTRIBUTIONS, q=DISTRIBUTIONS)
def test_probabilistic_verification_is_lossless(p, q):
    """Accept with min(1, p/q), else draw from max(p - q, 0): the outcome is exactly p."""
    overlap = np.minimum(p.dense(8), q.dense(8))
    outcome = overlap + (1 - overlap.sum()) * p.minus(q).dense(8)
    assert np.abs(outcome - p.dense(8)).max() < 1e-14


def test_residual_of_a_drafter_that_is_right_is_harmless():
    """p - q is nothing when q is p; the residual then is p itself."""
    p = Distribution.of(np.array([2, 5]), np.array([1.0, 3.0]))
    assert p.minus(p) is p
    assert p.probs(np.array([0, 2, 5, 9])).tolist() == [0, 0.25, 0.75, 0]


def test_ban_removes_one_token_and_rescales_the_rest():
    """carry_ban: the banned token never comes, the others keep their proportions."""
    logits = row(3, 1, 0, 1)
    some = sampler(4, seed=11)
    p = some.distribution(logits).without(0)
    picks = [some.draw(p, n) for n in range(2500)]
    statistic, bound = chi_square({t: picks.count(t) for t in set(picks)}, p)
    assert statistic < bound
    with pytest.raises(SamplingError, match="only one possible"):
        sampler(4, top_k=1).distribution(logits).without(0)


def test_coupled_drafts_agree_with_the_pick():
    """Drawing with the pick's own noise: equal p gives the same token, similar q nearly always."""
    rng = np.random.default_rng(4)
    some = sampler(20, seed=8)
    logits = (rng.standard_normal((800, 20)) * 2).astype(np.float32)
    drafts = logits + (rng.standard_normal((800, 20)) * 0.3).astype(np.float32)
    agree = bound = alone = 0.0
    for n, (r, d) in enumerate(zip(logits, drafts, strict=True)):
        p, q = some.distribution(r), some.distribution(d)
        token = some.pick(r, n)
        assert some.draw(p, n) == token
        distance = np.abs(p.dense(20) - q.dense(20)).sum() / 2
        agree += some.draw(q, n) == token
        alone += some.draw(q, n, Purpose.DRAFT) == token
        bound += (1 - distance) / (1 + distance)
    assert agree > bound - 4 * math.sqrt(800) / 2
    assert agree > alone + 160
