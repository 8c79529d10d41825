"""JSON as a grammar, with little white space, so that a model cannot fill an answer with it."""

import json
from typing import Any

from colibri.characters import ANY, Ranges, inverse, utf8
from colibri.grammar import EMPTY, Alt, Node, Ref, Repeat, Seq, maybe, one_of, text, words

DIGITS = 15  # of a number: more than a double holds would be lost

SPACE = Alt((EMPTY, text(" "), Seq((text("\n"), Repeat(one_of(" \t"), 0, 32)))))
_HEX = one_of("0123456789abcdefABCDEF")
_LOW_SURROGATE = Seq((text("\\u"), one_of("dD"), one_of("cdefCDEF"), _HEX, _HEX))
_ESCAPED = (*range(0x20), 0x22, 0x5C)  # code points of what a string cannot hold as it is
_PLAIN = inverse((code, code) for code in _ESCAPED)
_CHAR = Alt(
    (
        utf8(_PLAIN),
        Seq((text("\\"), one_of('"\\/bfnrt'))),
        Seq((text("\\u"), one_of("0123456789abcefABCEF"), _HEX, _HEX, _HEX)),
        Seq((text("\\u"), one_of("dD"), one_of("01234567"), _HEX, _HEX)),
        Seq((text("\\u"), one_of("dD"), one_of("89abAB"), _HEX, _HEX, _LOW_SURROGATE)),
    )
)
DIGIT = one_of((0x30, 0x39))
INTEGER = Seq(
    (
        maybe(text("-")),
        Alt((text("0"), Seq((one_of((0x31, 0x39)), Repeat(DIGIT, 0, DIGITS - 1))))),
    )
)
_FRACTION = Seq((text("."), Repeat(DIGIT, 1, DIGITS)))
_EXPONENT = Seq((one_of("eE"), maybe(one_of("+-")), Repeat(DIGIT, 1, 2)))
NUMBER = Seq((INTEGER, maybe(_FRACTION), maybe(_EXPONENT)))
COMMA = Seq((text(","), SPACE))


def literal(*values: Any) -> Node:
    """Exactly one of these values."""
    return words(*map(_written, values))


def _written(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value).encode()


def character(ranges: Ranges) -> Node:
    """One character of these in a string, spelled as Python does; of all, however it is spelled."""
    if ranges == ANY:
        return _CHAR
    escaped = [c for c in _ESCAPED if any(first <= c <= last for first, last in ranges)]
    plain = utf8(inverse((*inverse(ranges), *((code, code) for code in escaped))))
    spelled = words(*(json.dumps(chr(code))[1:-1].encode() for code in escaped))
    return Alt((plain, spelled)) if escaped else plain


def string(least: int = 0, most: int | None = None) -> Node:
    """Any string of so many characters."""
    return Seq((text('"'), Repeat(_CHAR, least, most), text('"')))


def array(item: Node, least: int = 0, most: int | None = None) -> Node:
    """Any array of so many of these."""
    if most == 0:
        return text("[]")
    more = Repeat(Seq((COMMA, item)), max(least - 1, 0), None if most is None else most - 1)
    items = Seq((item, more))
    return Seq((text("["), SPACE, items if least else maybe(items), SPACE, text("]")))


def any_names(value: Node) -> Node:
    """Any object with such values."""
    entry = Seq((string(), text(":"), SPACE, value))
    entries = Seq((entry, Repeat(Seq((COMMA, entry)))))
    return Seq((text("{"), SPACE, maybe(entries), SPACE, text("}")))


VALUE = Ref()
OBJECT = any_names(VALUE)  # any JSON object
VALUE.target = Alt(
    (string(), NUMBER, text("true"), text("false"), text("null"), OBJECT, array(VALUE))
)


def answer(value: Node) -> Node:
    """A whole answer that is this value; models like to begin with a space or on a new line."""
    return Seq((maybe(one_of(" \n")), value))
