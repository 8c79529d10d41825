"""Numbers between bounds and strings of a format: what their grammars take is just that."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from typing import Any

import jsonschema
import pytest
from test_schema import takes
from walks import walk

from colibri.errors import UsageError
from colibri.grammar import NEVER, Matcher, prune
from colibri.json_values import FORMATS, Range
from colibri.schema import compile_schema

BOUNDS = [None, -1000.5, -12, -3, -1.5, -1, -0.25, 0, 0.5, 1, 2, 9, 10, 12.75, 99, 100, 1234, 10**9]


@pytest.mark.parametrize("least", BOUNDS)
def test_whole_numbers_between_bounds(least):
    """All whole numbers of a range are taken, and no others."""
    for most in BOUNDS[::2]:
        for above, below in ((False, False), (True, False), (False, True)):
            between = Range(least, most, above, below)
            node = between.whole()
            matcher = Matcher(node if prune(node) else NEVER)
            some = [*range(-13, 14), 98, 99, 100, 101, -1002, -1001, -1000, 1233, 1234, 1235]
            found = [number for number in some if matcher.takes(str(number).encode())]
            assert found == [number for number in some if between.holds(number)]


def test_numbers_between_bounds():
    """Numbers with a fraction are in the range, whatever their digits, after rounding too."""
    chance, seen = random.Random(1), 0
    for _ in range(200):
        bounds = {
            name: chance.choice(BOUNDS[1:])
            for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            if chance.random() < 0.4
        }
        schema = {"type": chance.choice(["number", "integer"]), **bounds}
        try:
            matcher = Matcher(compile_schema(schema, "here", strict=True))
        except UsageError:
            continue
        check = jsonschema.Draft202012Validator(schema)
        for seed in range(5):
            seen += 1
            check.validate(json.loads(walk(matcher, seed).decode()))
    assert seen > 500
    within = compile_schema({"minimum": 0, "exclusiveMaximum": 2}, "here", strict=True)
    inner = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}
    inside = compile_schema(inner, "here", strict=True)
    for written in ("0", "1", "0.5", "0.000001", "1.5", "-0.5", "0.0", "1.0"):
        assert takes(within, written) == (not written.startswith("-"))
        assert takes(inside, written) == (written in ("0.5", "0.000001"))


@pytest.mark.parametrize(("schema", "words"), [
    ({"minimum": 0.2, "maximum": 0.3}, "^here has numbers so close together, which cannot be kept"),
    ({"minimum": 3, "maximum": 2}, "^here allows no value"),
    ({"type": "integer", "minimum": 0.2, "maximum": 0.3}, "^here allows no value"),
    ({"type": "integer", "minimum": 10**15}, r"no value.* \(numbers have up to 15 digits\)"),
    ({"minimum": "1"}, '^here.minimum is "1"; expected a number'),
    ({"exclusiveMaximum": float("inf")}, "^here.exclusiveMaximum is Infinity; expected a number"),
    ({"exclusiveMinimum": True}, "^here.exclusiveMinimum cannot be kept to"),
    ({"format": "binary"}, "^here.format cannot be kept to"),
    ({"format": ["uuid"]}, "^here.format cannot be kept to"),
    ({"format": "uuid", "maxLength": 9}, "^here has format beside its lengths, which cannot be"),
    ({"allOf": [{"format": "uuid"}, {"format": "date"}]}, "has two of format, which cannot both"),
])  # fmt: skip
def test_what_cannot_be_kept_to(schema, words):
    """Bounds and formats that have no grammar are refused if strict."""
    with pytest.raises(UsageError, match=words):
        compile_schema(schema, "here", strict=True)


def test_what_is_passed_over():
    """Unless it is strict, they are left to the model."""
    close = {"type": "number", "minimum": 0.2, "maximum": 0.3, "exclusiveMinimum": True}
    assert takes(compile_schema(close, "here"), "0.25")
    for more in ({"format": "binary"}, {"format": "uuid", "maxLength": 9}):
        assert takes(compile_schema({"type": "string"} | more, "here"), '"a"')


NAME = r"[a-z][a-z0-9.]*\.[a-z]{2,6}"
CHECKS: dict[str, Any] = {
    "date": datetime.date.fromisoformat,
    "time": lambda said: datetime.time.fromisoformat(_padded(said)),
    "date-time": lambda said: datetime.datetime.fromisoformat(_padded(said)),
    "duration": r"P(?=.)(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?",
    "uuid": lambda said: uuid.UUID(said).version == 4 or said.version,
    "email": rf"[a-z0-9]+(\.[a-z0-9]+)?@{NAME}",
    "hostname": NAME,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": rf"https?://{NAME}/[\w/.-]*",
}


def _padded(said: str) -> str:
    """As Python 3.10 reads it, too."""
    said = said.replace("Z", "+00:00")
    return re.sub(r"\.(\d+)", lambda digits: "." + digits[1].ljust(6, "0"), said)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    """Strings of a format can be read as such, and are as long as the table says."""
    node, shortest, longest = FORMATS[name]
    schema = {"type": "string", "format": name, "minLength": 3}
    bare, formed = Matcher(node), Matcher(compile_schema(schema, "here", strict=True))
    for seed in range(200):
        said, check = walk(bare, seed).decode(), CHECKS[name]
        assert shortest <= len(said) <= longest and formed.takes(json.dumps(said).encode())
        assert re.fullmatch(check, said) if isinstance(check, str) else check(said) is not None
    assert not formed.takes(b'"abc"')


def test_days():
    """Every day that is taken is one, but for the 29th of February, which is not taken."""
    matcher = Matcher(FORMATS["date"][0])
    for month in range(14):
        taken = sum(matcher.takes(f"2024-{month:02}-{day:02}".encode()) for day in range(33))
        assert taken == [0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31, 0][month]
