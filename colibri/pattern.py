"""Regular expressions of JSON Schema (ECMA-262) as grammars: all that is regular in them.

Without an anchor a pattern is searched for, so that any text may stand before or behind it.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from colibri.characters import ANY, Ranges, inverse, utf8
from colibri.errors import UsageError
from colibri.grammar import Alt, Node, Repeat, Seq
from colibri.json_grammar import character

_LONGEST = 10_000  # characters of a pattern
_LARGEST = 200_000  # ranges of characters, repeated ones as often as they may come
_DEEPEST = 50  # groups in each other

Spell = Callable[[Ranges], Node]


class Part(ABC):
    """A part of a pattern: the texts that it matches, by their characters."""

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, float]:
        """The fewest and the most characters."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranges of characters it is of, repeated ones as often as they may come."""

    @abstractmethod
    def spelled(self, spell: Spell) -> Node:
        """Its grammar, by those of single characters."""

    def node(self, bare: bool) -> Node:
        """Its grammar, as plain text or as it stands in a JSON string."""
        return self.spelled(cache(utf8 if bare else character))

    def anchored(self, sign: str) -> bool:
        """Whether some text of it begins with ^, or ends with $."""
        return False

    def searched(self, first: bool, last: bool) -> Part:
        """Without anchors; with free text before it if it comes `first`, behind it if `last`.

        UsageError for a ^ that does not come first, or a $ that does not come last.
        """
        mine = first and self.anchored("^"), last and self.anchored("$")
        before = (FREE,) if first > mine[0] else ()
        behind = (FREE,) if last > mine[1] else ()
        part = self._searched(*mine)
        return Chain((*before, part, *behind)) if before or behind else part

    @abstractmethod
    def _searched(self, first: bool, last: bool) -> Part:
        """The same, where it is anchored on those sides at least in some way."""

    def limited(self, least: int, most: float) -> Part | None:
        """What of it has so many characters; None where there is no simple way to tell."""
        shortest, longest = self.lengths
        if least <= shortest and longest <= most:
            return self
        return NOTHING if longest < least or most < shortest else self._cut(least, most)

    def _cut(self, least: int, most: float) -> Part | None:
        """The same where lengths matter."""
        return None


@dataclass(frozen=True, eq=False)
class Chars(Part):
    """One character of a set."""

    ranges: Ranges

    lengths = 1, 1

    @property
    def size(self) -> int:
        """See Part."""
        return len(self.ranges)

    def spelled(self, spell: Spell) -> Node:
        """See Part."""
        return spell(self.ranges)

    def _searched(self, first: bool, last: bool) -> Part:
        return self


@dataclass(frozen=True, eq=False)
class Anchor(Part):
    """^ or $, and its place in the pattern; a whole pattern has none left."""

    sign: str
    at: int

    lengths = 0, 0
    size = 0

    def spelled(self, spell: Spell) -> Node:
        """See Part."""
        raise AssertionError(self)

    def anchored(self, sign: str) -> bool:
        """See Part."""
        return sign == self.sign

    def _searched(self, first: bool, last: bool) -> Part:
        if not (first or last):
            where = "beginning" if self.sign == "^" else "end"
            raise _fault(f"a {self.sign} that is not at the {where}", self.at)
        return EMPTY


@dataclass(frozen=True, eq=False)
class Chain(Part):
    """Parts one after the other."""

    parts: tuple[Part, ...]

    @cached_property
    def lengths(self) -> tuple[int, float]:
        """See Part."""
        each = [part.lengths for part in self.parts]
        return sum(fewest for fewest, _ in each), sum(most for _, most in each)

    @cached_property
    def size(self) -> int:
        """See Part."""
        return sum(part.size for part in self.parts)

    def spelled(self, spell: Spell) -> Node:
        """See Part."""
        return Seq(tuple(part.spelled(spell) for part in self.parts))

    def anchored(self, sign: str) -> bool:
        """See Part."""
        return bool(self.parts) and self.parts[0 if sign == "^" else -1].anchored(sign)

    def _searched(self, first: bool, last: bool) -> Part:
        end = len(self.parts) - 1
        return Chain(
            tuple(
                part.searched(first and at == 0, last and at == end)
                for at, part in enumerate(self.parts)
            )
        )

    def _cut(self, least: int, most: float) -> Part | None:
        loose = [at for at, part in enumerate(self.parts) if part.lengths[0] != part.lengths[1]]
        if len(loose) != 1:
            return None
        part = self.parts[loose[0]]
        others = self.lengths[0] - part.lengths[0]
        cut = part.limited(max(least - others, 0), most - others)
        return cut and Chain((*self.parts[: loose[0]], cut, *self.parts[loose[0] + 1 :]))


