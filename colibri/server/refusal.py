"""Requests that are not honoured, in the shapes of OpenAI's and Anthropic's errors."""

from __future__ import annotations

import json
from typing import Any

from colibri.errors import ColibriError

MESSAGES = "/v1/messages"  # Anthropic's API; all else is OpenAI's
_OVERLOADED = 529
FULL = "context_length_exceeded"
NO_THREADS = "thread_unsupported_request"  # Anthropic's clients then go on without a thread
# Words that make agents and frameworks shorten their history and go on: many see no code, and some
# know "prompt is too long" (Anthropic's) and some "exceed context limit".
_TOO_LONG = "prompt is too long: its tokens would exceed context limits; "
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
        self.message = (_TOO_LONG if code == FULL else "") + message
        self.param, self.status, self.code = param, status, code
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
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code == NO_THREADS:
            error["details"] = {"error_code": self.code, "unsupported": [self.param]}
        return status, {"type": "error", "error": error}


def encode(value: Any) -> bytes:
    """JSON in UTF-8. Lone surrogates, which JSON can carry and UTF-8 cannot, become "?"."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")
