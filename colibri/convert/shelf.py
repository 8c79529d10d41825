"""Source shards on the disk: those of a directory, or a few at a time of a hub's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from colibri.convert.manifest import SourceFile, sample_of
from colibri.errors import ContainerError, UsageError
from colibri.paths import unreadable

AT_ONCE = 2  # shards of a hub on the disk: one being read, one on its way


class Shelf(Protocol):
    """Gives shards to read, and takes them back."""

    def is_coming(self, shard: int) -> bool:
        """Whether a shard is here or on its way, so that nothing need be released for it."""

    def path(self, shard: int) -> Path:
        """Where a shard lies; waits until it does."""

    def release(self, shard: int) -> None:
        """All its tensors are safely written; it will not be asked for again."""

    def close(self) -> None:
        """The conversion ends."""


class Directory:
    """All shards of a directory; with `delete`, each goes when it is released."""

    def __init__(self, directory: Path, files: Sequence[SourceFile], delete: bool) -> None:
        self.directory, self.delete = directory, delete
        self._files = files

    def is_coming(self, shard: int) -> bool:
        """Always."""
        return True

    def path(self, shard: int) -> Path:
        """The shard's own path; ContainerError when it is gone."""
        path = self.directory / self._files[shard].name
        if not path.exists():
            raise ContainerError(f"{path}: is gone, but not all of it has been converted")
        return path

    def release(self, shard: int) -> None:
        """Delete it if that was asked for."""
        if self.delete:
            (self.directory / self._files[shard].name).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing to do."""


def require_unchanged(directory: Path, files: Sequence[SourceFile], needed: set[int]) -> None:
    """ContainerError for a shard that is needed and gone, or there and not what it was."""
    for number, file in enumerate(files):
        path = directory / file.name
        try:
            size = path.stat().st_size
            found = SourceFile(file.name, size, file.digest, sample_of(path, size))
        except FileNotFoundError:
            if number in needed:
                raise ContainerError(
                    f"{path}: is gone, but not all of it has been converted; put it back"
                ) from None
            continue
        except OSError as why:
            raise ContainerError(unreadable(path, why)) from why
        difference = file.difference(found)
        if difference:
            raise ContainerError(
                f"{path}: its {difference} has changed since the conversion began; put the old "
                "file back, or start again with --replace"
            )


def require_deletable(directory: Path, files: Sequence[SourceFile]) -> None:
    """UsageError for links, as a hub's cache has them: deleting one frees nothing."""
    links = [file.name for file in files if (directory / file.name).is_symlink()]
    if links:
        raise UsageError(
            f"{directory / links[0]}: is a link, and deleting it frees nothing; leave out "
            "--delete-source, or give the directory that holds the files themselves"
        )


class Stream:
    """Shards fetched one after the other while others are read, at most AT_ONCE on the disk.

    `fetch(shard)` brings one and returns its path; it runs in a thread of its own, in the order of
    `wanted`, which ascends. More than AT_ONCE come only when `path` is called for one of them.
    """

    def __init__(
        self, wanted: Sequence[int], fetch: Callable[[int], Path], held: Mapping[int, Path]
    ) -> None:
        self._wanted = [shard for shard in wanted if shard not in held]
        self._fetch = fetch
        self._held: dict[int, Path | None] = dict(held)  # None: on its way
        self._urgent: int | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def is_coming(self, shard: int) -> bool:
        """Whether the shard is here or on its way."""
        with self._change:
            return shard in self._held

    def path(self, shard: int) -> Path:
        """Wait for a shard, beyond AT_ONCE if need be."""
        with self._change:
            while self._held.get(shard) is None:
                if self._error is not None:
                    raise self._error
                self._urgent = shard
                self._change.notify_all()
                self._change.wait()
            self._urgent = None
            path = self._held[shard]
            assert path is not None
            return path

    def release(self, shard: int) -> None:
        """Delete the shard and let the next one come."""
        with self._change:
            path = self._held.pop(shard, None)
            if path is not None:
                path.unlink(missing_ok=True)
            self._change.notify_all()

    def close(self) -> None:
        """Stop fetching; what is on its way may still arrive in vain."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _work(self) -> None:
        try:
            for shard in self._wanted:
                with self._change:
                    while not self._closed and not self._room(shard):
                        self._change.wait()
                    if self._closed:
                        return
                    self._held[shard] = None
                path = self._fetch(shard)
                with self._change:
                    self._held[shard] = path
                    self._change.notify_all()
        except BaseException as why:  # told to whoever waits
            with self._change:
                self._error = why
                self._change.notify_all()

    def _room(self, shard: int) -> bool:
        """A shard that is waited for may lie behind others, which have to come first."""
        is_urgent = self._urgent is not None and shard <= self._urgent
        return len(self._held) < AT_ONCE or is_urgent
