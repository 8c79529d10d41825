"""What this process may use: memory (host and cgroup limits) and physical cores."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from colibri.amounts import memory_size
from colibri.errors import UsageError

ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a huge number
RESERVE = 96 << 20  # Python, the tokenizer and their libraries
_SPARED = 16  # 1/16 of the free host memory is left to other processes


@dataclass(frozen=True)
class Memory:
    """Bytes this process could still take, and which limit says so."""

    available: int
    source: str


@dataclass(frozen=True)
class Budget:
    """Bytes for this process: dense weights, caches, scratch, experts, and RESERVE."""

    bytes: int
    source: str

    def require(self, need: int, what: str, remedy: str) -> None:
        """UsageError with both numbers when `need` bytes are more than the budget."""
        if need > self.bytes:
            raise UsageError(
                f"{what} needs {memory_size(need)}, and there is {memory_size(self.bytes)} "
                f"({self.source}). {remedy}"
            )


def budget(ram: int | None, root: Path = ROOT) -> Budget:
    """What `--ram` allows, else what is available now, a little of the host's spared."""
    if ram is not None:
        return Budget(ram, "--ram")
    memory = available(root)
    spared = 0 if "cgroup" in memory.source else memory.available // _SPARED
    return Budget(memory.available - spared, memory.source)


def available(root: Path = ROOT) -> Memory:
    """The least of free host memory and the room left in each cgroup above this process."""
    found = [Memory(_host(root), "free memory"), *_cgroup_rooms(root)]
    return min(found, key=lambda memory: memory.available)


def _host(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ---- cgroups ------------------------------------------------------------------------------------


def _cgroup_rooms(root: Path) -> Iterator[Memory]:
    """Room in every memory cgroup from this process's own up to the root of the hierarchy."""
    for directory in _groups(root, "memory"):
        yield from _room(directory, "memory.max", "memory.current", ("file", "shmem"))
        names = "memory.limit_in_bytes", "memory.usage_in_bytes"
        yield from _room(directory, *names, ("total_cache", "total_shmem"))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's cgroup and of those above it, in every hierarchy that may have
    the controller."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" or controller in controllers.split(","):
            wanted = "cgroup2" if hierarchy == "0" else "cgroup"
            for mount, base, kind, _, options in mounts(root):
                if kind == wanted and (hierarchy == "0" or controller in options):
                    yield from ancestors(mount, base, path)


def mounts(root: Path) -> Iterator[tuple[Path, str, str, str, list[str]]]:
    """(mount point, its root in what is mounted, file system, device, options) from mountinfo."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) >= 5 and len(tail) >= 3:
            base, point, device = map(_unescaped, (fields[3], fields[4], tail[1]))
            yield root / point.lstrip("/"), base, tail[0], device, tail[2].split(",")


def _unescaped(field: str) -> str:
    """The kernel writes white space and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def ancestors(mount: Path, base: str, path: str) -> Iterator[Path]:
    """A cgroup's directory and those above it, as far as they are below the group `base` that is
    mounted; in a container that may be the mount alone."""
    base = base.rstrip("/") + "/"
    inside = mount / f"{path}/".removeprefix(base).strip("/")
    while inside != mount and mount in inside.parents:
        if inside.is_dir():
            yield inside
        inside = inside.parent
    yield mount


def _room(directory: Path, limit: str, usage: str, stats: tuple[str, str]) -> Iterator[Memory]:
    """Limit - (usage - page cache): the kernel drops cached file pages when room is needed, except
    those of memory that is shared, which `stats` names second."""
    bound, used = _number(directory / limit), _number(directory / usage)
    if bound is None or used is None or bound >= _UNLIMITED:
        return
    stat = dict(line.split()[:2] for line in _read(directory / "memory.stat").splitlines() if line)
    cache, shared = (int(stat.get(name, 0)) for name in stats)
    cached = max(cache - shared, 0)
    yield Memory(max(bound - max(used - cached, 0), 0), f"cgroup limit {memory_size(bound)}")


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # cgroup v2 says "max"


def _read(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())  # mount points have names in any encoding
    except OSError:
        return ""


# ---- cores --------------------------------------------------------------------------------------


def physical_cores(root: Path = ROOT) -> int:
    """Physical cores in this process's affinity mask, at most the cgroup's CPU quota."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = _number(topology / "physical_package_id"), _number(topology / "core_id")
        cores.add((package, core) if core is not None else cpu)
    return max(1, min(len(cores), *_cpu_quotas(root), 1024))


def _cpu_quotas(root: Path) -> Iterator[int]:
    """CPUs, rounded up, of every CPU quota above this process."""
    for directory in _groups(root, "cpu"):
        quota, _, period = _read(directory / "cpu.max").partition(" ")
        yield from _quota(quota, period)
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        yield from _quota(*(_read(directory / name) for name in names))


def _quota(quota: str, period: str) -> Iterator[int]:
    if quota.strip().isdigit() and period.strip().isdigit() and int(period):
        yield max(1, -(-int(quota) // int(period)))
