"""Training data of the demo model on disk: one token stream per domain, with weights and starts.

A domain NAME in a directory is three arrays: NAME.tokens.npy (uint16), NAME.weights.npy (uint8,
loss weight in tenths, same length) and NAME.starts.npy (int64, first token of every document).
Every training row begins at a document's start, so nothing a row must copy lies outside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOOKAHEAD = 4  # the main target and the targets of three draft steps
WEIGHT_UNIT = 10


@dataclass(frozen=True)
class Batch:
    """ids int64 [B, T + LOOKAHEAD], weights float32 of the same shape, domain index [B]."""

    ids: np.ndarray
    weights: np.ndarray
    domains: np.ndarray


class Domain:
    """One memory-mapped stream."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.tokens = np.load(directory / f"{name}.tokens.npy", mmap_mode="r")
        self.weights = np.load(directory / f"{name}.weights.npy", mmap_mode="r")
        self.starts = np.load(directory / f"{name}.starts.npy")

    def row(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`length` tokens from `start` with their weights as floats."""
        ids = self.tokens[start : start + length].astype(np.int64)
        return ids, self.weights[start : start + length].astype(np.float32) / WEIGHT_UNIT

    def usable(self, length: int) -> np.ndarray:
        """Document starts that leave `length` tokens."""
        return self.starts[self.starts + length <= len(self.tokens)]


def save_domain(directory: Path, name: str, documents: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """Write (ids, weights in tenths) documents as one domain; returns the number of tokens."""
    lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    tokens = np.concatenate([ids for ids, _ in documents]).astype(np.uint16)
    weights = np.concatenate([weights for _, weights in documents]).astype(np.uint8)
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / f"{name}.tokens.npy", tokens)
    np.save(directory / f"{name}.weights.npy", weights)
    np.save(directory / f"{name}.starts.npy", starts)
    return len(tokens)


class Mixture:
    """Draws rows from several domains in given proportions."""

    def __init__(self, directory: Path, shares: dict[str, float]) -> None:
        self.names = list(shares)
        self.domains = [Domain(directory, name) for name in self.names]
        total = sum(shares.values())
        self.shares = np.array([shares[name] / total for name in self.names])

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> Batch:
        """`rows` rows of `length` tokens plus the look-ahead."""
        chosen = rng.choice(len(self.names), rows, p=self.shares)
        parts = []
        for index in chosen:
            domain = self.domains[index]
            starts = domain.usable(length + LOOKAHEAD)
            parts.append(domain.row(int(rng.choice(starts)), length + LOOKAHEAD))
        ids, weights = (np.stack(column) for column in zip(*parts, strict=True))
        return Batch(ids, weights, chosen)
