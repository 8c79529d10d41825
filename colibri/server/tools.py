"""Tool calls in GLM's own format, parsed as they are written.

<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>

Values of text parameters are raw text, others JSON. A tag that is a token of the tokenizer counts
only as that token: the same letters in a value are the value's own.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from colibri.answer import MARK, Piece
from colibri.arguments import Arguments
from colibri.calls import CLOSE, KEY, KEY_END, OPEN, TAGS, VALUE, VALUE_END
from colibri.strictjson import finite, no_number
from colibri.tokenizer import Tokenizer

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

SAID, CALLED, ARGUMENTS, ENDED, BROKEN = "said", "called", "arguments", "ended", "broken"


class Event(NamedTuple):
    """SAID: content. CALLED: call `index` has name `text`. ARGUMENTS: more of its JSON.

    ENDED: the call is complete. BROKEN: it never will be; `text` is all that was written of it.
    """

    kind: str
    text: str = ""
    index: int = -1
    id: str = ""


def marks(tokenizer: Tokenizer) -> dict[int, str]:
    """The tags that are tokens, by id."""
    ids = {tag: tokenizer.id_of(tag) for tag in TAGS}
    return {number: tag for tag, number in ids.items() if number is not None}


def mended(arguments: str) -> str:
    """A call's arguments; those of a call that broke off in a stream, as what became of them.

    Frameworks send the call back with an error for the model, which must not end the conversation.
    """
    for end in ("", "}", '"}', "null}"):
        try:
            json.loads(arguments + end)
        except (ValueError, RecursionError):
            continue
        return arguments + end
    return arguments


class ToolParser:
    """Pieces of an answer's text in, events out.

    `tools`: JSON Schema of the parameters by tool name. `begun`: what the prompt already opened,
    None or the name (perhaps "") that follows <tool_call> there. `strict`: those of the tools whose
    arguments keep to their schema.
    """

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        tag_tokens: Iterable[str] = (),
        begun: str | None = None,
        strict: Mapping[str, Arguments] = MappingProxyType({}),
    ) -> None:
        self._tools, self._strict = tools, strict
        self._finder = _TagFinder([tag for tag in TAGS if tag not in set(tag_tokens)])
        self._state = "text" if begun is None else "name"
        self._name = begun or ""
        self._raw = "" if begun is None else OPEN + self._name  # of a call, as written
        self._space = ""  # at the end of content: dropped if a call follows
        self._key = self._value = ""
        self._given: list[str] = []
        self._streams = False  # the open value is sent as it comes
        self.calls = 0  # that were announced
        self.complete = 0

    def push(self, piece: Piece) -> list[Event]:
        """What became certain with this piece."""
        mark = piece.kind == MARK
        finder, text = self._finder, piece.text
        parts = [*finder.finish(), text] if mark else finder.push(text)
        return [event for part in parts for event in self._part(part, mark)]

    def finish(self, stopped: bool) -> list[Event]:
        """The answer is over; `stopped`: the model ended it, it was not cut off."""
        events = [e for part in self._finder.finish() for e in self._part(part, False)]
        if self._state == "text":
            space, self._space = self._space, ""
            return [*events, Event(SAID, space)] if space and not self.calls else events
        if self._state == "name":
            known = self._tools.get(self._name.strip())
            if stopped and known is not None and not known.get("required"):
                return [*events, *self._announce(), *self._end()]
            return [*events, *self._give_up()]
        if self._recoverable(stopped):
            closing = self._end_value() if self._state == "value" else []
            return [*events, *closing, *self._end()]
        return [*events, Event(BROKEN, self._raw, self.calls - 1)]

    def _recoverable(self, stopped: bool) -> bool:
        """An unclosed call is taken when nothing of it can be missing."""
        schema = self._tools.get(self._name, {})
        given = {*self._given, self._key} if self._state == "value" else set(self._given)
        required, known = (_names(schema.get(name)) for name in ("required", "properties"))
        whole = stopped or (self._state == "between" and bool(known) and known <= given)
        return whole and required <= given

    def _part(self, text: str, mark: bool) -> list[Event]:
        tag = text if mark or text in self._finder.tags else ""
        if self._state == "text":
            return self._begin() if tag == OPEN else self._say(text)
        self._raw += text
        return getattr(self, f"_in_{self._state}")(text, tag)

    def _say(self, text: str) -> list[Event]:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [Event(SAID, kept)] if kept else []

    def _begin(self) -> list[Event]:
        self._state, self._name, self._raw = "name", "", OPEN
        return []

    def _give_up(self) -> list[Event]:
        """What looked like a call was none: it is content."""
        raw, self._raw, self._state = self._raw, "", "text"
        return self._say(raw)

    def _in_name(self, text: str, tag: str) -> list[Event]:
        if tag == OPEN:
            self._raw = self._raw.removesuffix(OPEN)
            return [*self._give_up(), *self._begin()]
        if tag in (KEY, CLOSE) and not NAME.fullmatch(self._name.strip()):
            return self._give_up()
        if tag == KEY:
            self._key = ""
            events, self._state = self._announce(), "key"
            return events
        if tag == CLOSE:
            return [*self._announce(), *self._end()]
        self._name += text
        return []

    def _announce(self) -> list[Event]:
        self._name = self._name.strip()
        self._given, self._state, self._space = [], "between", ""
        self.calls += 1
        return [Event(CALLED, self._name, self.calls - 1, f"call_{secrets.token_hex(12)}")]

    def _in_between(self, text: str, tag: str) -> list[Event]:
        if tag == KEY:
            self._key, self._state = "", "key"
        return self._end() if tag == CLOSE else []

    def _in_key(self, text: str, tag: str) -> list[Event]:
        if tag in (KEY_END, VALUE):
            self._key, self._state = self._key.strip(), "gap"
            return self._in_gap(text, tag) if tag == VALUE else []
        if tag == CLOSE:
            return self._end()
        self._key += text
        return []

    def _in_gap(self, text: str, tag: str) -> list[Event]:
        """Between </arg_key> and <arg_value>."""
        if tag == CLOSE:
            return self._end()
        if tag != VALUE:
            return []
        self._value, self._state = "", "value"
        strict = self._strict.get(self._name)
        self._streams = self._key in strict.bare if strict else self._types() == {"string"}
        head = ", " if self._given else "{"
        quote = '"' if self._streams else ""
        return [self._more(f"{head}{_quoted(self._key)}: {quote}")]

    def _in_value(self, text: str, tag: str) -> list[Event]:
        if tag == VALUE_END:
            return self._end_value()
        if tag in (CLOSE, KEY):  # </arg_value> was forgotten
            events = self._end_value()
            return [*events, *self._in_between(text, tag)]
        if self._streams:
            return [self._more(_quoted(text)[1:-1])]
        self._value += text
        return []

    def _end_value(self) -> list[Event]:
        self._given.append(self._key)
        self._state = "between"
        text = '"' if self._streams else _json_of(self._value, self._is_json)
        return [self._more(text)]

    def _end(self) -> list[Event]:
        events = [self._more("}" if self._given else "{}"), Event(ENDED, "", self.calls - 1)]
        self._state, self._raw = "text", ""
        self.complete += 1
        return events

    def _more(self, text: str) -> Event:
        return Event(ARGUMENTS, text, self.calls - 1)

    def _is_json(self, value: Any) -> bool:
        """Whether the open value, which can be read as JSON, is meant so and not as a text."""
        strict = self._strict.get(self._name)
        return strict.holds(self._key, value) if strict else _typed(value, self._types())

    def _types(self) -> set[str]:
        properties = self._tools.get(self._name, {}).get("properties")
        schema = properties.get(self._key) if isinstance(properties, dict) else None
        return _types(schema, 8)


class _TagFinder:
    """Cuts text at tags that no token stands for; a beginning of one is held back."""

    def __init__(self, tags: list[str]) -> None:
        self.tags = frozenset(tags)
        self._pattern = re.compile("|".join(map(re.escape, tags))) if tags else None
        self._held = ""

    def push(self, text: str) -> list[str]:
        """Texts and tags, in order."""
        if self._pattern is None:
            return [text]
        text = self._held + text
        parts, at = [], 0
        for match in self._pattern.finditer(text):
            parts += [text[at : match.start()], match[0]]
            at = match.end()
        rest = text[at:]
        start = rest.rfind("<")
        partial = start >= 0 and any(tag.startswith(rest[start:]) for tag in self.tags)
        self._held = rest[start:] if partial else ""
        parts.append(rest[:start] if partial else rest)
        return [part for part in parts if part]

    def finish(self) -> list[str]:
        """What was held back."""
        held, self._held = self._held, ""
        return [held] if held else []


def _types(schema: Any, depth: int) -> set[str]:
    """The JSON types a schema allows, as far as it says; empty: anything."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {k for k in kind if isinstance(k, str)}
    if isinstance(schema.get("enum"), list):
        return {_type_of(value) for value in schema["enum"]}
    branches = [schema.get(word) for word in ("anyOf", "oneOf")]
    found = [_types(s, depth - 1) for b in branches if isinstance(b, list) for s in b]
    return set().union(*found) if all(found) else set()


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {type(None): "null", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _json_of(text: str, allowed: Callable[[Any], bool]) -> str:
    """A value as JSON: the model's own where it is valid and allowed, else its text."""
    try:
        value = json.loads(text, parse_constant=no_number, parse_float=finite)
    except (ValueError, RecursionError):
        return _quoted(text)
    return text.strip() if allowed(value) else _quoted(text)


def _typed(value: Any, types: set[str]) -> bool:
    """Whether JSON of a value is meant so, and not as a text, where these types are allowed."""
    kind = _type_of(value)
    if "string" in types:
        return kind != "string" and (kind in types or (kind == "integer" and "number" in types))
    return bool(types) or kind != "string"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _names(value: Any) -> set[str]:
    """The names in a schema's `required` list or `properties` object."""
    found = value if isinstance(value, (list, dict)) else ()
    return {name for name in found if isinstance(name, str)}
