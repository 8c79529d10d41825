"""The core's encoder: rows of a checkpoint to codes and scales, in the bits of quantize.py."""

from typing import Any, NamedTuple

import numpy as np

from colibri._core import ffi, lib
from colibri.errors import ContainerError
from colibri.formats import Format

F8 = "F8_E4M3"
F4 = "F4_E2M1"  # two a byte, the first in the low half
FLOAT_DTYPES = ("F32", "BF16", "F16")
_BITS = {"F32": 32, "BF16": 16, "F16": 16, F8: 8, F4: 4}
_DTYPES = {
    "F32": lib.CLB_SOURCE_F32,
    "BF16": lib.CLB_SOURCE_BF16,
    "F16": lib.CLB_SOURCE_F16,
    F8: lib.CLB_SOURCE_F8,
    F4: lib.CLB_SOURCE_F4,
}


def source_row_bytes(dtype: str, cols: int) -> int:
    """Bytes of one row of a checkpoint's matrix."""
    return -(-cols * _BITS[dtype] // 8)


class Rows(NamedTuple):
    """Rows [rows, cols] of a matrix as a checkpoint stores them, one after the other in `data`.

    For F8 and F4 a value is its code times the scale of its block: `scales` f32 [block rows, block
    columns], blocks of `block` (rows, columns) counted from the first row that has one, and
    `first_row` the row of those which comes first here.
    """

    dtype: str
    rows: int
    cols: int
    data: Any  # a buffer, any alignment
    scales: np.ndarray | None = None
    block: tuple[int, int] = (1, 1)
    first_row: int = 0


def encode_rows(
    source: Rows, form: Format, search: bool, codes: Any, scales: Any, isa: str | None = None
) -> None:
    """Fill `codes` and `scales` (writable buffers of exactly the format's bytes; floats have no
    scales). One thread, without the interpreter's lock.

    ContainerError says which row is not finite, or that the format cannot hold the weights.
    """
    row_bytes = source_row_bytes(source.dtype, source.cols)
    given = memoryview(source.data).nbytes, memoryview(codes).nbytes, memoryview(scales).nbytes
    needed = (
        source.rows * row_bytes,
        source.rows * form.row_bytes(source.cols),
        source.rows * form.row_scales(source.cols) * form.scale_bytes,
    )
    if given != needed:
        raise ValueError(f"buffers of {given} bytes where {needed} are needed")
    block_scales = np.ascontiguousarray(
        source.scales if source.scales is not None else np.empty((0, 0)), np.float32
    )
    rows = ffi.new(
        "clb_source *",
        {
            "dtype": _DTYPES[source.dtype],
            "rows": source.rows,
            "cols": source.cols,
            "row_bytes": row_bytes,
            "data": ffi.from_buffer("uint8_t[]", source.data),
            "scales": ffi.from_buffer("float[]", block_scales),
            "scale_rows": block_scales.shape[0],
            "scale_cols": block_scales.shape[1],
            "block_rows": source.block[0],
            "block_cols": source.block[1],
            "first_row": source.first_row,
        },
    )
    shape = ffi.new("clb_tensor *")
    shape.format, shape.scale_format = int(form.kind), int(form.scale)
    shape.rows, shape.cols, shape.group = source.rows, source.cols, form.group
    error = ffi.new("clb_error *")
    code = lib.clb_encode(
        isa.encode() if isa else ffi.NULL, rows, shape, search,
        ffi.from_buffer("uint8_t[]", codes, require_writable=True),
        ffi.from_buffer("uint8_t[]", scales, require_writable=True), error,
    )  # fmt: skip
    if code:
        raise ContainerError(ffi.string(error.text).decode("utf-8", "replace"))
