"""A short look at this machine: how fast it reads memory and disk, and how fast it multiplies.

Some four seconds, for a forecast; `colibri bench` is for figures that are to be quoted.
"""

import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from colibri import machine
from colibri._core import ffi, lib
from colibri.container import Container
from colibri.errors import UsageError
from colibri.formats import FLOATS, Format, Kind
from colibri.machine import PIECE, Disk, DiskWay
from colibri.model import Model, available_isas, check
from colibri.session import Session
from colibri.state import PARTIAL

ASSUMED_DISK = 3e9  # bytes a second, where nothing is known: a middling NVMe drive
ASSUMED_LAYER = 20e-6  # seconds a layer takes beside its weights, where it was not measured
ABSORBED = "absorbed"  # key rows of kv_b: unpacked, then multiplied as floats, each row by itself
ASSUMED_LATENCY = 1e-4
MANY = 16  # rows at which products are no longer bound by unpacking weights
STEP_AT = 256  # where a small model's step is measured: it attends and chooses keys as later on
_STEPS, _BURSTS = 256, 4
_SHAPE = (256, 2048)  # of the matrix that is multiplied: it stays in a core's own cache
_LEAST = 2 << 20  # bytes a thread reads at least
_PATIENCE = 60  # seconds until a thread that never comes is an error
_BARRIER_BYTES = 8 << 20  # a thread reads between two barriers: so much that these cost little
_BESIDE_BYTES = 128 << 20  # multiplied while the disk is read: more than a cache holds
_FILE_BYTES = 256 << 20  # written to measure a directory's disk before there is a model


class Beside(NamedTuple):
    """What is left of either's speed while a disk is read and all threads compute: all of it,
    unless the computing cores work the disk, as they do a virtual machine's."""

    reading: float = 1.0
    computing: float = 1.0

    def both(self, reading: float, computing: float) -> float:
        """Seconds until both are done, of two that alone would take so many."""
        return max(
            reading + computing * (1 - self.reading) / self.computing,
            computing + reading * (1 - self.computing) / self.reading,
        )


APART = Beside()


@dataclass(frozen=True)
class Speeds:
    """What a machine does: bytes a second of `threads` threads together from memory, and of the
    disk; multiply-adds a second of one thread by kind of number, at one row from where the weights
    lie and at MANY.

    `sources` says of each figure whether it was measured, given or assumed. Without `products`
    nothing but memory and disk limits the forecast.
    """

    threads: int
    memory: float
    disk: float
    products: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    layer_seconds: float = ASSUMED_LAYER
    latency: float = ASSUMED_LATENCY  # seconds that a read takes beside its bytes
    beside: Beside = APART
    sources: Mapping[str, str] = field(default_factory=dict)

    def multiply(self, kind: str, rows: int) -> float | None:
        """Multiply-adds a second of all threads, for steps of so many rows."""
        if kind == ABSORBED:
            rows, kind = 1, kind if kind in self.products else "f32"
        if kind not in self.products:
            return None
        one, many = self.products[kind]
        share = min(1.0, np.log2(rows) / np.log2(MANY))
        return self.threads * float(one * (many / one) ** share)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"beside": self.beside._asdict()}


def products(
    isa: str, kinds: Iterable[str], threads: int, size: int, seconds: float = 0.1
) -> dict[str, Any]:
    """Multiply-adds a second of one thread by kind of number: at one row, while all threads pass
    over `size` bytes of weights, and at MANY rows, of weights that are in the cache."""
    code = isa.encode()
    cached = Linear(code, "f32", 1).rate(seconds / 2)
    return {ABSORBED: (cached, cached)} | {
        kind: (_streamed(code, kind, threads, size, seconds),
               Linear(code, kind, MANY).rate(seconds / 2))
        for kind in kinds
    }  # fmt: skip


def _streamed(isa: bytes, kind: str, threads: int, size: int, seconds: float) -> float:
    """Threads with weights of their own and a barrier after every few megabytes, as the engine has
    one after every matrix: where one thread is held up, all wait."""
    each = max(_LEAST, min(machine.MEMORY_BYTES, size)) // threads
    count = max(1, each // _BARRIER_BYTES)
    begun, over = [0.0], [False]

    def start() -> None:
        begun[0] = time.perf_counter()

    def check_time() -> None:  # by one thread at each barrier, for all of them
        over[0] = time.perf_counter() > begun[0] + seconds

    ready = threading.Barrier(threads, start, _PATIENCE)
    barrier = threading.Barrier(threads if count > 1 else 1, check_time, _PATIENCE)

    def work(_number: int) -> float:
        pieces = [Linear(isa, kind, 1, each // count) for _ in range(count)]
        ready.wait()
        passes = 0
        while not passes or not over[0]:
            for piece in pieces:
                piece.run()
                barrier.wait()
            passes += 1
        return passes * count * pieces[0].products / (time.perf_counter() - begun[0])

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads))) / threads


