"""Scales of a quantised source matrix: where they lie, and their values as f32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from colibri.errors import ContainerError
from colibri.quantize import f32_from_bf16, f32_from_e4m3, f32_from_e8m0

if TYPE_CHECKING:
    from colibri.convert.work import Extent, Reader

E8M0 = ("U8", "F8_E8M0")  # powers of two, by the exponent alone
SCALE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1} | dict.fromkeys(E8M0, 1)
_VALUES: dict[str, Callable[[bytes], np.ndarray]] = {
    "F32": lambda raw: np.frombuffer(raw, "<f4"),
    "F16": lambda raw: np.frombuffer(raw, "<f2").astype(np.float32),
    "BF16": lambda raw: f32_from_bf16(np.frombuffer(raw, "<u2")),
    "F8_E4M3": lambda raw: f32_from_e4m3(np.frombuffer(raw, np.uint8)),
    **dict.fromkeys(E8M0, lambda raw: f32_from_e8m0(np.frombuffer(raw, np.uint8))),
}


class Whole(NamedTuple):
    """One F32 for the whole matrix: the scales of its blocks are multiplied or divided by it."""

    name: str
    place: Extent
    divides: bool


class Zeros(NamedTuple):
    """Zero points of a matrix's blocks, of 4 or 8 bits without a sign: a column of theirs lies in
    words of 32 bits, I32 [words, cols]."""

    place: Extent
    bits: int


class Blocks(NamedTuple):
    """Scales of one matrix: [rows, cols] of them, each for a block of weights."""

    place: Extent
    dtype: str
    rows: int
    cols: int
    block: tuple[int, int]  # weights down and across
    whole: Whole | None = None
    zeros: Zeros | None = None

    def extents(self, first: int, rows: int) -> list[Extent]:
        """What is read for rows [first, first + rows) of weights."""
        more = [beside.place for beside in (self.whole, self.zeros) if beside is not None]
        return [self._part(*self._range(first, rows)), *more]

    def read(self, reader: Reader, name: str, first: int, rows: int) -> np.ndarray:
        """f32 [rows, cols]; those of other rows of weights may be zero.

        ContainerError for scales that are not finite, and for a whole one of zero.
        """
        begin, count = self._range(first, rows)
        values = _VALUES[self.dtype](bytes(reader.read(self._part(begin, count))))
        if self.whole is not None:
            values = _scaled(values, reader, self.whole)
        if not np.isfinite(values).all():
            raise ContainerError(f"the scales of {name} are not finite; the source is damaged")
        scales = np.zeros((self.rows, self.cols), np.float32)  # memory that is not touched is free
        scales[begin : begin + count] = values.reshape(count, self.cols)
        return scales

    def read_zeros(self, reader: Reader) -> np.ndarray | None:
        """uint8 [rows, cols]; None where half of the codes are negative."""
        if self.zeros is None:
            return None
        words = np.frombuffer(bytes(reader.read(self.zeros.place)), "<u4").reshape(-1, self.cols)
        bits, rows = self.zeros.bits, np.arange(self.rows, dtype=np.uint32)
        shifted = words[rows * bits // 32] >> (rows * bits % 32)[:, None]
        return (shifted & ((1 << bits) - 1)).astype(np.uint8)

    def _range(self, first: int, rows: int) -> tuple[int, int]:
        """The rows of scales that are read: all of them where they are few."""
        return (first, rows) if self.block[0] == 1 and self.cols > 1 else (0, self.rows)

    def _part(self, begin: int, count: int) -> Extent:
        row = self.cols * SCALE_BYTES[self.dtype]
        return self.place._replace(offset=self.place.offset + begin * row, nbytes=count * row)


def _scaled(values: np.ndarray, reader: Reader, whole: Whole) -> np.ndarray:
    factor = np.frombuffer(bytes(reader.read(whole.place)), "<f4")[0]
    if not np.isfinite(factor) or factor == 0:
        raise ContainerError(f"{whole.name} is {factor}; the source is damaged")
    with np.errstate(over="ignore"):  # told as not finite
        return values / factor if whole.divides else values * factor
