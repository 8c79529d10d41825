"""Memory and cores as Linux tells them: host, cgroup v1 and v2, containers, quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from colibri import context
from colibri.errors import UsageError
from colibri.memory import RESERVE, Budget, available, budget, physical_cores
from colibri.session import KV_DTYPES, Session

GIB = 1 << 30
V1_NO_LIMIT = 9223372036854771712


@pytest.fixture
def root(tmp_path) -> Path:
    """A root directory with 16 GB of free host memory and no cgroups."""
    write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {16 * GIB >> 10} kB\n"})
    return tmp_path


def write(root: Path, files: dict[str, object]) -> None:
    """Files by path."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def v2(root: Path, path: str = "/a/b") -> None:
    """This process in a cgroup of the unified hierarchy."""
    write(root, {
        "proc/self/cgroup": f"0::{path}",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw shared:1 - cgroup2 cgroup2 rw",
    })  # fmt: skip


def v1(root: Path) -> None:
    """This process in cgroups of the old hierarchies."""
    write(root, {
        "proc/self/cgroup": "4:memory:/a/b\n3:cpu,cpuacct:/a\n0::/",
        "proc/self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
    })  # fmt: skip


def test_host(root):
    """Without cgroups it is MemAvailable."""
    assert available(root).available == 16 * GIB
    assert available(root).source == "free memory"


@pytest.mark.parametrize(("inner", "outer"), [(2 * GIB, "max"), ("max", 2 * GIB)])
def test_cgroup_v2(root, inner, outer):
    """The tightest limit on the way up counts, less what is used, page cache given back."""
    v2(root)
    for path, limit in (("a/b", inner), ("a", outer)):
        write(root, {
            f"sys/fs/cgroup/{path}/memory.max": limit,
            f"sys/fs/cgroup/{path}/memory.current": GIB,
            f"sys/fs/cgroup/{path}/memory.stat": f"anon {GIB // 4}\nfile {GIB // 2}",
        })  # fmt: skip
    assert available(root).available == 2 * GIB - GIB // 2
    assert available(root).source == "cgroup limit 2.00 GiB"


def test_group_below_the_one_that_is_mounted(root):
    """A container's own group may be mounted, and this process in one below it: both count."""
    v2(root, "/docker/12/app.slice")
    mount = "31 23 0:28 /docker/12 /sys/fs/cgroup rw shared:1 - cgroup2 cgroup2 rw"
    write(root, {
        "proc/self/mountinfo": mount,
        "sys/fs/cgroup/memory.max": 10 * GIB, "sys/fs/cgroup/memory.current": 0,
        "sys/fs/cgroup/app.slice/memory.max": GIB, "sys/fs/cgroup/app.slice/memory.current": 0,
    })  # fmt: skip
    assert available(root).available == GIB
    write(root, {"proc/self/cgroup": "0::/docker/123/app.slice"})
    assert available(root).available == 10 * GIB


def test_shared_memory_is_not_given_back(root):
    """tmpfs and shared memory count as page cache, and the kernel cannot drop them."""
    v2(root)
    write(root, {
        "sys/fs/cgroup/a/b/memory.max": 10 * GIB,
        "sys/fs/cgroup/a/b/memory.current": 9 * GIB,
        "sys/fs/cgroup/a/b/memory.stat": f"file {8 * GIB}\nshmem {8 * GIB}",
    })  # fmt: skip
    assert available(root).available == GIB


def test_container_sees_only_its_mount(root):
    """In a container the path names directories that do not exist there; the mount still counts."""
    v2(root, "/system.slice/docker-1234.scope")
    write(root, {"sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": 0})
    assert available(root).available == GIB
    assert budget(None, root).bytes == GIB  # there is nobody to spare any for


def test_names_that_are_not_utf8(root):
    """A drive mounted under a name in Latin-1 does not hide the limits."""
    v2(root)
    write(root, {"sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": 0})
    mounts = root / "proc/self/mountinfo"
    mounts.write_bytes(b"30 24 8:1 / /media/Caf\xe9 rw - ext4 /dev/sdb1 rw\n" + mounts.read_bytes())
    assert available(root).available == GIB


def test_cgroup_v1(root):
    """The old hierarchy, where no limit is a huge number."""
    v1(root)
    write(root, {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 5 * GIB,
    })  # fmt: skip
    assert available(root).source == "free memory"
    write(root, {
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": 3 * GIB,
        "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/a/b/memory.stat": f"cache {GIB}\ntotal_cache {GIB}",
    })  # fmt: skip
    assert available(root).available == 2 * GIB


def test_overfull_cgroup_leaves_nothing(root):
    """Never a negative room."""
    v2(root)
    write(root, {"sys/fs/cgroup/a/b/memory.max": GIB, "sys/fs/cgroup/a/b/memory.current": 2 * GIB})
    assert available(root).available == 0
    assert budget(None, root).bytes == 0


