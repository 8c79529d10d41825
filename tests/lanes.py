"""The engine's arithmetic in NumPy, bit for bit (docs/arithmetic.md): float32 lanes, fused
multiply-adds and one order for everything. Plugged into `reference.Reference`, it predicts every
bit of a quantised or float container's results."""

from __future__ import annotations

from functools import cache

import numpy as np
from reference import BLOCK, Float64, Matrix, Quantised, quantise_rows

LANES = 16
f32 = np.float32


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c with one rounding. The product is exact in float64; only a sum that lands,
    rounded, halfway between two floats could be rounded wrongly after that, and is nudged."""
    product = np.multiply(a, b, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN here as it is there
        found = np.asarray(product + c)
    total = np.atleast_1d(found)
    halfway = np.nonzero((total.view(np.int64) & 0x1FFFFFFF) == 0x10000000)
    if len(halfway[0]):
        total[halfway] = nudge(total, product, c, halfway)
    return total.astype(f32).reshape(found.shape)


def nudge(total: np.ndarray, product: np.ndarray, c: np.ndarray, at: tuple) -> np.ndarray:
    """The sums at some places, moved off halfway by the sign of what float64 lost of them."""
    product, c = (np.broadcast_to(np.float64(v), total.shape)[at] for v in (product, c))
    part = total[at] - product
    lost = (product - (total[at] - part)) + (c - part)
    moved = np.nextafter(total[at], np.where(lost > 0, np.inf, -np.inf))
    return np.where(lost != 0, moved, total[at])


def fold(acc: np.ndarray) -> np.ndarray:
    """Lanes [..., 16 or 8] to sums [...]: the upper half to the lower one, until one is left."""
    while acc.shape[-1] > 1:
        half = acc.shape[-1] // 2
        acc = acc[..., :half] + acc[..., half:]
    return acc[..., 0]


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums over the last axis; lane l takes elements 16 c + l in order of c."""
    shape = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    acc = np.zeros((*shape, LANES), f32)
    for first in range(0, a.shape[-1], LANES):
        part = slice(first, first + LANES)
        width = a[..., part].shape[-1]
        acc[..., :width] = fma(a[..., part], b[..., part], acc[..., :width])
    return fold(acc)


def total(x: np.ndarray) -> np.ndarray:
    """Plain sums over the last axis, in the lanes' order."""
    acc = np.zeros((*x.shape[:-1], LANES), f32)
    for first in range(0, x.shape[-1], LANES):
        part = x[..., first : first + LANES]
        acc[..., : part.shape[-1]] += part
    return fold(acc)


def exp(x: np.ndarray) -> np.ndarray:
    """e^x = 2^k e^r by a polynomial of degree 6; zero below ln 2^-126."""
    hexes = float.fromhex
    shifted = fma(x, f32(hexes("0x1.715476p+0")), f32(hexes("0x1.8p23")))
    k = shifted - f32(hexes("0x1.8p23"))
    r = fma(k, f32(hexes("-0x1.62e4p-1")), x)
    r = fma(k, f32(hexes("-0x1.7f7d1cp-20")), r)
    q = f32(hexes("0x1.6a234ep-10"))
    for factor in ("0x1.123a6cp-7", "0x1.5558f4p-5", "0x1.55549p-3", "0x1.fffffcp-2"):
        q = fma(q, r, f32(hexes(factor)))
    e = f32(1) + fma(q, r * r, r)
    with np.errstate(over="ignore"):
        y = np.ldexp(e, np.clip(k, -200, 200).astype(np.int32))
    y = np.where(x > f32(hexes("0x1.62e43p+6")), f32(np.inf), y)
    return np.where(x < f32(hexes("-0x1.5d589ep+6")), f32(0), y)


EIGHT = 8  # lanes of a quantised output
RUN = 32  # blocks of int4 whose offsets are taken off together


