"""How experts are best read: measured once per container and disk, and remembered."""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from colibri.container import Container
from colibri.errors import ColibriError, StateError
from colibri.machine import PIECE, Disk, DiskWay, record_bytes
from colibri.pagecache import evict
from colibri.state import State, read_document, write_document

FORMAT = "colibri-reading-1"
_SIZE = 64 << 20  # bytes read by each way: a fraction of a second, a second on a slow disk
_DEPTH = 6  # reads in flight: CLB_READS of csrc/residency.h
_CLEARLY = 1.2  # another way must be so much faster: direct reads do not fill the page cache
_POPULATE_READ = 22  # madvise: Linux 5.14 and later


def choose(container: Container, state: State, measure: "Measure | None" = None) -> str:
    """direct, buffered or mmap: the fastest for this container on this disk, direct when close."""
    rates = remembered(container, state)
    if rates is None:
        rates = (measure or measured)(container)
        path = _place(container, state)
        if path is not None:
            document = {"format": FORMAT, "rates": rates}
            state.keep("how this disk is best read", lambda: write_document(path, document))
    if container.mirrors:
        rates = {mode: rate for mode, rate in rates.items() if mode != "mmap"}  # reads one drive
    best = max(rates, key=rates.__getitem__, default="direct")
    is_close = rates.get("direct", 0.0) * _CLEARLY >= rates.get(best, 0.0)
    return "direct" if is_close else best


Measure = Callable[[Container], dict[str, float]]


def measured(container: Container) -> dict[str, float]:
    """Bytes a second by mode, cold, of two looks; a mode that this disk refuses is left out."""
    disk = Disk.of_container(container, record_bytes(container), os.getpid(), mirrored=False)
    return settled([_look(disk) for _ in range(2)])


def settled(looks: Sequence[dict[str, float]]) -> dict[str, float]:
    """The better rate of direct reads and the worse one of others: memory that is touched for the
    first time can hold up one look, and what is remembered should not rest on that."""
    modes = set.intersection(*map(set, looks))
    best = {"direct": max}
    return {mode: best.get(mode, min)(look[mode] for look in looks) for mode in sorted(modes)}


def _look(disk: Disk) -> dict[str, float]:
    rates: dict[str, float] = {}
    for mode in ("buffered", "direct"):
        piece = min(PIECE, disk.record_bytes)
        try:
            rate = disk.measure(DiskWay(mode == "direct", piece, _DEPTH), _SIZE)
        except ColibriError:
            continue
        if rate:
            rates[mode] = rate
    rate = mapped_rate(disk.paths[0], disk.places(_SIZE), disk.record_bytes)
    return rates | ({"mmap": rate} if rate else {})


def mapped_rate(path: Path, places: list[int], size: int) -> float | None:
    """Bytes a second of records that are mapped: asked for all at once, then waited for."""
    evict([path])
    begin = time.perf_counter()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            for place in places:
                pages.madvise(mmap.MADV_WILLNEED, place, size)
            for place in places:
                pages.madvise(_POPULATE_READ, place, size)
    except (OSError, ValueError, AttributeError):
        return None
    return len(places) * size / (time.perf_counter() - begin)


# ---- remembered ---------------------------------------------------------------------------------


def remembered(container: Container, state: State) -> dict[str, float] | None:
    """The rates measured before on this disk; None when there are none to be trusted."""
    path = _place(container, state)
    try:
        raw = read_document(path) if path else None
        if raw is None or raw.get("format") != FORMAT:
            return None
        return {str(mode): float(rate) for mode, rate in raw["rates"].items()} or None
    except (StateError, KeyError, TypeError, ValueError, AttributeError):
        return None  # it only ever saves a second


def _place(container: Container, state: State) -> Path | None:
    """By the container's bytes and the disk they lie on: a copy elsewhere is measured again."""
    if state.root is None:
        return None
    disk = container.shards[-1].path.stat().st_dev
    return state.place("reading", f"{container.fingerprint}-{disk:x}.json")
