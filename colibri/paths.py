"""Paths that people give: their homes, and what to say when one cannot be read."""

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
