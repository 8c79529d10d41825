"""Someone at a terminal: starts the command on a pseudo-terminal, types, and reads the screen."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import termios
import time
from pathlib import Path

import pexpect
import pyte

LIMIT = 60  # seconds before a test gives up
GATED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import gate
from colibri import cli
gate.install(os.open(sys.argv[2], os.O_RDONLY), sys.argv[3])
sys.exit(cli.main(sys.argv[4:]))
"""


class Person:
    """`colibri ARGUMENTS` on a terminal of its own; the screen is what an xterm would show.

    `raw` is everything the program wrote. The screen is long enough not to scroll in tests. With a
    `gate` (show or progress) the program waits there until `open`.
    """

    def __init__(
        self, *arguments: str, columns: int = 80, rows: int = 150, gate: str = "", **env: str
    ) -> None:
        kept = {"PATH", "HOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
        base = {name: os.environ[name] for name in kept & set(os.environ)}
        program, self._gate = ["-m", "colibri"], -1
        if gate:
            self._pipe = Path(tempfile.mkdtemp()) / "gate"
            os.mkfifo(self._pipe)
            self._gate = os.open(self._pipe, os.O_RDWR)
            program = ["-c", GATED, str(Path(__file__).parent), str(self._pipe), gate]
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._text: str | None = None
        self.child = pexpect.spawn(
            sys.executable, [*program, *arguments], timeout=LIMIT, dimensions=(rows, columns),
            env=base | {"TERM": "xterm", "COLIBRI_THREADS": "1", "COLIBRI_STATE": "off"} | env,
        )  # fmt: skip
        self.child.delaybeforesend = None

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        if self.child.isalive():
            self.child.kill(signal.SIGKILL)
            self.child.wait()
        self.child.ptyproc.delayafterclose = 0
        self.child.close()

    def open(self) -> None:
        """Let everything pass the gate (see gate.py), now and later."""
        if self._gate >= 0:
            os.close(self._gate)
            self._pipe.unlink()
            self._pipe.parent.rmdir()
        self._gate = -1

    @property
    def text(self) -> str:
        """The screen, without what is blank at its ends."""
        if self._text is None:
            buffer, columns = self.screen.buffer, range(self.screen.columns)
            rows = (buffer[y] for y in range(max(buffer, default=-1) + 1))
            lines = ["".join(row[x].data for x in columns) if row else "" for row in rows]
            self._text = "\n".join(line.rstrip() for line in lines).strip("\n")
        return self._text

    def until(self, pattern: str) -> str:
        """Wait until the screen matches; returns the screen."""
        end = time.monotonic() + LIMIT
        while not re.search(pattern, self.text):
            assert time.monotonic() < end, f"{pattern!r} never came:\n{self.text}"
            if not self._read():
                assert re.search(pattern, self.text), f"{pattern!r} is not in:\n{self.text}"
                break
        return self.text

    def ready(self) -> str:
        """Wait for an empty prompt in the last line, not the first; returns the screen."""
        return self.until(r"\n>$")

    def type(self, text: str) -> None:
        """Keys; Enter is \\r."""
        self.child.send(text)

    def say(self, text: str) -> str:
        """A line at the prompt, and everything until the next one; returns the screen."""
        self.ready()
        self.screen.reset()
        self._text = None
        self.type(text + "\r")
        return self.ready()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """A signal as a program would send it; returns when it has been taken, so two are two."""
        os.kill(self.child.pid, number)
        self._until_without("ShdPnd", number)

    def until_deadly(self, number: int) -> None:
        """Wait until the program no longer catches a signal."""
        self._until_without("SigCgt", number)

    def _until_without(self, mask: str, number: int) -> None:
        """Wait until a mask of signals in /proc lacks this one."""
        status = Path(f"/proc/{self.child.pid}/status")
        while status.exists():
            text = status.read_text()
            found = re.search(rf"{mask}:\s*([0-9a-f]+)\n", text)
            ended = "State:\tZ" in text
            if ended or not found or not int(found[1], 16) >> (number - 1) & 1:
                break
            time.sleep(0.001)

    def cooked(self) -> bool:
        """Whether the terminal takes lines and echoes them, as a shell expects it."""
        modes = termios.tcgetattr(self.child.child_fd)[3]
        return bool(modes & termios.ICANON and modes & termios.ECHO)

    def hang_up(self) -> int:
        """Close the terminal, as one closes a window; returns the exit status."""
        self.child.ptyproc.fileobj.close()
        self.open()
        self.child.wait()
        return self.child.exitstatus

    def end(self) -> int:
        """Wait for the program to end; returns its exit status."""
        end = time.monotonic() + LIMIT
        while self._read():
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
        self.child.wait()
        return self.child.exitstatus

    def _read(self) -> bool:
        """Take in what is there, waiting a little; False once the program is gone."""
        try:
            data = self.child.read_nonblocking(1 << 16, timeout=0.1)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._text = None
        self._stream.feed(data)
        return True
