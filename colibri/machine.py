"""What this machine can do at best: memory, integer products, disk. Speeds are held to these."""

import os
import platform
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from colibri._core import ffi, lib
from colibri.amounts import memory_size
from colibri.container import Container
from colibri.errors import CoreError, UsageError
from colibri.inventory import records_name
from colibri.memory import available, physical_cores
from colibri.model import check
from colibri.pagecache import evict

MEMORY_BYTES = 256 << 20  # read over and over: several times a large last-level cache
# (places read at once, bytes asked for in advance): which is fastest differs between processors.
_PATTERNS = ((1, 0), (1, 1024), (2, 0), (4, 1024), (8, 1024))
_PAGE = 4096
PIECE = 1 << 20  # one read of csrc/loads.c
DEPTHS = (1, 4, 16, 32)
RECORD_DEPTHS = (1, 2, 4, 8)
DISK_BYTES = 256 << 20  # read for one figure


# ---- processor and memory ---------------------------------------------------------------------


def read_bandwidth(threads: int, seconds: float = 0.5, size: int = MEMORY_BYTES) -> float:
    """Bytes a second that `threads` threads read from memory, by the fastest of a few ways."""
    error, rate = ffi.new("clb_error *"), ffi.new("double *")
    best = 0.0
    for streams, ahead in _PATTERNS:
        code = lib.clb_measure_read_bandwidth(
            threads, size, seconds / len(_PATTERNS), streams, ahead, rate, error
        )
        check(code, error)
        best = max(best, rate[0])
    return best


def dot_peak(isa: str, threads: int, seconds: float = 0.3) -> float:
    """8-bit multiply-adds a second from registers, by the instructions of a kernel table."""
    error, rate = ffi.new("clb_error *"), ffi.new("double *")
    check(lib.clb_measure_dot_peak(isa.encode(), threads, seconds, rate, error), error)
    return float(rate[0])


def describe() -> dict[str, Any]:
    """Names and sizes: what a reader needs to judge the figures."""
    memory = available()
    return {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": physical_cores(),
        "memory_available": memory.available,
        "memory_limit": memory.source,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


# ---- disk ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskWay:
    """One way to read expert records: past the page cache or through it, bytes a read, reads in
    flight."""

    direct: bool
    piece: int
    depth: int

    def __str__(self) -> str:
        mode = "direct" if self.direct else "buffered"
        return f"{mode}, {memory_size(self.piece)} reads, {self.depth} in flight"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "mode": "direct" if self.direct else "buffered",
            "read_bytes": self.piece,
            "depth": self.depth,
        }


def record_bytes(container: Container) -> int:
    """Bytes of one routed expert of the first sparse layer, as it is read."""
    return container.expert_bytes(container.sparse_layers[0])


