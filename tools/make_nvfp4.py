"""Write a checkpoint's twin whose experts are NVFP4, as NVIDIA's Model Optimizer rounds them.

usage: make_nvfp4.py SOURCE TARGET
A matrix has the scale amax / (6 * 448), a block of 16 the one that its own amax / 6 needs, rounded
to e4m3; weights are rounded to e2m1; both half to even. Shared experts and the MTP layer stay as
they are. SOURCE has one shard, its experts one by one in BF16.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np

from colibri.quantize import E2M1, f32_from_bf16, f32_from_e4m3
from colibri.shard import read_shard

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.\w+\.weight")
_POSITIVE_E4M3 = f32_from_e4m3(np.arange(127, dtype=np.uint8))
_BLOCK = 16


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Indices into an ascending table, of a midpoint the even one."""
    middles = (table[1:] + table[:-1]) / 2
    below, above = (np.searchsorted(middles, values, side=side) for side in ("left", "right"))
    return np.where(below % 2, above, below).astype(np.uint8)


def nvfp4(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes [rows, cols / 2], e4m3 scales [rows, cols / 16] and the matrix's scale."""
    whole = np.abs(weights).max() / np.float32(6 * 448)
    blocks = weights.reshape(len(weights), -1, _BLOCK)
    wanted = np.abs(blocks).max(axis=2) / (np.float32(6) * whole)
    wanted[wanted == 0] = 1
    scales = nearest(np.maximum(wanted, np.float32(2.0**-9)), _POSITIVE_E4M3)
    scaled = blocks / (f32_from_e4m3(scales) * whole)[:, :, None]
    codes = nearest(np.abs(scaled), E2M1[:8]) | np.where(scaled < 0, 8, 0).astype(np.uint8)
    codes = codes.reshape(weights.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, whole


def main() -> int:
    """Copy the directory's small files and write its shard again."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(Path, sys.argv[1:])
    (path,) = source.glob("*.safetensors")
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file != path:
            shutil.copyfile(file, target / file.name)
    last = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    data = np.memmap(path, np.uint8, "r")
    tensors: list[tuple[str, str, list[int], bytes]] = []
    for tensor in read_shard(path).tensors:
        raw = data[tensor.offset : tensor.offset + tensor.nbytes]
        found = _EXPERT.fullmatch(tensor.name)
        if not found or int(found[1]) >= last:
            tensors.append((tensor.name, tensor.dtype, list(tensor.shape), raw.tobytes()))
            continue
        if tensor.dtype != "BF16":
            raise SystemExit(f"{tensor.name} is {tensor.dtype}; a BF16 checkpoint is needed")
        parts = nvfp4(f32_from_bf16(raw.view("<u2")).reshape(tensor.shape))
        for suffix, dtype, part in zip(
            ("", "_scale", "_scale_2"), ("U8", "F8_E4M3", "F32"), parts, strict=True
        ):
            tensors.append((tensor.name + suffix, dtype, list(part.shape), part.tobytes()))
    write(target / path.name, tensors)
    return 0


def write(path: Path, tensors: list[tuple[str, str, list[int], bytes]]) -> None:
    """A safetensors file."""
    header, at = {}, 0
    for name, dtype, shape, raw in tensors:
        place = [at, at + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}
        at += len(raw)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(raw for *_, raw in tensors)


if __name__ == "__main__":
    sys.exit(main())
