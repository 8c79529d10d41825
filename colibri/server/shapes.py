"""Answers in the shape of an API, whole or in chunks; OpenAI's two older ones."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from colibri import __version__
from colibri.server import logprobs
from colibri.server.refusal import Refusal
from colibri.server.reply import Delta, Reply, Whole
from colibri.server.tools import ARGUMENTS, CALLED, Event
from colibri.stats import Receipt
from colibri.tokenizer import Tokenizer


def usage(reply: Reply, receipt: Receipt) -> dict[str, Any]:
    """Tokens of prompt and answer; drafts are told as OpenAI tells predictions."""
    proposed, accepted = receipt.drafts
    return {
        "prompt_tokens": receipt.prompt_tokens,
        "completion_tokens": reply.tokens,
        "total_tokens": receipt.prompt_tokens + reply.tokens,
        "prompt_tokens_details": {"cached_tokens": receipt.reused_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reply.reasoned,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": proposed - accepted,
        },
    }


class Shape(ABC):
    """How an API shows an answer. `path`: of the API; `closing`: the last bytes of a stream."""

    path, closing = "", b"data: [DONE]\n\n"

    @abstractmethod
    def whole(self, whole: Whole, reason: str, reply: Reply, receipt: Receipt) -> dict[str, Any]:
        """The answer in one object."""

    def opening(self, prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """What comes before anything else."""
        return iter(())

    def alive(self) -> Iterator[dict[str, Any]]:
        """What comes when there was nothing for a while."""
        return iter(())

    @abstractmethod
    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """What a step added."""

    @abstractmethod
    def last(self, reason: str, reply: Reply, receipt: Receipt) -> Iterator[dict[str, Any]]:
        """What says why it ended."""

    def failed(self, refusal: Refusal) -> Iterator[dict[str, Any]]:
        """What tells of an error after all that was sent."""
        yield refusal.told(self.path)[1]


class InTurn(Shape):
    """An answer in parts, one open at a time: reasoning, then text and calls."""

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """What a step added; a call that is open ends before text begins."""
        if delta.reasoning:
            yield from self._think(delta.reasoning)
        calls = iter(delta.calls)
        while self.calling and (event := next(calls, None)):
            yield from self._call(event)
        if delta.content or delta.logprobs:
            yield from self._say(delta)
        for event in calls:
            yield from self._call(event)

    @property
    @abstractmethod
    def calling(self) -> bool:
        """Whether a call is open."""

    @abstractmethod
    def _think(self, text: str) -> Iterator[dict[str, Any]]:
        """More reasoning."""

    @abstractmethod
    def _say(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """More text, or log-probabilities alone."""

    @abstractmethod
    def _call(self, event: Event) -> Iterator[dict[str, Any]]:
        """What became of a call."""


class Choices(Shape):
    """What chat and plain completions have in common."""

    prefix = whole_object = chunk_object = ""

    def __init__(self, model: str, mode: str, tokenizer: Tokenizer, with_usage: bool) -> None:
        self._tokenizer, self._with_usage = tokenizer, with_usage
        self._head = {
            "id": self.prefix + secrets.token_hex(12),
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"colibri-{__version__}-{mode}",
        }

    def whole(self, whole: Whole, reason: str, reply: Reply, receipt: Receipt) -> dict[str, Any]:
        """The answer in one object."""
        choice = {"index": 0, **self._choice(whole), "finish_reason": reason}
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [choice],
            "usage": usage(reply, receipt),
            "seed": receipt.seed,
        }

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """What a step added."""
        for choice in self._parts(delta):
            yield self._chunk({"index": 0, **choice, "finish_reason": None})

    def last(self, reason: str, reply: Reply, receipt: Receipt) -> Iterator[dict[str, Any]]:
        """The chunk that says why it ended, and the one with the usage if that was wanted."""
        yield self._chunk({"index": 0, **self._end(), "finish_reason": reason}) | {
            "seed": receipt.seed
        }
        if self._with_usage:
            yield {**self._head, "choices": [], "usage": usage(reply, receipt)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": [choice]}
        return chunk | {"usage": None} if self._with_usage else chunk

    @abstractmethod
    def _choice(self, whole: Whole) -> dict[str, Any]:
        """The answer's choice, but for its index and finish_reason."""

    @abstractmethod
    def _parts(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The choices that a step's delta makes, in order."""

    @abstractmethod
    def _end(self) -> dict[str, Any]:
        """The choice of the last chunk."""


class ChatShape(Choices):
    """chat.completion and chat.completion.chunk."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    _opened = False

    def _choice(self, whole: Whole) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": whole.content, "refusal": None}
        if whole.calls:
            message |= {"content": whole.content or None, "tool_calls": whole.calls}
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        return {"message": message, "logprobs": self._logprobs(whole)}

    def _parts(self, delta: Delta) -> Iterator[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        if delta.reasoning:
            pieces.append({"reasoning_content": delta.reasoning})
        found = self._logprobs(delta)
        if delta.content or (found and not pieces):
            pieces.append({"content": delta.content})
        pieces += self._calls(delta)
        for i, piece in enumerate(pieces):
            role = {} if self._opened else {"role": "assistant"}
            self._opened = True
            logprobs = found if i == 0 else None
            yield {"delta": {**role, **piece}, "logprobs": logprobs}

    def _calls(self, delta: Delta) -> list[dict[str, Any]]:
        """Consecutive fragments of one call's arguments go together."""
        calls: list[dict[str, Any]] = []
        for event in delta.calls:
            if event.kind == CALLED:
                function = {"name": event.text, "arguments": ""}
                head = {"index": event.index, "id": event.id, "type": "function"}
                calls.append({**head, "function": function})
            elif event.kind == ARGUMENTS and calls and calls[-1]["index"] == event.index:
                calls[-1]["function"]["arguments"] += event.text
            elif event.kind == ARGUMENTS:
                calls.append({"index": event.index, "function": {"arguments": event.text}})
        return [{"tool_calls": [call]} for call in calls]

    def _end(self) -> dict[str, Any]:
        role = {} if self._opened else {"role": "assistant", "content": ""}
        return {"delta": role, "logprobs": None}

    def _logprobs(self, found: Delta | Whole) -> dict[str, Any] | None:
        if not found.logprobs and not found.reasoning_logprobs:
            return None
        content = [logprobs.as_chat(self._tokenizer, e) for e in found.logprobs]
        result: dict[str, Any] = {"content": content, "refusal": None}
        if found.reasoning_logprobs:
            reasoning = [logprobs.as_chat(self._tokenizer, e) for e in found.reasoning_logprobs]
            result["reasoning_content"] = reasoning
        return result


class CompletionShape(Choices):
    """text_completion, whole and in chunks."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"
    _offset = 0

    def _choice(self, whole: Whole) -> dict[str, Any]:
        return {"text": whole.content, "logprobs": self._logprobs(whole)}

    def _parts(self, delta: Delta) -> Iterator[dict[str, Any]]:
        yield {"text": delta.content, "logprobs": self._logprobs(delta)}

    def _end(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _logprobs(self, found: Delta | Whole) -> dict[str, Any] | None:
        if not found.logprobs:
            return None
        result = logprobs.as_completion(self._tokenizer, found.logprobs, self._offset)
        self._offset += sum(map(len, result["tokens"]))
        return result
