"""Encoders and decoders of every matrix format, in NumPy: the bits of docs/format.md."""

from dataclasses import dataclass

import numpy as np

from colibri.errors import UsageError
from colibri.formats import FLOATS, Format, Kind

_CHUNK = 1 << 21  # elements encoded at a time: small enough for the cache, large for NumPy
_F16_LARGEST = 65504.0
_F16_LEAST = 2.0**-24
_F32_LEAST = 1e-8  # the public engine's floor
_LOW = {Kind.INT8: -128, Kind.INT4: -8, Kind.INT3: -4, Kind.INT2: -2}
_HIGH = {Kind.INT8: 127, Kind.INT4: 7, Kind.INT3: 3, Kind.INT2: 1}
# `search` tries this many scales, spread over a range of fractions of the absmax scale: where least
# squares finds its scales, by measurement. In wide groups outliers move them down.
_TRIALS = 6
_WIDE_GROUP = 128
_RANGES = {
    (Kind.INT4, False): (0.66, 0.96), (Kind.INT4, True): (0.35, 0.95),
    (Kind.INT3, False): (0.5, 0.8),
    (Kind.INT2, False): (0.1, 0.5), (Kind.INT2, True): (0.1, 0.5),
}  # fmt: skip
_LEAST_SEARCHED = 2.0**-40  # groups of smaller weights are not searched
_E2M1_SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_E2M1_SIZES, -_E2M1_SIZES])  # by code; the fourth bit is the sign


def _e4m3() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes > 127, -sizes, sizes).astype(np.float32)


_E4M3 = _e4m3()


@dataclass(frozen=True)
class Encoded:
    """A matrix in storage form: payload [rows, row_bytes] (int8 or uint8, or floats [rows, cols];
    BF16 as uint16) and scales [rows, row_scales] (f32 or f16; None for float formats)."""

    payload: np.ndarray
    scales: np.ndarray | None


