"""Requests that are not honoured, in the shapes of OpenAI's and Anthropic's errors."""

from __future__ import annotations

import json
from typing import Any

from colibri.errors import ColibriError

MESSAGES = "/v1/messages"  # Anthropic's API; all else is OpenAI's
_OVERLOADED = 529
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


class Refusal(ColibriError):
    """An HTTP status and what the client should know: which field, why, and what to do."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code
        self.headers = headers or {}

    @property
    def kind(self) -> str:
        """OpenAI's name for this sort of error."""
        if self.status >= 500:
            return "server_error"
        known = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        return known.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def told(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of the answer, in the shape of the API that the path belongs to."""
        if not path.startswith(MESSAGES):
            return self.status, self.body()
        status = _OVERLOADED if self.status == 503 else self.status
        kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        # These words make agents shorten their history and go on.
        long = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        return status, {"type": "error", "error": {"type": kind, "message": long + self.message}}


def encode(value: Any) -> bytes:
    """JSON in UTF-8. Lone surrogates, which JSON can carry and UTF-8 cannot, become "?"."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")
