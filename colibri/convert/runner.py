"""A plan carried out: jobs on all cores, bytes synced before they count, whole files renamed."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from colibri.checksum import crc32
from colibri.convert.jobs import Job, TargetFile
from colibri.convert.manifest import Journal
from colibri.convert.plan import Plan
from colibri.convert.shelf import Shelf
from colibri.convert.work import Reader
from colibri.errors import ContainerError
from colibri.state import PARTIAL, sync_directory
from colibri.writer import cannot_write, write_at

UNIT_BYTES = 1 << 30  # of source: at most this much is done again after a crash
Sums = tuple[int, ...]


@dataclass(frozen=True)
class Progress:
    """Where a conversion stands. Bytes are of the source, and count what is safely written."""

    done: int
    total: int
    written: int  # bytes of the target, in this run
    seconds: float  # of this run
    here: int  # source bytes done in this run

    @property
    def rate(self) -> float:
        """Source bytes a second in this run."""
        return self.here / self.seconds if self.seconds else 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds to go at this rate; None before anything is done."""
        return (self.total - self.done) / self.rate if self.here else None


Report = Callable[[Progress], None]


class Runner:
    """Runs a plan's pending jobs. Nothing that was reported done is ever lost or done again.

    A group of jobs counts when its bytes are synced and the journal says so. After that, and not
    before, source shards are released and whole files renamed.
    """

    def __init__(
        self, plan: Plan, work: Path, journal: Journal, shelf: Shelf, threads: int,
        report: Report | None = None, unit_bytes: int = UNIT_BYTES,
    ) -> None:  # fmt: skip
        self.plan, self.journal, self.shelf = plan, journal, shelf
        self.reader = Reader()
        self._threads, self._unit_bytes, self._report = threads, unit_bytes, report
        self._partials = {
            number: Partial(work, plan.request.target, file)
            for number, file in enumerate(plan.files)
            if number not in plan.finished
        }
        pending = plan.pending
        self._left = Counter(plan.jobs[n][0] for n in pending)
        self._uses = plan.uses()
        self._bytes = [sum(e.nbytes for e in job.extents) for _, job in plan.jobs]
        self._done = sum(self._bytes) - sum(self._bytes[n] for n in pending)
        self._here = self._written = 0
        self._begun = time.monotonic()
        self._local = threading.local()

    def run(self) -> None:
        """Run everything. On any error, what is complete is recorded first."""
        self._tell()
        try:
            self._complete()
            with _pool(self._threads, "convert") as pool, _pool(1, "commit") as committer:
                self._run_pending(_Window(self, pool, committer))
        finally:  # the pools have ended: a number closed under a thread may become another file's
            self.reader.close()
            for partial in self._partials.values():
                partial.close()

    def _complete(self) -> None:
        """What a run before this one had all the bytes for, and did not come to."""
        for number in self._partials:
            if not self._left[number]:  # all its jobs were done, but not its renaming
                self._finish(number)
        for shard in {e.shard for _, job in self.plan.jobs for e in job.extents}:
            if not self._uses[shard]:  # nor its release
                self.shelf.release(shard)

    def _run_pending(self, window: _Window) -> None:
        try:
            for number, closes in self._units():
                self._fetch(number, window)
                window.add(number, closes)
            window.drain()
        except BaseException:
            window.abandon()
            raise

    def _units(self) -> Iterator[tuple[int, bool]]:
        """Pending jobs, and whether a group ends with each: by size, or because it completes a file
        or a source shard."""
        files, shards, size = Counter(self._left), Counter(self._uses), 0
        for number in self.plan.pending:
            file, job = self.plan.jobs[number]
            read = {e.shard for e in job.extents}
            files[file] -= 1
            shards.subtract(read)
            size += self._bytes[number]
            closes = size >= self._unit_bytes or not files[file] or any(not shards[s] for s in read)
            if closes:
                size = 0
            yield number, closes

    def _fetch(self, number: int, window: _Window) -> None:
        """Have a job's shards on the disk; if there is no room for them, finish what runs first."""
        for shard in sorted({e.shard for e in self.plan.jobs[number][1].extents}):
            if not self.shelf.is_coming(shard):
                window.drain()
            self.reader.open(shard, self.shelf.path(shard))

    # ---- one job, in a worker -----------------------------------------------------------------

    def work(self, number: int) -> Sums:
        """Make and write a job's pieces; their CRC-32s."""
        file, job = self.plan.jobs[number]
        image = self.plan.files[file].image
        sizes = [image.place(*output)[1] for output in job.outputs]
        views = self._memory(sizes)
        for part in job.parts:
            codes = views[part.codes.output][part.codes.offset :][: part.codes.nbytes]
            scales = memoryview(bytearray())
            if part.scales is not None:
                scales = views[part.scales.output][part.scales.offset :][: part.scales.nbytes]
            try:
                part.work.run(self.reader, codes, scales)
            except ContainerError as why:
                raise ContainerError(
                    f"{self.plan.request.source}: {part.work.name}: {why}"
                ) from why
        _zero_gaps(job, views)
        for output, view in zip(job.outputs, views, strict=True):
            self._partials[file].write(image.place(*output)[0], view)
        return tuple(crc32(view) for view in views)

    def _memory(self, sizes: list[int]) -> list[memoryview]:
        """Memory of this thread for its outputs, used again by its next job."""
        total = sum(sizes)
        held = getattr(self._local, "memory", None)
        if held is None or len(held) < total:
            held = self._local.memory = bytearray(total)
        views, at = [], 0
        for size in sizes:
            views.append(memoryview(held)[at : at + size])
            at += size
        return views

    # ---- a group of jobs, in the committer ------------------------------------------------------

    def commit(self, results: Mapping[int, Sums]) -> None:
        """Make the bytes of these jobs safe, record them, and act on what that completes."""
        touched = {self.plan.jobs[number][0] for number in results}
        for file in sorted(touched):
            self._partials[file].sync()
        self.journal.append(results)
        for number in results:
            file, job = self.plan.jobs[number]
            self._left[file] -= 1
            self._uses.subtract({e.shard for e in job.extents})
            self._done += self._bytes[number]
            self._here += self._bytes[number]
            image = self.plan.files[file].image
            self._written += sum(image.place(*output)[1] for output in job.outputs)
        for file in sorted(touched):
            if not self._left[file]:
                self._finish(file)
        for shard in {e.shard for n in results for e in self.plan.jobs[n][1].extents}:
            if not self._uses[shard]:
                self.reader.close(shard)
                self.shelf.release(shard)
        self._tell()

    def _finish(self, number: int) -> None:
        """Give a whole file its header and its name."""
        sums: dict[str, list[int]] = {}
        file = self.plan.files[number]
        for name, spec in file.image.specs.items():
            sums[name] = [0] * spec.pieces
        for at, (owner, job) in enumerate(self.plan.jobs):
            if owner == number:
                for (name, piece), crc in zip(job.outputs, self.journal.done[at], strict=True):
                    sums[name][piece] = crc
        self._partials[number].finish(file.image.header(sums))

    def _tell(self) -> None:
        if self._report:
            seconds = time.monotonic() - self._begun
            total = sum(self._bytes)
            self._report(Progress(self._done, total, self._written, seconds, self._here))


