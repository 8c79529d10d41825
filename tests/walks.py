"""Schemas, and texts of grammars, by chance."""

from __future__ import annotations

import random
from typing import Any

from colibri.grammar import Matcher


def letters(matcher: Matcher, seed: int) -> list[int]:
    """A text of the grammar, by chance; short of dead ends, which none has."""
    chance, state, found = random.Random(seed), matcher.start, []
    matcher.refresh()
    while not (None in state and (len(state) == 1 or chance.random() < 0.2)):
        firsts = sorted(matcher.firsts(state))
        assert firsts
        ends = [each for each in firsts if each > 255 or each in b'"}],.0truefalsn']
        found.append(chance.choice(ends if ends and chance.random() < 0.6 else firsts))
        state = matcher.after(state, found[-1:])
    return found


def walk(matcher: Matcher, seed: int) -> bytes:
    """The same for texts of bytes alone."""
    return bytes(letters(matcher, seed))


def any_schema(chance: random.Random, deep: int = 0) -> Any:
    """Some schema, of keywords that may have nothing to do with each other."""

    def inner() -> Any:
        return any_schema(chance, deep + 1)

    def some(make: Any, most: int = 3) -> list[Any]:
        return [make() for _ in range(chance.randint(1, most))]

    def value() -> Any:
        return chance.choice([0, 1, 1.0, 2.5, True, None, "", "ab", [], ["a", 1], {"a": 1}, {}])

    def types() -> str:
        return chance.choice(["string", "integer", "number", "null", "object", "array"])

    def ref() -> str:
        return chance.choice(["#", "#/$defs/a", "#/$defs/b", "#/$defs/c"])

    keywords: dict[str, tuple[float, Any]] = {
        "type": (0.5, lambda: chance.choice([types(), [*{*some(types)}]])),
        "enum": (0.1, lambda: some(value, 5)), "const": (0.05, value), "$ref": (0.1, ref),
        "required": (0.2, lambda: chance.choice([[], ["a"], ["b", "c"]])),
        "pattern": (0.05, lambda: chance.choice(["^a", "^[^a-y]{1,2}$", "^(a|b)*$", ""])),
        **{name: (0.08, lambda: chance.randrange(4))
           for name in ("minItems", "maxItems", "minLength", "maxLength")},
    }  # fmt: skip
    if deep < 3:
        keywords |= {name: (0.12, lambda: some(inner)) for name in ("anyOf", "oneOf", "allOf")}
        keywords |= {
            "properties": (0.35, lambda: {name: inner() for name in {*chance.choices("abc", k=2)}}),
            "additionalProperties": (0.25, inner), "items": (0.2, inner),
            "prefixItems": (0.15, lambda: some(inner)),
        }  # fmt: skip
    if chance.random() < 0.08:
        return chance.random() < 0.6
    return {name: make() for name, (p, make) in keywords.items() if chance.random() < p}
