"""An answer in the making: tokens become pieces of reasoning and of text, whole characters only."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from colibri.chat import opens_thinking
from colibri.grammar import Node
from colibri.piece import MARK, REASONING, TEXT, Piece
from colibri.tokenizer import Tokenizer

MOST_BYTES = 32 << 20  # of a prompt's text: more than any context holds


@dataclass(frozen=True)
class Prompt:
    """Token ids to answer. `markup`: think tags in the answer separate reasoning from text.

    `marks` are tokens, with their text, that become pieces of their own: those of tool calls.
    `form`: what the answer must be (colibri.schema), but for its reasoning; or it `calls` tools:
    by name, each with what its arguments must be (colibri.arguments), None for anything. `begun`:
    the prompt ends in a call's tag and the name so far, perhaps "".
    """

    ids: list[int]
    markup: bool = True
    marks: Mapping[int, str] = field(default_factory=dict)
    form: Node | None = None
    calls: Mapping[str, Node | None] = field(default_factory=dict)
    begun: str | None = None

    @property
    def guided(self) -> bool:
        """Whether not every answer will do."""
        return self.form is not None or any(self.calls.values())


class Splitter:
    """Cuts the tokens of one answer into pieces, by token id, never by what the text looks like.

    The tags are not shown. Reasoning begins when the prompt opened it or the first token does.
    `reasoned` counts the tokens that were reasoning or its tags; they all come first.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self._stream = tokenizer.stream()
        self._open = tokenizer.id_of("<think>") if prompt.markup else None
        self._close = tokenizer.id_of("</think>") if prompt.markup else None
        inside = prompt.markup and opens_thinking(prompt.ids, tokenizer)
        self._kind = REASONING if inside else TEXT
        self._first = True
        self._marks = prompt.marks
        self.reasoned = 0

    def push(self, tokens: Iterable[int]) -> Iterator[Piece]:
        """The pieces that became certain with these tokens."""
        text = ""
        for token in tokens:
            following = self._following(token)
            mark = self._marks.get(token) if following == TEXT else None
            if following == self._kind and mark is None:
                text += self._stream.push(token)
                continue
            text += self._stream.finish()
            if text:
                yield Piece(self._kind, text)
            self._kind, text = following, ""
            if mark is not None:
                yield Piece(MARK, mark)
        if text:
            yield Piece(self._kind, text)

    def finish(self) -> Iterator[Piece]:
        """What an unfinished last character leaves."""
        text = self._stream.finish()
        if text:
            yield Piece(self._kind, text)

    def _following(self, token: int) -> str:
        """The kind of what comes from this token on."""
        first, self._first = self._first, False
        if self._kind == REASONING:
            self.reasoned += 1
            return TEXT if token == self._close else REASONING
        if first and token == self._open:
            self.reasoned += 1
            return REASONING
        return TEXT
