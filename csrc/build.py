"""The cffi builder: compiles csrc/*.c into colibri._core from the one header Python sees."""

import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent

# -ffp-contract=off and no fast-math: the arithmetic is part of the interface (docs/arithmetic.md).
FLAGS = ["-std=c11", "-O3", "-g1", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden",
         "-D_GNU_SOURCE", "-Wall", "-Wextra", "-pthread"]  # fmt: skip


def declarations() -> str:
    """colibri.h without its preprocessor lines, as cffi wants it."""
    text = (HERE / "colibri.h").read_text()
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE)


ffi = FFI()
ffi.cdef(declarations())
ffi.cdef('extern "Python" void colibri_report(void *, double);')  # colibri/session.py
ffi.set_source(
    "colibri._core",
    '#include "colibri.h"',
    sources=sorted(f"csrc/{path.name}" for path in HERE.glob("*.c")),
    depends=sorted(f"csrc/{path.name}" for path in HERE.glob("*.h")),
    include_dirs=["csrc"],
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    libraries=["m"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
