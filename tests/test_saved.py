"""Saved conversations: resumed they are as if never stopped; no accident loses the last save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from colibri._core import ffi, lib

from colibri.container import Container
from colibri.convert import convert_directory
from colibri.engine import Engine
from colibri.errors import CoreError, StateError, UsageError
from colibri.formats import Format
from colibri.knobs import Settings
from colibri.layout import Formats
from colibri.model import Model, check
from colibri.saved import DOCUMENT, SEGMENTS, DamagedRows, Saved, names
from colibri.session import Session
from colibri.state import State

TOKENS = list(range(20, 60))
DIGEST = "0" * 32  # of a tokenizer


@pytest.fixture
def state(tmp_path) -> State:
    """A state directory whose warnings are errors."""

    def fail(text: str) -> None:
        raise AssertionError(text)

    return State(tmp_path / "state", fail)


@pytest.fixture
def session(demo_model) -> Session:
    """The demo with a prompt read."""
    session = Session(demo_model, 256)
    session.prefill(TOKENS)
    return session


def place_of(state: State, session: Session, name: str = "it") -> Saved:
    """Where a session of this kind is saved under this name."""
    return Saved(state, name, session.model.container, DIGEST, session.kv_dtype)


def again(state: State, session: Session, name: str = "it", context: int = 256) -> Session:
    """A new session filled from what was saved."""
    place = place_of(state, session, name)
    assert place.open() is not None
    fresh = Session(session.model, context, kv_dtype=session.kv_dtype)
    place.restore(fresh)
    place.close()
    return fresh


def caches(session: Session) -> bytes:
    """Every committed row of every cache."""
    main, rows = session.model.config.num_hidden_layers, []
    for layer in range(session.model.layers):
        for kind in ("kv", "index"):
            cache = session.cache(layer, kind)
            if cache is not None:
                count = session.length if layer < main else min(session.mtp_length, session.length)
                rows.append(cache[:count].tobytes())
    return b"".join(rows)


def save(state: State, session: Session, name: str = "it") -> Saved:
    """Save once, and let go."""
    place = place_of(state, session, name)
    place.open()
    place.save(session, {"said": "so"})
    place.close()
    return place


# ---- what comes back ----------------------------------------------------------------------------


def test_a_save_is_for_its_user_alone(state, session):
    """A fresh state directory, all directories below it and every file are for their user alone."""
    old = os.umask(0o022)
    try:
        place = Saved(state, "it", session.model.container, DIGEST)
        place.open()
        place.save(session, {})
        place.close()
    finally:
        os.umask(old)
    made = [state.root, *state.root.rglob("*")]
    assert {path.name for path in made} >= {"state", "sessions", "it", "lock", DOCUMENT, "rows-1"}
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": "0", "draft": "auto"},
        {"temperature": "0", "draft": "3"},
        {"temperature": "0", "draft": "0"},
        {"temperature": "1", "seed": "5", "mode": "rejection"},
        {"temperature": "1", "seed": "5", "mode": "coupled", "mtp": "off"},
    ],
    ids=lambda settings: " ".join(settings.values()),
)
def test_resumed_is_never_stopped(state, settings):
    """The next answers are byte-identical to those of an engine that went on, MTP on and off,
    greedy and sampled, and hardly more is read again."""
    first, second = (Engine.open(Settings.resolve({"threads": "1"} | settings, {}))
                     for _ in range(2))  # fmt: skip
    questions = ["Tell me a story about a fox.", "What colour is snow?", "And a bear?"]
    messages, place = [], Saved(state, "talk", first.container, first.tokenizer.digest)
    place.open()
    for question in questions:
        messages.append({"role": "user", "content": question})
        if question == questions[-1]:
            place.close()
            place = Saved(state, "talk", second.container, second.tokenizer.digest)
            place.open()
            ready = first.slot.session.length - first.model.has_mtp  # a hidden state is gone
            assert place.restore(second.slot.session) == ready
            turns = [e.answer(e.chat(messages), max_tokens=60) for e in (first, second)]
            texts = ["".join(piece.text for piece in turn) for turn in turns]
            assert turns[0].token_ids == turns[1].token_ids and texts[0] == texts[1]
            reused = [turn.receipt.reused_tokens for turn in turns]
            assert reused[0] - first.model.has_mtp == reused[1] > 100
        else:
            turn = first.answer(first.chat(messages), max_tokens=120)
            messages.append({"role": "assistant", "content": "".join(p.text for p in turn)})
            place.save(first.slot.session, {})
    place.close()


def test_everything_comes_back(state, session):
    """Tokens, both lengths, every row of every cache, and the conversation's own words."""
    save(state, session)
    fresh = again(state, session)
    assert fresh.tokens == TOKENS and fresh.mtp_length == len(TOKENS) - 1
    assert caches(fresh) == caches(session)
    place = Saved(state, "it", session.model.container, DIGEST)
    assert place.open().conversation == {"said": "so"}
    place.close()


