"""Ctrl-C that has to wait, in this process."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator

import pytest

from colibri.interrupt import Interrupts, ReadAborted, TerminationSignals, held, wait_readable


def test_it_waits_until_the_block_is_done():
    """The block ends, an error of its own included, and then the program is interrupted."""
    done = []
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        done.append("whole")
    with pytest.raises(KeyboardInterrupt) as error, held():
        signal.raise_signal(signal.SIGINT)
        raise OSError("full")
    assert done == ["whole"] and isinstance(error.value.__context__, OSError)
    with held():
        done.append("quiet")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_counts_once():
    """A signal that waited is one signal to Interrupts; the next one is the second."""
    asked = []
    with Interrupts(lambda: asked.append(True)) as interrupts:
        with held(), held():
            signal.raise_signal(signal.SIGINT)
            assert not interrupts.requested
        assert (interrupts.count, asked) == (1, [True])
        with pytest.raises(KeyboardInterrupt), held():
            signal.raise_signal(signal.SIGINT)
        assert interrupts.count == 2


def test_a_second_signal_while_the_first_is_counted(monkeypatch):
    """It interrupts the handler itself, and two are two all the same."""
    read, signals = os.read, [signal.SIGINT]

    def interrupted(fd: int, size: int) -> bytes:
        data = read(fd, size)
        if signals:
            signal.raise_signal(signals.pop())
        return data

    monkeypatch.setattr("colibri.interrupt.os.read", interrupted)
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupts.count == 2


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP is not ignored, as it would be where the tests run under nohup."""
    usual = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, usual)


@pytest.mark.usefixtures("hangups")
def test_termination_signals():
    """The first signal is the status and stops what runs; a second SIGHUP is the same terminal's,
    a second SIGTERM deadly; afterwards all is as it was."""
    usual, stopped = [signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGTERM)], []
    with TerminationSignals() as signals:
        assert signals.status == 0
        with signals.stopping(lambda: stopped.append(signals.number)):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert (stopped, signals.status) == ([signal.SIGHUP] * 2, 129)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGTERM)] == usual


def test_termination_signals_before_anything_runs():
    """A signal between two things to stop stops the next one before it begins."""

    def abort() -> None:
        raise ReadAborted

    with TerminationSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(ReadAborted), signals.stopping(abort):
            pytest.fail("it ran")


def test_termination_signals_leave_ignored_signals_alone():
    """Under nohup a closed terminal ends nothing."""
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with TerminationSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.number == 0
    finally:
        signal.signal(signal.SIGHUP, usual)


def test_other_threads_have_nothing_to_hold():
    """Only the main thread is interrupted; elsewhere the block simply runs."""
    done = []

    def work() -> None:
        with held():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done


def test_a_wait_ends_with_a_signal():
    """It is over once a handler has run, though nothing came; and nothing of it is left."""
    read, write = os.pipe()
    seen: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    soon = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    late = threading.Timer(30, os.write, (write, b"x"))  # so that a fault fails, and does not hang
    try:
        soon.start()
        late.start()
        wait_readable(read)
        assert seen and not select.select([read], [], [], 0)[0]
        os.write(write, b"x")
        wait_readable(read)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        late.cancel()
        signal.signal(signal.SIGUSR1, old)
        os.close(read)
        os.close(write)
