"""Model directories for tests of files: a small checkpoint, rewritten shard by shard as asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tiny

SMALL = tiny.GROUPS | {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 2,
    "index_n_heads": 2,
    "indexer_types": ["full", "shared", "full"],
}
SEED = 5
_DTYPES = {"f4": "F32", "f2": "F16", "u2": "BF16", "u1": "U8", "i1": "I8", "f8": "F64",
           "i4": "I32", "i8": "I64"}  # fmt: skip


def weights(config: dict[str, Any] = SMALL) -> dict[str, np.ndarray]:
    """Every tensor of the small checkpoint, float32."""
    return dict(tiny.tensors(config, SEED))


def store(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """A safetensors file of exactly this header and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def load(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


class Eight(np.ndarray):
    """Bytes that are FP8 numbers: view a uint8 array as this."""


def write(path: Path, arrays: dict[str, np.ndarray], metadata: dict | None = None) -> None:
    """A safetensors file of arrays; uint16 stands for BF16, Eight for F8_E4M3."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, array in arrays.items():
        eight = isinstance(array, Eight)
        header[name] = {
            "dtype": "F8_E4M3" if eight else _DTYPES[array.dtype.str[1:]],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    store(path, header, b"".join(array.tobytes() for array in arrays.values()))


def directory(
    path: Path,
    files: dict[str, dict[str, np.ndarray]] | None = None,
    config: dict[str, Any] = SMALL,
) -> Path:
    """A model directory with config.json and these shards (default: one plain f32 file)."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, arrays in (files or {"model.safetensors": weights(config)}).items():
        write(path / name, arrays)
    return path


def split(arrays: dict[str, np.ndarray], names: Iterable[str]) -> dict[str, dict[str, np.ndarray]]:
    """Spread tensors over files in equal runs, in order."""
    files = list(names)
    keys, count = list(arrays), len(files)
    cuts = [len(keys) * k // count for k in range(count + 1)]
    return {
        file: {key: arrays[key] for key in keys[cuts[k] : cuts[k + 1]]}
        for k, file in enumerate(files)
    }


def edit(path: Path, change: Callable[[dict[str, Any]], Any], align: bool = True) -> None:
    """Rewrite a shard with its header changed; the data stays, aligned to 4096 if it was."""
    begin = path.stat().st_size
    header, data = load(path)
    begin -= len(data)
    change(header)
    text = json.dumps(header).encode()
    if align and begin % 4096 == 0:
        text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    store(path, text, data)
