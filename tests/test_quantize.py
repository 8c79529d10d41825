"""Encoders and decoders: the bits of docs/format.md, from plain loops written for this test."""

from __future__ import annotations

import itertools

import fp8
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.errors import UsageError
from colibri.formats import Format, Kind
from colibri.quantize import bf16_from_f32, decode, encode, f32_from_bf16, f32_from_e4m3

TEXTS = ("int8", "int8-f32", "int8-g4", "int8-g32-f32", "int4", "int4-f32", "int4-g8",
         "int4-g64", "int4-g24-f32", "int3-g64", "int3-g64-f32", "int2", "int2-f32")  # fmt: skip
LIMITS = {Kind.INT8: (-128, 127), Kind.INT4: (-8, 7), Kind.INT3: (-4, 3), Kind.INT2: (-2, 1)}


def random_weights(rows: int, cols: int, seed: int, scale: float = 0.02) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, (rows, cols)) * scale).astype(np.float32)


def group_codes(values: np.ndarray, form: Format) -> tuple[np.floating, list[int]]:
    """Scale and codes of one group by the definition, element by element in f32."""
    low, high = LIMITS[form.kind]
    scale = np.float32(np.abs(values).max()) / np.float32(high)
    if form.scale == Kind.F32:
        stored = max(scale, np.float32(1e-8))
    else:
        stored = np.float16(scale)
        if stored < scale < 2.0**-14:
            stored = np.nextafter(stored, np.float16(1))
        stored = max(stored, np.float16(2.0**-24))
    codes = [int(min(max(np.rint(np.float32(v) / np.float32(stored)), low), high)) for v in values]
    return stored, codes


