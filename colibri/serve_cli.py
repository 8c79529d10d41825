"""`colibri serve`: a socket, an engine, and the server between them."""

from __future__ import annotations

import errno
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from colibri.amounts import memory_size, plural
from colibri.engine import Engine, model_directory
from colibri.errors import Exit, UsageError
from colibri.knobs import Settings
from colibri.resident import Resident
from colibri.state import State
from colibri.terminal import Terminal

if TYPE_CHECKING:
    from colibri.server.kept import Kept
    from colibri.server.service import Service

GRACE = 10  # seconds that open connections have to take what is left for them
# Seconds that a connection may be idle. Clients should be the first to let go (aiohttp after 15,
# Go after 90): a request sent just as the server hangs up fails, and is not sent again.
IDLE = 120


def serve(settings: Settings) -> int:
    """Answer requests until a signal; returns the exit status."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"the server needs {error.name}: in colibri's clone, pip install '.[serve]'"
        ) from None
    terminal = Terminal.of(settings.screen, settings.quiet)
    require_key(settings)
    _require_origins(settings)
    model_directory(settings)
    listener = bind(settings.host, settings.port)
    with listener:
        try:
            engine = Engine.open(settings, terminal.progress, settings.conversations)
            state = State(settings.state, terminal.warning)
            resident = Resident(engine, state)
            kept = _take_up(engine, state, terminal) if settings.keep else None
            if settings.warm:
                resident.fill(terminal.progress)
        finally:
            terminal.clear()
        return _run(settings, terminal, engine, listener, resident, kept)


def _take_up(engine: Engine, state: State, terminal: Terminal) -> Kept:
    from colibri.server.kept import Kept

    kept = Kept(engine, state, terminal.warning)
    kept.take_up(terminal.progress)
    terminal.clear()
    if kept.tokens:
        terminal.note(f"colibri: {plural(kept.tokens, 'token')} of conversations are taken up")
    return kept


def require_key(settings: Settings) -> None:
    """UsageError when others could reach the server and no key keeps them out."""
    if settings.api_key is not None and not settings.api_key.strip():
        raise UsageError("--api-key is empty; give a key, or leave the flag out")
    if not settings.api_key and not is_loopback(settings.host):
        raise UsageError(
            f"--host {settings.host} lets other machines in, so a key is required: set "
            "COLIBRI_API_KEY (or --api-key), or listen on 127.0.0.1"
        )


def _require_origins(settings: Settings) -> None:
    """UsageError now, not when the model has been loaded."""
    from colibri.server.guard import Guard

    Guard.of(settings)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. Names other than localhost: no."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its address but does not listen yet; UsageError names what is wrong."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host!r} is no address of this machine: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        remedy = "Another --port, or --port 0 for any free one, may do"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "--host must be an address of this machine, 0.0.0.0 for all of them"
        raise UsageError(
            f"{host} port {port} cannot be listened on: {error.strerror}. {remedy}"
        ) from None
    return listener


def _run(
    settings: Settings, terminal: Terminal, engine: Engine, listener: socket.socket,
    resident: Resident, kept: Kept | None,
) -> int:  # fmt: skip
    import uvicorn

    from colibri.server.app import make_app
    from colibri.server.log import Log
    from colibri.server.service import Service

    log = Log(terminal.note)
    service = Service(engine, log.tell, resident.stop, kept.slots if kept else ())
    service.scheduler.start()
    if settings.warm is None:
        resident.start()  # until the first request
    config = http_config(uvicorn, make_app(service))
    text = announce(settings, engine, listener.getsockname(), service.id)
    server = _server(uvicorn, config, service, lambda: terminal.note(text))
    terminal.notes(engine.notes)
    signal.signal(signal.SIGTERM, lambda *_: None)  # once uvicorn has taken it: a clean end
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return Exit.OK
    finally:
        service.scheduler.close()
        resident.stop()
        ended = service.scheduler.join(GRACE)
        if ended:
            resident.save()
        if kept:
            _keep(kept, ended, terminal)
        log.close(1)
    return Exit.OK


def _keep(kept: Kept, ended: bool, terminal: Terminal) -> None:
    if ended:
        if kept.tokens:
            terminal.note(f"colibri: saving {plural(kept.tokens, 'token')} of conversations")
        kept.save(terminal.progress)
        terminal.clear()
    else:
        terminal.warning(f"conversations are not saved: a step did not end within {GRACE} s")


def http_config(uvicorn: Any, app: Any) -> Any:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app, http="h11", ws="none", loop="asyncio", lifespan="off",
        log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=GRACE, timeout_keep_alive=IDLE,
    )  # fmt: skip


def _server(uvicorn: Any, config: Any, service: Service, ready: Callable[[], None]) -> Any:
    """A server that says when it is ready, and whose first signal also ends running answers."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            ready()

        def handle_exit(self, sig: int, frame: Any) -> None:
            # A lock must not be waited for in a signal handler.
            threading.Thread(target=service.scheduler.close, daemon=True).start()
            super().handle_exit(sig, frame)

    return Server(config)


def announce(settings: Settings, engine: Engine, address: Any, model_id: str) -> str:
    """What is served and where, in a few lines."""
    host, port = address[:2]
    reach = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
    shown = f"[{reach}]" if ":" in reach else reach
    drafter, _ = engine.speculation(engine.slot, engine.sampling)
    drafts = drafter.name if drafter else "none"
    count = engine.conversations
    return (
        f"colibri: {model_id}, {engine.context} tokens of context, "
        f"{plural(count, 'conversation')} at once "
        f"({memory_size(engine.slot.session.bytes)} each), drafts: {drafts}\n"
        f"colibri: the API is at http://{shown}:{port}/v1, the page at http://{shown}:{port}/"
        + ("" if settings.api_key else " (this machine only, no key)")
    )
