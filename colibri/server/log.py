"""The server's log: lines written by a thread of their own, so that a log nobody reads, or a
terminal that is stopped, delays no answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue

MOST = 1000  # lines that wait; more are lost, and counted


class Log:
    """`tell` it a line from any thread; `write` takes each, one after the other."""

    def __init__(self, write: Callable[[str], None], most: int = MOST) -> None:
        self._write = write
        self._lines: Queue[str | None] = Queue(most)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def tell(self, line: str) -> None:
        """Have a line written soon; never waits."""
        try:
            self._lines.put_nowait(line)
        except Full:
            self._lost += 1

    def close(self, patience: float) -> None:
        """Write what waits, for so many seconds at most."""
        with suppress(Full):
            self._lines.put(None, timeout=patience)
            self._thread.join(patience)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            lost, self._lost = self._lost, 0
            if lost:
                line += f"\n({lost} lines before this one were not taken)"
            with suppress(OSError, ValueError):  # nor does one that cannot be written
                self._write(line)
