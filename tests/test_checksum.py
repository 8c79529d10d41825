"""CRC-32 by the core: zlib's numbers, with the processor's instructions and without."""

from __future__ import annotations

import zlib

from colibri._core import ffi, lib
from hypothesis import given
from hypothesis import strategies as st

from colibri.checksum import crc32


@given(st.binary(max_size=700), st.integers(0, 2**32 - 1), st.integers(0, 15))
def test_equal_to_zlib(data, start, skip):
    """Any bytes at any alignment, after any other bytes."""
    part = memoryview(data)[skip:]
    expected = zlib.crc32(part, start)
    assert crc32(part, start) == expected
    buffer = ffi.from_buffer("uint8_t[]", part)
    for plain in (0, 1):
        assert lib.clb_crc32(buffer, part.nbytes, start, plain) == expected


def test_pieces_add_up():
    """A checksum continued piece by piece is that of the whole."""
    data = bytes(range(256)) * 50
    crc = 0
    for at in range(0, len(data), 777):
        crc = crc32(data[at : at + 777], crc)
    assert crc == crc32(data) == zlib.crc32(data)
