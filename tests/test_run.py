"""`colibri run` as a process: streaming, closed pipes, Ctrl-C, terminals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

GATE = Path(__file__).with_name("gate.py")
STORY = "Tell me a story about a fox."
LONG = "Tell me. " * 150
RUN = ("run", "-p", STORY, "--temp", "0")
LIMIT = 60  # seconds before a test gives up on a process
ESCAPE = "\x1b"


def environment(**more: str) -> dict[str, str]:
    """This environment without anything that would turn a knob."""
    kept = {"PATH", "HOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "SYSTEMROOT"}
    return {name: os.environ[name] for name in kept & set(os.environ)} | more


def whole_story() -> str:
    """The greedy answer to STORY, uninterrupted."""
    done = subprocess.run(
        [sys.executable, "-m", "colibri", *RUN], stdin=subprocess.DEVNULL,
        capture_output=True, timeout=LIMIT, env=environment(), check=True,
    )  # fmt: skip
    return done.stdout.decode()


@dataclass
class Gated:
    """A command that waits after each piece (see gate.py)."""

    process: subprocess.Popen[bytes]
    gate: int
    screen: int = -1  # the terminal's other end, if it has one

    def read(self, pattern: str) -> str:
        """Output (stdout, or the terminal) up to and including a match."""
        source = self.process.stdout.fileno() if self.screen < 0 else self.screen
        return read_until(source, pattern)

    def open(self) -> None:
        """Let everything pass."""
        if self.gate >= 0:
            os.close(self.gate)
        self.gate = -1

    def end(self) -> tuple[int, str, str]:
        """Open the gate; exit status, rest of stdout (or of the terminal), stderr."""
        self.open()
        if self.screen >= 0:
            rest = read_until(self.screen, None)
            return self.process.wait(LIMIT), rest, ""
        out, err = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, (out or b"").decode(), (err or b"").decode()


def read_until(fd: int, pattern: str | None) -> str:
    """Read until the text matches, or to the end."""
    data = b""
    while pattern is None or not re.search(pattern, data.decode("utf-8", "replace"), re.DOTALL):
        try:
            piece = os.read(fd, 4096)
        except OSError:  # a terminal whose program ended
            piece = b""
        if not piece:
            assert pattern is None, f"{pattern!r} not found in {data!r}"
            break
        data += piece
    return data.decode("utf-8", "replace")


@contextmanager
def gated(where: str, *arguments: str, terminal: bool = False, **env: str) -> Iterator[Gated]:
    """Start a gated command, its streams pipes or one terminal."""
    reads, writes = os.pipe()
    screen, line = pty.openpty() if terminal else (-1, subprocess.PIPE)
    process = subprocess.Popen(
        [sys.executable, str(GATE), str(reads), where, *arguments],
        stdin=line if terminal else subprocess.DEVNULL, stdout=line, stderr=line,
        pass_fds=[reads], start_new_session=True, env=environment(**env),
        preexec_fn=_take_terminal if terminal else None,
    )  # fmt: skip
    os.close(reads)
    if terminal:
        os.close(line)
    command = Gated(process, writes, screen)
    try:
        yield command
    finally:
        command.open()
        process.kill()
        process.wait()
        for end in (process.stdout, process.stderr):
            if end:
                end.close()
        if screen >= 0:
            os.close(screen)


def _take_terminal() -> None:
    """Make the terminal on stdin the child's own, so that Ctrl-C typed there reaches it."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


# ---- the answer ---------------------------------------------------------------------------------


def test_streams_as_it_is_made():
    """The first piece is on stdout while the program still waits with the rest."""
    with gated("show", *RUN) as command:
        first = command.read(r"\w")
        assert command.process.poll() is None
        status, rest, _ = command.end()
    whole = whole_story()
    assert status == 0 and len(rest) > len(first) and first + rest == whole


# ---- stderr -------------------------------------------------------------------------------------


def beside(stderr: int) -> tuple[int, str]:
    """Status and answer of a run whose stderr is this descriptor."""
    done = subprocess.run(
        [sys.executable, "-m", "colibri", *RUN, "--stats"], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=stderr, timeout=LIMIT, env=environment(), check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_room_for_the_receipt():
    """An answer that is complete is a success, though its receipt finds no room."""
    with Path("/dev/full").open("wb") as full:
        assert beside(full.fileno()) == (0, whole_story())


def test_nobody_reads_stderr():
    """Nor does its reader leaving end a run whose answer is still wanted."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        assert beside(writes) == (0, whole_story())
    finally:
        os.close(writes)


def test_the_flag_without_effect_is_the_one_given(command):
    """The demo's template has no thinking switch and no effort; run and chat name the flag."""
    for flag in ("--think", "--no-think", "--effort=high"):
        name = flag.partition("=")[0]
        assert f": {name} has no effect" in command("run", "-p", "Hi", "-n", "1", flag).err
        assert f": {name} has no effect" in command("chat", flag).err


# ---- pipes and Ctrl-C ---------------------------------------------------------------------------


def test_closed_pipe_ends_quietly():
    """When the reader leaves, the program ends without a word; the status tells."""
    with gated("show", *RUN) as command:
        command.read(r"\w")
        command.process.stdout.close()
        command.process.stdout = None
        status, _, errors = command.end()
    assert (status, errors) == (141, "")


def test_head():
    """The everyday case: head takes one line of a long JSON and help text."""
    for arguments in ("run -p Hi --json", "run --help"):
        line = f"set -o pipefail; {sys.executable} -m colibri {arguments} | head -c 1"
        done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=LIMIT, check=False,
                              env=environment())  # fmt: skip
        assert len(done.stdout) == 1 and done.stderr == b""


