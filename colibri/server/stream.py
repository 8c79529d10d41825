"""Server-sent events: an answer as it is made, with signs of life while there is nothing new."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from colibri.errors import FormError
from colibri.server.mailbox import Mailbox
from colibri.server.refusal import Refusal, encode
from colibri.server.reply import Delta, Reply
from colibri.server.scheduler import Job, Outcome
from colibri.server.shapes import Shape

PACE = 0.01  # seconds between two blocks at least: a fast model's tokens go in handfuls
SILENCE = 5.0  # seconds after which a comment says that the server is alive; no client shows it
ACCEPTED = b": accepted\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(value: dict[str, Any]) -> bytes:
    """One event, which has a name where it has a type."""
    name = b"event: %b\n" % value["type"].encode() if "type" in value else b""
    return name + b"data: " + encode(value) + b"\n\n"


async def events(mailbox: Mailbox[Delta | Outcome], shape: Shape, job: Job) -> AsyncIterator[bytes]:
    """Blocks of events until the outcome; what has piled up meanwhile goes together."""
    yield ACCEPTED + b"".join(map(event, shape.opening(len(job.prompt.ids))))
    sent = 0.0
    while True:
        await asyncio.sleep(max(0.0, sent + PACE - monotonic()))
        items = await mailbox.take(SILENCE)
        sent = monotonic()
        if not items:
            comment = b": " + _doing(job).encode() + b"\n\n"
            yield comment + b"".join(map(event, shape.alive()))
        delta = Delta()
        for item in items:
            delta.add(item.delta if isinstance(item, Outcome) else item)
        block = b"".join(map(event, shape.chunks(delta))) if delta else b""
        if items and isinstance(items[-1], Outcome):
            yield block + _end(items[-1], shape, job.reply)
            return
        if block:
            yield block


def _doing(job: Job) -> str:
    """What is going on while nothing comes."""
    if job.turn is None:
        return "waiting for others"
    read, count = job.turn.session.length, len(job.prompt.ids)
    return f"{read} of {count} prompt tokens read" if read < count else "writing"


def _end(outcome: Outcome, shape: Shape, reply: Reply) -> bytes:
    if outcome.gone:
        return b""
    if outcome.error or not outcome.receipt:
        return b"".join(map(event, shape.failed(refusal_of(outcome))))
    last = shape.last(outcome.finish_reason, reply, outcome.receipt)
    return b"".join(map(event, last)) + shape.closing


def refusal_of(outcome: Outcome) -> Refusal:
    """What a client is told of an error."""
    if isinstance(outcome.error, Refusal):
        return outcome.error
    if isinstance(outcome.error, FormError):  # sent again it would fare no better
        return Refusal(f"{outcome.error}.", code="form_too_ambiguous")
    text = str(outcome.error) or type(outcome.error).__name__
    return Refusal(text, status=500, code="engine_error")


class EventStream:
    """An ASGI answer: sends blocks as they come; whoever reads slowly delays nobody else."""

    def __init__(self, blocks: AsyncIterator[bytes], close: Any) -> None:
        self._blocks, self._close = blocks, close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send everything; whatever happens, close."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS]})
            async for block in self._blocks:
                await send({"type": "http.response.body", "body": block, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except OSError:  # the client left
            return
        finally:
            self._close()
