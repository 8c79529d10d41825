"""`colibri chat`: the options, and what is put together before the first line."""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from colibri import demo
from colibri.cli import RUN_GROUPS, Command, knob_options, settings_of
from colibri.knobs import Settings

if TYPE_CHECKING:
    from colibri.engine import Engine
    from colibri.state import State

EPILOG = """\b
/help in the chat lists its commands. Exit status: 0 the end, 1 error (also a session that could
not be saved; from a pipe, also of a single turn), 2 wrong usage, 129, 130 and 143 ended by
SIGHUP (a closed terminal), Ctrl-C and SIGTERM.
"""


@click.command("chat", cls=Command, epilog=EPILOG)
@click.argument("model", required=False)
@click.option(
    "--session", metavar="NAME",
    help="Keep the conversation under this name, and go on with it when it exists.",
)  # fmt: skip
@knob_options(*RUN_GROUPS, without=("raw", "stats"))
def command(model: str | None, session: str | None, **values: Any) -> int:
    """Talk with a model.

    MODEL as for `colibri run`. Answers stream to stdout, everything else goes to stderr; from a
    pipe every line is a turn. Ctrl-C ends an answer and keeps it, a second one quits.
    """
    settings = settings_of(values, model)
    return chat(settings, session)


def chat(settings: Settings, session: str | None) -> int:
    """Open the model, take up the session, and talk; returns the exit status."""
    from colibri.engine import Engine, model_directory
    from colibri.errors import ColibriError
    from colibri.interrupt import TerminationSignals
    from colibri.lines import lines_of
    from colibri.repl import Repl, require_place
    from colibri.resident import Resident
    from colibri.saved import directory_of
    from colibri.state import State
    from colibri.terminal import Terminal, close_stdout

    terminal = Terminal.of(settings.screen, settings.quiet)
    model_directory(settings)  # a wrong one is told first
    state = State(settings.state, terminal.warning)
    if session is not None:  # so is this: loading may take minutes
        directory_of(state, session)
        require_place(state, session)
        _require_session(settings, state, session)
    lines = lines_of(terminal, state)
    try:
        engine = Engine.open(settings, terminal.progress)
    finally:
        terminal.clear()
    resident = Resident(engine, state)
    with TerminationSignals() as signals:
        repl = Repl(engine, terminal, lines, state, resident, signals)
        try:
            terminal.aside(_banner(engine, repl.thinking()))
            terminal.notes(engine.notes)
            if session is not None:
                repl.resume(session, new=True)
            if lines.typed and settings.warm is not False:
                resident.start()
            elif settings.warm:
                with signals.stopping(resident.stop):
                    resident.fill(terminal.progress)
                terminal.clear()
            return repl.run()
        except OSError:
            if not signals.number:
                raise
            close_stdout()  # a terminal that is gone; what was said is saved
            return signals.status
        finally:
            with suppress(ColibriError):
                repl.close()
                resident.save()


def _require_session(settings: Settings, state: "State", name: str) -> None:
    """StateError when another process has the session, or it is another model's."""
    from colibri.container import Container
    from colibri.engine import model_directory
    from colibri.saved import Saved
    from colibri.tokenizer import Tokenizer

    directory = model_directory(settings)
    digest = Tokenizer.load(directory).digest
    saved = Saved(state, name, Container.open(directory), digest, settings.kv_dtype)
    try:
        if saved.exists:
            saved.open()
    finally:
        saved.close()


def _banner(engine: "Engine", thinking: str) -> str:
    directory = engine.container.directory
    name = "the demo model" if directory == demo.MODEL else directory.resolve().name
    return f"{name}, context {engine.context} tokens, {thinking}. /help lists the commands."
