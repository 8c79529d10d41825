"""Floats as another library may have left them for the thread: rounded to zero, no denormals."""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager

SUPPORTED = platform.libc_ver()[0] == "glibc" and platform.machine() in ("x86_64", "aarch64")


def _spoiled(environment: bytes) -> bytes:
    """glibc's fenv_t with other bits of the control registers set."""
    if platform.machine() == "aarch64":  # FPCR: rounding mode, flush to zero
        (control,) = struct.unpack_from("I", environment)
        return struct.pack("I", control | 3 << 22 | 1 << 24) + environment[4:]
    spoiled = bytearray(environment)  # x87's control word first, SSE's last
    struct.pack_into("H", spoiled, 0, struct.unpack_from("H", spoiled)[0] | 0xC00)
    struct.pack_into("I", spoiled, 28, struct.unpack_from("I", spoiled, 28)[0] | 0xE040)
    return bytes(spoiled)


@contextmanager
def spoiled() -> Iterator[None]:
    """Rounding to zero, denormals flushed and taken as zero; checked to be so still at the end."""
    libm = ctypes.CDLL("libm.so.6")
    before, after = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    libm.fegetenv(before)
    other = _spoiled(before.raw)
    assert libm.fesetenv(other) == 0
    try:
        yield
        libm.fegetenv(after)
    finally:
        libm.fesetenv(before)
    assert _spoiled(after.raw) == after.raw
