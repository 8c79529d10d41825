"""An answer in the making: tokens in, what a client gets to see out.

Everything goes token by token, so that a stop string ends the answer at the same token whatever
was drafted, and what is counted is what is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri.answer import REASONING, Piece, Prompt, Splitter
from colibri.server.logprobs import Entry, entry
from colibri.server.stops import StopFinder
from colibri.server.tools import ARGUMENTS, BROKEN, CALLED, ENDED, SAID, Event, ToolParser
from colibri.tokenizer import Tokenizer

TOOL_CALLS = "tool_calls"


@dataclass
class Delta:
    """What one step added. `calls`: events of tool calls, all but SAID."""

    reasoning: str = ""
    content: str = ""
    calls: list[Event] = field(default_factory=list)
    reasoning_logprobs: list[Entry] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)

    def add(self, later: Delta) -> None:
        """What came after this one."""
        self.reasoning += later.reasoning
        self.content += later.content
        self.calls += later.calls
        self.reasoning_logprobs += later.reasoning_logprobs
        self.logprobs += later.logprobs

    def __bool__(self) -> bool:
        parts = (self.reasoning, self.content, self.calls, self.reasoning_logprobs, self.logprobs)
        return any(parts)


@dataclass(frozen=True)
class Wish:
    """How a reply is to be made. `top` likeliest tokens beside each; None: no log-probabilities."""

    stops: Sequence[str] = ()
    top: int | None = None
    parallel: bool = True


class Reply:
    """The answer to one request. `enough` says why it should end now, None while it should not."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Prompt, wish: Wish, parser: ToolParser | None = None
    ) -> None:
        self.tokens = self.reasoned = 0
        self.enough: str | None = None
        self._splitter = Splitter(tokenizer, prompt)
        self._vocab_used = tokenizer.vocab_used
        self._stops = StopFinder(wish.stops)
        self._wish, self._parser = wish, parser

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._stops.found

    def push(self, tokens: Iterable[int], logits: NDArray[np.float32] | None) -> Delta:
        """What these tokens add; row i of `logits` decided token i."""
        delta = Delta()
        for i, token in enumerate(tokens):
            if self.enough:
                break
            self.tokens += 1
            pieces = list(self._splitter.push([token]))
            if self._wish.top is not None and logits is not None:
                found = entry(logits[i], token, self._wish.top, self._vocab_used)
                reasoning = self._splitter.reasoned > self.reasoned
                (delta.reasoning_logprobs if reasoning else delta.logprobs).append(found)
            self.reasoned = self._splitter.reasoned
            for piece in pieces:
                self._show(piece, delta)
        return delta

    def finish(self, reason: str) -> tuple[Delta, str]:
        """What was held back, and OpenAI's reason; `reason` is the turn's (colibri.stats)."""
        delta = Delta()
        if not self.enough:
            for piece in self._splitter.finish():
                self._show(piece, delta)
        stopped = (self.enough or reason) == "stop"
        if self._parser and self.enough != TOOL_CALLS and self._stops.found is None:
            self._tell(self._parser.finish(stopped), delta)
        delta.content += self._stops.finish()
        if self._parser and self._parser.complete and (stopped or self.enough):
            return delta, TOOL_CALLS
        return delta, "stop" if stopped else "length"

    def _show(self, piece: Piece, delta: Delta) -> None:
        if self.enough:
            return
        if piece.kind == REASONING:
            delta.reasoning += piece.text
        elif self._parser:
            self._tell(self._parser.push(piece), delta)
        else:
            self._say(piece.text, delta)

    def _tell(self, events: Iterable[Event], delta: Delta) -> None:
        for event in events:
            if event.kind == SAID:
                self._say(event.text, delta)
                continue
            delta.calls.append(event)
            if event.kind == ENDED and not self._wish.parallel:
                self.enough = TOOL_CALLS
                return

    def _say(self, text: str, delta: Delta) -> None:
        delta.content += self._stops.push(text)
        if self._stops.found is not None:
            self.enough = "stop"


@dataclass
class Whole:
    """All deltas of an answer put together."""

    reasoning: str = ""
    content: str = ""
    reasoning_logprobs: list[Entry] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """One more. A call that broke off becomes content, as it was written."""
        self.reasoning += delta.reasoning
        self.content += delta.content
        self.reasoning_logprobs += delta.reasoning_logprobs
        self.logprobs += delta.logprobs
        for event in delta.calls:
            if event.kind == CALLED:
                function = {"name": event.text, "arguments": ""}
                self._calls[event.index] = {
                    "id": event.id, "type": "function", "function": function,
                }  # fmt: skip
            elif event.kind == ARGUMENTS:
                self._calls[event.index]["function"]["arguments"] += event.text
            elif event.kind == BROKEN:
                self._calls.pop(event.index, None)
                self.content += event.text

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Complete tool calls."""
        return list(self._calls.values())
