"""`colibri chat` without a terminal: every line of a pipe is a turn, and every command works."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from colibri.answer import REASONING, TEXT, Splitter
from colibri.engine import Engine
from colibri.errors import StateError, UsageError
from colibri.knobs import Screen, Settings
from colibri.lines import PipedLines
from colibri.repl import Repl
from colibri.resident import Resident
from colibri.saved import Saved
from colibri.session import Session
from colibri.state import State
from colibri.terminal import Terminal

STORY = "Tell me a story about a fox."
SNOW = "What is snow?"
CHAT = ("chat", "--temp", "0")


@pytest.fixture
def talk(command, tmp_path):
    """Lines in, (status, answers, what was said beside them) out; with a state directory."""
    env = {"COLIBRI_STATE": str(tmp_path / "state")}

    def run(*lines: str, flags: tuple[str, ...] = (), end: str = "\n"):
        stdin = "".join(line + end for line in lines).encode()
        return command(*CHAT, *flags, stdin=stdin, env=env)

    return run


def one(command, prompt: str) -> str:
    """What `colibri run` answers."""
    return command("run", "-p", prompt, "--temp", "0").out


def test_one_line_is_one_turn(talk, command):
    """Answers, one after another, and nothing else on stdout; blank lines are no turns."""
    result = talk(STORY, "", "   ", SNOW)
    assert result.status == 0
    first = one(command, STORY)
    assert result.out.startswith(first) and len(result.out) > len(first)
    assert result.err.count("tok/s") == 2 and "\x1b" not in result.err
    quiet = talk(STORY, "", SNOW, flags=("--quiet",))
    assert quiet == (0, result.out, "")
    assert talk(STORY, SNOW, flags=("--quiet",), end="\r\n") == quiet


def test_a_last_line_without_an_end(talk, command):
    """The end of the pipe ends a line too; an empty pipe is no error."""
    assert talk(SNOW, end="").out == one(command, SNOW)
    assert talk().out == "" and talk().status == 0


def test_what_is_wrong_is_told_and_the_rest_goes_on(talk, command):
    """Errors of single lines go to stderr; the status tells at the end."""
    long = "word " * 1500
    for line, words in {
        "/nonsense": "there is no command /nonsense",
        "/": "there is no command /;",
        "/more": "no answer that was cut off",
        "/retry": "no question yet",
        "/stats": "there was no turn yet",
        "/think harder": "expected on, off, low, high, max, show or hide",
        "/save": "give it a name",
        "/save two words": "a name is one word",
        "/hlep": "did you mean /help?",
        "/load nothing": "no saved session 'nothing'",
        "/save ../x": "cannot be the name of a session",
        long: "Or /reset: the conversation begins anew.",
    }.items():
        result = talk(line, SNOW, flags=("--quiet",))
        assert result.status == 1 and result.out == one(command, SNOW)
        assert words in result.err and result.err.count("\n") == 1


def test_bytes_that_are_no_text(command):
    """A line in another encoding is refused by its number."""
    result = command(*CHAT, "--quiet", stdin=b"caf\xe9\n" + SNOW.encode() + b"\n")
    assert (result.status, result.out) == (1, one(command, SNOW))
    assert result.err == "colibri: error: line 1 of stdin is not UTF-8 text at byte 3\n"


def test_lines_without_end(monkeypatch):
    """A line that is too long is refused once that is known, what follows is read; no read asks for
    more than that."""

    class Buffer(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            assert size is not None and 0 < size <= 1 << 20
            return super().readline(size)

    monkeypatch.setattr("colibri.lines.MOST_BYTES", 1000)
    stdin = io.TextIOWrapper(
        Buffer(b"x" * 1000 + b"\n" + b"y" * (3 << 20) + b"\nz\n" + b"x" * 1001)
    )
    monkeypatch.setattr("sys.stdin", stdin)
    lines = PipedLines()
    assert lines.read() == "x" * 1000
    with pytest.raises(UsageError, match="line 2 of stdin has more than 1000 bytes"):
        lines.read()
    assert stdin.buffer.tell() == 1001 + 1001
    assert lines.read() == "z"
    with pytest.raises(UsageError, match="line 4 of stdin"):
        lines.read()
    assert lines.read() is None


def test_sigterm_at_a_pipe(tmp_path):
    """A chat that waits for its next line ends with what was said saved."""
    env = os.environ | {"COLIBRI_THREADS": "1", "COLIBRI_STATE": str(tmp_path / "state")}
    start = [sys.executable, "-m", "colibri", *CHAT, "--session", "s"]
    with subprocess.Popen(
        start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as chat:
        assert chat.stdin and chat.stdout and chat.stderr
        chat.stdin.write(SNOW.encode() + b"\n")
        chat.stdin.flush()
        assert chat.stdout.readline()
        chat.send_signal(signal.SIGTERM)
        assert chat.wait(60) == 143 and b"Traceback" not in chat.stderr.read()
    document = (tmp_path / "state" / "sessions" / "s" / "session.json").read_bytes()
    assert SNOW.encode() in document


def test_a_conversation_that_is_full(talk):
    """A short message is not told to be shorter: the conversation is full, and --ctx is named where
    the model has a larger context."""
    small = talk(STORY, "Hi", flags=("--ctx", "32"))
    said = small.err.replace("\n", " ")
    assert "error: the conversation is full: with what was said before, the prompt has" in said
    assert "--ctx raises it, to 1024 at most" in said and "Or /reset" in said
    whole = talk("Tell me. " * 250, "Hi", "Hi", "Hi").err
    assert "is full" in whole and "no larger one. Or /reset" in whole
    assert "shorten the prompt" not in whole


def test_what_was_said_commands_no_terminal(tmp_path):
    """Escapes in reasoning that is unfolded, and in a system message, are shown, not obeyed."""
    engine = Engine.open(Settings.resolve({"temperature": "0", "threads": "1"}, {}))
    out, state = Watched(), State(tmp_path, print)
    terminal = Terminal(out, out, Screen(color=False))
    repl = Repl(engine, terminal, PipedLines(), state, Resident(engine, state))
    repl._last = SimpleNamespace(reasoning="so\x1b]0;x\x07")
    for line in ("/think show", "/system a\x1b[2Jb"):
        assert repl.take(line)
    seen = out.getvalue()
    assert "so\u241b]0;x\u2407" in seen and "a\u241b[2Jb" in seen and "\x1b" not in seen


def test_quit_ends_it(talk, command):
    """What follows is not asked; a doubled slash is a message."""
    for word in ("/quit", ":q", ":wq", "/exit"):
        assert talk(SNOW, word, STORY).out == one(command, SNOW)
    assert talk("//quit", ":)", "/quit").err.count("tok/s") == 2


def test_commands(talk, command):
    """Each does what help says."""
    result = talk(SNOW, "/stats", "/stats full", "/reset", SNOW, "/help")
    assert result.status == 0 and result.out == 2 * one(command, SNOW)
    assert "forwards" in result.err and "a plain step: " in result.err
    assert re.search("passes .* index scores\n", result.err)
    assert "/system [TEXT|off]" in result.err and "forgotten" in result.err
    again = talk(SNOW, "/retry")
    assert again.out == 2 * one(command, SNOW) and "the same answer" in again.err
    system = talk("/system", "/system Be brief.", "/system", "/system off")
    assert system.err.splitlines()[-4:] == [
        "there is no system message", "Be brief.", "Be brief.", "there is no system message",
    ]  # fmt: skip


def test_parts_of_an_answer(talk, command):
    """Cut off at the limit, more goes on."""
    parts = talk(STORY, "/more", "/more", flags=("-n", "5")).out.splitlines()
    whole = one(command, STORY)
    assert len(parts) == 3 and whole.startswith("".join(parts))


def test_thinking(talk):
    """The demo's template has no choice about reasoning, and that is said."""
    result = talk("/think", "/think off")
    assert result.status == 0
    said = result.err.replace("\n", " ")
    assert said.count("this model's template has no choice about reasoning") == 3


