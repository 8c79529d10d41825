"""What a conversion has promised and what it has done, on disk: it survives kill -9 and power cuts.

A directory `.conversion` inside the target holds the manifest (parameters and source, written
once), the journal (a line for each group of jobs whose bytes are safely in the partial files), and
those files. It goes when the conversion is done; `conversion.json` stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from colibri.checkpoint import WORK, Checkpoint, merge
from colibri.errors import ContainerError, UsageError
from colibri.shard import Shard, TensorInfo
from colibri.state import sync_directory
from colibri.strictjson import read_object
from colibri.writer import cannot_write, write_file

RECORD = "conversion.json"  # kept beside the finished shards
JOURNAL = "journal"
_VERSION = 1
_SAMPLES, _SAMPLE = 16, 4096


@dataclass(frozen=True)
class SourceFile:
    """Identity of one source shard: size, header, and for local files a sample of its data."""

    name: str
    size: int
    digest: str
    sample: str = ""

    def difference(self, other: SourceFile) -> str:
        """What tells two files apart; empty when nothing does."""
        for name in ("size", "digest", "sample"):
            if getattr(self, name) != getattr(other, name):
                return {"digest": "header", "sample": "content"}.get(name, name)
        return ""


@dataclass(frozen=True)
class Header:
    """What one source shard's header says: metadata, and (name, dtype, shape, offset, bytes)."""

    metadata: Mapping[str, str]
    tensors: Sequence[tuple[str, str, Sequence[int], int, int]]


@dataclass(frozen=True)
class Manifest:
    """Everything that must be the same for a conversion to be continued.

    `parameters` by the name of their flag; `origin` says where the source came from (not compared:
    a directory may be moved); `files` and `tensors` describe shards that may be gone by now.
    """

    parameters: Mapping[str, str]
    origin: Mapping[str, str]
    config: str
    files: tuple[SourceFile, ...]
    headers: tuple[Header, ...] = field(repr=False)
    jobs: str = ""  # digest of what is read and where it goes

    @classmethod
    def of(
        cls, parameters: Mapping[str, str], origin: Mapping[str, str], config: str,
        checkpoint: Checkpoint, samples: Mapping[str, str],
    ) -> Manifest:  # fmt: skip
        """The manifest of a new conversion."""
        files = tuple(
            SourceFile(s.path.name, s.size, s.digest, samples.get(s.path.name, ""))
            for s in checkpoint.shards
        )
        headers = tuple(
            Header(
                {k: v for k, v in shard.metadata.items() if k != "checksums"},
                [(t.name, t.dtype, t.shape, t.offset, t.nbytes) for t in shard.tensors],
            )
            for shard in checkpoint.shards
        )
        return cls(parameters, origin, config, files, headers)

    def is_same(self, other: Manifest) -> bool:
        """Whether both promise the same bytes; where the source lies does not matter."""
        names = ("parameters", "config", "files", "jobs")  # the headers go with the files' digests
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def checkpoint(self, directory: Path) -> Checkpoint:
        """The source as it was described when the conversion began, in `directory`."""
        shards = []
        for number, (file, header) in enumerate(zip(self.files, self.headers, strict=True)):
            rows = header.tensors
            tensors = [TensorInfo(n, d, tuple(s), number, o, b) for n, d, s, o, b in rows]
            data = min((t.offset for t in tensors), default=0)
            path = directory / file.name
            metadata = dict(header.metadata)
            shards.append(Shard(path, file.size, data, metadata, file.digest, tensors))
        return Checkpoint(directory, shards, merge(shards))


def read_manifest(path: Path) -> Manifest | None:
    """The manifest at `path`; None when there is none, ContainerError when it is no manifest."""
    fields = read_object(path, ContainerError)
    if fields is None:
        return None
    if fields.pop("version", None) != _VERSION:
        raise ContainerError(
            f"{path}: made by another version of colibri; convert with that version, or remove "
            f"{path.parent} to start again"
        )
    try:
        fields["files"] = tuple(SourceFile(**file) for file in fields["files"])
        fields["headers"] = tuple(Header(**header) for header in fields["headers"])
        return Manifest(**fields)
    except (KeyError, TypeError) as why:
        raise ContainerError(
            f"{path}: lacks something of a manifest: {why}; remove {path.parent} to start again"
        ) from why


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write it whole."""
    text = json.dumps({"version": _VERSION} | asdict(manifest), separators=(",", ":"))
    write_file(path, text.encode())


def require_same(target: Path, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """UsageError naming the parameter in which a conversion into `target` differs from before."""
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise UsageError(
                f"{target}: was begun with {name} {old.get(name)}, not {new.get(name)}; continue "
                "with the same, give another directory, or start again with --replace"
            )


def sample_of(path: Path, size: int) -> str:
    """Digest of sixteen 4 kB blocks spread evenly over a file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for k in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE) * k // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


