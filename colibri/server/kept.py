"""Conversations that outlive a server: what their caches hold is saved when it ends."""

from collections.abc import Callable

from colibri.amounts import plural
from colibri.engine import Engine
from colibri.errors import StateError
from colibri.saved import DamagedRows, Saved
from colibri.state import State, make_directory
from colibri.turn import Progress


class Kept:
    """All slots of an engine, and a place for each in the state directory.

    StateError when there is none, or none that can be written. What cannot be taken up or saved is
    told by a warning, and costs only time.
    """

    def __init__(self, engine: Engine, state: State, warn: Callable[[str], None]) -> None:
        self._state, self._warn = state, warn
        self.slots = [engine.slot, *(engine.new_slot() for _ in range(engine.conversations - 1))]
        self._places = {
            slot: _place(engine, state, number) for number, slot in enumerate(self.slots, 1)
        }

    @property
    def tokens(self) -> int:
        """In all slots that are saved."""
        return sum(slot.session.length for slot in self._places)

    def take_up(self, progress: Progress | None = None) -> None:
        """Fill the caches with what was saved; what another server has open is left to it."""
        taken = 0
        for number, slot in enumerate(self.slots, 1):
            place = self._places[slot]
            make_directory(place.directory)
            try:
                if place.open():
                    place.restore(slot.session)
            except DamagedRows as error:
                self._warn(f"a kept conversation begins anew: {error}")
            except StateError as error:
                taken += not place.locked
                if place.locked:  # it would do in another context: it stays as it is
                    self._warn(f"a kept conversation is not taken up, and left as it is: {error}")
                place.close()
                del self._places[slot]
            if progress:
                progress("reading conversations", number, len(self.slots))
        self._check(taken)

    def _check(self, taken: int) -> None:
        if taken:
            self._warn(
                f"{plural(taken, 'conversation')} of {len(self.slots)} will not be kept: another "
                "server of this model keeps its own there; COLIBRI_STATE may name another directory"
            )
        lost = next((place for place in self._places.values() if not place.locked), None)
        if lost:
            raise StateError(f"{lost.directory}: cannot be written; leave out --keep")

    def save(self, progress: Progress | None = None) -> None:
        """Save each that holds anything. Only while nothing runs."""
        for number, (slot, place) in enumerate(self._places.items(), 1):
            if slot.session.length:
                self._state.keep("a conversation", lambda s=slot, p=place: p.save(s.session, {}))
            place.close()
            if progress:
                progress("saving conversations", number, len(self._places))


def _place(engine: Engine, state: State, number: int) -> Saved:
    """On a shelf for caches of its own kind: servers of two models take nothing from each other."""
    digest, kv_dtype = engine.tokenizer.digest, engine.settings.kv_dtype
    shelf = ("served", f"{engine.container.fingerprint[:16]}-{kv_dtype}")
    return Saved(state, str(number), engine.container, digest, kv_dtype, shelf)
