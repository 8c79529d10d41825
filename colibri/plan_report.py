"""`colibri plan`: the forecasts worth telling, as a tree of plain values and as text."""

import textwrap
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from colibri.amounts import file_size, memory_size, number, plural, roughly
from colibri.context import USEFUL
from colibri.errors import UsageError
from colibri.forecast import ACCEPTED, Forecast, Forecaster, budgets, lengths
from colibri.memory import RESERVE, Budget
from colibri.plan import Plan, make_plan

VERSION = 1
_GIB = 1 << 30
LENGTH = 4096  # tokens of text in the table of memory budgets


def report(forecaster: Forecaster, budget: Budget, asked: int | None, io: str) -> dict[str, Any]:
    """Everything, for JSON. UsageError when the model does not fit `budget` at all: it says what
    would do."""
    shape, speeds, config = forecaster.shape, forecaster.speeds, forecaster.shape.config
    try:
        context, plan = _divided(forecaster, budget.bytes, asked, io)
    except UsageError as error:
        raise _too_small(forecaster, budget, asked, io) or error from None
    length = min(LENGTH, context)
    here = forecaster.forecast(budget.bytes, length, context, io)
    return {
        "format": "colibri-plan",
        "version": VERSION,
        "model": {
            "name": shape.name,
            "formats": shape.formats,
            "files": shape.files,
            "dense_bytes": shape.resident,
            "experts": config.n_routed_experts * shape.sparse_layer_count,
            "expert_bytes": shape.expert.total,
            "experts_per_token": config.num_experts_per_tok * shape.sparse_layer_count,
            "experts_per_layer": config.n_routed_experts,
        },
        "machine": speeds.as_dict(),
        "locality": forecaster.locality.name,
        "budget": {"bytes": budget.bytes, "source": budget.source},
        "context": context,
        "cache_bytes": context * shape.token_bytes,
        "session_bytes": forecaster.demand(context, budget.bytes).sessions,
        "here": here.as_dict(),
        "budgets": [
            _row(forecaster, nbytes, asked, io) for nbytes in _sizes(forecaster, budget, asked)
        ],
        "lengths": [
            forecaster.forecast(budget.bytes, n, context, io).as_dict() for n in lengths(context)
        ],
        "notes": [*plan.notes, *_notes(forecaster, plan, here, context)],
    }


def _divided(forecaster: Forecaster, nbytes: int, asked: int | None, io: str) -> tuple[int, Plan]:
    """The context that fits, and what goes where; UsageError when nothing does."""
    context = forecaster.context(nbytes, asked, io)
    return context, make_plan(forecaster.demand(context, nbytes), nbytes, io)


