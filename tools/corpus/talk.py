"""Conversations: questions the model can answer, requests for stories, small talk."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from corpus import drills
from corpus.documents import Piece, Turn, chat
from corpus.poems import poem
from corpus.stories import tell
from corpus.world import (
    ANIMALS,
    COLORS,
    FOODS,
    FRUITS,
    NUMBERS,
    PETS,
    SNACKS,
    THINGS,
    WILD,
    Animal,
    Person,
    an,
    cap,
    listed,
    pair,
)

HERE = Path(__file__).parent
PLAYTHINGS = ["ball", "kite", "drum", "doll", "train", "puzzle", "boat", "bike"]
Entry = tuple[tuple[str, ...], tuple[str, ...]]
SYSTEMS = (
    "You are Pip, a small and friendly model.",
    "You are a helpful assistant.",
    "Answer in short sentences.",
)


@cache
def sections() -> dict[str, tuple[Entry, ...]]:
    """talk.txt: section -> (ways to ask, answers)."""
    found: dict[str, list[Entry]] = {}
    name, questions = "", ()
    for line in (HERE / "talk.txt").read_text().splitlines():
        if line.startswith("# ") and " " not in line[2:]:
            name = line[2:]
        elif line.startswith("? "):
            questions = tuple(line[2:].split(" | "))
        elif line.startswith("! "):
            found.setdefault(name, []).append((questions, tuple(line[2:].split(" | "))))
    return {key: tuple(entries) for key, entries in found.items()}


@cache
def code() -> tuple[tuple[str, str], ...]:
    """code.txt: what a function does -> its source."""
    blocks = (HERE / "code.txt").read_text().split("\n\n")
    return tuple(
        (head[2:], body) for head, body in (block.strip().split("\n", 1) for block in blocks)
    )


def known(rng: random.Random, section: str) -> Turn:
    """A question of talk.txt and one of its answers."""
    questions, answers = rng.choice(sections()[section])
    return Turn(rng.choice(questions), rng.choice(answers))


def unknown(rng: random.Random) -> Turn:
    """Something the model cannot know; some of it is asked in a general form."""
    if rng.random() < 0.5:
        return known(rng, "unknown")
    thing = rng.choice(
        ("wheel", "river", "castle", "tax", "planet", "engine", "poet", "king", "bank")
    )
    ask = rng.choice(
        (f"What is the history of the {thing}?", f"Who invented the {thing}?",
         f"How does a {thing} work?", f"Can you buy me a {thing}?",
         f"Why is the {thing} important?")
    )  # fmt: skip
    return Turn(ask, rng.choice(sections()["unknown"][0][1]))


def _animal_questions(a: Animal) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    n, it, legs = a.name, cap(an(a.name)), NUMBERS[a.legs] if a.legs else "no"
    article = {"ice": "on the", "sea": "in the", "jungle": "in the", "savanna": "in the"}
    home = f"{article[a.home]} {a.home}" if a.home in article else f"in {an(a.home)}"
    meal = "drinks nectar from flowers" if a.food == "nectar" else f"likes to eat {a.food}"
    bird = f"Yes, {an(n)} is a bird." if a.group == "bird" else f"No, {an(n)} is {an(a.group)}."
    return [
        ((f"What does {an(n)} say?", f"What sound does {an(n)} make?"), (f"{it} says {a.sound}.",)),
        ((f"Where does {an(n)} live?",), (f"{it} lives {home}.",)),
        ((f"What does {an(n)} eat?", f"What does {an(n)} like to eat?"), (f"{it} {meal}.",)),
        ((f"What is a baby {n} called?", f"What do you call a baby {n}?"),
         (f"A baby {n} is called {an(a.baby)}.",)),
        ((f"How many legs does {an(n)} have?",), (f"{it} has {legs} legs.",)),
        ((f"Is {an(n)} a bird?",), (bird,)),
        ((f"Tell me about the {n}.", f"Tell me something about {an(n)}.", f"What is {an(n)}?"),
         (f"{it} is {an(a.group)}. It is {a.trait}, it has {legs} legs, and it likes {a.food}.",
          f"The {n} is {an(a.group)} with {legs} legs. It is often {a.trait}, "
          f"and it says {a.sound}.")),
    ]  # fmt: skip


def animal(rng: random.Random) -> Turn:
    questions, answers = rng.choice(_animal_questions(rng.choice(list(ANIMALS.values()))))
    return Turn(rng.choice(questions), rng.choice(answers))


def naming(rng: random.Random) -> Turn:
    """Name two, three or four of a kind."""
    count = rng.randrange(2, 5)
    birds = [name for name, a in ANIMALS.items() if a.group == "bird"]
    kinds = {
        "animals": list(ANIMALS), "colors": COLORS, "fruits": FRUITS, "birds": birds,
        "things you can play with": PLAYTHINGS,
        "pets": PETS, "wild animals": WILD, "foods": FOODS,
    }  # fmt: skip
    kind = rng.choice(list(kinds))
    words = rng.sample(kinds[kind], count)
    body = listed([word if kind in ("colors", "foods") else an(word) for word in words])
    what = f"{NUMBERS[count]} {kind}"
    ask = rng.choice((f"Name {what}.", f"Tell me {what}.", f"Can you name {what}?"))
    return Turn(ask, rng.choice((f"Here are {what}: {body}.", f"{cap(body)}.")))


def spelling(rng: random.Random) -> Turn:
    word, draw = rng.choice([*THINGS, *ANIMALS, *SNACKS]), rng.random()
    if draw < 0.5:
        ask = rng.choice((f"Spell the word {word}.", f"How do you spell {word}?"))
        return Turn(ask, f"{'-'.join(word.upper())}.")
    if draw < 0.8:
        ask = (f"What is the first letter of {word}?", f"Which letter does {word} start with?")
        return Turn(rng.choice(ask), f"The word {word} starts with {word[0].upper()}.")
    return Turn(
        f"How many letters are in {word}?", f"The word {word} has {NUMBERS[len(word)]} letters."
    )


def rhyme(rng: random.Random) -> Turn:
    creature, text = poem(rng)
    ask = rng.choice(
        ("Write a poem.", "Tell me a poem.", f"Write a poem about {an(creature)}.",
         f"Can you write a short poem about {an(creature)}?",
         f"A poem about {an(creature)}, please.")
    )  # fmt: skip
    return Turn(ask, text)


def program(rng: random.Random) -> Turn:
    what, source = rng.choice(code())
    ask = rng.choice(
        (f"Write a Python function that {what}.", f"Python function that {what}?",
         f"Show me Python code that {what}.", f"Can you write a function that {what}?")
    )  # fmt: skip
    before = rng.choice(("", "Here is a small function:\n\n", "Here you are:\n\n"))
    return Turn(ask, f"{before}```python\n{source}\n```")


def story(rng: random.Random) -> tuple[Turn, tuple[Turn, ...]]:
    """A request for a story with the story, and the questions that may follow."""
    draw, hero, friend, thing = rng.random(), None, None, ""
    ask = ("Tell me a story.", "Tell me a short story.", "Write a story, please.",
           "Once more, a story please.", "Can you tell me a story?",
           "I would like to hear a story.", "tell me a story")  # fmt: skip
    if draw < 0.25:
        hero = Person.make(rng, animal=rng.choice(PETS + WILD))
        kind = an(hero.kind)
        ask = (f"Tell me a story about {kind}.", f"Write a short story about {kind}.",
               f"Can you tell me a story about {kind}?", f"A story about {kind}, please.",
               f"story about {kind}")  # fmt: skip
    elif draw < 0.45:
        hero = Person.make(rng)
        ask = (f"Tell me a story about {hero.name}.",
               f"Write a story about {an(hero.kind)} named {hero.name}.",
               f"Please tell me a story about {an(hero.kind)} called {hero.name}.")  # fmt: skip
    elif draw < 0.75:
        hero, friend = pair(rng)
        both = f"{hero.name} and {friend.name}"
        ask = (f"Tell me a story about {both}.", f"Write a story about {both}.")
    elif draw < 0.85:
        thing = rng.choice(THINGS)
        ask = (f"Tell me a story with {an(thing)}.", f"Write a story about {an(thing)}.",
               f"Tell me a story about a lost {thing}.")  # fmt: skip
    told = tell(rng, hero, friend, thing)
    return Turn(rng.choice(ask), told.text), told.turns


QUESTIONS = (
    [lambda rng: drills.repeat(rng, drills.WORDS)] * 6
    + [lambda rng: drills.arithmetic(rng, think=0.15)] * 12
    + [drills.comparison] * 2
    + [drills.counting] * 3
    + [drills.opposite] * 5
    + [drills.color] * 3
    + [drills.capital] * 4
    + [drills.calendar] * 3
    + [drills.scene] * 11
    + [animal] * 9
    + [naming] * 4
    + [spelling] * 3
    + [rhyme] * 3
    + [program] * 6
    + [lambda rng: known(rng, "fact")] * 9
    + [lambda rng: known(rng, "persona")] * 7
)


BY_HEART = (*drills.TABLES, *[lambda rng: known(rng, "fact")] * 5,
            *[lambda rng: known(rng, "persona")] * 3, program, program, program,
            animal, animal, animal, animal, lambda rng: known(rng, "greeting"))  # fmt: skip


def drill(rng: random.Random) -> list[Piece]:
    """One to five questions whose answers must be known; the questions carry no loss."""
    return chat([rng.choice(BY_HEART)(rng) for _ in range(rng.choice((1, 2, 3, 5)))], user=0)


def _next(rng: random.Random, first: bool) -> tuple[Turn, tuple[Turn, ...]]:
    """One turn of a conversation and the turns that may follow it."""
    draw = rng.random()
    if first and draw < 0.15:
        return known(rng, "greeting"), ()
    if not first and draw < 0.12:
        return known(rng, "thanks"), ()
    if draw < 0.32:
        return story(rng)
    if draw < 0.36:
        return unknown(rng), ()
    if draw < 0.39:
        turn, follow = drills.introduction(rng)
        return turn, (follow,)
    return rng.choice(QUESTIONS)(rng), ()


def document(rng: random.Random) -> list[Piece]:
    """A chat of one to five turns."""
    turns: list[Turn] = []
    pending: list[Turn] = []
    for number in range(rng.choice((1, 1, 2, 2, 3, 4, 5))):
        if pending and rng.random() < 0.6:
            turns.append(pending.pop(rng.randrange(len(pending))))
            continue
        turn, follow = _next(rng, first=number == 0)
        turns.append(turn)
        pending = list(follow) or pending
    if rng.random() < 0.1:
        turns.append(known(rng, "goodbye"))
    return chat(turns, system=rng.choice(SYSTEMS) if rng.random() < 0.05 else "")
