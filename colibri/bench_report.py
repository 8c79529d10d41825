"""A benchmark's report as people read it: limits first, then each figure beside its limit."""

from collections.abc import Iterator
from typing import Any

from colibri.amounts import file_size, memory_size, plural
from colibri.spread import Spread

_GB, _MB = 1e9, 1e6


def render(report: dict[str, Any]) -> str:
    """Text of what `Bench.run` returned, or of a file that --json kept."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    model, here = report["model"], report["machine"]
    yield (
        f"model    {model['name']}, {file_size(model['bytes'])}: dense "
        f"{file_size(model['dense_bytes'])}, {model['sparse_layers']} layers of "
        f"{model['experts']} experts of {file_size(model['record_bytes'])}, "
        f"{model['experts_per_token']} a token"
    )
    yield (
        f"machine  {here['processor']}, {plural(here['cores'], 'core')}, {here['isa']}, "
        f"{here['system']}, {memory_size(here['memory_available'])} ({here['memory_limit']})"
    )
    yield from _cores("memory", here["read_bandwidth"], "GB/s")
    yield from _cores("dots", here["dot_peak"], "G/s")
    yield from _disk(here["disk"])
    yield from _cores("beside", here["disk_beside_products"], "GB/s from the disk")
    if report["figures"]:
        yield ""
        yield from _table(report["figures"])
        yield ""
        yield from _outputs(report)
    yield from (f"note: {note}" for note in report["notes"])


def _cores(name: str, rows: list[dict[str, Any]], unit: str) -> Iterator[str]:
    for row in rows:
        rate = _spread(row["per_second"]).show(unit, _GB)
        yield f"{name:<8} {plural(row['threads'], 'thread')}: {rate}"
        name = ""


def _disk(rows: list[dict[str, Any]]) -> Iterator[str]:
    name = "disk"
    for row in sorted(rows, key=lambda row: -row["per_second"]["median"]):
        rate = _spread(row["per_second"]).show("GB/s", _GB)
        reads = f"{memory_size(row['read_bytes'])} reads, {row['depth']} in flight"
        yield f"{name:<8} {row['mode']}, {reads}: {rate}"
        name = ""


def _table(figures: list[dict[str, Any]]) -> Iterator[str]:
    width = max(len(figure["name"]) for figure in figures)
    head = f"{'tokens/s':<22} {'MB/token':>9} {'MB read':>8}  {'of the limit':<20} output"
    yield f"{'':<{width}}  {head}"
    for figure in figures:
        rate = _spread(figure["tokens_per_second"]).show()
        weights = figure["weight_bytes_per_token"] / _MB
        read = figure["read_bytes_per_token"] / _MB
        outputs = " ".join(output[:8] for output in figure["outputs"])
        yield (
            f"{figure['name']:<{width}}  {rate:<22} {weights:>9.1f} {read:>8.1f}  "
            f"{_share(figure):<20} {outputs}"
        )
        yield from (f"{'':<{width}}  {text}" for text in _more(figure))


def _share(figure: dict[str, Any]) -> str:
    if "cost" in figure["details"]:
        return _spread(figure["details"]["cost"]).show() + " x"
    if figure["fraction"] is None:
        return ""
    return _spread(figure["fraction"]).show("%", 0.01)


def _more(figure: dict[str, Any]) -> Iterator[str]:
    """A streamed run's second line: what it had, and what held it back."""
    if figure["kind"] != "stream":
        return
    details = {name: _spread(value) for name, value in figure["details"].items()}
    slots = f"{plural(figure['slots'], 'slot')} a layer" if figure["slots"] else "page cache"
    parts = [
        f"{figure['io']}, {slots}",
        f"limit {_spread(figure['limit_tokens_per_second']).show('tok/s')}",
        f"compute {details['compute_seconds_per_token'].show('ms', 1e-3)}",
        f"disk {details['disk_bytes_per_second'].show('GB/s', _GB)}",
        f"resident {memory_size(details['resident_bytes'].most)}",
    ]
    if figure["planned_bytes"]:
        parts.append(f"planned {memory_size(figure['planned_bytes'])}")
    ahead = details["pilot_reads_per_token"].median
    if ahead:
        useful = details["pilot_useful_per_token"].median
        parts.append(f"{ahead:.3g} experts a token read ahead, {useful:.3g} of them asked for")
    yield "; ".join(parts)


def _outputs(report: dict[str, Any]) -> Iterator[str]:
    if report["outputs_agree"]:
        yield "outputs agree: the same ids gave the same bits in every run"
    else:
        yield "OUTPUTS DIFFER: the same ids did not give the same bits in every run"


def _spread(plain: dict[str, Any]) -> Spread:
    return Spread.of(plain["values"])
