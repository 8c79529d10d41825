"""The hash behind every random choice, and exp and log, are right and the same everywhere."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from decimal import Decimal, localcontext

import numpy as np
import pytest

from colibri import elementary, noise
from colibri.noise import Purpose

GOLDEN = 0x9E3779B97F4A7C15


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.astype(array.dtype.newbyteorder("<")).tobytes()).hexdigest()[:16]


def relative_error(got: float, exact: Decimal) -> float:
    return abs(float((Decimal(got) - exact) / exact))


def test_exp_is_accurate():
    """exp is within 1e-14 of the exact value on -50..50, and exact at 0."""
    points = [random.Random(1).uniform(-50, 50) for _ in range(500)] + [-1e-300, 1e-9, -44.0, 44.0]
    values = elementary.exp(np.array(points))
    with localcontext() as context:
        context.prec = 40
        errors = [relative_error(v, Decimal(x).exp()) for x, v in zip(points, values, strict=True)]
    assert max(errors) < 1e-14
    assert elementary.exp(np.zeros(1))[0] == 1.0


def test_log_is_accurate():
    """log is within 1e-13 of the exact value, near 1 and near 0 too."""
    rng = random.Random(2)
    points = [rng.random() for _ in range(500)] + [2.0**-53, 1 - 2.0**-53, 0.5, 0.7071067811865476]
    points += [1 - rng.random() * 1e-9 for _ in range(100)] + [3.0, 1e300]
    values = [elementary.log(x) for x in points]
    with localcontext() as context:
        context.prec = 40
        errors = [relative_error(v, Decimal(x).ln()) for x, v in zip(points, values, strict=True)]
    assert max(errors) < 1e-13


def test_results_do_not_depend_on_the_array_around_them():
    """An element's exp is the same alone, in a slice and across chunk borders."""
    x = np.random.default_rng(3).random(20_000) * -40
    whole = elementary.exp(x)
    for at in (0, 1, 8191, 8192, 19_999):
        assert elementary.exp(x[at : at + 1])[0] == whole[at]


def scalar_exp(x: float) -> float:
    """elementary.exp in plain Python floats: no SIMD, no fused operation can hide here."""
    k = round(x * elementary._PER_STEP)
    r = x - k * elementary._STEP
    p = (((r * (1.0 / 6.0)) + 0.5) * r + 1.0) * r
    power = float(elementary._TABLE[k % 2048]) * 2.0 ** (k // 2048)
    return p * power + power


def test_every_step_is_one_ieee_operation():
    """NumPy's results are bit for bit those of the same steps in plain Python floats."""
    rng = random.Random(4)
    small = [-44 * rng.random() for _ in range(3000)]
    assert elementary.exp(np.array(small)).tolist() == [scalar_exp(x) for x in small]


def test_bits_are_the_documented_ones():
    """exp, log, hashes and sums give these very bits; another machine must give them too."""
    x = np.arange(1, 10_001) / 256.0
    assert digest(elementary.exp(-x)) == "1114aedcee1a39f8"
    assert digest(np.array([elementary.log(v) for v in x.tolist()])) == "402f1bfe40b3700f"
    ids = np.arange(10_000)
    assert digest(noise.uniforms(42, 7, Purpose.PICK, ids)) == "6500f4c24cebd2ec"
    assert elementary.fold_sum(x[:777]).hex() == "0x1.272b400000000p+10"
    assert noise.uniform(42, 7, Purpose.ACCEPT).hex() == "0x1.ad11e01d26d3cp-3"


@pytest.mark.parametrize("size", [1, 2, 3, 256, 257, 1023, 2048, 154_880])
def test_fold_sum_adds_everything_once(size):
    """fold_sum agrees with exact summation for every size, odd ones included."""
    x = np.random.default_rng(size).random(size)
    assert math.isclose(elementary.fold_sum(x), math.fsum(x), rel_tol=1e-13)


def test_splitmix_matches_the_published_vectors():
    """The first outputs of SplitMix64 from seed 1234567."""
    outputs = [noise.splitmix(1234567 + n * GOLDEN) for n in (1, 2, 3, 4, 5)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_uniforms_are_the_scalar_hash():
    """The vectorised hash equals the definition, id by id, whichever ids are asked together."""
    ids = np.array([0, 1, 5, 2047, 154_879, 8192, 8193])
    key = noise.stream_key(-3, 11, Purpose.DRAFT)
    expected = [((noise.splitmix(key + (int(i) + 1) * GOLDEN) >> 12) + 0.5) / 2**52 for i in ids]
    assert noise.uniforms(-3, 11, Purpose.DRAFT, ids).tolist() == expected
    everything = noise.uniforms(-3, 11, Purpose.DRAFT, np.arange(154_880))
    assert everything[ids].tolist() == expected
    assert everything.min() > 0 and everything.max() < 1


def test_draws_are_uniform_and_unrelated():
    """Across seeds, positions, purposes and ids: flat histograms and no pairwise correlation."""
    n = 8000
    ids = np.arange(n)
    keys = itertools.product((0, 1, 2**63), (0, 1, 256), Purpose)
    rows = [noise.uniforms(seed, position, purpose, ids) for seed, position, purpose in keys]
    rows.append(np.array([noise.uniform(5, position, Purpose.ACCEPT) for position in range(n)]))
    rows.append(np.array([noise.uniforms(5, p, Purpose.PICK, ids[3:4])[0] for p in range(n)]))
    for row in rows:
        counts = np.bincount((row * 64).astype(int), minlength=64)
        assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 125  # 63 degrees of freedom, p ~ 1e-5
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5.5 / math.sqrt(n)


def test_fresh_seeds_differ_and_are_short():
    """Fresh seeds fit in 32 bits and do not repeat."""
    seeds = {noise.fresh_seed() for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 2**32 for seed in seeds)
