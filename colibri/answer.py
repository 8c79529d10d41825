"""An answer in the making: tokens become pieces of reasoning and of text, whole characters only."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from colibri.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"
TEXT, REASONING = "text", "reasoning"


class Piece(NamedTuple):
    """Text that became certain, of one kind: TEXT or REASONING."""

    kind: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """Token ids to answer. `split`: think tags are markup; `reasoning`: it begins in one."""

    ids: list[int]
    split: bool = True
    reasoning: bool = False

    @classmethod
    def of_template(cls, ids: list[int], tokenizer: Tokenizer) -> "Prompt":
        """A rendered conversation: its last token says whether the model starts by thinking."""
        start = tokenizer.id_of(THINK)
        return cls(ids, reasoning=bool(ids) and start is not None and ids[-1] == start)


class Splitter:
    """Feeds tokens to a streaming decoder and cuts where reasoning begins and ends."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self._decoder = tokenizer.stream()
        self._start = tokenizer.id_of(THINK) if prompt.split else None
        self._end = tokenizer.id_of(END_THINK) if prompt.split else None
        self._kind = REASONING if prompt.reasoning else TEXT
        self._fresh = True

    def push(self, tokens: Iterable[int]) -> Iterator[Piece]:
        """The pieces that became certain with these tokens."""
        text = ""
        for token in tokens:
            turn = self._turn(token)
            if turn is None:
                text += self._decoder.push(token)
                continue
            text += self._decoder.finish()
            if text:
                yield Piece(self._kind, text)
            self._kind, text = turn, ""
        if text:
            yield Piece(self._kind, text)

    def finish(self) -> Iterator[Piece]:
        """What an unfinished last character leaves."""
        text = self._decoder.finish()
        if text:
            yield Piece(self._kind, text)

    def _turn(self, token: int) -> str | None:
        """The kind that begins with this token, or None. Only a first <think> opens reasoning."""
        fresh, self._fresh = self._fresh, False
        if token == self._end and self._kind == REASONING:
            return TEXT
        if fresh and token == self._start and self._kind == TEXT:
            return REASONING
        return None
