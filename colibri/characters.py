"""Sets of characters, by their code points, and the grammar of one of them in UTF-8."""

from __future__ import annotations

from collections.abc import Iterable

from colibri.grammar import Alt, Node, OneOf, Seq

Ranges = tuple[tuple[int, int], ...]  # first and last code points; in order, apart

ANY: Ranges = ((0x00, 0xD7FF), (0xE000, 0x10FFFF))
_NONE = ((0xD800, 0xDFFF), (0x110000, 0x110000))  # surrogates are no characters
_WIDTHS = (  # first and last code point, the least first byte, and the bits that come behind it
    (0x00, 0x7F, 0x00, 0),
    (0x80, 0x7FF, 0xC0, 6),
    (0x800, 0xFFFF, 0xE0, 12),
    (0x10000, 0x10FFFF, 0xF0, 18),
)


def inverse(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All characters but these, which may be in any order."""
    found, start = [], 0
    for first, last in sorted((*ranges, *_NONE)):
        if start < first:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return tuple(found)


def utf8(ranges: Ranges) -> Node:
    """One character of these."""
    return _CHARACTER if ranges == ANY else _utf8(ranges)


def _utf8(ranges: Ranges) -> Node:
    options = [
        _bytes(within, lead, shift)
        for first, last, lead, shift in _WIDTHS
        if (within := _clipped(ranges, first, last))
    ]
    return options[0] if len(options) == 1 else Alt(tuple(options))


def _bytes(ranges: Ranges, lead: int, shift: int) -> Node:
    """Numbers of these ranges: a byte, from `lead` on, for what is above `shift` bits, then those.

    No two options begin with the same byte, so that there is one way to read a character.
    """
    size, leads = 1 << shift, dict[Ranges, set[int]]()  # by what comes behind them
    pieces: dict[int, list[tuple[int, int]]] = {}  # of what is behind a byte, where it is not all
    for first, last in ranges:
        whole = range(-(-first // size), (last + 1) // size)
        if whole:
            found = range(lead + whole.start, lead + whole.stop)
            leads.setdefault(((0, size - 1),), set()).update(found)
        for top in {first // size, last // size}.difference(whole):
            piece = max(first - top * size, 0), min(last - top * size, size - 1)
            pieces.setdefault(top, []).append(piece)
    for top, behind in pieces.items():
        leads.setdefault(tuple(behind), set()).add(lead + top)
    options: list[Node] = [OneOf(frozenset(bytes_)) for bytes_ in leads.values()]
    if shift:
        tails = (_bytes(behind, 0x80, shift - 6) for behind in leads)
        options = [Seq(pair) for pair in zip(options, tails, strict=True)]
    return options[0] if len(options) == 1 else Alt(tuple(options))


def _clipped(ranges: Ranges, first: int, last: int) -> Ranges:
    return tuple((max(a, first), min(b, last)) for a, b in ranges if a <= last and b >= first)


_CHARACTER = _utf8(ANY)
