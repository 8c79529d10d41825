"""JSON as a file format: duplicate keys, NaN, runaway nesting and bad UTF-8 are errors."""

import json
import math
from pathlib import Path
from typing import Any

from colibri.errors import ColibriError
from colibri.paths import unreadable


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name[:200]!r} appears twice")
            seen.add(name)
    return found


def no_number(text: str) -> Any:
    """For `parse_constant`: NaN and its like are no JSON."""
    raise ValueError(f"{text[:40]} is not a JSON number")


def finite(text: str) -> float:
    """For `parse_float`: ValueError for what a float cannot hold; infinity is no JSON again."""
    value = float(text)
    return value if math.isfinite(value) else no_number(text)


# strict: control characters inside strings are refused too.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=no_number, strict=True)


def parse_object(data: bytes, where: str, error: type[ColibriError]) -> dict[str, Any]:
    """The JSON object in `data`, or `error` with `where` (a file) and what is wrong with it."""
    try:
        value = _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as why:
        raise error(f"{where}: not UTF-8 text at byte {why.start}; the file is damaged") from why
    except RecursionError as why:
        raise error(f"{where}: JSON nested too deeply; the file is damaged") from why
    except ValueError as why:
        raise error(f"{where}: not valid JSON: {why}; the file is damaged") from why
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read_object(path: Path, error: type[ColibriError]) -> dict[str, Any] | None:
    """The JSON object in a file, None when there is no file; `error` as in parse_object."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as why:
        raise error(unreadable(path, why)) from why
    return parse_object(data, str(path), error)
