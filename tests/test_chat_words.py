"""What is typed into a chat: commands, continued lines, and the lines said beside the answers."""

from __future__ import annotations

import io
import itertools
import re

import pytest

from colibri import commands, stats
from colibri.errors import UsageError
from colibri.ledger import Ledger
from colibri.lines import PipedLines, clean, continued, goes_on, joined
from colibri.sampling import SamplingParams
from colibri.stats import Receipt
from colibri.status import status

WIDTHS = (20, 40, 79, 200)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/quit", ("quit", "")),
        (":q", ("quit", "")),
        (":q!", ("quit", "")),
        (":wq", ("quit", "")),
        ("/exit", ("quit", "")),
        ("/think high", ("think", "high")),
        ("/system  Be brief.\nVery. ", ("system", "Be brief.\nVery.")),
        (":save trip", ("save", "trip")),
        ("/nonsense", ("nonsense", "")),
        (":)", None),
        (":nonsense", None),
        ("/usr/bin is what?", None),
        ("//etc", None),
        ("1/2", None),
        ("Tell me /quit", None),
    ],
)
def test_commands_are_told_from_messages(text, expected):
    """Slash commands, their short names and the habits of editors; other text is a message."""
    assert commands.parse(text) == expected


def test_every_alias_is_a_command():
    """No short name leads nowhere, and none hides a command."""
    assert set(commands.ALIASES.values()) <= commands.NAMES
    assert not commands.NAMES & set(commands.ALIASES)


def test_a_doubled_slash_is_one():
    """How to begin a message with a slash."""
    assert commands.message("//etc is") == "/etc is" and commands.message("a//b") == "a//b"


@pytest.mark.parametrize("width", WIDTHS)
def test_help_fits(width):
    """Help names every command in any width, and no line is too long for it."""
    text = commands.help_text(width)
    assert all(len(line) < width for line in text.splitlines())
    assert all(f"/{name}" in text for name in commands.NAMES)


# ---- lines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["Hello"], "Hello"),
        (["one\\", "two"], "one\ntwo"),
        (["one\\", "two\\", ""], "one\ntwo\n"),
        (['"""', "a", "", "b", '"""'], "a\n\nb"),
        (['"""a', 'b"""'], "a\nb"),
        (['"""one line"""'], "one line"),
        (["never ends\\"], "never ends\\"),
    ],
)
def test_continued_lines(typed, message):
    """A backslash or three quotes make one message of several lines; so does an early end."""
    lines = iter(typed)
    assert continued(lambda prompt: next(lines, None)) == message


def test_prompts_of_continued_lines():
    """The first line has one prompt, the others another."""
    seen, lines = [], iter(["a\\", "b"])
    continued(lambda prompt: seen.append(prompt) or next(lines))
    assert seen == ["> ", ". "] and continued(lambda prompt: None) is None


def test_an_editor_joins_alike():
    """What the editor holds as one text means what the lines would mean one by one."""
    assert goes_on("a\\") and goes_on('"""a\nb') and not goes_on("a") and not goes_on('"""a"""')
    assert joined('"""\na\n"""') == "a" and joined("a\\\nb") == "a\nb"


def test_piped_lines(monkeypatch):
    """In a pipe each line that is not blank is a message, whatever it ends with; bad bytes are
    refused by line."""
    data = b"\xef\xbb\xbfone\\\n\n  \r\ntwo\r\ncaf\xe9\nlast"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    lines = PipedLines()
    assert [lines.read(), lines.read()] == ["one\\", "two"]
    with pytest.raises(UsageError, match="line 5 of stdin is not UTF-8 text at byte 3"):
        lines.read()
    assert [lines.read(), lines.read()] == ["last", None]


def test_half_characters_are_replaced():
    """What a terminal in another encoding sends cannot break the conversation."""
    assert clean("caf\udce9") == "caf\ufffd" and clean("häh") == "häh"


# ---- the status line ----------------------------------------------------------------------------