class Linear:
    """The engine's own linear, on made-up weights of `size` bytes or of a core's own cache."""

    def __init__(self, isa: bytes, kind: str, rows: int, size: int = 0) -> None:
        number = Kind[kind.upper()]
        group = {"int4": 64, "int3": 64}.get(kind, 0)
        form = Format(number) if number in FLOATS else Format(number, group, Kind.F16)
        out, cols = _SHAPE
        out = max(out, size // form.row_bytes(cols))
        self.products = rows * out * cols
        shape = ffi.new(
            "clb_tensor *",
            {"format": int(form.kind), "scale_format": int(form.scale), "rows": out, "cols": cols,
             "group": group},
        )  # fmt: skip
        data = np.full(out * form.row_bytes(cols), 1, np.uint8)  # not zeros: those share a page
        scales = np.ones(max(1, out * form.row_scales(cols)), np.float16)
        x, y = np.ones((rows, cols), np.float32), np.empty((rows, out), np.float32)
        self._error = ffi.new("clb_error *")
        self._arguments = (
            isa, shape, ffi.from_buffer("uint8_t[]", data), ffi.from_buffer(scales),
            ffi.from_buffer("float[]", x), rows, ffi.from_buffer("float[]", y), self._error,
        )  # fmt: skip
        self.run()

    def run(self) -> None:
        """Once over the weights, in this thread, without the interpreter's lock."""
        check(lib.clb_linear_test(*self._arguments), self._error)

    def rate(self, seconds: float) -> float:
        """Multiply-adds a second, of many runs the one in the middle."""
        times, end = [], time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            begun = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - begun)
        return float(self.products / np.median(times))


def step_seconds(container: Container, threads: int, isa: str | None = None) -> float:
    """Seconds of one step of a small model about STEP_AT tokens into a text: the mean of many,
    because what disturbs a machine disturbs the answer as well."""
    model = Model.open(container, threads=threads, isa=isa, mtp=False)
    session = Session(model, STEP_AT + _STEPS)
    session.prefill(range(STEP_AT - _STEPS // 2), prime=False)
    seconds = 0.0
    for _ in range(_BURSTS):
        session.rewind(STEP_AT - _STEPS // 2)
        begun = time.perf_counter()
        for token in range(_STEPS):
            session.step_all([token], "last")
        seconds += time.perf_counter() - begun
    return seconds / (_BURSTS * _STEPS)


class DiskSpeed(NamedTuple):
    """Bytes a second of reading many records, and how much longer a lone one takes, in seconds."""

    rate: float
    latency: float
    beside: Beside = APART


def disk_of(
    container: Container, record_bytes: int, threads: int = 0, size: int = 96 << 20
) -> DiskSpeed:
    """How fast expert records of a container are read, by the best of a few ways; and that beside
    so many threads that compute, if any."""
    return _measure(Disk.of_container(container, record_bytes), size, threads)


def disk_at(directory: Path, threads: int = 0) -> DiskSpeed:
    """The same of the disk under a directory, from a file that is written and removed."""
    path = directory / f".colibri-probe-{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            block = os.urandom(PIECE)
            for _ in range(_FILE_BYTES // PIECE):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return _measure(Disk.of_file(path, 16 * PIECE), _FILE_BYTES, threads)
    except OSError as why:
        raise UsageError(
            f"--disk {directory}: cannot be measured ({why.strerror}); give GB/s instead"
        ) from why
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _measure(disk: Disk, size: int, threads: int) -> DiskSpeed:
    """The best of a few ways; then records that are read one by one."""
    piece = min(PIECE, disk.record_bytes)
    ways = [DiskWay(True, piece, 16), DiskWay(True, piece, 32), DiskWay(False, piece, 16)]
    rates = {way: disk.measure(way, size) or 0.0 for way in ways}
    way = max(ways, key=lambda way: rates[way])
    best = rates[way]
    record = disk.record_bytes
    alone = disk.measure(DiskWay(way.direct, piece, -(-record // piece)), size // 3)
    latency = max(0.0, record / alone - record / best) if alone else ASSUMED_LATENCY
    beside = _beside(disk, way, best, size, threads) if threads else APART
    return DiskSpeed(best, latency, beside)


def _beside(disk: Disk, way: DiskWay, alone: float, size: int, threads: int) -> Beside:
    """The disk by one way and products of weights from memory, alone and both at once."""
    isa, over = available_isas()[-1].encode(), threading.Event()

    def read() -> float:
        rates = []
        while not rates or not over.is_set():
            rates.append(disk.measure(way, size) or alone)
        return float(np.mean(rates))

    free = _streamed(isa, "int4", threads, _BESIDE_BYTES, 0.2)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            shared = _streamed(isa, "int4", threads, _BESIDE_BYTES, 0.4)
        finally:
            over.set()
        rate = reading.result()
    return Beside(*(min(1.0, max(0.05, share)) for share in (rate / alone, shared / free)))


def measure(
    threads: int, kinds: Iterable[str], disk: float, source: str, size: int,
    isa: str | None = None,
) -> Speeds:  # fmt: skip
    """This machine's figures for a model of `size` bytes; those of the disk are known already."""
    found = products(isa or available_isas()[-1], kinds, threads, size)
    sources = {"memory": "measured", "disk": source}
    return Speeds(threads, bandwidth(threads, size), disk, found, sources=sources)


def bandwidth(threads: int, size: int) -> float:
    """Bytes a second that threads read together from `size` bytes, which a cache may hold."""
    size = max(threads * _LEAST, min(machine.MEMORY_BYTES, size))
    return machine.read_bandwidth(threads, 0.3, size)
