"""Stop strings: found wherever tokens and pieces happen to be cut, and never shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Looks for the first stop string to be complete in a text that comes in pieces.

    What is held back is never more than the longest ending that could still become a stop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that became certain; nothing after a stop was found."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and is no stop after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """Length of the longest ending of `text` that begins `word`, the whole word excluded."""
    for size in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0
