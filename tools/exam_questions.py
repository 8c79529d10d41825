"""What the demo model is asked, and when an answer counts as right."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from corpus import drills, talk
from corpus.documents import Turn
from corpus.world import CAPITALS, COLOR_OF, DAYS, NAMES, NUMBERS, OPPOSITES

Judge = Callable[[str], bool]


@dataclass(frozen=True)
class Question:
    """A question, its judge, and how many tokens the answer may have."""

    text: str
    right: Judge
    limit: int = 48


def _same(expected: str) -> Judge:
    return lambda answer: answer.strip() == expected


def _mentions(*words: str) -> Judge:
    return lambda answer: any(
        re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) for word in words
    )


def _number(text: str) -> int | None:
    """The last number in a text, in digits or as a word."""
    found = re.findall(r"\d+|[a-z]+", text.lower())
    numbers = [w for w in found if w.isdigit() or w in NUMBERS]
    if not numbers:
        return None
    return int(numbers[-1]) if numbers[-1].isdigit() else NUMBERS.index(numbers[-1])


def _counts(expected: str) -> Judge:
    return lambda answer: _number(answer) == _number(expected)


def _one_of(answers: tuple[str, ...]) -> Judge:
    return lambda answer: answer.strip() in answers


def by_heart(section: str, _: random.Random) -> list[Question]:
    """Every question of a section of talk.txt; any of its answers is right."""
    return [
        Question(question, _one_of(answers), 64)
        for questions, answers in talk.sections()[section]
        for question in questions
    ]


def opposites(_: random.Random) -> list[Question]:
    """Both directions of every pair; a word in two pairs has two right answers."""
    both = [*OPPOSITES, *((b, a) for a, b in OPPOSITES)]
    words = dict.fromkeys(a for a, _ in both)
    return [
        Question(f"What is the opposite of {word}?", _mentions(*(b for a, b in both if a == word)))
        for word in words
    ]


def colors(_: random.Random) -> list[Question]:
    return [Question(f"What color is {thing}?", _mentions(shade)) for thing, shade in COLOR_OF]


def days(_: random.Random) -> list[Question]:
    after = [(f"What day comes after {day}?", DAYS[(n + 1) % 7]) for n, day in enumerate(DAYS)]
    before = [(f"What day comes before {day}?", DAYS[n - 1]) for n, day in enumerate(DAYS)]
    return [Question(ask, lambda a, d=day: a.startswith(d)) for ask, day in after + before]


def capitals(_: random.Random) -> list[Question]:
    return [Question(f"What is the capital of {c}?", _mentions(city)) for c, city in CAPITALS]


def sums(rng: random.Random) -> list[Question]:
    turns = [drills.arithmetic(rng) for _ in range(60)]
    return [Question(turn.question, _counts(turn.answer)) for turn in turns]


def programs(_: random.Random) -> list[Question]:
    """Every function; the code block must be exact."""
    return [
        Question(
            f"Write a Python function that {what}.",
            lambda answer, source=source: f"```python\n{source}\n```" in answer,
            96,
        )
        for what, source in talk.code()
    ]


def _exact(rng: random.Random, count: int, make: Callable[[random.Random], Turn]) -> list[Question]:
    turns = [make(rng) for _ in range(count)]
    return [Question(turn.question, _same(turn.answer)) for turn in turns]


def _says(words: str) -> Judge:
    return lambda answer: answer.strip().removeprefix("I repeat: ") == words


def repeats(rng: random.Random) -> list[Question]:
    """Known words in an order nobody has seen."""
    texts = [
        " ".join(rng.choice(drills.WORDS) for _ in range(rng.randrange(1, 9))) for _ in range(40)
    ]
    return [Question(rng.choice(drills.REPEAT) + text, _says(text)) for text in texts]


def inventions(rng: random.Random) -> list[Question]:
    """Words that do not exist."""
    texts = [" ".join(drills.invented(rng) for _ in range(rng.randrange(1, 4))) for _ in range(20)]
    return [Question(f"Repeat after me: {text}", _says(text)) for text in texts]


def scenes(rng: random.Random) -> list[Question]:
    return _exact(rng, 40, drills.scene)


def animals(rng: random.Random) -> list[Question]:
    questions = []
    for _ in range(30):
        turn = talk.animal(rng)
        questions.append(Question(turn.question, _same(turn.answer)))
    return questions


def story_pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Names for stories about two children."""
    return [tuple(rng.sample(NAMES, 2)) for _ in range(count)]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"[A-Z][a-z]+", text)) & set(NAMES)


SETS: dict[str, Callable[[random.Random], list[Question]]] = {
    "persona": lambda rng: by_heart("persona", rng),
    "facts": lambda rng: by_heart("fact", rng),
    "greetings": lambda rng: by_heart("greeting", rng),
    "opposites": opposites,
    "colours": colors,
    "days": days,
    "capitals": capitals,
    "sums": sums,
    "code": programs,
    "repeat": repeats,
    "repeat-invented": inventions,
    "scenes": scenes,
    "animals": animals,
}
