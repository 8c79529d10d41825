"""The page's files, by the path they are served at."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE = Path(__file__).with_name("page")
_KINDS = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
}  # fmt: skip
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
FILES = {f"/{path.name}": path for path in PAGE.iterdir() if path.suffix in _KINDS}
FILES["/"] = FILES.pop("/index.html")


def routes() -> list[Route]:
    """A route per file; each is read once."""
    return [_route(path, file) for path, file in FILES.items()]


def _route(path: str, file: Path) -> Route:
    content = file.read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=_KINDS[file.suffix])

    return Route(path, serve)
