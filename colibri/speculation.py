"""The decoding loop: pick, draft, verify in one batched pass, accept, emit.

Plain decoding is the same loop without drafts. docs/speculation.md tells the story.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri.depth import DepthPolicy
from colibri.drafting import Drafter, Drafts
from colibri.ledger import ABSORB, PICK, PLAIN, TEXT, VERIFY, Ledger
from colibri.sampling import Sampler
from colibri.session import Session
from colibri.verification import Mode, verification

NONE = Drafts()


@dataclass(frozen=True, slots=True)
class Limits:
    """When a turn ends: after so many tokens, or before any of the stop ids."""

    max_tokens: int
    stops: frozenset[int] = frozenset()


def spec_decode(
    session: Session,
    logits: NDArray[np.float32],
    sampler: Sampler,
    drafter: Drafter | None,
    depth: DepthPolicy | None,
    limits: Limits,
    ledger: Ledger,
    mode: Mode | str = Mode.COUPLED,
    pause: bool = False,
) -> Generator[list[int], None, str]:
    """Yield the tokens of a turn, block by block; return "stop", "length" or "context".

    Call it right after `Session.prefill`, with its logits [vocab]. A token is yielded as soon as
    it is picked. So while the caller holds a block, the block's last token is pending: picked, not
    yet run; `session.tokens` is the prompt and everything yielded but that token. (Where a stop
    follows among accepted drafts all of the block has been run.) A stop is never yielded, run or
    counted; after "stop" nothing is pending, unless the sampler knew that it was over. Cancelled,
    or any error of the core, leaves the same state: nothing is in the caches that was not yielded.

    With depth None nothing is drafted, but the MTP cache can still catch up with the text.

    With `pause` an empty block comes before each pass, whose rows are then `session.staged`: the
    caller may run them with those of other sessions (`step_together`); else this loop does.
    """
    turn = _Turn(session, sampler, drafter, depth, limits, ledger, mode)
    with turn:
        block = turn.first(logits)
        while turn.room > 0:
            stopped = block[-1] in limits.stops
            if stopped:
                block.pop()
            if block:
                turn.commit(block)
                yield block
                ledger.enter(PICK)
            if stopped or turn.over:
                return "stop"
            if turn.room > 0:
                block = yield from turn.step(turn.draft(), pause)
    return turn.ended


class _Turn:
    """What one call of `spec_decode` carries from step to step."""

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        drafter: Drafter | None,
        depth: DepthPolicy | None,
        limits: Limits,
        ledger: Ledger,
        mode: Mode | str,
    ) -> None:
        self.session, self.sampler, self.ledger = session, sampler, ledger
        self.drafter, self.depth, self.stops = drafter, depth, limits.stops
        self.rule = verification(sampler, mode)
        self.room = min(limits.max_tokens, session.context - session.length)
        self.ended = "length" if limits.max_tokens <= self.room else "context"
        self.pending = -1  # picked and yielded, not yet run
        self._source = PICK

    def __enter__(self) -> None:
        self.ledger.begin(self.session)
        if self.drafter:
            self.drafter.begin(self.session)
        if self.depth:
            self.depth.begin()

    def __exit__(self, *_: object) -> None:
        if not self.session.freed:  # at exit the collector may get to it before this loop
            self.ledger.end()

    @property
    def over(self) -> bool:
        """Whether nothing may follow the pending token."""
        return self.sampler.over(self.session.length + 1)

    def first(self, logits: NDArray[np.float32]) -> list[int]:
        """The first token, which the prompt alone decides."""
        return [self.sampler.pick(logits, self.session.length)] if self.room > 0 else []

    def commit(self, block: list[int]) -> None:
        """The block is part of the text; its last token becomes the pending one."""
        self.pending = block[-1]
        self.room -= len(block)
        self.ledger.emitted(self._source, len(block))
        self.ledger.enter(TEXT)

    def draft(self) -> Drafts:
        """What should follow the pending token, as far as text and rows have room for it."""
        depth = self.depth
        if depth is None or depth.rest:
            return NONE
        limit = min(self.room - 1, self.session.max_rows - 1)
        limit = depth.plan(limit) if self.drafter and limit > 0 else 0
        if limit < 1:
            return NONE
        drafts = self.drafter.draft(self.pending, limit, self.rule, depth, self.ledger)
        self.ledger.enter(PICK)
        return drafts

    def step(self, drafts: Drafts, pause: bool) -> Generator[list[int], None, list[int]]:
        """Run [pending, drafts...]; returns the drafts that stand and the token after them."""
        session, ids = self.session, [self.pending, *drafts.ids]
        self._source = VERIFY if drafts.ids else PLAIN
        base = session.length + 1
        if session.crowded(len(ids)):
            self.ledger.enter(ABSORB, session.length - session.mtp_length - 1)
            session.catch_up()
        self.ledger.enter(self._source, len(ids))
        accepted = 0
        try:
            if pause:
                session.staged = ids
                yield []
            logits = session.step_all(ids) if session.length < base else session.logits
            self.ledger.enter(PICK)
            accepted, token = self._judge(logits, drafts, base)
        finally:
            session.staged = []
            if session.length > base + accepted:
                session.rewind(base + accepted)
        self._record(drafts, accepted, token)
        return [*drafts.ids[:accepted], token]

    def _judge(self, logits: NDArray[np.float32], drafts: Drafts, base: int) -> tuple[int, int]:
        """How many drafts stand, and the token after them; logits[i] decides position base + i.

        A draft that stands but is a stop counts as the token after: nothing behind it is kept, or
        even judged.
        """
        ids = drafts.ids
        end = next((i + 1 for i, draft in enumerate(ids) if draft in self.stops), len(ids))
        accepted, token = self.rule.judge(logits, base, ids[:end], drafts.q[:end])
        if token is not None:
            return accepted, token
        if end and ids[end - 1] in self.stops:
            return end - 1, ids[end - 1]
        return end, self.sampler.pick(logits[end], base + end)

    def _record(self, drafts: Drafts, accepted: int, token: int) -> None:
        """Acceptance is counted over committed tokens only: a stop cuts off what follows it."""
        depth = self.depth
        if depth is None:
            return
        if depth.rest:
            depth.rest -= 1
            return
        proposed = accepted if token in self.stops else len(drafts.ids)
        judged = min(accepted + 1, proposed)
        if proposed:
            self.ledger.judged(proposed, judged, accepted)
        depth.record(proposed, judged, accepted, self.ledger.laps())
