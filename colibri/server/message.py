"""Answers in the shape of the Messages API: content in blocks, whole or in events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from colibri.server.refusal import MESSAGES
from colibri.server.reply import Delta, Reply, Whole
from colibri.server.shapes import InTurn
from colibri.server.tools import ARGUMENTS, CALLED, Event
from colibri.stats import Receipt

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Nothing is signed; but clients leave reasoning out of the history whose signature is empty.
_SIGNATURE = {"signature": "colibri"}


class MessageShape(InTurn):
    """message, and message_start to message_stop. Only one block is open at a time."""

    path, closing = MESSAGES, b""

    def __init__(self, model: str) -> None:
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._index, self._open = 0, ""

    def whole(self, whole: Whole, reason: str, reply: Reply, receipt: Receipt) -> dict[str, Any]:
        """The message."""
        content: list[dict[str, Any]] = []
        if whole.reasoning:
            content.append({"type": "thinking", "thinking": whole.reasoning, **_SIGNATURE})
        if whole.content:
            content.append({"type": "text", "text": whole.content})
        for call in whole.calls:
            function = call["function"]
            content.append(_use(call["id"], function["name"], json.loads(function["arguments"])))
        ended = {**_ended(reason, reply), "usage": _usage(reply, receipt)}
        return {**self._head, "content": content, **ended}

    def opening(self, prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """message_start; what of the prompt is in a cache is not known yet."""
        empty = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"usage": _tokens(prompt_tokens, 0, 0)}
        yield {"type": "message_start", "message": {**self._head, **empty, **usage}}

    def last(self, reason: str, reply: Reply, receipt: Receipt) -> Iterator[dict[str, Any]]:
        """message_delta with the reason and the usage, and message_stop."""
        yield from self._close()
        usage = _usage(reply, receipt)
        yield {"type": "message_delta", "delta": _ended(reason, reply), "usage": usage}
        yield {"type": "message_stop"}

    def alive(self) -> Iterator[dict[str, Any]]:
        """ping."""
        yield {"type": "ping"}

    @property
    def calling(self) -> bool:
        """Whether a call is open."""
        return self._open == "tool_use"

    def _think(self, text: str) -> Iterator[dict[str, Any]]:
        return self._more("thinking", text)

    def _say(self, delta: Delta) -> Iterator[dict[str, Any]]:
        return self._more("text", delta.content)

    def _more(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signature})
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, event: Event) -> Iterator[dict[str, Any]]:
        if event.kind == CALLED:
            yield from self._begin(_use(event.id, event.text, {}))
        elif event.kind == ARGUMENTS:
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
        else:  # complete or broken off: what was sent cannot be taken back
            yield from self._close()

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", **_SIGNATURE})
        yield {"type": "content_block_stop", "index": self._index}
        self._index, self._open = self._index + 1, ""


def _use(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def _ended(reason: str, reply: Reply) -> dict[str, Any]:
    found = reply.stop if reason == "stop" else None
    stopped = _REASONS[reason] if found is None else "stop_sequence"
    return {"stop_reason": stopped, "stop_sequence": found}


def _usage(reply: Reply, receipt: Receipt) -> dict[str, Any]:
    reused = receipt.reused_tokens
    details = {"output_tokens_details": {"thinking_tokens": reply.reasoned}}
    return {**_tokens(receipt.prompt_tokens - reused, reused, reply.tokens), **details}


def _tokens(read: int, cached: int, written: int) -> dict[str, int]:
    """`read`: of the prompt, but for those in a cache."""
    return {
        "input_tokens": read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
    }
