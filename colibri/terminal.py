"""Where text goes: the answer to stdout as it is made, everything else to stderr.

Decides what is a terminal, what is dimmed and how wide it is; a progress line is drawn only where
a person watches, and removed again.
"""

import io
import os
import shutil
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from colibri.answer import REASONING, Piece
from colibri.knobs import Screen

_REDRAW = 0.1  # seconds between two states of a progress line
_DIM, _PLAIN, _CLEAR = "\x1b[2m", "\x1b[0m", "\r\x1b[K"


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches this stream."""
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


@dataclass
class Terminal:
    """The two streams of one command. Made by `Terminal.of(screen, quiet)`."""

    out: TextIO
    err: TextIO
    screen: Screen
    quiet: bool
    _drawn: bool = False
    _next: float = 0.0
    _kind: str | None = None
    _open: TextIO | None = None
    _last: str = "\n"

    @classmethod
    def of(cls, screen: Screen, quiet: bool = False) -> "Terminal":
        """The process's own streams; a pipe gets UTF-8 in any locale, and \\n stays \\n."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                encoding = None if is_terminal(stream) else "utf-8"
                stream.reconfigure(encoding=encoding, errors="replace", newline="\n")
        return cls(sys.stdout, sys.stderr, screen, quiet)

    @property
    def watched(self) -> bool:
        """Whether a person watches stdout."""
        return is_terminal(self.out)

    @property
    def width(self) -> int:
        """Columns: COLUMNS, else the terminal's, at least 20."""
        return max(20, self.screen.columns or shutil.get_terminal_size().columns)

    def styled(self, stream: TextIO) -> bool:
        """Whether escape sequences may be written to this stream."""
        return is_terminal(stream) and not self.screen.dumb

    # ---- the answer -------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """Write to stdout at once."""
        self.out.write(text)
        self.out.flush()

    def show(self, piece: Piece) -> None:
        """A piece of an answer: text to stdout, reasoning dimmed to whoever watches."""
        stream = self._stream_of(piece.kind)
        if stream is None:
            return
        self.clear()
        text = piece.text
        if self._kind not in (None, piece.kind) and self._open is stream:
            stream.write("\n" if self._last == "\n" else "\n\n")
            text = text.lstrip("\n")
        if piece.kind == REASONING and self.styled(stream) and self.screen.color:
            text = f"{_DIM}{text}{_PLAIN}"
        stream.write(text)
        stream.flush()
        self._kind, self._open, self._last = piece.kind, stream, piece.text[-1]

    def end(self) -> None:
        """End the line that the last piece left open."""
        if self._open is not None and self._last != "\n":
            self._open.write("\n")
            self._open.flush()
        self._kind = self._open = None

    def _stream_of(self, kind: str) -> TextIO | None:
        """Pipes get the answer alone; reasoning is for people."""
        if kind != REASONING or self.watched:
            return self.out
        return self.err if is_terminal(self.err) and not self.quiet else None

    # ---- beside the answer ------------------------------------------------------------------

    def note(self, text: str) -> None:
        """A line on stderr, unless quiet."""
        if not self.quiet:
            self.err.write(text + "\n")
            self.err.flush()

    def progress(self, what: str, done: int, total: int, unit: str = "") -> None:
        """Draw "what done/total unit" on stderr where a person watches."""
        now = time.monotonic()
        if self.quiet or not self.styled(self.err) or now < self._next:
            return
        self._next = now + _REDRAW
        line = f"{what} {done}/{total} {unit}".rstrip()
        self.err.write(_CLEAR + line[: self.width - 1])
        self.err.flush()
        self._drawn = True

    def clear(self) -> None:
        """Remove the progress line."""
        if self._drawn:
            self.err.write(_CLEAR)
            self.err.flush()
        self._drawn = False
        self._next = 0.0


def close_stdout() -> None:
    """Point stdout at nothing, so that the exit flush of a closed pipe cannot complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
