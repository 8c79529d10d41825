"""The routes of the server."""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from colibri.answer import MOST_BYTES, Prompt
from colibri.server import asked, fields, messages, metrics, pages, responses
from colibri.server.asked import Asked, ChatAsked, CompletionAsked
from colibri.server.guard import Guard, Guarded
from colibri.server.items import RESPONSES
from colibri.server.mailbox import Mailbox
from colibri.server.message import MessageShape
from colibri.server.openapi import POSTS, description
from colibri.server.refusal import MESSAGES, Refusal, encode
from colibri.server.reply import Delta, Reply, Whole, Wish
from colibri.server.response import ResponseShape
from colibri.server.scheduler import Job, Outcome
from colibri.server.service import Service
from colibri.server.shapes import ChatShape, Choices, CompletionShape, Shape
from colibri.server.stream import EventStream, events, refusal_of
from colibri.server.tools import ToolParser


def make_app(service: Service) -> Any:
    """The ASGI application; the service's scheduler must have been started."""
    api = Api(service)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completion, methods=["POST"]),
        Route(MESSAGES, api.message, methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", api.count, methods=["POST"]),
        Route(RESPONSES, api.response, methods=["POST"]),
        Route(f"{RESPONSES}/input_tokens", api.input_tokens, methods=["POST"]),
        Route(f"{RESPONSES}/{{id:path}}", api.stored, methods=["GET", "POST", "DELETE"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{id:path}", api.model),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/debug/state", api.state),
        Route("/openapi.json", api.openapi),
        *pages.routes(),
    ]
    handlers: Any = {
        Refusal: api.refused,
        HTTPException: api.not_found,
        ClientDisconnect: api.left,
        Exception: api.failed,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Guarded(_Counted(app, service, {route.path for route in routes}), Guard.of(
        service.engine.settings
    ))  # fmt: skip


class Api:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response | EventStream:
        """POST /v1/chat/completions."""
        wanted, (prompt, parser) = await self._prepare(request, asked.chat, self.service.chat)
        return await self._respond(request, wanted, prompt, parser, self._shape(ChatShape, wanted))

    async def completion(self, request: Request) -> Response | EventStream:
        """POST /v1/completions."""
        read, make = asked.completion, self.service.completion
        wanted, prompt = await self._prepare(request, read, make)
        shape = self._shape(CompletionShape, wanted)
        return await self._respond(request, wanted, prompt, None, shape)

    async def message(self, request: Request) -> Response | EventStream:
        """POST /v1/messages."""
        read, make = messages.message, self.service.chat
        wanted, (prompt, parser) = await self._prepare(request, read, make)
        return await self._respond(request, wanted, prompt, parser, MessageShape(self.service.id))

    async def count(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        _, (prompt, _) = await self._prepare(request, messages.count, self.service.chat)
        return _json({"input_tokens": len(prompt.ids)})

    async def response(self, request: Request) -> Response | EventStream:
        """POST /v1/responses."""
        service = self.service
        make = responses.renamed(service.chat)
        wanted, (prompt, parser) = await self._prepare(request, responses.response, make)
        tokenizer, sampling = service.engine.tokenizer, service.sampling(wanted)
        shape = ResponseShape(service.id, tokenizer, sampling, wanted)
        return await self._respond(request, wanted, prompt, parser, shape)

    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens."""
        make = responses.renamed(self.service.chat)
        _, (prompt, _) = await self._prepare(request, responses.count, make)
        return _json({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})

    async def stored(self, request: Request) -> Response:
        """Whatever asks for a response of before."""
        text = "no response is stored here; send all items as input with every request."
        raise Refusal(text, status=404, code="not_stored")

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        id = self.service.id
        pages = {"first_id": id, "last_id": id, "has_more": False}  # Anthropic's
        return _json({"object": "list", "data": [self._model()], **pages})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        self.service.require_model(request.path_params["id"])
        return _json(self._model())

    async def health(self, request: Request) -> Response:
        """GET /health: 503 when the engine's thread has ended."""
        alive = self.service.scheduler.alive
        return _json({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        text = self.service.metrics.text()
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def state(self, request: Request) -> Response:
        """GET /debug/state: what the page draws."""
        scheduler, state = self.service.scheduler, self.service.watch.state()
        scheduler.nudge()
        now = {"active": scheduler.active, "waiting": scheduler.waiting, "kept": scheduler.kept}
        return _json({**state, "now": now})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return _json(description())

    # ---- errors ---------------------------------------------------------------------------------

    async def refused(self, request: Request, refusal: Any) -> Response:
        """A refusal in the shape of the API that was asked."""
        status, body = refusal.told(request.url.path)
        return _json(body, status, refusal.headers)

    async def not_found(self, request: Request, error: Any) -> Response:
        """No such path, or not with this method."""
        path = request.url.path[:200]
        what = "does not take" if error.status_code == 405 else "is not there for"
        text = f"{path} {what} {request.method}.{_meant(path)}"
        headers = dict(error.headers or {})
        return await self.refused(request, Refusal(text, status=error.status_code, headers=headers))

    async def left(self, request: Request, error: Any) -> Response:
        """The client left while it was sending; nobody reads this."""
        return Response(status_code=400)

    async def failed(self, request: Request, error: Any) -> Response:
        """A mistake of ours."""
        traceback.print_exception(error)
        text = "the server made a mistake; its log has the details."
        return await self.refused(request, Refusal(text, status=500))

    # ---- how ------------------------------------------------------------------------------------

    async def _prepare(self, request: Request, read: Any, make: Any) -> tuple[Any, Any]:
        """Body to request to prompt; in another thread, for a long prompt takes a while."""
        body = await _body(request)

        def work() -> tuple[Any, Any]:
            wanted = read(fields.parse(body))
            return wanted, make(wanted)

        return await asyncio.to_thread(work)

    def _shape(self, kind: type[Choices], wanted: Asked) -> Shape:
        service = self.service
        mode = service.engine.settings.mode
        return kind(service.id, mode, service.engine.tokenizer, wanted.include_usage)

    async def _respond(
        self,
        request: Request,
        wanted: ChatAsked | CompletionAsked,
        prompt: Prompt,
        parser: ToolParser | None,
        shape: Shape,
    ) -> Response | EventStream:
        service = self.service
        wish = Wish(wanted.stops, wanted.logprobs, getattr(wanted, "parallel", True))
        reply = Reply(service.engine.tokenizer, prompt, wish, parser)
        mailbox: Mailbox[Delta | Outcome] = Mailbox()
        whole = Whole()
        address = request.client.host if request.client else ""
        job = Job(
            prompt, service.sampling(wanted), service.limit(wanted), reply,
            client=f"{address} {wanted.user}",
            deliver=mailbox.post if wanted.stream else whole.add,
            done=mailbox.post,
        )  # fmt: skip
        service.scheduler.submit(job)
        leaving = asyncio.create_task(self._cancel_when_gone(request, job))
        close = _closer(leaving, service, job)
        if wanted.stream:
            return EventStream(events(mailbox, shape, job), close)
        try:
            (outcome,) = await mailbox.take()
            return _answer(whole, outcome, shape, reply)
        finally:
            close()

    async def _cancel_when_gone(self, request: Request, job: Job) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.service.scheduler.cancel(job)

    def _model(self) -> dict[str, Any]:
        """As OpenAI's API shows it, and as Anthropic's does."""
        id, context = self.service.id, self.service.engine.context
        created = datetime.fromtimestamp(self._created, timezone.utc)
        openai = {
            "id": id,
            "object": "model",
            "created": self._created,
            "owned_by": "colibri",
            "context_length": context,
        }
        return openai | {
            "type": "model",
            "display_name": id,
            "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "max_input_tokens": context,
        }


def _meant(path: str) -> str:
    """The usual mistake: OpenAI's clients want a base URL with /v1, Anthropic's one without."""
    right = re.sub("(/v1)*/", "/v1/", path, count=1)
    if right == path or right not in (*POSTS, "/v1/models"):
        return ""
    return f" {right} is: look at the client's base URL."


def _closer(leaving: asyncio.Task[None], service: Service, job: Job) -> Callable[[], None]:
    def close() -> None:
        """However the answer ended, nothing goes on for it."""
        leaving.cancel()
        service.scheduler.cancel(job)

    return close


def _answer(whole: Whole, outcome: Any, shape: Shape, reply: Reply) -> Response:
    """All of it in one object."""
    if outcome.gone:
        return Response(status_code=499)
    if outcome.error or not outcome.receipt:
        raise refusal_of(outcome)
    whole.add(outcome.delta)
    return _json(shape.whole(whole, outcome.finish_reason, reply, outcome.receipt))


async def _body(request: Request) -> bytes:
    body = bytearray()
    promised = request.headers.get("content-length", "")
    _require_size(int(promised) if re.fullmatch(r"\d{1,30}", promised, re.ASCII) else 0)
    async for chunk in request.stream():
        body += chunk
        _require_size(len(body))
    return bytes(body)


def _require_size(nbytes: int) -> None:
    if nbytes > MOST_BYTES:
        raise Refusal(f"the body has more than {MOST_BYTES} bytes.", status=413)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")


class _Counted:
    """Counts answers by path and status; unknown paths together, or anyone could fill memory."""

    def __init__(self, app: Any, service: Service, paths: set[str]) -> None:
        self._app, self._metrics, self._paths = app, service.metrics, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counting(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(path, message["status"])
            await send(message)

        await self._app(scope, receive, counting)
