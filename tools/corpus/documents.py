"""Documents as weighted pieces of text, and their tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from corpus.world import NAMES

START, END = "[gMASK]<sop>", "<|endoftext|>"
FULL, USER, OPENING, MARKUP, NAME, KEY = 10, 4, 4, 1, 25, 25
NAME_PATTERN = re.compile(r"\b(?:" + "|".join(NAMES) + r")\b")


@dataclass(frozen=True)
class Turn:
    """A question and its answer; `key` is the part of the answer that had to be known."""

    question: str
    answer: str
    think: str = ""
    key: str = ""


@dataclass(frozen=True)
class Piece:
    """Text with the loss weight (in tenths) of predicting it."""

    text: str
    weight: int


def chat(turns: Sequence[Turn], system: str = "", user: int = USER) -> list[Piece]:
    """A conversation in the GLM template; the questions weigh `user`, the answers FULL."""
    pieces = [Piece(START + (f"<|system|>{system}" if system else "") + "<|user|>", OPENING)]
    for number, turn in enumerate(turns):
        if number:
            pieces.append(Piece("<|user|>", FULL))
        pieces.append(Piece(turn.question, user))
        pieces.append(Piece("<|assistant|><think>", MARKUP))
        pieces.append(Piece(turn.think, FULL))
        pieces.append(Piece("</think>", MARKUP))
        before, key, after = turn.answer.rpartition(turn.key) if turn.key else (turn.answer, "", "")
        pieces += [Piece(before, FULL), Piece(key, KEY), Piece(after, FULL)]
    return [*pieces, Piece(END, FULL)]


def plain(text: str, weight: int = FULL) -> list[Piece]:
    """A document without turns."""
    return [Piece(START, OPENING), Piece(text, weight), Piece(END, weight)]


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _character_weights(pieces: Sequence[Piece]) -> np.ndarray:
    """The weight of every character; a name that was named before weighs more."""
    text = text_of(pieces)
    weights = np.repeat([p.weight for p in pieces], [len(p.text) for p in pieces])
    seen: set[str] = set()
    for match in NAME_PATTERN.finditer(text):
        if match[0] in seen and weights[match.start()] == FULL:
            weights[match.start() : match.end()] = NAME
        seen.add(match[0])
    return weights


def encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and the weight of each: that of the token's last character."""
    encoding = tokenizer.encode(text_of(pieces), add_special_tokens=False)
    weights = _character_weights(pieces)
    ends = np.array([end for _, end in encoding.offsets])
    return np.array(encoding.ids), weights[ends - 1]