class Watched(io.StringIO):
    """A stream that somebody watches."""

    def isatty(self) -> bool:
        return True


def test_thinking_shown_and_hidden(monkeypatch, tmp_path):
    """A person sees reasoning dimmed, or folded into a line, and can unfold it; the template hears
    of every choice."""

    def following(self, token: int) -> str:
        self.seen = getattr(self, "seen", 0) + 1
        return REASONING if self.seen <= 5 else TEXT

    monkeypatch.setattr(Splitter, "_following", following)
    engine = Engine.open(Settings.resolve({"temperature": "0", "threads": "1"}, {}))
    engine.template.has_thinking_switch = engine.template.has_effort = True
    out, state = Watched(), State(tmp_path, print)
    terminal = Terminal(out, out, Screen())
    repl = Repl(engine, terminal, PipedLines(), state, Resident(engine, state))
    assert repl.take(SNOW) and re.search("\x1b\\[2m[^\x1b]+\x1b\\[0m\n\n", out.getvalue())
    thought = repl.talk.messages[-1]["reasoning_content"]
    assert thought and thought not in repl.talk.messages[-1]["content"]
    said = out.tell()
    for line in ("/think hide", "/retry"):
        repl.take(line)
    folded = out.getvalue()[said:]
    words = len(thought.split())
    assert f"(thought {words} words; /think show)" in folded and "hidden" in folded
    assert f"\x1b[2m{thought}" not in folded
    said = out.tell()
    repl.take("/think show")
    assert thought.strip() in out.getvalue()[said:]
    for word, choice in {"off": (False, None), "max": (True, "max"), "on": (True, "max")}.items():
        repl.take(f"/think {word}")
        assert (repl.talk.thinking, repl.talk.effort) == choice
    assert "reasoning on, effort max" in out.getvalue()