def receipt(**changes) -> Receipt:
    """A turn of 10 tokens in two seconds."""
    counters = {"forwards": 9, "expert_uses": 200, "expert_loads": 30, "pilot_useful": 20}
    values = {
        "model": "m", "isa": "scalar", "threads": 1, "io": "direct", "slots_per_layer": 8,
        "load_seconds": 0.0, "context": 4096, "prompt_tokens": 100, "reused_tokens": 0,
        "prefill_tokens": 100,
        "prompt_seconds": 1.0, "answer_tokens": 10, "answer_seconds": 2.0,
        "first_token_seconds": 1.25, "prompt_counters": counters, "answer_counters": counters,
        "sampling": SamplingParams(), "recommended": frozenset(), "seed": 1, "max_tokens": None,
        "drafter": "mtp", "mode": "coupled", "finish_reason": "stop", "ledger": Ledger(),
        "peak_bytes": 0,
    }  # fmt: skip
    return Receipt(**values | changes)


def test_status_says_what_matters():
    """Speed, first token, hits, drafts, context: each only where there is something to say."""
    turn = receipt()
    turn.ledger.judged(3, 3, 2)
    assert status(turn, 80) == "5 tok/s, first 1.2 s, 75% hits, 2/3 drafts, 110/4096 context"
    mapped = receipt(slots_per_layer=0, first_token_seconds=0.0123)
    assert status(mapped, 80) == "5 tok/s, first 12 ms, 110/4096 context"


@pytest.mark.parametrize(
    ("reason", "words"),
    [("interrupted", "/more"), ("length", "/more"), ("context", "/reset"), ("stop", "context")],
)
def test_status_says_how_it_ended(reason, words):
    """An answer that was cut off says how to go on."""
    assert words in status(receipt(finish_reason=reason), 200).split(", ", 3)[-1]


@pytest.mark.parametrize(("width", "empty"), list(itertools.product(WIDTHS, (True, False))))
def test_status_fits(width, empty):
    """One line where it fits, else several; none too long, with or without an answer."""
    nothing = {"answer_tokens": 0, "first_token_seconds": None, "finish_reason": "interrupted"}
    text = status(receipt(**nothing if empty else {}), width)
    assert all(0 < len(line) < width for line in text.splitlines())


# ---- the receipt ------------------------------------------------------------------------------


def figures(text: str) -> list[str]:
    """Every number of a text, sorted."""
    return sorted(re.findall(r"\d[\d.]*", text))


@pytest.mark.parametrize("width", [30, 40, 80, 100, 120])
@pytest.mark.parametrize("show", [stats.line, stats.table, stats.full])
def test_receipts_fit(width, show):
    """No line is too long for a terminal, no word is cut, no figure lost; a pipe gets it plain."""
    names = (
        "forwards", "rows", "expert_uses", "expert_loads", "expert_bytes", "read_bytes",
        "read_wait_ns", "pilot_reads", "pilot_useful", "mirror_bytes", "repeated_reads",
    )  # fmt: skip
    counters = dict.fromkeys(names, 1234567890)
    turn = receipt(answer_counters=counters, prompt_counters=counters)
    turn.ledger.judged(3, 3, 2)
    text, plain = show(turn, width), show(turn)
    assert all(len(line) < width for line in text.splitlines())
    assert set(text.split()) == set(plain.split()) and figures(text) == figures(plain)
    assert show(turn, 1000) == plain


def test_one_token_has_no_speed():
    """A first token comes of the prompt: without a step there is no speed to tell."""
    one = {"forwards": 0, "expert_uses": 0, "expert_loads": 0, "pilot_useful": 0}
    turn = receipt(answer_tokens=1, answer_counters=one)
    assert turn.answer_rate is None and "tok/s" not in status(turn, 80)


def test_an_answer_that_only_reasons():
    """The receipt tells why there is nothing to read: the limit came while it was reasoning."""
    turn = receipt(finish_reason="length", max_tokens=9, reasoning_alone=True)
    assert "stopped at the limit of 9 tokens, still reasoning" in stats.line(turn)


def test_fast_answers_are_written_out():
    """More than a thousand tokens a second are digits with a separator, never an exponent."""
    fast = receipt(answer_tokens=2301, slots_per_layer=0)
    assert status(fast, 80).startswith("1,150 tok/s, ")