@dataclass(frozen=True, eq=False)
class Choice(Part):
    """Any one of its options."""

    options: tuple[Part, ...]

    @cached_property
    def lengths(self) -> tuple[int, float]:
        """See Part."""
        each = [option.lengths for option in self.options] or [(0, 0)]
        return min(fewest for fewest, _ in each), max(most for _, most in each)

    @cached_property
    def size(self) -> int:
        """See Part."""
        return sum(option.size for option in self.options)

    def spelled(self, spell: Spell) -> Node:
        """See Part."""
        return Alt(tuple(option.spelled(spell) for option in self.options))

    def anchored(self, sign: str) -> bool:
        """See Part."""
        return any(option.anchored(sign) for option in self.options)

    def _searched(self, first: bool, last: bool) -> Part:
        return Choice(tuple(option.searched(first, last) for option in self.options))

    def _cut(self, least: int, most: float) -> Part | None:
        cut = [option.limited(least, most) for option in self.options]
        known = [option for option in cut if option]
        return Choice(tuple(known)) if len(known) == len(cut) else None


@dataclass(frozen=True, eq=False)
class Times(Part):
    """A part `least` to `most` times."""

    part: Part
    least: int
    most: float

    @cached_property
    def lengths(self) -> tuple[int, float]:
        """See Part."""
        fewest, most = self.part.lengths
        return fewest * self.least, most * self.most if most and self.most else 0

    @cached_property
    def size(self) -> int:
        """See Part."""
        return self.part.size * int(max(1, self.least if self.most == math.inf else self.most))

    def spelled(self, spell: Spell) -> Node:
        """See Part."""
        most = None if self.most == math.inf else int(self.most)
        return Repeat(self.part.spelled(spell), self.least, most)

    def _searched(self, first: bool, last: bool) -> Part:
        return Times(self.part.searched(False, False), self.least, self.most)

    def _cut(self, least: int, most: float) -> Part | None:
        fewest, longest = self.part.lengths
        if fewest != longest:
            return None
        low = max(self.least, -(-least // fewest))
        high = self.most if most == math.inf else min(self.most, most // fewest)
        return Times(self.part, low, high) if low <= high else NOTHING


EMPTY = Chain(())
NOTHING = Choice(())
FREE = Times(Chars(ANY), 0, math.inf)


# ---- reading ------------------------------------------------------------------------------------


class _Set(NamedTuple):
    """What is in a set for certain, and what is for some readers."""

    sure: Ranges
    maybe: Ranges


def read(pattern: str, exact: bool = False) -> Part:
    """A pattern; UsageError, with the place in it, for what is none or is not regular.

    Languages differ in what \\d, \\w and \\s mean; it matches what is right in all of them, or, if
    `exact`, just what ECMA-262 says.
    """
    if len(pattern) > _LONGEST:
        raise UsageError(f"more than {_LONGEST:,} characters")
    part = _Reader(pattern, exact).whole().searched(True, True)
    if part.size > _LARGEST:
        raise UsageError("repetitions of repetitions, too many or too long")
    return part


def _fault(what: str, at: int) -> UsageError:
    return UsageError(f"{what}, at character {at + 1}")


_DIGIT = ((0x30, 0x39),)
_WORD = (*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
_ECMA_SPACE = (*_SPACE, (0xFEFF, 0xFEFF))
_LINE_ENDS = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))


@cache
def _class(name: str, exact: bool) -> _Set:
    """The set of \\d, \\w, \\s or one that is not in these, \\D, \\W, \\S."""
    if name.isupper():
        return _Set(*(inverse(ranges) for ranges in reversed(_class(name.lower(), exact))))
    if name == "s":
        python = ((0x1C, 0x1F), (0x85, 0x85))
        return _Set(*[_ECMA_SPACE] * 2) if exact else _Set(_SPACE, (*_ECMA_SPACE, *python))
    ranges = _DIGIT if name == "d" else _WORD
    if exact:
        return _Set(ranges, ranges)
    others = ((0x80, 0x10FFFF),)
    if name == "d":
        others = tuple((code, code) for code in range(0x80, 0x20000) if chr(code).isdecimal())
    return _Set(ranges, (*ranges, *others))


_GROUP = re.compile(r"\((?:\?:|\?<[A-Za-z_$][\w$]*>|(?!\?))", re.ASCII)
_QUANTIFIER = re.compile(r"(?:([*+?])|\{([0-9]{1,9})(?:(,)([0-9]{1,9})?)?\})\??")
_SIGNS = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|([dDwWsS])|([tnrfv])|([^0-9A-Za-z]))", re.DOTALL
)
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_REFUSED = {
    "(?=": "a look-ahead", "(?!": "a look-ahead", "(?<=": "a look-behind", "(?<!": "a look-behind",
    "(?": "a group that is neither (?: nor (?<name>", "\\b": "a \\b",
    "\\B": "a \\B", "\\p": "a Unicode property", "\\P": "a Unicode property",
    "\\k": "a back-reference", **{f"\\{n}": "a back-reference" for n in range(1, 10)},
    "\\": "an escape of no known meaning", "{": "a { that is no quantifier",
    "*": "nothing to repeat", "+": "nothing to repeat", "?": "nothing to repeat",
}  # fmt: skip


