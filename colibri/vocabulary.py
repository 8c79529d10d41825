"""The tokens that text may consist of, by their bytes: which of them a grammar lets come."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from colibri.grammar import Matcher, State


class Vocabulary:
    """Tokens in the order of their bytes, so that one look rules out all with a beginning."""

    def __init__(self, table: list[bytes]) -> None:
        order = sorted((i for i, data in enumerate(table) if data), key=table.__getitem__)
        self._size = len(table)
        self.others = [i for i, data in enumerate(table) if not data]  # no text: left to the caller
        self._ids = np.array(order, np.int64)
        self._keys = [table[i] for i in order]
        self._firsts = np.array([key[0] for key in self._keys], np.uint8)
        self._sets = _byte_sets(self._keys)

    def mask(self, matcher: Matcher, state: State) -> NDArray[np.bool_]:
        """Which tokens of text may come in this state, by id."""
        firsts = {letter for letter in matcher.firsts(state) if letter < 256}
        staying = bytes(byte for byte in firsts if matcher.after(state, bytes((byte,))) is state)
        within = ~(self._sets & ~_byte_sets([staying])).any(1)  # made of those: they stay too
        begun = np.isin(np.arange(256), [*firsts])[self._firsts]  # the others need no look
        for at in self._walk(matcher, state, np.flatnonzero(begun & ~within).tolist()):
            within[at] = True
        mask = np.zeros(self._size, bool)
        mask[self._ids[within]] = True
        return mask

    def _walk(self, matcher: Matcher, state: State, places: list[int]) -> Iterable[int]:
        """Those of these places in the order whose tokens may come."""
        keys, next_one = self._keys, 0
        while next_one < len(places):
            place = places[next_one]
            next_one += 1
            taken = matcher.taken(state, keys[place])
            if taken == len(keys[place]):
                yield place
            else:  # and so with all that begin like this
                behind = bisect_left(keys, _successor(keys[place][: taken + 1]), place)
                next_one = bisect_left(places, behind, next_one)


def _byte_sets(texts: list[bytes]) -> NDArray[np.uint64]:
    """u64 [texts][4]: bit b % 64 of word b // 64 is set where byte b occurs."""
    sizes = [len(text) for text in texts]
    found = np.zeros((len(texts), 4), np.uint64)
    data = np.frombuffer(b"".join(texts), np.uint8)
    rows = np.repeat(np.arange(len(texts)), sizes)
    bits = np.left_shift(np.uint64(1), (data % 64).astype(np.uint64))
    np.bitwise_or.at(found, (rows, data // 64), bits)
    return found


def _successor(prefix: bytes) -> bytes:
    """The least text behind all that begin with this one."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,)) if kept else b"\xff" * 256
