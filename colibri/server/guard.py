"""Who may talk to the server: the Host and Origin headers, and the key."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders

from colibri.errors import UsageError
from colibri.knobs import Settings
from colibri.server import pages
from colibri.server.refusal import Refusal, encode

PUBLIC = frozenset({"/health", *pages.FILES})
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([^\s/?#@:*\[\]]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_HEADER_NAMES = re.compile(r"[a-z0-9-]{1,64}(, ?[a-z0-9-]{1,64}){0,63}", re.I)
_CORS = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-max-age": "600",
    "vary": "Origin",
}


@dataclass(frozen=True)
class Guard:
    """What is let in. A page of any site may send requests to this machine's addresses; only the
    two headers that browsers set, and pages cannot, tell them from ours."""

    hosts: frozenset[str]
    origins: frozenset[str]
    key: str | None

    @classmethod
    def of(cls, settings: Settings) -> Guard:
        """From the knobs; the machine's own names and the address bound to are always known.

        UsageError when --allow-origin or --allow-host has what no client would send.
        """
        odd = next((name for name in _list(settings.allow_host) if "*" in name), None)
        if odd:
            raise UsageError(f"--allow-host has {odd!r}, which matches no host; give whole names")
        own = {"localhost", socket.gethostname().lower(), settings.host.lower()}
        hosts = own | {name.lower() for name in _list(settings.allow_host)}
        origins = frozenset(map(_origin, _list(settings.allow_origin)))
        return cls(frozenset(hosts), origins, settings.api_key)

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Refusal when the request must not be answered."""
        self._check_host(headers.get("host", ""))
        origin = headers.get("origin")
        if origin is not None and not self._same(origin, headers) and not self.lets(origin):
            raise Refusal(
                f"requests from pages of {origin[:200]} are not answered. If you trust that "
                "site, start the server with --allow-origin and this origin.",
                status=403,
                code="origin_not_allowed",
            )
        if self.key and path not in PUBLIC and method != "OPTIONS":
            self._check_key(headers)

    def lets(self, origin: str) -> bool:
        """Whether pages of another origin are welcome."""
        return origin in self.origins or "*" in self.origins

    def _same(self, origin: str, headers: Headers) -> bool:
        try:
            return bool(origin) and urlsplit(origin).netloc == headers.get("host")
        except ValueError:  # no URL at all
            return False

    def _check_host(self, host: str) -> None:
        name = _name(host)
        if name in self.hosts or name.endswith(".localhost") or _is_address(name):
            return
        raise Refusal(
            f"this server does not answer to the name {host[:200]!r} (the Host header). Use its "
            f"address or localhost, or start it with --allow-host {name[:200] or 'NAME'}.",
            status=403,
            code="host_not_allowed",
        )

    def _check_key(self, headers: Headers) -> None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        # Headers are bytes, shown as Latin-1: blanks other than ASCII's are parts of letters.
        sent = [value.strip(" \t").encode("latin-1") for value in given]
        keys = _bytes(self.key or "")
        right = [hmac.compare_digest(one, key) for one in sent for key in keys]
        if not any(right):
            raise Refusal(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY or as "
                "x-api-key: KEY.",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _allowed(asked: str) -> dict[str, str]:
    """Whatever headers a page that may send requests wants to send: clients add their own."""
    names = _HEADER_NAMES.fullmatch(asked)
    return {"access-control-allow-headers": names[0]} if names else {}


class Guarded:
    """The guard before an ASGI application."""

    def __init__(self, app: Any, guard: Guard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuse, answer a preflight, or pass on."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        welcome = {}
        if origin is not None and self.guard.lets(origin):
            asked = headers.get("access-control-request-headers", "")
            welcome = {"access-control-allow-origin": origin, **_CORS, **_allowed(asked)}
        try:
            self.guard.check(scope["method"], scope["path"], headers)
        except Refusal as refusal:
            status, body = refusal.told(scope["path"])
            await answer(send, status, encode(body), welcome | refusal.headers)
            return
        if scope["method"] == "OPTIONS" and welcome:
            await answer(send, 204, b"", welcome)
            return
        await self.app(scope, receive, _with(send, welcome) if welcome else send)


async def answer(send: Any, status: int, body: bytes, headers: dict[str, str]) -> None:
    """Send a whole answer."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _with(send: Any, headers: dict[str, str]) -> Any:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return sending


def _bytes(key: str) -> list[bytes]:
    """What clients send for a key: most its UTF-8; browsers, where it exists, its Latin-1."""
    forms = [key.encode("utf-8", "surrogateescape")]
    with suppress(UnicodeEncodeError):
        forms.append(key.encode("latin-1"))
    return forms


def _list(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _origin(text: str) -> str:
    """An origin as browsers write it."""
    origin = text.rstrip("/").lower()
    if origin in ("*", "null") or _ORIGIN.fullmatch(origin):
        return origin
    raise UsageError(
        f"--allow-origin has {text!r}, which is no origin; give scheme://host or "
        "scheme://host:port, as in https://app.example, or * for every one"
    )


def _name(host: str) -> str:
    """The Host header without the port, and a name without the root's dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name = host.rpartition(":")[0] if ":" in host else host
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
