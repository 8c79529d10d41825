"""The machine's limits as a benchmark keeps them: every measurement, and the latest of a kind."""

import threading
from typing import Any

from colibri import machine
from colibri.amounts import file_size
from colibri.machine import DISK_BYTES, Disk, DiskWay
from colibri.spread import Spread


class Limits:
    """Memory bandwidth and integer products by threads, disk rates by the way of reading.

    `quick` spends a fraction of the time and is good for a look, not for a table.
    """

    def __init__(self, isa: str, disk: Disk | None, quick: bool = False) -> None:
        self.isa = isa
        self._disk = disk
        self._quick = quick
        self._memory: dict[int, list[float]] = {}
        self._dots: dict[int, list[float]] = {}
        self._reads: dict[DiskWay, list[float]] = {}
        self._beside: dict[int, list[float]] = {}
        self._way: DiskWay | None = None
        self.notes: list[str] = []

    def measure_cores(self, threads: int) -> None:
        """Memory bandwidth and dot products of so many threads, once more."""
        seconds, size = 0.5, machine.MEMORY_BYTES
        if self._quick:
            seconds, size = seconds / 5, size // 4
        rate = machine.read_bandwidth(threads, seconds, size)
        self._memory.setdefault(threads, []).append(rate)
        rate = machine.dot_peak(self.isa, threads, seconds)
        self._dots.setdefault(threads, []).append(rate)

    def bandwidth(self, threads: int) -> float:
        """Bytes a second, as measured last."""
        return self._memory[threads][-1]

    def dots(self, threads: int) -> float:
        """Multiply-adds a second, as measured last."""
        return self._dots[threads][-1]

    def measure_disk(self, repeat: int) -> None:
        """Every way of reading, `repeat` times in turn; the best median becomes the way."""
        if self._disk is None:
            return
        stubborn = self._disk.stubborn_bytes()
        if stubborn > 16 << 20:
            self.notes.append(
                f"{file_size(stubborn)} of {self._disk.paths[0].name} cannot be dropped from the "
                "page cache (another process has them mapped?): buffered figures are too high"
            )
        ways = self._disk.ways(self._quick)
        for number in range(repeat):
            for way in ways[:: -1 if number % 2 else 1]:
                rate = self._disk.measure(way, self._sample_bytes)
                if rate is not None:
                    self._reads.setdefault(way, []).append(rate)
        medians = {way: Spread.of(found).median for way, found in self._reads.items()}
        self._way = max(medians, key=lambda way: medians[way], default=None)

    def disk_rate(self) -> float | None:
        """Bytes a second by the best way, measured now; None when no disk was measured."""
        if self._disk is None or self._way is None:
            return None
        return self._disk.measure(self._way, self._sample_bytes)

    def measure_beside(self, threads: int) -> None:
        """The disk by the best way, once more, while so many threads multiply. A virtual machine's
        disk may be worked by the very cores that compute."""
        over = threading.Event()

        def multiply() -> None:
            while not over.is_set():
                machine.dot_peak(self.isa, threads, 0.1)

        busy = threading.Thread(target=multiply)
        busy.start()
        try:
            rate = self.disk_rate()
        finally:
            over.set()
            busy.join()
        if rate is not None:
            self._beside.setdefault(threads, []).append(rate)

    @property
    def _sample_bytes(self) -> int:
        return DISK_BYTES >> (3 if self._quick else 0)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "isa": self.isa,
            "read_bandwidth": _by_threads(self._memory),
            "dot_peak": _by_threads(self._dots),
            "disk_beside_products": _by_threads(self._beside),
            "disk": [
                way.as_dict() | {"best": way == self._way, "per_second": Spread.of(found).as_dict()}
                for way, found in self._reads.items()
            ],
        }


def _by_threads(found: dict[int, list[float]]) -> list[dict[str, Any]]:
    return [
        {"threads": threads, "per_second": Spread.of(values).as_dict()}
        for threads, values in sorted(found.items())
    ]
