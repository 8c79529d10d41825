"""The standard streams as a shell may hand them over: closed, or with no room behind them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colibri.errors import Exit

PLAN = ["plan", "--shape", "glm-5.2", "--ram", "64", "--disk", "6.5", "--memory", "60"]
FULL = Path("/dev/full")


def colibri(arguments: list[str], redirections: str) -> subprocess.CompletedProcess[str]:
    """`colibri ARGUMENTS` as a shell starts it with these redirections."""
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "colibri"]
    return subprocess.run(
        [*command, *arguments], stdin=subprocess.PIPE, capture_output=True, text=True, timeout=120,
        env=os.environ | {"COLIBRI_THREADS": "1", "COLIBRI_STATE": "off"},
    )  # fmt: skip


def test_closed_stdin():
    """It has nothing to say: no prompt for run, the end of a chat."""
    done = colibri(["run", "-n", "3"], "<&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("colibri: error: the prompt from stdin is empty")
    done = colibri(["chat", "--quiet"], "<&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", [["run", "-p", "Hi"], ["info"], PLAN, ["doctor"], ["--help"]])
def test_closed_stdout(arguments):
    """There is nowhere to write, and that is an error in one line."""
    done = colibri(arguments, ">&-")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("colibri: error: stdout is closed; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["info"]])
def test_a_reader_that_left(arguments):
    """Whoever reads no further ends the command, quietly and with the status of a closed pipe."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "colibri", *arguments], stdout=write, stderr=subprocess.PIPE,
        text=True, timeout=120,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (Exit.PIPE_CLOSED, "")


def test_closed_stderr():
    """The answer comes all the same, only the receipt goes nowhere."""
    arguments = ["run", "-p", "Hi", "-n", "5", "--temp", "0"]
    done, usual = colibri(arguments, "2>&-"), colibri(arguments, "")
    assert done.returncode == usual.returncode == 0 and usual.stdout
    assert (done.stdout, done.stderr) == (usual.stdout, "")
    assert colibri(["info"], "<&- >&- 2>&-").returncode == 1


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["run", "-p", "Hi", "--quiet"], ["info"], ["info", "--json"], PLAN, [*PLAN, "--json"],
     ["doctor"]],
)  # fmt: skip
def test_no_room_for_the_output(arguments):
    """A full disk behind stdout is told as that, with what to do."""
    done = colibri(arguments, f"> {FULL}")
    assert done.returncode == 1
    assert done.stderr == (
        "colibri: error: stdout cannot be written: No space left on device; make room, or send it "
        "elsewhere\n"
    )
