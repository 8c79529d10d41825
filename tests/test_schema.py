"""JSON and JSON Schema as grammars: what they take is JSON, and valid by the schema."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import given, settings
from walks import any_schema, walk

from colibri import grammar
from colibri.errors import FormError, UsageError
from colibri.grammar import NEVER, Alt, Matcher, Node, Ref, Repeat, Seq, text
from colibri.json_grammar import NUMBER, OBJECT, VALUE, answer, literal
from colibri.schema import compile_schema


def takes(node: Node, written: str | bytes) -> bool:
    """Whether this is a whole text of the grammar."""
    matcher = Matcher(node)
    data = written.encode() if isinstance(written, str) else written
    return None in matcher.after(matcher.start, data)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15) + 1, 10**15 - 1) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=60, deadline=None)
@given(value=VALUES, ascii=st.booleans(), indent=st.sampled_from([None, 0, 1, 4]))
def test_json_as_it_is_written(value, ascii, indent):
    """Whatever Python writes as JSON is taken, compact or indented, escaped or not."""
    written = json.dumps(value, ensure_ascii=ascii, indent=indent)
    try:
        written.encode()
    except UnicodeEncodeError:
        return
    assert takes(VALUE, written) or "\\ud" in written  # half a surrogate pair is no character


@pytest.mark.parametrize("seed", range(40))
def test_any_walk_is_json(seed):
    """Any way through the grammar of objects ends in a JSON object in UTF-8."""
    assert isinstance(json.loads(walk(Matcher(OBJECT), seed).decode()), dict)


@pytest.mark.parametrize("written", [
    "", "{", "{,}", '{"a"}', '{"a":}', '{"a":1,}', "{a:1}", "{'a':1}", "[1]", '{"a":01}',
    '{"a":+1}', '{"a":.5}', '{"a":1.}', '{"a":1e}', '{"a":NaN}', '{"a":"\n"}', '{"a":"\\x"}',
    '{"a":"\\u12"}', '{"a":"\\ud800"}', '{"a":"\\udc00"}', b'{"a":"\x80"}', b'{"a":"\xed\xa0\x80"}',
    b'{"a":"\xc0\x80"}', b'{"a":"\xf4\x90\x80\x80"}', "{}{}", "{} ", "{\n\n\n}",
    '{"a":12345678901234567}',
])  # fmt: skip
def test_what_is_no_json_object(written):
    """Texts that are no JSON, or more white space or digits than are of use, are not taken."""
    assert not takes(OBJECT, written)


def test_numbers():
    """All of JSON's forms of a number."""
    for written in ("0", "-0", "10", "-1.50", "2e3", "2E-03"[:5], "0.1e+9"):
        assert takes(NUMBER, written), written


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "minItems": 1, "maxItems": 2},
        "boss": {"description": "or none", "anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "boss"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "all optional": {
        "properties": {"a": {"type": "null"}, "b": {"const": 1}, "c": {"type": "null"}}
    },
    "named only": {"required": ["x", "y"]},
    "map": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
    "nothing in it": {"type": "object", "additionalProperties": False},
    "all of": {
        "allOf": [
            {"$ref": "#/$defs/base"},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "$defs": {"base": {"type": "object", "properties": {"a": {"type": "number"}}}},
    },
    "the same property twice": {
        "allOf": [
            {"properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"properties": {"a": {"maxLength": 2}}},
        ]
    },
    "a reference with more": {
        "$ref": "#/$defs/base", "required": ["a"],
        "$defs": {"base": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
    },
    "what any of them has, too": {
        "type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"],
        "anyOf": [{"required": ["b"]}, {"properties": {"c": {"type": "boolean"}}}],
    },
    "tuple": {"prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False,
              "type": "array"},
    "tuple and more": {"prefixItems": [{"type": "null"}], "items": {"const": 1}, "minItems": 3,
                       "maxItems": 4, "type": "array"},
    "a short tuple": {"prefixItems": [{"type": "null"}, {"type": "null"}], "maxItems": 1,
                      "type": "array"},
    "no items": {"type": "array", "items": False},
    "none of them": {"type": "array", "maxItems": 0},
    "of a type": {"type": ["string", "integer"], "enum": [1, "1", 2.5, None, True]},
    "escaped": {"enum": ["a\"b\\", "\n", {"k": [1, None]}, "\ud800"]},
    "anything": True,
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_walk_is_valid(name):
    """Any way through a schema's grammar ends in a value that is valid by the schema."""
    matcher = Matcher(compile_schema(SCHEMAS[name], "schema", strict=True))
    check, seen = jsonschema.Draft202012Validator(SCHEMAS[name]), set()
    for seed in range(25):
        written = walk(matcher, seed).decode()
        check.validate(json.loads(written))
        seen.add(json.dumps(json.loads(written)))
    assert len(seen) > 1 or name.startswith(("n", "a short", "tuple"))


NAMED_A = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}


@pytest.mark.parametrize("schema", [
    {"enum": ["a", "abc", 1, [1], [True], {"a": 1}, {}], "minLength": 2, "items": {"const": 1.0},
     "required": ["a"]},
    {"const": "abc", "anyOf": [{"maxLength": 3}, {"type": "null"}]},
    {"allOf": [{"enum": [1, "x", True]}, {"enum": [True, "x", 2]}]},
    {"allOf": [{"$ref": "#/$defs/a", "minLength": 3}, {"maxLength": 4}], "$defs": {"a": {
        "type": "string", "maxLength": 9}}},
    {"allOf": [{"type": ["number", "null"]}, {"type": ["integer", "string"]}]},
    {"allOf": [NAMED_A, {"properties": {"b": {"type": "null"}}}]},
    {"allOf": [{"properties": {"a": {}, "b": {"maxLength": 2}}},
               {"additionalProperties": {"type": "string"}}], "type": "object"},
    NAMED_A | {"anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
    {"allOf": [{"prefixItems": [{}, {}]}, {"items": {"type": "null"}}], "type": "array"},
    {"allOf": [{"anyOf": [{"const": n} for n in some]} for some in ("abc", "bcd")]},
    {"type": ["array", "null"], "items": False},
    {"type": ["array", "null"], "items": False, "minItems": 1},
    {"properties": {"a": False, "b": True}, "type": "object"},
    {"properties": {"a/b~c%d": {"type": "boolean"}}, "required": ["a/b~c%d", "e"], "items": False,
     "additionalProperties": {"$ref": "#/properties/a~1b~0c%25d"}, "type": "object"},
    {"prefixItems": [{"type": "null"}], "items": {"$ref": "#/prefixItems/0"}, "type": "array"},
    {"oneOf": [{"type": "integer"}, {"type": "string"}, {"const": 1.5}]},
    {"oneOf": [{"properties": {"k": {"const": k}}, "required": ["k"], "type": "object"}
               for k in "abc"]},
    {"oneOf": [NAMED_A, NAMED_A | {"properties": {"b": {}}, "required": ["b"]}]},
    {"type": "object", "properties": {"k": {"$ref": "#", "type": "object"}}},
])  # fmt: skip
def test_keywords_together(schema):
    """Keywords that have to do with each other all hold."""
    matcher = Matcher(compile_schema(schema, "schema", strict=True))
    check = jsonschema.Draft202012Validator(schema)
    for seed in range(25):
        check.validate(json.loads(walk(matcher, seed).decode()))


def test_schemas_by_chance():
    """Whatever a schema says, it is refused, or any way through its grammar is valid by it."""
    taken = 0
    for seed in range(300):
        chance = random.Random(seed)
        schema = {"$defs": {name: any_schema(chance, 2) for name in "abc"}, "type": "object"}
        more = any_schema(chance)
        schema |= {} if isinstance(more, bool) else more
        try:
            matcher = Matcher(compile_schema(schema, "schema", strict=True))
        except UsageError:
            continue
        taken += 1
        check = jsonschema.Draft202012Validator(schema)
        for walked in range(4):
            value = json.loads(walk(matcher, walked).decode())
            with contextlib.suppress(RecursionError):  # not if a schema is what it is itself
                assert check.is_valid(value), schema
    assert taken > 100


def test_optional_properties():
    """Properties may be left out unless they are required, and keep their order."""
    node = compile_schema(PERSON, "schema")
    good = ('{"name":"x","boss":null}', '{"name": "x", "age": 3, "boss": null}',
            '{"name":"x","tags":["é","a"],"boss":{"name":"y","boss":null}}')  # fmt: skip
    for written in good:
        assert takes(node, written)
    bad = ('{"name":"x"}', '{"boss":null}', '{"boss":null,"name":"x"}', "{}", "null",
           '{"name":"","boss":null}', '{"name":"abcdef","boss":null}',
           '{"name":"x","tags":[],"boss":null}', '{"name":"x","boss":null,"z":1}')  # fmt: skip
    for written in bad:
        assert not takes(node, written)


@pytest.mark.parametrize(("schema", "words"), [
    ({"items": {"type": "text"}}, r'^here\.items\.type is "text"; there are string,'),
    ({"type": []}, r"^here\.type is \[\]"),
    ({"properties": {"a": {"$ref": "#/b"}}}, r'^here\.a\.\$ref is "#/b", which is not in'),
    ({"$ref": ["x"]}, r"^here\.\$ref is \[\"x\"\]"),
    ({"anyOf": []}, r"^here\.anyOf is not a list of at least one"),
    ({"enum": [1], "type": "string"}, "^here allows no value, or none that ever ends"),
    ({"minLength": "1"}, r'^here\.minLength is "1"; expected 0 or more'),
    ({"minItems": 2, "maxItems": 1}, r"^here\.maxItems is less than minItems"),
    ({"properties": []}, r"^here\.properties is not an object"),
    ({"required": [1]}, r"^here\.required is not a list of names"),
    ({"items": [{}]}, r"^here\.items is \[\{\}\]; expected a JSON Schema"),
    ({"properties": {"a": {"not": {}}}}, r"^here\.a\.not cannot be kept to; leave it out"),
    ({"allOf": [{"$ref": "#"}, {"minLength": 1}]}, "nested too deeply, or holds itself in allOf"),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/a"}, {"minLength": 1}]},
     "nested too deeply, or holds itself in allOf"),
    ({"required": ["a"], "additionalProperties": False, "type": "object"}, "^here allows no value"),
    ({"items": False, "minItems": 1, "type": "array"}, "^here allows no value"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "^here .* none that ever ends"),
    ({"$ref": "#"}, "^here .* none that ever ends"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "^here allows no value"),
    ({"allOf": [{"minLength": 3}, {"maxLength": 2}], "type": "string"}, "^here allows no value"),
    (False, "^here allows no value"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "^here.oneOf has options that may both"),
    ({"allOf": [{"required": 5}, {"required": ["a"]}]}, "^here.required is not a list of names"),
    ({"allOf": [{"properties": 5}, {"properties": {}}]}, "^here.properties is not an object"),
    ({"enum": [float("inf")], "type": "number"}, "^here lists a number that JSON cannot hold"),
    ({"properties": {"a": {"$id": "x"}}}, r"^here.a.\$id cannot be kept to"),
    ({"enum": [*range(3000)], "anyOf": [{"enum": [n, -n]} for n in range(1, 3000)]},
     "is too much to be looked through"),
])  # fmt: skip
def test_schemas_that_are_refused(schema, words):
    """What is no schema, or cannot be kept to, is refused by its place."""
    with pytest.raises(UsageError, match=words):
        compile_schema(schema, "here", strict=True)


def test_what_is_passed_over():
    """Unless it is strict, keywords that cannot be kept to are left to the model."""
    assert takes(compile_schema({"type": "string", "not": {}}, "here"), '"b"')


def test_large_and_deep_schemas():
    """A schema that means more than anyone can, or is too deep, is refused in good time."""
    doubling: Any = {"type": "null"}
    for _ in range(40):
        doubling = {"allOf": [{"properties": {n: doubling, "c": doubling}} for n in "ab"]}
    assert takes(compile_schema(doubling, "here"), '{"a":{"b":{}}}')
    many = {"prefixItems": [{"items": {"minItems": n}} for n in range(10_001)]}
    with pytest.raises(UsageError, match="has more than 20,000 parts"):
        compile_schema(many, "here")
    deep: Any = {"type": "null"}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(UsageError, match="nested too deeply"):
        compile_schema(deep, "here")


def test_a_type_is_looked_at_once():
    """However often a schema names a type, a text may be of it in one way."""
    node = compile_schema({"type": ["string", "null"] * 1000}, "here", strict=True)
    assert isinstance(node, Alt) and len(node.options) == 2


def test_a_grammar_that_leads_back_to_itself():
    """A reference to itself adds nothing, and does not hang."""
    loop = Ref()
    loop.target = Alt((loop, text("x")))
    assert takes(loop, "x") and not takes(loop, "")


def test_too_many_ways(monkeypatch):
    """A text that can be read in more ways than can be followed is an error, no hang."""
    monkeypatch.setattr(grammar, "_MOST_WAYS", 100)
    matcher = Matcher(Seq((text("x"), Alt(tuple(text(str(n)) for n in range(100))))))
    with pytest.raises(FormError, match="too many ways"):
        matcher.after(matcher.start, b"x")


def test_too_much_work_for_one_token(monkeypatch):
    """A token may take so much work; the next one may as much again."""
    monkeypatch.setattr(grammar, "_MOST_WORK", 100)
    matcher = Matcher(Repeat(text("x"), 0, 1000))
    state = matcher.after(matcher.start, b"x" * 10)
    matcher.refresh()
    state = matcher.after(state, b"x" * 10)
    with pytest.raises(FormError, match="too many ways"):
        matcher.after(state, b"x" * 100)


def test_memory_is_bounded(monkeypatch):
    """What a long text leads to is forgotten in time, and nothing is different for it."""
    monkeypatch.setattr(grammar, "_MOST_KNOWN", 300)
    matcher = Matcher(answer(compile_schema({"type": "string", "maxLength": 2000}, "here")))
    state = matcher.after(matcher.start, b'"')
    for _ in range(2000):
        matcher.refresh()
        state = matcher.after(state, b"x")
        assert len(matcher._known) + len(matcher._steps) < 400
    assert matcher.firsts(state) == set(b'"') and matcher.after(matcher.start, b'"')


def test_many_or_long_words():
    """Lists of words are followed letter by letter, and long texts no further than they came."""
    words = [f"word {n}" for n in range(5000)] + ["", "word", "x" * 20_000]
    matcher = Matcher(literal(*words))
    state = matcher.after(matcher.start, b'"wor')
    assert len(state) == 1 and matcher.firsts(state) == set(b"d")
    assert takes(matcher.root, '"word 4999"') and takes(matcher.root, '""')
    assert not takes(matcher.root, '"wor"') and not takes(matcher.root, '"word 5000"')
    long = Matcher(text("x" * 20_000))
    assert len(long._known) < 10 and None in long.after(long.start, b"x" * 20_000)


def test_what_never_ends_is_taken_out():
    """Options that lead nowhere, or round and round, are none; without any there is no grammar."""
    loop = Ref()
    loop.target = Seq((text("("), loop, text(")")))
    node = Alt((text("x"), Seq((text("y"), loop)), NEVER, Repeat(Seq((text("z"), loop)))))
    assert grammar.prune(node) and takes(node, "x") and takes(node, "")
    matcher = Matcher(node)
    assert matcher.firsts(matcher.start) == set(b"x")
    assert not grammar.prune(loop) and not grammar.prune(Repeat(loop, 1))


def test_counts():
    """A part that comes two to three times; states that were met are the same objects."""
    node = answer(Repeat(text("ab"), 2, 3))
    assert [takes(node, "ab" * n) for n in range(5)] == [False, False, True, True, False]
    matcher = Matcher(VALUE)
    inside = matcher.after(matcher.start, b'"x')
    assert matcher.after(inside, b"yz") is inside
