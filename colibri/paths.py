"""Paths that people give: their homes, and what to say when one cannot be read or written."""

from __future__ import annotations

import errno
from pathlib import Path

from colibri.errors import UsageError


def expanded(path: str | Path, given: str) -> Path:
    """Replace a leading `~` or `~name` by the home directory.

    UsageError, naming `given`, when there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{given} is {str(path)!r}, and there is no such home") from None


def unreadable(path: Path, why: OSError) -> str:
    """That a file cannot be read, why, and what to look at."""
    look = "the disk and the system's log" if why.errno == errno.EIO else "who may read it"
    return f"{path}: cannot be read: {why.strerror or why}; see to {look}"


def require_writable(path: Path) -> None:
    """UsageError when a file cannot be written; what is there stays as it is."""
    try:
        is_new = not path.exists()
        if is_new or not path.is_fifo():  # opening a pipe would be felt at its other end
            path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as why:
        raise _cannot_write(path, why) from why


def write(path: Path, text: str) -> None:
    """Write a small text file; UsageError says why not."""
    try:
        path.write_text(text)
    except OSError as why:
        raise _cannot_write(path, why) from why


def _cannot_write(path: Path, why: OSError) -> UsageError:
    fault = f"{path}: cannot be written: {why.strerror}"
    return UsageError(f"{fault}; give a file in a directory that is there, and yours to write to")
