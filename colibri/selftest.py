"""Whether the kernels of this processor give the bits of the plain C reference."""

import numpy as np

from colibri._core import ffi, lib
from colibri.formats import Format
from colibri.model import available_isas, check

FORMATS = ("int4-g64", "int8", "int3-g64", "int2", "f32")
_ROWS, _COLS = 24, 192


def agree() -> str:
    """The name of an instruction set that disagrees, or "" when all agree."""
    draw = np.random.default_rng(1)
    x = draw.standard_normal((3, _COLS)).astype(np.float32)
    for name in FORMATS:
        form = Format.parse(name)
        data = draw.integers(0, 120, _ROWS * form.row_bytes(_COLS)).astype(np.uint8)
        if name == "f32":
            data = draw.standard_normal(_ROWS * _COLS).astype(np.float32).view(np.uint8)
        scales = draw.random(max(1, _ROWS * form.row_scales(_COLS))).astype(np.float16)
        reference = _multiply("scalar", form, data, scales, x)
        for isa in available_isas():
            if _multiply(isa, form, data, scales, x) != reference:
                return isa
    return ""


def _multiply(isa: str, form: Format, data: np.ndarray, scales: np.ndarray, x: np.ndarray) -> bytes:
    shape = ffi.new("clb_tensor *")
    shape.format, shape.scale_format, shape.group = int(form.kind), int(form.scale), form.group
    shape.rows, shape.cols = _ROWS, _COLS
    y, error = np.empty((len(x), _ROWS), np.float32), ffi.new("clb_error *")
    code = lib.clb_linear_test(
        isa.encode(), shape, ffi.from_buffer("uint8_t[]", data), ffi.from_buffer(scales),
        ffi.from_buffer("float[]", x), len(x), ffi.from_buffer("float[]", y), error,
    )  # fmt: skip
    check(code, error)
    return y.tobytes()
