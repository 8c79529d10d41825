"""Writes a model to measure: random weights of a real shape, in colibri's own container.

python tools/make_bench_model.py DIR [--shape glm-bench-8g] [--experts int4-g64] [--dense int4-g64]
python tools/make_bench_model.py DIR --shape glm-5.2 --hollow

Codes are drawn as they are stored, so nothing is quantised and no more than one record or one
matrix is in memory. The same arguments give the same bytes. There is no tokenizer: `colibri bench`
feeds token ids. Such weights measure bytes and seconds; they say nothing about text, about how
many drafts are accepted, or about which experts a real text asks for. Hollow, all experts are
zeros that take no room on the disk: GLM-5.2's full size, memory and computing in 10 GB of file.
"""

import argparse
import json
import math
import shutil
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from colibri.amounts import file_size
from colibri.checkpoint import INDEX
from colibri.config import ModelConfig
from colibri.errors import ColibriError, UsageError
from colibri.formats import Format, Kind
from colibri.inventory import Entry, expert_shape, has_own_indexer, layers, records_name
from colibri.layout import Formats, RecordLayout, ShardPlan, plan_shards, record_layout
from colibri.shapes import PUBLISHED
from colibri.writer import ShardWriter, write_file

GLM_BENCH_8G: dict[str, Any] = {  # GLM-5.2's layout, narrower and shallower
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "first_k_dense_replace": 3,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_types": ["full" if i in (0, 1, 2, 6, 10, 14, 18, 22) else "shared" for i in range(24)],
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000.0},
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "eos_token_id": [0],
    "pad_token_id": 0,
}
GLM_BENCH_19M = GLM_BENCH_8G | {  # GLM-5.2's own widths: records of 19 MB, three layers of them
    "hidden_size": 6144,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "n_routed_experts": 64,
    "index_n_heads": 32,
    "indexer_types": ["full", "full", "full", "shared"],
    "num_nextn_predict_layers": 0,
}
SHAPES = {
    "glm-bench-8g": GLM_BENCH_8G, "glm-bench-19m": GLM_BENCH_19M, "glm-5.2": PUBLISHED["glm-5.2"],
}  # fmt: skip

# Deviation of codes drawn as the sum of two uniform numbers: 0..7 twice, 0..127 twice.
_DEVIATION = {Kind.INT4: math.sqrt((8**2 - 1) / 6), Kind.INT8: math.sqrt((128**2 - 1) / 6)}
# Deviation of a matrix times sqrt(cols). What writes to the residual stream is weaker, so that 24
# layers stay near the embedding's size; the head spreads logits as a trained one would.
_GAIN = {"o": 0.5, "down": 0.5, "head": 3.0}
_SPREAD = np.linspace(0.75, 1.25, 256, dtype=np.float32)  # scales differ, as real ones do

Progress = Callable[[str, int, int], None]  # file, bytes done, bytes in all


# ---- numbers ----------------------------------------------------------------------------------


def raw_bits(seed: int, name: str, piece: int, count: int) -> np.ndarray:
    """`count` random 64-bit words that belong to one piece of one tensor."""
    return np.random.PCG64([seed, zlib.crc32(name.encode()), piece]).random_raw(count)


def draw_codes(bits: np.ndarray, kind: Kind) -> np.ndarray:
    """Bytes of bell-shaped codes of mean zero, uint8 [4 * len(bits)]: each takes two draws."""
    low, high = bits[0::2], bits[1::2]
    if kind == Kind.INT4:  # nibbles 1..15: codes -7..7
        mask, one = np.uint64(0x7777777777777777), np.uint64(0x1111111111111111)
        return ((low & mask) + (high & mask) + one).view(np.uint8)
    mask = np.uint64(0x7F7F7F7F7F7F7F7F)
    return ((low & mask) + (high & mask)).view(np.uint8) - np.uint8(127)


