"""Drafters: who guesses the tokens that one batched pass of the main model then verifies.

A drafter may guess anything at all; the text is the main model's either way. To add one, write the
four methods of `Drafter`; the loop in `speculation.py` needs no change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from colibri.costs import STEP_ROWS
from colibri.depth import DepthPolicy
from colibri.ledger import ABSORB, DRAFT, Ledger
from colibri.sampling import Distribution
from colibri.session import Session
from colibri.verification import Verification

Rows = NDArray[np.float32]

BACKLOG = 64  # MTP rows kept back while nothing is drafted: 1.5 MB of hidden states for GLM-5.2


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
    """What the loop asks of a drafter; one drafter serves one session at a time.

    The pending token is the last one picked: it is known, but the main model has not run it.
    """

    name: str

    def begin(self, session: Session) -> None:
        """A turn starts: `session.tokens` has been run, nothing has been picked."""

    def feed(self, hidden: Rows, tokens: Sequence[int], ledger: Ledger) -> None:
        """`tokens` were committed, the last is pending; hidden[i] is of the row before tokens[i].

        `hidden` is a view that is valid during this call only.
        """

    def draft(self, limit: int, rule: Verification, depth: DepthPolicy, ledger: Ledger) -> Drafts:
        """At most `limit` drafts, as many as `depth` wants, to follow the pending token."""

    def finish(self, ledger: Ledger) -> None:
        """The turn is over: bring the drafter's own caches up to the committed tokens."""


class MtpDrafter:
    """The model's own multi-token-prediction layer.

    Its cache holds one row per committed token whose successor is known. Rows wait in a backlog
    until a draft is wanted, the backlog is full or the turn ends, then enter in one batch.
    """

    name = "mtp"

    def __init__(self, session: Session) -> None:
        self.session = session
        width = session.model.config.hidden_size
        self._room = min(BACKLOG, session.max_rows)
        self._hidden = np.empty((self._room, width), np.float32)
        self._following: list[int] = []
        self._state = np.empty(width, np.float32)
        self._ready = False

    def begin(self, session: Session) -> None:
        """Drafts need a cache without gaps: after a prompt that did not prime it there are none."""
        self.session = session
        self._following.clear()
        self._ready = session.length > 0 and session.mtp_length == session.length - 1

    def feed(self, hidden: Rows, tokens: Sequence[int], ledger: Ledger) -> None:
        """Rows join the backlog; when it would overflow it enters the cache first, keys only."""
        if not self._ready:
            return
        if len(self._following) + len(tokens) > self._room:
            self.finish(ledger)
        at = len(self._following)
        self._hidden[at : at + len(tokens)] = hidden
        self._following.extend(tokens)

    def draft(self, limit: int, rule: Verification, depth: DepthPolicy, ledger: Ledger) -> Drafts:
        """Step 0 absorbs the backlog and drafts from its last row; later steps feed on drafts."""
        drafts = Drafts()
        if not self._ready:
            return drafts
        position = self.session.length + 1
        if len(self._following) > STEP_ROWS + 1:
            self._catch_up(1, ledger)
        ledger.enter(ABSORB, len(self._following))
        logits = self._absorb(len(self._following), self._state)
        for step in range(limit):
            if step:
                ledger.enter(DRAFT, 1)
                logits = self.session.mtp_draft(drafts.ids[-1], step, self._state)
            proposal = rule.propose(logits, position + step, step)
            if proposal is None or not depth.keep(step, proposal[1]):
                break
            drafts.add(*proposal)
            if step + 1 < limit and not depth.deeper(step + 1):
                break
        return drafts

    def finish(self, ledger: Ledger) -> None:
        """The cache catches up, so that the next turn need not run old tokens again."""
        self._catch_up(0, ledger)

    def _catch_up(self, left: int, ledger: Ledger) -> None:
        """All rows but the last `left` leave the backlog, keys only."""
        rows = len(self._following) - left
        if rows > 0:
            ledger.enter(ABSORB, rows)
            self._absorb(rows, None)

    def _absorb(self, rows: int, state: Rows | None) -> Rows | None:
        left = len(self._following) - rows
        logits = self.session.mtp_absorb(self._hidden[:rows], self._following[:rows], state)
        self._hidden[:left] = self._hidden[rows : rows + left]
        del self._following[:rows]
        return logits


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
        self._length = 0  # of the session when the turn began

    def begin(self, session: Session) -> None:
        """Index the prompt; what an earlier turn indexed is kept when it is still a prefix."""
        known = len(self._tokens)
        if session.tokens[:known] != self._tokens:
            self._tokens, self._last, self._before = [], {}, []
            known = 0
        for token in session.tokens[known:]:
            self._append(token)

    def feed(self, hidden: Rows, tokens: Sequence[int], ledger: Ledger) -> None:
        """Index the committed tokens."""
        for token in tokens:
            self._append(token)

    def draft(self, limit: int, rule: Verification, depth: DepthPolicy, ledger: Ledger) -> Drafts:
        """What followed the best match; a match that runs into the end repeats its period."""
        ledger.enter(DRAFT)
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

    def finish(self, ledger: Ledger) -> None:
        """Everything is indexed already."""

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

    def _append(self, token: int) -> None:
        end = len(self._tokens)
        self._tokens.append(token)
        if not end:
            self._before.append(-1)
            return
        bigram = (self._tokens[end - 1], token)
        self._before.append(self._last.get(bigram, -1))
        self._last[bigram] = end
