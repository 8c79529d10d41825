"""Schemas taken together: references, what holds of two at once, and which values are valid."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from colibri.errors import FormError, UsageError
from colibri.grammar import Matcher
from colibri.json_values import FORMATS, Range
from colibri.pattern import Part, read

# What says nothing of a value.
NOTES = frozenset(
    ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
     "examples", "deprecated", "readOnly", "writeOnly", "discriminator")
)  # fmt: skip
KEPT = frozenset(
    ("$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf", "properties", "required",
     "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minLength",
     "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format",
     "pattern")
)  # fmt: skip
Flat = Mapping[str, Any] | bool
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
NUMERIC = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_COUNTED = (("minLength", "maxLength"), ("minItems", "maxItems"))
_LEAST = ("minLength", "minItems", "minimum", "exclusiveMinimum")
_MOST = ("maxLength", "maxItems", "maximum", "exclusiveMaximum")
_CHOICES = ("anyOf", "oneOf")
_TOGETHER = ("allOf", "properties", "additionalProperties", "items", "prefixItems")
_MOST_PARTS = 20_000  # of a schema, those meant twice counted twice: more is a mistake, or malice
_MOST_LOOKS = 500_000  # at names and values, likewise: a few seconds
_LETTER = 5  # looks that it takes as long to read a character of a pattern as


class Parts:
    """The parts of one schema. False stands for what no value is valid by, as in JSON Schema."""

    def __init__(self, root: Any, strict: bool) -> None:
        self._root, self._strict = root, strict
        self._count = self._looks = 0
        self._flats: dict[int, tuple[Any, Flat]] = {}  # by the identity of the schema
        self._aparts: dict[tuple[int, int], tuple[Any, Any, bool]] = {}
        self._pairs: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self._patterns: dict[str, Part] = {}
        self._matchers: dict[str, Matcher] = {}

    def flat(self, schema: Any, where: str) -> Flat:
        """A schema without $ref, and without allOf but for choices that come on top of others."""
        if isinstance(schema, bool):
            return schema
        if id(schema) not in self._flats:
            self._check(schema, where)
            self._flats[id(schema)] = schema, self._flattened(schema, where)
        return self._flats[id(schema)][1]

    def _flattened(self, schema: Mapping[str, Any], where: str) -> Flat:
        left_out = NOTES | {"$ref", "allOf", *self._unkept(schema)}
        whole: Flat = {name: value for name, value in schema.items() if name not in left_out}
        if "$ref" in schema:
            target = self.find(schema["$ref"], where)
            whole = self._both(whole, self.flat(target, f"{where}.$ref"))
        for part in schema.get("allOf", ()):
            whole = self._both(whole, self.flat(part, where))
        return whole

    def all_of(self, *schemas: Any) -> Any:
        """What holds where all of these do; of the same two it is the same object."""
        whole: Any = True
        for schema in schemas:
            if whole is True or schema is False:
                whole = schema
            elif schema is not True and whole is not False:
                key = id(whole), id(schema)
                if key not in self._pairs:
                    self._pairs[key] = whole, schema, {"allOf": [whole, schema]}
                whole = self._pairs[key][2]
        return whole

    def find(self, path: Any, where: str) -> Any:
        """What a $ref within the schema points at."""
        found = self._root
        if isinstance(path, str) and (path == "#" or path.startswith("#/")):
            for name in unquote(path).split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list) and name in map(str, range(len(found))):
                    found = found[int(name)]
                else:
                    found = found.get(name) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        raise UsageError(f"{where}.$ref is {_brief(path)}, which is not in the schema")

    def look(self, count: int, where: str) -> None:
        """Count what is looked at, so that a schema cannot be work without end."""
        self._looks += count
        if self._looks > _MOST_LOOKS:
            raise UsageError(f"{where} is too much to be looked through; make it simpler")

    # ---- one schema ---------------------------------------------------------------------------

    def _check(self, schema: Any, where: str) -> None:
        """UsageError for what is no schema, or cannot be kept to and must be."""
        self._count += 1
        if self._count > _MOST_PARTS:
            raise UsageError(f"{where} has more than {_MOST_PARTS:,} parts")
        if not isinstance(schema, Mapping):
            raise UsageError(f"{where} is {_brief(schema)}; expected a JSON Schema")
        if isinstance(schema.get("pattern"), str):
            self.look(_LETTER * len(schema["pattern"]), where)
        if self._strict:
            unkept = self._unkept(schema)
            if "$id" in schema and schema is not self._root:  # references in it mean another root
                unkept["$id"] = ""
            for name, why in unkept.items():
                raise UsageError(f"{where}.{name} cannot be kept to{why}; leave it out")
        for name in ("allOf", "anyOf", "oneOf", "enum", "prefixItems"):
            if name in schema and not (isinstance(schema[name], list) and schema[name]):
                raise UsageError(f"{where}.{name} is not a list of at least one")
        kinds(schema, where)
        if not isinstance(schema.get("properties", {}), Mapping):
            raise UsageError(f"{where}.properties is not an object")
        names = schema.get("required", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UsageError(f"{where}.required is not a list of names")
        _check_bounds(schema, where)

    def _unkept(self, schema: Mapping[str, Any]) -> dict[str, str]:
        """Keywords that nothing can be made of, in order, and why where that is not plain."""
        unkept = dict.fromkeys(set(schema) - NOTES - KEPT, "")
        if "format" in schema and schema["format"] not in [*FORMATS]:
            unkept["format"] = ""
        if "pattern" in schema:
            try:
                self.pattern(schema["pattern"])
            except UsageError as error:
                unkept["pattern"] = f": {error}"
        unkept |= {name: "" for name in NUMERIC if isinstance(schema.get(name), bool)}
        return dict(sorted(unkept.items()))

    def pattern(self, pattern: Any) -> Part:
        """What a pattern means; UsageError, by the place in it, where that cannot be kept to."""
        if not isinstance(pattern, str):
            raise UsageError("it is no text")
        if pattern not in self._patterns:
            self._patterns[pattern] = read(pattern)
        return self._patterns[pattern]

    # ---- two schemas --------------------------------------------------------------------------

    def _both(self, one: Flat, other: Flat) -> Flat:
        """What holds where both flat ones do."""
        if isinstance(one, bool):
            return other if one else False
        if isinstance(other, bool):
            return one if other else False
        self.look(len(one) + len(other), "the schema")
        whole = {**one, **other}
        for name in set(one) & set(other):
            if name in _LEAST or name in _MOST:
                whole[name] = (max if name in _LEAST else min)(one[name], other[name])
            elif name == "type":
                whole[name] = _common(kinds(one), kinds(other))
                if not whole[name]:
                    return False
            elif name == "required":
                whole[name] = [*dict.fromkeys((*one[name], *other[name]))]
                self.look(len(whole[name]), "the schema")
            elif name not in (*_CHOICES, *_TOGETHER, "enum", "const") and self._strict:
                self._same(name, one, other)
        self._both_values(one, other, whole)
        self._both_objects(one, other, whole)
        self._both_arrays(one, other, whole)
        more = [{name: other[name]} for name in _CHOICES if name in one and name in other]
        whole |= {name: one[name] for name in _CHOICES if name in one}
        more = [*one.get("allOf", ()), *other.get("allOf", ()), *more]
        return False if whole.get("enum") == [] else whole | ({"allOf": more} if more else {})

    def _same(self, name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        if one[name] != other[name]:
            raise UsageError(f"the schema has two of {name}, which cannot both be kept to")

    def _both_values(
        self, one: Mapping[str, Any], other: Mapping[str, Any], whole: dict[str, Any]
    ) -> None:
        mine, others = values(one), values(other)
        if mine is None or others is None:
            return
        self.look(len(mine) + len(others), "the schema")
        kept = {_key(value) for value in others}
        whole["enum"] = [value for value in mine if _key(value) in kept]
        whole.pop("const", None)

    def _both_objects(
        self, one: Mapping[str, Any], other: Mapping[str, Any], whole: dict[str, Any]
    ) -> None:
        mine, others = one.get("properties", {}), other.get("properties", {})
        more, others_more = (each.get("additionalProperties", True) for each in (one, other))
        names = [*dict.fromkeys((*mine, *others))]
        self.look(len(names), "the schema")
        if names:
            whole["properties"] = {
                name: self.all_of(mine.get(name, more), others.get(name, others_more))
                for name in names
            }
        if "additionalProperties" in whole:
            whole["additionalProperties"] = self.all_of(more, others_more)

    def _both_arrays(
        self, one: Mapping[str, Any], other: Mapping[str, Any], whole: dict[str, Any]
    ) -> None:
        mine, others = one.get("prefixItems", []), other.get("prefixItems", [])
        more, others_more = one.get("items", True), other.get("items", True)
        length = max(len(mine), len(others))
        self.look(length, "the schema")
        mine, others = (
            [*some, *[rest] * (length - len(some))]
            for some, rest in ((mine, more), (others, others_more))
        )
        if length:
            whole["prefixItems"] = [*map(self.all_of, mine, others)]
        if "items" in whole:
            whole["items"] = self.all_of(more, others_more)

    # ---- values -------------------------------------------------------------------------------

    def valid(self, value: Any, schema: Any, where: str) -> bool:
        """Whether a value is valid by a schema."""
        self.look(1, where)
        schema = self.flat(schema, where)
        if isinstance(schema, bool):
            return schema
        allowed, named = values(schema), kinds(schema)
        if allowed is not None:
            self.look(len(allowed), where)
            if _key(value) not in map(_key, allowed):
                return False
        if named and not _kinds_of(value) & {*named}:
            return False
        for name in _CHOICES:
            if name in schema:
                fit = sum(self.valid(value, option, where) for option in schema[name])
                if not fit or (name == "oneOf" and fit > 1):
                    return False
        parts = [(value, part) for part in schema.get("allOf", ())]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return number_range(schema).holds(value) and self._all(parts, where)
        if isinstance(value, str):
            fits = _fits(len(value), schema, "minLength", "maxLength")
            return fits and self._matches(value, schema, where) and self._all(parts, where)
        if isinstance(value, list):
            first, rest = schema.get("prefixItems", []), schema.get("items", True)
            parts += [
                *zip(value, first, strict=False),
                *((item, rest) for item in value[len(first) :]),
            ]
            return _fits(len(value), schema, "minItems", "maxItems") and self._all(parts, where)
        if isinstance(value, dict):
            if not {*schema.get("required", ())} <= {*value}:
                return False
            own, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
            parts += [(inner, own.get(name, rest)) for name, inner in value.items()]
        return self._all(parts, where)

    def _matches(self, value: str, schema: Mapping[str, Any], where: str) -> bool:
        """Whether a text matches the pattern, by ECMA-262; one that UTF-8 cannot hold does not."""
        if "pattern" not in schema:
            return True
        try:
            pattern = schema["pattern"]
            if pattern not in self._matchers:
                self._matchers[pattern] = Matcher(read(pattern, exact=True).node(bare=True))
            matcher = self._matchers[pattern]
            before = matcher.work
            taken = matcher.takes(value.encode("utf-8", "surrogatepass"))
        except FormError as error:
            raise UsageError(f"{where}.pattern: {error}") from None
        self.look(len(value) + matcher.work - before, where)
        return taken

    def _all(self, parts: Iterable[tuple[Any, Any]], where: str) -> bool:
        return all(self.valid(value, schema, where) for value, schema in parts)

    def apart(self, one: Any, other: Any, where: str) -> bool:
        """Whether it is certain that no value is valid by both."""
        key = id(one), id(other)
        if key not in self._aparts:
            self.look(1, where)
            self._aparts[key] = one, other, False  # not certain for what leads back to them
            found = self._apart(self.flat(one, where), self.flat(other, where), where)
            self._aparts[key] = one, other, found
        return self._aparts[key][2]

    def _apart(self, one: Flat, other: Flat, where: str) -> bool:
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        for mine, others in ((one, other), (other, one)):
            given = values(mine)
            if given is not None:
                return not any(
                    self.valid(v, mine, where) and self.valid(v, others, where) for v in given
                )
            for name in _CHOICES:
                if name in mine:
                    rest = {k: v for k, v in mine.items() if k != name} or True
                    options = (self.all_of(rest, option) for option in mine[name])
                    return all(self.apart(option, others, where) for option in options)
        named, others_named = kinds(one), kinds(other)
        if named and others_named and not _common(named, others_named):
            return True
        if named != ["object"] and others_named != ["object"]:
            return False
        names = {*one.get("required", ()), *other.get("required", ())}
        return any(
            self.apart(_property(one, name), _property(other, name), where)
            for name in sorted(names)
        )


def kinds(schema: Mapping[str, Any], where: str = "") -> list[str]:
    """The types that a schema names, none if it names none."""
    if "type" not in schema:
        return []
    found = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for kind in found or [[]]:
        if not isinstance(kind, str) or kind not in TYPES:
            raise UsageError(f"{where}.type is {_brief(kind)}; there are {', '.join(TYPES)}")
    return [*dict.fromkeys(found)]


def values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Those that a schema lists; None: it lists none."""
    if "const" not in schema:
        return schema.get("enum")
    const = schema["const"]
    fits = "enum" not in schema or _key(const) in map(_key, schema["enum"])
    return [const] if fits else []


