"""Tiny 4-bit checkpoints as other tools write them, and the weights they stand for."""

from __future__ import annotations

import fp8
import numpy as np
import shardkit
import tiny

from colibri.quantize import bf16_from_f32, f32_from_bf16

Arrays = dict[str, np.ndarray]
CONFIG = fp8.CONFIG
FOUR = (".gate_proj.weight", ".up_proj.weight", ".down_proj.weight")  # of experts
# Values of e2m1 codes: sign, 2 bits of exponent, 1 of mantissa.
E2M1 = np.array(
    [
        (-1) ** (c >> 3) * (m / 2 if e == 0 else (1 + m / 2) * 2.0 ** (e - 1))
        for c in range(16)
        for e, m in [(c >> 1 & 3, c & 1)]
    ],
    np.float32,
)


def is_expert(name: str) -> bool:
    """Whether a matrix is of a main layer's experts, the shared one included."""
    last = f"model.layers.{CONFIG['num_hidden_layers']}."
    return "experts." in name and name.endswith(FOUR) and not name.startswith(last)


def packed(codes: np.ndarray) -> np.ndarray:
    """Codes of four bits, two a byte, the first in the low half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def modelopt() -> tuple[Arrays, Arrays]:
    """NVFP4 experts as NVIDIA's Model Optimizer exports them, attention in FP8 with one scale, the
    rest as it was; and the same as f32: e2m1(code) * (e4m3(scale) * scale of the matrix)."""
    rng = np.random.default_rng(9)
    stored: Arrays = {}
    meant: Arrays = {}
    for name, weights in tiny.tensors(CONFIG, shardkit.SEED):
        stored[name] = meant[name] = weights
        stem = name.removesuffix(".weight")
        if is_expert(name):
            stored |= nvfp4(rng, name, weights.shape)
            scales = fp8.VALUES[np.asarray(stored[name + "_scale"])] * stored[name + "_scale_2"]
            meant[name] = values(stored[name], scales)
            stored[stem + ".input_scale"] = np.array(0.5, np.float32)
        elif name.endswith("o_proj.weight"):
            codes = rng.integers(0, 0x7F, weights.shape, dtype=np.uint8)
            scale = np.array(3e-4, np.float32)
            stored |= {name: codes.view(shardkit.Eight), name + "_scale": scale}
            meant[name] = fp8.VALUES[codes] * scale
            stored[stem + ".input_scale"] = np.array(0.5, np.float32)
            stored[stem.replace("o_proj", "k_proj.k_scale")] = np.array(1, np.float32)
    return stored, meant


def compressed() -> tuple[Arrays, Arrays]:
    """The same as compressed-tensors has it (nvfp4-pack-quantized): codes are `weight_packed`, and
    the matrix's scale divides: e2m1(code) * (e4m3(scale) / scale of the matrix)."""
    stored, meant = modelopt()
    for name in [n for n in stored if is_expert(n)]:
        whole = np.array([1 / stored.pop(name + "_scale_2")], np.float32)
        codes = stored.pop(name)
        scales = fp8.VALUES[np.asarray(stored[name + "_scale"])] / whole
        stored |= {name + "_packed": codes, name + "_global_scale": whole}
        stem = name.removesuffix("weight")
        stored[stem + "input_global_scale"] = stored.pop(stem + "input_scale")
        meant[name] = values(codes, scales)
    return stored, meant


def mxfp4() -> tuple[Arrays, Arrays]:
    """Gates and ups of experts in MXFP4, whose blocks of 32 have powers of two for scales."""
    rng = np.random.default_rng(11)
    stored = dict(tiny.tensors(CONFIG, shardkit.SEED))
    meant = dict(stored)
    for name in [n for n in stored if is_expert(n) and "down" not in n]:
        rows, cols = stored[name].shape
        codes = packed(rng.integers(0, 16, (rows, cols), dtype=np.uint8))
        exponents = rng.integers(115, 123, (rows, cols // 32), dtype=np.uint8)
        stored |= {name: codes, name + "_scale": exponents}
        scales = (2.0 ** (exponents.astype(int) - 127)).astype(np.float32)
        meant[name] = values(codes, np.repeat(scales, 2, axis=1))
    return stored, meant


def integers(bits: int, group: int, asymmetric: bool, bf16: bool = True) -> tuple[Arrays, Arrays]:
    """Experts of integers as compressed-tensors packs them (pack-quantized), and the same as f32:
    (code - zero point) * scale. `group`: inputs that share a scale; 0 a row's, -1 the matrix's."""
    rng = np.random.default_rng(10)
    stored: Arrays = {}
    meant: Arrays = {}
    for name, weights in tiny.tensors(CONFIG, shardkit.SEED):
        if not is_expert(name):
            stored[name] = meant[name] = weights
            continue
        rows, cols = weights.shape
        grid = {0: (rows, 1), -1: (1, 1)}.get(group, (rows, cols // max(group, 1)))
        codes = rng.integers(0, 1 << bits, weights.shape)
        zeros = rng.integers(0, 1 << bits, grid) if asymmetric else np.full(grid, 1 << bits - 1)
        scales = (rng.uniform(1, 2, grid) * rng.choice([-0.01, 0.01], grid)).astype(np.float32)
        rounded = bf16_from_f32(scales)
        stored[name + "_packed"] = words(codes, bits)
        stored[name + "_scale"] = rounded if bf16 else scales
        stored[name + "_shape"] = np.array(weights.shape, np.int64)
        if asymmetric:
            stored[name + "_zero_point"] = np.ascontiguousarray(words(zeros.T, bits).T)
        spread = f32_from_bf16(rounded) if bf16 else scales
        each = rows // grid[0], cols // grid[1]
        spread, less = (np.repeat(np.repeat(a, each[0], 0), each[1], 1) for a in (spread, zeros))
        meant[name] = (codes - less).astype(np.float32) * spread
    return stored, meant


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, cols] in I32 words, the first in the lowest bits; a row begins a new one."""
    each = 32 // bits
    out = np.zeros((len(codes), -(-codes.shape[1] // each)), np.uint32)
    for at in range(codes.shape[1]):
        out[:, at // each] |= codes[:, at].astype(np.uint32) << np.uint32(at % each * bits)
    return out.view(np.int32)


def nvfp4(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Arrays:
    """Random codes and scales; some scales are zero, as those of empty blocks are."""
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (shape[0], shape[1] // 16), dtype=np.uint8)
    return {
        name: packed(codes),
        name + "_scale": scales.view(shardkit.Eight),
        name + "_scale_2": np.array(rng.uniform(1, 2) * 1e-4, np.float32),
    }


def values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What packed e2m1 codes and the scales of their blocks of 16 stand for."""
    spread = np.repeat(scales, 16, axis=1)
    out = np.empty(spread.shape, np.float32)
    out[:, ::2] = E2M1[codes & 15] * spread[:, ::2]
    out[:, 1::2] = E2M1[codes >> 4] * spread[:, 1::2]
    return out
