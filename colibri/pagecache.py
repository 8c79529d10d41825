"""The page cache, emptied of what is to be measured cold. Knows nothing of the core."""

import os
from collections.abc import Iterable
from pathlib import Path


def evict(paths: Iterable[Path]) -> None:
    """Drop files from the page cache; pages that a process has mapped and touched stay."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