def encode(weights: np.ndarray, form: Format, search: bool = False) -> Encoded:
    """Encode f32 [rows, cols]. Rounding is half to even; the stored scale is the one rounded by.

    Without `search` a group's scale is absmax / (largest code), floored at 1e-8 (f32) or 2^-24
    (f16). With it, a scale of less squared error is looked for, of either sign (int8 gains nothing
    by that and is left alone). The core encodes to the same bits, faster (csrc/encode.c).
    UsageError for weights that are not finite or too large for f16 scales.
    """
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    if weights.ndim != 2:
        raise UsageError(f"a matrix is needed, not an array of shape {list(weights.shape)}")
    if form.kind in FLOATS:
        return Encoded(_to_float(weights, form.kind), None)
    rows, cols = weights.shape
    payload = np.empty((rows, form.row_bytes(cols)), np.uint8)
    scales = np.empty((rows, form.row_scales(cols)), _dtype(form.scale))
    step = max(1, _CHUNK // max(cols, 1))
    for at in range(0, rows, step):
        part = slice(at, min(at + step, rows))
        payload[part], scales[part] = _encode_rows(weights[part], form, search)
    return Encoded(payload.view(np.int8) if form.kind == Kind.INT8 else payload, scales)


def decode(payload: np.ndarray, scales: np.ndarray | None, form: Format, cols: int) -> np.ndarray:
    """f32 [rows, cols] from what `encode` returns: one f32 product per element."""
    if form.kind in FLOATS:
        return _from_float(payload, form.kind)
    payload = np.ascontiguousarray(payload).view(np.uint8)
    assert scales is not None
    codes = _unpack(payload, form.kind, cols).astype(np.float32)
    group = form.group or cols
    spread = np.repeat(scales.astype(np.float32), group, axis=1)[:, :cols]
    return np.multiply(codes, spread, out=codes)


def bf16_from_f32(values: np.ndarray) -> np.ndarray:
    """f32 to BF16 bits (uint16), rounding half to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def f32_from_bf16(bits: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) to f32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_from_e4m3(codes: np.ndarray) -> np.ndarray:
    """FP8 codes (uint8) as f32: sign, 4 bits of exponent, 3 of mantissa; 0x7F and 0xFF are NaN."""
    return _E4M3[codes]


def f32_from_e8m0(codes: np.ndarray) -> np.ndarray:
    """Powers of two by their exponents (uint8, bias 127) as f32; 0xFF is NaN."""
    powers = np.ldexp(1.0, codes.astype(np.int32) - 127)
    return np.where(codes == 255, np.nan, powers).astype(np.float32)


def f32_from_f4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """f32 [rows, cols] of e2m1 codes, two a byte (uint8 [rows, cols / 2], the first in the low
    half): each times the scale of its block (f32 [rows, blocks]), one product per element."""
    codes = _nibbles(packed)
    return E2M1[codes] * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def f32_from_integers(
    packed: np.ndarray, bits: int, scales: np.ndarray, zeros: np.ndarray | None = None
) -> np.ndarray:
    """f32 [rows, cols] of unsigned codes of 8 bits (uint8 [rows, cols]) or 4 (two a byte): the code
    less the zero of its block (uint8 [rows, blocks]; without them 128 or 8), times the scale of its
    block (f32 [rows, blocks]): one exact difference, one product.
    """
    codes = packed if bits == 8 else _nibbles(packed)
    if zeros is None:
        zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    each = codes.shape[1] // scales.shape[1]
    less = codes.astype(np.float32) - np.repeat(zeros, each, axis=1).astype(np.float32)
    return less * np.repeat(scales, each, axis=1)


def _dtype(kind: Kind) -> type[np.floating]:
    return np.float16 if kind == Kind.F16 else np.float32


def _to_float(weights: np.ndarray, kind: Kind) -> np.ndarray:
    if kind == Kind.BF16:
        return bf16_from_f32(weights)
    if kind == Kind.F32:
        return weights
    if np.any(np.abs(weights) > _F16_LARGEST):
        raise UsageError("weights beyond 65504 do not fit f16; use bf16 or f32")
    return weights.astype(np.float16)


def _from_float(payload: np.ndarray, kind: Kind) -> np.ndarray:
    return f32_from_bf16(payload) if kind == Kind.BF16 else payload.astype(np.float32)


def _encode_rows(weights: np.ndarray, form: Format, search: bool) -> tuple[np.ndarray, np.ndarray]:
    rows, cols = weights.shape
    group = form.group or max(cols, 1)
    count = form.row_scales(cols)
    padded = np.zeros((rows, count * group), np.float32)
    padded[:, :cols] = weights
    grouped = padded.reshape(rows, count, group)
    absmax = np.abs(grouped).max(axis=2)
    if not np.isfinite(absmax).all():
        raise UsageError("weights that are not finite cannot be quantised; the source is damaged")
    scales = _round_scales(absmax / np.float32(_HIGH[form.kind]), form.scale)
    if search and form.kind != Kind.INT8:
        scales = _search_scales(grouped, absmax, scales, form)
    codes = _codes(grouped, scales.astype(np.float32), form.kind).reshape(rows, count * group)
    return _pack(codes[:, :cols], form.kind), scales


def _round_scales(scales: np.ndarray, kind: Kind) -> np.ndarray:
    """Positive scales as stored; UsageError when f16 cannot hold one."""
    if kind == Kind.F16 and np.any(scales > _F16_LARGEST):
        raise UsageError("weights are too large for f16 scales; use f32 scales (int4-g64-f32)")
    return _rounded(scales, kind)


def _rounded(scales: np.ndarray, kind: Kind) -> np.ndarray:
    """Positive scales, never 0. f16 below its normal range rounds up, so that codes never clip."""
    if kind == Kind.F32:
        return np.maximum(scales, np.float32(_F32_LEAST))
    rounded = scales.astype(np.float16)
    low = (scales < 2.0**-14) & (rounded.astype(np.float32) < scales)
    rounded[low] = np.nextafter(rounded[low], np.float16(np.inf))
    return np.maximum(rounded, np.float16(_F16_LEAST))


def _codes(grouped: np.ndarray, scales: np.ndarray, kind: Kind) -> np.ndarray:
    """int8 codes [rows, groups, group] of weights divided by their scales."""
    quotient = grouped / scales[:, :, None]
    np.rint(quotient, out=quotient)
    return np.clip(quotient, _LOW[kind], _HIGH[kind], out=quotient).astype(np.int8)


def _search_scales(
    grouped: np.ndarray, absmax: np.ndarray, start: np.ndarray, form: Format
) -> np.ndarray:
    """Per group, the scale of least squared error that is found among a few; `start` if none is.

    Weights are 16-bit integers here, in units of absmax / 32767, so sums are exact. A scale's sign
    gives the extreme weight the one extra code below zero. Codes of each trial get the scale that
    fits them best (least squares); the best of these is fitted once more.
    """
    live = absmax >= np.float32(_LEAST_SEARCHED)
    some = np.where(live, absmax, np.float32(1))
    unit = np.where(live, absmax / np.float32(32767), np.float32(1))
    inverse = np.where(live, np.float32(32767) / some, np.float32(0))
    x = _whole(grouped * inverse[:, :, None]).astype(np.int32)
    sign = np.where(x.max(axis=2) > -x.min(axis=2), -1, 1)
    scale = start = start.astype(np.float32)
    best = np.zeros_like(start)
    for multiplier in _trials(form, grouped.shape[2]):
        product, square = _fit(x, sign * multiplier, form.kind)
        fitted = product / square
        gain = product * fitted
        scale = np.where(gain > best, fitted * unit, scale)
        best = np.maximum(gain, best)
    tried = _stored(scale, form.scale)
    product, square = _fit(x, _multiplier(unit, tried), form.kind)
    tried = _stored(product / square * unit, form.scale)
    after = _explained(tried / unit, product, square)
    before = _explained(start / unit, *_fit(x, _multiplier(unit, start), form.kind))
    return np.where(after > before, tried, start).astype(_dtype(form.scale))


def _fit(x: np.ndarray, multiplier: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Sums of x q and of q q (1 for none) as f32, q the codes x multiplier / 2^25."""
    codes = (((x * multiplier[:, :, None]) >> 16) + 256) >> 9
    codes = np.clip(codes, _LOW[kind], _HIGH[kind])
    product = (x * codes).sum(axis=2, dtype=np.int64)
    square = (codes * codes).sum(axis=2, dtype=np.int64)
    return product.astype(np.float32), np.maximum(square, 1).astype(np.float32)


def _explained(ratio: np.ndarray, product: np.ndarray, square: np.ndarray) -> np.ndarray:
    """How much of the sum of x x a scale explains: more is less error."""
    return ratio * (np.float32(2) * product - ratio * square)


def _trials(form: Format, group: int) -> list[int]:
    """Multipliers of the scales that are tried, in f32 as the core computes them."""
    least, most = map(np.float32, _RANGES[form.kind, group > _WIDE_GROUP])
    high, two25 = np.float32(_HIGH[form.kind]), np.float32(2.0**25)
    fractions = (
        least + (most - least) * np.float32(t) / np.float32(_TRIALS - 1) for t in range(_TRIALS)
    )
    return [int(high / f * two25 / np.float32(32767) + np.float32(0.5)) for f in fractions]


def _multiplier(unit: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """int32 multipliers for codes by these scales."""
    ratio = unit / scales * np.float32(2.0**25)
    return _whole(np.clip(ratio, np.float32(-32767), np.float32(32767))).astype(np.int32)


def _whole(values: np.ndarray) -> np.ndarray:
    """Rounded, half away from zero."""
    return np.trunc(values + np.copysign(np.float32(0.5), values))


def _stored(scales: np.ndarray, kind: Kind) -> np.ndarray:
    """Scales of either sign as they are stored, in f32."""
    with np.errstate(over="ignore"):  # infinite where f16 ends: such a scale explains nothing
        rounded = _rounded(np.abs(scales), kind).astype(np.float32)
    return np.copysign(rounded, scales)


def _pack(codes: np.ndarray, kind: Kind) -> np.ndarray:
    """int8 codes [rows, cols] to bytes [rows, row_bytes]; codes past cols count as zero."""
    if kind == Kind.INT8:
        return codes.view(np.uint8) if codes.flags.c_contiguous else codes.copy().view(np.uint8)
    rows, cols = codes.shape
    unit = {Kind.INT4: 2, Kind.INT3: 64, Kind.INT2: 4}[kind]
    stored = np.full((rows, -(-cols // unit) * unit), -_LOW[kind], np.uint8)
    stored[:, :cols] = codes - np.int8(_LOW[kind])
    if kind == Kind.INT4:
        return stored[:, 0::2] | (stored[:, 1::2] << 4)
    if kind == Kind.INT2:
        return _pack_pairs(stored)
    blocks = stored.reshape(-1, 64)
    high = np.packbits(blocks >> 2, axis=1, bitorder="little")
    return np.concatenate([_pack_pairs(blocks & 3), high], axis=1).reshape(rows, -1)


def _pack_pairs(values: np.ndarray) -> np.ndarray:
    """Four 2-bit values a byte, the first in the low bits."""
    return values[:, 0::4] | values[:, 1::4] << 2 | values[:, 2::4] << 4 | values[:, 3::4] << 6


def _unpack(payload: np.ndarray, kind: Kind, cols: int) -> np.ndarray:
    """int8 codes [rows, cols] of packed bytes."""
    rows = payload.shape[0]
    if kind == Kind.INT8:
        return payload.view(np.int8)
    if kind == Kind.INT4:
        stored = _nibbles(payload)
    elif kind == Kind.INT2:
        stored = _unpack_pairs(payload)
    else:
        blocks = payload.reshape(-1, 24)
        high = np.unpackbits(blocks[:, 16:], axis=1, bitorder="little")
        stored = (_unpack_pairs(blocks[:, :16]) | high << 2).reshape(rows, -1)
    return stored[:, :cols].astype(np.int8) + np.int8(_LOW[kind])


def _nibbles(payload: np.ndarray) -> np.ndarray:
    return np.stack([payload & 15, payload >> 4], axis=-1).reshape(len(payload), -1)


def _unpack_pairs(payload: np.ndarray) -> np.ndarray:
    shifts = np.array([0, 2, 4, 6], np.uint8)
    return ((payload[:, :, None] >> shifts) & 3).reshape(payload.shape[0], -1)
