"""A container's matrices for the NumPy reference, unpacked here from their documented bytes and not
by colibri's own decoders, so that the two can disagree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from reference import Matrix, Quantised

from colibri.container import Container
from colibri.formats import Kind, MatrixRef

FLOAT_TYPES = {Kind.F32: "<f4", Kind.F16: "<f2", Kind.BF16: "<u2"}


def read(container: Container, shard: int, offset: int, count: int, dtype: str) -> np.ndarray:
    """`count` numbers at a byte offset of a shard."""
    return np.fromfile(container.shards[shard].path, dtype, count, offset=offset)


def bits(payload: np.ndarray, width: int) -> np.ndarray:
    """Bytes [..., n] as little-endian `width`-bit numbers [..., 8 n / width]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return (payload[..., None] >> shifts & (2**width - 1)).reshape(*payload.shape[:-1], -1)


def codes(payload: np.ndarray, kind: Kind) -> np.ndarray:
    """Payload [O, bytes] as integers [O, I or a little more]."""
    if kind == Kind.INT8:
        return payload.view(np.int8).astype(np.int64)
    if kind in (Kind.INT4, Kind.INT2):
        width = 4 if kind == Kind.INT4 else 2
        return bits(payload, width).astype(np.int64) - 2 ** (width - 1)
    blocks = payload.reshape(len(payload), -1, 24)  # int3: a plane of low pairs, one of high bits
    stored = bits(blocks[:, :, :16], 2).astype(np.int64) + 4 * bits(blocks[:, :, 16:], 1)
    return (stored - 4).reshape(len(payload), -1)


def row_bytes(kind: Kind, cols: int) -> int:
    """Payload bytes of a row of a quantised matrix."""
    if kind == Kind.INT3:
        return -(-cols // 64) * 24
    return -(-cols // {Kind.INT8: 1, Kind.INT4: 2, Kind.INT2: 4}[kind])


def matrix(container: Container, ref: MatrixRef) -> Matrix:
    """One stored matrix [O, I], a vector being one row."""
    kind, rows, cols = Kind(ref.format), ref.rows, ref.cols
    if kind in FLOAT_TYPES:
        flat = read(container, ref.shard, ref.offset, rows * cols, FLOAT_TYPES[kind])
        if kind == Kind.BF16:
            flat = (flat.astype(np.uint32) << 16).view(np.float32)
        return flat.astype(np.float32).reshape(rows, cols)
    width = row_bytes(kind, cols)
    payload = read(container, ref.shard, ref.offset, rows * width, "u1").reshape(rows, width)
    group = ref.group or cols
    count = rows * -(-cols // group)
    dtype = FLOAT_TYPES[Kind(ref.scale_format)]
    scales = read(container, ref.scale_shard, ref.scale_offset, count, dtype).reshape(rows, -1)
    return Quantised(codes(payload, kind)[:, :cols], scales, group, even_odd=kind == Kind.INT4)


def getter(container: Container) -> Callable[[str], Matrix]:
    """Weights by name, vectors as vectors."""
    vectors = {entry.name for entry in container.entries if len(entry.shape) == 1}

    def get(name: str) -> Matrix:
        found = matrix(container, container.matrix(name))
        return found[0] if name in vectors else found

    return get
