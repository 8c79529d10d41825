"""One safetensors file: its header, read within bounds and checked before a byte is used."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from colibri.errors import ContainerError
from colibri.paths import unreadable
from colibri.strictjson import parse_object

HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_LARGEST = (1 << 63) - 1

# Bits of one element of every dtype the format knows.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Where one tensor lies: `offset` counts from the start of file number `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int


class Shard(NamedTuple):
    """One file: `size` in bytes, `data` where its tensors begin, and its `__metadata__`."""

    path: Path
    size: int
    data: int
    metadata: dict[str, str]
    digest: str
    tensors: list[TensorInfo]


def read_shard(path: Path, number: int = 0) -> Shard:
    """Read and check the header of a safetensors file; ContainerError names file and fault."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for a writer
            raise ContainerError(f"{path}: is no regular file; remove it, or fetch it again")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(file, path, size)
    except OSError as why:
        raise ContainerError(unreadable(path, why)) from why
    fields = parse_object(header, f"{path}: header", ContainerError)
    return parse_shard(fields, path, size, 8 + len(header), _digest(header), number)


def header_digest(path: Path) -> str:
    """`Shard.digest` of a file, whose header is not looked at any further."""
    try:
        with path.open("rb") as file:
            header = _read_header(file, path, os.fstat(file.fileno()).st_size)
    except OSError as why:
        raise ContainerError(unreadable(path, why)) from why
    return _digest(header)


def parse_shard(
    fields: dict[str, Any], path: Path, size: int, data: int, digest: str, number: int
) -> Shard:
    """Check a parsed header: of a file of `size` bytes whose tensors begin at `data`."""
    metadata = _metadata(fields.pop("__metadata__", {}), path)
    tensors = [_tensor(name, entry, path, number, data) for name, entry in fields.items()]
    _check_layout(tensors, path, data, size)
    return Shard(path, size, data, metadata, digest, tensors)


def _read_header(file: Any, path: Path, size: int) -> bytes:
    if size < 8:
        raise ContainerError(f"{path}: {size} bytes are too few for a safetensors file; {_AGAIN}")
    length = int.from_bytes(file.read(8), "little")
    if length == 0:
        raise ContainerError(f"{path}: header length is 0 (a file of zeros?); {_AGAIN}")
    if length > HEADER_BYTES:
        raise ContainerError(
            f"{path}: header length {length} is over the limit of {HEADER_BYTES} bytes; "
            "not a safetensors file, or a damaged one"
        )
    if length > size - 8:
        raise ContainerError(
            f"{path}: truncated: the header needs {length + 8} bytes, the file has {size} "
            f"({length + 8 - size} missing); {_AGAIN}"
        )
    header = file.read(length)
    if len(header) != length:
        raise ContainerError(f"{path}: short read of the header; {_AGAIN}")
    if header[:1] != b"{":
        raise ContainerError(f"{path}: the header does not begin with '{{'; {_AGAIN}")
    return header


def _digest(header: bytes) -> str:
    return hashlib.blake2b(header, digest_size=16).hexdigest()


_AGAIN = "fetch or convert this file again"


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise ContainerError(f"{path}: __metadata__ is not an object of strings; {_AGAIN}")
    return value


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _tensor(name: str, entry: Any, path: Path, number: int, data: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        well_formed = len(entry) == 3 and type(dtype) is str and type(shape) is list
    except (TypeError, KeyError, ValueError, IndexError):
        well_formed = False
    if not well_formed:
        raise ContainerError(
            f"{path}: tensor {_short(name)}: expected dtype, shape and two data_offsets; {_AGAIN}"
        )
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise ContainerError(f"{path}: tensor {_short(name)}: unknown dtype {_short(dtype)}")
    if len(shape) > 8 or not all(_count(dim) for dim in shape):
        raise ContainerError(f"{path}: tensor {_short(name)}: bad shape {_short(str(shape))}")
    if not (_count(begin) and _count(end) and begin <= end):
        raise ContainerError(
            f"{path}: tensor {_short(name)}: bad data_offsets {_short(str([begin, end]))}"
        )
    for dim in shape:
        bits *= dim
    if bits != 8 * (end - begin):
        raise ContainerError(
            f"{path}: tensor {_short(name)}: {dtype} {_short(str(shape))} needs {bits // 8} bytes, "
            f"its data_offsets span {end - begin}; {_AGAIN}"
        )
    return TensorInfo(name, dtype, tuple(shape), number, data + begin, end - begin)


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def _check_layout(tensors: list[TensorInfo], path: Path, data: int, size: int) -> None:
    """Tensors must cover the data section exactly once: no hole, no overlap, no leftover."""
    at, before = data, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != at:
            fault = "overlaps" if tensor.offset < at else "leaves a hole after"
            raise ContainerError(
                f"{path}: tensor {_short(tensor.name)} {fault} {_short(before)} "
                f"(begins at byte {tensor.offset}, expected {at}); {_AGAIN}"
            )
        at, before = at + tensor.nbytes, tensor.name
    if at > size:
        raise ContainerError(
            f"{path}: truncated: {at} bytes are described, the file has {size} "
            f"({at - size} missing); {_AGAIN}"
        )
    if at < size:
        raise ContainerError(
            f"{path}: {size - at} bytes follow the last tensor; damaged or not safetensors"
        )
