"""Drafters: who guesses the tokens that one batched pass of the main model then verifies.

A drafter may guess anything at all; the text is the main model's either way. To add one, write the
two methods of `Drafter`; the loop in `speculation.py` needs no change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from colibri.costs import STEP_ROWS
from colibri.depth import DepthPolicy
from colibri.ledger import ABSORB, DRAFT, Ledger
from colibri.sampling import Distribution
from colibri.session import Session
from colibri.verification import Verification


@dataclass(slots=True)
class Drafts:
    """Tokens proposed for the positions after the pending one, and how sure the drafter was.

    q is the distribution a draft was drawn from, or None for a draft that was certain.
    """

    ids: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    q: list[Distribution | None] = field(default_factory=list)

    def add(self, token: int, confidence: float, q: Distribution | None = None) -> None:
        """Append the draft of the next position."""
        self.ids.append(token)
        self.confidence.append(confidence)
        self.q.append(q)


class Drafter(Protocol):
    """What the loop asks of a drafter; one drafter serves one session at a time."""

    name: str

    def begin(self, session: Session) -> None:
        """A turn starts: `session.tokens` has been run, nothing has been picked."""

    def draft(
        self, pending: int, limit: int, rule: Verification, depth: DepthPolicy, ledger: Ledger
    ) -> Drafts:
        """At most `limit` drafts, as many as `depth` wants, to follow the pending token.

        That is the last one picked: `session.tokens` are all before it, which the model has run.
        """


class MtpDrafter:
    """The model's own multi-token-prediction layer.

    Its cache gets one row per committed token whose successor is known. Their hidden states wait in
    the session until a draft is wanted, then enter in a batch.
    """

    name = "mtp"

    def __init__(self, session: Session) -> None:
        self.session = session
        self._state = np.empty(session.model.config.hidden_size, np.float32)

    def begin(self, session: Session) -> None:
        """The session keeps all that is needed."""
        self.session = session

    def draft(
        self, pending: int, limit: int, rule: Verification, depth: DepthPolicy, ledger: Ledger
    ) -> Drafts:
        """Step 0 absorbs the rows that wait and drafts from the last; later steps feed on drafts.

        Drafts need a cache without gaps: where it cannot catch up there are none.
        """
        drafts, session = Drafts(), self.session
        if not session.mtp_ready:
            return drafts
        position = session.length + 1
        waiting = session.length - session.mtp_length
        if waiting > min(STEP_ROWS + 1, session.max_rows):
            ledger.enter(ABSORB, waiting - 1)
            session.catch_up()
            waiting = 1
        ledger.enter(ABSORB, waiting)
        logits = session.catch_up(pending, self._state)
        for step in range(limit):
            if step:
                ledger.enter(DRAFT, 1)
                logits = session.mtp_draft(drafts.ids[-1], step, self._state)
            proposal = rule.propose(logits, position + step, step)
            if proposal is None or not depth.keep(step, proposal[1]):
                break
            drafts.add(*proposal)
            if step + 1 < limit and not depth.deeper(step + 1):
                break
        return drafts


class NgramDrafter:
    """Prompt lookup: the longest recent match of the text's end proposes what followed it there.

    A match is at least a bigram. `_last` and `_before` chain the places where each bigram ended,
    newest first, so a token costs one dictionary entry and a lookup a bounded walk.
    """

    name = "ngram"
    CANDIDATES = 32  # places compared in one lookup
    LONGEST = 64  # tokens of agreement beyond which no place is better

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, int], int] = {}
        self._before: list[int] = []  # of position i: where its bigram ended before; -1: nowhere

    def begin(self, session: Session) -> None:
        """What an earlier turn indexed is kept when it is still a prefix."""
        self._session = session
        if session.tokens[: len(self._tokens)] != self._tokens:
            self._tokens, self._last, self._before = [], {}, []

    def draft(
        self, pending: int, limit: int, rule: Verification, depth: DepthPolicy, ledger: Ledger
    ) -> Drafts:
        """What followed the best match; a match that runs into the end repeats its period."""
        ledger.enter(DRAFT)
        self._index(pending)
        drafts = Drafts()
        place, agreed = self.match()
        if place < 0:
            return drafts
        period = len(self._tokens) - 1 - place
        confidence = agreed / (agreed + 1.0)
        for step in range(limit):
            if step and not depth.deeper(step):
                break
            if not depth.keep(step, confidence):
                break
            source = self._tokens if step < period else drafts.ids
            at = place + 1 + step if step < period else step - period
            drafts.add(source[at], confidence)
        return drafts

    def match(self) -> tuple[int, int]:
        """Where the longest recent match ends (-1: none), and how many tokens agree."""
        tokens, end = self._tokens, len(self._tokens) - 1
        best, agreed = -1, 1
        place = self._before[end] if end >= 1 else -1
        for _ in range(self.CANDIDATES):
            if place < 0 or agreed >= self.LONGEST:
                break
            n = self._agreement(tokens, place, end)
            if n > agreed:
                best, agreed = place, n
            place = self._before[place]
        return best, agreed

    def _agreement(self, tokens: list[int], place: int, end: int) -> int:
        n = 0
        while n < self.LONGEST and n <= place and tokens[place - n] == tokens[end - n]:
            n += 1
        return n

    def _index(self, pending: int) -> None:
        """All tokens since the last draft."""
        for token in [*self._session.tokens[len(self._tokens) :], pending]:
            self._append(token)

    def _append(self, token: int) -> None:
        end = len(self._tokens)
        self._tokens.append(token)
        if not end:
            self._before.append(-1)
            return
        bigram = (self._tokens[end - 1], token)
        self._before.append(self._last.get(bigram, -1))
        self._last[bigram] = end
