"""The command line's edges: errors in one line, exit statuses, help, info, quick starts."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import colibri
from colibri import cli, knobs
from colibri import run as run_module
from colibri.answer import MOST_BYTES
from colibri.errors import ColibriError, UsageError
from colibri.model import available_isas
from colibri.session import Session


@pytest.fixture
def stray(tmp_path):
    """Paths that are no model."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "model.gguf").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("run -p Hi --temp hot", 2, "--temp is 'hot'; expected a number from 0 to 100"),
        ("run -p Hi --tmep 1", 2, "--tmep"),
        ("run -p Hi --seed", 2, "--seed"),
        ("run -p --stats", 2, "'-p' requires a value, and --stats is an option"),
        ("run --temp 0 --prompt -n 5", 2, "if it is the value: --prompt=-n. Try 'colibri run --h"),
        ("run -n -p Hi", 2, "if it is the value: --max-tokens=-p."),
        ("bench --json --quick", 2, "'--json' requires a value, and --quick is an option"),
        ("plan --shape glm-5.2 --mirror /tmp", 2, "give --disk the sum of what the drives read"),
        ("plan --shape --json", 2, "'--shape' requires a value, and --json is an option"),
        ("convert a b --experts --dry-run", 2, "'--experts' requires a value"),
        ("rum -p Hi", 2, "Did you mean 'run'?"),
        ("run a b", 2, "unexpected extra argument"),
        ("repack a b", 2, "Missing option '--to'. Choose from: colibri, public. Try 'colibri re"),
        ("run -p Hi --stats=many", 2, "--stats is 'many'; expected line, table or full"),
        ("run -p Hi nowhere", 2, "there is no model directory 'nowhere'"),
        ("run -p Hi ~nosuch/model", 2, "MODEL is '~nosuch/model', and there is no such home"),
        ("plan --disk ~nosuch", 2, "--disk is '~nosuch', and there is no such home"),
        ("plan --shape ~nosuch", 2, "--shape is '~nosuch', and there is no such home"),
        ("run {stray}/model.gguf -p Hi", 2, "is a file (GGUF is not read); give the directory"),
        ("run {stray}/file -p Hi", 2, "is a file; give the directory that holds config.json"),
        ("run {stray}/empty -p Hi", 1, "config.json: not found"),
        ("run -p Hi --ctx 5000", 2, "--ctx is 5000, and this model handles 1024 tokens"),
        ("run -p Hi --ram 1M", 2, "--ram"),
        ("run -p Hi -f {stray}/file", 2, "--prompt and --prompt-file exclude each other"),
        ("run -f {stray}/nothing", 2, "No such file or directory"),
        ("run -f {stray}/empty", 2, "Is a directory"),
        ("run -f {stray}/latin1", 2, "is not UTF-8 text at byte 3"),
        ("run -p Hi --raw --system x", 2, "drop one of them"),
        ("info nowhere", 2, "there is no model directory"),
        ("info {stray}/empty", 1, "config.json: not found"),
    ],
)
def test_errors(command, stray, arguments, status, message):
    """Each is one line on stderr that says what is wrong, nothing on stdout, and a status."""
    result = command(*arguments.format(stray=stray).split())
    assert (result.status, result.out) == (status, "")
    assert result.err.startswith("colibri: error: ") and result.err.count("\n") == 1
    assert message in result.err


def test_a_model_from_a_variable_that_is_not_set(command):
    """`colibri run "$MODEL"` must not take the current directory, nor the demo, for the model."""
    for name in ("", " "):
        result = command("run", name, "-p", "Hi")
        assert result.status == 2 and "MODEL is empty (a variable not set?)" in result.err


def test_a_prompt_that_is_an_option(command):
    """It can be written, behind an equals sign."""
    greedy = ("-n", "3", "--temp", "0")
    written = command.answer("--prompt=--stats", *greedy)
    piped = command.answer(*greedy, stdin=b"--stats")
    assert written["text"] == piped["text"]


@pytest.mark.parametrize("text", ["", " ", "\n\t \n"])
@pytest.mark.parametrize("source", ["flag", "stdin"])
def test_empty_prompts(command, text, source):
    """An empty or blank prompt is refused, wherever it came from."""
    arguments = ["-p", text] if source == "flag" else []
    result = command("run", *arguments, stdin=text.encode())
    assert result.status == 2 and "is empty" in result.err


def test_a_prompt_in_place_of_the_model(command):
    """People write the prompt first; the message says where it goes, for any command."""
    for name in ("run", "chat", "plan"):
        result = command(name, "Tell me a story")
        assert result.status == 2 and "If it is a prompt: colibri run --prompt TEXT." in result.err


