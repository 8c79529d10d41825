"""A conversion killed at a chosen moment: by SIGKILL, or by a power cut that loses bytes."""

from __future__ import annotations

import os
import random
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

KILLED = -signal.SIGKILL


class Disk:
    """Counts what reaches the disk, and ends the process at event number `last`.

    A write at which it ends is half done. With `power`, everything written since the last fsync of
    its file is lost first: overwritten with noise, cut off, or renamed back.
    """

    def __init__(self, last: int | None, power: random.Random | None = None) -> None:
        self.last, self.power = last, power
        self.events = 0
        self._one = threading.Lock()  # one call at a time; nobody moves when the power goes
        self._dirty: dict[str, list[tuple[int, int]]] = {}
        self._synced: dict[str, int] = {}
        self._renamed: list[tuple[Path, Path]] = []
        self._pwrite, self._fsync, self._replace = os.pwrite, os.fsync, Path.replace

    def install(self) -> None:
        """Take the place of the calls that this process uses to write."""
        os.pwrite = self.pwrite
        os.fsync = self.fsync
        Path.replace = lambda path, target: self.replace(path, target)

    def pwrite(self, handle: int, view: memoryview, offset: int) -> int:
        """Half of it, when this is the end."""
        with self._one:
            dying = self._count()
            self._dirty.setdefault(_path(handle), []).append((offset, view.nbytes))
            done = self._pwrite(handle, view[: view.nbytes // 2] if dying else view, offset)
            if dying:
                self._die()
            return done

    def fsync(self, handle: int) -> None:
        """Everything of a file is safe, or the names of a directory are."""
        with self._one:
            if self._count():
                self._die()
            path = _path(handle)
            self._dirty.pop(path, None)
            if Path(path).is_dir():
                self._renamed.clear()
            else:
                self._synced[path] = os.fstat(handle).st_size
            self._fsync(handle)

    def replace(self, path: Path, target: Path) -> Path:
        """A rename, which may be lost until its directory is synced."""
        with self._one:
            if self._count():
                self._die()
            if not Path(target).exists():
                self._renamed.append((Path(path), Path(target)))
            return self._replace(path, target)

    def _count(self) -> bool:
        self.events += 1
        return self.events == self.last

    def _die(self) -> None:
        if self.power is not None:
            self._cut_power(self.power)
        os.kill(os.getpid(), signal.SIGKILL)

    def _cut_power(self, rng: random.Random) -> None:
        for path, target in self._renamed:
            if rng.random() < 0.5:
                self._replace(target, path)
        for path, ranges in self._dirty.items():
            if Path(path).exists():
                with Path(path).open("r+b") as file:
                    for offset, size in ranges:
                        file.seek(offset)
                        file.write(rng.randbytes(size))
        for path, size in self._synced.items():
            if path.endswith("journal") and Path(path).exists():
                os.truncate(path, size + rng.randrange(0, 9) * (Path(path).stat().st_size > size))


def _path(handle: int) -> str:
    return str(Path(f"/proc/self/fd/{handle}").readlink())


def in_child(action: Callable[[], None], disk: Disk) -> int:
    """Run `action` in a forked process on that disk; its exit status (KILLED: by the disk)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            disk.install()
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
