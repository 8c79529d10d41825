"""`colibri score`: the options, and the session that a text is scored in."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri import knobs
from colibri.cli import Command, knob_options, settings_of
from colibri.errors import Exit, UsageError
from colibri.knobs import Settings
from colibri.paths import require_writable
from colibri.terminal import Terminal

if TYPE_CHECKING:
    from colibri.score import Score

_PREFIX_ROOM = 8  # tokens of a model's prefix


@click.command("score", cls=Command)
@click.argument("model", required=False)
@click.option(
    "--text", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True),
    metavar="FILE", required=True, help="UTF-8 text to predict; - is stdin.",
)  # fmt: skip
@click.option(
    "--window",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens that a token may look back on; the text is cut into such pieces. "
    "[default: 1024, or what the model holds]",
)
@click.option("--markup", is_flag=True, help="Control tokens in the text are control tokens.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep which experts the text asked for (plan --trace, tools/replay_trace.py).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@knob_options(knobs.MACHINE, without=("context", "warm"))
def command(
    model: str | None,
    text: Path,
    window: int | None,
    markup: bool,
    trace: Path | None,
    as_json: bool,
    **values: Any,
) -> int:
    """Say how well a model predicts a text.

    Negative log-likelihood per token and per byte, and perplexity. The same model, text and window
    give the same figures whatever the machine, the threads or the memory. MODEL as for `colibri
    run`.
    """
    settings = settings_of({**values, "draft": "0"}, model)
    terminal = Terminal.of(settings.screen)
    if trace:
        require_writable(trace)
    found = score_file(settings, text, window, terminal, markup, trace)
    terminal.clear()
    terminal.write(
        json.dumps(found.as_dict()) + "\n" if as_json else "\n".join(_lines(found)) + "\n"
    )
    return Exit.OK


def score_file(
    settings: Settings,
    text: Path,
    window: int | None,
    terminal: Terminal,
    markup: bool = False,
    trace: Path | None = None,
) -> Score:
    """Score a text with a model; `window` None: the usual one, or what the model holds."""
    from colibri.config import ModelConfig
    from colibri.engine import Engine, model_directory
    from colibri.score import WINDOW, score_text
    from colibri.trace import TraceWriter

    content = _read_text(text)
    limit = ModelConfig.load(model_directory(settings)).max_position_embeddings
    window = window or max(1, min(WINDOW, limit - _PREFIX_ROOM))
    engine = Engine.open(
        replace(settings, context=min(window + _PREFIX_ROOM, limit)), terminal.progress
    )
    session = engine.slot.session
    writer = TraceWriter(session) if trace else None
    found = score_text(
        session, engine.tokenizer, content, window,
        lambda done, total: terminal.progress("scoring token", done, total), markup, writer,
    )  # fmt: skip
    if trace and writer:
        writer.trace().save(trace)
    return found


def _lines(found: Score) -> list[str]:
    return [
        f"tokens          {found.scored} ({found.scored_bytes} bytes, window {found.window})",
        f"nats per token  {found.per_token:.6f}",
        f"nats per byte   {found.per_byte:.6f}",
        f"perplexity      {found.perplexity:.6f}",
    ]


def _read_text(path: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as why:
        raise UsageError(f"{path} is not UTF-8 text at byte {why.start}") from None
