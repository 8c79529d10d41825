"""The files of a conversion and the jobs that fill them: what is read, and where it goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from colibri.config import ModelConfig
from colibri.contents import INDEX_FULL
from colibri.convert.work import Extent, Work
from colibri.formats import FLOATS, Format
from colibri.inventory import Entry, expert_shape, records_name
from colibri.layout import (
    Choice,
    ShardPlan,
    matrix_shape,
    piece_rows,
    plan_shards,
    record_layout,
)
from colibri.writer import ShardImage


class Source(Protocol):
    """What FloatSource and StoredSource have in common."""

    config: ModelConfig
    has_mtp: bool
    index_kinds: tuple[int, ...]

    def entry_work(self, entry: Entry, form: Format, first: int, rows: int, search: bool) -> Work:
        """Rows of a tensor outside the routed experts, on their way into `form`."""

    def expert_work(
        self, layer: int, expert: int, projection: str, form: Format, search: bool
    ) -> Work:
        """One matrix of a routed expert, on its way into `form`."""


class Slot(NamedTuple):
    """Bytes of one of a job's outputs."""

    output: int
    offset: int
    nbytes: int


class Part(NamedTuple):
    """One matrix, or some rows of one: its payload and its scales have a slot each."""

    work: Work
    codes: Slot
    scales: Slot | None  # None: floats


@dataclass(frozen=True)
class Job:
    """Pieces of one file that are made together, in memory, and then written."""

    outputs: tuple[tuple[str, int], ...]  # (tensor, piece)
    parts: tuple[Part, ...]

    @property
    def extents(self) -> list[Extent]:
        """Everything the job reads."""
        return [extent for part in self.parts for extent in part.work.extents()]


@dataclass(frozen=True)
class TargetFile:
    """One file to be written: its bytes, and the jobs that fill them."""

    name: str
    image: ShardImage
    jobs: list[Job]


def own_files(source: Source, choice: Choice, search: bool) -> list[TargetFile]:
    """colibri's own layout of a source, in the formats of `choice`."""
    owners = [n for n, kind in enumerate(source.index_kinds) if kind == INDEX_FULL]
    plans = plan_shards(source.config, choice, source.has_mtp, owners)
    return [
        TargetFile(
            plan.name,
            ShardImage(plan.specs, plan.metadata),
            list(_own_jobs(plan, source, choice, search)),
        )
        for plan in plans
    ]


def _own_jobs(plan: ShardPlan, source: Source, choice: Choice, search: bool) -> Iterator[Job]:
    config = source.config
    for layer in plan.expert_layers:
        layout = record_layout(config, choice.record(layer, config))
        for expert in range(config.n_routed_experts):
            parts = []
            for projection, (codes, scales) in layout.offsets.items():
                form = layout.forms[projection]
                work = source.expert_work(layer, expert, projection, form, search)
                rows, cols = expert_shape(config, projection)
                parts.append(_part(work, form, rows, cols, (0, codes), (0, scales)))
            yield Job(((records_name(layer), expert),), tuple(parts))
    for entry in plan.entries:
        yield from entry_jobs(source, entry, choice.of(entry, config), ".scales", search)


def entry_jobs(
    source: Source, entry: Entry, form: Format, suffix: str, search: bool = False
) -> Iterator[Job]:
    """A tensor outside the routed experts, in pieces of rows; scales in the tensor `suffix`."""
    rows, cols = matrix_shape(entry)
    step = piece_rows(cols)
    names = [entry.name] if form.kind in FLOATS else [entry.name, entry.name + suffix]
    for piece, first in enumerate(range(0, rows, step)):
        count = min(step, rows - first)
        work = source.entry_work(entry, form, first, count, search)
        part = _part(work, form, count, cols, (0, 0), (1, 0))
        yield Job(tuple((name, piece) for name in names), (part,))


def expert_job(
    source: Source, layer: int, expert: int, names: Iterable[tuple[str, str, Format]], suffix: str
) -> Job:
    """One expert as tensors of their own: `names` are (projection, tensor, format)."""
    outputs: list[tuple[str, int]] = []
    parts = []
    for projection, name, form in names:
        rows, cols = expert_shape(source.config, projection)
        work = source.expert_work(layer, expert, projection, form, False)
        at = len(outputs)
        parts.append(_part(work, form, rows, cols, (at, 0), (at + 1, 0)))
        outputs += [(name, 0)] if form.kind in FLOATS else [(name, 0), (name + suffix, 0)]
    return Job(tuple(outputs), tuple(parts))


def _part(
    work: Work, form: Format, rows: int, cols: int, codes: tuple[int, int], scales: tuple[int, int]
) -> Part:
    slot = Slot(*codes, rows * form.row_bytes(cols))
    if form.kind in FLOATS:
        return Part(work, slot, None)
    return Part(work, slot, Slot(*scales, rows * form.row_scales(cols) * form.scale_bytes))
