"""JSON Schema as a grammar: every text of the grammar is JSON that is valid by the schema.

Not the other way round: properties come in the schema's order, and where it names any there are no
others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from colibri.characters import ANY, utf8
from colibri.errors import UsageError
from colibri.grammar import EMPTY, NEVER, Alt, Node, Ref, Repeat, Seq, prune, text, words
from colibri.json_grammar import (
    COMMA,
    DIGITS,
    INTEGER,
    NUMBER,
    SPACE,
    VALUE,
    any_names,
    array,
    literal,
    string,
)  # fmt: skip
from colibri.json_values import FORMATS
from colibri.schema_parts import NOTES, NUMERIC, Parts, kinds, number_range, values

ENTRY = 50  # looks that a property's nodes take as long as


def compile_schema(schema: Any, where: str, strict: bool = False) -> Node:
    """The grammar of a JSON Schema; UsageError, by its place under `where`, for what has none.

    What cannot be kept to (`uniqueItems`, `not`..) is refused if `strict`, else passed
    over, and `oneOf` is then taken as `anyOf` where more than one of it may hold.
    """
    try:
        node = Compiler(schema, strict).node(schema, where)
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply, or holds itself in allOf") from None
    if not prune(node):
        numbers = f"numbers have up to {DIGITS} digits"
        raise UsageError(f"{where} allows no value, or none that ever ends ({numbers})")
    return node


def members(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of what a flat schema names in objects: its properties, and what is required."""
    more, named = schema.get("additionalProperties", True), schema.get("properties", {})
    return {**named, **{n: more for n in schema.get("required", []) if n not in named}}


