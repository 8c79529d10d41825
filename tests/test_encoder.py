"""The core's encoder against NumPy's, by bytes: formats, source dtypes, FP8 blocks, damage."""

from __future__ import annotations

import fourbit
import fp8
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.encoder import F4, F8, FLOAT_DTYPES, I4, I8, Rows, encode_rows, source_row_bytes
from colibri.errors import ContainerError
from colibri.formats import FLOATS, Format
from colibri.quantize import bf16_from_f32, encode, f32_from_bf16, f32_from_f4, f32_from_integers

QUANTISED = ("int8", "int8-f32", "int8-g4", "int8-g32-f32", "int4", "int4-f32", "int4-g8",
             "int4-g32", "int4-g64", "int4-g24-f32", "int4-g256", "int3-g64", "int3-g64-f32",
             "int2", "int2-f32")  # fmt: skip
FORMATS = (*QUANTISED, "f32", "bf16", "f16")


def run(rows: Rows, text: str, search: bool = False, isa: str | None = None) -> tuple[bytes, bytes]:
    """Codes and scales from the core."""
    form = Format.parse(text)
    codes = bytearray(rows.rows * form.row_bytes(rows.cols))
    scales = bytearray(rows.rows * form.row_scales(rows.cols) * form.scale_bytes)
    encode_rows(rows, form, search, codes, scales, isa)
    return bytes(codes), bytes(scales)


def expected(weights: np.ndarray, text: str, search: bool) -> tuple[bytes, bytes]:
    """Codes and scales from NumPy."""
    got = encode(weights, Format.parse(text), search)
    return got.payload.tobytes(), b"" if got.scales is None else got.scales.tobytes()


