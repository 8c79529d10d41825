"""The commands of a chat: how they are written, and what help says about them."""

import re
import textwrap
from typing import NamedTuple


class Command(NamedTuple):
    """One command: its name, how its argument is shown, and what it does."""

    name: str
    argument: str
    does: str


COMMANDS = (
    Command("help", "", "show this"),
    Command("reset", "", "forget the conversation"),
    Command("retry", "", "ask the last question again, with another seed"),
    Command("more", "", "go on with an answer that was cut off"),
    Command("system", "[TEXT|off]", "show, set or drop the system message"),
    Command("think", "[on|off|low|high|max|show|hide]",
            "reasoning: whether and how hard; whether it is shown"),
    Command("stats", "[full]", "the last turn in figures"),
    Command("save", "[NAME [replace]]", "keep the conversation, from now on after every turn"),
    Command("load", "[NAME]", "take up a saved one; alone: list them"),
    Command("quit", "", "end; also Ctrl-D, or Ctrl-C twice"),
)  # fmt: skip
NAMES = {command.name for command in COMMANDS}
ALIASES = {
    "h": "help", "?": "help", "q": "quit", "q!": "quit", "wq": "quit", "x": "quit", "qa": "quit",
    "exit": "quit", "bye": "quit", "r": "retry", "m": "more", "continue": "more", "clear": "reset",
    "new": "reset", "w": "save", "e": "load",
}  # fmt: skip
_WRITTEN = re.compile(r"([/:])([a-z?!]+)(?:\s+(.*))?\s*", re.DOTALL)
KEYS = (
    r"A line that ends in \ goes on in the next one; so does Alt-Enter, and text between "
    '""" and """. Pasted text keeps its lines. // begins a message with one /. '
    "Ctrl-C ends an answer and keeps it."
)


def parse(text: str) -> tuple[str, str] | None:
    """(command, argument) of what was typed, or None when it is a message.

    The command is as it was written when it is not known. After a colon only known ones count.
    """
    if text.strip() == "/":
        return "", ""
    found = _WRITTEN.fullmatch(text)
    if not found:
        return None
    mark, written, argument = found[1], found[2], (found[3] or "").strip()
    name = ALIASES.get(written, written)
    if mark == ":" and name not in NAMES:
        return None
    return name, argument


def message(text: str) -> str:
    """What a typed text says: of a doubled slash at its beginning, one."""
    return text[1:] if text.startswith("//") else text


def help_text(width: int) -> str:
    """All commands and keys, for a terminal of so many columns."""
    heads = [f"/{command.name} {command.argument}".rstrip() for command in COMMANDS]
    column = max(map(len, heads)) + 2
    if column > width // 2:
        column = 4
    lines = []
    for head, command in zip(heads, COMMANDS, strict=True):
        body = textwrap.wrap(command.does, max(10, width - column - 1))
        if len(head) + 2 > column:
            lines += textwrap.wrap(head, max(10, width - 1), break_on_hyphens=False)
        else:
            body[0] = head.ljust(column) + body[0]
        indent = " " * column
        lines += [line if line.startswith("/") else indent + line for line in body]
    return "\n".join([*lines, *textwrap.wrap(KEYS, max(10, width - 1))])
