"""Stories from the plots of stories.txt and the frame of frame.txt, with questions about them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from corpus.documents import Piece, Turn, plain
from corpus.world import (
    ANIMALS,
    COLORS,
    DAYS,
    FAMILY,
    FOODS,
    GLAD,
    PETS,
    PLACES,
    SIZES,
    SORRY,
    THINGS,
    WEATHER,
    WILD,
    Person,
    an,
)

HERE = Path(__file__).parent
WITH_THING = ("lost", "newfriend")
STUCK = [
    "dog",
    "cat",
    "rabbit",
    "mouse",
    "duck",
    "hen",
    "turtle",
    "parrot",
    "goat",
    "fox",
    "frog",
    "squirrel",
    "hedgehog",
    "crow",
    "bee",
]
MET = [animal for animal in WILD if animal[0] not in "aeiou"]
SPEECH = re.compile(r"([hf]): ")


@dataclass
class Plot:
    """Sentences with alternatives, the words to draw, the questions."""

    name: str
    moral: str
    lines: list[list[str]] = field(default_factory=list)
    optional: list[bool] = field(default_factory=list)
    draws: dict[str, list[str]] = field(default_factory=dict)
    questions: list[tuple[str, str]] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Take one line of a plot file."""
        if line.startswith("let "):
            key, values = line[4:].split(": ", 1)
            self.draws[key] = values.split(" | ")
        elif line.startswith("ask: "):
            question, answer = line[5:].split(" = ")
            self.questions.append((question, answer))
        else:
            self.optional.append(line.startswith("~ "))
            line = line.removeprefix("~ ")
            who = SPEECH.match(line)
            texts = (line[3:] if who else line).split(" | ")
            self.lines.append([f"{who[0]}{text}" if who else text for text in texts])


@dataclass(frozen=True)
class Story:
    """A told story, its people, and what can be asked about it."""

    text: str
    hero: Person
    friend: Person
    turns: tuple[Turn, ...]


@cache
def plots(file: str = "stories.txt") -> dict[str, Plot]:
    """The sections of a plot file by their full title."""
    found: dict[str, Plot] = {}
    plot = Plot("", "")
    for line in (HERE / file).read_text().splitlines():
        if line.startswith("== "):
            name, _, moral = line[3:].partition(" ")
            plot = found[line[3:] if file == "frame.txt" else name] = Plot(name, moral)
        elif line and not line.startswith("#"):
            plot.add(line)
    return found


def speak(rng: random.Random, who: Person, text: str) -> str:
    """Direct speech: "Text," said Name.  or  Name asked, "Text?" """
    verbs = {"?": ("asked", "asked", "said"), "!": ("said", "cried", "called")}
    verb = rng.choice(verbs.get(text[-1], ("said", "said", "whispered")))
    inside = text if text[-1] in "?!" else f"{text[:-1]},"
    return rng.choice(
        (
            f'"{inside}" {verb} {who.name}.',
            f'"{inside}" {who.he} {verb}.',
            f'{who.name} {verb}, "{text}"',
        )
    )


def scenery(rng: random.Random, hero: Person, **given: str) -> dict[str, str]:
    """The drawn words a plot may name."""
    pet = rng.choice([animal for animal in STUCK if animal != hero.animal])
    words = {
        "thing": rng.choice(THINGS),
        "color": rng.choice(COLORS),
        "food": rng.choice(FOODS),
        "place": rng.choice(PLACES),
        "weather": rng.choice(WEATHER),
        "size": rng.choice(SIZES),
        "day": rng.choice(DAYS),
        "family": rng.choice(FAMILY),
        "sorry": rng.choice(SORRY),
        "glad": rng.choice(GLAD),
        "wild": rng.choice(MET),
        "pet": pet,
        "pet_food": ANIMALS[pet].food,
        **given,
    }
    return {**words, **{f"a_{key}": an(words[key]) for key in ("color", "weather", "size")}}


def _fill(
    rng: random.Random, choices: list[str], h: Person, f: Person, words: dict[str, str]
) -> str:
    template = rng.choice(choices)
    who = SPEECH.match(template)
    text = template[3:].format(h=h, f=f, **words) if who else template.format(h=h, f=f, **words)
    return speak(rng, h if who[1] == "h" else f, text) if who else text


def _introduction(rng: random.Random, plot: Plot, friend: Person) -> list[list[str]]:
    """The sentence that brings in the friend, if the plot does not do it itself."""
    frame = plots("frame.txt")
    if plot.name == "newfriend":
        return []
    if friend.animal:
        return frame["animal"].lines
    return frame["friend"].lines if rng.random() < 0.5 else []


def _body(rng: random.Random, plot: Plot) -> list[list[str]]:
    """The plot's lines, sometimes without one optional line."""
    spare = [number for number, optional in enumerate(plot.optional) if optional]
    dropped = rng.choice(spare) if spare and rng.random() < 0.4 else -1
    return [line for number, line in enumerate(plot.lines) if number != dropped]


def _someone(rng: random.Random) -> Person:
    animal = rng.choice(PETS + WILD) if rng.random() < 0.35 else None
    return Person.make(rng, animal=animal)


def tell(
    rng: random.Random,
    hero: Person | None = None,
    friend: Person | None = None,
    thing: str = "",
    plot: str = "",
) -> Story:
    """A story; whatever is not given is drawn."""
    hero = hero or _someone(rng)
    friend = friend or _someone(rng)
    while friend.name == hero.name:
        friend = _someone(rng)
    chosen = WITH_THING if thing else tuple(plots())
    told, frame = plots()[plot or rng.choice(chosen)], plots("frame.txt")
    words = scenery(rng, hero, **({"thing": thing} if thing else {}))
    words.update({key: rng.choice(values) for key, values in told.draws.items()})
    lines = frame["opening"].lines + _introduction(rng, told, friend) + _body(rng, told)
    cut, parts = rng.randrange(5, len(lines)), []
    for number, line in enumerate(lines):
        parts.append(_fill(rng, line, hero, friend, words))
        parts.append("\n\n" if number == cut and rng.random() < 0.4 else " ")
    parts.append(_fill(rng, frame["ending"].lines[0], hero, friend, words))
    if rng.random() < 0.25:
        parts.append(rng.choice((" ", "\n\n")) + rng.choice(frame[f"moral {told.moral}"].lines[0]))
    if rng.random() < 0.12:
        parts.append(rng.choice(("\n\nThe end.", " The end.")))
    turns = tuple(
        Turn(ask.format(h=hero, f=friend, **words), answer.format(h=hero, f=friend, **words))
        for ask, answer in told.questions
    )
    return Story("".join(parts), hero, friend, turns)


def document(rng: random.Random) -> list[Piece]:
    """A story without a conversation."""
    return plain(tell(rng).text)
