"""Where a chat's lines come from: an editor, a plain terminal, or a pipe.

A line may be continued: it ends in a backslash, or it lies between two lines of three quotes. In a
pipe every line is a turn of its own.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

from colibri.errors import StateError, UsageError
from colibri.knobs import Screen
from colibri.state import State, make_directory
from colibri.terminal import Terminal, is_terminal

PROMPT, CONTINUED = "> ", ". "
QUOTES = '"""'


class Lines(Protocol):
    """A source of what is said. `typed`: a person types it."""

    typed: bool

    def read(self) -> str | None:
        """The next message; None at the end. KeyboardInterrupt: Ctrl-C with nothing typed."""


def lines_of(terminal: Terminal, state: State) -> Lines:
    """What fits this process's streams; `state` remembers what was typed into an editor."""
    if not is_terminal(sys.stdin):
        return PipedLines()
    shown = sys.stdout if terminal.watched else sys.stderr
    if terminal.screen.dumb or not is_terminal(shown):
        return PlainLines(shown)
    return EditedLines(shown, terminal.screen, _history(state))


def _history(state: State) -> Path | None:
    """The file that remembers what was typed; None where nothing can be kept."""

    def make() -> None:
        make_directory(state.place())
        try:
            os.close(os.open(state.place("history"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        except OSError as why:
            raise StateError(f"{state.place('history')}: {why.strerror}") from why

    return state.place("history") if state.keep("what is typed", make) else None


class PipedLines:
    """Lines of stdin, each a message."""

    typed = False

    def __init__(self) -> None:
        self._number = 0

    def read(self) -> str | None:
        """The next line that is not blank."""
        while line := sys.stdin.buffer.readline():
            self._number += 1
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"line {self._number} of stdin is not UTF-8 text at byte {error.start}"
                ) from None
            if text.strip():
                return text
        return None


class PlainLines:
    """A terminal that cannot be drawn on: the system's own line editing."""

    typed = True

    def __init__(self, shown: TextIO) -> None:
        self._shown = shown

    def read(self) -> str | None:
        """A message, continuations included."""
        return continued(self._line)

    def _line(self, prompt: str) -> str | None:
        self._shown.write(prompt)
        self._shown.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            self._shown.write("\n")
            raise
        if not line:
            self._shown.write("\n")
            return None
        return clean(line.rstrip("\r\n"))


class EditedLines:
    """A terminal with line editing and history, by prompt_toolkit."""

    typed = True

    def __init__(self, shown: TextIO, screen: Screen, history: Path | None) -> None:
        # Only here: others need not wait for the import.
        from prompt_toolkit import PromptSession
        from prompt_toolkit.data_structures import Size
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.output import ColorDepth
        from prompt_toolkit.output.vt100 import Vt100_Output

        def size() -> Size:
            columns, rows = os.get_terminal_size(shown.fileno())
            return Size(rows=rows or 24, columns=columns or 80)

        output = Vt100_Output(
            shown,
            size,
            default_color_depth=None if screen.color else ColorDepth.DEPTH_1_BIT,
            enable_cpr=False,  # a terminal's answer that comes late would be typed text
        )
        self._session: PromptSession[str] = PromptSession(
            history=FileHistory(str(history)) if history else InMemoryHistory(),
            output=output,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=CONTINUED,
            enable_history_search=False,
            complete_while_typing=False,
        )

    def read(self) -> str | None:
        """A message. Ctrl-C drops what was typed."""
        try:
            return joined(clean(self._session.prompt(PROMPT)))
        except EOFError:
            return None


def _keys() -> object:
    """Enter sends, unless the text goes on; Alt-Enter is a new line; Ctrl-C clears, then ends."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if goes_on(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


# ---- continued lines ----------------------------------------------------------------------------


def goes_on(text: str) -> bool:
    """Whether another line belongs to this text."""
    if text.startswith(QUOTES):
        return not closed(text)
    return text.endswith("\\")


def closed(text: str) -> bool:
    """Whether quotes that were opened are closed again."""
    return len(text) >= 2 * len(QUOTES) and text.rstrip().endswith(QUOTES)


def joined(text: str) -> str:
    """The message that several lines mean: backslashes at their ends, or the quotes, taken off."""
    if text.startswith(QUOTES) and closed(text):
        inner = text.rstrip()[len(QUOTES) : -len(QUOTES)]
        return inner.removeprefix("\n").removesuffix("\n")
    return text.replace("\\\n", "\n")


def continued(line: Callable[[str], str | None]) -> str | None:
    """Lines until the message is whole; None at the end of input."""
    text = line(PROMPT)
    while text is not None and goes_on(text):
        following = line(CONTINUED)
        if following is None:
            break
        text += "\n" + following
    return None if text is None else joined(text)


def clean(text: str) -> str:
    """Without the halves of characters that a terminal in another encoding leaves behind."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
