"""What a request's fields may hold: each kind checks a value, and says so in JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from colibri.server.refusal import Refusal
from colibri.strictjson import no_number

DEEPEST = 100  # nesting of a request's JSON


class Kind(Protocol):
    """One kind of value."""

    def read(self, value: Any, where: str) -> Any:
        """The value as the server uses it; Refusal names `where` and what was expected."""

    def schema(self) -> dict[str, Any]:
        """The kind in JSON Schema."""


@dataclass(frozen=True)
class Number:
    """A number between two bounds, both allowed. A whole one may be written 12.0."""

    least: float
    most: float
    whole: bool = False
    clamp: bool = False  # more than `most` means `most`

    def read(self, value: Any, where: str) -> Any:
        """int or float."""
        fine = isinstance(value, (int, float)) and not isinstance(value, bool)
        if fine and self.whole:
            fine = isinstance(value, int) or value.is_integer()
        if not fine or value < self.least or (value > self.most and not self.clamp):
            kind = "a whole number" if self.whole else "a number"
            upper = "" if self.clamp else f" to {self.most:.15g}"
            raise wrong(where, value, f"{kind} from {self.least:.15g}{upper}")
        return min(int(value), int(self.most)) if self.whole else float(value)

    def schema(self) -> dict[str, Any]:
        """integer or number."""
        bounds = {"minimum": self.least} | ({} if self.clamp else {"maximum": self.most})
        return {"type": "integer" if self.whole else "number", **bounds}


@dataclass(frozen=True)
class Flag:
    """true or false."""

    def read(self, value: Any, where: str) -> bool:
        """bool."""
        if not isinstance(value, bool):
            raise wrong(where, value, "true or false")
        return value

    def schema(self) -> dict[str, Any]:
        """boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class Text:
    """Any text."""

    def read(self, value: Any, where: str) -> str:
        """str."""
        if not isinstance(value, str):
            raise wrong(where, value, "text")
        return value

    def schema(self) -> dict[str, Any]:
        """string."""
        return {"type": "string"}


@dataclass(frozen=True)
class Words:
    """One of a few words."""

    words: tuple[str, ...]

    def read(self, value: Any, where: str) -> str:
        """One of them."""
        if value not in self.words:
            raise wrong(where, value, f"one of {', '.join(self.words)}")
        return value

    def schema(self) -> dict[str, Any]:
        """enum."""
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True)
class Only:
    """A feature that is not there: nothing but the values that do not ask for it.

    `advice`: what else to do than ask for it.
    """

    values: tuple[Any, ...]
    code: str = "unsupported_parameter"
    advice: str = ""

    def read(self, value: Any, where: str) -> Any:
        """One of the values."""
        if not any(value == v and type(value) is type(v) for v in self.values):
            allowed = " or ".join(json.dumps(v) for v in self.values)
            raise Refusal(
                f"{where} is {brief(value)}, which this server cannot do; "
                f"{f'leave it out or send {allowed}' if self.values else 'leave it out'}"
                f"{f': {self.advice}' if self.advice else ''}.",
                where,
                code=self.code,
            )
        return value

    def schema(self) -> dict[str, Any]:
        """enum."""
        return {"enum": list(self.values)} if self.values else {"type": "null"}


@dataclass(frozen=True)
class Stops:
    """A text, or a list of at most 16; none of them empty."""

    def read(self, value: Any, where: str) -> tuple[str, ...]:
        """The texts."""
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > 16:
            raise wrong(where, value, "text or a list of at most 16 texts")
        for i, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise wrong(f"{where}[{i}]", text, "text that is not empty")
        return tuple(texts)

    def schema(self) -> dict[str, Any]:
        """string or array."""
        text = {"type": "string", "minLength": 1}
        return {"anyOf": [text, {"type": "array", "items": text, "maxItems": 16}]}


