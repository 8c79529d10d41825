"""From logits to a token: temperature, then top-k, then top-p, then min-p, then a keyed draw.

Ties go to the lower id everywhere. The same seed gives the same tokens on every machine: arithmetic
is `elementary`'s, randomness is `noise`'s, and a draw depends on nothing but seed, position,
purpose and the distribution drawn from. `pick` is Gumbel-max in its exponential form: the token
with the smallest E/p wins, E ~ Exp(1) keyed by token id. So a drafter that draws with the same
noise from a similar distribution mostly draws the same token (`coupled` verification).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri import elementary, noise
from colibri.errors import SamplingError, UsageError
from colibri.noise import Purpose

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

# Tokens e^44 times less likely than the best one have probability 0 by definition: all of a
# 154,880-token vocabulary together they would weigh less than 2^-46.
FLOOR = -44.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch off.

    top_p 0 keeps the top token alone. seed None asks for a fresh one (see `Sampler.seed`).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, _is_number(self.temperature), "a number >= 0")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            _require(name, value, _is_number(value) and value <= 1, "a number from 0 to 1")
        whole = isinstance(self.top_k, int) and not isinstance(self.top_k, bool)
        _require("top_k", self.top_k, whole and self.top_k >= 0, "a whole number >= 0 (0: off)")
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        _require("seed", self.seed, whole or self.seed is None, "a whole number")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def _is_number(value: object) -> bool:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    return ok and 0 <= value < math.inf


def _require(name: str, value: object, ok: bool, expected: str) -> None:
    if not ok:
        raise UsageError(f"{name} is {value!r}; expected {expected}")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Token ids, ascending, and their weights (float64, > 0); every other token has none."""

    ids: Ids
    weights: Floats
    total: float

    @classmethod
    def of(cls, ids: Ids, weights: Floats) -> Distribution:
        """From positive weights, which need not sum to 1."""
        return cls(ids, weights, elementary.fold_sum(weights))

    @property
    def p(self) -> Floats:
        """The probabilities of `ids`."""
        return self.weights / self.total

    def prob(self, token: int) -> float:
        """The probability of one token."""
        at = int(self.ids.searchsorted(token))
        found = at < len(self.ids) and self.ids[at] == token
        return float(self.weights[at] / self.total) if found else 0.0

    def probs(self, tokens: Ids) -> Floats:
        """The probabilities of many tokens."""
        at = np.minimum(self.ids.searchsorted(tokens), len(self.ids) - 1)
        return np.where(self.ids[at] == tokens, self.weights[at] / self.total, 0.0)

    def without(self, token: int) -> Distribution:
        """`carry_ban`: without this token, its probability set to 0 and the rest renormalised."""
        keep = self.ids != token
        if not keep.any():
            raise SamplingError(f"token {token} is the only one possible, and it was ruled out")
        return self if keep.all() else Distribution.of(self.ids[keep], self.weights[keep])

    def surplus(self, other: Distribution, share: float = 1.0) -> Floats:
        """max(share p - q, 0) of `ids`, with q the other's probabilities."""
        return np.maximum(share * self.p - other.probs(self.ids), 0.0)

    def minus(self, other: Distribution, share: float = 1.0) -> Distribution:
        """The surplus, normalised: what replaces a refused draft that was drawn from `other`."""
        rest = self.surplus(other, share)
        keep = rest > 0
        return Distribution.of(self.ids[keep], rest[keep]) if keep.any() else self

    def dense(self, size: int) -> Floats:
        """Probabilities by id, shape (size,)."""
        out = np.zeros(size)
        out[self.ids] = self.p
        return out


