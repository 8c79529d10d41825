"""`colibri chat` at a terminal: streaming, Ctrl-C, editing, resuming, narrow and dumb terminals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from person import Person

from colibri.conversation import Conversation
from colibri.engine import Engine
from colibri.knobs import Settings
from colibri.saved import Saved
from colibri.state import State

STORY = "Tell me a story about a fox."
LONG = "Tell me. " * 100
CHAT = ("chat", "--temp", "0")
ONCE = "Once upon a time, there was a little fox named Clara."


@pytest.fixture
def kept(tmp_path) -> dict[str, str]:
    """The environment of a state directory."""
    return {"COLIBRI_STATE": str(tmp_path / "state")}


def answer(screen: str) -> str:
    """The answer on a screen, its lines joined again: what stands between question and status."""
    (said,) = re.findall(r"(?ms)\A(.*)^(?:\S+ tok/s, )?first ", screen)
    lines = [line.ljust(80) for line in said.splitlines()]
    last = max(number for number, line in enumerate(lines) if line.startswith("> "))
    return "".join(lines[last + 1 :]).rstrip()


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The demo in this process, greedy: what is to be said."""
    return Engine.open(Settings.resolve({"temperature": "0", "threads": "1"}, {}))


def whole(engine: Engine, *questions: str) -> str:
    """The answer to the last of these questions, asked in turn and never interrupted."""
    engine.slot = engine.new_slot()
    talk = Conversation(engine)
    for question in questions:
        turn = talk.ask(question)
        text = "".join(piece.text for piece in turn)
        talk.settle(turn)
    return text.replace("\n", " ")


def saved(engine: Engine, kept: dict[str, str]) -> Saved:
    """The session "trip"."""
    state = State(kept["COLIBRI_STATE"], print)
    return Saved(state, "trip", engine.container, engine.tokenizer.digest)


def asked(engine: Engine, kept: dict[str, str]) -> list[str]:
    """The questions that the session "trip" has; nobody else has it open."""
    place, talk = saved(engine, kept), Conversation(engine)
    document = place.open()
    place.close()
    talk.load(document.conversation)
    return [said["content"] for said in talk.messages if said["role"] == "user"]


# ---- answers ------------------------------------------------------------------------------------


def test_streams_as_it_is_made(engine):
    """The first words are on the screen while the program still waits with the rest; then the
    answer, one quiet line, and the next prompt."""
    with Person(*CHAT, gate="show") as person:
        person.ready()
        person.type(STORY + "\r")
        assert "tok/s" not in person.until("Once")
        person.open()
        screen = person.ready()
        assert answer(screen) == whole(engine, STORY)
        assert re.search(r"\n[\d.,]+ tok/s, first [\d.]+ m?s, \d+/\d+ drafts, \d+/1024 context\n>$",
                         screen)  # fmt: skip
        assert re.search(rb"\x1b\[2m[\d.,]+ tok/s", person.raw)  # in the background
        person.type("/quit\r")
        assert person.end() == 0


# ---- Ctrl-C -------------------------------------------------------------------------------------


def test_ctrl_c_in_decode(engine):
    """The key ends the turn and keeps it; more goes on; the next question is answered."""
    with Person(*CHAT, gate="show") as person:
        person.ready()
        person.type(STORY + "\r")
        person.until("Once")
        person.type("\x03")
        person.until(r"\^C")
        person.open()
        screen = person.ready()
        first = answer(screen).replace("^C", "")
        assert "interrupted, /more goes on" in screen
        rest = answer(person.say("/more"))
        assert "interrupted" not in rest and first + rest == whole(engine, STORY)
        assert "tok/s" in person.say("What colour is snow?")
        person.type("\x04")
        assert person.end() == 0


