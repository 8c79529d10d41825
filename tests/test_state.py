"""The state directory: files appear whole or not at all, whoever else writes them."""

from __future__ import annotations

import os
import time

import pytest

from colibri.errors import StateError, UsageError
from colibri.state import PARTIAL, State, make_directory, open_lock, writing


def test_two_writers_at_once(tmp_path):
    """Each writes a whole file of its own, and the last to end is the one that stays."""
    path = tmp_path / "file"
    with writing(path) as first:
        first.write(b"first")
        with writing(path) as second:
            second.write(b"the second, longer")
        assert path.read_bytes() == b"the second, longer"
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_one_of_two_writers_fails(tmp_path):
    """What it began is gone; what the other one writes is not touched."""
    path = tmp_path / "file"
    with writing(path) as other:
        other.write(b"whole")
        with pytest.raises(StateError, match="file: cannot be written: No space"), writing(path):
            raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_leave(tmp_path):
    """It goes with the first write a day later; what is young or another file's stays."""
    old, older, young, others = (
        tmp_path / f"{name}{PARTIAL}" for name in ("file.1-aa", "file", "file.2-bb", "another.1-aa")
    )
    for path in (old, older, young, others):
        path.write_bytes(b"half")
        if path is not young:
            os.utime(path, (time.time() - 90000,) * 2)
    with writing(tmp_path / "file") as file:
        file.write(b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"file", young.name, others.name}


def mode(path) -> int:
    return path.stat().st_mode & 0o777


def test_what_is_made_is_for_its_user_alone(tmp_path):
    """Every directory that is made is 0700, whatever lies above it, and one that was there keeps
    its mode; a lock is 0600."""
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    old = os.umask(0o022)
    try:
        make_directory(there / "state" / "sessions" / "it")
        open_lock(there / "state" / "lock").close()
    finally:
        os.umask(old)
    assert mode(there) == 0o755 and mode(there / "state" / "lock") == 0o600
    made = [there / "state", there / "state" / "sessions", there / "state" / "sessions" / "it"]
    assert [mode(path) for path in made] == [0o700] * 3


def test_a_home_that_is_not_there():
    """Another user's directory that does not exist is named with the knob."""
    with pytest.raises(UsageError, match="COLIBRI_STATE is '~nobody-of-that-name/x'"):
        State("~nobody-of-that-name/x", print)
