"""Conversations that outlive the process: tokens and caches, saved as they grow.

A row of a cache depends on the tokens up to it and on nothing else. So a save writes only the rows
behind the longest prefix that the last save shares with the session, as one more file, and then a
small document that names all the files. That document is replaced by a rename: a save that is cut
off anywhere leaves the one before it. Loading writes the rows back; hidden states are not kept, so
with an MTP layer the last token is run again.
"""

import fcntl
import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from colibri.container import Container
from colibri.errors import StateError, UsageError
from colibri.info import info_of
from colibri.session import KV_DTYPES, Session, common_prefix
from colibri.state import (
    PARTIAL,
    State,
    entries,
    failed,
    make_directory,
    open_lock,
    read_document,
    write_document,
    writing,
)

FORMAT = "colibri-session-1"  # another one when the files, or the core's bits, change
DOCUMENT = "session.json"
SEGMENTS = 64  # more files than this, or more stale bytes than live ones: all rows anew in one
_NAME = re.compile(r"\w[\w.-]{0,63}")
_ROWS = re.compile(r"rows-(\d{1,9})")
_MOMENT = "%Y-%m-%d %H:%M"
_SHELF = ("sessions",)  # of those that have names


class DamagedRows(StateError):
    """Saved rows are not what was written; the conversation itself is whole."""


@dataclass(frozen=True)
class Identity:
    """Whose caches they are. Another container, quantisation or tokenizer gives others."""

    fingerprint: str
    tokenizer: str
    directory: str
    holds: str
    kv_dtype: str = "f32"

    @classmethod
    def of(cls, container: Container, tokenizer: str, kv_dtype: str) -> "Identity":
        """Of an open container and the digest of the tokenizer that was opened with it."""
        directory = str(container.directory.resolve())
        formats = {part.name: part.formats for part in info_of(container).parts if part.formats}
        holds = ", ".join(f"{formats[name][0]} {name}" for name in ("experts", "attention"))
        return cls(container.fingerprint, tokenizer, directory, holds, kv_dtype)

    def same(self, other: "Identity") -> bool:
        """Whether the same caches come out; where the files lie does not matter."""
        return (self.fingerprint, self.tokenizer, self.kv_dtype) == (
            other.fingerprint,
            other.tokenizer,
            other.kv_dtype,
        )


@dataclass(frozen=True)
class Segment:
    """One file of rows: [first, last) of every main cache, [first, last) of the MTP layer's."""

    file: str
    main: tuple[int, int]
    mtp: tuple[int, int]
    nbytes: int
    checksum: str

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "Segment":
        """From the document."""
        main, mtp, file = raw["main"], raw["mtp"], raw["file"]
        if not _ROWS.fullmatch(file):
            raise ValueError(f"{file!r} is no file of rows")
        return cls(file, (main[0], main[1]), (mtp[0], mtp[1]), raw["nbytes"], raw["checksum"])


@dataclass(frozen=True)
class CacheId:
    """Which cache of a session: "kv" or "index" of a layer, [context, width]."""

    layer: int
    kind: str
    width: int
    mtp: bool


