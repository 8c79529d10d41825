"""The state directory: what outlives a process, kept whole or not at all.

Nothing is ever written into a model's directory. Files are for this user alone.
"""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from colibri.errors import StateError
from colibri.paths import expanded
from colibri.strictjson import parse_object

PARTIAL = ".partial"  # suffix of a file being written; not *.safetensors, so no reader sees it
_SUM = "blake2b "
_ABANDONED = 24 * 3600  # seconds after which nobody can still be writing a file


class State:
    """One state directory, or none (root None): then nothing is kept and nothing is found.

    `warn` is told the first failure of a kind; what cannot be kept stops nobody.
    """

    def __init__(self, root: str | Path | None, warn: Callable[[str], None]) -> None:
        self.root = None if root is None else expanded(root, "COLIBRI_STATE")
        self._warn = warn
        self._told: set[str] = set()

    def place(self, *parts: str) -> Path:
        """A path inside; StateError when there is no state directory."""
        if self.root is None:
            raise StateError(
                "nothing can be kept: COLIBRI_STATE is off, or neither it nor HOME is set"
            )
        return self.root.joinpath(*parts)

    def keep(self, what: str, action: Callable[[], None]) -> bool:
        """Do it; a StateError becomes one warning that `what` is not kept."""
        if self.root is None:
            return False
        try:
            action()
        except StateError as error:
            if what not in self._told:
                self._warn(f"{what} cannot be kept: {error}")
            self._told.add(what)
            return False
        self._told.discard(what)
        return True


def failed(path: Path, action: str, why: OSError) -> StateError:
    """The error that a path cannot be "made", "read" or "written", and what can be done."""
    return StateError(
        f"{path}: cannot be {action}: {why.strerror or why}; see to its disk and permissions, "
        "or set COLIBRI_STATE to another directory"
    )


# ---- files --------------------------------------------------------------------------------------


def make_directory(path: Path) -> None:
    """Create a directory and those above it, each for this user alone; what is there stays so."""
    try:
        for directory in (*reversed(path.parents), path):  # mkdir's mode is not for its parents
            directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as why:
        raise failed(path, "made", why) from why


def open_lock(path: Path) -> BinaryIO:
    """A file to hold a lock on, made for this user alone when it is not there."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def entries(path: Path) -> list[Path]:
    """What is in a directory, nothing when there is none; StateError when it cannot be read."""
    try:
        return list(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as why:
        raise failed(path, "read", why) from why


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name when the block ends well: synced, then renamed.

    Whoever else writes it at the same time has a partial file of their own; the last one stays.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except OSError as why:
        raise failed(path, "written", why) from why
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        _sweep(path)


def _sweep(path: Path) -> None:
    """Remove what processes that were killed while they wrote this file have left."""
    with suppress(OSError):
        for old in path.parent.iterdir():
            if old.name.startswith(f"{path.name}.") and old.name.endswith(PARTIAL):
                with suppress(OSError):
                    if time.time() - old.stat().st_mtime > _ABANDONED:
                        old.unlink()


def write_document(path: Path, document: dict[str, Any]) -> None:
    """One line of JSON and its checksum, in a directory that is made if need be."""
    make_directory(path.parent)
    line = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
    with writing(path) as file:
        file.write(line + b"\n" + _SUM.encode() + checksum([line]).encode() + b"\n")


def read_document(path: Path) -> dict[str, Any] | None:
    """What write_document wrote; None when there is no such file, StateError when damaged."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as why:
        raise failed(path, "read", why) from why
    line, _, rest = data.partition(b"\n")
    if rest.decode("ascii", "replace").strip() != _SUM + checksum([line]):
        raise StateError(f"{path}: is damaged (its checksum differs); remove it")
    return parse_object(line, str(path), StateError)


def checksum(parts: Iterable[Any]) -> str:
    """32 hex digits over buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def sync_directory(directory: Path) -> None:
    """Make renames in a directory survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
