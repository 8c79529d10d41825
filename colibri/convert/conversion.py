"""Conversions from beginning to end: lock, plan, work, check, and the files beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from colibri.checkpoint import INDEX
from colibri.convert import sides
from colibri.convert.checks import check_finished, require_live_halves
from colibri.convert.hub import clear_leftovers
from colibri.convert.manifest import (
    RECORD,
    Journal,
    WorkDirectory,
    read_manifest,
    record_text,
    write_manifest,
)
from colibri.convert.plan import Plan, Request
from colibri.convert.planner import make_plan, progress
from colibri.convert.runner import UNIT_BYTES, Report, Runner
from colibri.convert.shelf import Directory, Shelf, Stream
from colibri.errors import UsageError
from colibri.layout import Formats
from colibri.memory import physical_cores
from colibri.writer import write_file


def convert_directory(
    source: Path | str,
    target: Path | str,
    formats: Formats | None = None,
    search: bool = True,
    replace: bool = False,
    threads: int | None = None,
) -> list[str]:
    """Convert `source` (a directory or hf://owner/name) to a container in `target`.

    Floats are encoded in `formats` (`search`: with the scale of least squared error); containers
    of the public engine keep their codes. Continues what an interrupted run with the same
    parameters has done; `replace` starts over. Returns sentences of warning.
    """
    request = Request(str(source), Path(target), formats, search, replace=replace)
    return execute(make_plan(request), threads).warnings


def repack_directory(source: Path | str, target: Path | str, layout: str) -> list[str]:
    """Write a quantised container in another layout, `colibri` or `public`, codes unchanged."""
    request = Request(str(source), Path(target), layout=layout)
    return execute(make_plan(request)).warnings


@dataclass(frozen=True)
class Outcome:
    """A finished conversion: what it counted, and what a user should know."""

    summary: str
    warnings: list[str]


def execute(
    plan: Plan,
    threads: int | None = None,
    report: Report | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> Outcome:
    """Carry out a plan. UsageError when there is no room or another converter is at it."""
    request = plan.request
    plan.require_room()
    require_live_halves(plan)
    work = WorkDirectory(request.target)
    try:
        _require_as_planned(plan, work)
        _begin(plan, work)
        sides.write(plan.sides, request.target)
        journal, shelf = Journal(work.journal), _shelf(plan, work)
        try:
            Runner(
                plan, work.path, journal, shelf, threads or physical_cores(), report, unit_bytes
            ).run()
        finally:
            shelf.close()
            journal.close()
        write_file(request.target / INDEX, plan.index)
        summary, warnings = check_finished(plan)
        write_file(request.target / RECORD, record_text(plan.manifest))
        work.remove()
    finally:
        work.unlock()
    return Outcome(summary, [*plan.warnings, *warnings])


def _require_as_planned(plan: Plan, work: WorkDirectory) -> None:
    """UsageError when another run has changed the target since it was planned, before the lock."""
    if plan.request.replace:
        return  # whatever is there goes
    same = False
    try:
        same = _is_as_planned(plan, work)
    finally:
        if not same and not work.manifest.exists():
            work.remove()  # just made: with it a finished directory would not be opened
    if not same:
        raise UsageError(
            f"{plan.request.target}: another run has worked here since this was planned; "
            "run it again"
        )


def _is_as_planned(plan: Plan, work: WorkDirectory) -> bool:
    held = read_manifest(work.manifest)
    if held is not None and not held.is_same(plan.manifest):
        return False
    now = progress(plan.request, plan.manifest, plan.files, plan.jobs)
    return now == (plan.finished, plan.done)


def _begin(plan: Plan, work: WorkDirectory) -> None:
    """Clear what must not stay and write the manifest, unless this continues an earlier run."""
    target = plan.request.target
    if plan.request.replace:
        work.clear()
        for path in (*target.glob("*.safetensors"), target / INDEX, target / RECORD):
            path.unlink(missing_ok=True)
    if not work.manifest.exists():
        work.clear()
        write_manifest(work.manifest, plan.manifest)


def _shelf(plan: Plan, work: WorkDirectory) -> Shelf:
    if plan.hub is None:
        return Directory(plan.source.directory, plan.manifest.files, plan.request.delete_source)
    hub, directory = plan.hub, work.path / "source"
    directory.mkdir(exist_ok=True)
    clear_leftovers(directory)
    files = plan.manifest.files
    wanted = sorted(plan.uses())
    held = {}
    for number, file in enumerate(files):
        path = directory / file.name
        if path.exists() and number in wanted:
            held[number] = path
        else:
            path.unlink(missing_ok=True)
    return Stream(wanted, lambda shard: hub.fetch(files[shard].name, directory), held)