@dataclass(frozen=True)
class ListOf:
    """A list of one kind of things."""

    kind: Kind
    least: int = 0

    def read(self, value: Any, where: str) -> list[Any]:
        """The things."""
        if not isinstance(value, list) or len(value) < self.least:
            filled = " that is not empty" if self.least else ""
            raise wrong(where, value, f"a list{filled}")
        return [self.kind.read(item, f"{where}[{i}]") for i, item in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        """array."""
        return {"type": "array", "items": self.kind.schema(), "minItems": self.least}


@dataclass(frozen=True)
class TextOr:
    """Text, or a list of one kind of things; `called` is what a refusal calls them."""

    things: ListOf
    called: str

    def read(self, value: Any, where: str) -> Any:
        """str or list."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise wrong(where, value, f"text or a list of {self.called}")
        return self.things.read(value, where)

    def schema(self) -> dict[str, Any]:
        """string or array."""
        return {"anyOf": [{"type": "string"}, self.things.schema()]}


@dataclass(frozen=True)
class Object:
    """Any object, passed on as it is."""

    def read(self, value: Any, where: str) -> dict[str, Any]:
        """dict."""
        if not isinstance(value, dict):
            raise wrong(where, value, "an object")
        return value

    def schema(self) -> dict[str, Any]:
        """object."""
        return {"type": "object"}


@dataclass(frozen=True)
class Table:
    """An object with known fields."""

    fields: Sequence[Field]

    def read(self, value: Any, where: str) -> dict[str, Any]:
        """The fields that were given."""
        if not isinstance(value, dict):
            raise wrong(where, value, "an object")
        return read(value, self.fields, f"{where}." if where else "")

    def schema(self) -> dict[str, Any]:
        """object."""
        return {
            "type": "object",
            "properties": {f.name: f.kind.schema() | {"description": f.help} for f in self.fields},
            "required": [f.name for f in self.fields if f.required],
            "additionalProperties": False,
        }


@dataclass(frozen=True)
class Field:
    """A field by name. null is the same as leaving it out."""

    name: str
    kind: Kind
    help: str
    required: bool = False


def read(body: Mapping[str, Any], fields: Sequence[Field], prefix: str = "") -> dict[str, Any]:
    """The fields that are given, checked; Refusal for any other, by name.

    null leaves out a field that is not known, too: clients send back all that their answers have.
    """
    known = {field.name: field for field in fields}
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in known:
            shown = prefix + brief(name, quote=False)
            text = f"{shown} is not supported; leave it out."
            raise Refusal(text, shown, code="unsupported_parameter")
    for field in fields:
        if field.required and field.name not in given:
            raise Refusal(f"{prefix}{field.name} is missing.", prefix + field.name)
    return {name: known[name].kind.read(value, prefix + name) for name, value in given.items()}


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object of a request's body; Refusal says what is wrong with it."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=no_number)
    except UnicodeDecodeError as error:
        raise Refusal(f"the body is not UTF-8 text at byte {error.start}.") from None
    except RecursionError:
        raise Refusal("the body's JSON is nested too deeply.") from None
    except ValueError as error:
        raise Refusal(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal(f"the body is {brief(value)}; expected a JSON object.")
    level, deep = [value], 0
    while level:
        deep += 1
        if deep > DEEPEST:
            raise Refusal(f"the body's JSON is nested more than {DEEPEST} levels deep.")
        inner = [v for v in level if isinstance(v, (dict, list))]
        level = [c for v in inner for c in (v.values() if isinstance(v, dict) else v)]
    return value


def wrong(where: str, value: Any, expected: str) -> Refusal:
    """The refusal of a value that is not what a field may hold."""
    return Refusal(f"{where} is {brief(value)}; expected {expected}.", where)


def brief(value: Any, quote: bool = True) -> str:
    """A value as a message shows it: JSON, cut short."""
    text = json.dumps(value) if quote or not isinstance(value, str) else value
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Typed:
    """An object that says what it is, and holds what its kind may. `usual`: what it is unsaid.

    `advice`: what to do in place of kinds that are known and not taken.
    """

    tables: Mapping[str, Sequence[Field]]
    key: str = "type"
    usual: str | None = None
    advice: Mapping[str, str] | None = None

    def read(self, value: Any, where: str) -> dict[str, Any]:
        """The fields that were given, what it is first."""
        if not isinstance(value, dict):
            raise wrong(where, value, "an object")
        said = value.get(self.key)
        kind = self.usual if said is None else said
        if not isinstance(kind, str) or kind not in self.tables:
            usual = f"it takes {', '.join(self.tables)}"
            advice = (self.advice or {}).get(kind, usual) if isinstance(kind, str) else usual
            raise Refusal(
                f"{where}.{self.key} is {brief(kind)}, which this server does not take; {advice}.",
                f"{where}.{self.key}",
                code="unsupported_content",
            )
        rest = {name: given for name, given in value.items() if name != self.key}
        return {self.key: kind, **read(rest, self.tables[kind], f"{where}.")}

    def schema(self) -> dict[str, Any]:
        """One object of several."""
        return {"anyOf": [self._table(kind).schema() for kind in self.tables]}

    def _table(self, kind: str) -> Table:
        name = Field(self.key, Words((kind,)), "What it is.", required=kind != self.usual)
        return Table((name, *self.tables[kind]))
