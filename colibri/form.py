"""Answers that keep to a form, or their calls do: which tokens may come, and who picks them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from colibri.calls import OTHER, Calls, formed, free, letter
from colibri.grammar import Matcher, Node, State
from colibri.knobs import DRAFT_LIMIT
from colibri.sampling import Sampler, SamplingParams
from colibri.tokenizer import Tokenizer

_END = State((None,))
_KEPT = 2 * DRAFT_LIMIT  # latest positions whose states are kept: drafts go no further back
_NO_CALLS: Mapping[str, Node | None] = MappingProxyType({})
_MASKS = 32  # states whose masks are kept: of 151,552 tokens a mask takes 150 kB


class Guide:
    """Follows an answer through its grammar, token by token.

    Reasoning comes first where the prompt `reasons`, and ends with </think>. Then comes the form
    and nothing else, or whole `calls` (see colibri.calls) and nothing else. Without a form all is
    free but the calls in it; the first may be `begun` by the prompt.
    """

    def __init__(
        self,
        form: Node | None,
        tokenizer: Tokenizer,
        stops: frozenset[int],
        reasons: bool = False,
        calls: Mapping[str, Node | None] = _NO_CALLS,
        begun: str | None = None,
    ) -> None:
        known = Calls(calls, tokenizer.added, whole=form is not None)
        either = free(known, reasons, begun) if form is None else formed(form, known, reasons)
        self._matcher = Matcher(either)
        self._tokenizer, self._stops = tokenizer, stops
        self._text = tokenizer.text_bytes
        self._letters = {token.id: letter(tag) for tag, token in tokenizer.added.items()}
        self._masks: dict[State, NDArray[np.bool_]] = {}
        self.start = self._matcher.start

    def refresh(self) -> None:
        """Before each pick; see Matcher."""
        self._matcher.refresh()

    def after(self, state: State, token: int) -> State | None:
        """Where a token leads; None: it may not come here."""
        if token in self._stops:
            return state if None in state else None
        data = self._text[token] or (self._letters.get(token, OTHER),)
        return self._matcher.after(state, data) or None

    def mask(self, state: State) -> NDArray[np.bool_]:
        """Which tokens may come, by id."""
        if state not in self._masks:
            while len(self._masks) >= _MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[state] = self._mask(state)
        return self._masks[state]

    def _mask(self, state: State) -> NDArray[np.bool_]:
        vocabulary = self._tokenizer.vocabulary
        mask = vocabulary.mask(self._matcher, state)
        for token in {*vocabulary.others, *self._stops}:
            if token < mask.size:
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
        self._states: dict[int, State] = {}  # by position, of the latest picks

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
