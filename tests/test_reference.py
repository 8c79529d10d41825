"""The NumPy reference against transformers, so that it may judge the engine elsewhere."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import oracle
import pytest
import tiny
from lanes import Lanes, dot, exp, fma
from reference import Float64, Quantised, Reference, quantise_rows, read_config

NEAR = 1e-5  # float64 against transformers' float32


def reference(fixture: oracle.Oracle, directory: Path, way: str | None = None, math=None):
    """The reference on a fixture's checkpoint."""
    fixture.checkpoint(directory, way)
    weights = dict(tiny.tensors(fixture.config, int(fixture.arrays["seed"])))
    return Reference(read_config(directory), weights.__getitem__, math)


@pytest.mark.parametrize("case", oracle.CASES)
def test_main_forward(case, tmp_path):
    """One pass gives transformers' logits, hiddens, experts and index sets."""
    fixture = oracle.load(case)
    ref = reference(fixture, tmp_path)
    assert oracle.worst(ref.step_all(fixture.ids), fixture.logits) < NEAR
    assert oracle.worst(ref.hidden, fixture.hidden) < NEAR
    for layer, chosen in fixture.experts().items():
        assert np.array_equal(ref.experts[layer], chosen), layer
    for layer, sets in fixture.sets().items():
        assert [s.tolist() for s in ref.sets[layer]] == [oracle.positions(s) for s in sets], layer


@pytest.mark.parametrize("case", ["groups", "ragged"])
def test_main_forward_in_pieces(case, tmp_path):
    """Chunks, single tokens and a rewound wrong batch give the rows of one pass."""
    fixture = oracle.load(case)
    ref, ids = reference(fixture, tmp_path), fixture.ids
    parts = [ref.step_all(part) for part in (ids[:5], ids[5:25])]
    ref.step_all(ids[:6])
    ref.rewind(25)
    parts += [ref.step_all(part) for part in (ids[25:31], ids[31:32], ids[32:])]
    assert oracle.worst(np.concatenate(parts), fixture.logits) < NEAR


@pytest.mark.parametrize("way", oracle.WAYS)
@pytest.mark.parametrize("case", oracle.CASES)
def test_mtp_drafts(case, way, tmp_path):
    """Absorbing a prompt and drafting five more steps gives the oracle's rows."""
    fixture = oracle.load(case)
    ref, layer = reference(fixture, tmp_path, way), fixture.config["num_hidden_layers"]
    for draft in fixture.drafts(way):
        ref.mtp_length = 0
        rows = draft.rows
        logits, hidden = ref.mtp_absorb(fixture.hidden[:rows], fixture.ids[1 : rows + 1])
        for step, token in enumerate(draft.fed):
            if step:
                logits, hidden = ref.mtp_draft(token, step, hidden)
            assert oracle.worst(logits, draft.logits[step]) < NEAR, (rows, step)
            assert oracle.worst(hidden, draft.hidden[step]) < NEAR, (rows, step)
            assert ref.sets[layer][-1].tolist() == oracle.positions(draft.sets[step])


@pytest.mark.parametrize("way", oracle.WAYS)
@pytest.mark.parametrize("case", ["groups", "ragged"])
def test_mtp_after_acceptance(case, way, tmp_path):
    """Whatever number of drafts is accepted, the absorb overwrites what drafting left behind."""
    fixture = oracle.load(case)
    ref, start = reference(fixture, tmp_path, way), fixture.accept_at
    ref.step_all(fixture.ids[:start])
    logits, hidden = ref.mtp_absorb(ref.hidden, fixture.ids[1 : start + 1])
    ids, expected = fixture.verify(way)
    for step, token in enumerate(ids[1:-1], 1):
        logits, hidden = ref.mtp_draft(token, step, hidden)
    assert oracle.worst(ref.step_all(ids), expected) < NEAR
    verified = ref.hidden
    for accepted, draft in enumerate(fixture.acceptances(way)):
        ref.mtp_length = start
        tokens = [*ids[1:][:accepted], draft.fed[0]]
        logits, hidden = ref.mtp_absorb(verified[: accepted + 1], tokens)
        for step, token in enumerate(draft.fed):
            if step:
                logits, hidden = ref.mtp_draft(token, step, hidden)
            assert oracle.worst(logits, draft.logits[step]) < NEAR, (accepted, step)


