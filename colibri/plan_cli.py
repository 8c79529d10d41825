"""`colibri plan`: the options, and what is measured before the forecast."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri import knobs
from colibri.cli import Command, knob_options, settings_of
from colibri.errors import UsageError
from colibri.knobs import Settings
from colibri.paths import expanded
from colibri.terminal import Terminal

if TYPE_CHECKING:
    from colibri.container import Container
    from colibri.locality import Report
    from colibri.probe import DiskSpeed, Speeds
    from colibri.shapes import Shape

_FORMATS = {"experts": "int4-g64", "dense": "int8"}  # that --shape assumes


@click.command("plan", cls=Command)
@click.argument("model", required=False)
@click.option(
    "--shape", metavar="NAME|FILE",
    help="Plan for a model that is not here: glm-5, glm-5.1, glm-5.2, glm-5.3, or a config.json.",
)  # fmt: skip
@click.option("--experts", metavar="FORMAT",
              help="With --shape: of the experts. [default: int4-g64]")  # fmt: skip
@click.option("--dense", metavar="FORMAT",
              help="With --shape: of all else. [default: int8]")  # fmt: skip
@click.option(
    "--disk", metavar="GB/S|DIR",
    help="What the disk reads (10^9 bytes a second), or a directory on it to measure with a file "
    "of 256 MiB. [default: measured on MODEL; with --shape 3 is assumed]",
)  # fmt: skip
@click.option(
    "--memory", metavar="GB/S", type=float,
    help="What the memory reads, of another machine than this. [default: measured here]",
)  # fmt: skip
@click.option(
    "--trace", metavar="FILE", type=click.Path(path_type=Path),
    help="Hit rates from a recorded trace (colibri score --trace) instead of published ones.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@knob_options(knobs.MACHINE, without=("warm",))
def command(model: str | None, as_json: bool, **values: Any) -> int:
    """Tell what speed to expect, and what limits it.

    From the model's headers, the memory it may use and a few seconds of measuring this machine.
    MODEL as for `colibri run`; with --shape before anything is downloaded. Nothing is loaded.
    """
    empty = next((name for name in ("shape", "disk") if values[name] == ""), None)
    if empty:
        raise UsageError(f"--{empty} is empty (a variable not set?); give a value, or leave it out")
    if model and values["shape"]:
        raise UsageError("MODEL and --shape both name a model; give one of them")
    given = next((name for name in _FORMATS if values[name] is not None), None)
    if given and not values["shape"]:
        raise UsageError(
            f"--{given} is for a model that is not here yet, by --shape; one that is has its "
            f"formats already: leave out --{given}"
        )
    if values["memory"] is not None:
        _require_range("memory", values["memory"], 0.1, 100_000)
    settings = settings_of(values, model)
    from colibri.plan_report import render

    terminal = Terminal.of(settings.screen)
    tree = plan_tree(settings, values, partial(terminal.progress, "replaying the trace"))
    text = json.dumps(tree, indent=1, allow_nan=False) if as_json else render(tree)
    terminal.clear()
    terminal.write(text + "\n")
    return 0


def plan_tree(
    settings: Settings, options: dict[str, Any], replayed: "Report | None" = None
) -> dict[str, Any]:
    """The report that settings and options ask for."""
    from colibri import demo, locality
    from colibri.container import Container
    from colibri.engine import model_directory
    from colibri.forecast import Forecaster
    from colibri.memory import budget
    from colibri.mirror import directories
    from colibri.plan_report import report
    from colibri.shapes import of_container
    from colibri.trace import Trace

    mtp = settings.mtp and settings.draft != 0
    container: Container | None = None
    if options["shape"]:
        if settings.mirror:
            raise UsageError(
                "--mirror is of a model that is here; for one that is not, give --disk the sum of "
                "what the drives read"
            )
        shape = _published(options, mtp)
    else:
        container = Container.open(model_directory(settings), directories(settings.mirror))
        shape = of_container(container, mtp)
        if container.directory == demo.MODEL:
            shape = replace(shape, name="the demo model")
    where, trace = locality.TEXT, options["trace"]
    if trace:
        where = locality.of_trace(Trace.load(trace), trace.name, replayed)
    shape = replace(shape, kv_dtype=settings.kv_dtype)
    forecaster = Forecaster(shape, _speeds(settings, options, shape, container), where)
    return report(forecaster, budget(settings.ram), settings.context, settings.io)


def _published(options: dict[str, Any], mtp: bool) -> "Shape":
    from colibri.formats import Format
    from colibri.layout import Formats
    from colibri.shapes import of_config, published

    name, config = published(options["shape"])
    experts, dense = (Format.parse(options[name] or usual) for name, usual in _FORMATS.items())
    return of_config(name, config, Formats(experts, dense, dense, dense), mtp)


def _speeds(
    settings: Settings, options: dict[str, Any], shape: "Shape", container: "Container | None"
) -> "Speeds":
    from colibri import probe
    from colibri.forecast import measure_machine
    from colibri.memory import physical_cores

    threads = settings.threads or physical_cores()
    disk, source = _disk(options["disk"], shape, container, 0 if options["memory"] else threads)
    if options["memory"]:
        sources = {"memory": "given", "disk": source}
        memory = options["memory"] * 1e9
        return probe.Speeds(threads, memory, disk.rate, latency=disk.latency, sources=sources)
    return measure_machine(shape, threads, disk, source, settings.isa)


def _disk(
    asked: str | None, shape: "Shape", container: "Container | None", threads: int
) -> tuple["DiskSpeed", str]:
    """How fast the disk is, beside so many threads if any, and where the figures come from."""
    from colibri import probe

    if asked is None:
        if container is None:
            return probe.DiskSpeed(probe.ASSUMED_DISK, probe.ASSUMED_LATENCY), "assumed"
        return probe.disk_of(container, shape.expert.total, threads), "measured"
    try:
        rate = float(asked)
    except ValueError:
        path = expanded(asked, "--disk")
        if not path.is_dir():
            raise UsageError(
                f"--disk is {asked!r}; expected GB/s such as 6.5, or a directory"
            ) from None
        return probe.disk_at(path, threads), "measured"
    _require_range("disk", rate, 0.001, 1000)
    return probe.DiskSpeed(rate * 1e9, probe.ASSUMED_LATENCY), "given"


def _require_range(name: str, rate: float, least: float, most: float) -> None:
    """UsageError for what no machine has; also for nan, which no comparison holds of."""
    if not least <= rate <= most:
        raise UsageError(f"--{name} is {rate:g}; expected GB/s from {least:g} to {most:g}")