def test_ctrl_c_in_prefill():
    """A long question is given up before its answer; retry asks it again."""
    with Person(*CHAT, gate="progress") as person:
        person.ready()
        person.type(LONG + "\r")
        person.until("gate 128/")
        person.type("\x03")
        person.open()
        assert "interrupted" in person.ready()
        assert "tok/s" in person.say("/retry")
        person.type("\x04")
        assert person.end() == 0


def test_a_second_ctrl_c_in_a_turn_quits(kept, engine):
    """Two signals before the program comes back end it, with the conversation as far as it got."""
    with Person(*CHAT, "--session", "trip", gate="show", **kept) as person:
        person.ready()
        person.type(STORY + "\r")
        person.until("Once")
        person.interrupt()
        person.interrupt()
        person.open()
        assert person.end() == 130 and "Traceback" not in person.text
    assert asked(engine, kept) == [STORY]


def test_ctrl_c_at_the_prompt():
    """It drops what was typed; with nothing typed it asks for another, which quits."""
    with Person(*CHAT) as person:
        person.ready()
        person.type("rubbish")
        person.until("rubbish")
        person.type("\x03")
        person.ready()
        person.type("\x03")
        person.until("once more")
        person.say("What colour is snow?")  # a question in between: the count begins anew
        person.type("\x03")
        person.until("once more")
        person.ready()
        person.type("\x03")
        assert person.end() == 130 and "Traceback" not in person.text


def test_ctrl_c_after_an_interrupted_turn_quits():
    """The first ends the turn, the second, at the prompt, the chat."""
    with Person(*CHAT, gate="show") as person:
        person.ready()
        person.type(STORY + "\r")
        person.until("Once")
        person.interrupt()
        person.open()
        person.ready()
        person.type("\x03")
        assert person.end() == 130


# ---- other signals ------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143)])
def test_a_signal_in_a_turn_keeps_it(kept, engine, number, status):
    """It ends the answer and the chat; the session has the question and what was answered, and the
    experts that were in memory are remembered."""
    slots = {"COLIBRI_IO": "buffered"}
    with Person(*CHAT, "--session", "trip", gate="show", **kept, **slots) as person:
        person.ready()
        person.type(STORY + "\r")
        person.until("Once")
        person.interrupt(number)
        person.open()
        assert person.end() == status and "interrupted" in person.text
        assert "Traceback" not in person.text
    assert asked(engine, kept) == [STORY]
    assert list(Path(kept["COLIBRI_STATE"]).glob("resident/*.json"))


@pytest.mark.parametrize(
    ("number", "status", "term"),
    [(signal.SIGHUP, 129, "xterm"), (signal.SIGTERM, 143, "xterm"), (signal.SIGTERM, 143, "dumb")],
)
def test_a_signal_at_the_prompt(number, status, term):
    """It ends the chat at once, with the terminal as a shell wants it."""
    with Person(*CHAT, TERM=term) as person:
        person.ready()
        assert person.cooked() == (term == "dumb")
        person.type("half a")
        person.until("half a")
        person.interrupt(number)
        assert person.end() == status and person.cooked()
        assert "Traceback" not in person.text
        assert person.raw.count(b"\x1b[?2004h") == person.raw.count(b"\x1b[?2004l")


def test_a_terminal_that_is_closed(kept, engine):
    """In a turn and at the prompt the chat ends as by SIGHUP, and what was said is saved, though
    nothing can be written any more."""
    with Person(*CHAT, "--session", "trip", gate="show", **kept) as person:
        person.ready()
        person.type(STORY + "\r")
        person.until("Once")
        assert person.hang_up() == 129
    with Person(*CHAT, "--session", "trip", columns=200, **kept) as person:
        assert "1 question" in person.ready()
        person.say("What is snow?")
        assert person.hang_up() == 129
    assert asked(engine, kept) == [STORY, "What is snow?"]