def _property(schema: Mapping[str, Any], name: str) -> Any:
    return schema.get("properties", {}).get(name, schema.get("additionalProperties", True))


def _common(one: list[str], other: list[str]) -> list[str]:
    """The types of both; an integer is a number."""
    if "number" in one and "number" not in other:
        one = [*one, "integer"]
    if "number" in other and "number" not in one:
        other = [*other, "integer"]
    return [kind for kind in dict.fromkeys(one) if kind in other]


def _kinds_of(value: Any) -> set[str]:
    """The types that a value is of."""
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, (int, float)):
        whole = isinstance(value, int) or value.is_integer()
        return {"number", "integer"} if whole else {"number"}
    return {{str: "string", list: "array"}.get(type(value), "object")}


def _key(value: Any) -> Hashable:
    """Equal for values that are equal in JSON: 1 is 1.0, and true is not."""
    if isinstance(value, dict):
        return frozenset((name, _key(inner)) for name, inner in value.items())
    if isinstance(value, list):
        return tuple(map(_key, value))
    return isinstance(value, bool), value


def _fits(size: int, schema: Mapping[str, Any], least: str, most: str) -> bool:
    return schema.get(least, 0) <= size <= schema.get(most, math.inf)


def number_range(schema: Mapping[str, Any]) -> Range:
    """The numbers that a flat schema's bounds leave."""
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    stricter = above is not None and (least is None or above >= least)
    lower = below is not None and (most is None or below <= most)
    return Range(above if stricter else least, below if lower else most, stricter, lower)


def _check_bounds(schema: Mapping[str, Any], where: str) -> None:
    for least, most in _COUNTED:
        for name in (least, most):
            value = schema.get(name, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UsageError(f"{where}.{name} is {_brief(value)}; expected 0 or more")
        if schema.get(most, math.inf) < schema.get(least, 0):
            raise UsageError(f"{where}.{most} is less than {least}")
    for name in NUMERIC:
        value = schema.get(name, 0)
        if not isinstance(value, (int, float)) or value in (math.inf, -math.inf):
            raise UsageError(f"{where}.{name} is {_brief(value)}; expected a number")


def _brief(value: Any) -> str:
    return json.dumps(value)[:80]
