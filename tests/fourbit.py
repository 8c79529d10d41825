"""Tiny 4-bit checkpoints as other tools write them, and the weights they stand for."""

from __future__ import annotations

import fp8
import numpy as np
import shardkit
import tiny

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
