"""Conversations that outlive a server: what their caches hold is saved when it ends."""

from collections.abc import Callable

from colibri.engine import Engine
from colibri.errors import StateError
from colibri.saved import Saved
from colibri.state import State
from colibri.turn import Progress


class Kept:
    """All slots of an engine, and a place for each in the state directory.

    StateError when there is none. What cannot be taken up or saved is told by a warning, and costs
    only time.
    """

    def __init__(self, engine: Engine, state: State, warn: Callable[[str], None]) -> None:
        self._state, self._warn = state, warn
        self.slots = [engine.slot, *(engine.new_slot() for _ in range(engine.conversations - 1))]
        self._places = {
            slot: _place(engine, state, number) for number, slot in enumerate(self.slots, 1)
        }

    def take_up(self, progress: Progress | None = None) -> None:
        """Fill the caches with what was saved; what another server has open is left to it."""
        for number, slot in enumerate(self.slots, 1):
            place = self._places[slot]
            try:
                if place.open():
                    place.restore(slot.session)
            except StateError as error:
                self._warn(f"a conversation begins anew: {error}")
                if not place.locked:
                    del self._places[slot]
            if progress:
                progress("reading conversations", number, len(self.slots))

    def save(self, progress: Progress | None = None) -> None:
        """Save each that holds anything. Only while nothing runs."""
        for number, (slot, place) in enumerate(self._places.items(), 1):
            if slot.session.length:
                self._state.keep("a conversation", lambda s=slot, p=place: p.save(s.session, {}))
            place.close()
            if progress:
                progress("saving conversations", number, len(self._places))


def _place(engine: Engine, state: State, number: int) -> Saved:
    """On a shelf of the container's own: servers of two models take nothing from each other."""
    shelf = ("served", engine.container.fingerprint[:16])
    digest, kv_dtype = engine.tokenizer.digest, engine.settings.kv_dtype
    return Saved(state, str(number), engine.container, digest, kv_dtype, shelf)
