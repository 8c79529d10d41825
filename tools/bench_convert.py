"""How fast a checkpoint of GLM-5.2's shapes converts: source GB/s from the page cache, peak memory.

python tools/bench_convert.py DIRECTORY [--source fp8|bf16] [--experts N] [--threads 1,2]

Makes a checkpoint of one dense and one sparse layer with N experts (random weights, real shapes) in
DIRECTORY, unless it is there, and converts it there in every setting, interleaved. Each conversion
runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from colibri.config import ModelConfig
from colibri.convert import Formats, convert_directory
from colibri.formats import Format
from colibri.inventory import (
    PROJECTIONS,
    expert_name,
    expert_shape,
    global_entries,
    indexer_entries,
    layer_entries,
)

SHAPE = {
    "model_type": "glm_moe_dsa", "vocab_size": 4096, "hidden_size": 6144,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "num_nextn_predict_layers": 0, "eos_token_id": [1], "indexer_types": ["full", "full"],
}  # fmt: skip
GB = 1e9
BOUND = 1 << 30  # bytes of memory beside the largest tensor


def make_checkpoint(directory: Path, experts: int, fp8: bool) -> None:
    """Write config.json and one shard."""
    directory.mkdir(parents=True)
    shape = SHAPE | {"n_routed_experts": experts}
    config = ModelConfig.parse(shape)
    entries = global_entries(config)
    for layer in range(2):
        entries += layer_entries(config, layer) + indexer_entries(config, layer)
    tensors = {e.name: (e.shape, fp8 and not e.keep and e.layer >= 0) for e in entries}
    tensors |= {
        expert_name(1, e, p): (expert_shape(config, p), fp8)
        for e in range(experts)
        for p in PROJECTIONS
    }
    rng = np.random.default_rng(1)
    pool = {
        True: _e4m3_pool(rng),
        False: (rng.standard_normal(1 << 24, np.float32).view(np.uint32) >> 16).astype(np.uint16),
    }
    header, parts, at = {}, [], 0
    for name, (dims, eight) in tensors.items():
        count = int(np.prod(dims))
        data = np.resize(pool[eight][rng.integers(0, 1 << 20) :], count)
        rows = [(name, "F8_E4M3" if eight else "BF16", list(dims), data)]
        if eight:
            grid = [-(-side // 128) for side in dims]
            scales = np.full(grid, 2e-4, np.float32)
            rows.append((name + "_scale_inv", "F32", grid, scales))
        for label, dtype, form, array in rows:
            span = [at, at + array.nbytes]
            header[label] = {"dtype": dtype, "shape": form, "data_offsets": span}
            parts.append(array)
            at += array.nbytes
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in parts:
            file.write(memoryview(array).cast("B"))
    (directory / "config.json").write_text(json.dumps(shape))


def _e4m3_pool(rng: np.random.Generator) -> np.ndarray:
    """Codes of normal numbers whose largest is near 448."""
    values = np.abs(rng.standard_normal(1 << 24, np.float32)) * 90
    bits = values.view(np.uint32)
    codes = np.clip((bits >> 20).astype(np.int64) - (120 << 3), 0, 0x7E).astype(np.uint8)
    return codes | (rng.integers(0, 2, len(codes), dtype=np.uint8) << 7)


def convert_once(directory: Path, threads: int, search: bool, experts: str) -> None:
    """One conversion, in this process: prints seconds and peak bytes."""
    target = directory.with_name("converted")
    shutil.rmtree(target, ignore_errors=True)
    begun = time.perf_counter()
    formats = Formats(experts=Format.parse(experts))
    convert_directory(directory, target, formats, search, threads=threads)
    seconds = time.perf_counter() - begun
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
    print(json.dumps({"seconds": seconds, "peak": peak}))
    shutil.rmtree(target)


def measure(directory: Path, threads: list[int], rounds: int, experts: str) -> None:
    """All settings, interleaved; prints a line for each."""
    path = directory / "model.safetensors"
    size = path.stat().st_size
    settings = [(t, search) for t in threads for search in (True, False)]
    found: dict[tuple[int, bool], list[dict[str, float]]] = {s: [] for s in settings}
    for _ in range(rounds):
        for count, search in settings:
            with path.open("rb") as file:  # into the page cache
                while file.read(1 << 24):
                    pass
            command = [sys.executable, __file__, str(directory), "--once", str(count)]
            command += [] if search else ["--absmax"]
            out = subprocess.run([*command, "--to", experts], capture_output=True, check=True)
            found[count, search].append(json.loads(out.stdout))
    largest = SHAPE["num_attention_heads"] * SHAPE["v_head_dim"] * SHAPE["hidden_size"] * 2
    for (count, search), runs in found.items():
        rates = [size / GB / run["seconds"] for run in runs]
        peak = max(run["peak"] for run in runs)
        print(
            f"{experts} {'search' if search else 'absmax'}, {count} threads: "
            f"{statistics.median(rates):.2f} GB/s of source (best {max(rates):.2f}, "
            f"worst {min(rates):.2f}); peak {peak / GB:.2f} GB "
            f"(bound {(largest + BOUND) / GB:.2f} GB)"
        )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--source", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--to", default="int4-g64", help="format of the experts")
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--absmax", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        convert_once(args.directory, args.once, not args.absmax, args.to)
        return 0
    source = args.directory / f"{args.source}-{args.experts}"
    if not source.exists():
        make_checkpoint(source, args.experts, args.source == "fp8")
    print(f"{source}: {(source / 'model.safetensors').stat().st_size / GB:.2f} GB")
    measure(source, [int(t) for t in args.threads.split(",")], args.rounds, args.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
