"""What people and pipes see of an answer: whole characters, reasoning apart, no stray escapes."""

from __future__ import annotations

import io

import pytest

from colibri.answer import MARK, REASONING, TEXT, Piece, Prompt, Splitter
from colibri.knobs import Screen
from colibri.terminal import Terminal

THOUGHT, ANSWER = Piece(REASONING, "Hm, "), Piece(TEXT, "Yes")
ESCAPE = "\x1b"


class Person(io.StringIO):
    """A stream that somebody watches."""

    def isatty(self) -> bool:
        return True


def show(terminal: Terminal, pieces: list[Piece]) -> tuple[str, str]:
    """What stdout and stderr got."""
    for piece in pieces:
        terminal.show(piece)
    terminal.end()
    return terminal.out.getvalue(), terminal.err.getvalue()


def test_pipes_get_the_answer_alone():
    """Reasoning goes nowhere when nobody watches."""
    terminal = Terminal(io.StringIO(), io.StringIO(), Screen())
    assert show(terminal, [THOUGHT, ANSWER]) == ("Yes\n", "")


def test_reasoning_is_dimmed_and_set_apart():
    """A person sees reasoning dimmed, a blank line, then the answer without its own blank lines."""
    terminal = Terminal(Person(), Person(), Screen())
    out, _ = show(terminal, [THOUGHT, Piece(REASONING, "so."), Piece(TEXT, "\n\nYes")])
    assert out == "\x1b[2mHm, \x1b[0m\x1b[2mso.\x1b[0m\n\nYes\n"


@pytest.mark.parametrize("screen", [Screen(color=False), Screen(dumb=True)])
def test_without_colour(screen):
    """NO_COLOR and TERM=dumb leave plain text."""
    terminal = Terminal(Person(), Person(), screen)
    assert show(terminal, [THOUGHT, ANSWER])[0] == "Hm, \n\nYes\n"


def test_reasoning_beside_a_redirected_answer():
    """With the answer in a file, a person at stderr sees the reasoning there; not if quiet."""
    out, err = show(Terminal(io.StringIO(), Person(), Screen(color=False)), [THOUGHT, ANSWER])
    assert out == "Yes\n" and err.startswith("Hm, ")
    out, err = show(Terminal(io.StringIO(), Person(), Screen(), quiet=True), [THOUGHT, ANSWER])
    assert (out, err) == ("Yes\n", "")


def test_lines_are_ended_once():
    """A line that the answer ended is not ended again; an empty answer has no line."""
    for pieces, expected in (([Piece(TEXT, "a\n")], "a\n"), ([ANSWER], "Yes\n"), ([], "")):
        assert show(Terminal(io.StringIO(), io.StringIO(), Screen()), pieces)[0] == expected


def test_progress():
    """Drawn for people only, as wide as the screen, and removed before a piece."""
    screen = Screen(columns=20)
    person = Terminal(io.StringIO(), Person(), screen)
    person.progress("reading the long prompt", 1, 2)
    assert person.err.getvalue() == "\r\x1b[Kreading the long pr"
    person.show(ANSWER)
    assert person.err.getvalue().endswith("\r\x1b[K")
    for terminal in (
        Terminal(io.StringIO(), io.StringIO(), screen),
        Terminal(Person(), Person(), Screen(dumb=True)),
        Terminal(Person(), Person(), screen, quiet=True),
    ):
        terminal.progress("reading", 1, 2)
        terminal.clear()
        assert terminal.err.getvalue() == ""


def test_time_left(monkeypatch):
    """Work that takes long is told with what is left of it; other work begins anew."""
    now = iter([0.0, 1.0, 4.0, 64.0, 65.0, 69.0])
    monkeypatch.setattr("colibri.terminal.time.monotonic", lambda: next(now))
    terminal = Terminal(io.StringIO(), Person(), Screen(columns=80))
    for done in (10, 11, 20, 170):
        terminal.progress("reading the prompt", done, 1000)
    terminal.progress("loading layer", 1, 9)
    terminal.progress("converting", 2, 9, "MB")
    assert terminal.err.getvalue().split("\r\x1b[K")[1:] == [
        "reading the prompt 10/1000",
        "reading the prompt 11/1000",
        "reading the prompt 20/1000, about 7 min left",
        "reading the prompt 170/1000, about 6 min left",
        "loading layer 1/9",
        "converting 2/9 MB",
    ]


@pytest.mark.parametrize("kind", [TEXT, REASONING])
def test_control_characters_are_shown(kind):
    """A person sees the escapes of an answer and of reasoning; the terminal gets none of them."""
    terminal = Terminal(Person(), Person(), Screen(color=False))
    text = "a\x1b]52;c;eA==\x07\x9b2J\x7f\r\tb\u00e9\n"
    out, _ = show(terminal, [Piece(kind, text)])
    assert out == "a\u241b]52;c;eA==\u2407\ufffd2J\u2421\u240d\tb\u00e9\n"


def test_control_characters_in_a_pipe():
    """A pipe gets every byte as it is, beside a terminal too; so do notes and whole objects."""
    terminal = Terminal(io.StringIO(), Person(), Screen())
    assert show(terminal, [Piece(TEXT, "\x1b[2J\x9b\n")])[0] == "\x1b[2J\x9b\n"
    terminal = Terminal(io.StringIO(), io.StringIO(), Screen())
    terminal.note("\x1b")
    terminal.write("\x1b")
    assert (terminal.out.getvalue(), terminal.err.getvalue()) == ("\x1b", "\x1b\n")


