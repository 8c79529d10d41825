"""Verification: when does a draft stand, and what takes its place when it does not.

Each rule leaves the distribution of the text exactly as plain sampling has it; `greedy` and
`coupled` leave the text itself as it is. docs/speculation.md has the arguments.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from colibri import elementary
from colibri._core import ffi, lib
from colibri.errors import SamplingError
from colibri.noise import Purpose
from colibri.sampling import Distribution, Sampler

Row = NDArray[np.float32]
Rows = NDArray[np.float32]
Proposal = tuple[int, float, "Distribution | None"]  # token, confidence, what it was drawn from

_ATTEMPTS = 1 << 10  # draft positions of one step; keeps the keys of a step's draws apart


class Mode(str, enum.Enum):
    """How sampled text (temperature > 0) is verified; greedy text needs no choice."""

    REJECTION = "rejection"
    COUPLED = "coupled"
    PROBABILISTIC = "probabilistic"


class Verification(Protocol):
    """One rule: how a drafter turns its logits into a draft, and how drafts are judged."""

    def propose(self, logits: Row, position: int, step: int) -> Proposal | None:
        """The draft for `position`, `step` drafts after the pending token; None: no finite logit.

        Where what is drafted can change the text, the confidence depends on the logits and on no
        random draw: the depth policy may drop the draft because of it, which would bias the text.
        """

    def judge(
        self, logits: Rows, position: int, drafts: Sequence[int], q: Sequence[Distribution | None]
    ) -> tuple[int, int | None]:
        """How many drafts stand, from the first on, and what replaces the next; None: all stand.

        Row i of the main model's logits [at least len(drafts), vocab] decides `position` + i; q[i]
        is what drafts[i] was drawn from, None for a point mass.
        """


class InOrder(ABC):
    """Rules that judge a draft by its own row alone: the first that falls ends the block."""

    @abstractmethod
    def settle(self, logits: Row, position: int, draft: int) -> int:
        """The token at `position` given the main model's logits: the draft, or what replaces it."""

    def judge(
        self, logits: Rows, position: int, drafts: Sequence[int], q: Sequence[Distribution | None]
    ) -> tuple[int, int | None]:
        """See Verification."""
        for i, draft in enumerate(drafts):
            token = self.settle(logits[i], position + i, draft)
            if token != draft:
                return i, token
        return len(drafts), None


class Matching(InOrder):
    """Greedy and coupled: a draft stands when it is the token that would be picked anyway."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._scale = 1.0 if sampler.params.greedy else 1.0 / max(sampler.params.temperature, 1e-3)
        self._scratch = ffi.new("float[]", sampler.vocab_used)

    def propose(self, logits: Row, position: int, step: int) -> Proposal | None:
        """The drafter's own pick, drawn with the very noise the verifier will use."""
        try:
            token = self.sampler.pick(logits, position)
        except SamplingError:
            return None
        return token, self._confidence(logits, token), None

    def settle(self, logits: Row, position: int, draft: int) -> int:
        """What plain decoding picks here, whatever was drafted."""
        return self.sampler.pick(logits, position)

    def _confidence(self, logits: Row, token: int) -> float:
        """The drafter's probability of its draft; no token depends on it."""
        row = ffi.from_buffer("float[]", logits)
        used = self.sampler.vocab_used
        return float(lib.clb_confidence(row, used, token, self._scale, self._scratch))


class Rejection(InOrder):
    """The drafter's distribution is taken as a point mass at its draft.

    So a draft stands with the probability p that the main model gives it. A refused one is replaced
    by a draw from p without it (its probability set to 0, the rest renormalised).
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def propose(self, logits: Row, position: int, step: int) -> Proposal | None:
        """The drafter's most likely token."""
        row = logits[: self.sampler.vocab_used].astype(np.float64)
        token = int(row.argmax())
        if not np.isfinite(row[token]):
            return None
        with np.errstate(over="ignore"):  # a tiny temperature: -inf is what is meant
            z = (row - row[token]) / self.sampler.params.temperature
        weights = elementary.exp(z[z > -40.0])  # exp of ours: depth, hence text, depends on it
        return token, 1.0 / elementary.fold_sum(weights), None

    def settle(self, logits: Row, position: int, draft: int) -> int:
        """Accept with p(draft), else draw from p without it (2211.17192 for a point mass)."""
        p = self.sampler.distribution(logits)
        if self.sampler.accept(p.prob(draft), position):
            return draft
        return self.sampler.draw(p.without(draft), position, Purpose.RESIDUAL)


class Probabilistic:
    """Drafts are drawn from the drafter's own q, shaped by the same temperature and cuts as p.

    They are judged together: block verification (Sun et al., arXiv 2403.10444) accepts as many as
    any rule can, and never fewer than min(1, p/q) for one after the other.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._rejection = Rejection(sampler)

    def propose(self, logits: Row, position: int, step: int) -> Proposal | None:
        """A draw from q. Its key holds the step, so a position drafted twice is drawn afresh."""
        try:
            q = self.sampler.distribution(logits)
        except SamplingError:
            return None
        attempt = (position - step) * _ATTEMPTS + step
        token = self.sampler.draw(q, attempt, Purpose.DRAFT)
        return token, float(q.weights.max() / q.total), q

    def judge(
        self, logits: Rows, position: int, drafts: Sequence[int], q: Sequence[Distribution | None]
    ) -> tuple[int, int | None]:
        """The longest accepted beginning stands; behind it a draw from max(share p - q, 0).

        share (p_i in the paper) is how probable the first i drafts are under p, of what they are
        under q, at most 1 after each of them.
        """
        drawn = [of for of in q if of is not None]
        if len(drawn) < len(drafts):
            return self._rejection.judge(logits, position, drafts, q)
        count = len(drafts)
        p = [self.sampler.distribution(row) for row in logits[:count]]
        share, stand, kept = 1.0, 0, 1.0
        for i, draft in enumerate(drafts):
            share = min(1.0, share * p[i].prob(draft) / drawn[i].prob(draft))
            chance = share
            if i + 1 < count and share < 1.0:
                more = elementary.fold_sum(p[i + 1].surplus(drawn[i + 1], share))
                chance = more / (more + 1.0 - share)
            if self.sampler.accept(chance, position * _ATTEMPTS + i, Purpose.BLOCK):
                stand, kept = i + 1, share
        if stand == count:
            return count, None
        rest = p[stand].minus(drawn[stand], kept)
        return stand, self.sampler.draw(rest, position + stand, Purpose.RESIDUAL)


def verification(sampler: Sampler, mode: Mode | str) -> Verification:
    """The rule of a mode; greedy sampling always matches exactly, and so must a form's."""
    rules = {
        Mode.REJECTION: Rejection,
        Mode.COUPLED: Matching,
        Mode.PROBABILISTIC: Probabilistic,
    }
    exact = sampler.params.greedy or sampler.follows
    return Matching(sampler) if exact else rules[Mode(mode)](sampler)
