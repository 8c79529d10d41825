"""The words and tables of the demo model's little world, and the grammar they need."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

GIRLS = (
    "Lily Mia Anna Sara Nina Ella Zoe Ruby Ivy Clara Rosa Maya Emma Tara Luna Greta Hana Dora Elsa Pia"
).split()
BOYS = (
    "Tom Ben Max Leo Sam Finn Jack Noah Omar Theo Luca Hugo Ravi Eli Oscar Milo Adam Kai Otto Paul"
).split()
NAMES = GIRLS + BOYS


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


ANIMAL_TABLE = """
dog woof kennel bones puppy 4 loyal mammal; cat meow house fish kitten 4 quiet mammal
cow moo barn grass calf 4 calm mammal; pig oink pen corn piglet 4 clever mammal
sheep baa meadow grass lamb 4 gentle mammal; horse neigh stable hay foal 4 strong mammal
duck quack pond bread duckling 2 cheerful bird; hen cluck henhouse seeds chick 2 busy bird
owl hoo_hoo tree mice owlet 2 wise bird; frog ribbit pond flies tadpole 4 jumpy amphibian
bee buzz hive nectar larva 6 busy insect; mouse squeak hole cheese pup 4 tiny mammal
lion roar savanna meat cub 4 brave mammal; bear grrr cave honey cub 4 big mammal
fox yip den berries kit 4 clever mammal; rabbit thump burrow carrots bunny 4 quick mammal
squirrel chit_chit tree nuts kit 4 quick mammal; hedgehog snuff hedge worms hoglet 4 shy mammal
snake hiss hole eggs snakelet 0 quiet reptile; crow caw nest seeds chick 2 clever bird
wolf awoo den meat pup 4 wild mammal; goat maa hill leaves kid 4 stubborn mammal
turtle snap river leaves hatchling 4 slow reptile; elephant toot savanna leaves calf 4 huge mammal
hummingbird hum garden nectar chick 2 tiny bird; penguin honk ice fish chick 2 funny bird
ant tap_tap anthill crumbs larva 6 strong insect; spider tick_tick web flies spiderling 8 patient arachnid
whale ooo sea krill calf 0 huge mammal; parrot squawk jungle fruit chick 2 loud bird
"""


def _animals() -> dict[str, Animal]:
    rows = (row.split() for row in ANIMAL_TABLE.replace("\n", ";").split(";") if row.strip())
    table = {}
    for name, sound, home, food, baby, legs, trait, group in rows:
        spoken = sound.replace("_", " ")
        table[name] = Animal(name, spoken, home, food, baby, int(legs), trait, group)
    return table


ANIMALS = _animals()
PETS = "dog cat rabbit mouse duck hen turtle parrot goat horse".split()
WILD = (
    "fox owl frog bear squirrel hedgehog crow wolf bee hummingbird turtle mouse rabbit lion elephant"
    " penguin"
).split()
COLORS = "red blue green yellow purple orange pink white black brown golden silver".split()
THINGS = (
    "ball kite hat book drum boat bell lamp key map box cup scarf coin button flute basket blanket bike"
    " doll train puzzle ring spoon umbrella lantern telescope paintbrush rope jar"
).split()
FOODS = (
    "bread soup cake pie apples pears berries honey pancakes cookies carrots pumpkins noodles rice"
    " cheese tea milk jam cherries plums"
).split()
FRUITS = "apple pear cherry plum peach banana orange lemon grape strawberry".split()
SNACKS = "apple pear cookie carrot cherry plum pancake sandwich muffin peach".split()
PLACES = [
    f"the {place}"
    for place in (
        "park forest garden river beach hill market school farm meadow mill lake library village"
        " bridge orchard"
    ).split()
]
WEATHER = "sunny rainy windy snowy foggy warm cold cloudy bright stormy".split()
GLAD = "happy proud glad excited cheerful thankful calm".split()
SORRY = "sad scared worried lonely upset tired nervous cross".split()
SIZES = "little small big tiny tall young old".split()
NICE = (
    "kind clever brave curious funny gentle honest patient cheerful quiet careful friendly"
).split()
FAMILY = "mother father grandmother grandfather aunt uncle sister brother".split()
OPPOSITES = [
    tuple(pair.split("-"))
    for pair in (
        "hot-cold big-small up-down day-night fast-slow happy-sad open-closed light-dark wet-dry"
        " full-empty high-low hard-soft left-right loud-quiet long-short strong-weak early-late"
        " near-far clean-dirty thick-thin inside-outside sweet-sour rich-poor brave-afraid"
        " first-last begin-end win-lose push-pull laugh-cry asleep-awake true-false smooth-rough"
        " young-old love-hate"
    ).split()
]
COLOR_OF = [
    tuple(line.split(": "))
    for line in (
        "the sky: blue; grass: green; snow: white; the sun: yellow; a lemon: yellow; a banana: yellow;"
        " a tomato: red; a strawberry: red; coal: black; the night: black; a carrot: orange;"
        " chocolate: brown; milk: white; a frog: green; a crow: black; the sea: blue;"
        " a leaf in spring: green; a pumpkin: orange; a flamingo: pink; an elephant: grey;"
        " a plum: purple; gold: golden; a cherry: red; a pea: green"
    ).split("; ")
]
CAPITALS = [
    tuple(line.split(": "))
    for line in (
        "France: Paris; Italy: Rome; Spain: Madrid; Germany: Berlin; England: London;"
        " Portugal: Lisbon; Greece: Athens; Austria: Vienna; Poland: Warsaw; Norway: Oslo;"
        " Sweden: Stockholm; Finland: Helsinki; Denmark: Copenhagen; Ireland: Dublin;"
        " Hungary: Budapest; Japan: Tokyo; China: Beijing; India: New Delhi; Egypt: Cairo;"
        " Kenya: Nairobi; Canada: Ottawa; Mexico: Mexico City; Peru: Lima; Brazil: Brasilia;"
        " Chile: Santiago; Cuba: Havana; Russia: Moscow; Turkey: Ankara; Australia: Canberra;"
        " Belgium: Brussels"
    ).split("; ")
]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty"
).split()
WORDS = sorted(
    {
        *NAMES, *ANIMALS, *COLORS, *THINGS, *FOODS, *SNACKS, *WEATHER, *NICE, *DAYS, *MONTHS,
        *NUMBERS, *GLAD, *SORRY, *FAMILY, *(word for pair in OPPOSITES for word in pair),
        *(word for pair in CAPITALS for word in pair if " " not in word),
    }
)  # fmt: skip


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
