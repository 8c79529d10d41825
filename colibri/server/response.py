"""Answers in the shape of the Responses API: output in items, whole or in events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from colibri.sampling import SamplingParams
from colibri.server import logprobs
from colibri.server.items import SEALED
from colibri.server.refusal import Refusal
from colibri.server.reply import Delta, Reply, Whole
from colibri.server.responses import ResponseAsked, functions, sealed
from colibri.server.shapes import InTurn
from colibri.server.tools import ARGUMENTS, BROKEN, CALLED, ENDED, Event
from colibri.stats import Receipt
from colibri.tokenizer import Tokenizer

_NOW, _DONE, _CUT = "in_progress", "completed", "incomplete"
_REPEATED = (
    "instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier",
    "user",
)  # fmt: skip


class Item:
    """An item in the making: what it says of itself, and the text that grows in its `slot`."""

    def __init__(self, kind: str, prefix: str, slot: str, seals: bool = False, **said: Any) -> None:
        self.kind, self.slot = kind, slot
        self.id = f"{prefix}_{secrets.token_hex(12)}"
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self._seals, self._said = seals, said

    @property
    def in_parts(self) -> bool:
        """Whether the text is in a part of the content."""
        return self.kind != "function_call"

    def whole(self, status: str) -> dict[str, Any]:
        """The item as it is now; one that is begun shows nothing yet."""
        item = {"id": self.id, "type": self.kind, "status": status, **self._said}
        if not self.in_parts:
            return {**item, "arguments": self.text}
        if self._seals and status != _NOW:
            item["encrypted_content"] = sealed(self.text)
        return {**item, "content": [] if status == _NOW else [self.part()]}

    def part(self) -> dict[str, Any]:
        """The part of the content with the text so far."""
        return {"type": self.slot, "text": self.text, **self.beside(self.logprobs, annotations=[])}

    def beside(self, found: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """What stands beside text that is said, and not beside reasoning or arguments."""
        return {"logprobs": list(found), **more} if self.kind == "message" else {}


class ResponseShape(InTurn):
    """response, and response.created to response.completed. Only one item is open at a time."""

    closing = b""

    def __init__(
        self, model: str, tokenizer: Tokenizer, sampling: SamplingParams, asked: ResponseAsked
    ) -> None:
        self._tokenizer, self._given = tokenizer, asked.given
        self._head = _head(model, sampling, asked.given)
        found = functions(asked.given)
        self._spaces = {one.name: (one.space, one.said["name"]) for one in found}
        self._events = 0
        self._output: list[dict[str, Any]] = []
        self._open: Item | None = None
        self._early: list[dict[str, Any]] = []  # log-probabilities that came before their text

    # ---- whole ----------------------------------------------------------------------------------

    def whole(self, whole: Whole, reason: str, reply: Reply, receipt: Receipt) -> dict[str, Any]:
        """The response: what its events would have made."""
        calls: list[Event] = []
        for index, call in enumerate(whole.calls):
            function = call["function"]
            calls += [
                Event(CALLED, function["name"], index, call["id"]),
                Event(ARGUMENTS, function["arguments"], index),
                Event(ENDED, "", index),
            ]
        delta = Delta(whole.reasoning, whole.content, calls, logprobs=whole.logprobs)
        *_, last = [*self.chunks(delta), *self.last(reason, reply, receipt)]
        return last["response"]

    # ---- events ---------------------------------------------------------------------------------

    def alive(self) -> Iterator[dict[str, Any]]:
        """response.in_progress: some clients wait only so long for an event; a comment is none."""
        yield self._event(_NOW, response=self._response(_NOW))

    def opening(self, prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """response.created and response.in_progress."""
        for stage in ("created", _NOW):
            yield self._event(stage, response=self._response(_NOW))

    def last(self, reason: str, reply: Reply, receipt: Receipt) -> Iterator[dict[str, Any]]:
        """response.completed, or response.incomplete where a limit cut it off, with all of it."""
        status = _CUT if reason == "length" else _DONE
        kinds = [item["type"] for item in self._output]
        kinds += [self._open.kind] if self._open else []
        if status == _DONE and {*kinds} <= {"reasoning"}:
            yield from self._say(Delta())  # clients look for a message
        yield from self._close(status)
        ended = {
            "output": self._output,
            "usage": _usage(reply, receipt),
            "seed": receipt.seed,
            **({"incomplete_details": {"reason": "max_output_tokens"}} if status == _CUT else {}),
            **({"completed_at": int(time.time())} if status == _DONE else {}),
        }
        yield self._event(status, response=self._response(status, **ended))

    def failed(self, refusal: Refusal) -> Iterator[dict[str, Any]]:
        """response.failed, with what there was until then."""
        yield from self._close(_CUT)
        code = "server_error" if refusal.status >= 500 else "invalid_prompt"
        error = {"code": code, "message": refusal.message}
        failed = self._response("failed", output=self._output, error=error)
        yield self._event("failed", response=failed)

    @property
    def calling(self) -> bool:
        """Whether a call is open."""
        return self._open is not None and self._open.kind == "function_call"

    def _think(self, text: str) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open.kind != "reasoning":
            seals = SEALED in self._given.get("include", ())
            yield from self._begin(Item("reasoning", "rs", "reasoning_text", seals, summary=[]))
        yield self._grow(text)

    def _say(self, delta: Delta) -> Iterator[dict[str, Any]]:
        found = [logprobs.as_chat(self._tokenizer, entry) for entry in delta.logprobs]
        saying = self._open is not None and self._open.kind == "message"
        if not saying and delta.logprobs and not delta.content:
            self._early += found
            return
        if not saying:
            yield from self._begin(Item("message", "msg", "output_text", role="assistant"))
        found, self._early = self._early + found, []
        if delta.content or found:
            yield self._grow(delta.content, found)

    def _call(self, event: Event) -> Iterator[dict[str, Any]]:
        if event.kind == CALLED:
            space, name = self._spaces.get(event.text, (None, event.text))
            said = {"call_id": event.id, "name": name} | ({"namespace": space} if space else {})
            yield from self._begin(Item("function_call", "fc", "function_call_arguments", **said))
        elif event.kind == ARGUMENTS:
            yield self._grow(event.text)
        else:  # what was sent of a call that broke off cannot be taken back
            yield from self._close(_CUT if event.kind == BROKEN else _DONE)

    # ---- one item -------------------------------------------------------------------------------

    def _begin(self, item: Item) -> Iterator[dict[str, Any]]:
        yield from self._close(_DONE)
        self._open = item
        yield self._event("output_item.added", **self._at(), item=item.whole(_NOW))
        if item.in_parts:
            yield self._event("content_part.added", **self._in(item), part=item.part())

    def _grow(self, text: str, found: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        item = self._open
        assert item is not None
        item.text += text
        item.logprobs += found or []
        more = item.beside(found or [])
        return self._event(f"{item.slot}.delta", **self._in(item), delta=text, **more)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        item = self._open
        if item is None:
            return
        done = f"{item.slot}.done"
        whole = item.whole(status)
        if item.in_parts:
            beside = item.beside(item.logprobs)
            yield self._event(done, **self._in(item), text=item.text, **beside)
            yield self._event("content_part.done", **self._in(item), part=item.part())
        else:
            name = {"name": whole["name"], "arguments": item.text}
            yield self._event(done, **self._in(item), **name)
        yield self._event("output_item.done", **self._at(), item=whole)
        self._output.append(whole)
        self._open = None

    def _at(self) -> dict[str, Any]:
        return {"output_index": len(self._output)}

    def _in(self, item: Item) -> dict[str, Any]:
        place = {"item_id": item.id, **self._at()}
        return {**place, "content_index": 0} if item.in_parts else place

    def _event(self, stage: str, **more: Any) -> dict[str, Any]:
        number, self._events = self._events, self._events + 1
        return {"type": f"response.{stage}", "sequence_number": number, **more}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return {**self._head, "status": status, **more}


def _head(model: str, sampling: SamplingParams, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is known before the answer is: the request's settings, and fields yet empty."""
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": _NOW,
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        **{name: given.get(name) for name in _REPEATED},
        "metadata": given.get("metadata", {}),
        "model": model,
        "output": [],
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium", **given.get("text", {})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(reply: Reply, receipt: Receipt) -> dict[str, Any]:
    return {
        "input_tokens": receipt.prompt_tokens,
        "input_tokens_details": {"cached_tokens": receipt.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.tokens,
        "output_tokens_details": {"reasoning_tokens": reply.reasoned},
        "total_tokens": receipt.prompt_tokens + reply.tokens,
    }
