"""Forms of text: context-free grammars over bytes, followed in all their ways at once.

A grammar is made of nodes. What may still come is a linked list of them, a `Way`; a state is the
set of all ways that the text so far leaves open, each with a set of letters at its head: bytes, or
numbers from 256 on for tokens that are no text. (The set-of-stacks method of recognisers for
ambiguous grammars; Lang, ICALP 1974.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from colibri.errors import FormError

_MOST_WAYS = 50_000  # that a text may be going at once
_MOST_WORK = 1_000_000  # ways looked at for one token: a second or two
_MOST_KNOWN = 300_000  # remembered at once: some 100 MB


class Node(ABC):
    """A part of a grammar. Nodes are told apart by identity, so that shared parts stay shared."""

    @abstractmethod
    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        """The ways to get through this node and then `rest`."""

    def parts_of(self) -> Iterable[Node]:
        """All nodes in it."""
        return ()

    def needs(self) -> Iterable[Iterable[Node]]:
        """Groups of nodes: it can be gone through where all of some group can be."""
        return ((),)


@dataclass(frozen=True, eq=False)
class OneOf(Node):
    """One letter of a set."""

    letters: frozenset[int]

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        return [matcher.way(self, rest)]

    def needs(self) -> Iterable[Iterable[Node]]:
        return ((),) if self.letters else ()


@dataclass(frozen=True, eq=False)
class Seq(Node):
    """Parts one after the other; none is the empty text."""

    parts: tuple[Node, ...]

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        return [matcher.along(self, 0, rest)]

    def parts_of(self) -> Iterable[Node]:
        return self.parts

    def needs(self) -> Iterable[Iterable[Node]]:
        return (self.parts,)


@dataclass(frozen=True, eq=False)
class Later(Node):
    """A Seq from one of its parts on: a long one is taken apart no further than a text goes."""

    seq: Seq
    at: int

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        return [matcher.along(self.seq, self.at, rest)]


@dataclass(eq=False)
class Alt(Node):
    """Any one of its options."""

    options: tuple[Node, ...]

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        return [matcher.way(option, rest) for option in self.options]

    def parts_of(self) -> Iterable[Node]:
        return self.options

    def needs(self) -> Iterable[Iterable[Node]]:
        return ((option,) for option in self.options)


@dataclass(eq=False)
class Words(Node):
    """One of some texts, in order, which are all alike before `at`: few ways, however many."""

    texts: Sequence[bytes]
    at: int = 0

    @cached_property
    def _nexts(self) -> list[tuple[OneOf, Words]]:
        longer = (word for word in self.texts if len(word) > self.at)
        groups = groupby(longer, key=lambda word: word[self.at])
        return [(_BYTES[byte], Words(list(group), self.at + 1)) for byte, group in groups]

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        found = [matcher.way(byte, matcher.way(words, rest)) for byte, words in self._nexts]
        return [rest, *found] if len(self.texts[0]) == self.at else [*found]

    def needs(self) -> Iterable[Iterable[Node]]:
        return ((),) if self.texts else ()


@dataclass(eq=False)
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

    def parts_of(self) -> Iterable[Node]:
        return (self.part,)

    def needs(self) -> Iterable[Iterable[Node]]:
        return ((self.part,) if self.least else (),)


@dataclass(eq=False)
class AnyOrder(Node):
    """Named parts, each at most once and in any order, but for those in `gone`; all of `must`."""

    parts: Mapping[str, Node]
    must: frozenset[str]
    gone: frozenset[str] = frozenset()

    @cached_property
    def _nexts(self) -> list[tuple[Node, AnyOrder]]:
        return [
            (part, AnyOrder(self.parts, self.must, self.gone | {name}))
            for name, part in self.parts.items()
            if name not in self.gone
        ]

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        found = [matcher.way(part, matcher.way(later, rest)) for part, later in self._nexts]
        return [rest, *found] if self.must <= self.gone else [*found]

    def parts_of(self) -> Iterable[Node]:
        return self.parts.values()

    def needs(self) -> Iterable[Iterable[Node]]:
        return ([self.parts[name] for name in sorted(self.must)],)


@dataclass(eq=False)
class Over(Node):
    """The end of the whole text, whatever would come after."""

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        return [None]


@dataclass(eq=False)
class Ref(Node):
    """A node by reference, for what contains itself; `target` is set once it is known."""

    target: Node | None = None

    def ways(self, matcher: Matcher, rest: Way | None) -> list[Way | None]:
        assert self.target is not None
        return [matcher.way(self.target, rest)]

    def parts_of(self) -> Iterable[Node]:
        assert self.target is not None
        return (self.target,)

    def needs(self) -> Iterable[Iterable[Node]]:
        return (self.parts_of(),)


_BYTES = [OneOf(frozenset((byte,))) for byte in range(256)]
EMPTY = Seq(())
NEVER = OneOf(frozenset())


def text(data: str | bytes) -> Seq:
    """Exactly this."""
    data = data.encode() if isinstance(data, str) else data
    return Seq(tuple(_BYTES[byte] for byte in data))


def words(*texts: bytes) -> Node:
    """Any of these."""
    return Words(sorted({*texts})) if texts else NEVER


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
    _laters: dict[tuple[Seq, int], Later] = field(default_factory=dict)
    _states: dict[State, State] = field(default_factory=dict)
    _steps: dict[tuple[State, int], State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work = 0  # ways looked at
        self.start = self.state(self.root)

    def state(self, node: Node) -> State:
        """Where a text of this node begins."""
        return self._heads([self.way(node, None)])

    def refresh(self) -> None:
        """Before each token: there may be as much work again, and memory stays bounded.

        What is met anew after all was forgotten is another object, but leads the same ways.
        """
        self.work = 0
        if len(self._known) + len(self._steps) > _MOST_KNOWN:
            for memory in (self._known, self._repeats, self._laters, self._states, self._steps):
                memory.clear()
            self._states[self.start] = self.start

    def way(self, node: Node, rest: Way | None) -> Way:
        """The one Way of these two."""
        key = node, rest
        if key not in self._known:
            self._known[key] = Way(node, rest)
        return self._known[key]

    def along(self, seq: Seq, at: int, rest: Way | None) -> Way | None:
        """The way through a Seq from its part `at` on."""
        left = len(seq.parts) - at
        if left > 1:
            key = seq, at + 1
            if key not in self._laters:
                self._laters[key] = Later(seq, at + 1)
            rest = self.way(self._laters[key], rest)
        return self.way(seq.parts[at], rest) if left else rest

    def repeat(self, part: Node, least: int, most: int | None) -> Repeat:
        """The one Repeat of these."""
        key = part, least, most
        if key not in self._repeats:
            self._repeats[key] = Repeat(part, least, most)
        return self._repeats[key]

    def after(self, state: State, data: Sequence[int]) -> State:
        """What may follow once `data` has come; empty when it may not come at all."""
        for letter in data:
            if not state:
                break
            state = self._steps.get((state, letter)) or self._step(state, letter)
        return state

    def takes(self, data: Sequence[int]) -> bool:
        """Whether this is a whole text of the grammar."""
        return None in self.after(self.start, data)

    def taken(self, state: State, data: bytes) -> int:
        """How many bytes of `data` may come."""
        for at, byte in enumerate(data):
            state = self._steps.get((state, byte)) or self._step(state, byte)
            if not state:
                return at
        return len(data)

    def _step(self, state: State, letter: int) -> State:
        key = state, letter
        if key not in self._steps:
            rests = [way.rest for way in state if way and letter in way.node.letters]
            self._steps[key] = self._heads(rests) if rests else State()
        return self._steps[key]

    def firsts(self, state: State) -> set[int]:
        """The letters that may come next."""
        return set().union(*(way.node.letters for way in state if way))

    def _heads(self, ways: Iterable[Way | None]) -> State:
        """All that these may begin with. What leads back to itself without a byte adds nothing."""
        todo, seen, found = list(ways), set(), set()
        while todo:
            way = todo.pop()
            if way in seen:
                continue
            seen.add(way)
            if len(seen) > _MOST_WAYS or self.work + len(seen) > _MOST_WORK:
                raise FormError("the form can be read in too many ways; make it simpler")
            if way is None or isinstance(way.node, OneOf):
                found.add(way)
            else:
                todo += way.node.ways(self, way.rest)
        self.work += len(seen)
        state = State(found)
        return self._states.setdefault(state, state)


def prune(root: Node) -> bool:
    """Take out of a grammar what never comes to an end; False where nothing is left."""
    nodes, todo = {root}, [root]
    while todo:
        new = {part for part in todo.pop().parts_of() if part not in nodes}
        nodes |= new
        todo += new
    ending = _ending(nodes)
    for node in nodes:
        if isinstance(node, Alt) and not ending.issuperset(node.options):
            node.options = tuple(option for option in node.options if option in ending)
        elif isinstance(node, AnyOrder):
            node.parts = {name: part for name, part in node.parts.items() if part in ending}
        elif isinstance(node, Repeat) and node.part not in ending:
            node.most = 0
    return root in ending


def _ending(nodes: Iterable[Node]) -> set[Node]:
    """Those that some text gets through. Each group of needs waits for one node at a time."""
    ending: set[Node] = set()
    waiting: dict[Node, list[tuple[Node, Iterator[Node]]]] = {}
    todo = deque((node, iter(group)) for node in nodes for group in node.needs())
    while todo:
        node, left = todo.popleft()
        lacking = next((part for part in left if part not in ending), None)
        if lacking is not None:
            waiting.setdefault(lacking, []).append((node, left))
        elif node not in ending:
            ending.add(node)
            todo += waiting.pop(node, ())
    return ending