def draw_matrix(
    seed: int, name: str, piece: int, shape: tuple[int, int], form: Format, gain: float
) -> tuple[np.ndarray, np.ndarray]:
    """Payload uint8 [rows, row_bytes] and scales [rows, row_scales] of a random matrix."""
    rows, cols = shape
    if form.kind not in _DEVIATION:
        raise UsageError(f"{form} is not written here; use int4 or int8, with or without groups")
    size, count = rows * form.row_bytes(cols), rows * form.row_scales(cols)
    words = 2 * -(-size // 8)
    bits = raw_bits(seed, name, piece, words + -(-count // 8))
    payload = draw_codes(bits[:words], form.kind)[:size]
    base = np.float32(gain / (math.sqrt(cols) * _DEVIATION[form.kind]))
    spread = (_SPREAD * base).astype(np.float16 if form.scale == Kind.F16 else np.float32)
    scales = spread[bits[words:].view(np.uint8)[:count]]
    return payload.reshape(rows, -1), scales.reshape(rows, -1)


def draw_floats(seed: int, entry: Entry) -> np.ndarray:
    """f32 values of a tensor that stays in f32: norms near 1, small biases, unit-gain matrices."""
    bits = raw_bits(seed, entry.name, 0, math.prod(entry.shape)).reshape(entry.shape)
    total = sum(
        ((bits >> np.uint64(16 * k)) & np.uint64(0xFFFF)).astype(np.int64) for k in range(4)
    )
    noise = (total - 2 * 0xFFFF) / math.sqrt((2**32 - 1) / 3)
    if len(entry.shape) == 2:
        return (noise / math.sqrt(entry.shape[1])).astype(np.float32)
    centre = 1.0 if entry.part == "norms" or entry.role == "index_k_norm" else 0.0
    width = 0.01 if entry.role == "router_bias" else 0.1
    return (centre + width * noise).astype(np.float32)


# ---- files --------------------------------------------------------------------------------------


def make_model(
    target: Path,
    shape: dict[str, Any],
    formats: Formats,
    seed: int = 1,
    progress: Progress | None = None,
    hollow: bool = False,
) -> int:
    """Write a container of `shape` (config.json fields) to `target`; returns its weights' bytes.

    UsageError when the directory already holds shards or the disk has too little room.
    """
    config = ModelConfig.parse(shape)
    has_mtp = config.mtp_layer is not None
    owners = [n for n in layers(config, has_mtp) if has_own_indexer(config, n)]
    shards = plan_shards(config, formats, has_mtp, owners)
    total, done = sum(shard.nbytes for shard in shards), 0
    records = {records_name(layer) for shard in shards for layer in shard.expert_layers}
    specs = [spec for shard in shards for spec in shard.specs]
    _prepare(target, sum(s.nbytes for s in specs if not (hollow and s.name in records)))
    for shard in shards:
        _write_shard(target, shard, config, formats, seed, hollow)
        done += shard.nbytes
        if progress:
            progress(shard.name, done, total)
    weights = {spec.name: shard.name for shard in shards for spec in shard.specs}
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    write_file(target / INDEX, json.dumps(index, indent=0).encode())
    write_file(target / "config.json", json.dumps(shape, indent=1).encode())
    return total


def _prepare(target: Path, total: int) -> None:
    target.mkdir(parents=True, exist_ok=True)
    held = sorted(target.glob("*.safetensors"))
    if held:
        raise UsageError(f"{target}: already holds {held[0].name}; give another directory")
    free = shutil.disk_usage(target).free
    if free < total:
        raise UsageError(f"{target}: {file_size(total)} are needed, {file_size(free)} are free")


def _write_shard(
    target: Path, shard: ShardPlan, config: ModelConfig, formats: Formats, seed: int, hollow: bool
) -> None:
    with ShardWriter(target / shard.name, shard.specs, shard.metadata) as writer:
        for layer in shard.expert_layers:
            layout = record_layout(config, formats.of_experts(layer, config))
            name = records_name(layer)
            if hollow:
                writer.leave_zero(name)
                continue
            for expert in range(config.n_routed_experts):
                writer.write(name, draw_record(seed, name, expert, config, layout), expert)
        for entry in shard.entries:
            _write_entry(writer, entry, formats.of(entry, config), seed)


def draw_record(
    seed: int, name: str, expert: int, config: ModelConfig, layout: RecordLayout
) -> np.ndarray:
    """One expert's record, uint8 [record bytes]."""
    record = np.zeros(layout.nbytes, np.uint8)
    for number, (projection, places) in enumerate(layout.offsets.items()):
        shape, gain = expert_shape(config, projection), _GAIN.get(projection, 1.0)
        parts = draw_matrix(seed, name, 3 * expert + number, shape, layout.form, gain)
        for part, at in zip(parts, places, strict=True):
            record[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)
    return record


def _write_entry(writer: ShardWriter, entry: Entry, form: Format, seed: int) -> None:
    if form.kind == Kind.F32:
        writer.write(entry.name, draw_floats(seed, entry))
        return
    rows, cols = entry.shape
    gain = math.sqrt(cols) if entry.role == "embed" else _GAIN.get(entry.role, 1.0)
    payload, scales = draw_matrix(seed, entry.name, 0, (rows, cols), form, gain)
    writer.write(entry.name, payload)
    writer.write(entry.name + ".scales", scales)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path, help="directory to write")
    parser.add_argument(
        "--shape", choices=SHAPES, default="glm-bench-8g",
        help="glm-bench-8g (default): 24 layers, 10 GB; glm-bench-19m: three sparse layers with "
        "experts of 20 MB, as GLM-5.2 has them, 4.6 GB; glm-5.2: all of it, 405 GB",
    )  # fmt: skip
    parser.add_argument("--experts", default="int4-g64", help="int4-g64 (default), int4-row, int8")
    parser.add_argument("--dense", default="int4-g64", help="everything else (default int4-g64)")
    parser.add_argument("--mtp", default="int8", help="the MTP layer (default int8)")
    parser.add_argument("--hollow", action="store_true", help="experts are zeros, as holes")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    start = time.monotonic()

    def show(name: str, done: int, total: int) -> None:
        rate = done / (time.monotonic() - start)
        print(f"{name}: {file_size(done)} of {file_size(total)}, {file_size(rate)}/s", flush=True)

    def parse(text: str) -> Format:
        return Format.parse(text.removesuffix("-row"))

    try:
        dense = parse(args.dense)
        formats = Formats(parse(args.experts), dense, parse(args.mtp), dense)
        make_model(args.target, SHAPES[args.shape], formats, args.seed, show, args.hollow)
    except (ColibriError, OSError) as why:
        print(f"make_bench_model: error: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