def stored(weights: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Weights as a checkpoint has them in a dtype, and as f32 again."""
    if dtype == "BF16":
        bits = bf16_from_f32(weights)
        return bits, f32_from_bf16(bits)
    if dtype == "F16":
        half = weights.astype(np.float16)
        return half, half.astype(np.float32)
    return weights, weights


@given(
    st.sampled_from(FORMATS),
    st.sampled_from(["F32", "BF16", "F16"]),
    st.sampled_from(["scalar", None]),
    st.booleans(),
    st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**32 - 1)),
    st.sampled_from([1e-45, 1e-13, 1e-9, 1e-6, 1e-3, 0.02, 3.0]),
)
@settings(max_examples=300)
def test_bits_are_those_of_numpy(text, dtype, isa, search, shape, size):
    """Every format, with and without search, on ragged shapes and from subnormals to large values:
    plain C and the fastest code give NumPy's bytes."""
    rows, cols, seed = shape
    rng = np.random.default_rng(seed)
    weights = (rng.standard_t(3, (rows, cols)) * size).astype(np.float32)
    weights = np.clip(weights, -3e4, 3e4)
    if seed % 3 == 0:  # ties, exact fits and groups of zeros
        weights = np.round(weights / np.float32(size)) * np.float32(size)
    weights[0, : cols // 2] = 0
    source, weights = stored(weights, dtype)
    got = run(Rows(dtype, rows, cols, source), text, search, isa)
    assert got == expected(weights, text, search)


@pytest.mark.parametrize(
    "text", ["int8-f32", "int8-g32-f32", "int4-g64-f32", "int4-f32", "int3-g64-f32"]
)
def test_quotients_near_a_half(text):
    """A weight divided by its scale rounds as the quotient does, even where a product with the
    scale's inverse would fall on the other side of a half."""
    rng = np.random.default_rng(7)
    high = {"int8": 127, "int4": 7, "int3": 3}[text.partition("-")[0]]
    wholes = rng.integers(-high, high, (200, 192)).astype(np.float32)
    scales = (2 ** rng.uniform(-20, -3, (200, 1))).astype(np.float32)
    weights = scales * (wholes + np.float32(0.5))
    aside = np.nextafter(weights, rng.choice([-np.inf, 0, np.inf], weights.shape))
    weights = aside.astype(np.float32)
    weights[:, ::8] = scales * np.float32(high)  # so that absmax gives these scales
    inverse = np.float32(1) / scales
    assert (np.rint(weights / scales) != np.rint(weights * inverse)).sum() > 100
    for isa in ("scalar", None):
        got = run(Rows("F32", 200, 192, weights), text, False, isa)
        assert got == expected(weights, text, False)


@pytest.mark.parametrize("text", ["int4", "int4-f32", "int2"])
def test_sums_past_32_bits(text):
    """Long rows, of which every weight is extreme, overflow 32-bit sums: they are cut in time."""
    weights = np.ones((17, 16384), np.float32)
    weights[:, ::2] = -1
    weights[5] *= np.float32(0.37)
    for isa in ("scalar", None):
        got = run(Rows("F32", 17, 16384, weights), text, True, isa)
        assert got == expected(weights, text, True)


@given(
    st.sampled_from(["int4-g64", "int8", "f32", "bf16"]),
    st.tuples(st.integers(1, 9), st.integers(1, 60)),
    st.sampled_from([(128, 128), (4, 8), (3, 5), (1, 60), (9, 60)]),
    st.integers(0, 20),
    st.sampled_from(["scalar", None]),
    st.integers(0, 2**32 - 1),
)
def test_fp8_blocks_count_from_the_matrix(text, shape, block, first, isa, seed):
    """An FP8 weight is its code's value times the scale of the block of its absolute row and
    column, one f32 product; blocks at the edges are partial."""
    (rows, cols), rng = shape, np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = rng.uniform(1e-4, 1e-2, (-(-(first + rows) // block[0]), -(-cols // block[1])))
    scales = scales.astype(np.float32)
    at = (first + np.arange(rows)) // block[0], np.arange(cols) // block[1]
    weights = fp8.VALUES[codes] * scales[np.ix_(*at)]
    got = run(Rows(F8, rows, cols, codes, scales, block, first), text, False, isa)
    assert got == expected(weights, text, False)


def test_every_fp8_code():
    """All 254 codes that are numbers have the value of the definition, by both kinds of code."""
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    for isa in ("scalar", None):
        rows = Rows(F8, 1, len(codes), codes, np.ones((1, 1), np.float32), (1, 1024))
        assert run(rows, "f32", isa=isa)[0] == fp8.VALUES[codes].tobytes()


@given(
    st.sampled_from(["int4-g64", "int8", "f32", "bf16"]),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([2, 10, 16, 34])),
    st.integers(0, 20),
    st.sampled_from(["scalar", None]),
    st.integers(0, 2**32 - 1),
)
def test_four_bits(text, shape, first, isa, seed):
    """A weight of four bits is its code's value times the scale of its row's block: NumPy's bytes,
    the sign of zero included."""
    (rows, blocks, wide), rng = shape, np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, blocks * wide // 2), dtype=np.uint8)
    scales = (rng.standard_normal((first + rows, blocks)) * 1e-2).astype(np.float32)
    weights = f32_from_f4(codes, scales[first:])
    got = run(Rows(F4, rows, blocks * wide, codes, scales, (1, wide), first), text, False, isa)
    assert got == expected(weights, text, False)


@given(
    st.sampled_from([(I4, 4), (I8, 8)]),
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.sampled_from([2, 18, 32, 64, 128])),
    st.booleans(),
    st.integers(0, 20),
    st.sampled_from(["scalar", None]),
    st.integers(0, 2**32 - 1),
)
def test_integers(kind, shape, asymmetric, first, isa, seed):
    """A packed integer less its block's zero, times its block's scale: NumPy's bytes."""
    (dtype, bits), (rows, blocks, wide), rng = kind, shape, np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, source_row_bytes(dtype, blocks * wide)), dtype=np.uint8)
    scales = (rng.standard_normal((first + rows, blocks)) * 1e-2).astype(np.float32)
    zeros = rng.integers(0, 1 << bits, scales.shape).astype(np.uint8) if asymmetric else None
    used = codes[:, : blocks * wide * bits // 8]
    of = None if zeros is None else zeros[first:]
    weights = f32_from_integers(used, bits, scales[first:], of)
    rows_ = Rows(dtype, rows, blocks * wide, codes, scales, (1, wide), first, zeros)
    for text in ("f32", "int4-g64"):
        assert run(rows_, text, False, isa) == expected(weights, text, False)


def test_every_code_of_four_bits():
    """All sixteen codes have the value of the definition, in either half of a byte."""
    codes = np.arange(256, dtype=np.uint8)[None]
    wanted = fourbit.E2M1[np.stack([codes & 15, codes >> 4], -1)].tobytes()
    assert f32_from_f4(codes, np.ones((1, 1), np.float32)).tobytes() == wanted
    for isa in ("scalar", None):
        rows = Rows(F4, 1, 512, codes, np.ones((1, 1), np.float32), (1, 512))
        assert run(rows, "f32", isa=isa)[0] == wanted


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_is_named(code):
    """A NaN code is refused with the code and its place."""
    codes = np.zeros((5, 70), np.uint8)
    codes[3, 69] = code
    for first in (0, 7):  # rows before these, of the same matrix
        rows = Rows(F8, 5, 70, codes, np.ones((1, 1), np.float32), (128, 128), first)
        for text in ("int4-g64", "f32"):
            place = rf"0x{code:02X} at \[{first + 3}, 69\] is NaN"
            with pytest.raises(ContainerError, match=place):
                run(rows, text, True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("text", ["int8", "int4-g64", "int3-g64", "int2", "bf16", "f32"])
def test_weights_that_are_not_finite_are_refused(bad, text):
    """A NaN or infinity anywhere stops the encoder, in every format and both kinds of code."""
    for at in ((0, 0), (40, 99)):
        weights = np.ones((41, 100), np.float32)
        weights[at] = bad
        for isa in ("scalar", None):
            with pytest.raises(ContainerError, match="not finite; the source is damaged"):
                run(Rows("F32", 41, 100, weights), text, True, isa)


def test_weights_that_do_not_fit_are_refused():
    """What f16 cannot hold is refused with the way out, as the NumPy encoder does."""
    weights = np.full((2, 64), 1e6, np.float32)
    with pytest.raises(ContainerError, match="use f32 scales"):
        run(Rows("F32", 2, 64, weights), "int4-g64")
    with pytest.raises(ContainerError, match="do not fit f16"):
        run(Rows("F32", 2, 64, weights), "f16")
    assert run(Rows("F32", 2, 64, weights), "int4-g64-f32") == expected(
        weights, "int4-g64-f32", False
    )


def test_rows_are_independent():
    """Encoding in blocks of rows gives the bytes of encoding at once, FP8 scales included."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 0x7F, (50, 192), dtype=np.uint8)
    scales = rng.uniform(1e-3, 1e-2, (7, 2)).astype(np.float32)
    whole = run(Rows(F8, 50, 192, codes, scales, (8, 128)), "int4-g64", True)
    parts = [
        run(Rows(F8, 7 if at < 49 else 1, 192, codes[at : at + 7], scales, (8, 128), at),
            "int4-g64", True)
        for at in range(0, 50, 7)
    ]  # fmt: skip
    assert tuple(b"".join(part) for part in zip(*parts, strict=True)) == whole


def test_buffers_are_checked():
    """Buffers of another size are an error before the core sees them; so are bad block scales."""
    weights = np.ones((2, 64), np.float32)
    with pytest.raises(ValueError, match="are needed"):
        encode_rows(Rows("F32", 2, 63, weights), Format.parse("int8"), False, b"", b"")
    with pytest.raises(ContainerError, match="do not cover"):
        run(Rows(F8, 2, 64, bytes(128), np.ones((1, 1), np.float32), (1, 64)), "int8")
    for scales, block in (((2, 1), (1, 32)), ((2, 22), (1, 3)), ((1, 4), (1, 16))):
        with pytest.raises(ContainerError, match="do not cover"):
            run(Rows(F4, 2, 64, bytes(64), np.ones(scales, np.float32), block), "int8")
    one = np.ones((2, 1), np.float32)
    with pytest.raises(ValueError, match="zeros uint8"):
        run(Rows(I4, 2, 64, bytes(64), one, (1, 64), 0, np.ones((1, 1), np.uint8)), "int8")
    with pytest.raises(ContainerError, match="no such instruction set"):
        run(Rows("F32", 2, 64, weights), "int8", isa="mmx")


def test_every_dtype_has_a_size():
    """The sizes of source dtypes are those NumPy and the format know; four bits fill bytes."""
    sizes = {dtype: source_row_bytes(dtype, 7) for dtype in (*FLOAT_DTYPES, F8, F4, I8, I4)}
    assert sizes == {"F32": 28, "BF16": 14, "F16": 14, F8: 7, F4: 4, I8: 8, I4: 4}
    assert all(Format(kind).row_bytes(8) == 8 * (4 if kind == 0 else 2) for kind in FLOATS)
