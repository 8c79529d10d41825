"""A conversion planned to the byte: what is read and written, what is done, what must be free."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from colibri.amounts import file_size
from colibri.checkpoint import INDEX, WORK
from colibri.convert import sides as side_files
from colibri.convert.hub import Hub
from colibri.convert.jobs import Job, TargetFile
from colibri.convert.manifest import RECORD, Manifest, record_text
from colibri.convert.shelf import AT_ONCE
from colibri.convert.source import FloatSource, StoredSource
from colibri.errors import UsageError
from colibri.layout import Formats


@dataclass(frozen=True)
class Request:
    """What is asked for. `formats` None: the defaults for floats, codes as they are for containers.

    `layout` is the target's: colibri or public.
    """

    source: str
    target: Path
    formats: Formats | None = None
    search: bool = True
    layout: str = "colibri"
    delete_source: bool = False
    replace: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything that will be done, and what is done already.

    `jobs` are (number of the file, job) in the order they are run; `done` has the checksums of
    those whose bytes are safe; `finished` are files that lie under their final name.
    """

    request: Request
    manifest: Manifest
    source: FloatSource | StoredSource
    files: tuple[TargetFile, ...]
    jobs: tuple[tuple[int, Job], ...]
    done: Mapping[int, tuple[int, ...]]
    finished: frozenset[int]
    sides: side_files.Sides
    warnings: tuple[str, ...]
    hub: Hub | None

    # ---- what is left to do -------------------------------------------------------------------

    @property
    def pending(self) -> list[int]:
        """Numbers of the jobs to run."""
        return [
            number
            for number, (file, _) in enumerate(self.jobs)
            if file not in self.finished and number not in self.done
        ]

    @property
    def done_bytes(self) -> int:
        """Source bytes that need not be read any more."""
        pending = set(self.pending)
        jobs = (job for number, (_, job) in enumerate(self.jobs) if number not in pending)
        return sum(extent.nbytes for job in jobs for extent in job.extents)

    @property
    def is_begun(self) -> bool:
        """Whether something of it has been done before."""
        return bool(self.done or self.finished)

    # ---- bytes --------------------------------------------------------------------------------

    @property
    def source_bytes(self) -> int:
        """Bytes of the source shards."""
        return sum(file.size for file in self.manifest.files)

    @property
    def index(self) -> bytes:
        """model.safetensors.index.json."""
        weights = {name: f.name for f in self.files for name in f.image.specs}
        size = sum(spec.nbytes for f in self.files for spec in f.image.specs.values())
        fields = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weights.items()))}
        return json.dumps(fields, indent=0).encode()

    @property
    def side_bytes(self) -> int:
        """Bytes of everything that is no shard."""
        written = side_files.written(self.sides).values()
        return sum(map(len, (*written, self.index, record_text(self.manifest))))

    @property
    def final_bytes(self) -> int:
        """Bytes of the finished directory, exactly."""
        return sum(file.image.size for file in self.files) + self.side_bytes

    def parts(self) -> dict[str, int]:
        """The finished directory's bytes by part; they add up to final_bytes."""
        parts_of = {entry.name: entry.part for entry in self.source.entries}
        mtp = f"model.layers.{self.source.config.mtp_layer}."
        sizes: Counter[str] = Counter()
        for file in self.files:
            for name, spec in file.image.specs.items():
                stem = name.removesuffix(".scales").removesuffix(".qs")
                part = "mtp" if name.startswith(mtp) else parts_of.get(stem, "experts")
                sizes[part] += spec.nbytes
        sizes["headers"] = self._headers
        sizes["other files"] = self.side_bytes
        return dict(sizes)

    def needed(self) -> int:
        """The most bytes that this still takes on the target's disk at any moment."""
        sizes = [file.size for file in self.manifest.files]
        uses = self.uses()
        held: dict[int, int] = {}
        peak = now = 0
        for number in self.pending:
            file, job = self.jobs[number]
            for shard in sorted({e.shard for e in job.extents}):
                if self.hub and shard not in held:
                    held[shard] = sizes[shard]
            now += self._output_bytes(file, job)
            coming = max(sizes, default=0) if self.hub and len(held) < AT_ONCE else 0
            peak = max(peak, now + sum(held.values()) + coming)
            for shard in {e.shard for e in job.extents}:
                uses[shard] -= 1
                if not uses[shard]:
                    held.pop(shard, None)
                    now -= sizes[shard] if self._frees_room else 0
        blocks = min(peak, self.final_bytes // 1000)  # files end in the middle of one
        return peak + self._headers + self.side_bytes + blocks

    def needed_free(self) -> int:
        """Bytes that must be free for `needed`, beside those that are held for it already."""
        return max(0, self.needed() - self._room_held())

    def _room_held(self) -> int:
        """Bytes on the target's disk that need not be free: half-written pieces, fetched shards,
        and with `replace` what goes first. What is done counts neither here nor as needed."""
        target, pending = self.request.target, set(self.pending)
        names = (INDEX, RECORD, *side_files.written(self.sides))
        paths = [*target.glob("*.safetensors"), *(target / WORK).rglob("*")]
        held = sum(map(_disk_bytes, (*paths, *(target / name for name in names))))
        done = (job for number, job in enumerate(self.jobs) if number not in pending)
        return max(0, held - sum(self._output_bytes(*job) for job in done))

    def _output_bytes(self, file: int, job: Job) -> int:
        return sum(self.files[file].image.place(*output)[1] for output in job.outputs)

    def uses(self) -> Counter[int]:
        """How many pending jobs read each source shard."""
        return Counter(
            shard for n in self.pending for shard in {e.shard for e in self.jobs[n][1].extents}
        )

    @property
    def _headers(self) -> int:
        images = [file.image for file in self.files]
        return sum(i.size - sum(spec.nbytes for spec in i.specs.values()) for i in images)

    @property
    def _frees_room(self) -> bool:
        """Whether deleting source shards makes room for the target."""
        request = self.request
        if self.hub or not request.delete_source:
            return False
        return Path(request.source).stat().st_dev == existing(request.target).stat().st_dev

    def require_room(self) -> None:
        """UsageError naming the shortfall when the target's disk is too small."""
        free, needed = free_bytes(self.request.target), self.needed_free()
        if needed > free:
            remedy = "free some, or give a directory on another disk"
            floats = isinstance(self.source, FloatSource)  # repack frees nothing
            if floats and not (self.hub or self.request.delete_source):
                remedy += "; --delete-source frees each source shard once it is safely written"
            raise UsageError(
                f"{self.request.target}: {file_size(needed)} are needed and {file_size(free)} are "
                f"free: {file_size(needed - free)} short; {remedy}"
            )


def free_bytes(path: Path) -> int:
    """What an ordinary user can still write on a path's disk."""
    disk = os.statvfs(existing(path))
    return disk.f_bavail * disk.f_frsize


def _disk_bytes(path: Path) -> int:
    """What deleting a file would free: holes take nothing, and another name keeps everything."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_blocks * 512 if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 else 0


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