class Compiler:
    """One schema's grammar in the making. `bare`: a value that is a string is its text alone."""

    def __init__(self, root: Any, strict: bool, bare: bool = False) -> None:
        self._parts, self._strict, self._bare = Parts(root, strict), strict, bare
        self._made: dict[int, tuple[Any, Node]] = {}  # by the identity of what it is made of
        self._types = {
            "string": self._text,
            "integer": self._whole,
            "number": self._number,
            "boolean": lambda schema, where: literal(True, False),
            "null": lambda schema, where: literal(None),
            "object": self._object,
            "array": self._items,
        }

    def node(self, schema: Any, where: str) -> Node:
        """The grammar of a schema or of a part of one."""
        if isinstance(schema, bool):
            return VALUE if schema else NEVER
        if id(schema) not in self._made:
            ref = Ref()
            self._made[id(schema)] = schema, ref  # for what it holds of itself
            ref.target = self._node(schema, where)
            self._made[id(schema)] = schema, ref.target
        return self._made[id(schema)][1]

    def _node(self, schema: Mapping[str, Any], where: str) -> Node:
        if isinstance(schema, Mapping) and "$ref" in schema and _says_only(schema, "$ref"):
            return self.node(self._parts.find(schema["$ref"], where), f"{where}.$ref")
        flat = self._parts.flat(schema, where)
        if isinstance(flat, bool):
            return self.node(flat, where)
        given = values(flat)
        if given is not None:
            return self._literals(given, flat, where)
        for name in ("anyOf", "oneOf"):
            if name in flat:
                return self._any(flat, name, where)
        named = kinds(flat) or _implied(flat)
        if not named:
            return VALUE
        if "number" in named:  # as all integers are
            named = [kind for kind in named if kind != "integer"]
        return Alt(tuple(self._types[kind](flat, where) for kind in named))

    def _literals(self, given: list[Any], flat: Mapping[str, Any], where: str) -> Node:
        rest = {name: value for name, value in flat.items() if name not in ("enum", "const")}
        if rest:
            given = [value for value in given if self._parts.valid(value, rest, where)]
        self._parts.look(len(given), where)
        if self._bare:
            return words(*(each.encode() for each in given if writable(each)))
        try:
            return literal(*given)
        except ValueError:
            raise UsageError(f"{where} lists a number that JSON cannot hold") from None

    def _any(self, flat: Mapping[str, Any], name: str, where: str) -> Node:
        options = flat[name]
        own = {key: value for key, value in flat.items() if key != name}
        if name == "oneOf" and self._strict:
            for one, other in combinations(options, 2):
                if not self._parts.apart(one, other, f"{where}.oneOf"):
                    raise UsageError(
                        f"{where}.oneOf has options that may both hold, which cannot be kept to; "
                        "send anyOf"
                    )
        whole = [self._parts.all_of(own or True, option) for option in options]
        return Alt(tuple(self.node(each, f"{where}.{name}[{i}]") for i, each in enumerate(whole)))

    # ---- types --------------------------------------------------------------------------------

    def _text(self, schema: Mapping[str, Any], where: str) -> Node:
        least, most = _bounds(schema, "minLength", "maxLength")
        if most is not None and most < least:
            return NEVER
        node = self._formed(schema, least, math.inf if most is None else most, where)
        if node:
            return node if self._bare else Seq((text('"'), node, text('"')))
        return Repeat(utf8(ANY), least, most) if self._bare else string(least, most)

    def _formed(
        self, schema: Mapping[str, Any], least: int, most: float, where: str
    ) -> Node | None:
        """Texts by a format or a pattern; None: there is none, or it cannot be kept to."""
        if "format" in schema:
            if "pattern" in schema:
                self._require(where, "a pattern beside its format")
            node, shortest, longest = FORMATS[schema["format"]]
            if least <= shortest and longest <= most:
                return node
            self._require(where, "format beside its lengths")
        elif "pattern" in schema:
            part = self._parts.pattern(schema["pattern"]).limited(least, most)
            if part:
                self._parts.look(part.size, where)
                return part.node(self._bare)
            self._require(where, "a pattern beside its lengths")
        return None

    def _whole(self, schema: Mapping[str, Any], where: str) -> Node:
        return number_range(schema).whole() if {*schema} & {*NUMERIC} else INTEGER

    def _number(self, schema: Mapping[str, Any], where: str) -> Node:
        if not {*schema} & {*NUMERIC}:
            return NUMBER
        between = number_range(schema)
        node = between.numbers()
        if prune(node) or between.empty:
            return node
        self._require(where, "numbers so close together")
        return NUMBER

    def _require(self, where: str, what: str) -> None:
        if self._strict:
            raise UsageError(f"{where} has {what}, which cannot be kept to")

    def _items(self, schema: Mapping[str, Any], where: str) -> Node:
        least, most = _bounds(schema, "minItems", "maxItems")
        if most is not None and most < least:
            return NEVER
        given = schema.get("prefixItems", [])[:most]
        first = [self.node(p, f"{where}.prefixItems[{i}]") for i, p in enumerate(given)]
        rest = (
            NEVER if most == len(first) else self.node(schema.get("items", True), f"{where}.items")
        )
        if not first:
            return array(rest, least, most)
        parts = [part for each in first for part in (COMMA, each)][1:]
        left = None if most is None else most - len(first)
        parts.append(Repeat(Seq((COMMA, rest)), max(least - len(first), 0), left))
        return Seq((text("["), SPACE, *parts, SPACE, text("]")))

    def _object(self, schema: Mapping[str, Any], where: str) -> Node:
        wanted, required = members(schema), {*schema.get("required", [])}
        if not wanted:
            more = schema.get("additionalProperties", True)
            return any_names(self.node(more, f"{where}.additionalProperties"))
        self._parts.look(ENTRY * len(wanted), where)
        entries = [
            (
                Seq((literal(name), text(":"), SPACE, self.node(part, f"{where}.{name}"))),
                name in required,
            )
            for name, part in wanted.items()
        ]
        return Seq((text("{"), SPACE, _entries(entries), SPACE, text("}")))


def _entries(entries: list[tuple[Node, bool]]) -> Node:
    """Each (entry, whether it must be there) in order, with commas between those that are."""
    first: Node = EMPTY  # what may come where nothing has come yet
    later: Node = EMPTY
    for entry, must in reversed(entries):
        begun = Seq((entry, later))
        first = begun if must else Alt((begun, first))
        follows = Seq((COMMA, entry, later))
        later = follows if must else Alt((follows, later))
    return first


def _says_only(schema: Mapping[str, Any], name: str) -> bool:
    return set(schema) <= NOTES | {name}


def _implied(schema: Mapping[str, Any]) -> list[str]:
    """The type that a schema speaks of without a word of it."""
    for kind, names in (
        ("object", ("properties", "required", "additionalProperties")),
        ("array", ("items", "prefixItems", "minItems", "maxItems")),
        ("string", ("minLength", "maxLength", "format", "pattern")),
        ("number", NUMERIC),
    ):
        if any(name in schema for name in names):
            return [kind]
    return []


def writable(text: str) -> bool:
    """Whether UTF-8 can hold it: no half of a surrogate pair is in it."""
    return not any("\ud800" <= char < "\ue000" for char in text)


def _bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    return schema.get(least, 0), schema.get(most)
