"""Runs the command in a process whose output the test lets through piece by piece.

    python gate.py FD show|progress|load ARGUMENTS...

After every piece shown (or after every chunk of the prompt, or every layer loaded) it waits for a
byte on FD; once FD is closed it waits no more. So a test acts at a known moment, without measuring
time.
"""

import os
import sys

from colibri import cli
from colibri.session import ROWS
from colibri.terminal import Terminal

GATED = {"progress": "reading", "load": "loading"}


def wait(fd: int) -> None:
    """One byte, or the end of the file."""
    os.read(fd, 1)


def on_the_way(what: str, done: int, total: int) -> bool:
    """Whether a chunk of the prompt is not done yet."""
    return what.startswith("reading") and done < total and (done == 0 or done % ROWS > 0)


def install(fd: int, where: str) -> None:
    """Put the gate into Terminal."""
    show, progress = Terminal.show, Terminal.progress

    def gated_show(self, piece):
        show(self, piece)
        wait(fd)

    def gated_progress(self, what, done, total):
        progress(self, what, done, total)
        if what.startswith(GATED[where]) and not on_the_way(what, done, total):
            print(f"gate {done}/{total}", file=sys.stderr, flush=True)
            wait(fd)

    if where == "show":
        Terminal.show = gated_show
    else:
        Terminal.progress = gated_progress


if __name__ == "__main__":
    install(int(sys.argv[1]), sys.argv[2])
    sys.exit(cli.main(sys.argv[3:]))
