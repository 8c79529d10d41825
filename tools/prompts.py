"""Prompts for benchmarks and exactness runs: four kinds of text, the same ones every time."""

from __future__ import annotations

import random
from collections.abc import Iterator

from colibri.tokenizer import Tokenizer

STORY, QUESTION, COPY, RANDOM = "story", "question", "copy", "random"
KINDS = (STORY, QUESTION, COPY, RANDOM)
RANDOM_TOKENS = 64

_ANIMALS = (
    "fox", "owl", "wolf", "bear", "cat", "dog", "mouse", "rabbit", "horse", "duck", "bee",
    "frog", "lion", "goose", "crow",
)  # fmt: skip
_NAMES = (
    "Luna", "Ben", "Ruby", "Max", "Elsa", "Omar", "Hugo", "Greta", "Noah", "Dora", "Clara",
    "Hana", "Luca", "Sam",
)  # fmt: skip
_PLACES = (
    "mill", "bridge", "beach", "market", "river", "forest", "garden", "harbour", "hill",
    "lake",
)  # fmt: skip
_COUNTRIES = (
    "Japan", "France", "Egypt", "Italy", "Spain", "Kenya", "Norway", "Peru", "Greece",
    "Poland",
)  # fmt: skip
_WORDS = (
    "blue", "lantern", "seven", "owls", "quiet", "river", "stone", "bread", "morning",
    "window", "paper", "bell",
)  # fmt: skip
_TASKS = ("adds up a list", "reverses a string", "counts the vowels", "finds the largest number")


def question(kind: str, number: int) -> str:
    """Prompt text number `number` of a kind (not RANDOM)."""
    rng = random.Random(f"{kind} {number}")
    if kind == STORY:
        return rng.choice(
            (
                f"Tell me a story about a {rng.choice(_ANIMALS)}.",
                f"Tell me a story about {rng.choice(_NAMES)} and {rng.choice(_NAMES)}.",
                f"Write a poem about a {rng.choice(_ANIMALS)} at the {rng.choice(_PLACES)}.",
            )
        )
    if kind == QUESTION:
        return rng.choice(
            (
                f"What is the capital of {rng.choice(_COUNTRIES)}?",
                f"What is {rng.randrange(10)} plus {rng.randrange(10)}?",
                f"Write a Python function that {rng.choice(_TASKS)}.",
                f"What is {rng.choice(_WORDS)} {rng.choice(_WORDS)}?",
            )
        )
    words = " ".join(rng.choice(_WORDS) for _ in range(8))
    return f"Repeat after me: {'. '.join([words] * 4)}"


def prompt(tokenizer: Tokenizer, kind: str, number: int) -> list[int]:
    """Token ids of one prompt: a turn of the chat template, or random regular tokens."""
    if kind == RANDOM:
        rng = random.Random(f"{kind} {number}")
        regular = [token for token in range(tokenizer.vocab_used) if tokenizer.token_bytes(token)]
        return [rng.choice(regular) for _ in range(RANDOM_TOKENS)]
    head, tail = "[gMASK]<sop><|user|>", "<|assistant|><think></think>"
    text = tokenizer.encode(question(kind, number))
    return [*tokenizer.encode_template(head), *text, *tokenizer.encode_template(tail)]


def mixed(tokenizer: Tokenizer, count: int) -> Iterator[list[int]]:
    """`count` prompts, all kinds in turn."""
    for number in range(count):
        yield prompt(tokenizer, KINDS[number % len(KINDS)], number)
