"""GLM's tool calls: parsed as tokens come, exact to the letter, and never half."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.answer import MARK, TEXT, Piece
from colibri.server.reply import Delta, Whole
from colibri.server.tools import (
    ARGUMENTS,
    BROKEN,
    CALLED,
    CLOSE,
    ENDED,
    KEY,
    KEY_END,
    OPEN,
    SAID,
    TAGS,
    VALUE,
    VALUE_END,
    Event,
    ToolParser,
    mended,
)  # fmt: skip

TOOLS = {
    "write": {
        "properties": {
            "path": {"type": "string"}, "text": {"type": "string"}, "lines": {"type": "integer"},
            "options": {"type": "object"}, "mode": {"enum": ["a", "w"]},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "either": {"type": ["string", "number"]}, "free": {},
        },
        "required": ["path"],
    },
    "now": {"properties": {}},
}  # fmt: skip


def call(name: str, **arguments: str) -> str:
    """A call as the model writes it."""
    pairs = (f"{KEY}{k}{KEY_END}{VALUE}{v}{VALUE_END}" for k, v in arguments.items())
    return f"{OPEN}{name}{''.join(pairs)}{CLOSE}"


def as_pieces(text: str, tokens: bool) -> list[Piece]:
    """Tags as marks, the rest as text letter by letter; or all of it as text."""
    pieces: list[Piece] = []
    while text:
        tag = next((t for t in TAGS if tokens and text.startswith(t)), None)
        pieces.append(Piece(MARK, tag) if tag else Piece(TEXT, text[0]))
        text = text[len(pieces[-1].text) :]
    return pieces


def events_of(pieces: Iterable[Piece], tokens: bool, stopped: bool = True) -> list[Event]:
    """Everything a parser says."""
    parser = ToolParser(TOOLS, TAGS if tokens else ())
    return [e for piece in pieces for e in parser.push(piece)] + parser.finish(stopped)


def parsed(text: str, tokens: bool = True, stopped: bool = True) -> tuple[str, list[tuple]]:
    """Content and calls (name, arguments) of an answer that is not streamed."""
    whole = Whole()
    for event in events_of(as_pieces(text, tokens), tokens, stopped):
        said = event.kind == SAID
        whole.add(Delta(content=event.text) if said else Delta(calls=[event]))
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in whole.calls]
    return whole.content, calls


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello.", "Hello.", []),
        ("  Hello. \n", "  Hello. \n", []),
        (call("now"), "", [("now", {})]),
        ("I look.\n" + call("now"), "I look.", [("now", {})]),
        (call("now") + "\n" + call("now"), "", [("now", {}), ("now", {})]),
        (call("write", path="a b.txt", text='"x"\n\\'), "",
         [("write", {"path": "a b.txt", "text": '"x"\n\\'})]),
        (call("write", path="1", lines=" 12 ", options='{"a": [1, null]}'), "",
         [("write", {"path": "1", "lines": 12, "options": {"a": [1, None]}})]),
        (call("write", path="p", limit="null", mode="w"), "",
         [("write", {"path": "p", "limit": None, "mode": "w"})]),
        (call("write", either="12", free="12"), "", [("write", {"either": 12, "free": 12})]),
        (call("write", either="x", free='"q"'), "", [("write", {"either": "x", "free": '"q"'})]),
        (call("write", lines="many", options="{"), "",
         [("write", {"lines": "many", "options": "{"})]),
        (call("write", lines="1e999", free="[-1e999]"), "",
         [("write", {"lines": "1e999", "free": "[-1e999]"})]),
        (call("unknown", k="v", n="1"), "", [("unknown", {"k": "v", "n": 1})]),
        (call("write", either="[1]"), "", [("write", {"either": "[1]"})]),
        (call("write", path="p", text="t").replace(VALUE_END, "", 1), "",
         [("write", {"path": "p", "text": "t"})]),
        (call("now") + " \n", "", [("now", {})]),
        (f"{OPEN}x {call('now')}", f"{OPEN}x", [("now", {})]),
        (call("not a name!"), call("not a name!"), []),
        ("a < b <tool", "a < b <tool", []),
    ],
)  # fmt: skip
def test_calls(text, content, calls, tokens):
    """Names, text raw, JSON as JSON, types from the schema, broken names as text."""
    assert parsed(text, tokens) == (content, calls)


def test_letters_of_a_tag_are_no_tag():
    """Where tags are tokens, the same letters in a value belong to it (and to content)."""
    code = f"print('{VALUE_END}{CLOSE}')"
    pieces = [*as_pieces(f"{OPEN}write{KEY}text{KEY_END}{VALUE}", True),
              *(Piece(TEXT, c) for c in code), *as_pieces(VALUE_END + CLOSE, True)]  # fmt: skip
    text = "".join(e.text for e in events_of(pieces, True) if e.kind == ARGUMENTS)
    assert json.loads(text) == {"text": code}
    assert [e.kind for e in events_of([Piece(TEXT, OPEN)], True)] == [SAID]


@pytest.mark.parametrize(
    ("text", "stopped", "content", "calls"),
    [
        (f"{OPEN}now", True, "", [("now", {})]),
        (f"{OPEN}now", False, f"{OPEN}now", []),
        (f"{OPEN}write", True, f"{OPEN}write", []),
        (call("write", path="p").removesuffix(CLOSE), True, "", [("write", {"path": "p"})]),
        (call("write", path="p").removesuffix(CLOSE), False,
         call("write", path="p").removesuffix(CLOSE), []),
        (call("write", path="p").removesuffix(VALUE_END + CLOSE), True, "",
         [("write", {"path": "p"})]),
        (call("write", text="p").removesuffix(VALUE_END + CLOSE), True,
         call("write", text="p").removesuffix(VALUE_END + CLOSE), []),
        ("So. " + OPEN, False, "So. " + OPEN, []),
        (call("now") + OPEN + "wri", False, OPEN + "wri", [("now", {})]),
        (call("write", path="p").replace(VALUE_END, ""), True, "", [("write", {"path": "p"})]),
    ],
)  # fmt: skip
def test_unclosed_calls(text, stopped, content, calls):
    """Cut off: taken when nothing can be missing, else shown as it was written; never dropped."""
    assert parsed(text, True, stopped) == (content, calls)


def test_all_parameters_given():
    """At the limit a call is whole when its schema knows, or requires, no further parameter."""
    schema = {"one": {"properties": {"a": {"type": "string"}}}}
    parser = ToolParser(schema, TAGS)
    events = [e for p in as_pieces(call("one", a="x").removesuffix(CLOSE), True)
              for e in parser.push(p)] + parser.finish(False)  # fmt: skip
    assert [e.kind for e in events if e.kind != ARGUMENTS] == [CALLED, ENDED]
    parser = ToolParser({"one": schema["one"] | {"required": ["b"]}}, TAGS, "one")
    pieces = as_pieces(call("", a="x").removeprefix(OPEN).removesuffix(CLOSE), True)
    events = [e for p in pieces for e in parser.push(p)] + parser.finish(False)
    assert [e.kind for e in events if e.kind != ARGUMENTS] == [CALLED, BROKEN]


def test_streamed_as_it_comes():
    """The name comes first, then text values letter by letter; what is sent is never taken back."""
    parser = ToolParser(TOOLS, TAGS)
    kinds = []
    for piece in as_pieces(f"{OPEN}write{KEY}path{KEY_END}{VALUE}北京", True):
        kinds += [(e.kind, e.text) for e in parser.push(piece)]
    assert kinds == [(CALLED, "write"), (ARGUMENTS, '{"path": "'), (ARGUMENTS, "北"),
                     (ARGUMENTS, "京")]  # fmt: skip
    assert [e.kind for e in parser.finish(False)] == [BROKEN]


values = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(values, values, st.booleans(), st.lists(st.integers(1, 7), max_size=30))
def test_any_split_gives_the_same(path, text, tokens, sizes):
    """However text is split, arguments come out as they went in."""
    written = "Now. " + call("write", path=path, text=text)
    if not tokens and "<" in path + text:
        return
    pieces, merged = as_pieces(written, tokens), []
    for piece in pieces:  # glue letters together in runs of random sizes
        size = sizes[len(merged) % len(sizes)] if sizes else 1
        last = merged[-1] if merged else None
        if last and last.kind == piece.kind == TEXT and len(last.text) < size:
            merged[-1] = Piece(TEXT, last.text + piece.text)
        else:
            merged.append(piece)
    events = events_of(merged, tokens)
    assert "".join(e.text for e in events if e.kind == SAID) == "Now."
    arguments = "".join(e.text for e in events if e.kind == ARGUMENTS)
    assert json.loads(arguments) == {"path": path, "text": text}


@given(st.lists(st.one_of(st.sampled_from(TAGS), st.text("ab <", max_size=3)), max_size=14),
       st.booleans(), st.booleans())  # fmt: skip
def test_any_nonsense(parts, tokens, stopped):
    """Any order of tags and letters gives valid JSON for each complete call, and no error."""
    events = events_of(as_pieces("".join(parts), tokens), tokens, stopped)
    ended = {e.index for e in events if e.kind == ENDED}
    for index in ended:
        text = "".join(e.text for e in events if e.kind == ARGUMENTS and e.index == index)
        assert isinstance(json.loads(text), dict)
    called = [e.index for e in events if e.kind == CALLED]
    broken = {e.index for e in events if e.kind == BROKEN}
    assert called == sorted(ended | broken) and not ended & broken


def test_a_call_that_broke_off_can_come_back():
    """Wherever a stream's call is cut off, its arguments are mended to what was written of them."""
    text = 'ab "q" \\ \n\u2028北'
    pieces = as_pieces(call("write", path="p", lines="12", text=text, options='{"a": 1}'), True)
    for cut in range(len(pieces)):
        events = events_of(pieces[:cut], True, stopped=False)
        sent = "".join(e.text for e in events if e.kind == ARGUMENTS)
        found = json.loads(mended(sent) or "{}")
        assert found.get("path", "p") in ("", "p") and found.get("lines", 12) in (12, None)
        assert text.startswith(found.get("text", ""))
    for other in ("{}", '{"a": 1}', "", "[", "nonsense", '{"a": }'):
        assert mended(other) == other
