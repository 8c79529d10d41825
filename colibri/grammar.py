"""Forms of text: context-free grammars over bytes, followed in all their ways at once.

A grammar is made of nodes. What may still come is a linked list of them, a `Way`; a state is the
set of all ways that the text so far leaves open, each with a set of bytes at its head. (The
set-of-stacks method of recognisers for ambiguous grammars; Lang, ICALP 1974.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from colibri.errors import SamplingError


class Node:
    """A part of a grammar. Nodes are told apart by identity, so that shared parts stay shared."""

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        """The ways to get through this node and then `rest`."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class OneOf(Node):
    """One byte of a set."""

    bytes: frozenset[int]


@dataclass(frozen=True, eq=False)
class Seq(Node):
    """Parts one after the other; none is the empty text."""

    parts: tuple[Node, ...]

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        for part in reversed(self.parts):
            rest = matcher.way(part, rest)
        return [rest]


@dataclass(frozen=True, eq=False)
class Alt(Node):
    """Any one of its options."""

    options: tuple[Node, ...]

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        return [matcher.way(option, rest) for option in self.options]


@dataclass(frozen=True, eq=False)
class Repeat(Node):
    """A part that is not empty, `least` to `most` times; most None: without end."""

    part: Node
    least: int = 0
    most: int | None = None

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        found: list[Way | None] = [] if self.least else [rest]
        if self.most != 0:
            fewer = self
            if self.least or self.most is not None:
                most = None if self.most is None else self.most - 1
                fewer = matcher.repeat(self.part, max(self.least - 1, 0), most)
            found.append(matcher.way(self.part, matcher.way(fewer, rest)))
        return found


@dataclass(eq=False)
class Ref(Node):
    """A node by reference, for what contains itself; `target` is set once it is known."""

    target: Node | None = None

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        assert self.target is not None
        return [matcher.way(self.target, rest)]


_MOST_WAYS = 50_000  # that a text may be going at once
_BYTES = [OneOf(frozenset((byte,))) for byte in range(256)]
EMPTY = Seq(())


def text(data: str | bytes) -> Seq:
    """Exactly this."""
    data = data.encode() if isinstance(data, str) else data
    return Seq(tuple(_BYTES[byte] for byte in data))


def one_of(*ranges: str | tuple[int, int]) -> OneOf:
    """One byte: of the characters of a text, or from a first to a last one."""
    found: set[int] = set()
    for each in ranges:
        found |= set(each.encode()) if isinstance(each, str) else set(range(each[0], each[1] + 1))
    return OneOf(frozenset(found))


def maybe(part: Node) -> Node:
    """It or nothing."""
    return Alt((EMPTY, part))


@dataclass(frozen=True, eq=False, slots=True)
class Way:
    """A node, and what comes after it; None is the end of the text."""

    node: Node
    rest: Way | None


State = frozenset  # of Way | None: those that begin with a OneOf, and None where all may be over


@dataclass(eq=False)
class Matcher:
    """Follows texts through a grammar, and remembers all that was looked up."""

    root: Node
    _known: dict[tuple[Node, Way | None], Way] = field(default_factory=dict)
    _repeats: dict[tuple[Node, int, int | None], Repeat] = field(default_factory=dict)
    _states: dict[State, State] = field(default_factory=dict)
    _steps: dict[tuple[State, int], State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start = self._heads([self.way(self.root, None)])

    def way(self, node: Node, rest: Way | None) -> Way:
        """The one Way of these two."""
        key = node, rest
        if key not in self._known:
            self._known[key] = Way(node, rest)
        return self._known[key]

    def repeat(self, part: Node, least: int, most: int | None) -> Repeat:
        """The one Repeat of these."""
        key = part, least, most
        if key not in self._repeats:
            self._repeats[key] = Repeat(part, least, most)
        return self._repeats[key]

    def after(self, state: State, data: bytes) -> State:
        """What may follow once `data` has come; empty when it may not come at all."""
        for byte in data:
            if not state:
                break
            state = self._steps.get((state, byte)) or self._step(state, byte)
        return state

    def taken(self, state: State, data: bytes) -> int:
        """How many bytes of `data` may come."""
        for at, byte in enumerate(data):
            state = self._steps.get((state, byte)) or self._step(state, byte)
            if not state:
                return at
        return len(data)

    def _step(self, state: State, byte: int) -> State:
        key = state, byte
        if key not in self._steps:
            rests = [way.rest for way in state if way and byte in way.node.bytes]
            self._steps[key] = self._heads(rests)
        return self._steps[key]

    def firsts(self, state: State) -> set[int]:
        """The bytes that may come next."""
        return set().union(*(way.node.bytes for way in state if way))

    def _heads(self, ways: Iterable[Way | None]) -> State:
        """All that these may begin with. What leads back to itself without a byte adds nothing."""
        todo, seen, found = list(ways), set(), set()
        while todo:
            way = todo.pop()
            if way in seen:
                continue
            seen.add(way)
            if len(seen) > _MOST_WAYS:
                raise SamplingError("the form can be read in too many ways; make it simpler")
            if way is None or isinstance(way.node, OneOf):
                found.add(way)
            else:
                todo += way.node.ways(self, way.rest)
        state = State(found)
        return self._states.setdefault(state, state)
