"""Patterns: whatever their grammars allow is matched, and what is not matched they do not take."""

from __future__ import annotations

import json
import math
import random
import re
import unicodedata
from collections import deque
from itertools import product

import jsonschema
import pytest

from colibri import grammar, schema_parts
from colibri.characters import ANY, inverse, utf8
from colibri.errors import FormError, UsageError
from colibri.grammar import Matcher
from colibri.pattern import read
from colibri.schema import compile_schema

# Patterns as people write them, each with texts that it matches.
PATTERNS: dict[str, tuple[str, ...]] = {
    r"^[A-Z]{2}\d{4}$": ("AB1234",),
    r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$": ("2024-02-29", "1999-12-31"),
    r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$": ("a.b+c@ex-ample.org",),
    r"^[\w\.-]+@([\w-]+\.)+[\w-]{2,4}$": ("a-b@c.d.com",),
    r"^SKU-[A-Z0-9]{3,8}(?:-[a-z])?$": ("SKU-A1B", "SKU-ABC123-x"),
    r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-([\da-z-]+(?:\.[\da-z-]+)*))?(?:\+[\w.]+)?$":
        ("1.0.20", "0.1.2-rc.1", "1.2.3-a+b_7"),
    r"^#(?:[0-9a-fA-F]{3}){1,2}$": ("#fff", "#00Ff9c"),
    r"^\+?1?[\s.-]?\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}$": ("+1 (555) 123-4567", "555.123.4567"),
    r"^https?:\/\/[^\s\/$.?#].[^\s]*$": ("http://a.b/c?d#e", "https://例え.jp"),
    r"^[a-z0-9]+(?:-[a-z0-9]+)*$": ("a-slug-42",),
    r"^(?:[01]\d|2[0-3]):[0-5]\d$": ("23:59",),
    r"^$|^N\/A$|\d{3,}": ("", "N/A", "about 1000 km", "999"),
    r"^x|y$": ("x", "xab", "y", "aby"),
    r"(^|,)\d+(,|$)": ("1", "a,22", "7,b", "a,1,b"),
    r"cat|dog": ("cat", "hotdogs", "a\ncat"),
    r"[A-Z]": ("A", "aBc", 'a"B\\'),
    r"": ("", "anything\n"),
    r"^[^\n]+\n.*$": ("a\nb", "é\n"),
    r'^["\\]{2}[^"\\]\x41\u00e9$': ('"\\xAé', '\\"aAé'),
    r"^[äöüß€😀-😎]+$": ("üß", "€😃"),
    r"^\S+\s\D\W?$": ("é x", "ab\t-!"),
    r"^[^\x00-\uffff]?[\u0000-\u001f]*\t$": ("😀\x01\t", "\t"),
    r"^[-a-c\]^.]*?[\d-]{1,2}?$": ("a-]^.b9", "-", "5-"),
    r"^.{2,5}$": ("ab", "éé€😀x"),
    r"^(?<year>\d\d)(\s*;\s*\w+){0,3}}?$": ("24", "24 ;a; b}"),
}  # fmt: skip


def written(said: str) -> bytes:
    return json.dumps(said, ensure_ascii=False).encode()


def walk(matcher: Matcher, seed: int) -> bytes:
    """A text of the grammar: some steps by chance, and then the shortest way to an end."""
    chance, state, found = random.Random(seed), matcher.start, b""
    matcher.refresh()
    for _ in range(chance.randrange(16)):
        firsts = sorted(matcher.firsts(state))
        if not firsts:
            break
        found += bytes([chance.choice(firsts)])
        state = matcher.after(state, found[-1:])
    ways, seen = deque([(state, found)]), {state}
    while None not in (way := ways.popleft())[0]:
        firsts = sorted(matcher.firsts(way[0]))
        for letter in chance.sample(firsts, len(firsts)):
            after = matcher.after(way[0], (letter,))
            if after not in seen:
                seen.add(after)
                ways.append((after, way[1] + bytes([letter])))
    return way[1]