def _too_small(
    forecaster: Forecaster, budget: Budget, asked: int | None, io: str
) -> UsageError | None:
    """What to say when `budget` does not do: which does, and how to see its forecast."""
    shape = forecaster.shape
    unit, letter = (_GIB // 10, "") if shape.resident >= _GIB else (1 << 20, "M")

    useful = min(USEFUL, shape.config.max_position_embeddings)

    def fits(units: int) -> bool:
        try:
            context, _ = _divided(forecaster, units * unit, asked, io)
        except UsageError:
            return False
        return asked is not None or context >= useful

    low = budget.bytes // unit
    high = forecaster.whole(asked or LENGTH) // unit + 1
    if not fits(high):
        return None  # no amount of memory helps
    least = bisect_left(range(high), True, low, key=fits)
    context = forecaster.context(least * unit, asked, io)
    session = forecaster.demand(context, least * unit).sessions
    return UsageError(
        f"{shape.name} does not fit {memory_size(budget.bytes)} ({budget.source}): dense weights "
        f"{memory_size(shape.resident)}, a context of {plural(context, 'token')} "
        f"{memory_size(session)}, and {memory_size(RESERVE)} for the "
        f"process; {memory_size(least * unit)} is the least that works: free that much, or see by "
        f"--ram {least if letter else f'{least / 10:g}'}{letter} what a machine that has it does"
        + ("; a smaller --ctx needs less" if asked else "")
        + (", and so does --kv-dtype f16" if asked and shape.kv_dtype == "f32" else "")
    )


def _sizes(forecaster: Forecaster, budget: Budget, asked: int | None) -> list[int]:
    whole = budget.bytes
    for _ in range(2):  # more memory may mean a longer context, and that more memory
        whole = forecaster.whole(forecaster.context(max(whole, budget.bytes), asked))
    return budgets(budget.bytes, whole)


def _row(forecaster: Forecaster, nbytes: int, asked: int | None, io: str) -> dict[str, Any]:
    try:
        context = forecaster.context(nbytes, asked, io)
        length = min(LENGTH, context)
        return forecaster.forecast(nbytes, length, context, io).as_dict() | {"error": None}
    except UsageError as error:
        return {"budget": nbytes, "error": str(error)}


def _notes(forecaster: Forecaster, plan: Plan, here: Forecast, context: int) -> Iterator[str]:
    speeds = forecaster.speeds
    if context < min(USEFUL, forecaster.shape.config.max_position_embeddings):
        yield f"a context of {context} tokens holds hardly a question and its answer"
    if not speeds.products:
        yield "arithmetic is left out: only memory and disk limit these figures"
    if speeds.sources.get("disk") == "assumed":
        yield "the disk is assumed: --disk GB/s, or a directory on it to measure"
    if here.drafted is not None and here.drafted <= here.rate:
        yield "drafts would not pay here; --draft auto finds that out by itself"
    if plan.io.startswith("mmap") and here.hits < 1:
        yield "experts are left to the page cache, which the forecast takes for slots"


# ---- as people read it --------------------------------------------------------------------------


def render(tree: dict[str, Any]) -> str:
    """The text of `colibri plan`."""
    return "\n".join(line.rstrip() for line in _lines(tree))


def _lines(tree: dict[str, Any]) -> Iterator[str]:
    model, machine, here = tree["model"], tree["machine"], tree["here"]
    yield f"model    {model['name']}: {file_size(model['files'])} in files; {model['formats']}"
    yield (
        f"machine  {_threads(machine)}memory {_rate(machine, 'memory')}, disk "
        f"{_rate(machine, 'disk')}"
    )
    yield (
        f"memory   {memory_size(tree['budget']['bytes'])} ({tree['budget']['source']}): dense "
        f"weights {memory_size(model['dense_bytes'])}, a context of {tree['context']} tokens "
        f"{memory_size(tree['session_bytes'])},"
    )
    yield (
        f"         and {_slots(here)} of {model['experts_per_layer']} experts a layer; "
        "the others stay on disk"
        if here["hits"] < 1
        else f"         and all {model['experts']:,} experts"
    )
    yield (
        f"a token  meets {file_size(here['memory_bytes'])} of weights, "
        f"{model['experts_per_token']} experts of {file_size(model['expert_bytes'])} among them;"
    )
    yield (
        f"         from disk {file_size(here['cold_bytes'])} when none is in memory, "
        f"{file_size(here['warm_bytes'])} when warm ({100 * here['hits']:.0f}% hits)"
    )
    limit = here["parts"]["limit"]
    yield f"speed    {_speed(here['rate'])} tok/s, limited by {limit}{_drafted(here)}"
    yield ""
    yield from _table(
        ("memory", "experts a layer", "hits", "from disk", "tok/s", "limited by"),
        [_budget_cells(row) for row in tree["budgets"]],
    )
    yield ""
    yield from _table(
        ("text", "tok/s", "first token", "limited by"),
        [
            (f"{row['length']} tokens", _speed(row["rate"]), roughly(row["first_token"]),
             row["parts"]["limit"])
            for row in tree["lengths"]
        ],
    )  # fmt: skip
    yield ""
    yield f"hits: {tree['locality']}"
    yield "first token: of a prompt of that length, when no expert is in memory"
    for note in tree["notes"]:
        yield from textwrap.wrap(f"note: {note}", 88, subsequent_indent="      ")


def _budget_cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["error"]:
        return (memory_size(row["budget"]), "-", "-", "-", "-", "does not fit")
    return (
        memory_size(row["budget"]),
        _slots(row),
        f"{100 * row['hits']:.0f}%",
        file_size(row["warm_bytes"]),
        _speed(row["rate"]),
        row["parts"]["limit"],
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    last = len(head) - 1
    for row in [head, *rows]:
        cells = (
            cell if i == last else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells)


def _slots(row: dict[str, Any]) -> str:
    return "all" if row["hits"] == 1 else number(row["slots"])


def _speed(rate: float) -> str:
    return f"{rate:.2g}" if rate < 10 else f"{rate:.0f}"


def _drafted(row: dict[str, Any]) -> str:
    if row["drafted"] is None or row["drafted"] <= 1.02 * row["rate"]:
        return ""
    return f"; {_speed(row['drafted'])} if {100 * ACCEPTED:.0f}% of single drafts are kept"


def _threads(machine: dict[str, Any]) -> str:
    """Those that products were measured with, on this machine."""
    return f"{plural(machine['threads'], 'thread')}, " if machine["products"] else ""


def _rate(machine: dict[str, Any], name: str) -> str:
    source = machine["sources"].get(name, "given")
    return f"{machine[name] / 1e9:.3g} GB/s ({source})"