class _Reader:
    """Reads a pattern from its beginning to its end."""

    def __init__(self, pattern: str, exact: bool) -> None:
        self._text, self._exact = pattern, exact
        self._at = self._depth = 0

    def whole(self) -> Part:
        """All of it, with its anchors."""
        part = self._choice()
        if self._at < len(self._text):
            raise _fault("a ) without its (", self._at)
        return part

    def _take(self, sign: str) -> bool:
        found = self._text.startswith(sign, self._at)
        self._at += len(sign) * found
        return found

    def _refuse(self) -> UsageError:
        """Why what comes next cannot be read."""
        said = self._text[self._at :]
        longest = max((s for s in _REFUSED if said.startswith(s)), key=len)
        return _fault(_REFUSED[longest], self._at)

    def _choice(self) -> Part:
        options = [self._chain()]
        while self._take("|"):
            options.append(self._chain())
        return Choice(tuple(options)) if len(options) > 1 else options[0]

    def _chain(self) -> Part:
        parts = []
        while self._text[self._at : self._at + 1] not in ("", "|", ")"):
            parts.append(self._times())
        return Chain(tuple(parts))

    def _times(self) -> Part:
        part, at = self._atom(), self._at
        found = _QUANTIFIER.match(self._text, at)
        if not found:
            return part
        if isinstance(part, Anchor):
            raise _fault("a quantifier behind an anchor", at)
        self._at = found.end()
        sign, least, more, most = found.groups()
        if sign:
            return Times(part, *_SIGNS[sign])
        low = int(least)
        high = (int(most) if most else math.inf) if more else low
        if high < low:
            raise _fault("a quantifier whose bounds are the wrong way round", at)
        return Times(part, low, high)

    def _atom(self) -> Part:
        char, at = self._text[self._at], self._at
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._brackets())
        if char == ".":
            self._at += 1
            return Chars(inverse(_LINE_ENDS))
        if char in "^$":
            self._at += 1
            return Anchor(char, at)
        if char in "*+?{":
            raise self._refuse()
        return Chars(_one(self._member()).sure)

    def _group(self) -> Part:
        at, opened = self._at, _GROUP.match(self._text, self._at)
        if not opened:
            raise self._refuse()
        self._at = opened.end()
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _fault("too many groups in each other", at)
        part = self._choice()
        self._depth -= 1
        if not self._take(")"):
            raise _fault("a ( that is never closed", at)
        return part

    def _brackets(self) -> Ranges:
        at = self._at
        self._at += 1
        negated = self._take("^")
        if self._take("]"):
            raise _fault("a class of no characters", at)
        sure: list[tuple[int, int]] = []
        maybe: list[tuple[int, int]] = []
        while not self._take("]"):
            for each in self._range(at):
                sure += each.sure
                maybe += each.maybe
        return inverse(maybe) if negated else inverse(inverse(sure))

    def _range(self, opened: int) -> list[_Set]:
        """One or two members of a class, and what is between them."""
        at, low = self._at, self._member(opened)
        if not self._text.startswith("-", self._at) or self._text.startswith("-]", self._at):
            return [_one(low)]
        self._at += 1
        high = self._member(opened)
        if isinstance(low, _Set) or isinstance(high, _Set):
            return [_one(low), _one(ord("-")), _one(high)]
        if high < low:
            raise _fault("a range whose ends are the wrong way round", at)
        return [_Set(*[((low, high),)] * 2)]

    def _member(self, opened: int | None = None) -> int | _Set:
        """A character or the set of an escape; `opened` where within a class that began there."""
        if self._at == len(self._text):
            assert opened is not None
            raise _fault("a [ that is never closed", opened)
        at, char = self._at, self._text[self._at]
        if char == "\\":
            return self._escape()
        self._at += 1
        return self._code(ord(char), at)

    def _escape(self) -> int | _Set:
        at, found = self._at, _ESCAPE.match(self._text, self._at)
        if not found:
            raise self._refuse()
        self._at = found.end()
        two, four, name, control, itself = found.groups()
        if name:
            return _class(name, self._exact)
        if control:
            return _CONTROLS[control]
        return self._code(ord(itself) if itself else int(two or four, 16), at)

    def _code(self, code: int, at: int) -> int:
        if 0xD800 <= code <= 0xDFFF:
            raise _fault("half of a surrogate pair", at)
        return code


def _one(member: int | _Set) -> _Set:
    return member if isinstance(member, _Set) else _Set(*[((member, member),)] * 2)