# ---- sessions -----------------------------------------------------------------------------------


def test_ctrl_c_while_the_open_session_is_loaded(tmp_path, monkeypatch):
    """The chat goes on with the session it had, and nobody else can open that."""
    engine = Engine.open(Settings.resolve({"temperature": "0", "threads": "1"}, {}))
    out, state = Watched(), State(tmp_path, print)
    repl = Repl(engine, Terminal(out, out, Screen()), PipedLines(), state, Resident(engine, state))
    repl.resume("trip", new=True)
    assert repl.take(SNOW) and repl.take("/save trip")

    def interrupted(place: Saved, session: Session) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Saved, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        repl.take("/load trip")
    other = Saved(state, "trip", engine.container, engine.tokenizer.digest)
    with pytest.raises(StateError, match="open in another colibri"):
        other.open()
    repl.close()


def test_a_session_goes_on(talk, tmp_path):
    """Two chats of one session say what one chat says; the second announces what it takes up."""
    together = talk(STORY, SNOW, flags=("--session", "whole")).out
    first = talk(STORY, flags=("--session", "parts"))
    second = talk(SNOW, flags=("--session", "parts"))
    assert first.out + second.out == together
    assert "session 'parts' is new" in first.err and "resumed 'parts', saved " in second.err
    assert "1 of them to be read again" in second.err.replace("\n", " ")


def test_save_and_load(talk):
    """A conversation gets a name, another does not take it, and both come back."""
    result = talk(STORY, "/save fox", "/reset", SNOW, "/save snow", "/load", "/load fox", "/retry")
    assert result.status == 0
    lines = result.out.splitlines()
    assert lines[-1] == lines[0]
    listed = re.findall(r"^(\w+)  \d{4}-\d\d-\d\d \d\d:\d\d$", result.err, re.MULTILINE)
    assert sorted(listed) == ["fox", "snow"] and "resumed 'fox'" in result.err
    taken = talk(SNOW, "/save fox")
    assert taken.status == 1 and "/save fox replace" in taken.err
    assert talk(SNOW, "/save fox replace").status == 0
    assert "1 question" in talk("/load fox").err


@pytest.mark.parametrize("change", ["gone", "replaced"])
def test_a_session_is_of_the_tokenizer_that_was_loaded(talk, demo_path, tmp_path, change):
    """What becomes of tokenizer.json while the chat runs does not matter to what it saves."""
    model, lines = tmp_path / "model", PipedLines.read
    shutil.copytree(demo_path, model)
    path = model / "tokenizer.json"
    text = path.read_text()

    def read(self: PipedLines) -> str | None:
        path.unlink(missing_ok=True)
        if change == "replaced":
            path.write_text(text + "\n")
        return lines(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipedLines, "read", read)
        assert talk(SNOW, "/save snow", flags=(str(model),)).status == 0
    path.write_text(text)
    again = talk("/retry", flags=(str(model), "--session", "snow"))
    assert again.status == 0 and "resumed 'snow'" in again.err
    path.write_text(text + "\n")
    other = talk(SNOW, flags=(str(model), "--session", "snow"))
    assert other.status == 1 and "belongs to another tokenizer" in other.err
    assert "/help" not in other.err  # told before the model is loaded


