"""Whether `colibri plan` tells the truth: forecasts beside measurements, and beside other people's.

python tools/check_forecast.py MODEL --ram 3,4,6,9 [--repeat 3] [--tokens 48] [--json FILE]
python tools/check_forecast.py --reported

The first streams MODEL within each amount of memory, in rounds, as `colibri bench` does, and fails
when the median of measurements is more than 20% from its forecasts. Hit rates come from a trace of
the same ids, as from `colibri plan --trace`. The second needs no machine: published figures
of GLM-5.2 in another engine, in that engine's formats, with what their reports do not say assumed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colibri import probe
from colibri.amounts import memory_size
from colibri.bench import Arm, Bench, Request
from colibri.container import Container
from colibri.errors import ColibriError
from colibri.forecast import Forecaster, measure_machine
from colibri.formats import Format
from colibri.knobs import BY_NAME
from colibri.layout import Formats
from colibri.locality import TEXT, Locality, of_trace
from colibri.memory import physical_cores
from colibri.probe import Speeds
from colibri.shapes import Shape, of_config, of_container, published

TOLERANCE = 0.2
SETTLE = 16  # tokens of context beside those that Bench decodes
GIB, GB = 1 << 30, 1e9


# ---- measured here ------------------------------------------------------------------------------


def compare(container: Container, budgets: list[int], options: argparse.Namespace) -> dict:
    """Forecast and measurement of every budget, in rounds; each forecast rests on a look at the
    machine just before its measurement, as the speed of a shared one changes."""
    request = Request(
        threads=(options.threads or physical_cores(),), sections=("stream",),
        repeat=options.runs, tokens=options.tokens,
    )  # fmt: skip
    shape = of_container(container, mtp=False)
    where = recorded(container, request, Arm(options.io, ram=max(budgets), pilot="off"))
    rounds = [
        _once(container, request, Arm(options.io, ram=size), shape, where)
        for _ in range(options.repeat)
        for size in budgets
    ]
    rows = [_row([r for r in rounds if r["forecast"]["budget"] == size]) for size in budgets]
    return {"rows": rows, "rounds": rounds}


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def recorded(container: Container, request: Request, arm: Arm) -> Locality:
    """Which experts the bench's ids ask for, from a run of them."""
    bench = Bench(container, replace(request, arms=(arm,), repeat=1, trace=True), _say)
    bench.run()
    return of_trace(bench.trace, "the bench's ids")


def _once(
    container: Container, request: Request, arm: Arm, shape: Shape, where: Locality
) -> dict[str, Any]:
    (threads,) = request.threads
    disk = probe.disk_of(container, shape.expert.total, threads)
    speeds = measure_machine(shape, threads, disk, "measured")
    context, position = 2 * request.tokens + SETTLE, 3 * request.tokens // 2
    forecast = Forecaster(shape, speeds, where).forecast(arm.ram, position, context, arm.io)
    (figure,) = Bench(container, replace(request, arms=(arm,)), _say).run()["figures"]
    return {"machine": speeds.as_dict(), "forecast": forecast.as_dict(), "figure": figure}


