"""JSON Schema as a grammar: every text of the grammar is JSON that is valid by the schema.

Not the other way round: properties come in the schema's order, and where it names any there are no
others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from colibri.errors import UsageError
from colibri.grammar import EMPTY, Alt, Node, Ref, Repeat, Seq, text
from colibri.json_grammar import (
    COMMA,
    INTEGER,
    NUMBER,
    SPACE,
    VALUE,
    any_names,
    array,
    literal,
    string,
)  # fmt: skip

# What says nothing of a value.
_NOTES = frozenset(
    ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
     "examples", "deprecated", "readOnly", "writeOnly", "discriminator")
)  # fmt: skip
_KEPT = frozenset(
    ("$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf", "properties", "required",
     "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minLength",
     "maxLength")
)  # fmt: skip
_MOST_PARTS = 20_000  # of a schema, those meant twice counted twice: more is a mistake, or malice


def compile_schema(schema: Any, where: str, strict: bool = False) -> Node:
    """The grammar of a JSON Schema; UsageError, by its place under `where`, for what has none.

    What cannot be kept to (`pattern`, `minimum`, `format`..) is refused if `strict`, else passed
    over, and so are two of one keyword where only one can be (`oneOf` is taken as `anyOf`).
    """
    try:
        return _Compiler(schema, strict).node(schema, where)
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply, or holds itself in allOf") from None


class _Compiler:
    """One schema's grammar in the making."""

    def __init__(self, root: Any, strict: bool) -> None:
        self._root, self._strict = root, strict
        self._refs: dict[str, Ref] = {}
        self._parts = 0
        self._types: dict[str, Callable[[Mapping[str, Any], str], Node]] = {
            "string": self._text,
            "integer": lambda schema, where: INTEGER,
            "number": lambda schema, where: NUMBER,
            "boolean": lambda schema, where: Alt((text("true"), text("false"))),
            "null": lambda schema, where: text("null"),
            "object": self._object,
            "array": self._items,
        }

    def node(self, schema: Any, where: str) -> Node:
        """The grammar of a schema or of a part of one."""
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise UsageError(f"{where} has more than {_MOST_PARTS:,} parts")
        if schema is True:
            return VALUE
        if not isinstance(schema, Mapping):
            raise UsageError(f"{where} is {json.dumps(schema)[:80]}; expected a JSON Schema")
        if self._strict:
            unkept = sorted(set(schema) - _NOTES - _KEPT)
            if unkept:
                raise UsageError(f"{where}.{unkept[0]} cannot be kept to; leave it out")
        if "$ref" in schema:
            own = {key: value for key, value in schema.items() if key != "$ref"}
            if _says_nothing(own):
                return self._ref(schema["$ref"], where)
            return self.node(self._merged([own, {"$ref": schema["$ref"]}], where), where)
        if "const" in schema:
            return literal(schema["const"])
        if "enum" in schema:
            return self._enum(schema, where)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                own = {key: value for key, value in schema.items() if key != name}
                options = enumerate(_list(schema, name, where))
                return Alt(
                    tuple(
                        self.node(self._merged([own, option], where), f"{where}.{name}[{i}]")
                        for i, option in options
                    )
                )
        if "allOf" in schema:
            own = {key: value for key, value in schema.items() if key != "allOf"}
            return self.node(self._merged([own, *_list(schema, "allOf", where)], where), where)
        return self._typed(schema, where)

    def _enum(self, schema: Mapping[str, Any], where: str) -> Node:
        kinds = self._kinds(schema, where)
        values = [v for v in _list(schema, "enum", where) if not kinds or _kinds_of(v) & {*kinds}]
        if not values:
            raise UsageError(f"{where}.enum has no value of its type")
        return literal(*values)

    def _typed(self, schema: Mapping[str, Any], where: str) -> Node:
        kinds = self._kinds(schema, where) or _implied(schema)
        return Alt(tuple(self._types[kind](schema, where) for kind in kinds)) if kinds else VALUE

    def _kinds(self, schema: Mapping[str, Any], where: str) -> list[str]:
        """The types it names, none if it names none."""
        if "type" not in schema:
            return []
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        for kind in kinds or [[]]:
            if not isinstance(kind, str) or kind not in self._types:
                known = ", ".join(self._types)
                raise UsageError(f"{where}.type is {json.dumps(kind)[:80]}; there are {known}")
        return kinds

    def _ref(self, path: Any, where: str) -> Node:
        target = self._find(path, where)
        if path in self._refs:
            return self._refs[path]
        self._refs[path] = ref = Ref()
        ref.target = self.node(target, f"{where}.$ref")
        return ref

    def _find(self, path: Any, where: str) -> Any:
        """What a $ref within the schema points at."""
        found = self._root
        if isinstance(path, str) and (path == "#" or path.startswith("#/")):
            for name in path.split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                found = found.get(name) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        raise UsageError(f"{where}.$ref is {json.dumps(path)[:80]}, which is not in the schema")

    def _merged(self, parts: list[Any], where: str) -> Any:
        """Schemas that all hold, as one: properties and required names together."""
        parts = [part for part in parts if not _says_nothing(part)]
        if len(parts) < 2:
            return parts[0] if parts else True
        whole: dict[str, Any] = {}
        for part in parts:
            while isinstance(part, Mapping) and "$ref" in part:
                part = self._find(part["$ref"], where)
            if not isinstance(part, Mapping):
                raise UsageError(f"{where} holds {json.dumps(part)[:80]}; expected a JSON Schema")
            whole = self._both(whole, part, where)
        return whole

    def _both(self, one: dict[str, Any], other: Mapping[str, Any], where: str) -> dict[str, Any]:
        whole = one | dict(other)
        for name in (set(one) & set(other)) - _NOTES:
            if name == "required":
                whole[name] = [*one[name], *other[name]]
            elif name == "properties":
                twice = set(one[name]) & set(other[name])
                both = {key: {"allOf": [one[name][key], other[name][key]]} for key in twice}
                whole[name] = {**one[name], **other[name], **both}
            elif self._strict and one[name] != other[name]:
                raise UsageError(f"{where} has two of {name}, which cannot both be kept to")
        return whole

    # ---- types --------------------------------------------------------------------------------

    def _text(self, schema: Mapping[str, Any], where: str) -> Node:
        return string(*_bounds(schema, "minLength", "maxLength", where))

    def _items(self, schema: Mapping[str, Any], where: str) -> Node:
        least, most = _bounds(schema, "minItems", "maxItems", where)
        rest = schema.get("items", True)
        given = _list(schema, "prefixItems", where) if "prefixItems" in schema else []
        first = [self.node(p, f"{where}.prefixItems[{i}]") for i, p in enumerate(given[:most])]
        if not first:
            if rest is False:
                return text("[]")
            return array(self.node(rest, f"{where}.items"), least, most)
        parts = [part for each in first for part in (COMMA, each)][1:]
        if rest is not False and most != len(first):
            item = Seq((COMMA, self.node(rest, f"{where}.items")))
            left = None if most is None else max(most - len(first), 0)
            parts.append(Repeat(item, max(least - len(first), 0), left))
        return Seq((text("["), SPACE, *parts, SPACE, text("]")))

    def _object(self, schema: Mapping[str, Any], where: str) -> Node:
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise UsageError(f"{where}.properties is not an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise UsageError(f"{where}.required is not a list of names")
        other = more if more is not False else True
        wanted = {**properties, **{n: other for n in required if n not in properties}}
        if not wanted:
            if more is False:
                return text("{}")
            return any_names(self.node(more, f"{where}.additionalProperties"))
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


def _list(schema: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = schema[name]
    if not isinstance(found, list) or not found:
        raise UsageError(f"{where}.{name} is not a list of at least one")
    return found


def _says_nothing(schema: Any) -> bool:
    return schema is True or (isinstance(schema, Mapping) and set(schema) <= _NOTES)


def _kinds_of(value: Any) -> set[str]:
    """The types that a value is of."""
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if value == int(value) else {"number"}
    return {{str: "string", list: "array"}.get(type(value), "object")}


def _implied(schema: Mapping[str, Any]) -> list[str]:
    """The type that a schema speaks of without a word of it."""
    for kind, names in (
        ("object", ("properties", "required", "additionalProperties")),
        ("array", ("items", "prefixItems", "minItems", "maxItems")),
        ("string", ("minLength", "maxLength")),
    ):
        if any(name in schema for name in names):
            return [kind]
    return []


def _bounds(schema: Mapping[str, Any], least: str, most: str, where: str) -> tuple[int, int | None]:
    low, high = schema.get(least, 0), schema.get(most)
    for name, value in ((least, low), (most, 0 if high is None else high)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"{where}.{name} is {json.dumps(value)[:80]}; expected 0 or more")
    if high is not None and high < low:
        raise UsageError(f"{where}.{most} is less than {least}")
    return low, high