def test_activations_are_rounded_by_the_block():
    """Scales are the block's largest value over 127; rounding is to even; padding is zero."""
    x = np.zeros((3, 70), np.float32)
    x[0, :4] = [127, 0.5, 1.5, -2.5]
    x[0, 64:] = -254
    x[1, 3] = 2.0**-101
    x[2, 0] = 2.0**-100
    codes, scale = quantise_rows(x)
    assert codes.shape == (3, 2, 64) and scale.dtype == np.float32
    assert codes[0, 0, :5].tolist() == [127, 0, 2, -2, 0]
    assert codes[0, 1].tolist() == [-127] * 6 + [0] * 58
    assert scale[0].tolist() == [1, 2]
    assert scale[1].tolist() == [0, 0] and not codes[1].any()
    assert codes[2, 0, 0] == 127


def test_quantised_linear():
    """Codes, group scales and rounded activations multiply as written out by hand."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-7, 8, (3, 100))
    w = Quantised(codes, rng.random((3, 4)).astype(np.float16), 32)
    x = rng.normal(size=(2, 100)).astype(np.float32)
    q, scale = quantise_rows(x)
    expected = np.zeros((2, 3))
    for row, out, col in np.ndindex(2, 3, 100):
        product = int(q[row, col // 64, col % 64]) * int(codes[out, col])
        scales = float(w.scales[out, col // 32]) * float(scale[row, col // 64])
        expected[row, out] += product * scales
    assert np.allclose(Float64().linear(x, w), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["groups", "ragged"])
def test_lanes_compute_the_same_forward(case, tmp_path):
    """The engine's float32 order is the same mathematics: 2e-5 from transformers at most."""
    fixture = oracle.load(case)
    ref = reference(fixture, tmp_path, math=Lanes())
    logits = ref.step_all(fixture.ids[:16])
    assert logits.dtype == np.float32
    assert oracle.worst(logits, fixture.logits[:16]) < 2e-5
    logits, _ = ref.mtp_absorb(ref.hidden[:12], fixture.ids[1:13])
    draft = next(d for d in fixture.drafts("own") if d.rows == 12)
    assert oracle.worst(logits, draft.logits[0]) < 2e-5


def test_fma_rounds_once():
    """The NumPy fma equals the exact sum rounded to float32, halfway cases included."""
    rng = np.random.default_rng(1)
    a, b, c = rng.normal(size=(3, 400)).astype(np.float32)
    c[200:] *= np.float32(2.0) ** rng.integers(-40, 40, 200).astype(np.float32)
    # a * b is 1 + 2^-24 + 2^-47 or so: half a unit of c's last place, give or take a hair
    a[:4], b[:4] = np.float32(1 + 2.0**-23), np.float32(2.0**-24 * (1 - 2.0**-24))
    c[:4] = [1, -1, 1 + 2.0**-23, 2.0**-60]
    a[4:8], b[4:8], c[4:8] = 2.0**-24, [1, -1, 1 + 2.0**-23, 1 - 2.0**-24], [1, 1, 1, 1]
    a[8:10], b[8:10], c[8:10] = 2.0**-24, 1 + 2.0**-23, [1 + 2.0**-23, 2.0**-30]
    a[10], b[10], c[10] = 2.0**-50, 2.0**-40, 1
    for x, y, z, got in zip(a, b, c, fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        around = np.nextafter(got, np.float32([-np.inf, np.inf]))
        misses = [abs(Fraction(float(v)) - exact) for v in (got, *around)]
        assert misses[0] == min(misses)
        if misses.count(misses[0]) > 1:
            assert got.view(np.int32) % 2 == 0, "a tie goes to the even one"


def test_lanes_follow_the_order():
    """1e8 swallows a 1 it meets: so a dot product shows which elements share a lane, and when."""
    x = np.zeros(40, np.float32)
    x[[0, 3, 16, 35]] = [1e8, 1, -1e8, 1]
    assert dot(x, np.ones(40, np.float32)) == 2  # lane 0: 1e8 - 1e8; lane 3: 1 + 1
    x[[16, 17]] = [0, -1e8]
    assert dot(x, np.ones(40, np.float32)) == 0  # lanes 0 and 1 meet last: 1 + 1 drowned before


def test_exp_is_exact_to_a_unit_in_the_last_place():
    """The polynomial stays within 1.5e-7 of e^x and never gives a subnormal."""
    x = np.linspace(-87.3, 88.7, 20001).astype(np.float32)
    assert np.abs(exp(x) / np.exp(x.astype(np.float64)) - 1).max() < 1.5e-7
    edges = exp(np.float32([0, -87.4, 88.8, -np.inf, np.inf]))
    assert edges.tolist() == [1, 0, np.inf, 0, np.inf]
