"""A piece of an answer: text that became certain, and what kind it is."""

from typing import NamedTuple

TEXT, REASONING, MARK = "text", "reasoning", "mark"


class Piece(NamedTuple):
    """Text that became certain, of one kind: TEXT, REASONING or MARK (one token's markup)."""

    kind: str
    text: str
