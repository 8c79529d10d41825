"""Answers that keep to a form: which tokens may come next, and who picks among them."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from colibri.grammar import Matcher, Node, State
from colibri.sampling import Sampler, SamplingParams
from colibri.tokenizer import Tokenizer

_END = State((None,))
_KEPT = 64  # latest positions whose states are kept: more than any depth of drafts
_MASKS = 32  # states whose masks are kept: of 151,552 tokens a mask takes 150 kB


class Phase(enum.Enum):
    """Where the form is not followed."""

    REASONING = "before it"
    CALLING = "instead of it, in a call of a tool"


class Guide:
    """Follows an answer through its form, token by token.

    Reasoning comes first where the prompt `reasons`, and ends with </think>. Where it `calls`, the
    answer may begin with <tool_call> instead, and is free then. It ends where the form does.
    """

    def __init__(
        self,
        form: Node,
        tokenizer: Tokenizer,
        stops: frozenset[int],
        reasons: bool = False,
        calls: bool = False,
    ) -> None:
        self._matcher = Matcher(form)
        self._tokenizer, self._stops = tokenizer, stops
        self._call = tokenizer.id_of("<tool_call>") if calls else None
        self._bytes = tokenizer.text_bytes
        self._close = tokenizer.id_of("</think>")
        self._masks: dict[State | Phase, NDArray[np.bool_]] = {}
        self.start: State | Phase = Phase.REASONING if reasons else self._matcher.start

    def refresh(self) -> None:
        """Before each pick; see Matcher."""
        self._matcher.refresh()

    def after(self, state: State | Phase, token: int) -> State | Phase | None:
        """Where a token leads; None: it may not come here."""
        if state is Phase.CALLING:
            return state
        stops = token in self._stops
        if state is Phase.REASONING:
            opened = self._matcher.start if token == self._close else state
            return None if stops else opened
        if stops:
            return state if None in state else None
        if state is self._matcher.start and token == self._call:
            return Phase.CALLING
        data = self._bytes[token]
        return (self._matcher.after(state, data) or None) if data else None

    def mask(self, state: State | Phase) -> NDArray[np.bool_]:
        """Which tokens may come, by id."""
        if state not in self._masks:
            while len(self._masks) >= _MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[state] = self._mask(state)
        return self._masks[state]

    def _mask(self, state: State | Phase) -> NDArray[np.bool_]:
        if isinstance(state, Phase):
            mask = np.ones(self._tokenizer.vocab_used, bool)
        else:
            mask = self._tokenizer.vocabulary.mask(self._matcher, state)
        for token in (*self._stops, self._call):
            if token is not None and token < mask.size:
                mask[token] = self.after(state, token) is not None
        return mask


class FormSampler(Sampler):
    """A sampler of answers that keep to a form.

    What would be picked anyway is picked if it may come; else there is another pick, with the same
    noise, among those tokens alone that may. So a pick depends on the row, the seed, the position
    and the answer before it, and drafts change nothing.
    """

    follows = True

    def __init__(self, params: SamplingParams, guide: Guide, vocab_used: int) -> None:
        super().__init__(params, vocab_used)
        self._guide = guide
        self._states: dict[int, State | Phase] = {}  # by position, of the latest picks

    def pick(self, logits: NDArray[np.float32], position: int) -> int:
        """See Sampler. Position by position: a later pick at a position takes the former's place,
        as those of the verifier take the drafter's."""
        guide = self._guide
        guide.refresh()
        state = self._states[position] if self._states else guide.start
        token = super().pick(logits, position)
        after = guide.after(state, token)
        if after is None:
            row = np.where(guide.mask(state), logits[: self.vocab_used], np.float32(-np.inf))
            token = super().pick(row, position)
            after = guide.after(state, token)
            assert after is not None
        self._states.pop(position - _KEPT, None)
        self._states[position + 1] = after
        return token

    def over(self, position: int) -> bool:
        """See Sampler."""
        return self._states.get(position) == _END