def spoiled(said: str, chance: random.Random) -> str:
    """A text with one change."""
    at = chance.randrange(len(said) + 1)
    return (
        said[:at]
        + chance.choice(["", "a", "Z", "0", "-", '"', "\\", "\n", "é", "😀"])
        + (said[at + chance.randrange(2) :])
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern):
    """Any way through the grammar is matched, as JSON and bare; what is not matched is not taken,
    and what Python and ECMA-262 read alike is taken if it is matched."""
    schema = {"type": "string", "pattern": pattern}
    quoted = compile_schema(schema, "here", strict=True)
    bare = read(pattern).node(bare=True)
    python = re.compile(pattern.replace("(?<", "(?P<"))
    check = jsonschema.Draft202012Validator(schema | {"pattern": python.pattern})
    as_json, as_text = Matcher(quoted), Matcher(bare)
    chance, said = random.Random(pattern), [*PATTERNS[pattern]]
    for seed in range(12):
        check.validate(json.loads(walk(as_json, seed).decode()))
        said.append(walk(as_text, seed).decode())
        assert python.search(said[-1]) and as_text.takes(said[-1].encode())
    assert all(as_json.takes(written(each)) for each in said)
    seen = set()
    for each in said * 5:
        changed = spoiled(each, chance)
        taken = as_text.takes(changed.encode())
        assert taken == as_json.takes(written(changed))
        found = bool(python.search(changed))
        seen.add(found)
        assert found or not taken, changed
        if changed.isascii() and "\n" not in changed and not {*changed} & {*"\x1c\x1d\x1e\x1f"}:
            assert taken == found, changed
    assert seen == {True, False} or pattern in ("", "[A-Z]")


def any_of(chance: random.Random, deep: int = 0) -> str:
    """Some pattern over a, b and digits."""
    kind = chance.random()
    if deep > 3 or kind < 0.4:
        return chance.choice(["a", "b", ".", "[ab]", "[^a]", r"\d", "^", "$", "^a", "b$", ""])
    one, other = any_of(chance, deep + 1), any_of(chance, deep + 1)
    if kind < 0.6:
        return one + other
    if kind < 0.7:
        return f"{one}|{other}"
    if kind < 0.85:
        return f"({one}|{other})"
    return f"(?:{one}){chance.choice(['*', '+', '?', '{2}', '{1,2}', '{0}', '{2,}?'])}"


TEXTS = ["".join(some) for size in range(5) for some in product("ab1", repeat=size)]


def test_patterns_by_chance():
    """A pattern is refused, or it takes just what Python says; if limited, what is so long."""
    taken = cut = 0
    for seed in range(200):
        chance = random.Random(seed)
        pattern = any_of(chance)
        try:
            part = read(pattern)
        except UsageError:
            continue
        taken += 1
        matcher, python = Matcher(part.node(bare=True)), re.compile(pattern)
        found = [text for text in TEXTS if matcher.takes(text.encode())]
        assert found == [text for text in TEXTS if python.search(text)], pattern
        least, most = chance.choice([(0, 2), (1, 3), (2, 2), (3, math.inf), (0, 0)])
        limited = part.limited(least, most)
        if limited:
            cut += 1
            matcher = Matcher(limited.node(bare=True))
            fits = [text for text in TEXTS if matcher.takes(text.encode())]
            assert fits == [text for text in found if least <= len(text) <= most], pattern
    assert taken > 100 and cut > 25


@pytest.mark.parametrize("name", "dDwWsS")
def test_classes(name):
    """What a class takes is in it by ECMA-262 and by Unicode; exactly read, it is ECMA-262's."""
    spaces = "\t\n\v\f\r \u00a0\ufeff\u2028\u2029" + "".join(
        char for char in map(chr, range(0x10000)) if unicodedata.category(char) == "Zs"
    )
    words = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
    ecma = {"d": "0123456789", "w": words, "s": spaces}[name.lower()]
    sure, exact = (Matcher(read(f"^\\{name}$", e).node(bare=True)) for e in (False, True))
    seen = 0
    for char in map(chr, (*range(0x800), *range(0x1680, 0x3100), 0xFEFF, 0xFF11, 0x1D7CE)):
        assert exact.takes(char.encode()) == ((char in ecma) == name.islower())
        if sure.takes(char.encode()):
            seen += 1
            assert re.match(f"\\{name}", char) and exact.takes(char.encode())
    assert seen == {"d": 10, "w": 63, "s": len({*spaces}) - 1, "W": 65}.get(name, seen) and seen