class Disk:
    """Reads of randomly chosen records of `size` bytes that begin at `places` in a file, none of
    them cached; `seed` makes the choice repeatable.

    Of several `paths` the further ones are copies on other drives, read at the same time.
    """

    def __init__(
        self, paths: Sequence[Path], places: Sequence[int], size: int, seed: int = 0
    ) -> None:
        self.paths, self._places, self.record_bytes = paths, places, size
        self._random = random.Random(seed)
        self._uring = True

    @classmethod
    def of_container(
        cls, container: Container, record_bytes: int, seed: int = 0, mirrored: bool = True
    ) -> "Disk":
        """Of expert records; of layers in other forms than colibri's own, stretches of a shard
        that are as long. With `mirrored` all drives that have a copy are read, as by the engine."""
        size = -(-record_bytes // _PAGE) * _PAGE
        shard, places = _records(container, size)
        mirrors = container.mirrors if mirrored else ()
        copies = [mirror.files[shard] for mirror in mirrors if shard in mirror.files]
        return cls([container.shards[shard].path, *copies], places, size, seed)

    @classmethod
    def of_file(cls, path: Path, record_bytes: int) -> "Disk":
        """Stretches of any file, as if they were records; record_bytes is a multiple of 4096."""
        last = path.stat().st_size - record_bytes
        return cls([path], range(0, last + 1, record_bytes), record_bytes)

    def stubborn_bytes(self) -> int:
        """Bytes of the files that stay in the page cache: a process has them mapped."""
        evict(self.paths)
        return cached_bytes(self.paths)

    def ways(self, quick: bool = False) -> list[DiskWay]:
        """Ways worth trying at this record size."""
        piece = min(PIECE, self.record_bytes)
        found = [DiskWay(direct, piece, n) for n in DEPTHS for direct in (True, False)]
        if self.record_bytes > PIECE:
            found += [
                DiskWay(direct, self.record_bytes, n)
                for n in RECORD_DEPTHS
                for direct in (True, False)
            ]
        return found[2:6] if quick else found

    def places(self, size: int) -> list[int]:
        """Where randomly chosen records of about so many bytes begin."""
        count = min(len(self._places), max(4, size // self.record_bytes))
        return self._random.sample(self._places, count)

    def measure(self, way: DiskWay, size: int = DISK_BYTES) -> float | None:
        """Bytes a second over about `size` bytes of records, of all drives together; None when
        direct reads are refused."""
        chosen = [self.places(size) for _ in self.paths]
        evict(self.paths)
        with ThreadPoolExecutor(len(chosen)) as pool:
            rates = list(pool.map(partial(self._measure, way), self.paths, chosen))
        return None if None in rates else sum(filter(None, rates))

    def _measure(self, way: DiskWay, path: Path, chosen: list[int]) -> float | None:
        places, name = ffi.new("int64_t[]", chosen), ffi.new("char[]", os.fsencode(path))
        plan = ffi.new("clb_disk_plan *")
        plan.path, plan.offsets, plan.records = name, places, len(chosen)
        plan.record_bytes, plan.piece, plan.depth = self.record_bytes, way.piece, way.depth
        plan.direct = way.direct
        return self._run(plan, way)

    def _run(self, plan: Any, way: DiskWay) -> float | None:
        error, rate = ffi.new("clb_error *"), ffi.new("double *")
        plan.uring = self._uring
        code = lib.clb_measure_disk(plan, rate, error)
        if code == lib.CLB_NO_MEMORY and self._uring:
            self._uring = False  # not offered here: threads, as the engine does
            return self._run(plan, way)
        try:
            check(code, error)
        except CoreError:
            if way.direct and code == lib.CLB_IO:
                return None
            raise
        return float(rate[0])


def _records(container: Container, size: int) -> tuple[int, list[int]]:
    """The shard with the most copies and then records, and where those begin, in bytes."""
    mirrored = Counter(number for mirror in container.mirrors for number in mirror.files)
    found: dict[int, list[int]] = {}
    for layer, sparse in enumerate(container.sparse[: container.config.num_hidden_layers]):
        tensor = container.tensors.get(records_name(layer)) if sparse else None
        if tensor is not None and tensor.shape[1] == size:
            places = range(tensor.offset, tensor.offset + tensor.nbytes, size)
            found.setdefault(tensor.shard, []).extend(places)
    if found:
        shard = max(found, key=lambda number: (mirrored[number], len(found[number])))
        return shard, found[shard]
    sizes = [shard.size for shard in container.shards]
    shard = max(range(len(sizes)), key=lambda number: (mirrored[number], sizes[number]))
    places = list(range(0, sizes[shard] - size + 1, size))
    if not places:
        path = container.shards[shard].path
        raise UsageError(f"{path}: is smaller than one expert; nothing to read")
    return shard, places


def cached_bytes(paths: list[Path]) -> int:
    """Bytes of these files in the page cache."""
    error, size, total = ffi.new("clb_error *"), ffi.new("int64_t *"), 0
    for path in paths:
        check(lib.clb_measure_cached(os.fsencode(path), size, error), error)
        total += size[0]
    return total


# ---- this process -------------------------------------------------------------------------------


def bytes_from_disk() -> int | None:
    """Bytes this process has caused to be read from disks; None where the system does not say."""
    return next(_fields(Path("/proc/self/io"), "read_bytes"), None)


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM and is no file's; None where it is not known."""
    size = next(_fields(Path("/proc/self/status"), "RssAnon"), None)
    return None if size is None else size << 10


def _fields(path: Path, name: str) -> Iterator[int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        key, _, value = line.partition(":")
        if key == name:
            yield int(value.split()[0])


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Another process that spins on the last core this one may use."""
    pin = ""
    if hasattr(os, "sched_getaffinity"):
        pin = f"import os; os.sched_setaffinity(0, {{{max(os.sched_getaffinity(0))}}})\n"
    program = pin + "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as spinner:
        assert spinner.stdout is not None
        spinner.stdout.readline()  # from here on it spins
        try:
            yield
        finally:
            spinner.kill()
