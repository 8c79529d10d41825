"""Answers that keep to a form: which tokens may come next, and who picks among them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri.grammar import NEVER, Matcher, Node, Repeat, Seq, State, Words, one_of
from colibri.knobs import DRAFT_LIMIT
from colibri.sampling import Sampler, SamplingParams
from colibri.tokenizer import Tokenizer

_END = State((None,))
_KEPT = 2 * DRAFT_LIMIT  # latest positions whose states are kept: drafts go no further back
_SPACE = one_of(" \n")
_MASKS = 32  # states whose masks are kept: of 151,552 tokens a mask takes 150 kB


class Phase(enum.Enum):
    """Where the form is not followed."""

    REASONING = "before it"
    CALLING = "instead of it, in the arguments of a call"


class Calls(NamedTuple):
    """Between <tool_call> and the arguments, or after a call: `state` is of the text there."""

    state: State
    made: bool


Place = State | Phase | Calls


class Guide:
    """Follows an answer through its form, token by token.

    Reasoning comes first where the prompt `reasons`, and ends with </think>. Where there are names
    of `calls`, the answer may begin with <tool_call> instead: then it is calls of these, with any
    arguments, and nothing else. It ends where the form does, or after a call.
    """

    def __init__(
        self,
        form: Node,
        tokenizer: Tokenizer,
        stops: frozenset[int],
        reasons: bool = False,
        calls: Sequence[str] = (),
    ) -> None:
        self._matcher = Matcher(form)
        self._tokenizer, self._stops = tokenizer, stops
        names = Words(sorted({name.encode() for name in calls})) if calls else NEVER
        naming = self._matcher.state(Seq((names, Repeat(_SPACE, 0, 2))))
        self._between = self._matcher.state(Repeat(_SPACE))
        ids = (tokenizer.id_of(tag) for tag in ("<tool_call>", "<arg_key>", "</tool_call>"))
        self._call, self._key, self._shut = ids if calls else (None, None, None)
        self._called: Place = Calls(naming, made=False)
        if self._key is None or self._shut is None:  # they come as text, and anything may
            self._called = Phase.CALLING
        self._bytes = tokenizer.text_bytes
        self._close = tokenizer.id_of("</think>")
        self._masks: dict[Place, NDArray[np.bool_]] = {}
        starts = (self._matcher.after(self._matcher.start, space) for space in (b" ", b"\n"))
        self._beginnings = {self._matcher.start, *starts} - {State()}
        self.start: Place = Phase.REASONING if reasons else self._matcher.start

    def refresh(self) -> None:
        """Before each pick; see Matcher."""
        self._matcher.refresh()

    def after(self, state: Place, token: int) -> Place | None:
        """Where a token leads; None: it may not come here."""
        if isinstance(state, Calls):
            return self._around(state, token)
        stops = token in self._stops
        if state is Phase.CALLING:
            if token == self._shut:
                return Calls(self._between, made=True)
            return None if stops and self._shut is not None else state
        if state is Phase.REASONING:
            opened = self._matcher.start if token == self._close else state
            return None if stops else opened
        if stops:
            return state if None in state else None
        if token == self._call and state in self._beginnings:
            return self._called
        data = self._bytes[token]
        return (self._matcher.after(state, data) or None) if data else None

    def _around(self, place: Calls, token: int) -> Place | None:
        """After a token that is no part of the arguments."""
        if place.made and (token in self._stops or token == self._call):
            return place if token in self._stops else self._called
        if not place.made and None in place.state and token in (self._key, self._shut):
            return Phase.CALLING if token == self._key else Calls(self._between, made=True)
        data = self._bytes[token]
        state = self._matcher.after(place.state, data) if data else None
        return Calls(state, place.made) if state else None

    def mask(self, state: Place) -> NDArray[np.bool_]:
        """Which tokens may come, by id."""
        if state not in self._masks:
            while len(self._masks) >= _MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[state] = self._mask(state)
        return self._masks[state]

    def _mask(self, state: Place) -> NDArray[np.bool_]:
        if isinstance(state, Phase):
            mask = np.ones(self._tokenizer.vocab_used, bool)
        else:
            text = state.state if isinstance(state, Calls) else state
            mask = self._tokenizer.vocabulary.mask(self._matcher, text)
        for token in (*self._stops, self._call, self._key, self._shut):
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
        self._states: dict[int, Place] = {}  # by position, of the latest picks

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
