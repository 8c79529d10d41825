"""Tiny FP8 checkpoints (e4m3 with scales), and the weights they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import shardkit
import tiny

# No side of these is a multiple of 128, and heads begin in the middle of blocks.
CONFIG = shardkit.SMALL | {
    "hidden_size": 160,
    "intermediate_size": 136,
    "moe_intermediate_size": 144,
    "q_lora_rank": 72,
    "kv_lora_rank": 136,
    "num_hidden_layers": 2,
    "indexer_types": ["full", "full"],
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
}
# Matrices that the published checkpoints leave in BF16.
_WIDE = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "weights_proj.weight",
         "eh_proj.weight")  # fmt: skip
BLOCK = 128


def e4m3(code: int) -> float:
    """The value of an FP8 code by its definition."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


VALUES = np.array([e4m3(code) for code in range(256)], np.float32)


def checkpoint(
    way: str = "block", scale_type: Any = np.float32, config: dict[str, Any] = CONFIG
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tensors of an FP8 checkpoint, and the same as f32.

    `way`: scales for each block of 128 x 128, for each row, or one number for a matrix. A value
    is its code's times its scale, one f32 product.
    """
    rng = np.random.default_rng(7)
    stored: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    for name, weights in tiny.tensors(config, shardkit.SEED):
        stored[name] = meant[name] = weights
        if weights.ndim != 2 or name.endswith(_WIDE):
            continue
        codes = rng.integers(0, 256, weights.shape, dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 5
        block = {"block": (BLOCK, BLOCK), "row": (1, weights.shape[1]), "one": weights.shape}[way]
        grid = tuple(-(-side // b) for side, b in zip(weights.shape, block, strict=True))
        scales = (rng.uniform(0.5, 2, grid) * 1e-4).astype(scale_type)
        spread = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)
        spread = spread[: weights.shape[0], : weights.shape[1]].astype(np.float32)
        stored[name] = codes.view(shardkit.Eight)
        stored[name + "_scale_inv"] = scales.reshape(() if way == "one" else grid)
        meant[name] = VALUES[codes] * spread
    return stored, meant


def fused(config: dict[str, Any] = CONFIG) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """As `checkpoint`, with the experts of each layer in one tensor: gate rows first, and blocks
    counted from gate's first row, so that one spans the end of gate and the beginning of up."""
    stored, meant = checkpoint(config=config)
    rng = np.random.default_rng(8)
    out = {name: array for name, array in stored.items() if ".mlp.experts." not in name}
    inner, hidden = config["moe_intermediate_size"], config["hidden_size"]
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"] + 1):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, (rows, cols) in shapes.items():
            shape = (config["n_routed_experts"], rows, cols)
            codes = rng.integers(0, 0x7F, shape, dtype=np.uint8)
            grid = (shape[0], -(-rows // BLOCK), -(-cols // BLOCK))
            scales = (rng.uniform(0.5, 2, grid) * 1e-4).astype(np.float32)
            out[prefix + name] = codes.view(shardkit.Eight)
            out[f"{prefix}{name}_scale_inv"] = scales
            spread = np.repeat(np.repeat(scales, BLOCK, 1), BLOCK, 2)[:, :rows, :cols]
            values = VALUES[codes] * spread
            for expert in range(shape[0]):
                if name == "down_proj":
                    meant[f"{prefix}{expert}.down_proj.weight"] = values[expert]
                else:
                    meant[f"{prefix}{expert}.gate_proj.weight"] = values[expert, :inner]
                    meant[f"{prefix}{expert}.up_proj.weight"] = values[expert, inner:]
    return out, meant
