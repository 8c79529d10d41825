"""Warm restarts: which experts were in memory, remembered, and read again before they are needed.

The hottest come first, some dozens at a time and those in disk order, so that a start that is cut
short has read what is most likely to be asked for.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from colibri.engine import Engine
from colibri.errors import ColibriError, StateError
from colibri.plan import pools
from colibri.state import State, read_document, write_document
from colibri.turn import Progress

BLOCK = 64  # experts read between two looks at whether to stop: about a gigabyte of GLM-5.2's
FORMAT = "colibri-resident-1"

Pair = tuple[int, int]  # layer, expert


class Resident:
    """The experts in an engine's slots, and the file that remembers them by the container."""

    def __init__(self, engine: Engine, state: State) -> None:
        self._engine = engine
        self._state = state
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._unread: list[Pair] = []  # of a `fill` that was cut short

    @property
    def applies(self) -> bool:
        """Whether experts live in slots; mapped ones are the page cache's affair."""
        plan = self._engine.plan
        return plan is not None and plan.slots_per_layer > 0

    @property
    def path(self) -> Path:
        """Where it is remembered."""
        return self._state.place("resident", f"{self._engine.container.fingerprint}.json")

    def save(self) -> None:
        """Remember what is in memory, hottest first; then what was yet to be read."""
        if not self.applies:
            return
        pairs = [*dict.fromkeys([*self._engine.model.resident(), *self._unread])]
        document = {"format": FORMAT, "experts": pairs}
        self._state.keep(
            "the set of experts in memory", lambda: write_document(self.path, document)
        )

    def remembered(self) -> list[Pair]:
        """What was in memory and has a place now, the hottest first."""
        if not self.applies or self._state.root is None:
            return []
        try:
            raw = read_document(self.path) or {}
            listed = raw.get("experts", []) if raw.get("format") == FORMAT else []
            pairs = [(int(layer), int(expert)) for layer, expert in listed]
        except (StateError, TypeError, ValueError):
            return []  # it only ever saves time
        return self._that_fit(pairs)

    def _that_fit(self, pairs: list[Pair]) -> list[Pair]:
        engine, config = self._engine, self._engine.container.config
        assert engine.plan is not None
        mtp = config.num_hidden_layers
        slots, mtp_slots = pools(engine.plan.slots_per_layer, config.sparse_layer_count)
        sparse = engine.container.sparse[: engine.model.layers]
        main = [p for p in pairs if 0 <= p[0] < mtp and sparse[p[0]]]
        drafts = [p for p in pairs if p[0] == mtp < len(sparse)]
        kept = {*main[:slots], *drafts[:mtp_slots]}
        return [p for p in pairs if p in kept and 0 <= p[1] < config.n_routed_experts]

    # ---- reading them again -----------------------------------------------------------------

    def fill(self, progress: Progress | None = None) -> int:
        """Read them all, now; returns how many."""
        pairs = self._unread = self.remembered()
        done = 0
        for block in self._blocks(pairs):
            if self._stop.is_set():
                break
            self._engine.model.warm(block)
            done += len(block)
            self._unread = pairs[done:]
            if progress:
                progress("reading experts", done, len(pairs))
        self._order(pairs)
        return done

    def start(self) -> None:
        """Read them in the background, until `stop`."""

        def work() -> None:
            with suppress(ColibriError):  # the turn that needs the expert will tell
                self.fill()

        if self.applies and self._thread is None:
            self._thread = threading.Thread(target=work, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the reading within one block."""
        self._stop.set()
        thread = self._thread  # a server's two threads may both come here
        if thread:
            thread.join()
            self._thread = None

    def _blocks(self, pairs: list[Pair]) -> Iterator[list[Pair]]:
        container = self._engine.container
        for at in range(0, len(pairs), BLOCK):
            block = pairs[at : at + BLOCK]
            places = {}
            for layer, expert in block:
                gate = container.experts(layer)[expert, 0]
                places[layer, expert] = int(gate["shard"]), int(gate["offset"])
            yield sorted(block, key=lambda pair: places[pair])

    def _order(self, pairs: list[Pair]) -> None:
        """Heat them once more, coldest first: reading the hottest first left them the coldest."""
        there = set(self._engine.model.resident())
        self._engine.model.warm([pair for pair in reversed(pairs) if pair in there])