def test_ctrl_c_in_decode_keeps_the_turn():
    """SIGINT ends the answer where it is, with its receipt and status 130."""
    with gated("show", *RUN) as command:
        first = command.read(r"\w")
        command.process.send_signal(signal.SIGINT)
        status, rest, errors = command.end()
    assert status == 130
    whole = whole_story()
    assert whole.startswith((first + rest).removesuffix("\n")) and len(first + rest) < len(whole)
    assert re.search(r"answer [1-9]\d* tokens?.*, interrupted\n$", errors)


def test_ctrl_c_in_prefill():
    """SIGINT while the prompt is read ends the turn before any answer."""
    with gated("progress", "run", "-p", LONG, "--temp", "0") as command:
        assert read_until(command.process.stderr.fileno(), "gate 128/")
        command.process.send_signal(signal.SIGINT)
        status, out, errors = command.end()
    assert (status, out) == (130, "")
    assert "answer 0 tokens" in errors and "interrupted" in errors


def test_ctrl_c_with_json():
    """An interrupted turn still prints a whole object."""
    with gated("progress", "run", "--json", "-p", LONG) as command:
        read_until(command.process.stderr.fileno(), "gate 128/")
        command.process.send_signal(signal.SIGINT)
        status, out, _ = command.end()
    assert status == 130
    assert json.loads(out)["finish_reason"] == "interrupted"


def test_a_termination_keeps_what_there_is():
    """SIGTERM ends the answer as Ctrl-C does: a whole object, and the status of that signal."""
    with gated("progress", "run", "--json", "-p", LONG) as command:
        read_until(command.process.stderr.fileno(), "gate 128/")
        command.process.terminate()
        status, out, _ = command.end()
    assert status == 128 + signal.SIGTERM
    assert json.loads(out)["finish_reason"] == "interrupted"


def test_second_ctrl_c_quits():
    """Two signals before the program comes back to Python quit it at once."""
    with gated("show", *RUN) as command:
        command.read(r"\w")
        command.process.send_signal(signal.SIGINT)
        command.process.send_signal(signal.SIGSTOP)  # so that both are told apart
        command.process.send_signal(signal.SIGINT)
        command.process.send_signal(signal.SIGCONT)
        status, _, errors = command.end()
    assert status == 130 and "Traceback" not in errors


def test_ctrl_c_while_loading():
    """Before the turn begins one Ctrl-C quits, without a traceback."""
    with gated("load", "run", "-p", STORY) as command:
        read_until(command.process.stderr.fileno(), "gate 1/")
        command.process.send_signal(signal.SIGINT)
        status, out, errors = command.end()
    assert (status, out) == (130, "")
    assert errors.splitlines()[-1] == "colibri: interrupted" and "Traceback" not in errors


# ---- terminals ----------------------------------------------------------------------------------


def test_ctrl_c_typed_at_a_terminal():
    """The key itself, in decode: the turn ends with its receipt on the same terminal."""
    with gated("show", *RUN, terminal=True) as command:
        command.read(r"Once")
        os.write(command.screen, b"\x03")
        command.read(r"\^C")
        status, rest, _ = command.end()
    assert status == 130 and "interrupted" in rest and "Traceback" not in rest


def test_progress_is_drawn_and_removed():
    """A terminal sees the prompt being read; the line is gone before the answer begins."""
    with gated("progress", "run", "-p", LONG, "-n", "3", terminal=True) as command:
        seen = command.read("gate 128/")
        status, rest, _ = command.end()
    assert status == 0
    assert re.search(r"reading the prompt \d+/606", seen + rest)
    assert re.search(r"\r\x1b\[K\w", rest) and "prompt 606 tokens" in rest


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": "dumb", "COLUMNS": "20", "LANG": "C"}])
def test_dumb_terminal(env):
    """TERM=dumb gets no escape sequence at all."""
    arguments = ("run", "-p", LONG, "-n", "3", "--temp", "0")
    with gated("show", *arguments, terminal=True, **env) as command:
        status, text, _ = command.end()
    assert status == 0 and ESCAPE not in text and "stopped at the limit" in " ".join(text.split())
    assert "COLUMNS" not in env or all(len(line) < 20 for line in text.splitlines()[1:])


def test_no_prompt_at_a_terminal():
    """With a terminal as stdin nobody waits for a prompt that was forgotten."""
    with gated("show", "run", terminal=True) as command:
        status, text, _ = command.end()
    assert status == 2 and "there is no prompt; give --prompt TEXT" in text
