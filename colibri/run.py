"""`colibri run`: one prompt answered."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from colibri import stats
from colibri.answer import MOST_BYTES, Prompt
from colibri.engine import Engine, model_directory
from colibri.errors import Exit, UsageError
from colibri.grammar import Node
from colibri.interrupt import Interrupts, TerminationSignals
from colibri.json_grammar import OBJECT, answer
from colibri.knobs import Settings
from colibri.resident import Resident
from colibri.schema import compile_schema
from colibri.state import State
from colibri.strictjson import parse_object
from colibri.terminal import Terminal, is_terminal
from colibri.turn import Turn

_RECEIPTS = {"line": stats.line, "table": stats.table, "full": stats.full}
_ONLY_REASONING = (
    "all of the answer is reasoning, which is no part of stdout; --max-tokens allows a longer one, "
    "--no-think asks for none"
)
_CUT_OFF = "the JSON is cut off before its end; a larger --max-tokens or --ctx allows a longer one"


def run_prompt(
    settings: Settings,
    prompt: str | None,
    prompt_file: Path | None,
    schema: Path | None,
    as_json: bool,
) -> int:
    """Answer a prompt on stdout; returns the exit status."""
    terminal = Terminal.of(settings.screen, settings.quiet)
    if settings.raw and "system" in settings.given:
        raise UsageError("--raw uses no chat template, so --system has no place; drop one of them")
    model_directory(settings)  # a wrong one is told before anyone types a prompt
    form = read_form(schema) if schema else None
    text = read_prompt(prompt, prompt_file, settings.raw)
    try:
        engine = Engine.open(settings, terminal.progress)
        resident = Resident(engine, State(settings.state, terminal.warning))
        if settings.warm:
            resident.fill(terminal.progress)
        asked = replace(_prompt(engine, text), form=form)
        turn = engine.answer(asked, progress=terminal.progress)
    finally:
        terminal.clear()
    terminal.notes(engine.notes)
    with TerminationSignals() as signals, Interrupts(turn.cancel) as interrupts:
        turn.session.watch(interrupts.fd)
        try:
            with signals.stopping(turn.cancel):
                _stream(terminal, turn, as_json)
        finally:
            turn.session.watch(-1)
    if as_json:
        terminal.write(as_object(turn) + "\n")
    elif turn.receipt and turn.receipt.reasoning_alone:
        terminal.notes([_ONLY_REASONING])
    elif form and turn.finish_reason in (stats.LENGTH, stats.CONTEXT):
        terminal.notes([_CUT_OFF])
    _print_receipt(terminal, settings, turn, as_json)
    resident.save()
    interrupted = turn.finish_reason == stats.INTERRUPTED
    return signals.status or (Exit.INTERRUPTED if interrupted else Exit.OK)


def read_prompt(prompt: str | None, prompt_file: Path | None, raw: bool) -> str:
    """The prompt from the flag, the file or stdin; UsageError when there is nothing to answer."""
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other; give one of them")
    if prompt is not None:
        text, source = prompt, "--prompt"
    elif prompt_file is None or str(prompt_file) == "-":
        if prompt_file is None and is_terminal(sys.stdin):
            raise UsageError("there is no prompt; give --prompt TEXT, --prompt-file or a pipe")
        text, source = _read(sys.stdin.buffer, "stdin"), "stdin"
    else:
        try:
            with prompt_file.open("rb") as file:
                text, source = _read(file, str(prompt_file)), str(prompt_file)
        except OSError as error:
            raise UsageError(f"--prompt-file {prompt_file}: {error.strerror}") from None
    if not (text if raw else text.strip()):
        raise UsageError(f"the prompt from {source} is empty; write what the model should answer")
    return text


def read_form(path: Path) -> Node:
    """What the answer must be, by the JSON Schema in a file; UsageError when it is none."""
    try:
        schema = parse_object(path.read_bytes(), f"--schema {path}", UsageError)
    except OSError as error:
        raise UsageError(f"--schema {path}: {error.strerror}") from None
    return answer(compile_schema(schema, str(path), strict=True) if schema else OBJECT)


def _read(file: BinaryIO, source: str) -> str:
    """UTF-8 text without a byte order mark and without one final newline."""
    data = file.read(MOST_BYTES + 1)  # stdin may never end
    if len(data) > MOST_BYTES:
        raise UsageError(
            f"the prompt from {source} has more than {MOST_BYTES} bytes, which no context holds; "
            "shorten it"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text at byte {error.start}") from None
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _prompt(engine: Engine, text: str) -> Prompt:
    settings = engine.settings
    if settings.raw:
        return engine.raw(text)
    messages = [{"role": "user", "content": text}]
    if settings.system:
        messages.insert(0, {"role": "system", "content": settings.system})
    return engine.chat(messages)


def _stream(terminal: Terminal, turn: Turn, as_json: bool) -> None:
    """Show the pieces as they come."""
    try:
        for piece in turn:
            if not as_json:
                terminal.show(piece)
    finally:
        terminal.clear()
        terminal.end()


def as_object(turn: Turn) -> str:
    """The JSON object of --json."""
    assert turn.receipt is not None
    return json.dumps(
        {
            "text": turn.text,
            "reasoning": turn.reasoning or None,
            "token_ids": turn.token_ids,
            "finish_reason": turn.finish_reason,
            "stats": turn.receipt.as_dict(),
        },
        ensure_ascii=False,
        allow_nan=False,
    )


def _print_receipt(terminal: Terminal, settings: Settings, turn: Turn, as_json: bool) -> None:
    if as_json and "stats" not in settings.given:
        return
    assert turn.receipt is not None
    terminal.note(_RECEIPTS[settings.stats](turn.receipt, terminal.note_width))
