"""Copies of a model's expert files on other drives, among which their reads are shared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri._core import lib
from colibri.errors import ContainerError, UsageError
from colibri.paths import expanded, unreadable
from colibri.shard import Shard, header_digest

MOST: int = lib.CLB_DRIVES - 1  # beside the model's own files
_SAMPLES = 8  # stretches of a file compared at opening; `colibri verify --deep` compares checksums
_SAMPLE = 4096  # bytes of each


@dataclass(frozen=True)
class Mirror:
    """A directory with copies of some or all expert files; `files` by number of the shard."""

    directory: Path
    files: dict[int, Path]

    def same_drive(self, shards: Sequence[Shard]) -> bool:
        """Whether a copy lies where the file itself does, so that nothing is gained."""
        return any(
            path.stat().st_dev == shards[number].path.stat().st_dev
            for number, path in self.files.items()
        )


def directories(asked: str | None) -> list[Path]:
    """The directories that --mirror names; UsageError for too many, or one that is not there."""
    found = [expanded(name, "--mirror") for name in (asked or "").split(os.pathsep) if name]
    if len(found) > MOST:
        raise UsageError(f"--mirror names {len(found)} directories; expected {MOST} at most")
    for path in found:
        if not path.is_dir():
            raise UsageError(
                f"--mirror {path}: is no directory; make it, and copy expert files there"
            )
    return found


def open_mirror(directory: Path, shards: Sequence[Shard], wanted: Sequence[int]) -> Mirror:
    """The copies of the shards `wanted` in a directory, which need not have all of them.

    ContainerError when it has none, or one that differs in size, in its header or in one of a few
    stretches: a file that was not copied to its end, or that another conversion wrote.
    """
    files = {}
    for number in wanted:
        path = directory / shards[number].path.name
        if path.exists():
            _require_same(path, shards[number])
            files[number] = path
    if not files:
        raise ContainerError(
            f"{directory}: holds no copy of the model's files; copy those with experts there, such "
            f"as {shards[wanted[0]].path}"
        )
    return Mirror(directory, files)


def _require_same(path: Path, shard: Shard) -> None:
    size = path.stat().st_size
    if size != shard.size:
        fault = f"has {size} bytes, and {shard.path} has {shard.size}"
    elif header_digest(path) != shard.digest:
        fault = f"has another header than {shard.path}"
    elif not _samples_agree(path, shard):
        fault = f"has other bytes than {shard.path}"
    else:
        return
    raise ContainerError(f"{path}: {fault}; copy it again, or remove it from the mirror")


def _samples_agree(path: Path, shard: Shard) -> bool:
    """Whether the end of both files, and stretches evenly before it, are equal."""
    last = max(0, shard.size - _SAMPLE)
    places = [last * i // _SAMPLES for i in range(1, _SAMPLES + 1)]
    try:
        with path.open("rb") as copy, shard.path.open("rb") as own:
            return all(
                os.pread(copy.fileno(), _SAMPLE, at) == os.pread(own.fileno(), _SAMPLE, at)
                for at in places
            )
    except OSError as why:
        raise ContainerError(unreadable(path, why)) from why