@contextmanager
def _pool(threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Threads that have ended when the block has, however often Ctrl-C comes meanwhile."""
    pool = ThreadPoolExecutor(threads, name)
    try:
        yield pool
    finally:
        _end(pool)


def _end(pool: ThreadPoolExecutor) -> None:
    try:
        pool.shutdown(cancel_futures=True)
    except KeyboardInterrupt:
        _end(pool)
        raise


class _Window:
    """Jobs in flight, collected in order, and handed to the committer group by group."""

    def __init__(
        self, runner: Runner, pool: ThreadPoolExecutor, committer: ThreadPoolExecutor
    ) -> None:
        self._runner, self._pool, self._committer = runner, pool, committer
        self._flight: deque[tuple[int, Future[Sums], bool]] = deque()
        self._ready: dict[int, Sums] = {}
        self._commit: Future[None] | None = None
        self._most = 2 * runner._threads

    def add(self, number: int, closes: bool) -> None:
        """Start a job; waits while too many are in flight."""
        while len(self._flight) >= self._most:
            self._collect()
        self._flight.append((number, self._pool.submit(self._runner.work, number), closes))

    def drain(self) -> None:
        """Wait until everything that was started is recorded."""
        while self._flight:
            self._collect()
        self._hand_over()
        if self._commit is not None:
            self._commit.result()

    def abandon(self) -> None:
        """After an error: no new jobs; what is complete is recorded if it still can be."""
        for _, future, _ in self._flight:
            future.cancel()
        for number, future, _ in self._flight:
            if not future.cancelled() and future.exception() is None:
                self._ready[number] = future.result()
        self._flight.clear()
        try:
            if self._commit is None or self._commit.exception() is None:
                self._hand_over()
            if self._commit is not None:
                self._commit.exception()
        except ContainerError:
            pass  # the first error is the one to tell

    def _collect(self) -> None:
        number, future, closes = self._flight[0]
        self._ready[number] = future.result()
        self._flight.popleft()
        if closes:
            self._hand_over()

    def _hand_over(self) -> None:
        """Commit what is ready, once the commit before it is through."""
        if self._commit is not None:
            self._commit.result()
        if self._ready:
            self._commit = self._committer.submit(self._runner.commit, dict(self._ready))
            self._ready.clear()


class Partial:
    """One file while it is being filled, under a name that no reader takes for a shard."""

    def __init__(self, work: Path, target: Path, file: TargetFile) -> None:
        self.path = work / (file.name + PARTIAL)
        self._final = target / file.name
        self._size = file.image.size
        self._handle: int | None = None
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def _open(self) -> int:
        with self._lock:
            if self._handle is None:
                self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
                if os.fstat(self._handle).st_size != self._size:
                    os.ftruncate(self._handle, self._size)
            return self._handle

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes; ContainerError with the way on when the disk is full."""
        try:
            handle = self._open()
            with self._turn:  # the kernel has a second writer of a file spin
                write_at(handle, offset, view)
        except OSError as why:
            raise _failed(self.path, why) from why

    def sync(self) -> None:
        """Have everything written so far survive a power cut, the file's name included."""
        try:
            os.fsync(self._open())
            sync_directory(self.path.parent)
        except OSError as why:
            raise _failed(self.path, why) from why

    def finish(self, header: bytes) -> None:
        """Write the header, sync, and rename."""
        self.write(0, memoryview(header))
        self.sync()
        try:
            self.path.replace(self._final)
            sync_directory(self._final.parent)
        except OSError as why:
            raise _failed(self._final, why) from why
        self.close()

    def close(self) -> None:
        """Close the file if it is open."""
        with self._lock:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None


def _failed(path: Path, why: OSError) -> ContainerError:
    if why.errno not in (errno.ENOSPC, errno.EDQUOT):
        return cannot_write(path, why)
    return ContainerError(
        f"{path}: no space is left on the disk. Nothing is lost: free some and run the same "
        "command again"
    )


def _zero_gaps(job: Job, views: list[memoryview]) -> None:
    """The memory was used before: clear what lies between the parts of each output."""
    for number, view in enumerate(views):
        at = 0
        slots = [slot for part in job.parts for slot in (part.codes, part.scales) if slot]
        for slot in sorted(s for s in slots if s.output == number):
            if slot.offset > at:
                view[at : slot.offset] = bytes(slot.offset - at)
            at = max(at, slot.offset + slot.nbytes)
        if at < view.nbytes:
            view[at:] = bytes(view.nbytes - at)