def test_asking_for_a_session_makes_none(talk, tmp_path):
    """A name that was misspelt leaves nothing behind."""
    talk(SNOW, "/save snow")
    assert talk("/load snwo").status == 1
    assert [path.name for path in (tmp_path / "state" / "sessions").iterdir()] == ["snow"]


@pytest.mark.parametrize(
    ("name", "state", "status", "words"),
    [
        ("a/b", ".", 2, "'a/b' cannot be the name"),
        ("x" * 65, ".", 2, "use 1 to 64 letters"),
        ("", ".", 2, "'' cannot be the name"),
        ("trip", "off", 1, "COLIBRI_STATE is off"),
    ],
)
def test_a_session_that_cannot_be_kept(command, monkeypatch, name, state, status, words):
    """It is told before the model is loaded, which may take minutes; a wrong name is wrong usage,
    also an empty one."""
    monkeypatch.setattr(Engine, "open", lambda *_: pytest.fail("loaded"))
    result = command(*CHAT, "--session", name, env={"COLIBRI_STATE": state})
    assert result.status == status and result.err.count("\n") == 1 and words in result.err


@pytest.mark.parametrize("place", [".", "sessions", "sessions/trip"])
def test_a_session_without_a_place(command, monkeypatch, tmp_path, place):
    """A file where a directory belongs is told before the model is loaded, and nobody is promised
    that the session is saved."""
    state = tmp_path / "state"
    (state / place).parent.mkdir(parents=True, exist_ok=True)
    (state / place).write_text("")
    flags, env = (*CHAT, "--session", "trip"), {"COLIBRI_STATE": str(state)}
    result = command(*flags, env=env)
    assert result.status == 0 and result.err.count("session 'trip' cannot be kept: ") == 1
    assert "session 'trip' is new; nowhere to keep it yet" in result.err.replace("\n", " ")

    def stop(*_: object) -> None:
        raise UsageError("loaded")

    monkeypatch.setattr(Engine, "open", stop)
    warning, loaded = command(*flags, env=env).err.splitlines()
    assert "cannot be kept: " in warning and loaded == "colibri: error: loaded"


@pytest.mark.parametrize("word", ["/load", "/save"])
def test_a_file_system_that_refuses_a_name(talk, command, tmp_path, word):
    """256 bytes are too many for it. The error names the place and the way out, and what was said
    is still there."""
    (tmp_path / "state" / "sessions").mkdir(parents=True)
    name = 64 * "\U00010400"
    result = talk(SNOW, f"{word} {name}", "/retry", flags=("--quiet",))
    assert result.status == 1 and result.out == 2 * one(command, SNOW)
    assert result.err.count("\n") == 1 and re.search(
        r"sessions/.*: cannot be read: File name too long; see to .* set COLIBRI_STATE", result.err
    )


