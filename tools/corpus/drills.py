"""Exercises: copying from the question, sums, and the tables the model must know by heart."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from corpus.documents import END, FULL, KEY, OPENING, START, Piece, Turn, chat
from corpus.world import (
    CAPITALS,
    COLOR_OF,
    DAYS,
    MONTHS,
    NAMES,
    NUMBERS,
    OPPOSITES,
    PLACES,
    SNACKS,
    THINGS,
    WORDS,
    an,
    cap,
    listed,
    pair,
    plural,
)
from corpus.world import COLORS as COLOR_WORDS

REPEAT = ("Repeat after me: ", "Repeat: ", "Say this: ", "Please say: ", "Can you repeat this? ")
Spoken = Callable[[int], str]
CONSONANTS, VOWELS = "bcdfghklmnprstvwz", "aeiou"


def invented(rng: random.Random) -> str:
    """A word nobody has seen: copying it needs its letters."""
    count = rng.randrange(2, 4)
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(count))


def repeat(rng: random.Random, vocabulary: list[str]) -> Turn:
    """Say a list of words again, or its first or last word."""
    words = [
        invented(rng) if rng.random() < 0.04 else rng.choice(vocabulary)
        for _ in range(rng.randrange(1, 9))
    ]
    text, draw = " ".join(words), rng.random()
    if draw < 0.86:
        return Turn(rng.choice(REPEAT) + text, f"I repeat: {text}", key=words[0])
    if draw < 0.93:
        answer = f"The last word is {words[-1]}."
        return Turn(f"What is the last word of: {text}?", answer, key=words[-1])
    answer = f"The first word is {words[0]}."
    return Turn(f"What is the first word of: {text}?", answer, key=words[0])


def introduction(rng: random.Random) -> tuple[Turn, Turn]:
    """The user says a name; the second turn asks for it."""
    name = rng.choice(NAMES)
    ask = rng.choice((f"My name is {name}.", f"Hello, I am {name}.", f"Hi! My name is {name}."))
    answer = rng.choice(
        (
            f"Hello, {name}! Nice to meet you.",
            f"Nice to meet you, {name}. I am Pip.",
            f"Hi, {name}! How are you today?",
        )
    )
    return Turn(ask, answer), Turn("What is my name?", f"Your name is {name}.")


def scene(rng: random.Random) -> Turn:
    """One small situation and one question about it."""
    a, b = pair(rng)
    thing, other = rng.sample(THINGS, 2)
    color, tint = rng.sample(COLOR_WORDS, 2)
    place, snack, count = rng.choice(PLACES), rng.choice(SNACKS), rng.randrange(2, 9)
    a_thing, b_thing = f"{an(color)} {thing}", f"{an(tint)} {other}"
    story, questions = rng.choice(
        (
            (
                f"{a.name} has {a_thing}. {b.name} has {b_thing}.",
                (
                    (f"What color is {a.name}'s {thing}?", f"{a.name}'s {thing} is {color}."),
                    (f"What color is the {other}?", f"The {other} is {tint}."),
                    (f"Who has the {other}?", f"{b.name} has the {other}."),
                    (f"Who has the {thing}?", f"{a.name} has the {thing}."),
                    (f"What does {a.name} have?", f"{a.name} has {a_thing}."),
                    (f"What does {b.name} have?", f"{b.name} has {b_thing}."),
                ),
            ),
            (
                f"{a.name} went to {place}. {b.name} stayed at home and ate {an(snack)}.",
                (
                    (f"Where did {a.name} go?", f"{a.name} went to {place}."),
                    (f"Who ate {an(snack)}?", f"{b.name} ate {an(snack)}."),
                    ("Who stayed at home?", f"{b.name} stayed at home."),
                ),
            ),
            (
                f"{a.name} has {NUMBERS[count]} {plural(snack)} and gives one to {b.name}.",
                (
                    (
                        f"How many does {a.name} have now?",
                        f"{a.name} has {NUMBERS[count - 1]} now.",
                    ),
                    ("Who got one?", f"{b.name} got one."),
                ),
            ),
            (
                f"The {thing} is in the box. The {other} is on the table.",
                (
                    (f"Where is the {thing}?", f"The {thing} is in the box."),
                    (f"Where is the {other}?", f"The {other} is on the table."),
                ),
            ),
            (
                f"{a.name} is taller than {b.name}.",
                (
                    ("Who is taller?", f"{a.name} is taller."),
                    ("Who is shorter?", f"{b.name} is shorter."),
                ),
            ),
        )
    )
    question, answer = rng.choice(questions)
    return Turn(f"{story} {question}", answer)


def _spoken(rng: random.Random) -> Spoken:
    """A way to write small numbers: digits mostly, words sometimes."""
    as_words = rng.random() < 0.2
    return lambda n: NUMBERS[n] if as_words and n <= 20 else str(n)


def _sum(rng: random.Random, a: int, b: int, n: Spoken) -> tuple[str, str, int, str]:
    ask = (
        f"What is {n(a)} plus {n(b)}?",
        f"{a} + {b} = ?",
        f"How much is {n(a)} plus {n(b)}?",
        f"Add {n(a)} and {n(b)}.",
        f"what is {a}+{b}",
        f"Can you add {n(a)} and {n(b)}?",
    )
    return rng.choice(ask), "plus", a + b, f"I add {a} and {b}. That makes {a + b}."


def _difference(rng: random.Random, a: int, b: int, n: Spoken) -> tuple[str, str, int, str]:
    ask = (
        f"What is {n(a)} minus {n(b)}?",
        f"{a} - {b} = ?",
        f"Take {n(b)} away from {n(a)}.",
        f"what is {a}-{b}",
    )
    return rng.choice(ask), "minus", a - b, f"I take {b} away from {a}. That leaves {a - b}."


def _product(rng: random.Random, a: int, b: int, n: Spoken) -> tuple[str, str, int, str]:
    ask = (f"What is {n(a)} times {n(b)}?", f"{a} x {b} = ?", f"Multiply {n(a)} by {n(b)}.")
    return rng.choice(ask), "times", a * b, f"I need {a} groups of {b}. That makes {a * b}."


@dataclass(frozen=True)
class Calculation:
    """A question about two numbers, the whole sentence that answers it, and the result alone."""

    question: str
    statement: str
    result: str
    thought: str


def _calculation(rng: random.Random) -> Calculation:
    """Sums and differences up to 20, products up to 10."""
    a, b, draw, n = rng.randrange(21), rng.randrange(21), rng.random(), _spoken(rng)
    if draw < 0.5:
        question, verb, result, thought = _sum(rng, a, b, n)
    elif draw < 0.85:
        a, b = max(a, b), min(a, b)
        question, verb, result, thought = _difference(rng, a, b, n)
    else:
        a, b = rng.randrange(11), rng.randrange(11)
        question, verb, result, thought = _product(rng, a, b, n)
    statement = f"{cap(n(a))} {verb} {n(b)} is {n(result)}."
    return Calculation(question, statement, n(result), thought)


def arithmetic(rng: random.Random, think: float = 0.0) -> Turn:
    """A calculation asked for; the thought is kept with probability `think`."""
    c = _calculation(rng)
    answer = rng.choice((*[c.statement] * 8, f"The answer is {c.result}.", f"That is {c.result}."))
    return Turn(c.question, answer, c.thought if rng.random() < think else "", key=c.result)


def sum_document(rng: random.Random) -> list[Piece]:
    """Three questions, or more often nine calculations said in a row with loss on the results."""
    if rng.random() < 0.3:
        return chat([arithmetic(rng) for _ in range(3)], user=0)
    pieces = [Piece(START, OPENING)]
    for _ in range(9):
        c = _calculation(rng)
        before = c.statement.removesuffix(f"{c.result}.")
        pieces += [Piece(before, 0), Piece(c.result, KEY), Piece(". ", FULL)]
    return [*pieces, Piece(END, FULL)]


def comparison(rng: random.Random) -> Turn:
    a, b = rng.sample(range(100), 2)
    high, low = max(a, b), min(a, b)
    if rng.random() < 0.5:
        return Turn(f"Which is bigger, {a} or {b}?", f"{high} is bigger than {low}.")
    return Turn(f"Which number is smaller, {a} or {b}?", f"{low} is smaller than {high}.")


def counting(rng: random.Random) -> Turn:
    a = rng.randrange(15)
    b = a + rng.randrange(3, 10)
    if rng.random() < 0.7:
        ask = rng.choice((f"Count from {a} to {b}.", f"Please count from {a} to {b}."))
        return Turn(ask, f"{', '.join(map(str, range(a, b + 1)))}.")
    ask = rng.choice((f"Count down from {b} to {a}.", f"Count backwards from {b} to {a}."))
    return Turn(ask, f"{', '.join(map(str, range(b, a - 1, -1)))}.")


def opposite(rng: random.Random) -> Turn:
    a, b = rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        a, b = b, a
    ask = rng.choice(
        (
            f"What is the opposite of {a}?",
            f"Opposite of {a}?",
            f"Tell me the opposite of {a}.",
            f"What is the contrary of {a}?",
        )
    )
    full = f"The opposite of {a} is {b}."
    return Turn(ask, full, key=b)


def color(rng: random.Random) -> Turn:
    thing, shade = rng.choice(COLOR_OF)
    ask = rng.choice((f"What color is {thing}?", f"Tell me the color of {thing}."))
    answer = rng.choice((f"{cap(thing)} is {shade}.", f"It is {shade}."))
    return Turn(ask, answer, key=shade)


def capital(rng: random.Random) -> Turn:
    country, city = rng.choice(CAPITALS)
    if rng.random() < 0.25:
        return Turn(
            f"Which country has the capital {city}?",
            f"{city} is the capital of {country}.",
            key=country,
        )
    ask = rng.choice(
        (
            f"What is the capital of {country}?",
            f"Capital of {country}?",
            f"Do you know the capital of {country}?",
        )
    )
    return Turn(ask, f"The capital of {country} is {city}.", key=city)


def calendar(rng: random.Random) -> Turn:
    draw, day, month = rng.random(), rng.randrange(7), rng.randrange(12)
    if draw < 0.35:
        after = DAYS[(day + 1) % 7]
        return Turn(
            f"What day comes after {DAYS[day]}?", f"{after} comes after {DAYS[day]}.", key=after
        )
    if draw < 0.55:
        before = DAYS[day - 1]
        return Turn(
            f"What day comes before {DAYS[day]}?", f"{before} comes before {DAYS[day]}.", key=before
        )
    if draw < 0.8:
        after = MONTHS[(month + 1) % 12]
        return Turn(
            f"What month comes after {MONTHS[month]}?",
            f"{after} comes after {MONTHS[month]}.",
            key=after,
        )
    if draw < 0.9:
        ask = rng.choice(("Name the days of the week.", "What are the days of the week?"))
        return Turn(ask, f"The days of the week are {listed(DAYS)}.")
    ask = rng.choice(("Name the months of the year.", "What are the months?"))
    return Turn(ask, f"The months are {listed(MONTHS)}.")


TABLES = (arithmetic,) * 5 + (opposite, capital, color, calendar) * 2 + (counting, comparison)


def copy_document(rng: random.Random, vocabulary: list[str]) -> list[Piece]:
    """One to three copying turns; the questions carry no loss."""
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        draw = rng.random()
        if draw < 0.5:
            turns.append(repeat(rng, WORDS if rng.random() < 0.5 else vocabulary))
        elif draw < 0.9:
            turns.append(scene(rng))
        else:
            turns.extend(introduction(rng))
    return chat(turns, user=0)


def echo_tokens(rng: random.Random, special: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens said two to four times over, with loss from the second time on."""
    size = rng.randrange(4, 24)
    once = [rng.randrange(special, vocabulary) for _ in range(size)]
    times = rng.randrange(2, 5)
    weights = [0] * size + [FULL] * (size * (times - 1))
    return np.array(once * times), np.array(weights)


def copy_vocabulary(prose: list[str]) -> list[str]:
    """Words of the world and of the prose, the latter at most four thousand."""
    return sorted({*WORDS, *prose[:4000]})
