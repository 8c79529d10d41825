"""Numbers between bounds, and strings of the common formats, as grammars: some of all there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from colibri.grammar import NEVER, Alt, Node, Repeat, Seq, maybe, one_of, text
from colibri.json_grammar import DIGIT, DIGITS

_MOST = 10**DIGITS - 1
_MOST_FRACTIONED = 10**9 - 1  # with six digits behind the point a double is still exact enough
_FRACTION = Seq((text("."), Repeat(DIGIT, 1, 6)))
_ABOVE_ZERO = Seq((text("."), Repeat(DIGIT, 0, 5), one_of((0x31, 0x39))))


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, or only between them; None is no bound."""

    least: float | None = None
    most: float | None = None
    above: bool = False  # not `least` itself
    below: bool = False  # not `most` itself

    @property
    def empty(self) -> bool:
        """Whether there is no number in it."""
        if self.least is None or self.most is None:
            return False
        return self.least > self.most or (self.least == self.most and (self.above or self.below))

    def holds(self, value: float) -> bool:
        """Whether it is one of them."""
        return (
            self.least is None or self.least < value or (self.least == value and not self.above)
        ) and (self.most is None or value < self.most or (self.most == value and not self.below))

    def whole(self) -> Node:
        """The whole numbers of it."""
        return Alt((self._naturals(0), Seq((text("-"), self._mirrored()._naturals(1)))))

    def numbers(self) -> Node:
        """Those of it and of whole numbers' fractions that are in it whatever the digits."""
        mirrored = self._mirrored()
        sides = Alt((self._fractions(), Seq((text("-"), mirrored._fractions()))))
        return Alt((self.whole(), sides))

    def _mirrored(self) -> Range:
        least = None if self.most is None else -self.most
        most = None if self.least is None else -self.least
        return Range(least, most, self.below, self.above)

    def _naturals(self, least: int) -> Node:
        low = least if self.least is None else max(least, self._from())
        high = _MOST
        if self.most is not None:
            high = min(high, math.ceil(self.most) - 1 if self.below else math.floor(self.most))
        return _naturals(low, high)

    def _fractions(self) -> Node:
        """0 or more and a fraction."""
        high = _MOST_FRACTIONED if self.most is None else math.floor(self.most) - 1
        high = min(high, _MOST_FRACTIONED)
        low = 0 if self.least is None else max(0, self._from())
        parts = Seq((_naturals(low, high), _FRACTION))
        if self.above and self.least is not None and 0 <= self.least == low - 1 < high + 1:
            return Alt((parts, Seq((_naturals(low - 1, low - 1), _ABOVE_ZERO))))
        return parts

    def _from(self) -> int:
        """The least whole number of it."""
        assert self.least is not None
        return math.floor(self.least) + 1 if self.above else math.ceil(self.least)


def _naturals(least: int, most: int) -> Node:
    """Whole numbers, 0 or more, as they are written; NEVER where there are none."""
    return Alt((*_by_length(least, most),)) if least <= most else NEVER


def _by_length(least: int, most: int) -> Iterator[Node]:
    for length in range(len(str(least)), len(str(most)) + 1):
        first = max(least, 10 ** (length - 1) if length > 1 else 0)
        yield _between(str(first), str(min(most, 10**length - 1)))


def _between(first: str, last: str) -> Node:
    """Digits from `first` to `last`, which are as many."""
    if first == last:
        return text(first)
    count = len(first) - 1
    if set(first) == {"0"} and set(last) == {"9"}:
        return Repeat(DIGIT, count + 1, count + 1)
    if first[0] == last[0]:
        return Seq((text(first[0]), _between(first[1:], last[1:])))
    options = [
        Seq((text(first[0]), _between(first[1:], "9" * count))) if count else text(first[0]),
        Seq((text(last[0]), _between("0" * count, last[1:]))) if count else text(last[0]),
    ]
    inner = ord(first[0]) + 1, ord(last[0]) - 1
    if inner[0] <= inner[1]:
        options.append(Seq((one_of(inner), Repeat(DIGIT, count, count))))
    return Alt(tuple(options))


# ---- formats ----------------------------------------------------------------------------------


def _any(*words: str) -> Node:
    return Alt(tuple(text(word) for word in words))


def _digits(least: int, most: int, size: int = 2) -> Node:
    return _between(f"{least:0{size}}", f"{most:0{size}}")


def _hex(least: int, most: int | None = None) -> Node:
    return Repeat(one_of("0123456789abcdef"), least, most or least)


def _joined(by: str, *parts: Node) -> Node:
    return Seq((parts[0], *(each for part in parts[1:] for each in (text(by), part))))


_DAY = Alt(
    (
        _joined("-", _any("01", "03", "05", "07", "08", "10", "12"), _digits(1, 31)),
        _joined("-", _any("04", "06", "09", "11"), _digits(1, 30)),
        _joined("-", text("02"), _digits(1, 28)),
    )
)
_DATE = _joined("-", _digits(1000, 2999, 4), _DAY)
_CLOCK = _joined(":", _digits(0, 23), _digits(0, 59))
_ZONE = Alt((text("Z"), Seq((one_of("+-"), _CLOCK))))
_TIME = Seq((_joined(":", _CLOCK, _digits(0, 59)), maybe(_FRACTION), _ZONE))
_COUNT = Seq((one_of((0x31, 0x39)), Repeat(DIGIT, 0, 2)))
_SECONDS = Seq((_COUNT, text("S")))
_MINUTES = Seq((_COUNT, text("M"), maybe(_SECONDS)))
_HOURS = Seq((_COUNT, text("H"), maybe(_MINUTES)))
_WHILE = Seq((text("T"), Alt((_HOURS, _MINUTES, _SECONDS))))
_LABEL = Seq((one_of((0x61, 0x7A)), Repeat(one_of((0x61, 0x7A), (0x30, 0x39)), 0, 20)))
_HOST = Seq((Repeat(Seq((_LABEL, text("."))), 1, 3), Repeat(one_of((0x61, 0x7A)), 2, 6)))
_STEP = one_of((0x61, 0x7A), (0x41, 0x5A), (0x30, 0x39), "-_")
_BYTE = _naturals(0, 255)
_GROUP = _hex(1, 4)

# Each with the lengths that it may have.
FORMATS: dict[str, tuple[Node, int, int]] = {
    "date": (_DATE, 10, 10),
    "time": (_TIME, 9, 21),
    "date-time": (_joined("T", _DATE, _TIME), 20, 32),
    "duration": (
        Seq((text("P"), Alt((_WHILE, Seq((_COUNT, text("D"), maybe(_WHILE))))))),
        3,
        18,
    ),
    "uuid": (
        _joined(
            "-", _hex(8), _hex(4), Seq((text("4"), _hex(3))),
            Seq((one_of("89ab"), _hex(3))), _hex(12),
        ),
        36,
        36,
    ),
    "email": (_joined("@", Seq((_LABEL, maybe(Seq((text("."), _LABEL))))), _HOST), 6, 116),
    "hostname": (_HOST, 4, 72),
    "ipv4": (_joined(".", _BYTE, _BYTE, _BYTE, _BYTE), 7, 15),
    "ipv6": (_joined(":", *[_GROUP] * 8), 15, 39),
    "uri": (
        Seq((_any("https://", "http://"), _HOST, text("/"), Repeat(
            Seq((Repeat(_STEP, 1, 40), maybe(one_of("/.")))), 0, 8))),
        12,
        409,
    ),
}  # fmt: skip
