"""Kept caches: one slot a conversation, as many as memory has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from colibri.engine import Slot
from colibri.session import Session, common_prefix


class Conversations:
    """At most `most` slots. A request gets the one whose history its prompt continues.

    A slot in use is never given away. What is kept of a finished turn costs nothing to try: the
    session itself compares tokens and keeps their longest common prefix.
    """

    def __init__(self, make: Callable[[], Slot], most: int, first: Sequence[Slot] = ()) -> None:
        self._make, self._most = make, most
        self._idle: list[Slot] = list(first)  # longest unused first
        self._busy: list[Slot] = []

    @property
    def kept(self) -> list[int]:
        """Tokens in each slot, idle ones first."""
        return [session.length for session in self.sessions()]

    def sessions(self) -> list[Session]:
        """Those of all slots, whose rows of a prompt may be copied between steps."""
        return [slot.session for slot in (*self._idle, *self._busy)]

    def take(self, ids: Sequence[int]) -> Slot:
        """The slot for a prompt, in use until `give_back`; an error of the core when none fits."""
        slot = self._continued(ids) or self._empty() or self._new() or self._idle[0]
        if slot in self._idle:
            self._idle.remove(slot)
        self._busy.append(slot)
        return slot

    def give_back(self, slot: Slot, keep: bool = True) -> None:
        """The turn is over; without `keep` the slot is as new, in the memory set aside for it."""
        self._busy.remove(slot)
        if not keep:
            slot.drafting.clear()
            slot.session.rewind(0)
        self._idle.append(slot)

    def _continued(self, ids: Sequence[int]) -> Slot | None:
        """The slot sharing most with the prompt, if that is half of either: else it is another's.

        A little in common (a system prompt) must not cost a long conversation its cache.
        """
        shared = [(common_prefix(slot.session.tokens, ids), slot) for slot in self._idle]
        most, slot = max(shared, key=lambda pair: pair[0], default=(0, None))
        if slot is None or not most:
            return None
        return slot if 2 * most >= min(slot.session.length, len(ids)) else None

    def _empty(self) -> Slot | None:
        return next((slot for slot in self._idle if not slot.session.length), None)

    def _new(self) -> Slot | None:
        if len(self._idle) + len(self._busy) >= self._most:
            return None
        return self._make()