def test_budget(root):
    """--ram is taken at its word; else what is free, some of it spared; refusals name numbers."""
    assert budget(4 * GIB, root) == Budget(4 * GIB, "--ram")
    assert budget(None, root).bytes == 15 * GIB
    budget(4 * GIB, root).require(4 * GIB, "this", "")
    with pytest.raises(UsageError, match=r"this needs 4\.00 GiB.*4\.00 GiB \(--ram\). Do so\."):
        budget(4 * GIB, root).require(4 * GIB + 1, "this", "Do so.")


def test_this_machine():
    """The real files of this machine are understood."""
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
    assert available().available > 0


# ---- cores --------------------------------------------------------------------------------------


def topology(root: Path, cores: list[tuple[int, int]], monkeypatch) -> None:
    """CPUs by (package, core), all in the affinity mask."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(cores))), raising=False)
    for cpu, (package, core) in enumerate(cores):
        where = f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(root, {f"{where}/physical_package_id": package, f"{where}/core_id": core})


def test_hyperthreads_count_once(root, monkeypatch):
    """Two sockets of two cores of two threads are four cores."""
    topology(root, [(p, c) for p in (0, 1) for c in (0, 1)] * 2, monkeypatch)
    assert physical_cores(root) == 4


def test_affinity_counts(root, monkeypatch):
    """Only CPUs in the affinity mask count."""
    topology(root, [(0, c) for c in range(8)], monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5}, raising=False)
    assert physical_cores(root) == 2


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("max 100000", 4), ("1 9", 1)])
def test_quota_v2(root, monkeypatch, quota, cores):
    """A container's CPU quota bounds the threads, rounded up."""
    topology(root, [(0, c) for c in range(4)], monkeypatch)
    v2(root)
    write(root, {"sys/fs/cgroup/a/cpu.max": quota, "sys/fs/cgroup/a/b/x": ""})
    assert physical_cores(root) == cores


def test_quota_v1(root, monkeypatch):
    """The same in the old hierarchy; -1 is no quota."""
    topology(root, [(0, c) for c in range(4)], monkeypatch)
    v1(root)
    where = "sys/fs/cgroup/cpu,cpuacct/a"
    write(root, {f"{where}/cpu.cfs_quota_us": 300000, f"{where}/cpu.cfs_period_us": 100000})
    assert physical_cores(root) == 3
    write(root, {f"{where}/cpu.cfs_quota_us": -1})
    assert physical_cores(root) == 4


def test_unknown_topology(root, monkeypatch):
    """Without topology files every CPU counts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert physical_cores(root) == 3


# ---- the context --------------------------------------------------------------------------------


def test_cache_bytes_are_the_cores(demo_container, demo_model):
    """The caches take what context.py says: between two sizes, the core's own count differs so."""
    for dtype in KV_DTYPES:
        small, large = (Session(demo_model, size, 8, kv_dtype=dtype) for size in (128, 256))
        each = context.token_bytes(demo_container, True, dtype)
        assert each * 128 <= large.bytes - small.bytes <= each * 128 * 1.2
    weights = context.dense_bytes(demo_container, True)
    assert weights == pytest.approx(demo_model.dense_bytes, rel=0.02)


def test_default_context(demo_container):
    """The model's limit, less when memory is scarce, never more than fits."""
    weights = context.dense_bytes(demo_container, True)
    each = context.token_bytes(demo_container, True)

    def chosen(room: int) -> int:
        budget = Budget(weights + RESERVE + room, "a test")
        return context.choose(demo_container, True, None, budget)

    assert chosen(GIB) == 1024
    assert chosen(100 * each) == 100
    with pytest.raises(UsageError, match="dense part with the process needs"):
        chosen(0)


@pytest.mark.parametrize(
    ("limit", "room", "expected"),
    [
        (1 << 20, 1 << 22, 32768),
        (1 << 20, 8 * 32768, 32768),
        (1 << 20, 8 * 32768 - 8, 16384),
        (1 << 20, 8 * 8192, 8192),
        (1 << 20, 8 * 4096 - 8, 4096),
        (1 << 20, 3000, 3000),
        (2048, 1 << 22, 2048),
    ],
)
def test_default_context_sizes(limit, room, expected):
    """Half after half until the caches take an eighth of the room, but 4096 if at all possible."""
    assert context.default(limit, room) == expected


def test_asked_context(demo_container):
    """What was asked for is given, or refused with the numbers and the flag."""
    plenty = Budget(GIB, "free memory")
    assert context.choose(demo_container, True, 77, plenty) == 77
    with pytest.raises(UsageError, match=r"--ctx is 1025.*1024 tokens"):
        context.choose(demo_container, True, 1025, plenty)
    tight = Budget(context.dense_bytes(demo_container, True) + (1 << 20), "--ram")
    with pytest.raises(UsageError, match=r"1024 tokens.*\(--ram\).*Free memory or raise --ram"):
        context.choose(demo_container, True, 1024, tight)