def pack_row(codes: list[int], kind: Kind) -> bytes:
    """Bytes of a row by the definition, bit by bit."""
    if kind == Kind.INT8:
        return bytes(code & 255 for code in codes)
    if kind == Kind.INT3:
        out = b""
        padded = [*codes, *([0] * (-len(codes) % 64))]
        for at in range(0, len(padded), 64):
            planes = bytearray(24)
            for k, code in enumerate(padded[at : at + 64]):
                planes[k // 4] |= ((code + 4) & 3) << 2 * (k % 4)
                planes[16 + k // 8] |= ((code + 4) >> 2) << k % 8
            out += bytes(planes)
        return out
    bits, offset = (4, 8) if kind == Kind.INT4 else (2, 2)
    per = 8 // bits
    padded = [*codes, *([0] * (-len(codes) % per))]
    return bytes(
        sum((padded[at + j] + offset) << bits * j for j in range(per))
        for at in range(0, len(padded), per)
    )


@given(
    st.sampled_from(TEXTS),
    st.integers(1, 4),
    st.integers(1, 150),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-9, 1e-6, 1e-3, 0.02, 3.0, 3e3]),
)
def test_bits_are_the_definition(text, rows, cols, seed, scale):
    """Payload and scales equal those of plain loops, for ragged sizes and extreme magnitudes."""
    form = Format.parse(text)
    weights = random_weights(rows, cols, seed, scale).clip(-60000, 60000)  # int2's scale is f16
    weights[0, : cols // 2] = 0
    got = encode(weights, form)
    step = form.group or cols
    for row, values in enumerate(weights):
        groups = [group_codes(values[at : at + step], form) for at in range(0, cols, step)]
        codes = list(itertools.chain.from_iterable(codes for _, codes in groups))
        assert got.payload[row].tobytes() == pack_row(codes, form.kind)
        assert [float(s) for s in got.scales[row]] == [float(s) for s, _ in groups]


@given(st.sampled_from(TEXTS), st.integers(1, 150), st.integers(0, 2**32 - 1))
def test_decode_is_one_product(text, cols, seed):
    """A decoded element is code times scale, one f32 product, for any payload bytes at all."""
    form = Format.parse(text)
    rng = np.random.default_rng(seed)
    payload = rng.integers(0, 256, (3, form.row_bytes(cols)), dtype=np.uint8)
    dtype = np.float16 if form.scale == Kind.F16 else np.float32
    scales = rng.normal(size=(3, form.row_scales(cols))).astype(dtype)
    view = payload.view(np.int8) if form.kind == Kind.INT8 else payload
    got = decode(view, scales, form, cols)
    low, high = LIMITS[form.kind]
    for row, k in itertools.product(range(3), range(cols)):
        scale = np.float32(scales[row, k // form.group if form.group else 0])
        code = code_at(payload[row], form.kind, k)
        assert low <= code <= high
        assert got[row, k] == np.float32(code) * scale


def code_at(row: np.ndarray, kind: Kind, k: int) -> int:
    """Code k of a packed row by the definition."""
    if kind == Kind.INT8:
        return int(row[k]) - 256 * (row[k] > 127)
    if kind == Kind.INT4:
        return (int(row[k // 2]) >> 4 * (k % 2) & 15) - 8
    if kind == Kind.INT2:
        return (int(row[k // 4]) >> 2 * (k % 4) & 3) - 2
    block = row[k // 64 * 24 :]
    low = int(block[k % 64 // 4]) >> 2 * (k % 4) & 3
    high = int(block[16 + k % 64 // 8]) >> k % 8 & 1
    return low + 4 * high - 4


def test_documented_int4_row():
    """The worked example of the public format: its scale, codes and bytes."""
    weights = np.array([[0.7, -0.7, 0.1, -0.05, 0.35]], np.float32)
    got = encode(weights, Format(Kind.INT4))
    assert got.payload.tobytes()[:2] == bytes.fromhex("1f89")
    assert got.payload[0, 2] & 15 == 0xC and got.scales[0, 0] == np.float32(0.7) / np.float32(7)


@given(st.sampled_from(TEXTS), st.integers(1, 150), st.integers(0, 2**32 - 1))
def test_error_is_half_a_step(text, cols, seed):
    """Every weight comes back within half a scale, plus the f16 rounding of the largest code."""
    form = Format.parse(text)
    weights = random_weights(3, cols, seed)
    got = encode(weights, form)
    back = decode(got.payload, got.scales, form, cols)
    step = np.repeat(np.abs(got.scales.astype(np.float32)), form.group or cols, axis=1)[:, :cols]
    slack = 1 + LIMITS[form.kind][1] * 2.0**-10
    assert np.all(np.abs(back - weights) <= step * (0.5 * slack + 1e-5))


@pytest.mark.parametrize("text", ["int4-g64", "int4-g24-f32", "int4", "int3-g64", "int2"])
def test_search_never_adds_error(text):
    """Each group's squared error with searched scales is at most that of absmax scales."""
    form = Format.parse(text)
    weights = random_weights(16, 320, 7)
    errors = []
    for search in (False, True):
        got = encode(weights, form, search)
        wrong = (decode(got.payload, got.scales, form, 320) - weights).astype(np.float64) ** 2
        group = form.group or 320
        padded = np.zeros((16, -(-320 // group) * group))
        padded[:, :320] = wrong
        errors.append(padded.reshape(16, -1, group).sum(2))
    assert np.all(errors[1] <= errors[0] * (1 + 1e-6))
    assert errors[1].sum() < 0.75 * errors[0].sum()


def test_search_leaves_int8_alone():
    """int8 gains nothing by searching, so its bits do not depend on it."""
    weights = random_weights(4, 100, 3)
    plain, searched = (encode(weights, Format.parse("int8"), search) for search in (False, True))
    assert plain.payload.tobytes() == searched.payload.tobytes()
    assert plain.scales.tobytes() == searched.scales.tobytes()


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_rows_are_independent(text, search):
    """A row's bits do not depend on the rows encoded with it."""
    form = Format.parse(text)
    weights = random_weights(9, 200, 11)
    whole = encode(weights, form, search)
    for row in range(9):
        alone = encode(weights[row : row + 1], form, search)
        assert alone.payload.tobytes() == whole.payload[row].tobytes()
        assert alone.scales.tobytes() == whole.scales[row].tobytes()


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("text", ["int8", "int4-g64", "int4-g64-f32", "int3-g64", "int2"])
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-9, 3e-7, 6e-5])
def test_tiny_weights_keep_sound_scales(text, search, scale):
    """Nothing underflows: scales are never zero or NaN, and tiny weights err by less than 2^-24."""
    form = Format.parse(text)
    weights = np.full((2, 128), scale, np.float32)
    weights[0, ::2] *= -1
    got = encode(weights, form, search)
    assert np.all(np.isfinite(got.scales)) and np.all(got.scales != 0)
    back = decode(got.payload, got.scales, form, 128)
    assert np.all(np.abs(back - weights) <= np.maximum(2.0**-24, np.abs(weights) * 0.6))


def test_weights_beyond_f16_scales_are_refused():
    """A scale that f16 cannot hold is an error that names the way out, which then works."""
    weights = np.full((1, 64), 1e6, np.float32)
    with pytest.raises(UsageError, match="use f32 scales"):
        encode(weights, Format.parse("int4-g64"))
    got = encode(weights, Format.parse("int4-g64-f32"))
    assert np.allclose(decode(got.payload, got.scales, Format.parse("int4-g64-f32"), 64), 1e6)
    with pytest.raises(UsageError, match="do not fit f16"):
        encode(weights, Format.parse("f16"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("text", ["int8", "int4-g64", "int3-g64"])
def test_weights_that_are_not_finite_are_refused(bad, text):
    """A NaN or infinity in the source is an error, not a silent zero."""
    weights = random_weights(2, 64, 1)
    weights[1, 5] = bad
    with pytest.raises(UsageError, match="not finite"):
        encode(weights, Format.parse(text))


def test_bf16_rounds_to_nearest_even():
    """Every BF16 value survives a round trip, halves go to even, NaN stays NaN."""
    bits = np.arange(65536, dtype=np.uint16)
    values = f32_from_bf16(bits)
    kept = ~np.isnan(values)
    assert np.array_equal(bf16_from_f32(values)[kept], bits[kept])
    assert np.all(np.isnan(f32_from_bf16(bf16_from_f32(values)))[~kept])
    halves = ((bits.astype(np.uint32) << 16) | 0x8000).view(np.float32)
    even = (bits.astype(np.uint32) + (bits & 1)).astype(np.uint16)
    finite = np.isfinite(halves)
    assert np.array_equal(bf16_from_f32(halves)[finite], even[finite])


def test_float_formats_round_trip():
    """f32 is kept bit for bit; bf16 and f16 decode to their own rounding."""
    weights = random_weights(5, 33, 2)
    for text, expected in (
        ("f32", weights),
        ("f16", weights.astype(np.float16).astype(np.float32)),
        ("bf16", f32_from_bf16(bf16_from_f32(weights))),
    ):
        form = Format.parse(text)
        got = encode(weights, form)
        assert got.scales is None
        assert decode(got.payload, None, form, 33).tobytes() == expected.tobytes()


@pytest.mark.parametrize("text", [*TEXTS, "f32", "bf16", "f16"])
def test_format_names_round_trip(text):
    """A format prints as a name that parses back to it, and sizes follow from it."""
    form = Format.parse(text)
    assert Format.parse(str(form)) == form
    got = encode(random_weights(3, 70, 1), form)
    stored = got.payload.nbytes + (got.scales.nbytes if got.scales is not None else 0)
    assert stored == form.nbytes(3, 70)


@pytest.mark.parametrize(
    "text", ["", "int5", "int4-g7", "int8-g2", "int3", "int3-g32", "int2-g64", "bf16-g64",
             "int4-g64-bf16", "int4-g99999999", "f32-f16"]
)  # fmt: skip
def test_unknown_formats_are_refused(text):
    """A format no kernel can follow is refused when it is named."""
    with pytest.raises(UsageError):
        Format.parse(text)


def test_fp8_values():
    """Every FP8 code has the value of its definition, and the two that are no number are NaN."""
    codes = np.arange(256, dtype=np.uint8)
    real = (codes & 0x7F) != 0x7F
    assert f32_from_e4m3(codes[real]).tobytes() == fp8.VALUES[codes[real]].tobytes()
    assert np.isnan(f32_from_e4m3(codes[~real])).all()
