"""The oracle fixtures: what transformers computed on the tiny checkpoints, by make_oracle.py."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiny

FIXTURES = Path(__file__).parent / "fixtures"
CASES = tuple(tiny.CASES)
WAYS = {"shared": True, "own": False}  # where draft steps >= 1 take their index sets from


@dataclass(frozen=True)
class Draft:
    """Draft steps 0..: step 0 is the absorb's last row, whose token is the last one absorbed."""

    rows: int  # rows absorbed before drafting
    fed: np.ndarray  # [G] the token each step reads
    logits: np.ndarray  # [G, V]
    hidden: np.ndarray  # [G, H]
    sets: np.ndarray  # [G, k], -1 padded


@dataclass(frozen=True)
class Oracle:
    """One fixture. T tokens, V logits, H hidden, K experts a row, k index_topk."""

    case: str
    arrays: dict[str, np.ndarray]

    @property
    def ids(self) -> np.ndarray:
        """The prompt [T]."""
        return self.arrays["ids"]

    @property
    def logits(self) -> np.ndarray:
        """[T, V]."""
        return self.arrays["logits"]

    @property
    def hidden(self) -> np.ndarray:
        """[T, H], after the final norm."""
        return self.arrays["hidden"]

    @property
    def config(self) -> dict:
        """config.json of the tiny checkpoint."""
        return tiny.CASES[self.case]

    def experts(self) -> dict[int, np.ndarray]:
        """Ascending expert ids [T, K] of every sparse main layer."""
        first = self.config["first_k_dense_replace"]
        return {first + i: chosen for i, chosen in enumerate(self.arrays["experts"])}

    def sets(self) -> dict[int, np.ndarray]:
        """Attended positions [T, k] of every main layer, ascending, -1 padded."""
        result, full = {}, iter(self.arrays["sets"])
        for layer, kind in enumerate(tiny.indexer_types(self.config)):
            result[layer] = next(full) if kind == "full" else result[layer - 1]
        return result

    def draft(self, way: str, kind: str, at: int, rows: int) -> Draft:
        """Scenario number `at` of one kind ("draft" or "accept")."""
        named = {
            key: self.arrays[f"{way}_{kind}_{key}"][at]
            for key in ("fed", "logits", "hidden", "sets")
        }
        return Draft(rows, **named)

    def drafts(self, way: str) -> list[Draft]:
        """Drafting after each of several numbers of absorbed prompt rows."""
        return [self.draft(way, "draft", i, int(n)) for i, n in enumerate(self.arrays["lengths"])]

    @property
    def accept_at(self) -> int:
        """Prompt rows before the verify batch of the acceptance scenarios."""
        return int(self.arrays["accept_at"])

    def verify(self, way: str) -> tuple[np.ndarray, np.ndarray]:
        """The verify batch: tokens [G + 1] (one committed, G drafts) and their logits."""
        return self.arrays[f"{way}_verify_ids"], self.arrays[f"{way}_verify_logits"]

    def acceptances(self, way: str) -> list[Draft]:
        """For every number k of accepted drafts: drafting after the k + 1 rows are absorbed."""
        counts = range(len(self.arrays[f"{way}_accept_fed"]))
        return [self.draft(way, "accept", k, self.accept_at + k + 1) for k in counts]

    def checkpoint(self, directory: Path, way: str | None = None) -> Path:
        """Writes the checkpoint these results belong to; `way` overrides the sharing flag."""
        config = dict(self.config)
        if way is not None:
            config["index_share_for_mtp_iteration"] = WAYS[way]
        fingerprint = tiny.write(directory, config, int(self.arrays["seed"]))
        assert fingerprint == str(self.arrays["fingerprint"]), "the recipe changed: remake fixtures"
        return directory


def load(case: str) -> Oracle:
    """Reads a fixture."""
    with np.load(FIXTURES / f"oracle-{case}.npz") as file:
        return Oracle(case, dict(file))


def digest(directory: Path) -> str:
    """SHA-256 over the bytes of a directory's shards, in the order of their names."""
    total = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        total.update(path.read_bytes())
    return total.hexdigest()


def positions(row: np.ndarray) -> list[int]:
    """A padded index set as a plain list."""
    return row[row >= 0].tolist()


def worst(a: np.ndarray, b: np.ndarray) -> float:
    """Largest absolute difference."""
    return float(np.abs(np.asarray(a, np.float64) - b).max())