def test_sets_of_characters():
    """Any set of characters takes its own, in UTF-8, and no others."""
    edges = [0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    for seed in range(40):
        chance = random.Random(seed)
        places = [chance.choice([*edges, chance.randrange(0x110000)]) for _ in range(8)]
        ends = sorted(places)
        ranges = inverse(inverse(zip(ends[::2], ends[1::2], strict=True)))
        matcher = Matcher(utf8(ranges))
        for code in {*edges, *ends, *(max(at - 1, 0) for at in ends), *range(0x60, 0x20000, 997)}:
            within = any(a <= code <= b for a, b in ranges)
            assert matcher.takes(chr(code).encode("utf-8", "surrogatepass")) == within
            assert not within or not 0xD800 <= code < 0xE000


def test_any_character_is_made_once():
    """Any character, which most patterns begin and end with, is one grammar that all share."""
    assert utf8(inverse(())) is utf8(ANY)


@pytest.mark.parametrize(("pattern", "words"), [
    ("a(?=b)", "a look-ahead, at character 2"),
    ("(?!b)", "a look-ahead, at character 1"),
    ("(?<=b)", "a look-behind, at"),
    ("(?<!b)", "a look-behind, at"),
    ("(?i)a", r"a group that is neither \(\?: nor \(\?<name>, at character 1"),
    ("(?P<a>b)", "a group that is neither"),
    (r"(a)\1", "a back-reference, at character 4"),
    (r"(?<a>b)\k<a>", "a back-reference, at"),
    (r"\ba", r"a \\b, at"),
    (r"a\B", r"a \\B, at"),
    (r"[\b]", r"a \\b, at character 2"),
    (r"\p{L}", "a Unicode property, at"),
    (r"[^\P{L}]", "a Unicode property, at character 3"),
    (r"a\Z", "an escape of no known meaning, at character 2"),
    (r"\u12", "an escape of no known meaning"),
    (r"\u{61}", "an escape of no known meaning"),
    ("a\\", "an escape of no known meaning"),
    (r"\ud83d\ude00", "half of a surrogate pair, at character 1"),
    ("\ud83d", "half of a surrogate pair, at character 1"),
    ("a^b", r"a \^ that is not at the beginning, at character 2"),
    ("a(^b|c)", r"a \^ that is not at the beginning, at character 3"),
    ("(^a)*", r"a \^ that is not at the beginning"),
    ("(a$|b)c", r"a \$ that is not at the end, at character 3"),
    ("^*a", "a quantifier behind an anchor, at character 2"),
    ("*a", "nothing to repeat, at character 1"),
    ("a++", "nothing to repeat, at character 3"),
    ("a{2,1}", "a quantifier whose bounds are the wrong way round, at character 2"),
    ("a{,2}", r"a \{ that is no quantifier, at character 2"),
    ("a)", r"a \) without its \(, at character 2"),
    ("a(b", r"a \( that is never closed, at character 2"),
    ("a[b", r"a \[ that is never closed, at character 2"),
    ("[a-", r"a \[ that is never closed, at character 1"),
    ("[]a]", "a class of no characters, at character 1"),
    ("[^]", "a class of no characters"),
    ("[b-a]", "a range whose ends are the wrong way round, at character 2"),
    ("(" * 51 + ")" * 51, "too many groups in each other, at character 51"),
    ("a" * 10_001, "more than 10,000 characters"),
    ("(a{1000}){1000}", "repetitions of repetitions, too many or too long"),
    ("((.{9999}){9999}){9999}", "repetitions of repetitions, too many or too long"),
    (5, "it is no text"),
])  # fmt: skip
def test_patterns_that_are_refused(pattern, words):
    """What is no pattern, or not regular, is refused by its place if strict, else passed over."""
    schema = {"items": {"type": "string", "pattern": pattern}}
    with pytest.raises(UsageError, match=rf"^here\.items\.pattern cannot be kept to: {words}"):
        compile_schema(schema, "here", strict=True)
    assert Matcher(compile_schema(schema, "here")).takes(b'["?"]')


@pytest.mark.parametrize(("schema", "words"), [
    ({"pattern": "^a+-b+$", "maxLength": 9}, "^here has a pattern beside its lengths, which"),
    ({"pattern": "a", "minLength": 2}, "^here has a pattern beside its lengths, which cannot"),
    ({"pattern": "^a$", "format": "date"}, "^here has a pattern beside its format, which cannot"),
    ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "has two of pattern, which cannot both"),
    ({"pattern": "^a{3}$", "maxLength": 2}, "^here allows no value"),
    ({"pattern": r"^[^\s\S]$"}, "^here allows no value"),
    ({"enum": ["b", 1], "pattern": "^a$", "type": "string"}, "^here allows no value"),
    ({"patternProperties": {"a": {}}}, "^here.patternProperties cannot be kept to; leave it out"),
    ({"propertyNames": {"pattern": "a"}}, "^here.propertyNames cannot be kept to; leave it out"),
])  # fmt: skip
def test_what_cannot_be_kept_to_together(schema, words):
    """Keywords that cannot be joined are refused if strict, and what allows nothing always is."""
    with pytest.raises(UsageError, match=words):
        compile_schema(schema, "here", strict=True)


