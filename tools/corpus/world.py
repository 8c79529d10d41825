"""The words and tables of the demo model's little world (world.txt), and the grammar they need."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Animal:
    """What the world knows about an animal."""

    name: str
    sound: str
    home: str
    food: str
    baby: str
    legs: int
    trait: str
    group: str


def _read() -> tuple[dict[str, list[str]], dict[str, Animal]]:
    """The lists and the animals of world.txt, which an empty line separates; _ is a space."""
    lists: dict[str, list[str]] = {}
    animals: dict[str, Animal] = {}
    current, table = Path(__file__).with_name("world.txt").read_text().split("\n\n")
    for part, lines in (("list", current), ("animal", table)):
        for line in lines.splitlines():
            if line.startswith("#"):
                continue
            name, _, rest = line.partition(": ")
            words = [word.replace("_", " ") for word in rest.split()]
            if part == "list":
                lists.setdefault(name, []).extend(words)
            else:
                sound, home, food, baby, legs, trait, group = words
                animals[name] = Animal(name, sound, home, food, baby, int(legs), trait, group)
    return lists, animals


_LISTS, ANIMALS = _read()


def _pairs(name: str) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (word.partition("=") for word in _LISTS[name])]


GIRLS, BOYS = _LISTS["girls"], _LISTS["boys"]
NAMES = GIRLS + BOYS
PETS, WILD = _LISTS["pets"], _LISTS["wild"]
COLORS, THINGS, WEATHER, SIZES = (_LISTS[n] for n in ("colors", "things", "weather", "sizes"))
FOODS, FRUITS, SNACKS = _LISTS["foods"], _LISTS["fruits"], _LISTS["snacks"]
PLACES = [f"the {place}" for place in _LISTS["places"]]
GLAD, SORRY, NICE, FAMILY = (_LISTS[n] for n in ("glad", "sorry", "nice", "family"))
DAYS, MONTHS, NUMBERS = _LISTS["days"], _LISTS["months"], _LISTS["numbers"]
OPPOSITES, COLOR_OF, CAPITALS = _pairs("opposites"), _pairs("color_of"), _pairs("capitals")
WORDS = sorted(
    {
        *(
            word
            for group in (NAMES, ANIMALS, COLORS, THINGS, FOODS, SNACKS, WEATHER)
            for word in group
        ),
        *(word for group in (NICE, DAYS, MONTHS, NUMBERS, GLAD, SORRY, FAMILY) for word in group),
        *(word for pair in OPPOSITES + CAPITALS for word in pair if " " not in word),
    }
)


def cap(text: str) -> str:
    """First letter in upper case."""
    return text[:1].upper() + text[1:]


def an(word: str) -> str:
    """The word with its indefinite article, chosen by sound: an hour, an honest fox, a unicorn."""
    lower = word.lower()
    vowel = lower[0] in "aeiou" or lower.startswith(("honest", "hour"))
    if lower.startswith(("uni", "use", "eu", "one")):
        vowel = False
    return f"{'an' if vowel else 'a'} {word}"


def plural(word: str) -> str:
    """Regular plural of a snack: cherry, peach, apple."""
    if word.endswith("y"):
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("ch", "sh", "x", "s")) else "s")


def listed(words: list[str]) -> str:
    """a, b and c."""
    return f"{', '.join(words[:-1])} and {words[-1]}"


@dataclass(frozen=True)
class Person:
    """A child or an animal with a name; the fields are what a story template may ask for."""

    name: str
    girl: bool
    kind: str
    adj: str
    animal: str | None = None
    he: str = field(init=False)
    him: str = field(init=False)
    his: str = field(init=False)
    He: str = field(init=False)
    His: str = field(init=False)
    a_adj: str = field(init=False)
    a_kind: str = field(init=False)

    def __post_init__(self) -> None:
        he, him, his = ("she", "her", "her") if self.girl else ("he", "him", "his")
        for name, value in (("he", he), ("him", him), ("his", his)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "He", cap(he))
        object.__setattr__(self, "His", cap(his))
        object.__setattr__(self, "a_adj", an(self.adj))
        object.__setattr__(self, "a_kind", an(self.kind))

    @staticmethod
    def make(rng: random.Random, animal: str | None = None, name: str | None = None) -> Person:
        name = name or rng.choice(NAMES)
        girl = name in GIRLS
        return Person(name, girl, animal or ("girl" if girl else "boy"), rng.choice(NICE), animal)


def pair(rng: random.Random) -> tuple[Person, Person]:
    """Two children with different names."""
    first, second = rng.sample(NAMES, 2)
    return Person.make(rng, name=first), Person.make(rng, name=second)
