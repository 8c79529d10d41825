"""`colibri convert`, `repack` and `verify`: the options, and what is shown meanwhile."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri.amounts import duration, file_size, plural
from colibri.cli import Command, settings_of
from colibri.errors import ContainerError, Exit, UsageError
from colibri.knobs import Settings
from colibri.terminal import Terminal, is_terminal

if TYPE_CHECKING:
    from colibri.convert.plan import Plan, Request
    from colibri.convert.runner import Progress
    from colibri.layout import Formats
    from colibri.score import Score

_LOG_EVERY = 30.0  # seconds between progress lines where nobody watches
_FORMATS = ("experts", "dense", "mtp", "table")
EPILOG = """\b
Formats: int8, int4-g64 (groups of 64 inputs share a scale; g32, g128 ...), int3-g64, int2,
bf16, f16, f32; -f32 behind one makes its scales f32 instead of f16.
Exit status: 0 done, 1 error (what is done is kept), 2 wrong usage, 130 interrupted.
"""


class _NonEmptyPath(click.Path):
    """A path; an empty one, as of an unset variable, is not taken for the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click has it."""
        if not str(value):
            self.fail("it is empty; give a directory, or . for the one you are in", param, ctx)
        return super().convert(value, param, ctx)


_SOURCE, _PATH = _NonEmptyPath(), _NonEmptyPath(path_type=Path)
_THREADS = click.IntRange(1, 1024)


@click.command("convert", cls=Command, epilog=EPILOG)
@click.argument("source", type=_SOURCE)
@click.argument("target", type=_PATH)
@click.option("--experts", metavar="FORMAT", help="Routed experts. [default: int4-g64]")
@click.option("--dense", metavar="FORMAT", help="Attention, shared experts. [default: int8]")
@click.option("--mtp", metavar="FORMAT", help="The whole MTP layer. [default: int8]")
@click.option("--table", metavar="FORMAT", help="Embedding and head. [default: int8]")
@click.option(
    "--search/--absmax", default=True, show_default=True,
    help="Look for the scale of least squared error, or take the largest weight's.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the plan, to the byte, and write nothing.")
@click.option(
    "--keep-source/--delete-source", default=True, show_default=True,
    help="Delete each source shard once everything from it is safely written.",
)  # fmt: skip
@click.option("--replace", is_flag=True, help="Start over where something else was converted.")
@click.option("--threads", type=_THREADS, metavar="N", help="[default: physical cores]")
@click.option(
    "--check", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
    help="Score this text before and after: what quantisation costs. For small models.",
)  # fmt: skip
def convert(
    source: str, target: Path, search: bool, dry_run: bool, keep_source: bool, replace: bool,
    threads: int | None, check: Path | None, **formats: str | None,
) -> int:  # fmt: skip
    """Convert a checkpoint to colibri's own format.

    SOURCE is a directory as Hugging Face has it (BF16, F16, F32, FP8, NVFP4 or packed
    integers), a container of the public engine (repacked, its numbers unchanged), or
    hf://owner/name[@revision]. TARGET is a directory. Interrupted, even by a power cut, it
    continues when run again.
    """
    from colibri.convert.plan import Request

    request = Request(
        source, target, _formats(formats), search,
        delete_source=not keep_source, replace=replace,
    )  # fmt: skip
    return _run(request, dry_run, threads, check)


@click.command(
    "repack", cls=Command,
    short_help="Write a container in another layout, its numbers unchanged.",
)  # fmt: skip
@click.argument("source", type=_SOURCE)
@click.argument("target", type=_PATH)
@click.option(
    "--to", "layout", type=click.Choice(("colibri", "public")), required=True,
    help="Layout to write: colibri's own, or the public engine's.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the plan, to the byte, and write nothing.")
@click.option("--replace", is_flag=True, help="Start over where something else was converted.")
@click.option("--threads", type=_THREADS, metavar="N", help="[default: physical cores]")
def repack(
    source: str, target: Path, layout: str, dry_run: bool, replace: bool, threads: int | None
) -> int:
    """Write a quantised container in another layout, its numbers unchanged.

    There and back gives the same tensors, byte for byte. SOURCE may be hf://owner/name[@revision].
    """
    from colibri.convert.plan import Request

    request = Request(source, target, layout=layout, replace=replace)
    return _run(request, dry_run, threads, None)


@click.command("verify", cls=Command, short_help="Say whether a model directory is whole.")
@click.argument("directory", type=_PATH)
@click.option("--deep", is_flag=True, help="Read every byte and compare the checksums.")
@click.option("--mirror", metavar="DIRS", help="Look at these copies as well, as for colibri run.")
@click.option("--threads", type=_THREADS, metavar="N", help="[default: physical cores]")
def verify(directory: Path, deep: bool, mirror: str | None, threads: int | None) -> int:
    """Say whether a model directory is whole, and if not, which file to get again.

    Headers, sizes, gaps in the numbering and counts against config.json take a second; --deep
    reads everything. Exit status 1 when something is wrong.
    """
    from colibri.memory import physical_cores
    from colibri.mirror import directories
    from colibri.verify import verify as check

    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory")
    terminal = _terminal()
    meter = _Meter(terminal, "reading")
    mirrors = directories(mirror)
    verdict = check(directory, deep, threads or physical_cores(), meter.bytes, mirrors)
    terminal.clear()
    for sentence in verdict.facts:
        terminal.write(f"{sentence}\n")
    for sentence in verdict.warnings:
        terminal.warning(sentence)
    for sentence in verdict.faults:
        terminal.warn(f"colibri: fault: {sentence}")
    if verdict.is_whole:
        terminal.write(f"{verdict.conclusion}\n")
        return Exit.OK
    return Exit.ERROR


# ---- converting ---------------------------------------------------------------------------------


def _formats(given: dict[str, str | None]) -> Formats | None:
    """The formats that were named, the others by default; None when none was."""
    from colibri.formats import Format
    from colibri.layout import Formats

    named = {name: Format.parse(text) for name, text in given.items() if text is not None}
    return Formats(**named) if named else None


def _run(request: Request, dry_run: bool, threads: int | None, check: Path | None) -> int:
    from colibri.convert.hub import Unfetched
    from colibri.convert.manifest import has_begun

    try:
        return _carry_out(request, dry_run, threads, check)
    except Unfetched as why:
        if dry_run or request.replace or not has_begun(request.target):
            raise  # nothing is done, or the same command would do it again
        raise ContainerError(f"{why}: what is done is kept") from why


def _carry_out(request: Request, dry_run: bool, threads: int | None, check: Path | None) -> int:
    from colibri.convert.conversion import execute
    from colibri.convert.planner import make_plan

    terminal = _terminal()
    plan = make_plan(request)
    if dry_run:
        terminal.write(plan_text(plan) + "\n")
        for sentence in plan.warnings:
            terminal.warning(sentence)
        plan.require_room()
        return Exit.OK
    terminal.note(plan_text(plan))
    before = None if check is None else _score_source(request, check, terminal)
    meter = _Meter(terminal, "converting")
    try:
        outcome = execute(plan, threads, meter.progress)
    except KeyboardInterrupt:
        terminal.clear()
        terminal.warn("colibri: what is done is kept; the same command continues")
        raise
    finally:
        terminal.clear()
    for sentence in outcome.warnings:
        terminal.warning(sentence)
    terminal.write(f"{request.target}: {file_size(plan.final_bytes)}, {outcome.summary}\n")
    if check is not None and before is not None:
        from colibri.score_cli import score_file

        after = score_file(_settings(request.target), check, None, terminal)
        terminal.clear()
        terminal.write(comparison(before, after) + "\n")
    return Exit.OK


def plan_text(plan: Plan) -> str:
    """What will be read and written, by part, and what is free."""
    from colibri.convert.plan import free_bytes

    read = f"{plural(len(plan.manifest.files), 'file')}, {file_size(plan.source_bytes)}"
    lines = [f"{plan.request.source}: {read}"]
    if plan.hub is None:
        lines[0] += f" ({file_size(free_bytes(plan.source.directory))} free there)"
    shown = {k: v for k, v in plan.manifest.parameters.items() if k.startswith("--")}
    if shown:
        lines.append("  " + " ".join(f"{name} {value}" for name, value in shown.items()))
    lines.append(
        f"{plan.request.target}: {plural(len(plan.files), 'file')}, {plan.final_bytes} bytes"
    )
    for part, nbytes in plan.parts().items():
        lines.append(f"  {part:<14} {nbytes:>16}")
    lines.append(f"  {'in all':<14} {plan.final_bytes:>16}  {file_size(plan.final_bytes)}")
    free, needed = free_bytes(plan.request.target), plan.needed_free()
    lines.append(f"  needed now {file_size(needed)}, free {file_size(free)}")
    if plan.final_bytes > plan.source_bytes:
        lines.append("  the result is larger than the source")
    if plan.is_begun:
        done = f"continues: {file_size(plan.done_bytes)} of the source are done"
        lines.append(f"  {done if plan.pending else 'is complete already'}")
    return "\n".join(lines)


class _Meter:
    """Progress: redrawn where a person watches, else a line now and then."""

    def __init__(self, terminal: Terminal, verb: str) -> None:
        self._terminal, self._verb = terminal, verb
        self._next = time.monotonic() + _LOG_EVERY

    def progress(self, at: Progress) -> None:
        """Of a conversion."""
        rate = f"{file_size(at.rate)}/s" if at.here else ""
        left = "" if at.remaining is None else f", {duration(at.remaining)} to go"
        self._show(at.done, at.total, f"{rate}{left}")

    def bytes(self, done: int, total: int) -> None:
        """Of reading."""
        self._show(done, total, "")

    def _show(self, done: int, total: int, more: str) -> None:
        unit = f"MB {more}".rstrip()
        what = f"{self._verb} {100 * done // total if total else 100}%"
        self._terminal.progress(what, done // 1_000_000, total // 1_000_000, unit)
        if time.monotonic() >= self._next and not is_terminal(self._terminal.err):
            self._terminal.note(f"{what} {done // 1_000_000}/{total // 1_000_000} {unit}")
            self._next = time.monotonic() + _LOG_EVERY


# ---- what it costs ------------------------------------------------------------------------------


def _settings(directory: Path) -> Settings:
    """To score a model: no drafting, the rest by default."""
    return settings_of({"draft": "0"}, str(directory))


def _score_source(request: Request, text: Path, terminal: Terminal) -> Score:
    """Score a local source before it is converted; codes are written out as f32 for that."""
    from colibri.convert import Formats, convert_directory
    from colibri.convert.hub import PREFIX
    from colibri.convert.plan import existing
    from colibri.convert.planner import open_contents
    from colibri.convert.source import FloatSource
    from colibri.formats import Format, Kind
    from colibri.score_cli import score_file

    if request.source.startswith(PREFIX):
        raise UsageError("--check scores the source too, so it needs one on this machine")
    source = Path(request.source)
    if not isinstance(open_contents(source), FloatSource):
        return score_file(_settings(source), text, None, terminal)
    beside = existing(request.target.absolute().parent)
    with tempfile.TemporaryDirectory(dir=beside) as directory:
        floats = Format(Kind.F32)
        convert_directory(source, Path(directory) / "f32", Formats(*[floats] * 4))
        return score_file(_settings(Path(directory) / "f32"), text, None, terminal)


def comparison(before: Score, after: Score) -> str:
    """What quantisation costs, as a table."""
    rows: list[tuple[str, Callable[[Score], float]]] = [
        ("nats per token", lambda s: s.per_token),
        ("nats per byte", lambda s: s.per_byte),
        ("perplexity", lambda s: s.perplexity),
    ]
    lines = [f"{'':<16}{'source':>12}{'container':>12}{'difference':>12}"]
    for name, of in rows:
        a, b = of(before), of(after)
        lines.append(f"{name:<16}{a:>12.5f}{b:>12.5f}{b - a:>+12.5f}")
    return "\n".join(lines)


def _terminal() -> Terminal:
    return Terminal.of(settings_of({}).screen)