class Sampler:
    """Chooses tokens for one request. It holds a seed and no other state that changes a choice.

    `vocab_used` (the tokenizer's) cuts off padding rows. `warnings` gets one message at the first
    logits with NaN or +Inf in them.
    """

    follows = False  # whether a pick depends on those before it

    def __init__(self, params: SamplingParams, vocab_used: int) -> None:
        self.params = params
        self.seed = noise.fresh_seed() if params.seed is None else params.seed
        self.vocab_used = vocab_used
        self.warnings: list[str] = []
        self._ids = np.arange(vocab_used)

    def pick(self, logits: NDArray[np.float32], position: int) -> int:
        """The token at `position` (its index in the whole sequence), from one row of logits.

        Raises SamplingError when no logit is finite.
        """
        if self.params.greedy:
            return self._row(logits)[1]
        return self.draw(self.distribution(logits), position)

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        """What `pick` draws from: one row of logits after temperature, top-k, top-p and min-p."""
        row, best = self._row(logits)
        params = self.params
        if params.greedy:
            return Distribution(np.array([best]), np.ones(1), 1.0)
        ids, z = self._candidates(row, best)
        weights = elementary.exp(z)
        if params.top_p < 1:
            keep = _nucleus(z, weights, params.top_p)
            ids, weights = ids[keep], weights[keep]
        if params.min_p > 0:
            keep = np.flatnonzero(weights >= params.min_p)  # the best token's weight is exactly 1
            ids, weights = ids[keep], weights[keep]
        return Distribution.of(ids, weights)

    def draw(
        self, distribution: Distribution, position: int, purpose: Purpose = Purpose.PICK
    ) -> int:
        """One token of a distribution. A coupled drafter draws with PICK, others with DRAFT."""
        ids, weights = distribution.ids, distribution.weights
        if ids.size == 1:
            return int(ids[0])
        u = noise.uniforms(self.seed, position, purpose, ids)
        # 1 - u <= -ln u <= (1 - u) / u. A token whose lower bound is above the smallest upper bound
        # cannot win and needs no logarithm.
        least = (1.0 - u) / weights
        most = (least / u).min()
        hopeful = np.flatnonzero(least <= most * (1 + 1e-9))
        shortest, winner = math.inf, 0
        rivals = zip(hopeful.tolist(), u[hopeful].tolist(), weights[hopeful].tolist(), strict=True)
        for at, uniform, weight in rivals:
            wait = -elementary.log(uniform) / weight
            if wait < shortest:
                shortest, winner = wait, at
        return int(ids[winner])

    def over(self, position: int) -> bool:
        """Whether nothing but an end may come at `position`, so that nobody need be asked."""
        return False

    def accept(self, probability: float, position: int, purpose: Purpose = Purpose.ACCEPT) -> bool:
        """Whether a draft for `position` stands: true with this probability (1 is always)."""
        return noise.uniform(self.seed, position, purpose) < probability

    def _row(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
        """The logits of real tokens and the index of the best; NaN and +Inf become -Inf."""
        row = logits[: self.vocab_used]
        # argmax returns a NaN where there is one: a finite best means the row has no NaN, no +Inf.
        best = int(row.argmax())
        if math.isfinite(row[best]):
            return row, best
        finite = np.isfinite(row)
        if not finite.any():
            raise SamplingError(
                f"all {row.size} logits are NaN or infinite: the model's output is unusable. "
                "Check the container's files against their source."
            )
        wrong = np.flatnonzero(~finite & (row != -np.inf))
        if not self.warnings:
            self.warnings.append(
                f"{wrong.size} of {row.size} logits are NaN or infinite (first: token {wrong[0]}); "
                "they are skipped. The container may be damaged."
            )
        row = np.where(finite, row, np.float32(-np.inf))
        return row, int(row.argmax())

    def _candidates(self, row: NDArray[np.float32], best: int) -> tuple[Ids, Floats]:
        """Ids, ascending, and z = (logit - best logit) / temperature of what may be drawn."""
        params = self.params
        ids = self._ids[: row.size]
        top = float(row[best])
        if 0 < params.top_k < row.size:
            least = np.partition(row, row.size - params.top_k)[row.size - params.top_k]
            ids = _at_least(row, least, params.top_k)
            row = row[ids]
        z = row.astype(np.float64)
        z -= top
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
            z /= params.temperature
        floor = FLOOR
        if params.min_p > 0 and params.top_p >= 1:
            floor = max(floor, math.log(params.min_p) - 1e-9)  # the exact test comes later
        if z.min() < floor:
            keep = np.flatnonzero(z >= floor)
            ids, z = ids[keep], z[keep]
        return ids, z


def _at_least(values: NDArray[np.floating], edge: float, count: int) -> Ids:
    """The indexes, ascending, of the `count` largest, `edge` being the least of them.

    Of values equal to the edge, the lower indexes are taken.
    """
    keep = np.flatnonzero(values >= edge)
    surplus = keep.size - count
    if surplus > 0:
        at_edge = np.flatnonzero(values[keep] == edge)
        keep = np.delete(keep, at_edge[-surplus:])
    return keep


def _nucleus(z: Floats, weights: Floats, top_p: float) -> Ids:
    """The indexes, ascending, of the fewest largest weights that reach top_p of the sum (or 1)."""
    target = top_p * elementary.fold_sum(weights)
    for cutoff in (-6.0, -12.0, -np.inf):  # tokens near the top are most often enough
        near = z >= cutoff
        falling = np.sort(weights[near])[::-1]
        reached = falling.cumsum()
        if reached[-1] >= target:
            break
    count = min(int(reached.searchsorted(target)) + 1, falling.size)
    rest = falling.size - count
    return _at_least(z, np.partition(z[near], rest)[rest], count)  # equal weights may differ in z
