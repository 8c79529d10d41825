"""Requests that are not honoured, in the shape of OpenAI's errors."""

from __future__ import annotations

import json
from typing import Any

from colibri.errors import ColibriError


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


def encode(value: Any) -> bytes:
    """JSON in UTF-8. Lone surrogates, which JSON can carry and UTF-8 cannot, become "?"."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")
