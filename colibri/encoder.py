"""The core's encoder: rows of a checkpoint to codes and scales, in the bits of quantize.py."""

from typing import Any, NamedTuple

import numpy as np

from colibri._core import ffi, lib
from colibri.errors import ContainerError
from colibri.formats import Format

F8 = "F8_E4M3"
F4 = "F4_E2M1"  # two a byte, the first in the low half
I4, I8 = "I4", "I8"  # without a sign, in words of 32 bits, of which every row begins a new one
FLOAT_DTYPES = ("F32", "BF16", "F16")
_BITS = {"F32": 32, "BF16": 16, "F16": 16, F8: 8, F4: 4, I8: 8, I4: 4}
_DTYPES = {
    "F32": lib.CLB_SOURCE_F32,
    "BF16": lib.CLB_SOURCE_BF16,
    "F16": lib.CLB_SOURCE_F16,
    F8: lib.CLB_SOURCE_F8,
    F4: lib.CLB_SOURCE_F4,
    I8: lib.CLB_SOURCE_I8,
    I4: lib.CLB_SOURCE_I4,
}


def source_row_bytes(dtype: str, cols: int) -> int:
    """Bytes of one row of a checkpoint's matrix."""
    bits = cols * _BITS[dtype]
    return -(-bits // 32) * 4 if dtype in (I8, I4) else -(-bits // 8)


class Rows(NamedTuple):
    """Rows [rows, cols] of a matrix as a checkpoint stores them, one after the other in `data`.

    For F8 and F4 a value is its code times the scale of its block: `scales` f32 [block rows, block
    columns] of the whole matrix, blocks of `block` (rows, columns), and `first_row` the row of
    that matrix which comes first here. For I8 and I4 it is the code less the block's zero, times
    the scale: `zeros` uint8, shaped as the scales; without them 128 and 8.
    """

    dtype: str
    rows: int
    cols: int
    data: Any  # a buffer, any alignment
    scales: np.ndarray | None = None
    block: tuple[int, int] = (1, 1)
    first_row: int = 0
    zeros: np.ndarray | None = None


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
    zeros = source.zeros
    if zeros is not None and (zeros.shape, zeros.dtype) != (block_scales.shape, np.uint8):
        raise ValueError(f"zeros {zeros.dtype} {zeros.shape} for scales {block_scales.shape}")
    rows = ffi.new(
        "clb_source *",
        {
            "dtype": _DTYPES[source.dtype],
            "rows": source.rows,
            "cols": source.cols,
            "row_bytes": row_bytes,
            "data": ffi.from_buffer("uint8_t[]", source.data),
            "scales": ffi.from_buffer("float[]", block_scales),
            "zeros": ffi.NULL if zeros is None else ffi.from_buffer("uint8_t[]", zeros),
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