def test_a_second_sigterm_quits_at_once():
    """It is as deadly as if nobody had caught the first."""
    with Person(*CHAT, gate="show") as person:
        person.ready()
        person.type(STORY + "\r")
        person.until("Once")
        person.interrupt(signal.SIGTERM)
        person.until_deadly(signal.SIGTERM)
        person.interrupt(signal.SIGTERM)
        person.end()
        assert person.child.signalstatus == signal.SIGTERM


# ---- typing -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def typed() -> Iterator[Person]:
    """A chat that each test leaves at an empty prompt, with nothing asked."""
    with Person(*CHAT) as person:
        yield person


def test_several_lines(engine, typed):
    """A backslash, Alt-Enter, three quotes and a paste: each makes one question of two lines."""
    ways = (
        "Tell me a story\\\rabout a fox.",
        "Tell me a story\x1b\rabout a fox.",
        '"""\rTell me a story\rabout a fox.\r"""',
        "\x1b[200~Tell me a story\rabout a fox.\x1b[201~",
    )
    expected = whole(engine, "Tell me a story\nabout a fox.")
    for keys in ways:
        screen = typed.say(keys)
        shown = "".join(line.ljust(80) for line in screen.splitlines())
        assert expected[:70] in shown
        typed.say("/reset")


def test_pasted_backslashes_stay(engine, typed):
    """Lines of a shell that are pasted are asked as they are."""
    screen = typed.say("\x1b[200~run \\\r it\x1b[201~")
    shown = "".join(line.ljust(80) for line in screen.splitlines())
    assert whole(engine, "run \\\n it")[:70] in shown
    typed.say("/reset")


def test_editing_and_history(kept):
    """Arrow keys edit the line and bring back earlier ones, also those of an earlier chat."""
    with Person(*CHAT, **kept) as person:
        person.ready()
        person.type("/hepl\x1b[D\x1b[D\x1b[D\x7f\x05\x7f")
        person.type("\x15/stats\r")
        person.until("no turn yet")
        person.ready()
        person.type("\x1b[A")
        person.until("> /stats$")
        person.type("\x15\x04")
        assert person.end() == 0
    with Person(*CHAT, **kept) as person:
        person.ready()
        person.type("\x1b[A")
        person.until("> /stats$")
    path = Path(kept["COLIBRI_STATE"]) / "history"
    assert path.stat().st_mode & 0o077 == 0


def test_ctrl_z_is_no_text(typed):
    """It is the key of job control (which a program without a shell has not) and writes nothing."""
    typed.ready()
    typed.type("ab\x1acd")
    typed.until("> abcd$")
    typed.type("\x15")
    typed.ready()


@pytest.mark.parametrize("fault", ["gone", "full", "device"])
def test_history_that_cannot_be_kept(kept, fault):
    """A disk that is full, a directory that became a file, a device that takes nothing and never
    ends: one warning, and the chat goes on."""
    state = Path(kept["COLIBRI_STATE"])
    if fault == "device":
        state.mkdir()
        (state / "history").symlink_to("/dev/full")
    with Person(*CHAT, columns=200, **kept) as person:
        person.ready()
        if fault == "gone":
            shutil.rmtree(state)
            state.write_text("")
        elif fault == "full":
            (state / "history").unlink()
            (state / "history").symlink_to("/dev/full")
        for line in ("/stats", "/system", "/stats"):
            person.say(line)
        assert person.raw.count(b"what is typed cannot be kept: ") == 1
        assert b"Press ENTER" not in person.raw and b"Traceback" not in person.raw


def test_history_that_vanished(kept):
    """Its directory is made again, and the file for this user alone."""
    state = Path(kept["COLIBRI_STATE"])
    with Person(*CHAT, columns=200, **kept) as person:
        person.ready()
        shutil.rmtree(state)
        person.say("/stats")
        assert "+/stats" in (state / "history").read_text()
        assert (state / "history").stat().st_mode & 0o777 == 0o600


# ---- sessions -----------------------------------------------------------------------------------