def _row(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one budget's rounds."""
    first, figure = rounds[0]["forecast"], rounds[0]["figure"]
    forecasts = [r["forecast"]["rate"] for r in rounds]
    rates = [r["figure"]["tokens_per_second"]["median"] for r in rounds]
    return {
        "budget": first["budget"],
        "io": figure["io"],
        "slots": figure["slots"],
        "forecast_slots": first["slots"],
        "limit": first["parts"]["limit"],
        "read_bytes": statistics.median(r["figure"]["read_bytes_per_token"] for r in rounds),
        "forecast_read_bytes": first["warm_bytes"],
        "forecast": statistics.median(forecasts),
        "measured": statistics.median(rates),
        "least": min(rates),
        "most": max(rates),
        "ratio": statistics.median(f / r for f, r in zip(forecasts, rates, strict=True)),
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown."""
    yield "| memory | experts a layer | read a token: forecast, measured | tokens/s: forecast, "\
          "measured | forecast / measured | limited by |"  # fmt: skip
    yield "|---:|---:|---:|---:|---:|---|"
    for row in rows:
        slots = "all" if row["slots"] is None else row["slots"]
        yield (
            f"| {memory_size(row['budget'])} | {slots} "
            f"| {row['forecast_read_bytes'] / 1e6:,.3g} MB, {row['read_bytes'] / 1e6:,.3g} MB "
            f"| {row['forecast']:.3g}, {row['measured']:.3g} "
            f"({row['least']:.3g} to {row['most']:.3g}) | {row['ratio']:.2f} | {row['limit']} |"
        )


# ---- reported elsewhere -------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """A published figure: the machine as far as it is known, what is assumed, and the speed.

    `memory` in 2^30 bytes, rates in 10^9 bytes a second; `hits` when the report has them.
    """

    who: str
    memory: float
    disk: float
    bandwidth: float
    assumed: str
    reported: str
    hits: float | None = None


REPORTS = (
    Report("WSL, 25 GB, cold", 22, 1, 30, "disk 1, memory 30 GB/s", "0.05-0.1", hits=0),
    Report("desktops of 24 GB", 22, 3, 40, "disk 3, memory 40 GB/s", "0.05-0.4"),
    Report("desktops of 64 GB", 60, 5, 60, "disk 5, memory 60 GB/s", "0.05-0.4"),
    Report("desktop, 128 GB", 120, 7, 70, "disk 7, memory 70 GB/s", "about 1.8"),
    Report("disk of 6.44 GB/s, 54% hits", 90, 6.44, 60, "memory 60 GB/s", "0.35", hits=0.54),
    Report("EPYC, 430 GB, all cached", 430, 3, 100, "memory 100 GB/s", "1.0"),
    Report("EPYC 9V45, all cached", 430, 3, 400, "memory 400 GB/s", "2.83 rotating, 6.91 warm"),
)


def reported() -> Iterator[str]:
    """Markdown: what plan says for each report's machine, and what was reported there."""
    formats = Formats(*map(Format.parse, ("int4-f32", "int4-f32", "int8", "int8")))
    shape = of_config(*published("glm-5.2"), formats)
    yield "| machine | assumed | hits | forecast, tokens/s | limited by | reported, tokens/s |"
    yield "|---|---|---:|---:|---|---:|"
    for report in REPORTS:
        speeds = Speeds(1, report.bandwidth * GB, report.disk * GB)
        forecaster = Forecaster(shape, speeds, TEXT)
        size = round(report.memory * GIB)
        hits = report.hits
        if hits is None:
            hits = forecaster.forecast(size, 512, 4096).hits
        parts = forecaster.step(hits, 512)
        yield (
            f"| {report.who} | {report.assumed} | {100 * hits:.0f}% | {1 / parts.seconds:.2g} | "
            f"{parts.limit} | {report.reported} |"
        )


# ---- the command --------------------------------------------------------------------------------


def main() -> int:
    """Print a table; returns 1 when a forecast is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--ram", help="amounts of memory, with commas between them")
    parser.add_argument("--io", default="auto", choices=("auto", "mmap", "buffered", "direct"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=3, help="rounds, each with a new forecast")
    parser.add_argument("--runs", type=int, default=1, help="measurements a forecast is held to")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, help="keep every measurement")
    parser.add_argument("--reported", action="store_true")
    options = parser.parse_args()
    if options.reported:
        print("\n".join(reported()))
        return 0
    if not options.model or not options.ram:
        parser.error("give MODEL and --ram, or --reported")
    budgets = [BY_NAME["ram"].kind.parse(size) for size in options.ram.split(",")]
    try:
        found = compare(Container.open(options.model), budgets, options)
    except ColibriError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(table(found["rows"])))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(abs(row["ratio"] - 1) > TOLERANCE for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
