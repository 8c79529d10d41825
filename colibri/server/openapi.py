"""The description of the API that programs read, from the same tables that check requests."""

from __future__ import annotations

from typing import Any

from colibri import __version__
from colibri.server import blocks, items
from colibri.server.fields import Table
from colibri.server.refusal import MESSAGES
from colibri.server.tables import CHAT, COMPLETION

POSTS = {  # by path, what a request may hold
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    MESSAGES: blocks.MESSAGES,
    f"{MESSAGES}/count_tokens": blocks.COUNT,
    items.RESPONSES: items.CREATE,
    f"{items.RESPONSES}/input_tokens": items.COUNT,
}
_GETS = {
    "/v1/models": "The model there is.",
    "/health": "Whether the engine runs.",
    "/metrics": "Counters, for Prometheus.",
    "/debug/state": "The running and recent receipts, and where the experts are.",
}


def description() -> dict[str, Any]:
    """OpenAPI 3.1."""
    paths = {path: {"post": _post(Table(fields).schema())} for path, fields in POSTS.items()}
    gets = {path: {"get": {"summary": text, **_ANSWERS}} for path, text in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "colibri", "version": __version__},
        "paths": paths | gets,
    }


_ANSWERS: dict[str, Any] = {
    "responses": {
        "200": {"description": "The answer."},
        "4XX": {"description": "Refused: error.message says why, error.param which field."},
    }
}


def _post(schema: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}, **_ANSWERS}
