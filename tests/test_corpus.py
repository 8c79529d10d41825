"""The program that writes the demo model's world: its grammar, its truth, its weights."""

from __future__ import annotations

import random
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import tokenizers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from corpus import drills, prose, stories, talk  # noqa: E402
from corpus.documents import FULL, KEY, MARKUP, NAME, OPENING, Turn, chat, encode, text_of  # noqa: E402
from corpus.world import NAMES, NUMBERS, Person, an, plural  # noqa: E402
from demo_data import LOOKAHEAD, Mixture, save_domain  # noqa: E402
from demo_recipe import Recipe  # noqa: E402

TOKENIZER = ROOT / "colibri/demo/model/tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(TOKENIZER))


@pytest.mark.parametrize(
    ("word", "expected"),
    [("honest fox", "an honest fox"), ("hour", "an hour"), ("owl", "an owl"), ("bee", "a bee"),
     ("uncle", "an uncle"), ("unicorn", "a unicorn"), ("old man", "an old man")],
)  # fmt: skip
def test_articles_follow_the_sound(word: str, expected: str) -> None:
    """The article is chosen by how a word sounds, not by its first letter."""
    assert an(word) == expected


def test_plurals_of_snacks() -> None:
    """Cherries, peaches, apples."""
    assert [plural(w) for w in ("cherry", "peach", "apple")] == ["cherries", "peaches", "apples"]


@pytest.mark.parametrize("name", stories.plots())
def test_every_plot_can_be_told(name: str) -> None:
    """Each plot fills all of its words, and names both people and nobody else."""
    rng = random.Random(name)
    for _ in range(10):
        hero, friend = Person.make(rng, name="Mia"), Person.make(rng, name="Tom", animal="owl")
        story = stories.tell(rng, hero, friend, plot=name)
        assert not re.search(r"[{}|]|  ", story.text)
        assert set(re.findall(r"[A-Z][a-z]+", story.text)) & set(NAMES) == {"Mia", "Tom"}
        assert story.turns and all(turn.answer.endswith(".") for turn in story.turns)