def test_saves_write_what_is_new(state, session, monkeypatch):
    """A second save adds a file with the new rows alone; the old file is not touched."""
    place = save(state, session)
    old = place.directory / "rows-1"
    before = old.read_bytes(), old.stat().st_mtime_ns
    session.prefill([70, 71])
    save(state, session)
    assert (old.read_bytes(), old.stat().st_mtime_ns) == before
    added = (place.directory / "rows-2").stat().st_size
    assert added * 10 < len(before[0]) and caches(again(state, session)) == caches(session)
    save(state, session)  # nothing is new
    assert sorted(p.name for p in place.directory.glob("rows-*")) == ["rows-1", "rows-2"]


def test_a_changed_past(state, session):
    """After going back and on another way, the rows of the way not taken are gone."""
    save(state, session)
    for keep in (30, 5, 0):
        session.rewind(keep)
        session.prefill([90 + keep, 91, 92, 93])
        save(state, session)
        assert caches(again(state, session)) == caches(session)
    session.rewind(2)
    save(state, session)
    assert again(state, session).tokens == session.tokens


def test_many_saves_stay_few_files(state, session):
    """Files and stale rows are cleared away before they outnumber what is needed."""
    place = Saved(state, "it", session.model.container, DIGEST)
    place.open()
    for step in range(SEGMENTS + 6):
        session.prefill([100 + step])
        place.save(session, {})
    assert len(list(place.directory.glob("rows-*"))) < SEGMENTS
    for _ in range(8):
        session.rewind(1)
        session.prefill(TOKENS)
        place.save(session, {})
    place.close()
    live = sum(path.stat().st_size for path in place.directory.glob("rows-*"))
    assert live < 4 * len(caches(session)) and caches(again(state, session)) == caches(session)


def test_drafts_switched_off_and_on(state, session, demo_container):
    """Saved without the MTP layer everything is read again; saved with it nothing is lost."""
    plain = Session(Model.open(demo_container, mtp=False), 256)
    plain.prefill(TOKENS)
    save(state, plain, "without")
    save(state, session, "with")
    place = Saved(state, "without", demo_container, DIGEST)
    place.open()
    assert place.restore(Session(session.model, 256)) == 0
    place.close()
    assert caches(again(state, plain, "with")) == caches(plain)


# ---- what is refused ----------------------------------------------------------------------------


def test_another_container_is_refused_by_name(state, tmp_path):
    """The same model in another quantisation: the message names both directories and formats."""
    tiny.write(tmp_path / "source", tiny.ONE_GROUP, 3)
    sessions = {}
    for form in ("int8", "int4-g32"):
        formats = Formats(experts=Format.parse(form))
        convert_directory(tmp_path / "source", tmp_path / form, formats, False)
        sessions[form] = Session(Model.open(Container.open(tmp_path / form)), 32)
        sessions[form].prefill([5, 6, 7])
    save(state, sessions["int8"])
    place = Saved(state, "it", sessions["int4-g32"].model.container, DIGEST)
    with pytest.raises(StateError) as error:
        place.open()
    place.close()
    for part in ("'it'", "another container", "/int8 (int8", "/int4-g32 (int4-g32", "another name"):
        assert part in str(error.value)
    assert again(state, sessions["int8"]).tokens == [5, 6, 7]