def test_control_characters_in_notes():
    """What is told beside the answer, names and quotations in it, commands no terminal either."""
    terminal = Terminal(Person(), Person(), Screen())
    for tell in (terminal.note, terminal.warn, terminal.aside):
        tell("a\x1b[2Jb")
    plain, dimmed = "a\u241b[2Jb\n", "\x1b[2ma\u241b[2Jb\x1b[0m\n"
    assert terminal.err.getvalue() == plain + plain + dimmed
    terminal.write("\x1b")
    assert terminal.out.getvalue() == "\u241b"


class Full(Person):
    """A watched stream with no room behind it."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_stderr_that_takes_nothing():
    """All that goes there is dropped; the answer is not, and its own faults are still told."""
    terminal = Terminal(io.StringIO(), Full(), Screen())
    for tell in (terminal.note, terminal.warning, terminal.aside):
        tell("so")
    terminal.progress("reading", 1, 2)
    terminal.show(THOUGHT)
    terminal.show(ANSWER)
    terminal.end()
    assert terminal.out.getvalue() == "Yes\n"
    with pytest.raises(OSError, match="stdout cannot be written"):
        Terminal(Full(), io.StringIO(), Screen()).show(ANSWER)


def test_quiet_notes():
    """Notes are for stderr, unless quiet."""
    loud, quiet = (Terminal(io.StringIO(), io.StringIO(), Screen(), q) for q in (False, True))
    loud.note("so")
    quiet.note("so")
    assert (loud.err.getvalue(), quiet.err.getvalue()) == ("so\n", "")


# ---- pieces -------------------------------------------------------------------------------------


@pytest.fixture
def tags(demo_tokenizer) -> tuple[int, int]:
    """Ids of <think> and </think>."""
    return demo_tokenizer.id_of("<think>"), demo_tokenizer.id_of("</think>")


def split(tokenizer, prompt: Prompt, blocks: list[list[int]]) -> list[Piece]:
    """All pieces of an answer that comes in blocks."""
    splitter = Splitter(tokenizer, prompt)
    pieces = [piece for block in blocks for piece in splitter.push(block)]
    return [*pieces, *splitter.finish()]


def test_reasoning_opened_by_the_prompt(demo_tokenizer, tags):
    """After a prompt that ends in <think>, text up to </think> is reasoning, however it is cut."""
    start, end = tags
    thought, answer = demo_tokenizer.encode("I see."), demo_tokenizer.encode(" A fox.")
    tokens = [*thought, end, *answer]
    expected = [Piece(REASONING, "I see."), Piece(TEXT, " A fox.")]
    assert split(demo_tokenizer, Prompt([5, start]), [tokens]) == expected
    pieces = split(demo_tokenizer, Prompt([5, start]), [[token] for token in tokens])
    joined = {k: "".join(p.text for p in pieces if p.kind == k) for k in (REASONING, TEXT)}
    assert joined == dict(expected)


def test_reasoning_opened_by_the_answer(demo_tokenizer, tags):
    """A first token <think> opens reasoning; a later one, or a stray </think>, is text."""
    start, end = tags
    word = demo_tokenizer.encode("fox")
    opened = split(demo_tokenizer, Prompt([5]), [[start, *word, end, *word]])
    assert opened == [Piece(REASONING, "fox"), Piece(TEXT, "fox")]
    tokens = [*word, start, *word, end]
    stray = split(demo_tokenizer, Prompt([5, start, end]), [tokens])
    assert stray == [Piece(TEXT, demo_tokenizer.decode(tokens))]


def test_raw_answers_are_not_split(demo_tokenizer, tags):
    """Without markup every token is text."""
    start, end = tags
    tokens = [*demo_tokenizer.encode("fox"), end, *demo_tokenizer.encode("fox")]
    pieces = split(demo_tokenizer, Prompt([5, start], markup=False), [tokens])
    assert pieces == [Piece(TEXT, demo_tokenizer.decode(tokens))]


def test_marks_are_pieces_in_text_alone(demo_tokenizer, tags):
    """A tag of a tool call is a piece of its own in the text; in reasoning it is reasoning."""
    start, end = tags
    (mark,) = demo_tokenizer.encode("!")
    word = demo_tokenizer.encode("fox")
    tokens = [*word, mark, end, *word, mark, *word]
    assert split(demo_tokenizer, Prompt([5, start], marks={mark: "<tool_call>"}), [tokens]) == [
        Piece(REASONING, "fox!"), Piece(TEXT, "fox"), Piece(MARK, "<tool_call>"), Piece(TEXT, "fox")
    ]  # fmt: skip


def test_half_a_character_waits(demo_tokenizer, tags):
    """A character in two tokens is shown once it is whole; cut off, it becomes U+FFFD."""
    whole = demo_tokenizer.encode("\N{EARTH GLOBE EUROPE-AFRICA}")
    assert len(whole) > 1
    splitter = Splitter(demo_tokenizer, Prompt([5]))
    shown = [[piece.text for piece in splitter.push([token])] for token in whole]
    assert shown == [[]] * (len(whole) - 1) + [["\N{EARTH GLOBE EUROPE-AFRICA}"]]
    cut = split(demo_tokenizer, Prompt([5, tags[0]]), [[*whole[:-1], tags[1]]])
    assert cut == [Piece(REASONING, "\ufffd")]
