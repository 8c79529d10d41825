"""Answers that call tools, as grammars: GLM's format, in which each tag is a letter of its own.

<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from colibri.grammar import Alt, AnyOrder, Node, OneOf, Over, Repeat, Seq, maybe, one_of, text

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


def _tag(tag: str) -> OneOf:
    return OneOf(frozenset((_LETTERS[tag],)))


def _but(*tags: str) -> OneOf:
    """Any letter but these tags."""
    return OneOf(frozenset(range(OTHER + 1)) - {_LETTERS[tag] for tag in tags})


def arguments(values: Mapping[str, Node], required: frozenset[str]) -> Node:
    """A call behind the tool's name: arguments by name, each once at most, in any order."""
    entries = {name: _entry(name, value) for name, value in values.items()}
    return Seq((AnyOrder(entries, required), _tag(CLOSE)))


def _entry(name: str, value: Node) -> Node:
    key = (_tag(KEY), text(name), _tag(KEY_END), _GAP)
    return Seq((*key, _tag(VALUE), value, _tag(VALUE_END), _GAP))


class Calls:
    """Calls of some tools, by name; a grammar is of what comes behind it, None: any arguments.

    `known`: the tags that are tokens; where those of names are not, calls are free altogether.
    `whole`: an answer cannot end within one.
    """

    def __init__(
        self, tools: Mapping[str, Node | None], known: Container[str], whole: bool
    ) -> None:
        end = _tag(CLOSE) if CLOSE in known else _END
        shut = end if whole else Alt((end, _END))
        loose = Alt((shut, Seq((_tag(KEY), Repeat(_but(CLOSE)), shut))))
        self._behind = {name: Seq((_GAP, node or loose)) for name, node in tools.items()}
        self._any: Node = Seq((Repeat(_but(CLOSE)), shut))
        if KEY in known and CLOSE in known:
            named = (Seq((text(name), behind)) for name, behind in self._behind.items())
            self._any = Seq((_GAP, Alt((*named,))))
        self.possible = bool(tools) and OPEN in known
        self.one = Seq((_tag(OPEN), self._any))

    def begun(self, name: str) -> Node:
        """The rest of one of which the prompt has the tag and, unless it is empty, the name."""
        return self._behind[name] if name else self._any


def formed(form: Node, calls: Calls, reasons: bool) -> Node:
    """Answers of a form, or calls instead of it, behind reasoning where the prompt began that."""
    more = Repeat(Alt((_SPACE, calls.one)))
    answer = Alt((form, Seq((maybe(_SPACE), calls.one, more)))) if calls.possible else form
    return _behind_reasoning(answer) if reasons else answer


def free(calls: Calls, reasons: bool, begun: str | None) -> Node:
    """Any answer, if its calls are such as there are. `begun`: it starts within one, see Calls."""
    said = Repeat(Alt((_but(OPEN), calls.one)))
    if begun is not None:
        return Seq((calls.begun(begun), said))
    thought = _behind_reasoning(said, _END)
    if reasons:
        return thought
    first = Alt((_but(OPEN, _THINK), calls.one))
    return Alt((_END, Seq((_tag(_THINK), thought)), Seq((first, said))))


def _behind_reasoning(answer: Node, *ends: Node) -> Node:
    return Seq((Repeat(_but(_THINK_END)), Alt((*ends, Seq((_tag(_THINK_END), answer))))))