@pytest.mark.parametrize("prefix", ["hf://", ""])
def test_a_hubs_name_in_place_of_the_model(command, prefix):
    """What is on a hub has to be converted first; the message has the command."""
    result = command("run", f"{prefix}owner/GLM-5.2", "-p", "Hi")
    assert result.status == 2 and "colibri convert hf://owner/GLM-5.2 DIR" in result.err


def bytes_of(*arguments: str | bytes, **env: str) -> subprocess.CompletedProcess[bytes]:
    """`colibri run ARGUMENTS` in a process of its own, where arguments are bytes."""
    program = [sys.executable, "-m", "colibri", "run", "--quiet", "--temp", "0", *arguments]
    return subprocess.run(program, capture_output=True, env=os.environ | env, timeout=120)


@pytest.mark.parametrize("flag", ["--prompt", "--system"])
def test_arguments_that_are_no_text(flag):
    """A prompt or system message that is not UTF-8 is refused, as a file of it is."""
    result = bytes_of("-p", "Hi", flag, b"caf\xe9")
    message = f"colibri: error: {flag} is not UTF-8 text\n".encode()
    assert (result.returncode, result.stderr) == (2, message)


def test_arguments_in_an_ascii_locale():
    """A prompt is UTF-8 whatever the locale says."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    here = bytes_of("-n", "8", "-p", "Zoë \U0001f426", PYTHONUTF8="1")
    there = bytes_of("-n", "8", "-p", "Zoë \U0001f426".encode(), **ascii_only)
    assert here.returncode == there.returncode == 0 and here.stdout == there.stdout


def test_long_prompt(command):
    """A prompt that leaves no room is refused with both numbers and the flag."""
    result = command("run", "-p", "word " * 600, "--ctx", "128")
    assert (result.status, result.out) == (1, "")
    assert "the context holds 128" in result.err and "--ctx raises it, to 1024" in result.err
    result = command("run", "-p", "word " * 1500)
    assert "the context holds 1024" in result.err and "shorten the prompt" in result.err


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_prompt_that_cannot_fit(command, tmp_path, raw):
    """Megabytes are refused with their size and what that is in tokens at least."""
    (tmp_path / "long").write_text("word " * 400_000)
    result = command("run", "--prompt-file", str(tmp_path / "long"), *raw)
    assert (result.status, result.out) == (1, "")
    numbers = r"has \d{7} bytes, at least \d{6} tokens, and the context holds 1024, answer included"
    assert re.search(numbers, result.err)


class Endless(io.RawIOBase):
    """What `yes` writes; it does not run for ever if everything is read."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        assert self.given <= MOST_BYTES + (1 << 20), "more was read than a prompt may have"
        buffer[:] = b"y\n" * (len(buffer) // 2) + b"y" * (len(buffer) % 2)
        self.given += len(buffer)
        return len(buffer)


def test_prompt_that_never_ends(command, tmp_path, monkeypatch):
    """No more is read, of stdin or a file, than a prompt may have; the limit is told."""
    with (tmp_path / "long").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    result = command("run", "--prompt-file", str(tmp_path / "long"))
    assert result.status == 2 and f"long has more than {MOST_BYTES} bytes" in result.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    with pytest.raises(UsageError, match=f"from stdin has more than {MOST_BYTES} bytes"):
        run_module.read_prompt(None, None, raw=False)


def test_debug_shows_the_traceback(command):
    """COLIBRI_DEBUG=1 shows where an error came from, before its line."""
    arguments = ("run", "nowhere", "-p", "Hi")
    assert "Traceback" not in command(*arguments).err
    told = command(*arguments, env={"COLIBRI_DEBUG": "1"}).err
    assert "Traceback" in told and told.splitlines()[-1].startswith("colibri: error: ")


def test_slips_in_the_environment(command):
    """A COLIBRI_ variable that is no knob gets a warning, and the run goes on."""
    result = command("run", "-p", "Hi", "-n", "1", "--quiet", env={"COLIBRI_SEDE": "1"})
    assert result.status == 0
    assert result.err == (
        "colibri: warning: COLIBRI_SEDE is not a knob; did you mean COLIBRI_SEED?\n"
    )


@pytest.mark.parametrize("arguments", [["run", "-p", "Hi"], ["plan"], ["doctor"]])
def test_kernels_of_another_processor(command, arguments):
    """They are refused with the names of those that there are."""
    there = available_isas()
    foreign = next(name for name in knobs.BY_NAME["isa"].kind.words if name not in there)
    result = command(*arguments, env={"COLIBRI_ISA": foreign})
    assert (result.status, result.out) == (2, "")
    assert result.err == (
        f"colibri: error: COLIBRI_ISA is '{foreign}', and this processor runs {', '.join(there)}; "
        "unset it to get the best of them\n"
    )


# ---- what may go wrong inside -------------------------------------------------------------------


def test_nan_logits(command, monkeypatch):
    """A model whose output is not a number ends in one line, not in a traceback or in NaN."""
    real = Session.read

    def broken(self, *arguments, **more):
        yield from real(self, *arguments, **more)
        self.logits[:] = np.nan

    monkeypatch.setattr(Session, "read", broken)
    result = command("run", "-p", "Hi", "--json")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("colibri: error: ") and "NaN" in result.err


def test_partly_nan_logits(command, monkeypatch):
    """Single bad logits are skipped, the answer goes on, and the receipt tells."""
    real = Session.read

    def broken(self, *arguments, **more):
        yield from real(self, *arguments, **more)
        self.logits[0, :3] = np.nan, np.inf, -np.inf

    monkeypatch.setattr(Session, "read", broken)
    result = command("run", "-p", "Hi", "--stats", "--temp", "0")
    assert result.status == 0 and len(result.out) > 1
    assert "note       2 of " in result.err


def test_error_in_the_middle(command, monkeypatch):
    """What was shown stays; the error comes on a line of its own."""
    real = Session.step_all

    def failing(self, ids, want="all"):
        if self.length > 20:
            raise ColibriError("the disk is gone")
        return real(self, ids, want)

    monkeypatch.setattr(Session, "step_all", failing)
    result = command("run", "-p", "Tell me a story about a fox.", "--temp", "0", "--draft", "0")
    assert result.status == 1 and result.out == "Once upon a time, there was a\n"
    assert result.err == "colibri: error: the disk is gone\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory"),
        (
            PermissionError(13, "Permission denied", "/x"),
            "error: /x: Permission denied; see who may",
        ),
    ],
)
def test_errors_of_the_system(command, monkeypatch, error, message):
    """Errors of the operating system are told like any other."""

    def failing(*arguments):
        raise error

    monkeypatch.setattr(run_module, "read_prompt", failing)
    result = command("run", "-p", "Hi")
    assert result.status == 1 and "Traceback" not in result.err
    assert result.err.startswith("colibri: error: ") and message in result.err


