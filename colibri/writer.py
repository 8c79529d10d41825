"""Writes one shard: pieces in any order, checksums, then fsync and rename. Never half a file."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from colibri.amounts import plural
from colibri.checksum import crc32
from colibri.errors import ContainerError
from colibri.layout import RECORD_ALIGN, TensorSpec
from colibri.state import PARTIAL, sync_directory


class ShardImage:
    """Where everything lies in a safetensors file of these tensors, before a byte is written.

    The data section begins at a multiple of `align`. `size` is the whole file's, in bytes.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], metadata: Mapping[str, str], align: int = RECORD_ALIGN
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self._metadata = dict(metadata)
        self._align = align
        at = len(self.header({}))
        self._starts = {}
        for spec in specs:
            self._starts[spec.name] = at
            at += spec.nbytes
        self.size = at

    def place(self, name: str, piece: int) -> tuple[int, int]:
        """Offset and bytes of one piece of a tensor."""
        spec = self.specs[name]
        begin = piece * spec.piece
        return self._starts[name] + begin, min(spec.piece, spec.nbytes - begin)

    def header(self, sums: Mapping[str, Sequence[int]]) -> bytes:
        """Length and JSON, padded with spaces; the same size whatever the CRC-32s of the pieces."""
        checksums = {
            name: {
                "piece": spec.piece,
                "crc32": "".join(f"{s:08x}" for s in sums.get(name, [0] * spec.pieces)),
            }
            for name, spec in self.specs.items()
        }
        text = json.dumps(checksums, separators=(",", ":"))
        entries: dict[str, object] = {"__metadata__": self._metadata | {"checksums": text}}
        at = 0
        for spec in self.specs.values():
            entries[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            at += spec.nbytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header = header.ljust(-(-(8 + len(header)) // self._align) * self._align - 8)
        return len(header).to_bytes(8, "little") + header


class ShardWriter:
    """A safetensors file in the making, used as a context manager.

    Tensors lie in the order of `specs`; the data section begins at a multiple of 4096. Each piece
    of each tensor is written once, in any order. Leaving the block checks that all of them were,
    stores their CRC-32s in `__metadata__.checksums`, syncs and renames; an exception removes the
    partial file. Failures are ContainerErrors naming the file.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: dict[str, str]) -> None:
        self.path = path
        self._partial = path.with_name(path.name + PARTIAL)
        self._image = ShardImage(specs, metadata)
        if len(self._image.specs) != len(specs):
            raise ContainerError(f"{path}: two tensors have one name")
        self._sums: dict[str, list[int | None]] = {
            spec.name: [None] * spec.pieces for spec in specs
        }

    def __enter__(self) -> "ShardWriter":
        try:
            self._file = self._partial.open("wb", buffering=0)
        except OSError as why:
            raise cannot_write(self.path, why) from why
        return self

    def write(self, name: str, data: np.ndarray | bytes, piece: int | None = None) -> None:
        """Write one piece of a tensor, or all of them; `data` must have exactly its bytes."""
        spec = self._image.specs[name]
        view = memoryview(np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        if piece is not None:
            self._write_piece(spec, piece, view)
            return
        if view.nbytes != spec.nbytes:
            raise ContainerError(
                f"{self.path}: {name}: {view.nbytes} bytes are not the {spec.nbytes} it has"
            )
        for number in range(spec.pieces):
            begin = number * spec.piece
            self._write_piece(spec, number, view[begin : begin + spec.piece])

    def leave_zero(self, name: str) -> None:
        """Leave all of a tensor a hole in the file: it reads as zeros and takes no room."""
        sizes = [self._image.place(name, piece)[1] for piece in range(len(self._sums[name]))]
        sums = {size: crc32(bytes(size)) for size in set(sizes)}
        self._sums[name] = [sums[size] for size in sizes]

    def _write_piece(self, spec: TensorSpec, piece: int, view: memoryview) -> None:
        offset, nbytes = self._image.place(spec.name, piece)
        if not 0 <= piece < spec.pieces or view.nbytes != nbytes:
            raise ContainerError(
                f"{self.path}: {spec.name}: {view.nbytes} bytes are not piece {piece} "
                f"of {spec.nbytes}"
            )
        if self._sums[spec.name][piece] is not None:
            raise ContainerError(f"{self.path}: {spec.name}: piece {piece} was written before")
        self._write_at(offset, view)
        self._sums[spec.name][piece] = crc32(view)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException:
            self._discard()
            raise
        if kind is not None:
            self._discard()

    def _finish(self) -> None:
        lacking = [name for name, sums in self._sums.items() if None in sums]
        if lacking:
            raise ContainerError(
                f"{self.path}: {plural(len(lacking), 'tensor')} not written, first {lacking[0]}"
            )
        sums = {name: [s or 0 for s in row] for name, row in self._sums.items()}
        self._write_at(0, memoryview(self._image.header(sums)))
        try:
            os.truncate(self._file.fileno(), self._image.size)
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self.path)
            sync_directory(self.path.parent)
        except OSError as why:
            raise cannot_write(self.path, why) from why

    def _discard(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _write_at(self, offset: int, view: memoryview) -> None:
        try:
            write_at(self._file.fileno(), offset, view)
        except OSError as why:
            raise cannot_write(self.path, why) from why


def write_at(handle: int, offset: int, view: memoryview) -> None:
    """Write all of `view` at an offset of an open file, however little the kernel takes at once."""
    while view.nbytes:
        done = os.pwrite(handle, view, offset)
        offset, view = offset + done, view[done:]


def cannot_write(path: Path, why: OSError) -> ContainerError:
    """The error for a failed write of `path`."""
    return ContainerError(f"{path}: cannot be written: {why.strerror}")


def write_file(path: Path, data: bytes) -> None:
    """Write a small file whole: temporary name, fsync, rename."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except OSError as why:
        partial.unlink(missing_ok=True)
        raise cannot_write(path, why) from why
