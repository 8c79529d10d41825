"""Answers that call tools, as grammars: GLM's format, in which each tag is a letter of its own.

<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from colibri.grammar import Alt, Node, Over, Repeat, Seq, maybe, one_of, text
from colibri.grammar import OneOf as Letter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
TAGS = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
_THINK, _THINK_END = "<think>", "</think>"

_LETTERS = {tag: 256 + i for i, tag in enumerate((*TAGS, _THINK, _THINK_END))}
OTHER = 256 + len(_LETTERS)  # any other token that is no text
_SPACE = one_of(" \n")
_GAP = Repeat(_SPACE, 0, 2)  # around names and between tags, where nothing needs it
_END = Over()


def letter(tag: str) -> int:
    """What stands for a token that is no text."""
    return _LETTERS.get(tag, OTHER)


def _tag(tag: str) -> Letter:
    return Letter(frozenset((_LETTERS[tag],)))


def _but(*tags: str) -> Letter:
    """Any letter but these tags."""
    return Letter(frozenset(range(OTHER + 1)) - {_LETTERS[tag] for tag in tags})


class Calls:
    """Calls of some tools, whole ones. Their arguments are free.

    `known`: the tags that are tokens; where those of names are not, calls are free altogether.
    """

    def __init__(self, tools: Sequence[str], known: Container[str]) -> None:
        end = _tag(CLOSE) if CLOSE in known else _END
        called: Node = Seq((Repeat(_but(CLOSE)), end))
        if KEY in known and CLOSE in known:
            loose = Alt((end, Seq((_tag(KEY), called))))
            called = Seq((_GAP, Alt(tuple(map(text, tools))), _GAP, loose))
        self.possible = bool(tools) and OPEN in known
        self.one = Seq((_tag(OPEN), called))


def formed(form: Node, calls: Calls, reasons: bool) -> Node:
    """Answers that are of a form, or calls instead of it; behind reasoning if there is such."""
    more = Repeat(Alt((_SPACE, calls.one)))
    answer = Alt((form, Seq((maybe(_SPACE), calls.one, more)))) if calls.possible else form
    return _behind_reasoning(answer) if reasons else answer


def _behind_reasoning(answer: Node) -> Node:
    return Seq((Repeat(_but(_THINK_END)), _tag(_THINK_END), answer))