# ---- help, version, info ------------------------------------------------------------------------


def test_version(command):
    """--version prints name and version."""
    assert command("--version") == (0, f"colibri {colibri.__version__}\n", "")


def test_bare_command(command):
    """Without a command the help goes to stderr, with the status of wrong usage."""
    result = command()
    assert (result.status, result.out) == (2, "") and "Commands:" in result.err


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(command, flag):
    """Help goes to stdout and lists every command, with a sentence that fits its line."""
    result = command(flag, env={"COLUMNS": "80"})
    lines = result.out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    listed = [line.split()[0] for line in lines]
    assert result.status == 0 and listed[0] == "run" and len(set(listed)) == len(listed)
    assert set(listed) == {*cli.cli.commands, *cli._ELSEWHERE}
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def test_info(command, demo_path):
    """`colibri info` describes the demo unless told otherwise, in words and as JSON."""
    words = command("info")
    assert words == command("info", str(demo_path))
    assert "glm_moe_dsa" in words.out and "int4-g64" in words.out
    facts = json.loads(command("info", "--json").out)
    assert sum(part["nbytes"] for part in facts["parts"]) == facts["file_bytes"]


def test_ctrl_c_while_importing(tmp_path):
    """It ends the program as it ends any other, without a traceback."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'colibri = "colibri.__main__:main"' in project
    run = [sys.executable, "-m", "colibri", "--version"]
    done = subprocess.run(
        run, capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["run", "-x"]])
def test_quick_start(arguments):
    """What needs no model imports neither NumPy nor the core."""
    code = (
        "import sys; from colibri.cli import main; main(sys.argv[1:]); "
        "print([m for m in ('numpy', 'tokenizers', 'jinja2', 'colibri._core') if m in sys.modules])"
    )
    run = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(run, capture_output=True, timeout=60, check=True)
    assert done.stdout.decode().splitlines()[-1] == "[]"


def test_numpy_starts_no_threads():
    """Its BLAS would keep a core busy beside ours; what somebody set stays."""
    program = (
        "import os, sys; from colibri.__main__ import main; sys.argv[1:] = ['info']; main(); print("
        "os.environ['OPENBLAS_NUM_THREADS'], len(os.listdir('/proc/self/task')))"
    )
    bare = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    for given, expected in (({}, "1 1"), ({"OPENBLAS_NUM_THREADS": "2"}, "2 ")):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=bare | given,
            timeout=120, check=True,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1].startswith(expected)
