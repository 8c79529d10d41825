"""Speed of one linear by format, instruction set and rows: bytes of weights a second on one core.

    python tools/bench_kernels.py [--isa avx2] [--rows 1 2 4 8] [--megabytes 96]

The best of several passes over a matrix larger than the caches, with 6144 inputs. For comparison,
the first line is what one thread can read.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from colibri._core import ffi, lib

from colibri.model import available_isas

COLS = 6144
# name: format, bits of a weight, scale format, group
KINDS = {
    "f32": (lib.CLB_F32, 32, lib.CLB_F32, 0),
    "bf16": (lib.CLB_BF16, 16, lib.CLB_F32, 0),
    "f16": (lib.CLB_F16, 16, lib.CLB_F32, 0),
    "int8 rows": (lib.CLB_INT8, 8, lib.CLB_F32, 0),
    "int8-g64": (lib.CLB_INT8, 8, lib.CLB_F16, 64),
    "int4 rows": (lib.CLB_INT4, 4, lib.CLB_F32, 0),
    "int4-g128": (lib.CLB_INT4, 4, lib.CLB_F32, 128),
    "int4-g64": (lib.CLB_INT4, 4, lib.CLB_F16, 64),
    "int4-g32": (lib.CLB_INT4, 4, lib.CLB_F16, 32),
    "int3-g64": (lib.CLB_INT3, 3, lib.CLB_F32, 64),
    "int2 rows": (lib.CLB_INT2, 2, lib.CLB_F32, 0),
}


def read_rate() -> float:
    """Bytes a second that one thread reads, in order, from memory."""
    rate, error = ffi.new("double *"), ffi.new("clb_error *")
    code = lib.clb_measure_read_bandwidth(1, 256 << 20, 0.5, 4, 0, rate, error)
    if code != lib.CLB_OK:
        raise SystemExit(ffi.string(error.text).decode())
    return rate[0]


def measure(isa: str, kind: str, rows: int, megabytes: int) -> tuple[float, float]:
    """Bytes of weights and multiply-adds a second."""
    form, bits, scale_format, group = KINDS[kind]
    outputs = megabytes * 2**20 * 8 // (COLS * bits)
    groups = COLS // group if group else 1
    data = np.full(outputs * COLS * bits // 8, 0x3C, np.uint8)
    scales = np.ones((outputs, groups), np.float16 if scale_format == lib.CLB_F16 else np.float32)
    fields = (form, scale_format, outputs, COLS, group, 0, 0, 0, 0)
    shape, error = ffi.new("clb_tensor *", fields), ffi.new("clb_error *")
    x = np.random.default_rng(0).normal(size=(rows, COLS)).astype(np.float32)
    y = np.empty((rows, outputs), np.float32)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        code = lib.clb_linear_test(
            isa.encode(),
            shape,
            ffi.from_buffer("uint8_t[]", data),
            ffi.from_buffer(scales),
            ffi.from_buffer("float[]", x),
            rows,
            ffi.from_buffer("float[]", y),
            error,
        )
        best = min(best, time.perf_counter() - start)
        if code != lib.CLB_OK:
            raise SystemExit(ffi.string(error.text).decode())
    return (data.nbytes + (scales.nbytes if bits <= 8 else 0)) / best, rows * outputs * COLS / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default=available_isas()[-1], choices=available_isas())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--megabytes", type=int, default=96, help="size of the matrix")
    args = parser.parse_args()
    print(f"one thread reads {read_rate() / 1e9:.1f} GB/s; {args.isa}, GB/s of weights (GMAC/s)")
    print("format".ljust(10) + "".join(f"{n:>8} rows   " for n in args.rows))
    for kind in args.kinds:
        cells = (measure(args.isa, kind, rows, args.megabytes) for rows in args.rows)
        print(kind.ljust(10) + "".join(f"{b / 1e9:7.1f} ({m / 1e9:5.1f})" for b, m in cells))


if __name__ == "__main__":
    main()
