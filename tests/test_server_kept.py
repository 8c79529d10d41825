"""Conversations over a server's restart: taken up as they were, or begun anew with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import open_engine

from colibri.errors import StateError
from colibri.server.kept import Kept
from colibri.session import Session
from colibri.state import State

PROMPTS = (list(range(40, 90)), list(range(60, 90)))


def kept(root: Path | None, said: list[str], **flags: str) -> Kept:
    """The slots of a server that begins, and what it says of them."""
    engine = open_engine(conversations="3", **flags)
    found = Kept(engine, State(root, said.append), said.append)
    found.take_up()
    return found


def end(server: Kept) -> None:
    """The server ends: its places are free for another, whether anything is in them or not."""
    server.save()


def tokens(server: Kept) -> list[list[int]]:
    """What is in the slots."""
    return [slot.session.tokens for slot in server.slots]


def test_conversations_come_back(tmp_path):
    """Each in its slot, while another server has them for nobody else; one that is empty stays so,
    and what is run behind them gives the bits of a session that ran everything."""
    said: list[str] = []
    first = kept(tmp_path, said)
    for slot, prompt in zip(first.slots, PROMPTS, strict=False):
        slot.session.prefill(prompt)
    end(first)
    second = kept(tmp_path, said)
    assert tokens(second) == [*PROMPTS, []] and not said
    third = kept(tmp_path, said)
    assert tokens(third) == [[], [], []]
    assert len(said) == 1 and "3 conversations of 3 will not be kept: another server" in said[0]
    third.slots[0].session.prefill([1, 2, 3])
    end(third)  # it has no place
    session, longer = second.slots[0].session, [*PROMPTS[0], 7, 8]
    logits = session.prefill(longer[session.reuse(longer) :])
    expected = Session(session.model, 128).prefill(longer)
    assert logits.tobytes() == expected.tobytes()
    end(second)
    assert tokens(kept(tmp_path, said)) == [longer, PROMPTS[1], []]


def test_what_does_not_fit(tmp_path):
    """In a smaller context a conversation is left as it is, with a warning that says why; caches of
    other numbers have places of their own; rows that are damaged begin anew."""
    said: list[str] = []
    first = kept(tmp_path, said)
    first.slots[0].session.prefill(PROMPTS[0])
    end(first)
    second = kept(tmp_path, said, context="32")
    assert tokens(second) == [[], [], []] and "50 tokens and the context holds 32" in said.pop()
    for slot in second.slots:
        slot.session.prefill([1, 2, 3])
    end(second)
    third = kept(tmp_path, said, kv_dtype="f16")
    assert tokens(third) == [[], [], []]
    third.slots[0].session.prefill(PROMPTS[1])
    end(third)
    fourth = kept(tmp_path, said)
    assert tokens(fourth) == [PROMPTS[0], [1, 2, 3], [1, 2, 3]] and not said
    end(fourth)
    assert tokens(kept(tmp_path, said, kv_dtype="f16"))[0] == PROMPTS[1] and not said
    (rows,) = tmp_path.glob("served/*-f32/1/rows-*")
    rows.write_bytes(rows.read_bytes()[:-1] + b"x")
    fifth = kept(tmp_path, said)
    assert tokens(fifth) == [[], [1, 2, 3], [1, 2, 3]]
    assert "begins anew" in said.pop() and not said
    fifth.slots[0].session.prefill([4, 5])
    end(fifth)
    assert tokens(kept(tmp_path, said))[0] == [4, 5]


def test_nowhere_to_keep(tmp_path):
    """Without a state directory that can be written there is an error at the start."""
    with pytest.raises(StateError, match="COLIBRI_STATE is off"):
        kept(None, [])
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="cannot be made"):
        kept(tmp_path / "file", [])
    end(kept(tmp_path, []))
    for lock in tmp_path.glob("served/*/*/lock"):
        lock.unlink()
        lock.mkdir()  # as good as a directory that may only be read
    with pytest.raises(StateError, match="cannot be written; leave out --keep"):
        kept(tmp_path, [])
