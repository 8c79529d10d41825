"""Runs the command in a process whose output the test lets through piece by piece.

    python gate.py FD show|progress|load ARGUMENTS...

After every piece shown (or before every progress report of the prompt) it waits for a byte on FD;
once FD is closed it waits no more. So a test acts at a known moment, without measuring time.
"""

import os
import sys

from colibri import cli
from colibri.terminal import Terminal


def wait(fd: int) -> None:
    """One byte, or the end of the file."""
    os.read(fd, 1)


def install(fd: int, where: str) -> None:
    """Put the gate into Terminal."""
    show, progress = Terminal.show, Terminal.progress

    def gated_show(self, piece):
        show(self, piece)
        wait(fd)

    def gated_progress(self, what, done, total):
        progress(self, what, done, total)
        if what.startswith("reading" if where == "progress" else "loading"):
            print(f"gate {done}/{total}", file=sys.stderr, flush=True)
            wait(fd)

    if where == "show":
        Terminal.show = gated_show
    else:
        Terminal.progress = gated_progress


if __name__ == "__main__":
    install(int(sys.argv[1]), sys.argv[2])
    sys.exit(cli.main(sys.argv[3:]))
