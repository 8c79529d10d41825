"""A hub on loopback: one repository, served as Hugging Face serves it, with failures on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPO = "some-lab/tiny-glm"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves the files of a directory as REPO at COMMIT, on a free port, until `close`.

    `trouble(method, name, count)` is asked before each answer about a file (count: how often it
    was asked for in this way) and may return: "503", "drop" (the connection closes in the middle),
    "short" (the answer ends early and claims to be whole), "damage" (a wrong byte), or "".
    """

    def __init__(self, directory: Path, trouble: Callable[[str, str, int], str] | None = None):
        self.directory = directory
        self.trouble = trouble or (lambda *_: "")
        self.asked: Counter[tuple[str, str]] = Counter()
        self.served = Counter[str]()  # bytes by file
        self.watch: Callable[[], None] = lambda: None
        hub = self

        class Handler(_Handler):
            """Knows its hub."""

            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def listing(self) -> dict:
        """What the API says of the repository."""
        files = []
        for path in sorted(self.directory.iterdir()):
            entry: dict = {"rfilename": path.name, "size": path.stat().st_size, "blobId": "b"}
            if path.suffix == ".safetensors":
                sha = hashlib.sha256(path.read_bytes()).hexdigest()
                entry["lfs"] = {"sha256": sha, "size": entry["size"], "pointerSize": 134}
            files.append(entry)
        return {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": files, "tags": []}


class _Handler(BaseHTTPRequestHandler):
    owner: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_GET(self) -> None:
        self._answer("GET")

    def log_message(self, *_: object) -> None:
        """Silence."""

    def _answer(self, method: str) -> None:
        hub = self.owner
        hub.watch()
        listing = re.fullmatch(rf"/api/models/{REPO}/revision/([\w.-]+)(\?.*)?", self.path)
        found = re.fullmatch(rf"/{REPO}/resolve/([\w.-]+)/([\w.-]+)", self.path)
        if listing and listing[1] in ("main", COMMIT):
            self._json(hub.listing())
        elif found and found[1] == COMMIT and (hub.directory / found[2]).is_file():
            hub.asked[method, found[2]] += 1
            trouble = hub.trouble(method, found[2], hub.asked[method, found[2]])
            self._file(method, hub.directory / found[2], trouble)
        else:
            code = "RepoNotFound" if REPO not in self.path else "RevisionNotFound"
            self._json({"error": "not found"}, 404, {"X-Error-Code": code})

    def _json(self, fields: dict, status: int = 200, headers: dict | None = None) -> None:
        data = json.dumps(fields).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _file(self, method: str, path: Path, trouble: str) -> None:
        if trouble == "503":
            self._json({"error": "try later"}, 503)
            return
        data = path.read_bytes()
        etag = hashlib.sha256(data).hexdigest()
        begin, end = self._range(len(data))
        part = data[begin:end]
        if trouble == "damage":
            part = part[:-1] + bytes([part[-1] ^ 1])
        if trouble == "short":
            part = part[: len(part) // 2]
        self.send_response(206 if self.headers.get("Range") else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if method == "HEAD":
            return
        if trouble == "drop":
            part = part[: len(part) // 2]
        self.owner.served[path.name] += len(part)
        self.wfile.write(part)
        if trouble == "drop":
            self.close_connection = True
            self.wfile.flush()
            self.connection.close()

    def _range(self, size: int) -> tuple[int, int]:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not found:
            return 0, size
        return int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
