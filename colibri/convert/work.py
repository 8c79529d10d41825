"""What becomes of stored bytes: floats are encoded, quantised matrices copied as they are."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from colibri.convert.scales import Blocks
from colibri.encoder import Rows, encode_rows, source_row_bytes
from colibri.errors import ContainerError
from colibri.formats import Format, Kind
from colibri.paths import unreadable

_CACHED = 1 << 20  # source bytes that are read and encoded at a time, while the cache holds them


class Extent(NamedTuple):
    """Bytes of a source shard; the offset counts from the start of its file."""

    shard: int
    offset: int
    nbytes: int


class Reader:
    """Reads extents of shards into memory; safe to share between threads."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[Path, int]] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def open(self, shard: int, path: Path) -> None:
        """Make a shard readable; once more is fine."""
        with self._lock:
            if shard not in self._files:
                try:
                    self._files[shard] = path, os.open(path, os.O_RDONLY)
                except OSError as why:
                    raise ContainerError(unreadable(path, why)) from why

    def close(self, shard: int | None = None) -> None:
        """Close one shard, or all of them."""
        with self._lock:
            for number in [shard] if shard is not None else list(self._files):
                if number in self._files:
                    os.close(self._files.pop(number)[1])

    def read(self, extent: Extent) -> memoryview:
        """The bytes, in memory of this thread that its next `read` uses again."""
        held = getattr(self._local, "memory", None)
        if held is None or len(held) < extent.nbytes:
            held = self._local.memory = bytearray(extent.nbytes)
        view = memoryview(held)[: extent.nbytes]
        self.read_into(extent, view)
        return view

    def read_into(self, extent: Extent, view: memoryview) -> None:
        """Fill `view`, of exactly the extent's size."""
        path, handle = self._files[extent.shard]
        offset, left = extent.offset, view
        while left.nbytes:
            try:
                done = os.preadv(handle, [left], offset)
            except OSError as why:
                raise ContainerError(unreadable(path, why)) from why
            if not done:
                raise ContainerError(f"{path}: shorter than it was; fetch it again")
            offset, left = offset + done, left[done:]


class Work(Protocol):
    """One matrix, or some rows of one, on its way into a container."""

    @property
    def name(self) -> str:
        """The tensor the bytes come from, for messages."""

    def extents(self) -> list[Extent]:
        """What is read."""

    def run(self, reader: Reader, codes: memoryview, scales: memoryview) -> None:
        """Fill the payload and the scales (empty for floats)."""


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, cols] in a shard. Codes have `blocks`, which count from a row that lies
    `first_row` rows before this matrix's own first (fused experts share them)."""

    name: str
    dtype: str
    rows: int
    cols: int
    shard: int
    offset: int
    blocks: Blocks | None = None
    first_row: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of codes."""
        return source_row_bytes(self.dtype, self.cols)


@dataclass(frozen=True)
class Encode:
    """Rows [first, first + rows) of a checkpoint's matrix, to be stored in `form`."""

    source: Matrix
    first: int
    rows: int
    form: Format
    search: bool

    @property
    def name(self) -> str:
        """The source tensor."""
        return self.source.name

    def extents(self) -> list[Extent]:
        """The rows, and the scales that they need."""
        row = self.source.row_bytes
        place = self.source.offset + self.first * row
        data = Extent(self.source.shard, place, self.rows * row)
        blocks = self.source.blocks
        return [data] if blocks is None else [data, *blocks.extents(self._begin, self.rows)]

    def run(self, reader: Reader, codes: memoryview, scales: memoryview) -> None:
        """ContainerError for weights that are damaged or do not fit the format."""
        source, blocks = self.source, self.source.blocks
        by = None if blocks is None else blocks.read(reader, self.name, self._begin, self.rows)
        zeros = None if blocks is None else blocks.read_zeros(reader)
        data, row = self.extents()[0], source.row_bytes
        step = max(1, _CACHED // row)
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            place = Extent(data.shard, data.offset + first * row, count * row)
            encode_rows(
                Rows(source.dtype, count, source.cols, reader.read(place), by,
                     blocks.block if blocks else (1, 1), self._begin + first, zeros),
                self.form, self.search, _rows_of(codes, first, count, self.rows),
                _rows_of(scales, first, count, self.rows),
            )  # fmt: skip

    @property
    def _begin(self) -> int:
        """The first row as the scales count."""
        return self.source.first_row + self.first


def _rows_of(view: memoryview, first: int, count: int, rows: int) -> memoryview:
    each = view.nbytes // rows
    return view[first * each : (first + count) * each]


@dataclass(frozen=True)
class Keep:
    """Rows whose integers are those of the format asked for: copied with their scales, or encoded
    anew where one of these is not exact in it."""

    encode: Encode

    @property
    def name(self) -> str:
        """The source tensor."""
        return self.encode.name

    def extents(self) -> list[Extent]:
        """As to encode them."""
        return self.encode.extents()

    def run(self, reader: Reader, codes: memoryview, scales: memoryview) -> None:
        """ContainerError for scales that are damaged."""
        work, blocks = self.encode, self.encode.source.blocks
        assert blocks is not None
        given = blocks.read(reader, self.name, work.first, work.rows)
        given = given[work.first : work.first + work.rows]
        with np.errstate(over="ignore"):
            kept = given.astype(np.float16 if work.form.scale == Kind.F16 else np.float32)
        if not np.array_equal(kept.astype(np.float32), given):
            work.run(reader, codes, scales)
            return
        reader.read_into(work.extents()[0], codes)
        scales[:] = memoryview(kept).cast("B")
        if work.form.kind == Kind.INT8:  # from 0..255 to two's complement
            signed = np.frombuffer(codes, np.uint8)
            np.bitwise_xor(signed, 128, out=signed)


@dataclass(frozen=True)
class Copy:
    """A quantised matrix, or rows of it, as it is; only the kind of its scales may change."""

    name: str
    payload: Extent
    scales: Extent
    stored: Kind  # of the scales
    wanted: Kind

    def extents(self) -> list[Extent]:
        """Payload and scales."""
        return [self.payload, self.scales]

    def run(self, reader: Reader, codes: memoryview, scales: memoryview) -> None:
        """ContainerError when a scale cannot be stored exactly."""
        reader.read_into(self.payload, codes)
        if self.stored == self.wanted:
            reader.read_into(self.scales, scales)
            return
        kinds = {Kind.F32: "<f4", Kind.F16: "<f2"}
        given = np.frombuffer(reader.read(self.scales), kinds[self.stored])
        with np.errstate(over="ignore"):
            changed = given.astype(kinds[self.wanted])
        if not np.array_equal(changed.astype(given.dtype).view(np.uint8), given.view(np.uint8)):
            raise ContainerError(f"scales of {self.name} are not exact in f16")
        scales[:] = memoryview(changed).cast("B")