def test_resume(kept, engine):
    """A conversation survives kill -9: the next chat says what it takes up, reads one token again
    and answers as if nothing had happened."""
    arguments = (*CHAT, "--session", "trip")
    with Person(*arguments, **kept) as person:
        assert "session 'trip' is new" in person.ready()
        person.say(STORY)
        os.kill(person.child.pid, signal.SIGKILL)
        person.end()
    with Person(*arguments, **kept) as person:
        screen = person.ready().replace("\n", " ")
        assert re.search(r"resumed 'trip', saved \d{4}-.*: 1 question, \d+ tokens, 1 of them to "
                         "be read again", screen)  # fmt: skip
        second = answer(person.say("Tell me a story about a bear."))
        person.type("/quit\r")
        assert person.end() == 0
    assert second == whole(engine, STORY, "Tell me a story about a bear.")


def test_another_container_is_refused(kept, engine, demo_path, tmp_path):
    """A session of another model ends the start with one line that names both."""
    other = tmp_path / "other"
    shutil.copytree(demo_path, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 2e-5}))
    whole(engine, "What colour is snow?")
    place = saved(engine, kept)
    place.save(engine.slot.session, Conversation(engine).as_dict())
    with Person("chat", str(other), "--session", "trip", columns=400, **kept) as person:
        assert person.end() == 1
        assert "session 'trip' belongs to another container" in person.text
        assert str(other) in person.text and str(demo_path.resolve()) in person.text


# ---- terminals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [{"LANG": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_twenty_columns(env):
    """All of it works where hardly anything fits, and in any locale."""
    with Person(*CHAT, columns=20, **env) as person:
        screen = person.say("What colour is snöw?")
        assert re.search(r"tok/s\n", screen) and re.search(r"\d+/1024 context\n>$", screen)
        assert "/think" in person.say("/help")
        assert "UnicodeError" not in person.text
        person.type("\x04")
        assert person.end() == 0


def test_a_byte_that_is_no_text():
    """On a terminal without an editor it becomes a sign for itself, and the chat goes on."""
    env = {"TERM": "dumb", "PYTHONIOENCODING": "utf-8:strict"}
    with Person(*CHAT, **env) as person:
        person.ready()
        person.child.send(b"caf\xe9\r")
        person.until(r"tok/s[^>]*\n>$")
        assert "Traceback" not in person.text


def test_receipt_on_a_narrow_terminal():
    """At forty columns the ledger of /stats full stands upright, a figure a line."""
    with Person(*CHAT, columns=40) as person:
        person.say("What colour is snow?")
        screen = person.say("/stats full")
        assert re.search(r"^index scores( +\d+)+$", screen, re.MULTILINE)
        assert re.search(r"^ +together$", screen, re.MULTILINE)


def test_dumb_terminal(kept):
    """TERM=dumb sees no escape sequence, and Ctrl-C means the same."""
    arguments = (*CHAT, "--session", "trip")
    with Person(*arguments, columns=20, TERM="dumb", LANG="C", **kept) as person:
        person.say(STORY)
        person.say("/help")
        person.type("\x03")
        person.until("once more")
        person.ready()
        person.type("\x03")
        assert person.end() == 130 and b"\x1b" not in person.raw


def test_no_state_directory(tmp_path):
    """Where nothing can be kept one warning says so, and the chat goes on; its end says what that
    means, as does the status."""
    (tmp_path / "file").write_text("")
    arguments = (*CHAT, "--session", "trip")
    with Person(*arguments, columns=200, COLIBRI_STATE=str(tmp_path / "file")) as person:
        person.say("What colour is snow?")
        person.say("What colour is snow?")
        seen = person.raw.decode()
        assert "is saved after every turn" not in seen
        assert seen.count("session 'trip' cannot be kept") == 1
        person.type("\x04")
        assert person.end() == 1
        assert "error: session 'trip' is not saved as it was left: " in person.text