def test_caches_in_f16(state, session):
    """They come back as they were, in half the bytes, and to no session in f32."""
    half = Session(session.model, 256, kv_dtype="f16")
    half.prefill(TOKENS)
    whole, halved = save(state, session, "whole"), save(state, half, "half")
    sizes = [place.document.segments[0].nbytes for place in (whole, halved)]
    assert sizes[0] == 2 * sizes[1]
    assert caches(again(state, half, "half")) == caches(half) != caches(session)
    small = Session(session.model, 16, kv_dtype="f16")
    halved.open()
    with pytest.raises(StateError, match="the context holds 16"):
        halved.restore(small)
    halved.close()
    with pytest.raises(StateError, match="caches in f16: open it with --kv-dtype f16"):
        place_of(state, session, "half").open()


def test_another_tokenizer_is_refused(state, session):
    """The same weights with other token texts are another model to a conversation."""
    save(state, session)
    place = Saved(state, "it", session.model.container, "1" * 32)
    with pytest.raises(StateError, match="another tokenizer"):
        place.open()
    place.close()


def test_a_smaller_context_is_refused(state, session):
    """Both numbers and the flag; nothing is restored in part."""
    save(state, session)
    place = Saved(state, "it", session.model.container, DIGEST)
    place.open()
    small = Session(session.model, 16)
    with pytest.raises(StateError, match="has 40 tokens and the context holds 16; --ctx raises it"):
        place.restore(small)
    place.close()
    assert small.length == 0


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0b", "x" * 65, "-x", ".hidden"])
def test_names(state, demo_container, name):
    """A name is a file's name and nothing else; the limit of its length is said."""
    with pytest.raises(UsageError, match="cannot be the name of a session: use 1 to 64 letters"):
        Saved(state, name, demo_container, DIGEST)


def test_one_at_a_time(state, session):
    """A session that is open cannot be opened twice."""
    place = Saved(state, "it", session.model.container, DIGEST)
    place.open()
    other = Saved(state, "it", session.model.container, DIGEST)
    with pytest.raises(StateError, match="open in another colibri"):
        other.open()
    place.close()
    assert other.open() is None
    other.close()


@pytest.mark.parametrize("length", [(-1, 0), (257, 0), (4, 5), (4, -1)])
def test_the_core_checks_lengths(session, length):
    """Rows beyond the context, or drafts beyond the text, are refused; the session is unchanged."""
    error = ffi.new("clb_error *")
    with pytest.raises(CoreError, match="a context of 256 cannot hold"):
        check(lib.clb_session_restore(session.handle, *length, error), error)
    assert (session.length, session.mtp_length) == (len(TOKENS), len(TOKENS) - 1)


# ---- accidents ----------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from colibri import saved, state
from colibri.container import Container
from colibri.model import Model
from colibri.session import Session

root, model, when = sys.argv[1:]
session = Session(Model.open(Container.open(model)), 256)
session.prefill(list(range(20, 60)))
place = saved.Saved(state.State(root, print), "it", session.model.container, "0" * 32)
place.open()
place.save(session, {"save": 1})
session.prefill([70, 71, 72])
count, real = 0, os.fsync

def fsync(handle):
    global count
    count += 1
    if count == int(when):
        os.kill(os.getpid(), signal.SIGKILL)
    real(handle)

os.fsync = fsync
place.save(session, {"save": 2})
"""


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_kill_during_a_save(state, demo_path, session, when):
    """Killed while rows are synced, once they have their name, while the document is synced: the
    save before still loads; killed after its rename the new one does."""
    arguments = [sys.executable, "-c", KILLED, str(state.root), str(demo_path), str(when)]
    done = subprocess.run(arguments, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if when == 4:
        session.prefill([70, 71, 72])
    fresh = again(state, session)
    assert fresh.tokens == session.tokens and caches(fresh) == caches(session)
    save(state, fresh)
    files = {path.name for path in state.place("sessions", "it").iterdir()}
    assert not any(name.endswith(".partial") for name in files) and len(files) <= 4


def test_a_guess_is_not_saved(state, session):
    """The MTP layer's row of the last token holds a guess of the next, and stays behind."""
    session.catch_up(7, np.empty(session.model.config.hidden_size, np.float32))
    assert session.mtp_length == len(TOKENS)
    assert save(state, session).document.mtp_length == len(TOKENS) - 1
    assert again(state, session).mtp_length == len(TOKENS) - 1


