"""Where text goes: the answer to stdout as it is made, everything else to stderr.

Decides what is a terminal, what is dimmed and how wide it is; a progress line is drawn only where
a person watches, and removed again.
"""

import atexit
import io
import os
import sys
import textwrap
import time
from collections.abc import Iterable
from typing import TextIO

from colibri.amounts import roughly
from colibri.knobs import Screen
from colibri.piece import REASONING, TEXT, Piece

_REDRAW = 0.1  # seconds between two states of a progress line
_PACE = 3.0  # seconds after which the time that work still takes is told
_DIM, _PLAIN, _CLEAR = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
# Characters that command a terminal, and what shows them: C0 and DEL have pictures, C1 has none.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches this stream."""
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def harmless(text: str) -> str:
    """Text that a terminal shows and does not obey."""
    return text.translate(_PICTURES)


class Terminal:
    """The two streams of one command. Made by `Terminal.of(screen, quiet)`.

    What is a terminal is asked once: a system call for every token would be felt. A terminal gets
    no control characters but colibri's own. What stderr does not take is dropped.
    """

    def __init__(self, out: TextIO, err: TextIO, screen: Screen, quiet: bool = False) -> None:
        self.out, self.err, self.screen, self.quiet = out, err, screen, quiet
        self.watched = is_terminal(out)
        self._noted = is_terminal(err)
        self._draws = self._noted and not screen.dumb and not quiet
        self._places = {TEXT: (out, "", ""), REASONING: self._reasoning_place()}
        self._drawn = False
        self._next = 0.0
        self._work, self._since, self._from = "", 0.0, 0  # what is told, when and where it began
        self._kind: str | None = None
        self._open: TextIO | None = None
        self._last = "\n"

    @classmethod
    def of(cls, screen: Screen, quiet: bool = False) -> "Terminal":
        """The process's own streams; a pipe gets UTF-8 in any locale, and \\n stays \\n."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                encoding = None if is_terminal(stream) else "utf-8"
                stream.reconfigure(encoding=encoding, errors="replace", newline="\n")
        return cls(sys.stdout, sys.stderr, screen, quiet)

    @property
    def width(self) -> int:
        """Columns: COLUMNS, else the terminal's, at least 20."""
        return max(20, self.screen.columns or _columns(self.err, self.out))

    @property
    def note_width(self) -> int | None:
        """The width that notes may take; None where nobody watches them."""
        return self.width if self._noted else None

    def _reasoning_place(self) -> tuple[TextIO, str, str] | None:
        """Reasoning is for people, dimmed: where one watches, nowhere else."""
        stream = self.out if self.watched else self.err
        if not is_terminal(stream) or (stream is self.err and self.quiet):
            return None
        dim = self.screen.color and not self.screen.dumb
        return (stream, _DIM, _PLAIN) if dim else (stream, "", "")

    # ---- the answer -------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """Write to stdout at once; OSError says that it is stdout that takes no more."""
        self._put(self.out, harmless(text) if self.watched else text)

    def show(self, piece: Piece) -> None:
        """A piece of an answer: text to stdout, reasoning to whoever watches."""
        kind, text = piece
        place = self._places[kind]
        if place is None:
            return
        self.clear()
        stream, before, after = place
        if self.watched or kind == REASONING:
            text = harmless(text)
        if kind != self._kind and self._open is stream:
            self._put(stream, "\n" if self._last == "\n" else "\n\n")
            text = text.lstrip("\n")
        self._put(stream, f"{before}{text}{after}")
        self._kind, self._open, self._last = kind, stream, piece.text[-1]

    def end(self) -> None:
        """End the line that the last piece left open."""
        if self._open is not None and self._last != "\n":
            self._put(self._open, "\n")
        self._kind = self._open = None

    def _put(self, stream: TextIO, text: str) -> None:
        if stream is not self.out:
            self._tell(text)
            return
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            raise
        except OSError as why:
            fault = f"stdout cannot be written: {why.strerror}"
            raise OSError(f"{fault}; make room, or send it elsewhere") from why

    # ---- beside the answer ------------------------------------------------------------------

    def note(self, text: str) -> None:
        """A line on stderr, unless quiet."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """A line on stderr in any case."""
        self._tell((harmless(text) if self._noted else text) + "\n")

    def notes(self, sentences: Iterable[str]) -> None:
        """What a user may want to know: a line each, unless quiet."""
        for sentence in sentences:
            self.note(f"colibri: note: {sentence}")

    def warning(self, text: str) -> None:
        """What is not as it should be, and stops nobody."""
        self.warn(f"colibri: warning: {text}")

    def aside(self, text: str) -> None:
        """A note that keeps in the background: dimmed where a person watches."""
        text = "\n".join(textwrap.fill(line, self.width - 1) for line in text.split("\n"))
        if self.quiet:
            return
        if self._noted and self.screen.color and not self.screen.dumb:
            self._tell(f"{_DIM}{harmless(text)}{_PLAIN}\n")
        else:
            self.warn(text)

    def progress(self, what: str, done: int, total: int | None, unit: str = "") -> None:
        """Draw "what done/total unit" on stderr where a person watches; total None: not known.

        Without a unit, work that takes long is told with the time that is left of it.
        """
        now = time.monotonic()
        if what != self._work:
            self._work, self._since, self._from = what, now, done
        if not self._draws or now < self._next:
            return
        self._next = now + _REDRAW
        line = f"{what} {done}{'' if total is None else f'/{total}'} {unit}".rstrip()
        if total is not None and not unit:
            line += self._left(now, done, total)
        self._tell(_CLEAR + line[: self.width - 1])
        self._drawn = True

    def _left(self, now: float, done: int, total: int) -> str:
        spent, passed = now - self._since, done - self._from
        if spent < _PACE or passed < 1:
            return ""
        return f", about {roughly(max(1.0, spent * (total - done) / passed))} left"

    def clear(self) -> None:
        """Remove the progress line."""
        if self._drawn:
            self._tell(_CLEAR)
        self._drawn = False
        self._next = 0.0
        self._work = ""

    def _tell(self, text: str) -> None:
        """Write to stderr, if it can be written."""
        try:
            self.err.write(text)
            self.err.flush()
        except (OSError, ValueError):  # nobody is left to tell; ValueError: closed
            atexit.unregister(_drop_stderr)
            atexit.register(_drop_stderr)


def _columns(*streams: TextIO) -> int:
    """Of the first of these that is a terminal and knows its size; 80 without any."""
    for stream in streams:
        try:
            columns = os.get_terminal_size(stream.fileno()).columns
        except (OSError, ValueError):
            continue
        if columns:
            return columns
    return 80


def close_stdout() -> None:
    """Point stdout at nothing, so that the exit flush of a closed pipe cannot complain."""
    _point_at_nothing(sys.stdout)


def _drop_stderr() -> None:
    """At the end: what stderr still does not take must not become Python's own exit status."""
    try:
        sys.stderr.flush()
    except OSError:
        _point_at_nothing(sys.stderr)
    except ValueError:  # closed
        return


def _point_at_nothing(stream: TextIO) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