@pytest.mark.parametrize("schema", [
    {"pattern": "^[a-z][a-z0-9_]*$", "minLength": 3, "maxLength": 6},
    {"pattern": "^(?:[ab]+|(?:cd)*|x{1,9})$", "minLength": 3, "maxLength": 7},
    {"pattern": "^é", "maxLength": 4},
    {"pattern": "^[a-z]{2,4}-[0-9]{3}$", "minLength": 6, "maxLength": 99},
    {"type": ["string", "null"], "pattern": "^a$", "minLength": 1},
    {"enum": ["é1", "a2", 5, None, "\ud8001"], "pattern": r"\W\d$"},
    {"const": 5, "pattern": "^a$"},
    {"allOf": [{"pattern": "^a+$"}, {"pattern": "^a+$", "type": "string"}]},
    {"oneOf": [{"const": "ab"}, {"enum": ["ab", "b"], "pattern": "^b"}]},
])  # fmt: skip
def test_patterns_beside_other_keywords(schema):
    """Lengths cut what is repeated, lists keep what matches, and types are as they were."""
    matcher, seen = Matcher(compile_schema(schema, "here", strict=True)), set()
    for seed in range(30):
        said = json.loads(walk(matcher, seed).decode())
        seen.add(said)
        limits = {name: part for name, part in schema.items() if name != "pattern"}
        jsonschema.Draft202012Validator(limits).validate(said)
        if isinstance(said, str) and "pattern" in schema:
            assert re.search(schema["pattern"], said, re.ASCII)
    assert len(seen) > 1 or "const" in schema or "enum" in schema


def test_patterns_that_are_too_much(monkeypatch):
    """Repetitions of repetitions, or many long patterns, end in an error, not in a hang."""
    many = {"prefixItems": [{"pattern": f"{n:090}"} for n in range(20)]}
    monkeypatch.setattr(schema_parts, "_MOST_LOOKS", 5_000)
    with pytest.raises(UsageError, match="is too much to be looked through"):
        compile_schema(many, "here", strict=True)
    monkeypatch.undo()
    monkeypatch.setattr(grammar, "_MOST_WORK", 20_000)
    nested = {"pattern": "^(a{0,440}){0,440}$"}
    matcher = Matcher(compile_schema(nested, "here", strict=True))
    with pytest.raises(FormError, match="in too many ways"):
        matcher.after(matcher.start, b'"' + b"a" * 2000)
    listed = nested | {"enum": ["a" * n for n in range(300)]}
    with pytest.raises(UsageError, match=r"^here\.pattern: the form can be read in too many ways"):
        compile_schema(listed, "here", strict=True)
