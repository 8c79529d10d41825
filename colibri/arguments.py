"""The arguments of a strict tool: what may be written for them, and which values that means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colibri.calls import arguments
from colibri.errors import UsageError
from colibri.grammar import Alt, Node, prune
from colibri.schema import ENTRY, Compiler, members, writable
from colibri.schema_parts import Parts, kinds

_TEXT = {"type": "string"}
_JSON = {"type": ["number", "boolean", "null", "array", "object"]}
_WHOLE = ("enum", "const", "anyOf", "oneOf", "allOf")  # keywords that speak of all at once


@dataclass(frozen=True)
class Arguments:
    """A tool's parameters, by their schema.

    `node`: the grammar of a call from behind the name on. `bare`: those that are always texts,
    written without quotes. `either`: the schemas of those that are texts or other values, by name.
    All others are JSON.
    """

    node: Node
    bare: frozenset[str]
    either: Mapping[str, Any]
    schema: Mapping[str, Any]

    def holds(self, name: str, value: Any) -> bool:
        """Whether JSON that was written for an argument means this value, and not its own text."""
        if name not in self.either:
            return name not in self.bare
        parts = Parts(self.schema, strict=True)
        return not isinstance(value, str) and parts.valid(value, self.either[name], name)


def compile_arguments(schema: Mapping[str, Any], where: str) -> Arguments:
    """The arguments of a schema; UsageError, by its place under `where`, if it cannot be kept to.

    Their names are the schema's properties and what it requires; there are no others.
    """
    try:
        return _compiled(schema, where)
    except RecursionError:
        told = "is nested too deeply, or a reference leads back to itself"
        raise UsageError(f"{where} {told}") from None


def _compiled(schema: Mapping[str, Any], where: str) -> Arguments:
    parts = Parts(schema, strict=True)
    flat = _flat(parts, schema, where)
    texts, others = Compiler(schema, True, bare=True), Compiler(schema, True)
    named = members(flat)
    parts.look(ENTRY * len(named), where)
    values: dict[str, Alt] = {}  # as text, and as JSON
    for name, part in named.items():
        text = texts.node(parts.all_of(part, _TEXT), f"{where}.{name}")
        values[name] = Alt((text, others.node(parts.all_of(part, _JSON), f"{where}.{name}")))
    json = {name: value.options[1] for name, value in values.items()}
    node = arguments(values, frozenset(flat.get("required", ())))
    if not prune(node):
        raise UsageError(f"{where} requires what no value is valid by, or none that ever ends")
    bare = frozenset(name for name in named if json[name] not in values[name].options)
    either = {name: part for name, part in named.items() if len(values[name].options) > 1}
    return Arguments(node, bare, either, schema)


def _flat(parts: Parts, schema: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A schema whose arguments can be written; UsageError if they cannot."""
    flat = parts.flat(schema, where)
    if isinstance(flat, bool) or "object" not in (kinds(flat) or ["object"]):
        raise UsageError(f"{where} allows no object, which arguments are")
    unkept = next((name for name in _WHOLE if name in flat), None)
    if unkept:
        raise UsageError(f"{where}.{unkept} cannot be kept to beside a tool's properties")
    named = members(flat)
    if not named and flat.get("additionalProperties", False) is not False:
        raise UsageError(f"{where} names no properties, and there would be no arguments")
    for name in named:
        if name != name.strip() or not writable(name):
            raise UsageError(f"{where} has a property {name!r}, which a call has no way to write")
    return flat