class Journal:
    """The jobs that are done, with the CRC-32 of each piece they wrote; appended to, never edited.

    Each line ends with a CRC of its own. A torn last line, from a crash while it was written, is
    dropped: its jobs are simply done again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.done, good = load_journal(path)
            self._file = path.open("ab", buffering=0)
            self._file.truncate(good)
        except OSError as why:
            raise cannot_write(path, why) from why

    def append(self, jobs: Mapping[int, tuple[int, ...]]) -> None:
        """Record jobs whose bytes have been synced; returns when the record is too."""
        text = json.dumps(
            {str(job): "".join(f"{s:08x}" for s in sums) for job, sums in jobs.items()},
            separators=(",", ":"),
        ).encode()
        begin = os.fstat(self._file.fileno()).st_size  # tell() knows no truncation
        try:
            line = memoryview(b"%s %08x\n" % (text, zlib.crc32(text)))
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as why:
            self._file.truncate(begin)  # a torn line must not stand before later ones
            raise cannot_write(self.path, why) from why
        self.done.update(jobs)

    def close(self) -> None:
        """Nothing more will be appended."""
        self._file.close()


def load_journal(path: Path) -> tuple[dict[int, tuple[int, ...]], int]:
    """Checksums by job from all whole lines of a journal, and the bytes those lines take."""
    done: dict[int, tuple[int, ...]] = {}
    good = 0
    for line in (path.read_bytes() if path.exists() else b"").splitlines(keepends=True):
        text, _, check = line.rstrip(b"\n").rpartition(b" ")
        if not line.endswith(b"\n") or check != b"%08x" % zlib.crc32(text):
            break
        for job, sums in json.loads(text).items():
            pieces = [sums[at : at + 8] for at in range(0, len(sums), 8)]
            done[int(job)] = tuple(int(piece, 16) for piece in pieces)
        good += len(line)
    return done, good


def has_begun(target: Path) -> bool:
    """Whether an unfinished conversion into `target` has done something that it would keep."""
    return bool(load_journal(target / WORK / JOURNAL)[0])


class WorkDirectory:
    """The directory `.conversion` of a target, locked against a second converter."""

    def __init__(self, target: Path) -> None:
        self.path = target / WORK
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            sync_directory(target)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as why:
            raise ContainerError(
                f"{self.path}: cannot be made: {why.strerror}; give a directory on a disk with "
                "room, that you may write to"
            ) from why
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as why:
            os.close(self._lock)
            raise UsageError(f"{target}: another conversion is writing here; let it end") from why
        if not os.fstat(self._lock).st_nlink:  # its run removed it: such a lock keeps nobody out
            os.close(self._lock)
            raise UsageError(f"{target}: another conversion has just ended here; run it again")

    @property
    def manifest(self) -> Path:
        """Where the manifest lies."""
        return self.path / "manifest.json"

    @property
    def journal(self) -> Path:
        """Where the journal lies."""
        return self.path / JOURNAL

    def clear(self) -> None:
        """Forget everything done so far, keeping the lock."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def remove(self) -> None:
        """The conversion is done."""
        self.clear()
        (self.path / "lock").unlink(missing_ok=True)
        self.path.rmdir()

    def unlock(self) -> None:
        """Let another process in."""
        os.close(self._lock)


def read_record(target: Path) -> dict[str, Any] | None:
    """What conversion.json says: parameters and source of a finished conversion; None without.

    ContainerError for a file that says something else.
    """
    path = target / RECORD
    fields = read_object(path, ContainerError)
    if fields is None:
        return None
    source = fields.get("source")
    origin = source.get("origin") if isinstance(source, dict) else None
    if not (isinstance(fields.get("parameters"), dict) and isinstance(origin, dict)):
        raise ContainerError(f"{path}: is no record of a conversion; remove it")
    return fields


def record_text(manifest: Manifest) -> bytes:
    """conversion.json of a conversion."""
    source = {
        "origin": dict(manifest.origin),
        "files": [{"name": f.name, "size": f.size, "header": f.digest} for f in manifest.files],
    }
    fields = {"parameters": dict(manifest.parameters), "source": source}
    return json.dumps(fields, indent=1).encode()
