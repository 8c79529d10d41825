"""Ctrl-C: the first ends the turn, the second quits.

A signal handler written in Python cannot run while the core computes, but the interpreter's own
handler writes each signal's number to a pipe at once. The core watches that pipe between layers,
and before it waits for experts.
SIGHUP and SIGTERM end a chat, or a run, as Ctrl-C ends a turn: what was said is kept.
"""

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, each SIGINT makes `fd` readable and calls `stop`.

    The second raises KeyboardInterrupt in the main thread, as soon as the core returns to Python.
    Outside the main thread nothing is installed.
    """

    def __init__(self, stop: Callable[[], None] | None = None) -> None:
        self.count = 0
        self.fd = -1
        self._stop = stop
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

    def __exit__(self, *_: object) -> None:
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
        if self._stop:
            self._stop()
        if self.count > 1:
            raise KeyboardInterrupt


class ReadAborted(BaseException):
    """Raised to break off reading a line because the chat is to end."""


class TerminationSignals:
    """While entered, SIGHUP and SIGTERM ask the chat to end instead of killing the process.

    `number` is the first that came, 0 before. Outside the main thread nothing is installed.
    """

    def __init__(self) -> None:
        self.number = 0
        self._stop: Callable[[], None] | None = None
        self._old: dict[int, Any] = {}

    @property
    def status(self) -> int:
        """The exit status, as of a program that the signal has killed; 0 when none came."""
        return 128 + self.number if self.number else 0

    def __enter__(self) -> "TerminationSignals":
        with suppress(ValueError):  # not the main thread
            for number in (signal.SIGHUP, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """A signal calls `stop` while the block runs; one that came before does so at once."""
        self._stop = stop
        try:
            if self.number:
                stop()
            yield
        finally:
            self._stop = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Of a terminal that is closed both the shell and the kernel tell: SIGHUP counts once.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        self.number = self.number or number
        if self._stop:
            self._stop()


def wait_readable(fd: int) -> None:
    """Return once `fd` can be read, or after a signal's handler ran, and raised or not.

    A signal that comes just before a read begins would wait for the read's end: not for this one's.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    try:
        old = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            select.select([fd, woken], [], [])
        finally:
            signal.set_wakeup_fd(old)
    finally:
        os.close(woken)
        os.close(wake)


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
