"""Runs a command that may use so much memory and no more, its page cache counted.

python tools/in_cgroup.py --memory 2G [--evict DIR] -- colibri bench MODEL --only stream

Makes a memory cgroup (v2, or v1 where that is what is mounted) below this process's own, so that
limits above still hold, and removes it afterwards. Needs permission to make one: root, or a
delegated v2 group. The command's exit status is passed on; 137 usually means that the kernel
killed it for memory, and the last line on stderr says whether it did.

Pages of a file that are cached already belong to whoever read them first and would be free of
charge: --evict drops a directory's files from the page cache before the command starts.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from colibri.amounts import memory_size
from colibri.errors import ColibriError, UsageError
from colibri.knobs import BY_NAME
from colibri.memory import ancestors, mounts
from colibri.pagecache import evict

ROOT = Path("/")


@dataclass(frozen=True)
class Files:
    """Names of a hierarchy's files. Swap is limited too, where the kernel counts it."""

    limit: str
    swap: str
    swap_limit: str  # "same": memory and swap together may use what memory alone may
    peak: str
    events: str


V1 = Files(
    "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "same", "memory.max_usage_in_bytes",
    "memory.oom_control",
)  # fmt: skip
V2 = Files("memory.max", "memory.swap.max", "0", "memory.peak", "memory.events")


class Place(NamedTuple):
    """A directory in which memory cgroups can be made, and how its files are called."""

    directory: Path
    files: Files


# ---- where ------------------------------------------------------------------------------------


def find_places(root: Path = ROOT) -> list[Place]:
    """Where to try, best first: v2 from this process's own group upwards, else v1's own group."""
    own = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        own["v2" if hierarchy == "0" else controllers] = path
    places = []
    for mount, base, kind, _, options in mounts(root):
        if kind == "cgroup2" and "v2" in own:
            for directory in ancestors(mount, base, own["v2"]):
                if "memory" in _read(directory / "cgroup.controllers").split():
                    places.append(Place(directory, V2))
        elif kind == "cgroup" and "memory" in options:
            path = next((p for names, p in own.items() if "memory" in names.split(",")), "/")
            places.append(Place(next(ancestors(mount, base, path)), V1))
    return places


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ---- the group --------------------------------------------------------------------------------


class Group:
    """A memory cgroup for the length of a with block."""

    def __init__(self, size: int, root: Path = ROOT) -> None:
        self.size = size
        self._root = root

    def __enter__(self) -> "Group":
        self.directory, self.files = self._make()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it: processes first, then what of the page cache is charged to it."""
        force = self.directory / "memory.force_empty"
        for wait in (0.0, 0.05, 0.2, 1.0, 3.0):
            time.sleep(wait)
            for pid in _read(self.directory / "cgroup.procs").split():
                _kill(int(pid))
            try:
                if force.exists():
                    force.write_text("0")
                self.directory.rmdir()
                return
            except OSError:
                continue
        print(f"in_cgroup: {self.directory} is still in use and stays", file=sys.stderr)

    def enter(self) -> None:
        """Move the calling process into it."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak(self) -> int | None:
        """Most bytes ever charged at once; None where the kernel does not say."""
        text = _read(self.directory / self.files.peak).strip()
        return int(text) if text.isdigit() else None

    @property
    def kills(self) -> int:
        """Processes the kernel killed because the limit was reached."""
        lines = (line.split() for line in _read(self.directory / self.files.events).splitlines())
        return next((int(f[1]) for f in lines if len(f) == 2 and f[0] == "oom_kill"), 0)

    def _make(self) -> Place:
        places = find_places(self._root)
        if not places:
            raise UsageError("no memory cgroup is mounted here; mount one, or limit with --ram")
        faults = []
        for parent, files in places:
            directory = parent / f"colibri-{os.getpid()}"
            try:
                if files is V2:
                    _delegate(parent)
                directory.mkdir()
            except OSError as why:
                faults.append(f"{parent}: {why.strerror}")
                continue
            try:
                self._limit(directory, files)
            except OSError as why:
                directory.rmdir()
                faults.append(f"{parent}: {why.strerror}")
                continue
            return Place(directory, files)
        raise UsageError(
            f"no memory cgroup can be made ({'; '.join(faults)}); run as root, or with systemd: "
            f"systemd-run --user --scope -p MemoryMax={self.size} -p MemorySwapMax=0 COMMAND"
        )

    def _limit(self, directory: Path, files: Files) -> None:
        (directory / files.limit).write_text(str(self.size))
        swap = directory / files.swap
        if swap.exists():
            swap.write_text(str(self.size) if files.swap_limit == "same" else files.swap_limit)


def _delegate(parent: Path) -> None:
    """v2: children get memory limits only if the parent says so (and has no processes itself)."""
    control = parent / "cgroup.subtree_control"
    if "memory" not in control.read_text().split():
        control.write_text("+memory")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


# ---- the command ------------------------------------------------------------------------------


def run(command: list[str], size: int, root: Path = ROOT) -> int:
    """Run it in a new group of `size` bytes; returns its exit status, 128 + n after signal n."""
    with Group(size, root) as group:
        try:
            child = subprocess.Popen(command, preexec_fn=group.enter)
        except FileNotFoundError:
            raise UsageError(f"there is no command {command[0]!r}") from None
        except (OSError, subprocess.SubprocessError) as why:
            raise UsageError(f"{command[0]}: cannot be started: {why}") from why
        code = _wait(child)
        peak = group.peak
        used = f", at most {memory_size(peak)} used" if peak is not None else ""
        killed = f", {group.kills} killed for memory" if group.kills else ""
        limit = memory_size(size)
        print(f"in_cgroup: limit {limit}{used}{killed}, exit status {code}", file=sys.stderr)
        return code


def _wait(child: "subprocess.Popen[bytes]") -> int:
    """Wait for it, passing signals on."""

    def pass_on(number: int, _: object) -> None:
        child.send_signal(number)

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--memory", required=True, help="GiB, or 512M, 2G")
    parser.add_argument("--evict", type=Path, metavar="DIR", help="drop its files from the cache")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    args = parser.parse_args(arguments)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("give a command after --")
    try:
        size = BY_NAME["ram"].kind.parse(args.memory)
    except ValueError:
        parser.error(f"--memory is {args.memory!r}; expected {BY_NAME['ram'].kind.expects}")
    try:
        if args.evict:
            evict([path for path in args.evict.iterdir() if path.is_file()])
        return run(command, size)
    except (ColibriError, OSError) as why:
        print(f"in_cgroup: error: {why}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