def test_sessions_that_cannot_be_read(talk, command, tmp_path):
    """A list that cannot be read is not an empty one, and ends no chat."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "sessions").symlink_to("sessions")
    for line in ("/load", "/load a", "/save a"):
        result = talk(line, SNOW, flags=("--quiet",))
        assert result.status == 1 and result.out == one(command, SNOW)
        assert "cannot be read: Too many levels of symbolic links; see to" in result.err


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_ctrl_c_while_it_is_saved(talk, monkeypatch, when):
    """At any moment of a save: the turn is kept, and then the key means what it always does."""
    count, real = 0, os.fsync

    def fsync(handle: int) -> None:
        nonlocal count
        count += 1
        if count == when:
            signal.raise_signal(signal.SIGINT)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    result = talk(SNOW, flags=("--session", "s"))
    assert result.status == 0 and count == 4 and "Ctrl-C once more" in result.err
    assert "1 question" in talk("/stats", flags=("--session", "s")).err.replace("\n", " ")


def test_ctrl_c_between_a_turn_and_its_save(talk, monkeypatch):
    """While the quiet line is written the turn is not saved yet; then it is all the same."""
    with monkeypatch.context() as patch:
        patch.setattr("colibri.repl.status", lambda *_: signal.raise_signal(signal.SIGINT))
        result = talk(SNOW, flags=("--session", "s"))
    assert result.status == 0 and "Ctrl-C once more" in result.err
    assert "1 question" in talk("/stats", flags=("--session", "s")).err.replace("\n", " ")


class FullDisk:
    """Syncs that fail so many times, and then work."""

    def __init__(self, times: int) -> None:
        self.times = times

    def fsync(self, handle: int) -> None:
        """For os.fsync."""
        self.times -= 1
        if self.times >= 0:
            raise OSError(28, "No space left on device")


def test_a_save_that_failed_is_tried_again(talk, monkeypatch):
    """One that fails after the last turn is tried once more when the chat ends."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", FullDisk(1).fsync)
        result = talk(SNOW, flags=("--session", "s"))
    assert result.status == 0 and "session 's' cannot be kept" in result.err
    assert "1 question" in talk("/stats", flags=("--session", "s")).err.replace("\n", " ")


def test_a_session_that_is_never_saved(talk, monkeypatch):
    """What is lost is told when the conversation ends, and by the status; another session is not
    taken up over it, and a reset is a way out."""
    talk(SNOW, "/save other")
    monkeypatch.setattr(os, "fsync", FullDisk(1000).fsync)
    lost = "colibri: error: session 's' is not saved as it was left: "
    result = talk(SNOW, "/load other", flags=("--session", "s", "--quiet"))
    assert result.status == 1 and len(result.err.splitlines()) == 3
    warning, refused, end = result.err.splitlines()
    assert "session 's' cannot be kept: " in warning and end.startswith(lost)
    assert refused.startswith("colibri: error: ") and "No space left on device" in refused
    result = talk(SNOW, "/reset", "/load other", flags=("--session", "s"))
    assert result.status == 1 and result.err.count(lost) == 1 and "resumed 'other'" in result.err


def test_flags_win_over_what_was_saved(talk):
    """A system message given now replaces the saved one; not given, the saved one stays."""
    talk(SNOW, flags=("--session", "s", "--system", "Be brief."))
    assert "Be brief." in talk("/system", flags=("--session", "s")).err
    changed = talk("/system", flags=("--session", "s", "--system", "Be long."))
    assert "Be long." in changed.err


def test_damaged_rows_are_read_again(talk, tmp_path):
    """The conversation goes on from its words, with a warning, and says the same."""
    together = talk(STORY, SNOW, flags=("--session", "whole")).out
    first = talk(STORY, flags=("--session", "hurt")).out
    rows = tmp_path / "state" / "sessions" / "hurt" / "rows-1"
    rows.write_bytes(rows.read_bytes()[:-1])
    second = talk(SNOW, flags=("--session", "hurt"))
    assert first + second.out == together
    said = second.err.replace("\n", " ")
    assert "is damaged" in said and re.search(r"(\d+) tokens, \1 of them to be read again", said)
    assert " 1 of them" in talk(SNOW, flags=("--session", "hurt")).err.replace("\n", " ")


def test_a_context_that_is_too_small_now(talk):
    """The start is refused with both numbers and the flag."""
    talk(STORY, flags=("--session", "s"))
    result = talk(SNOW, flags=("--session", "s", "--ctx", "64"))
    assert result.status == 1 and "the context holds 64; --ctx raises it" in result.err


def test_nothing_is_kept_unless_asked(talk, tmp_path):
    """Without a session a pipe leaves nothing behind."""
    talk(SNOW)
    assert not (tmp_path / "state").exists()


def test_the_receipts_file_is_not_the_models(demo_path, talk):
    """Nothing is ever written into the model's directory."""
    before = {path.name: path.stat().st_mtime_ns for path in demo_path.iterdir()}
    talk(SNOW, "/save s", flags=("--session", "t"))
    assert {path.name: path.stat().st_mtime_ns for path in demo_path.iterdir()} == before
    assert json.loads((demo_path / "config.json").read_text())
