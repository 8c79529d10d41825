"""Writes one shard: pieces in any order, checksums, then fsync and rename. Never half a file."""

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from colibri.errors import ContainerError
from colibri.layout import RECORD_ALIGN, TensorSpec

PARTIAL = ".partial"  # suffix of a file being written; not *.safetensors, so no reader sees it


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
        self._specs = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ContainerError(f"{path}: two tensors have one name")
        self._metadata = metadata
        self._sums: dict[str, list[int | None]] = {
            spec.name: [None] * _pieces(spec) for spec in specs
        }
        self._header_bytes = len(self._header())
        self._starts = dict(zip(self._specs, self._offsets(self._header_bytes), strict=False))

    def __enter__(self) -> "ShardWriter":
        try:
            self._file = self._partial.open("wb", buffering=0)
        except OSError as why:
            raise self._fail(why) from why
        return self

    def write(self, name: str, data: np.ndarray | bytes, piece: int = 0) -> None:
        """Write one piece of a tensor (all of it, for most); `data` must have the piece's bytes."""
        spec = self._specs[name]
        view = memoryview(np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        begin = piece * spec.piece
        if not 0 <= piece < _pieces(spec) or view.nbytes != min(spec.piece, spec.nbytes - begin):
            raise ContainerError(
                f"{self.path}: {name}: {view.nbytes} bytes are not piece {piece} of {spec.nbytes}"
            )
        if self._sums[name][piece] is not None:
            raise ContainerError(f"{self.path}: {name}: piece {piece} was written before")
        self._write_at(self._starts[name] + begin, view)
        self._sums[name][piece] = zlib.crc32(view)

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
                f"{self.path}: {len(lacking)} tensors were not written, first {lacking[0]}"
            )
        self._write_at(0, memoryview(self._header()))
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self.path)
            sync_directory(self.path.parent)
        except OSError as why:
            raise self._fail(why) from why

    def _discard(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _write_at(self, offset: int, view: memoryview) -> None:
        try:
            while view.nbytes:
                done = os.pwrite(self._file.fileno(), view, offset)
                offset, view = offset + done, view[done:]
        except OSError as why:
            raise self._fail(why) from why

    def _fail(self, why: OSError) -> ContainerError:
        return ContainerError(f"{self.path}: cannot be written: {why.strerror}")

    def _offsets(self, start: int) -> list[int]:
        offsets = [start]
        for spec in self._specs.values():
            offsets.append(offsets[-1] + spec.nbytes)
        return offsets

    def _header(self) -> bytes:
        """Length and JSON, padded with spaces to 4096; the same size whatever the checksums."""
        sums = {
            name: {"piece": self._specs[name].piece, "crc32": "".join(f"{s or 0:08x}" for s in row)}
            for name, row in self._sums.items()
        }
        checksums = json.dumps(sums, separators=(",", ":"))
        entries: dict[str, object] = {"__metadata__": self._metadata | {"checksums": checksums}}
        offsets = self._offsets(0)
        for spec, begin, end in zip(self._specs.values(), offsets, offsets[1:], strict=False):
            entries[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text = text.ljust(-(-(8 + len(text)) // RECORD_ALIGN) * RECORD_ALIGN - 8)
        return len(text).to_bytes(8, "little") + text


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
        raise ContainerError(f"{path}: cannot be written: {why.strerror}") from why


def sync_directory(directory: Path) -> None:
    """Make renames in a directory survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pieces(spec: TensorSpec) -> int:
    return -(-spec.nbytes // spec.piece) if spec.piece else 0
