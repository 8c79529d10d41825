"""The arithmetic of a benchmark: timed runs, the limits they are held to, and what is reported."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from colibri.container import Container
from colibri.formats import FLOATS, Kind
from colibri.inventory import expert_parameters
from colibri.spread import Spread

# Kinds of figures that run the same ids one by one, and so must give the same numbers.
_SAME_RUN = {"busy": "decode", "stream": "decode"}


@dataclass(frozen=True)
class Sample:
    """One timed run: tokens and seconds, a hash of its output, bytes of weights that computing
    touched and bytes that had to be read; `limit` in tokens a second."""

    tokens: int
    seconds: float
    output: str
    weight_bytes: int = 0
    read_bytes: int = 0
    limit: float | None = None
    details: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def fraction(self) -> float | None:
        """Of the limit."""
        return None if self.limit is None else self.rate / self.limit


@dataclass
class Figure:
    """All samples of one thing that was measured; `facts` say how, `limit` what it is held to."""

    name: str
    kind: str
    facts: dict[str, Any]
    limit: str | None = None
    samples: list[Sample] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the names are the schema."""
        tokens = sum(sample.tokens for sample in self.samples)
        limits = [sample.limit for sample in self.samples if sample.limit is not None]
        fractions = [f for sample in self.samples if (f := sample.fraction) is not None]
        details = {
            name: Spread.of(sample.details[name] for sample in self.samples).as_dict()
            for name in self.samples[0].details
        }
        return {
            "name": self.name,
            "kind": self.kind,
            **self.facts,
            "tokens": self.samples[0].tokens,
            "tokens_per_second": Spread.of(sample.rate for sample in self.samples).as_dict(),
            "weight_bytes_per_token": sum(s.weight_bytes for s in self.samples) / tokens,
            "read_bytes_per_token": sum(s.read_bytes for s in self.samples) / tokens,
            "limit": self.limit,
            "limit_tokens_per_second": Spread.of(limits).as_dict() if limits else None,
            "fraction": Spread.of(fractions).as_dict() if fractions else None,
            "details": details,
            "outputs": sorted({sample.output for sample in self.samples}),
        }


def spent(before: dict[str, int], after: dict[str, int]) -> tuple[int, int]:
    """(weight bytes touched, bytes that were missing) between two readings of a session's counters.

    An expert that the pilot read counts as missing when the step asked for it, else not at all.
    """
    kinds = ("expert_bytes", "dense_bytes", "head_bytes")
    change = {name: after[name] - before[name] for name in after}
    guessed = change["pilot_useful"] * change["expert_bytes"] // max(1, change["expert_uses"])
    asked_for = change["read_bytes"] - change["pilot_bytes"]
    return sum(change[k] for k in kinds), asked_for + guessed


def hash_of(picks: list[int], values: np.ndarray) -> str:
    """16 hex digits over token ids and f32 values, bit for bit."""
    digest = blake2b(np.array(picks, "<i8").tobytes(), digest_size=8)
    digest.update(np.ascontiguousarray(values, "<f4").tobytes())
    return digest.hexdigest()


def outputs_agree(figures: list[dict[str, Any]]) -> bool:
    """Whether all runs over the same ids gave the same bits, whatever the threads and the io."""
    groups: dict[str, set[str]] = {}
    for figure in figures:
        kind = _SAME_RUN.get(figure["kind"], figure["kind"])
        groups.setdefault(kind, set()).update(figure["outputs"])
    return all(len(outputs) == 1 for outputs in groups.values())


# ---- limits, in tokens a second -----------------------------------------------------------------


def memory_limit(bytes_per_token: float, bandwidth: float) -> float:
    """When all that a token touches is read from memory once."""
    return bandwidth / bytes_per_token


def dot_limit(products_per_token: float, peak: float) -> float:
    """When nothing but integer products takes time."""
    return peak / products_per_token


def stream_limit(missed: float, disk: float | None, compute_seconds: float) -> float:
    """When reading and computing overlap without a gap: `missed` bytes a token at `disk` bytes a
    second, or `compute_seconds` a token, whichever takes longer."""
    reading = missed / disk if missed and disk else 0.0
    return 1 / max(reading, compute_seconds)


def products_per_token(container: Container) -> int:
    """Weights a prompt token is multiplied with: quantised matrices of the main layers and the
    experts it is routed to. The head is left out: it runs for the last token only."""
    config = container.config
    refs = (
        container.matrix(entry.name)
        for entry in container.entries
        if 0 <= entry.layer < config.num_hidden_layers and len(entry.shape) == 2
    )
    dense = sum(ref.rows * ref.cols for ref in refs if Kind(ref.format) not in FLOATS)
    routed = config.num_experts_per_tok * expert_parameters(config)
    return dense + config.sparse_layer_count * routed
