"""A server inside the test process, on a real socket, and clients that speak to it byte by byte."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from colibri import turn as turns
from colibri.calls import TAGS
from colibri.engine import Engine, Slot
from colibri.knobs import Settings
from colibri.serve_cli import bind
from colibri.server import tools
from colibri.server.app import make_app
from colibri.server.service import Service

LIMIT = 60  # seconds before a test gives up on a server
USED = {"path": "a 北.py", "line": 7}  # a tool's arguments
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
    "required": ["path"],
}
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


def copy_model(source: Path, target: Path, **config: object) -> Path:
    """A copy of a model directory whose weights are links; fields of config.json replaced."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (target / path.name).symlink_to(path)
        else:
            shutil.copy(path, target)
    content = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(content))
    return target


def glm_model(source: Path, target: Path, **config: object) -> Path:
    """The same without a template of its own: it gets GLM-5.2's, which shows tools and has the
    switches."""
    copy_model(source, target, **config)
    (target / "chat_template.jinja").unlink()
    (target / "tokenizer_config.json").unlink()
    return target


def add_tags(directory: Path) -> None:
    """Tokens that no conversation needs become the tags of arguments, as GLM's tokenizers have."""
    path = directory / "tokenizer.json"
    text = path.read_text()
    for spare, tag in zip(("[MASK]", "[sMASK]", "<eop>", "<|reserved|>"), TAGS[2:], strict=True):
        text = text.replace(json.dumps(spare), json.dumps(tag))
    path.write_text(text)


def open_engine(**flags: str) -> Engine:
    """An engine with one thread, as the server opens it."""
    settings = Settings.resolve({"threads": "1", **flags}, {})
    return Engine.open(settings, conversations=settings.conversations)


@dataclass
class Serving:
    """A running server."""

    service: Service
    port: int

    @property
    def url(self) -> str:
        """Where the API is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        """Its engine; leave it alone while requests run."""
        return self.service.engine

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """Send a body (bytes as they are, else as JSON) and read the whole answer."""
        with closing(self.connect()) as sock:
            sock.sendall(request("POST", path, body, **headers))
            return read_answer(sock)

    def get(self, path: str, **headers: str) -> Answer:
        """GET."""
        with closing(self.connect()) as sock:
            sock.sendall(request("GET", path, None, **headers))
            return read_answer(sock)

    def chat(self, **fields: Any) -> Answer:
        """Greedy, unless said otherwise."""
        return self.post("/v1/chat/completions", {"messages": STORY, "temperature": 0, **fields})

    def connect(self) -> socket.socket:
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), LIMIT)

    def settle(self) -> None:
        """Wait until nothing runs or waits."""
        wait_for(lambda: not (self.service.scheduler.active or self.service.scheduler.waiting))


@dataclass
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of a refusal, its shape checked."""
        assert self.status >= 400 and set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return error

    @property
    def text(self) -> str:
        """The text of a chat answer."""
        assert self.status == 200, self.body
        return self.json["choices"][0]["message"]["content"]

    @property
    def events(self) -> list[Any]:
        """The JSON of server-sent events, [DONE] last."""
        blocks = self.body.decode().split("\n\n")
        data = [b.removeprefix("data: ") for b in blocks if b.startswith("data: ")]
        return [d if d == "[DONE]" else json.loads(d) for d in data]

    def delta(self, name: str) -> str:
        """A field of a stream's deltas, joined."""
        choices = [c for e in self.events if e != "[DONE]" for c in e["choices"]]
        return "".join(c["delta"].get(name) or "" for c in choices)


def request(method: str, path: str, body: Any, **headers: str) -> bytes:
    """The bytes of a request whose connection ends with it."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    fields = {"host": "localhost", "connection": "close", "content-length": str(len(data))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def read_answer(sock: socket.socket) -> Answer:
    """Everything until the server closes, chunks put together."""
    data = b""
    while piece := sock.recv(1 << 16):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
        body = whole
    return Answer(int(first.split()[1]), headers, body)


def wait_for(condition: Callable[[], Any]) -> None:
    """Until it is true."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@contextmanager
def serving(engine: Engine, at: int = 0) -> Iterator[Serving]:
    """Serve an engine from threads of this process."""
    service = Service(engine)
    service.scheduler.start()
    config = uvicorn.Config(
        make_app(service), http="h11", ws="none", lifespan="off", log_level="warning",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    listener = bind("127.0.0.1", at)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield Serving(service, listener.getsockname()[1])
    finally:
        service.scheduler.close()
        assert service.scheduler.join(LIMIT)
        server.should_exit = True
        thread.join(LIMIT)
        listener.close()


def offline(
    engine: Engine,
    messages: list[dict[str, Any]],
    max_tokens: int | None = None,
    slot: Slot | None = None,
    **sampling: Any,
) -> str:
    """What `colibri run` answers: the same engine code, a fresh slot, nobody else about."""
    params = replace(engine.sampling, **{"temperature": 0, **sampling})
    turn = engine.answer(engine.chat(messages), slot or engine.new_slot(), params, max_tokens)
    return "".join(piece.text for piece in turn)


def written(name: str, arguments: dict[str, Any] = USED) -> str:
    """A call as GLM writes it."""
    values = "".join(
        f"{tools.KEY}{key}{tools.KEY_END}{tools.VALUE}{value}{tools.VALUE_END}"
        for key, value in arguments.items()
    )
    return f"{tools.OPEN}{name}{values}{tools.CLOSE}"


@contextmanager
def scripted(monkeypatch: pytest.MonkeyPatch, running: Serving, text: str) -> Iterator[None]:
    """Let the model write this, tags as tokens where there are such, in blocks of three."""
    ids = running.engine.tokenizer.encode_template(text)

    def script(*_: object, **__: object):
        for at in range(0, len(ids), 3):
            yield ids[at : at + 3]
        return "stop"

    with monkeypatch.context() as patch:
        patch.setattr(turns, "spec_decode", script)
        yield
