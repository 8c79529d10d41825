"""Write a checkpoint's twin whose MTP layer computes the same but is as hard to quantise as GLM's.

usage: skew_head.py SOURCE TARGET
In GLM's eh_proj the columns of the embedding half are 20 to 30 times smaller than those of the
hidden half, so a scale per row leaves them few of int8's steps and none of int4's. Here they are
divided by 32 and enorm is multiplied by 32: powers of two, so BF16 values stay exact.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

FACTOR = np.float32(32)


def main() -> int:
    """Copy the directory, change two tensors of its one shard."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(Path, sys.argv[1:])
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    target.chmod(0o755)
    config = json.loads((target / "config.json").read_text())
    layer, hidden = config["num_hidden_layers"], config["hidden_size"]
    data = np.memmap(target / "model.safetensors", np.uint8, "r+")
    size = int(data[:8].view("<u8")[0])
    header, body = json.loads(bytes(data[8 : 8 + size])), data[8 + size :]

    def words(name: str) -> np.ndarray:
        entry = header[f"model.layers.{layer}.{name}.weight"]
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{name} is {entry['dtype']}; a BF16 checkpoint is needed")
        begin, end = entry["data_offsets"]
        return body[begin:end].view("<u2").reshape(entry["shape"])

    def scale(values: np.ndarray, factor: np.float32) -> None:
        floats = (values.astype(np.uint32) << 16).view(np.float32) * factor
        values[...] = (floats.view(np.uint32) >> 16).astype(np.uint16)

    scale(words("enorm"), FACTOR)
    scale(words("eh_proj")[:, :hidden], 1 / FACTOR)
    data.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