def test_conversations_are_closed_and_carry_no_markup() -> None:
    """Every chat alternates user and assistant, ends once, and has no template leftovers."""
    rng = random.Random(3)
    for _ in range(300):
        text = text_of(talk.document(rng))
        marks = re.findall(r"<\|(user|assistant)\|>", text)
        assert marks == ["user", "assistant"] * (len(marks) // 2)
        assert text.count("<|endoftext|>") == 1 and text.endswith("<|endoftext|>")
        assert " | " not in text


def test_sums_are_right() -> None:
    """The answer to an arithmetic question is the value of the question."""
    rng = random.Random(5)
    words = {name: number for number, name in enumerate(NUMBERS)}
    for _ in range(400):
        turn = drills.arithmetic(rng)
        found = re.findall(r"\d+|[a-z]+", turn.question.lower())
        a, b = (int(w) if w.isdigit() else words[w] for w in found if w.isdigit() or w in words)
        last = turn.answer.rstrip(".").split()[-1]
        result = int(last) if last.isdigit() else words[last]
        asked = turn.question.lower()
        if re.search(r"plus|\+|add", asked):
            assert result == a + b
        elif "take" in asked:
            assert result == b - a
        else:
            assert result == (a - b if re.search(r"minus|-", asked) else a * b)


def test_sums_said_in_a_row_train_their_results() -> None:
    """Said statements are true, and nothing but a result carries the weight of a key."""
    rng = random.Random(7)
    apply = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    number = {name: value for value, name in enumerate(NUMBERS)}
    for _ in range(100):
        pieces = drills.sum_document(rng)
        text = text_of(pieces).removeprefix("[gMASK]<sop>").removesuffix(". <|endoftext|>")
        if "<|user|>" in text:
            continue
        keys = [piece.text for piece in pieces if piece.weight == KEY]
        for said, key in zip(text.lower().split(". "), keys, strict=True):
            a, verb, b, _, c = said.split()
            left, right, result = (int(number.get(word, word)) for word in (a, b, c))
            assert apply[verb](left, right) == result and c == key


def test_scenes_are_answered_from_the_scene() -> None:
    """Every name in a scene's answer was mentioned in its question."""
    rng = random.Random(6)
    for _ in range(200):
        turn = drills.scene(rng)
        assert {n for n in NAMES if n in turn.answer} <= {n for n in NAMES if n in turn.question}


def test_weights_leave_out_the_question(tokenizer: tokenizers.Tokenizer) -> None:
    """The answer, its end and a repeated name are trained; a question with weight 0 is not."""
    ids, weights = encode(tokenizer, chat([Turn("I am Mia.", "Hello, Mia!")], user=0))
    by_token = [(tokenizer.decode([i], skip_special_tokens=False), w) for i, w in
                zip(ids, weights, strict=True)]  # fmt: skip
    tokens = [token for token, _ in by_token]
    question, answer = tokens.index("<|user|>") + 1, tokens.index("</think>") + 1
    assert all(weight == OPENING for _, weight in by_token[:question])
    assert all(weight <= MARKUP for _, weight in by_token[question:answer])
    assert all(weight in (FULL, NAME) for _, weight in by_token[answer:])
    assert by_token[-1] == ("<|endoftext|>", FULL)
    assert NAME in [weight for _, weight in by_token[answer:]]


def test_echo_repeats_and_trains_only_repetitions() -> None:
    """Random tokens come back in the same order, and the first time carries no loss."""
    ids, weights = drills.echo_tokens(random.Random(1), 16, 2048)
    size = int((weights == 0).sum())
    assert len(ids) % size == 0 and (ids.reshape(-1, size) == ids[:size]).all()


def test_rows_begin_where_documents_begin(tmp_path: Path) -> None:
    """A drawn row is the stream from some document's start, with its weights in whole units."""
    documents = [(np.full(n, n), np.full(n, 10 * (n % 2))) for n in range(5, 30)]
    save_domain(tmp_path, "a", documents)
    batch = Mixture(tmp_path, {"a": 1.0}).draw(np.random.default_rng(0), 40, 8)
    stream = np.concatenate([ids for ids, _ in documents])
    starts = np.cumsum([0, *(len(ids) for ids, _ in documents)])
    rows = {tuple(stream[s : s + 8 + LOOKAHEAD]) for s in starts}
    assert {tuple(row) for row in batch.ids} <= rows
    assert (batch.weights == batch.ids % 2).all()


def test_prose_reads_a_lazy_load_database() -> None:
    """Lines come out of R's serialised character vectors; headings and quotes are normalised."""
    lines = [
        "Persuasion",
        "",
        "CHAPTER 1",
        "",
        "She said “no” to him--",
        "and nobody asked why.",
        "",
    ]
    strings = b"".join(
        b"\x00\x04\x00\x09" + len(s.encode()).to_bytes(4, "big") + s.encode() for s in lines
    )
    block = b"X\nhead" + prose.VECTOR + len(lines).to_bytes(4, "big") + strings
    raw = len(block).to_bytes(4, "big") + zlib.compress(block)
    (read,) = prose.unpack(raw + raw)[:1]
    assert prose.lines_of(read) == lines
    assert prose.paragraphs(lines) == ['She said "no" to him - and nobody asked why.']


@pytest.mark.parametrize("name", ["demo_recipe.json", "demo_recipe_more.json"])
def test_recipe_warms_up_and_decays(name: str) -> None:
    """The rate rises, stays, and falls in a line to two per cent; phases end with the run."""
    recipe = Recipe.load(ROOT / "tools" / name)
    assert recipe.rate_at(0, 0.0) < recipe.rate_at(10, 0.1) < 1.0 == recipe.rate_at(10**6, 0.5)
    assert recipe.rate_at(10**6, (1 + recipe.decay_from) / 2) == pytest.approx(0.5)
    assert recipe.rate_at(10**6, 1.0) == 0.02
    assert recipe.phase_at(1.0) == len(recipe.phases) - 1
    for phase in recipe.phases:
        assert sum(phase.shares()) == pytest.approx(1)
        assert all(abs(sum(block.mix.values()) - 1) < 1e-9 for block in phase.blocks)