def test_stale_rows_are_written_anew_with_the_others(state, session):
    """Where the files hold more than twice what is live, one file with all rows replaces them."""
    place = save(state, session)
    session.rewind(3)
    session.mtp_rewind(2)
    place.save(session, {})
    assert [segment.main for segment in place.document.segments] == [(0, 3)]
    assert caches(again(state, session)) == caches(session)


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "gone"])
def test_damaged_rows(state, session, damage):
    """Rows that are not what was written are not used; the words are still there, and the next
    save is whole again."""
    place = save(state, session)
    rows = place.directory / "rows-1"
    data = rows.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    new = {"flip": flipped, "cut": data[:-5], "longer": data + b"x", "gone": b""}[damage]
    rows.write_bytes(new)
    if damage == "gone":
        rows.unlink()
    assert place.open().conversation == {"said": "so"}
    fresh = Session(session.model, 256)
    with pytest.raises(DamagedRows, match="rows-1"):
        place.restore(fresh)
    assert fresh.length == 0
    place.save(session, {})
    place.close()
    assert caches(again(state, session)) == caches(session)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format":"other"}', b"\xff" * 40, None])
def test_damaged_documents(state, session, damage):
    """A document that is not what was written is named, never guessed at."""
    place = save(state, session)
    path = place.directory / DOCUMENT
    data = path.read_bytes()
    path.write_bytes(data.replace(b"so", b"no") if damage is None else damage)
    with pytest.raises(StateError, match=r"session\.json: "):
        place.open()
    place.close()


def test_a_document_of_another_version(state, session, monkeypatch):
    """What another colibri saved is refused with both versions."""
    save(state, session)
    monkeypatch.setattr("colibri.saved.FORMAT", "colibri-session-2")
    place = Saved(state, "it", session.model.container, DIGEST)
    with pytest.raises(StateError, match=r"'colibri-session-1'; this colibri reads colibri-sess"):
        place.open()
    place.close()


def test_a_full_disk(state, session, monkeypatch):
    """When rows cannot be written, the error says so and what was saved before stays."""
    place = save(state, session)
    place.open()
    session.prefill([70])

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StateError, match="rows-2: cannot be written: No space left on device"):
            place.save(session, {})
    place.close()
    assert again(state, session).tokens == TOKENS


def test_nowhere_to_keep(session, tmp_path):
    """Where nothing can be written there is one warning, and no error however often it is tried."""
    (tmp_path / "file").write_text("")
    for root, count in ((tmp_path / "file" / "state", 1), (None, 0)):
        told: list[str] = []
        state = State(root, told.append)
        place = Saved(
            State(tmp_path / "elsewhere", told.append), "it", session.model.container, DIGEST
        )
        if root is not None:
            place.directory = root / "sessions" / "it"
        for _ in range(3):
            assert not state.keep("session 'it'", lambda place=place: place.save(session, {}))
        assert len(told) == count


def test_names_of_what_is_saved(state, session):
    """All saved sessions, the newest first."""
    assert names(state) == []
    for number, name in enumerate(("a", "b", "c")):
        path: Path = save(state, session, name).directory / DOCUMENT
        os.utime(path, (1000 * number, 1000 * number))
    assert [name for name, _ in names(state)] == ["c", "b", "a"]


def test_files_are_for_their_owner(state, session):
    """Nobody else may read what was said."""
    place = save(state, session)
    modes = {path.name: path.stat().st_mode & 0o077 for path in place.directory.iterdir()}
    assert place.directory.stat().st_mode & 0o077 == 0
    assert modes[DOCUMENT] == modes["rows-1"] == 0


def test_rows_are_little_endian_floats(state, session):
    """A file of rows is the caches' rows one after another, first layer first."""
    place = save(state, session)
    first = session.cache(0, "kv")
    data = np.fromfile(place.directory / "rows-1", "<f4")
    assert data[: len(TOKENS) * first.shape[1]].tobytes() == first[: len(TOKENS)].tobytes()