def by_lane(values: np.ndarray, even_odd: bool) -> np.ndarray:
    """[..., 64] to [..., 2, 8, 4]: a lane's first four inputs of a block, then its other four."""
    shape = (*values.shape[:-1], 2, EIGHT, 4)
    if even_odd:
        values = np.moveaxis(values.reshape(*values.shape[:-1], BLOCK // 2, 2), -1, -2)
    return values.reshape(shape)


@cache
def weights_by_lane(w: Quantised) -> tuple[np.ndarray, np.ndarray]:
    """Codes [O, B, 2, 8, 4] and the scales of the lanes' fours [O, B, 2, 8]."""
    beyond = ((0, 0), (0, -w.codes.shape[1] % BLOCK))
    codes = np.pad(w.codes, beyond).astype(np.int32).reshape(len(w.codes), -1, BLOCK)
    scales = np.pad(w.wide(), beyond, mode="edge").reshape(codes.shape)
    return by_lane(codes, w.even_odd), by_lane(scales, w.even_odd)[..., 0]


class Lanes(Float64):
    """The operations of `reference.Float64` as the engine rounds them."""

    dtype = np.float32

    def linear(self, x: np.ndarray, w: Matrix) -> np.ndarray:
        if isinstance(w, Quantised):
            return self.quantised(x, w)
        return dot(x[:, None], np.asarray(w, f32)[None])

    def quantised(self, x: np.ndarray, w: Quantised) -> np.ndarray:
        """Per block and lane an exact integer sum of eight products, then one fma; under scales
        that end inside a block, int8 has two sums of four."""
        (codes, scale), (weights, wide) = quantise_rows(x), weights_by_lane(w)
        codes = by_lane(codes.astype(np.int32), w.even_odd)
        scale, whole = scale[:, None], w.group % BLOCK == 0 or w.scales.shape[1] == 1
        acc = np.zeros((len(x), len(weights), EIGHT), f32)
        for b in range(weights.shape[1]):
            block, factor = weights[:, b], wide[:, b] * scale[:, :, b, None, None]
            if whole and w.even_odd:
                block = block + 8
                if b % RUN == 0:
                    self.take_off(codes[:, None, b : b + RUN], wide[:, b:], scale[:, :, b:], acc)
            d = np.einsum("sljk,oljk->solj", codes[:, b], block)
            if whole or w.even_odd:
                acc = fma(d.sum(-2).astype(f32), factor[..., 0, :], acc)
            else:
                for part in (0, 1):
                    acc = fma(d[..., part, :].astype(f32), factor[..., part, :], acc)
        return fold(acc)

    def take_off(self, codes, wide, scale, acc) -> None:
        """Nibbles 0..15 stand for -8..7: eight times the activations of each block of a run, block
        b's in lane b % 8."""
        for b in range(codes.shape[2]):
            less = (-8 * codes[:, :, b].sum((-1, -2, -3))).astype(f32)
            factor = wide[:, b, 0, 0] * scale[:, :, b]
            acc[..., b % EIGHT] = fma(factor, less, acc[..., b % EIGHT])

    def rms_norm(self, x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
        mean = dot(x, x)[..., None] / f32(x.shape[-1])
        return x * (f32(1) / np.sqrt(mean + f32(eps))) * gain

    def layer_norm(self, x: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> np.ndarray:
        centred = x - total(x)[..., None] / f32(x.shape[-1])
        variance = dot(centred, centred)[..., None] / f32(x.shape[-1])
        return fma(centred * (f32(1) / np.sqrt(variance + f32(1e-6))), gain, bias)

    def sigmoid(self, x: np.ndarray) -> np.ndarray:
        return f32(1) / (f32(1) + exp(-x))

    def angles(self, positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cos, sin = super().angles(positions, inv_freq)
        return cos.astype(f32), sin.astype(f32)

    def rotate(self, even: np.ndarray, odd: np.ndarray, cos: np.ndarray, sin: np.ndarray):
        return fma(even, cos, -(odd * sin)), fma(odd, cos, even * sin)

    def index_scores(self, q: np.ndarray, weight: np.ndarray, keys: np.ndarray) -> np.ndarray:
        acc = np.zeros(len(keys), f32)
        for head, factor in zip(np.maximum(dot(q[:, None], keys[None]), 0), weight, strict=True):
            acc = fma(factor, head, acc)
        return acc

    def attend(self, q_nope, q_rope, k_b, latents, ropes) -> np.ndarray:
        carried = np.zeros((len(q_nope), k_b.shape[2]), f32)
        for i in range(q_nope.shape[1]):
            carried = fma(q_nope[:, i, None], k_b[:, i], carried)
        query, keys = np.concatenate([carried, q_rope], 1), np.concatenate([latents, ropes], 1)
        score = dot(query[:, None], keys[None]) * self.inverse_root(
            q_nope.shape[1] + q_rope.shape[1]
        )
        weight = exp(score - score.max(1, keepdims=True))
        weight = weight * (f32(1) / total(weight))[:, None]
        mixed = np.zeros_like(carried)
        for t, latent in enumerate(latents):
            mixed = fma(weight[:, t, None], latent, mixed)
        return mixed

    def mixture(self, weights: np.ndarray, outputs: np.ndarray, shared: np.ndarray) -> np.ndarray:
        acc = np.zeros_like(shared)
        for weight, output in zip(weights, outputs, strict=True):
            acc = fma(weight, output, acc)
        return acc + shared
