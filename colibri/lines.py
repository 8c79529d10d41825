"""Where a chat's lines come from: an editor, a plain terminal, or a pipe.

A line may be continued: it ends in a backslash, or it lies between two lines of three quotes. In a
pipe every line is a turn of its own.
"""

import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TextIO

from colibri.answer import MOST_BYTES
from colibri.errors import UsageError
from colibri.interrupt import ReadAborted, wait_readable
from colibri.knobs import Screen
from colibri.state import State, failed, make_directory
from colibri.terminal import Terminal, is_terminal

if TYPE_CHECKING:
    from prompt_toolkit.history import History

PROMPT, CONTINUED = "> ", ". "
QUOTES = '"""'
_SKIPPED = 1 << 20  # bytes read at once of a line that is too long


class Lines(Protocol):
    """A source of what is said. `typed`: a person types it."""

    typed: bool

    def read(self) -> str | None:
        """The next message; None at the end. KeyboardInterrupt: Ctrl-C with nothing typed."""

    def stop(self) -> None:
        """From a signal handler: `read` ends with ReadAborted, raised here where that is safe."""


def lines_of(terminal: Terminal, state: State) -> Lines:
    """What fits this process's streams; `state` remembers what was typed into an editor."""
    if not is_terminal(sys.stdin):
        return PipedLines()
    shown = sys.stdout if terminal.watched else sys.stderr
    if terminal.screen.dumb or not is_terminal(shown):
        return PlainLines(shown)
    return EditedLines(shown, terminal.screen, state)


def _history(state: State, new: list[str]) -> "History":
    """What was typed, in earlier chats too; what is typed now is added to `new` as well.

    The editor does not write it: it is drawing then, and a warning would stand in its line.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if not state.keep("what is typed", lambda: _remember(state, [])):
        return InMemoryHistory()
    place = state.place("history")

    class Typed(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            if not place.is_file():  # a device may never end
                return []
            try:
                return [*super().load_history_strings()]
            except OSError:  # it can be written all the same
                return []

        def store_string(self, string: str) -> None:
            new.append(string)

    return Typed(place)


def _remember(state: State, texts: list[str]) -> None:
    """Add to the file of what was typed, made if need be; StateError when that is impossible."""
    from prompt_toolkit.history import FileHistory

    path = state.place("history")
    make_directory(state.place())
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        for text in texts:
            FileHistory(path).store_string(text)
    except OSError as why:
        raise failed(path, "written", why) from why


class PipedLines:
    """Lines of stdin, each a message."""

    typed = False

    def __init__(self) -> None:
        self._number = 0
        self._long = False  # the rest of a line that was refused is still to come

    def read(self) -> str | None:
        """The next line that is not blank."""
        self._skip()
        while line := sys.stdin.buffer.readline(MOST_BYTES + 1):
            self._number += 1
            text = self._text(line)
            if text.strip():
                return text
        return None

    def stop(self) -> None:
        """Reading is broken off."""
        raise ReadAborted

    def _skip(self) -> None:
        while self._long:
            rest = sys.stdin.buffer.readline(_SKIPPED)
            self._long = bool(rest) and not rest.endswith(b"\n")

    def _text(self, line: bytes) -> str:
        if len(line) > MOST_BYTES and not line.endswith(b"\n"):
            self._long = True
            raise UsageError(
                f"line {self._number} of stdin has more than {MOST_BYTES} bytes, which no context "
                "holds; shorten it"
            )
        try:
            return line.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"line {self._number} of stdin is not UTF-8 text at byte {error.start}"
            ) from None


class PlainLines:
    """A terminal that cannot be drawn on: the system's own line editing."""

    typed = True

    def __init__(self, shown: TextIO) -> None:
        self._shown = shown
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # `clean` replaces them

    def read(self) -> str | None:
        """A message, continuations included."""
        return continued(self._line)

    def stop(self) -> None:
        """Reading is broken off."""
        raise ReadAborted

    def _line(self, prompt: str) -> str | None:
        self._shown.write(prompt)
        self._shown.flush()
        try:
            wait_readable(sys.stdin.fileno())
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

    def __init__(self, shown: TextIO, screen: Screen, state: State) -> None:
        # Only here: others need not wait for the import.
        from prompt_toolkit import PromptSession
        from prompt_toolkit.data_structures import Size
        from prompt_toolkit.output import ColorDepth
        from prompt_toolkit.output.vt100 import Vt100_Output

        def size() -> Size:
            columns, rows = os.get_terminal_size(shown.fileno())
            return Size(rows=rows or 24, columns=columns or 80)

        self._state, self._new = state, list[str]()
        output = Vt100_Output(
            shown,
            size,
            default_color_depth=None if screen.color else ColorDepth.DEPTH_1_BIT,
            enable_cpr=False,  # a terminal's answer that comes late would be typed text
        )
        self._session: PromptSession[str] = PromptSession(
            history=_history(state, self._new),
            output=output,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=CONTINUED,
            enable_history_search=False,
            complete_while_typing=False,
            enable_suspend=True,
        )

    def read(self) -> str | None:
        """A message. Ctrl-C drops what was typed."""
        try:
            text = self._session.prompt(PROMPT)
        except EOFError:
            return None
        if self._new:
            self._state.keep("what is typed", lambda: _remember(self._state, self._new))
            self._new.clear()
        return unquoted(clean(text))

    def stop(self) -> None:
        """The editor gives the terminal back before ReadAborted is raised."""
        app = self._session.app
        if app.loop is None:
            raise ReadAborted
        app.loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        future = self._session.app.future
        if future and not future.done():
            self._session.app.exit(exception=ReadAborted)


def _keys() -> object:
    """Enter sends, unless the text goes on; Alt-Enter is a new line; Ctrl-C clears, then ends."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if goes_on(buffer.text):
            if not buffer.text.startswith(QUOTES):  # the backslash becomes a new line
                buffer.cursor_position = len(buffer.text)
                buffer.delete_before_cursor()
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


def unquoted(text: str) -> str:
    """The text between two lines of quotes, or all of it."""
    if not (text.startswith(QUOTES) and closed(text)):
        return text
    return text.rstrip()[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")


def joined(text: str) -> str:
    """The message that several lines mean: the quotes, or backslashes at their ends, taken off."""
    return unquoted(text) if text.startswith(QUOTES) else text.replace("\\\n", "\n")


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
    """Bytes that could not be decoded become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
