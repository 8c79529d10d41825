"""`colibri bench`: the options, and the lists they are made of."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri.cli import Command, settings_of
from colibri.errors import UsageError
from colibri.knobs import BY_NAME
from colibri.paths import require_writable, write

if TYPE_CHECKING:
    from colibri.bench import Arm, Request

_QUICK = {"repeat": 2, "tokens": 8, "prompt": 64}


class Items(click.ParamType):
    """Values with commas between them."""

    def __init__(self, kind: click.ParamType) -> None:
        self.kind = kind
        self.name = kind.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """As --help shows it."""
        words = getattr(self.kind, "choices", None)
        return ",".join(words) if words else "N,N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """A tuple without repetitions, in the order given."""
        if isinstance(value, tuple):
            return value
        found = [self.kind.convert(part.strip(), param, ctx) for part in value.split(",")]
        return tuple(dict.fromkeys(found))


class Size(click.ParamType):
    """An amount of memory, as --ram takes it elsewhere."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        kind = BY_NAME["ram"].kind
        try:
            return int(kind.parse(value))
        except ValueError:
            self.fail(f"{value!r}; expected {kind.expects}", param, ctx)


IO_WORDS = BY_NAME["io"].kind.words  # auto first
PILOT_WORDS = ("router", "off", "random", "oracle")
SECTION_WORDS = ("machine", "decode", "prefill", "rows", "stream")
_COUNT = click.IntRange(min=1)


@click.command("bench", cls=Command)
@click.argument("model", required=False)
@click.option(
    "--only", type=Items(click.Choice(SECTION_WORDS)), help="What to measure. [default: all]"
)
@click.option("--threads", type=Items(_COUNT), help="[default: 1 and every core]")
@click.option("--repeat", type=_COUNT, metavar="N", help="Rounds. [default: 5]")
@click.option(
    "--tokens",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens decoded and timed. [default: 48]",
)
@click.option("--prompt", type=_COUNT, metavar="N", help="Tokens of the prefill. [default: 512]")
@click.option(
    "--chunk", type=_COUNT, metavar="N", help="Tokens that the prefill runs at once. [default: all]"
)
@click.option(
    "--cached-io",
    type=click.Choice(IO_WORDS[1:]),
    default="mmap",
    show_default=True,
    help="Where experts live when all are in memory.",
)
@click.option(
    "--io",
    type=Items(click.Choice(IO_WORDS)),
    default="auto",
    show_default=True,
    help="Ways to stream experts.",
)
@click.option("--slots", type=Items(_COUNT), help="Stream with so many expert slots a layer.")
@click.option(
    "--ram",
    type=Items(Size()),
    metavar="GiB,GiB",
    help="Stream within so much memory. [default: what is free, cgroup included]",
)
@click.option("--mirror", metavar="DIRS", help="Copies on other drives, as for colibri run.")
@click.option(
    "--pilot",
    type=Items(click.Choice(PILOT_WORDS)),
    default="router",
    show_default=True,
    help="Experts read ahead while streaming: as run does, none, random ones, or the true ones.",
)
@click.option(
    "--ids",
    type=click.Choice(("random", "greedy")),
    default="random",
    show_default=True,
    help="Decode random ids, or what the model itself would say.",
)
@click.option("--busy", is_flag=True, help="Also decode beside a process that spins on one core.")
@click.option("--isa", type=click.Choice(BY_NAME["isa"].kind.words), help="[default: the best]")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", default=1,
              help="Of the random ids. [default: 1]")  # fmt: skip
@click.option("--quick", is_flag=True, help="A look in a minute; no figures for a table.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep which experts the streamed tokens asked for (tools/replay_trace.py).",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep every measurement.",
)
def command(
    model: str | None,
    mirror: str | None,
    trace: Path | None,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Measure this machine, and the engine against it.

    Memory, integer products and the disk first; then tokens a second with the model in memory and
    streaming it, each beside its limit and with a hash of what came out. MODEL is a directory;
    tools/make_bench_model.py writes one to measure. Progress goes to stderr.
    """
    from colibri.bench import Bench
    from colibri.bench_report import render
    from colibri.container import Container
    from colibri.engine import model_directory
    from colibri.mirror import directories

    settings = settings_of({"mirror": mirror}, model)
    container = Container.open(model_directory(settings), directories(settings.mirror))
    request = replace(request_of(options), trace=trace is not None)
    if trace and "stream" not in request.sections:
        raise UsageError("--trace keeps streamed tokens; add stream to --only")
    for path in filter(None, (json_file, trace)):
        require_writable(path)  # before the rounds, which may take an hour
    bench = Bench(container, request, lambda text: click.echo(text, err=True))
    report = bench.run()
    click.echo(render(report))
    if json_file:
        write(json_file, json.dumps(report, indent=1) + "\n")
    if trace and bench.trace:
        bench.trace.save(trace)


def request_of(options: dict[str, Any]) -> "Request":
    """What the options ask for."""
    from colibri.bench import CACHED, SECTIONS, Request
    from colibri.memory import physical_cores

    given = {name: options[name] for name in _QUICK if options[name]}
    sizes = (_QUICK if options["quick"] else {}) | given
    sections = options["only"] or SECTIONS
    if options["busy"] and not CACHED & set(sections):
        raise UsageError("--busy disturbs a cached run; add decode to --only")
    return Request(
        threads=options["threads"] or tuple(dict.fromkeys((1, physical_cores()))),
        sections=sections,
        arms=arms_of(options["io"], options["slots"], options["ram"], options["pilot"]),
        chunk=options["chunk"],
        cached_io=options["cached_io"],
        isa=options["isa"],
        greedy=options["ids"] == "greedy",
        busy=options["busy"],
        quick=options["quick"],
        seed=options["seed"],
        **sizes,
    )


def arms_of(
    modes: Sequence[str],
    slots: Sequence[int] | None,
    ram: Sequence[int] | None,
    pilots: Sequence[str] = ("router",),
) -> "tuple[Arm, ...]":
    """Every mode with every number of slots, or within every amount of memory, by every pilot."""
    from colibri.bench import Arm

    if slots and ram:
        raise UsageError("--slots and --ram both say how many experts stay; give one of them")
    if slots and "auto" in modes:
        raise UsageError("--slots needs --io buffered or direct: auto finds the slots itself")
    if slots:
        several = product(slots, modes, pilots)
        arms = [Arm(io) if io == "mmap" else Arm(io, n, pilot=by) for n, io, by in several]
    else:
        several = product(ram or (None,), modes, pilots)
        arms = [Arm(io, ram=size, pilot=by) for size, io, by in several]
    return tuple(dict.fromkeys(arms))
