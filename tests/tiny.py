"""Tiny GLM-MoE-DSA checkpoints, drawn from a recipe instead of stored.

A fixture holds a seed and what transformers computed; the weights themselves come from here, on
the machine that loads them and on the machine that runs transformers alike. Only raw PCG64 bits
and exact integer sums are used, so every NumPy version draws the same weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

Shape = tuple[int, ...]

# Unequal head sizes catch slicing bugs; rope < index_head_dim catches partial-rope bugs; eight
# index heads keep exact ties of index scores away.
GROUPS = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 2,
    "intermediate_size": 192,
    "moe_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 8,
    "indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full", "shared"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "eos_token_id": [1, 2],
    "pad_token_id": 1,
}
ONE_GROUP = GROUPS | {"n_group": 1, "topk_group": 1}
RAGGED = GROUPS | {  # no width is a multiple of 64, most are no multiple of 16
    "vocab_size": 250,
    "hidden_size": 136,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "intermediate_size": 200,
    "moe_intermediate_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 72,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "n_routed_experts": 15,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
    "index_n_heads": 9,
    "index_head_dim": 20,
    "indexer_types": ["full", "shared", "full", "shared", "shared"],
}
ALL_FULL = {  # GLM-5 and 5.1 have neither key
    key: value
    for key, value in ONE_GROUP.items()
    if key not in ("indexer_types", "index_share_for_mtp_iteration")
} | {"num_hidden_layers": 5}

CASES = {"groups": GROUPS, "one_group": ONE_GROUP, "all_full": ALL_FULL, "ragged": RAGGED}


def indexer_types(config: dict) -> list[str]:
    """Indexer mode of every main layer; all full when the configuration is silent."""
    return config.get("indexer_types") or ["full"] * config["num_hidden_layers"]


def mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    """The three matrices of a SwiGLU."""
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def attention_shapes(config: dict, full: bool) -> dict[str, Shape]:
    """Attention tensors of one layer, without the layer's prefix."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_lora, kv_lora = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, v = (config[f"{k}_head_dim"] for k in ("qk_nope", "qk_rope", "v"))
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    shapes: dict[str, Shape] = {
        "self_attn.q_a_proj.weight": (q_lora, hidden),
        "self_attn.q_a_layernorm.weight": (q_lora,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q_lora),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_lora + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_lora,),
        "self_attn.kv_b_proj.weight": (heads * (nope + v), kv_lora),
        "self_attn.o_proj.weight": (hidden, heads * v),
    }
    if full:
        shapes |= {
            "self_attn.indexer.wq_b.weight": (index_heads * index_dim, q_lora),
            "self_attn.indexer.wk.weight": (index_dim, hidden),
            "self_attn.indexer.k_norm.weight": (index_dim,),
            "self_attn.indexer.k_norm.bias": (index_dim,),
            "self_attn.indexer.weights_proj.weight": (index_heads, hidden),
        }
    return shapes


def layer_shapes(config: dict, full: bool, sparse: bool) -> dict[str, Shape]:
    """All tensors of one decoder layer, without the layer's prefix."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    } | attention_shapes(config, full)
    if not sparse:
        return shapes | mlp_shapes("mlp", hidden, config["intermediate_size"])
    experts = config["n_routed_experts"]
    shapes["mlp.gate.weight"] = (experts, hidden)
    shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    shapes |= mlp_shapes("mlp.shared_experts", hidden, inner * config["n_shared_experts"])
    for expert in range(experts):
        shapes |= mlp_shapes(f"mlp.experts.{expert}", hidden, inner)
    return shapes


def shapes(config: dict) -> dict[str, Shape]:
    """Every tensor of the checkpoint, the MTP layer included, with the published names."""
    vocab, hidden, layers = (config[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers"))
    result: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer, kind in enumerate([*indexer_types(config), "full"]):
        sparse = layer >= config["first_k_dense_replace"]
        for name, shape in layer_shapes(config, kind == "full", sparse).items():
            result[f"model.layers.{layer}.{name}"] = shape
    return result | {
        f"model.layers.{layers}.enorm.weight": (hidden,),
        f"model.layers.{layers}.hnorm.weight": (hidden,),
        f"model.layers.{layers}.eh_proj.weight": (hidden, 2 * hidden),
        f"model.layers.{layers}.shared_head.norm.weight": (hidden,),
    }


def bell(seed: int, name: str, shape: Shape) -> np.ndarray:
    """Near-normal float64 numbers of mean 0 and deviation 1: sums of four 16-bit uniforms."""
    raw = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(math.prod(shape))
    total = sum(((raw >> np.uint64(16 * k)) & np.uint64(0xFFFF)).astype(np.int64) for k in range(4))
    return ((total - 2 * 0xFFFF) / math.sqrt(4 * (2**32 - 1) / 12)).reshape(shape)


@cache
def tensor(seed: int, name: str, shape: Shape) -> np.ndarray:
    """One float32 weight. The default initialisation of the architecture (unit norms, no biases,
    deviation 0.02) would hide most bugs, so nothing here is neutral."""
    noise = bell(seed, name, shape)
    if name.endswith(("norm.weight", "layernorm.weight")):
        value = 1 + 0.2 * noise
    elif name.endswith("k_norm.bias"):
        value = 0.2 * noise
    elif name.endswith("e_score_correction_bias"):
        value = 0.1 * noise
    elif name.endswith("embed_tokens.weight"):
        value = noise
    else:
        value = noise / math.sqrt(shape[-1])
    return value.astype(np.float32)


def tensors(config: dict, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every weight of the checkpoint, in file order; the caller's own, to change."""
    for name, shape in shapes(config).items():
        yield name, tensor(seed, name, shape).copy()


def prompt(config: dict, seed: int, length: int) -> np.ndarray:
    """Token ids [length], uniform over the vocabulary."""
    raw = np.random.PCG64([seed, zlib.crc32(b"prompt")]).random_raw(length)
    return (raw % np.uint64(config["vocab_size"])).astype(np.int32)


def write_safetensors(path: Path, named: Iterator[tuple[str, np.ndarray]]) -> None:
    """Writes float32 and uint8 arrays as one safetensors file."""
    arrays = {name: np.ascontiguousarray(array) for name, array in named}
    header, offset = {}, 0
    for name, array in arrays.items():
        dtype = {"float32": "F32", "uint8": "U8"}[array.dtype.name]
        place = [offset, offset + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": place}
        offset += array.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())


def write(directory: Path, config: dict, seed: int) -> str:
    """Writes config.json and model.safetensors; returns the SHA-256 of the latter."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    path = directory / "model.safetensors"
    write_safetensors(path, tensors(config, seed))
    return hashlib.sha256(path.read_bytes()).hexdigest()