@dataclass(frozen=True)
class Document:
    """What a save consists of. `conversation` is the chat's own; `saved` is a moment."""

    identity: Identity
    tokens: list[int] = field(default_factory=list)
    mtp_length: int = 0
    caches: list[CacheId] = field(default_factory=list)  # in the order of each file
    segments: list[Segment] = field(default_factory=list)
    conversation: dict[str, Any] = field(default_factory=dict)
    saved: str = ""

    @classmethod
    def parse(cls, raw: dict[str, Any], where: Path) -> "Document":
        """From JSON; StateError when it is no document of this version."""
        if raw.get("format") != FORMAT:
            form = str(raw.get("format"))[:40]
            raise StateError(f"{where}: is in the form {form!r}; this colibri reads {FORMAT}")
        try:
            return cls(
                Identity(**raw["identity"]),
                [int(token) for token in raw["tokens"]],
                int(raw["mtp_length"]),
                [CacheId(**cache) for cache in raw["caches"]],
                [Segment.parse(segment) for segment in raw["segments"]],
                dict(raw["conversation"]),
                str(raw["saved"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as why:
            raise StateError(f"{where}: lacks something of a saved conversation: {why}") from why


def directory_of(state: State, name: str, shelf: tuple[str, ...] = _SHELF) -> Path:
    """Where a conversation is saved; UsageError when it is no name, StateError without a place."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a session: use 1 to 64 letters, digits, '-', '_' and "
            "'.', not beginning with '-' or '.'"
        )
    return state.place(*shelf, name)


class Saved:
    """One saved conversation, locked while it is open: nobody else may write it.

    It belongs to `container`, to `tokenizer`, the `digest` of one, and to caches of `kv_dtype`.
    """

    def __init__(
        self,
        state: State,
        name: str,
        container: Container,
        tokenizer: str,
        kv_dtype: str = "f32",
        shelf: tuple[str, ...] = _SHELF,
    ) -> None:
        self.name = name
        self.directory = directory_of(state, name, shelf)
        self._identity = Identity.of(container, tokenizer, kv_dtype)
        self._lock_file: BinaryIO | None = None
        self.document: Document | None = None

    @property
    def exists(self) -> bool:
        """Whether something is saved under this name; StateError when that cannot be seen."""
        path = self.directory / DOCUMENT
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as why:
            raise failed(path, "read", why) from why
        return True

    def open(self) -> Document | None:
        """Read the document; None when nothing was saved. StateError names what does not fit."""
        self.lock()
        raw = read_document(self.directory / DOCUMENT)
        if raw is None:
            return None
        found = Document.parse(raw, self.directory / DOCUMENT)
        if not found.identity.same(self._identity):
            raise StateError(self._mismatch(found.identity))
        self.document = found
        return found

    def close(self) -> None:
        """Let others have it."""
        if self._lock_file:
            self._lock_file.close()
        self._lock_file = None

    @property
    def locked(self) -> bool:
        """Whether it is open, and no one else can open it."""
        return self._lock_file is not None

    def _mismatch(self, other: Identity) -> str:
        mine = self._identity
        if replace(other, kv_dtype=mine.kv_dtype).same(mine):
            return (
                f"session {self.name!r} has caches in {other.kv_dtype}: open it with --kv-dtype "
                f"{other.kv_dtype}, or choose another name"
            )
        what = "another tokenizer" if other.fingerprint == mine.fingerprint else "another container"
        return (
            f"session {self.name!r} belongs to {what}: {other.directory} ({other.holds}, "
            f"fingerprint {other.fingerprint[:12]}), not to {mine.directory} ({mine.holds}, "
            f"{mine.fingerprint[:12]}). Open it with that one, or choose another name"
        )

    def lock(self) -> None:
        """Lock it, where it can be written at all; StateError when another process has it."""
        with suppress(StateError):
            make_directory(self.directory)
        try:
            self._lock_file = open_lock(self.directory / "lock")
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StateError(
                f"session {self.name!r} is open in another colibri; end that one first"
            ) from None
        except OSError:
            self.close()  # read-only, or a file system without locks

    # ---- saving -----------------------------------------------------------------------------

    def save(self, session: Session, conversation: dict[str, Any]) -> None:
        """Keep the session as it is now. StateError leaves what was saved before."""
        make_directory(self.directory)
        caches = _caches(session)
        old = self.document
        if old is None or list(caches) != old.caches:
            old = Document(self._identity)
        session.catch_up()
        length = session.length
        mtp_length = min(session.mtp_length, max(length - 1, 0))  # further rows hold a guess
        shared = common_prefix(old.tokens, session.tokens)
        main = (shared, length)
        mtp = (min(old.mtp_length, max(shared - 1, 0), mtp_length), mtp_length)
        segments = [s for s in old.segments if s.main[0] < shared or s.mtp[0] < mtp[0]]
        if _wasteful(segments, caches, length, mtp_length):
            segments, main, mtp = [], (0, length), (0, mtp_length)
        if main[0] < main[1] or mtp[0] < mtp[1]:
            segments.append(self._write_rows(caches, main, mtp))
        moment = time.strftime(_MOMENT)
        new = Document(self._identity, list(session.tokens), mtp_length, list(caches), segments,
                       conversation, moment)  # fmt: skip
        write_document(self.directory / DOCUMENT, {"format": FORMAT} | asdict(new))
        self.document = new
        self._sweep({segment.file for segment in segments})

    def _write_rows(
        self, caches: dict[CacheId, np.ndarray], main: tuple[int, int], mtp: tuple[int, int]
    ) -> Segment:
        """Rows [first, last) of every cache, as a file with a new name."""
        taken = [_ROWS.fullmatch(path.name) for path in entries(self.directory)]
        name = f"rows-{max((int(found[1]) for found in taken if found), default=0) + 1}"
        digest, size = hashlib.blake2b(digest_size=16), 0
        with writing(self.directory / name) as file:
            for which, cache in caches.items():
                first, last = mtp if which.mtp else main
                if first < last:
                    rows = memoryview(cache[first:last]).cast("B")
                    digest.update(rows)
                    size += file.write(rows)
        return Segment(name, main, mtp, size, digest.hexdigest())

    def _sweep(self, wanted: set[str]) -> None:
        """Remove rows that no document names, stale ones, and what a save that was cut off left."""
        with suppress(OSError):
            for path in self.directory.iterdir():
                rows = path.name.startswith("rows-") and path.name not in wanted
                if rows or path.name.endswith(PARTIAL):
                    with suppress(OSError):
                        path.unlink()

    # ---- loading ----------------------------------------------------------------------------

    def restore(self, session: Session) -> int:
        """Fill a session's caches with the rows saved; returns how many tokens need no reading.

        StateError when the context is too small, DamagedRows when a file is not what was written;
        the session is then empty, and the next save writes everything.
        """
        document = self.document
        if document is None:
            return 0
        count = len(document.tokens)
        if count > session.context:
            raise StateError(
                f"session {self.name!r} has {count} tokens and the context holds "
                f"{session.context}; --ctx raises it, memory permitting"
            )
        session.rewind(0)
        try:
            for segment in document.segments:
                self._read_rows(segment, document.caches, _caches(session))
        except DamagedRows:
            self.document = None
            raise
        mtp_length = document.mtp_length if session.model.has_mtp else 0
        session.restore(document.tokens, mtp_length)
        return min(count, mtp_length) if session.model.has_mtp else count

    def _read_rows(
        self, segment: Segment, order: list[CacheId], caches: dict[CacheId, np.ndarray]
    ) -> None:
        """One file into the caches; what the session has no cache or no room for is skipped."""
        path = self.directory / segment.file
        digest = hashlib.blake2b(digest_size=16)
        try:
            with path.open("rb", buffering=0) as file:
                for which in order:
                    first, last = segment.mtp if which.mtp else segment.main
                    width = which.width * KV_DTYPES[self._identity.kv_dtype].itemsize
                    for rows in _targets(caches.get(which), first, last, width):
                        _fill(file, rows)
                        digest.update(rows)
                whole = not file.read(1) and digest.hexdigest() == segment.checksum
        except OSError as why:
            raise DamagedRows(f"{path}: cannot be read: {why.strerror}") from why
        if not whole:
            raise DamagedRows(f"{path}: is damaged (its checksum differs)")


def _caches(session: Session) -> dict[CacheId, np.ndarray]:
    """All caches, in file order."""
    mtp = session.model.config.num_hidden_layers
    found = {}
    for layer in range(session.model.layers):
        for kind in ("kv", "index"):
            rows = session.cache(layer, kind)
            if rows is not None:
                found[CacheId(layer, kind, rows.shape[1], layer == mtp)] = rows
    return found


def _targets(cache: np.ndarray | None, first: int, last: int, width: int) -> Iterator[memoryview]:
    """Buffers for rows [first, last) of `width` bytes: the cache's own, and a scratch one for rows
    without place."""
    held = first if cache is None else max(first, min(last, len(cache)))
    if cache is not None and held > first:
        yield memoryview(cache[first:held]).cast("B")
    if last > held:
        yield memoryview(bytearray((last - held) * width))


def _fill(file: BinaryIO, rows: memoryview) -> None:
    """Read a whole buffer; a file that ends before leaves the rest as it is."""
    at = 0
    while at < len(rows):
        size = file.readinto(rows[at:])  # type: ignore[attr-defined]
        if not size:
            return
        at += size


def names(state: State) -> list[tuple[str, str]]:
    """(name, when it was saved) of every saved conversation, the newest first."""
    found = []
    for path in entries(state.place(*_SHELF)):
        with suppress(OSError):
            found.append(((path / DOCUMENT).stat().st_mtime, path.name))
    newest = sorted(found, reverse=True)
    return [(name, time.strftime(_MOMENT, time.localtime(at))) for at, name in newest]


def _wasteful(
    segments: list[Segment], caches: dict[CacheId, np.ndarray], length: int, mtp_length: int
) -> bool:
    rows = {which: mtp_length if which.mtp else length for which in caches}
    live = sum(rows[which] * cache[0].nbytes for which, cache in caches.items())
    return len(segments) >= SEGMENTS or sum(s.nbytes for s in segments) > 2 * live
