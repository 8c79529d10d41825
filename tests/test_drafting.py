"""Drafters: prompt lookup finds the longest recent match; all drafters keep to what is asked."""

from __future__ import annotations

import random

import pytest
from toy import ToySession

from colibri.depth import Fixed
from colibri.drafting import Drafts, MtpDrafter, NgramDrafter
from colibri.ledger import Ledger
from colibri.sampling import Sampler, SamplingParams
from colibri.session import Session
from colibri.verification import Matching

RULE = Matching(Sampler(SamplingParams(0), 1000))


def looked_up(tokens: list[int], limit: int = 4, depth=None) -> list[int]:
    """What prompt lookup drafts after a text."""
    drafter = NgramDrafter()
    return asked(drafter, tokens, limit, depth)


def asked(drafter: NgramDrafter, tokens: list[int], limit: int, depth=None) -> list[int]:
    """What it drafts in a turn that begins after a text, whose last token is pending."""
    drafter.begin(ToySession(lambda _: None, tokens[:-1]))
    return drafter.draft(tokens[-1], limit, RULE, depth or Fixed(limit), Ledger()).ids


def brute_force(tokens: list[int]) -> tuple[int, int]:
    """The longest, then latest, earlier match of the end; -1 when it is no bigram."""
    best, agreed, end = -1, 1, len(tokens) - 1
    for place in range(end - 1, 0, -1):
        n = 0
        while n <= place and tokens[place - n] == tokens[end - n]:
            n += 1
        if n > agreed:
            best, agreed = place, n
    return best, agreed


@pytest.mark.parametrize(
    "tokens, drafts",
    [
        ([1], []),
        ([1, 2], []),
        ([1, 2, 3, 2], []),  # a unigram is not enough
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([9, 1, 2, 3, 8, 1, 2, 4, 7, 9, 1, 2], [3, 8, 1, 2]),  # longer beats later
        ([1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [4, 7, 1, 2]),  # of equals, the later
        ([5, 5, 5, 5], [5, 5, 5, 5]),  # a match that runs into the end repeats its period
        ([1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2, 3]),
    ],
)
def test_prompt_lookup(tokens, drafts):
    """The longest recent match of at least a bigram proposes what followed it."""
    assert looked_up(tokens) == drafts


def test_prompt_lookup_agrees_with_a_plain_search():
    """On random texts of few tokens the incremental index finds what a plain search finds."""
    rng = random.Random(1)
    for _ in range(60):
        drafter = NgramDrafter()
        drafter.CANDIDATES = drafter.LONGEST = 1000
        text = [rng.randrange(3) for _ in range(rng.randrange(2, 12))]
        session = ToySession(lambda _: None, text[:-1])
        drafter.begin(session)
        for _ in range(25):
            drafter.draft(text[-1], 1, RULE, Fixed(1), Ledger())
            place, agreed = drafter.match()
            expected = brute_force(text)
            assert (place, agreed if place >= 0 else 1) == expected
            text = text + [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
            session.tokens = text[:-1]


def test_prompt_lookup_follows_edits():
    """After a turn whose history was cut, matches come from the new text alone."""
    drafter = NgramDrafter()
    assert asked(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9], 2) == []
    assert asked(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], 2) == [3, 4]
    assert asked(drafter, [4, 4, 1, 2], 2) == []
    assert asked(drafter, [1, 2, 8, 1, 2], 2) == [8, 1]


def test_a_lookup_is_bounded():
    """On a text that matches everywhere, a lookup compares a bounded number of tokens."""
    compared = 0

    class Counting(NgramDrafter):
        def _agreement(self, tokens, place, end):
            nonlocal compared
            n = super()._agreement(tokens, place, end)
            compared += n
            return n

    drafter = Counting()
    asked(drafter, [7] * 5000, 1)
    assert compared <= NgramDrafter.LONGEST * NgramDrafter.CANDIDATES


class Picky(Fixed):
    """Keeps drafts up to a step, and says which questions it was asked."""

    def __init__(self, depth: int, refuse: int) -> None:
        super().__init__(depth)
        self.refuse, self.asked = refuse, []

    def keep(self, step: int, confidence: float) -> bool:
        assert 0 <= confidence <= 1
        self.asked.append(("keep", step))
        return step != self.refuse

    def deeper(self, step: int) -> bool:
        self.asked.append(("deeper", step))
        return True


ORDER = [("keep", 0), ("deeper", 1), ("keep", 1), ("deeper", 2), ("keep", 2)]


def test_every_drafter_asks_before_it_goes_on(demo_model):
    """A refused draft is the last and is not proposed; keep and deeper are asked in turn."""
    picky = Picky(5, 2)
    assert len(looked_up([1, 2, 3, 4, 5, 6, 7, 1, 2], 5, picky)) == 2
    assert picky.asked == ORDER
    session = Session(demo_model, 64, 16)
    session.prefill([3, 40, 50, 60])
    drafter, picky = MtpDrafter(session), Picky(5, 2)
    drafter.begin(session)
    assert len(drafter.draft(70, 5, RULE, picky, Ledger()).ids) == 2
    assert picky.asked == ORDER
    assert session.mtp_length == session.length


def test_mtp_drafts_come_from_used_tokens_alone(demo_model):
    """Rows of the head beyond the tokenizer's vocabulary are never drafted."""
    session = Session(demo_model, 64, 16)
    session.prefill([3, 40, 50, 60])
    drafter = MtpDrafter(session)
    drafter.begin(session)
    rule = Matching(Sampler(SamplingParams(0), 100))
    ids = drafter.draft(70, 7, rule, Fixed(7), Ledger()).ids
    assert len(ids) == 7 and max(ids) < 100


def test_drafts_hold_tokens_confidences_and_sources_together():
    """One entry of each per draft."""
    drafts = Drafts()
    drafts.add(5, 0.5)
    drafts.add(6, 0.25, None)
    assert (drafts.ids, drafts.confidence, drafts.q) == ([5, 6], [0.5, 0.25], [None, None])
