"""Ctrl-C: the first ends the turn, the second quits.

A signal handler written in Python cannot run while the core computes, but the interpreter's own
handler writes each signal's number to a pipe at once. The core watches that pipe between layers.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupts:
    """While entered, the first SIGINT makes `fd` readable and calls `on_first`.

    The second raises KeyboardInterrupt in the main thread, as soon as the core returns to Python.
    Outside the main thread nothing is installed.
    """

    def __init__(self, on_first: Callable[[], None] | None = None) -> None:
        self.count = 0
        self.fd = -1
        self._on_first = on_first
        self._write = -1

    @property
    def requested(self) -> bool:
        """Whether the turn should end."""
        return self.count > 0

    def __enter__(self) -> "Interrupts":
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        try:
            self._old_handler = signal.signal(signal.SIGINT, self._handle)
            self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except ValueError:  # not the main thread
            self._old_handler = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._old_handler is not None:
            signal.set_wakeup_fd(self._old_fd)
            signal.signal(signal.SIGINT, self._old_handler)
        os.close(self.fd)
        os.close(self._write)
        self.fd = self._write = -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Two signals during one core call reach Python as one call, but as two bytes. The next may
        # call this while os.read returns: only then is the count looked at.
        try:
            arrived = max(1, os.read(self.fd, 4096).count(signal.SIGINT))
        except BlockingIOError:
            arrived = 1
        self.count += arrived
        if self._on_first:
            self._on_first()
        if self.count > 1:
            raise KeyboardInterrupt


@contextmanager
def held() -> Iterator[None]:
    """Ctrl-C waits until the block is done, and then does what it would have done at once."""
    waiting: list[int] = []
    try:
        old = signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    except ValueError:  # not the main thread: it is not interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
        if waiting and callable(old):  # not raised anew: Interrupts would count it twice
            old(signal.SIGINT, None)
