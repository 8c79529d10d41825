"""The decoding loop: stops, limits, counts and caches are exact, whatever is drafted."""

from __future__ import annotations

import numpy as np
import pytest
from colibri._core import ffi
from toy import VOCAB, ToyDrafter, ToySession, drawn, generate, remembered

from colibri.depth import Fixed, Guard, depth_policy
from colibri.drafting import MtpDrafter, NgramDrafter
from colibri.errors import Cancelled, CoreError, SamplingError
from colibri.ledger import Ledger
from colibri.sampling import Sampler, SamplingParams
from colibri.session import Session
from colibri.speculation import Limits, spec_decode

GREEDY = SamplingParams(temperature=0)
PROMPT = [5, 1]


@remembered
def model(tokens):
    """The main model."""
    return drawn("loop", tokens)


@remembered
def half_right(tokens):
    """A drafter that agrees with the model at most positions."""
    return model(tokens) if len(tokens) % 4 else drawn("other", tokens)


@remembered
def often_wrong(tokens):
    """A drafter whose first drafts are refused too: it is wrong three times in a row."""
    return model(tokens) if len(tokens) % 7 < 4 else drawn("other", tokens)


def turn(limits, drafter=None, depth=None, session=None, params=GREEDY, mode="rejection"):
    """A turn on the toy model: tokens, reason, session, ledger."""
    session = session or ToySession(model, PROMPT)
    ledger, sampler = Ledger(), Sampler(params, VOCAB)
    tokens, reason = generate(session, sampler, drafter, depth, limits, ledger, mode)
    return tokens, reason, session, ledger


PLAIN = turn(Limits(40))[0]


def first_at(token: int) -> int:
    """Where the plain text has a token first."""
    return PLAIN.index(token)


@pytest.mark.parametrize("depth", range(8))
@pytest.mark.parametrize("stop", sorted(set(PLAIN)))
def test_a_stop_ends_the_text_before_it(stop, depth):
    """A stop inside an accepted block is not emitted, run or counted, nor is anything behind it."""
    expected = PLAIN[: first_at(stop)]
    for logits in (model, half_right):
        limits = Limits(40, frozenset({stop}))
        tokens, reason, session, ledger = turn(limits, ToyDrafter(logits), Fixed(depth))
        assert (tokens, reason) == (expected, "stop")
        assert session.tokens == PROMPT + expected
        assert ledger.tokens == len(expected)
        assert sum(ledger.accepted) <= len(expected)


def test_a_stop_as_first_token_yields_nothing():
    """When the prompt alone leads to a stop, nothing is yielded and nothing is run."""
    tokens, reason, session, ledger = turn(
        Limits(9, frozenset({PLAIN[0]})), ToyDrafter(model), Fixed(3)
    )
    assert (tokens, reason, session.tokens, session.steps) == ([], "stop", PROMPT, [])
    assert ledger.tokens == 0


def test_accepted_drafts_before_a_stop_are_counted_and_no_others():
    """Only drafts that were committed count as accepted, only those before the stop as proposed."""
    at = next(i for i in range(3, 9) if PLAIN.index(PLAIN[i]) == i)
    stop = PLAIN[at]
    _, _, _, ledger = turn(Limits(40, frozenset({stop})), ToyDrafter(model), Fixed(15))
    assert ledger.proposed == sum(ledger.offered) == sum(ledger.accepted) == at - 1


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 7, 15])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 17])
def test_max_tokens_is_exact(most, depth):
    """Exactly max_tokens are yielded, the last one pending; no row is run beyond the limit."""
    for logits in (model, half_right):
        tokens, reason, session, _ = turn(Limits(most), ToyDrafter(logits), Fixed(depth))
        assert (tokens, reason) == (PLAIN[:most], "length")
        assert session.tokens == PROMPT + PLAIN[: most - 1]


@pytest.mark.parametrize("depth", [0, 1, 3, 15])
@pytest.mark.parametrize("context", [2, 3, 4, 6, 11])
def test_the_context_is_never_exceeded(context, depth):
    """Prompt and answer fill the context at most, and the reason says that it was the limit."""
    session = ToySession(model, PROMPT, context)
    tokens, reason, session, _ = turn(Limits(40), ToyDrafter(model), Fixed(depth), session)
    assert (tokens, reason) == (PLAIN[: context - 2], "context")
    assert session.length <= context


def test_nothing_asked_nothing_done():
    """max_tokens 0 yields nothing and is a matter of length."""
    assert turn(Limits(0), ToyDrafter(model), Fixed(3))[:2] == ([], "length")


def test_a_step_never_has_more_rows_than_the_session():
    """Drafts are clamped to max_rows - 1."""
    session = ToySession(model, PROMPT)
    session.max_rows = 3
    tokens, _, session, _ = turn(Limits(20), ToyDrafter(model), Fixed(9), session)
    assert tokens == PLAIN[:20]
    assert max(map(len, session.steps)) == 3


def test_blocks_are_yielded_as_soon_as_they_are_picked():
    """While a block is held, the session is the text but its pending last token."""
    session, text = ToySession(model, PROMPT), []
    sampler, ledger = Sampler(GREEDY, VOCAB), Ledger()
    loop = spec_decode(
        session, session.logits(), sampler, ToyDrafter(half_right), Fixed(3), Limits(30), ledger
    )
    for block in loop:
        text += block
        assert session.tokens == PROMPT + text[:-1]
        block.clear()  # a caller may do with its block what it likes
    assert text == PLAIN[:30]


def test_a_drafter_is_asked_about_the_text_so_far():
    """Each step asks about all committed tokens, refused drafts left out; depth 0 does not ask."""
    for depth, fewest in ((None, 0), (Fixed(0), 0), (Fixed(4), 23 // 5)):
        toy = ToyDrafter(half_right)
        turn(Limits(23), toy, depth)
        lengths = [len(text) - len(PROMPT) for text in toy.asked]
        assert toy.asked == [PROMPT + PLAIN[:n] for n in lengths]
        assert lengths == sorted(set(lengths)) and len(lengths) >= fewest
        assert bool(lengths) == (fewest > 0)


class Failing(ToySession):
    """A session whose n-th step raises."""

    def __init__(self, error: Exception, at: int) -> None:
        super().__init__(model, PROMPT)
        self.error, self.at = error, at

    def step_all(self, ids, want="all"):
        if len(self.steps) == self.at:
            raise self.error
        return super().step_all(ids, want)


@pytest.mark.parametrize("error", [Cancelled("x"), CoreError("x")])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupted_turn_leaves_what_was_yielded(error, at):
    """Cancelled and core errors surface, with a session that holds the yielded tokens only."""
    session, sampler, ledger = Failing(error, at), Sampler(GREEDY, VOCAB), Ledger()
    text = []
    loop = spec_decode(
        session,
        session.logits(),
        sampler,
        ToyDrafter(half_right),
        Fixed(2),
        Limits(30),
        ledger,
        "rejection",
    )
    with pytest.raises(type(error)):
        for block in loop:
            text += block
    assert text == PLAIN[: len(text)]
    assert session.tokens == PROMPT + text[:-1]
    assert ledger.wall >= sum(s.seconds for s in ledger.segments.values()) * 0.999


def test_a_closed_loop_is_tidy():
    """A caller that stops listening leaves the same state as a cancelled turn."""
    session, text = ToySession(model, PROMPT), []
    loop = spec_decode(
        session, session.logits(), Sampler(GREEDY, VOCAB), ToyDrafter(model), Fixed(2),
        Limits(30), Ledger(),
    )  # fmt: skip
    for block in loop:
        text += block
        if len(text) > 6:
            loop.close()
            break
    assert session.tokens == PROMPT + text[:-1]


def test_unusable_logits_leave_no_drafts_behind():
    """When the model's logits turn to NaN, the error surfaces and no draft stays in the session."""

    def broken(tokens):
        return model(tokens) if len(tokens) < 6 else np.full(VOCAB, np.nan, np.float32)

    session, text = ToySession(broken, PROMPT), []
    loop = spec_decode(
        session, session.logits(), Sampler(GREEDY, VOCAB), ToyDrafter(model), Fixed(9),
        Limits(30), Ledger(),
    )  # fmt: skip
    with pytest.raises(SamplingError):
        for block in loop:
            text += block
    assert session.tokens == PROMPT + text


def test_acceptance_by_position_counts_what_was_judged():
    """A draft is offered at its position when all before it stood; accepted when it stood too."""
    toy, offered, accepted = ToyDrafter(often_wrong), [0] * 3, [0] * 3
    _, _, _, ledger = turn(Limits(33), toy, Fixed(3))
    for text in toy.asked:
        for i, token in enumerate(PLAIN[len(text) - len(PROMPT) : 32][:3]):
            offered[i] += 1
            if often_wrong(text).argmax() != token:
                break
            accepted[i] += 1
            text = [*text, token]
    assert (ledger.offered, ledger.accepted) == (offered, accepted)
    assert offered[0] > accepted[0] >= offered[1] > accepted[1] >= offered[2] > 0
    rows = ledger.segments["verify"].rows - ledger.segments["verify"].forwards
    assert ledger.proposed == rows
    emitted = ledger.segments["verify"].tokens
    assert emitted == sum(ledger.accepted) + ledger.segments["verify"].forwards


def test_a_policy_at_rest_is_not_asked():
    """While it rests a token a step is counted off, and nothing drafted, planned or recorded."""
    toy, guard = ToyDrafter(model), Guard(Fixed(3))
    guard.rest = 5
    assert turn(Limits(12), toy, guard)[0] == PLAIN[:12]
    assert toy.asked[0] == PROMPT + PLAIN[:6]


# ---- on the demo model --------------------------------------------------------------------------


def decode(model, ids, make, depth, params, mode, count=96, context=512, kv_dtype="f32"):
    """A turn of the demo model: its tokens and ledger."""
    session = Session(model, context, 64, kv_dtype=kv_dtype)
    logits, ledger = session.prefill(ids), Ledger()
    sampler = Sampler(params, model.config.vocab_size)
    limits = Limits(count, frozenset(model.config.eos_token_ids))
    drafter = make(session) if make else None
    loop = spec_decode(session, logits, sampler, drafter, depth, limits, ledger, mode)
    return [token for block in loop for token in block], ledger


@pytest.fixture(scope="module")
def prompt(demo_tokenizer):
    """A short conversation."""
    text = "[gMASK]<sop><|user|>Tell me a story about a fox.<|assistant|><think></think>"
    return demo_tokenizer.encode_template(text)


MAKERS = {"mtp": MtpDrafter, "ngram": lambda session: NgramDrafter()}
WAYS = {
    "greedy": (GREEDY, "rejection"),
    "coupled": (SamplingParams(0.7, seed=11), "coupled"),
    "coupled hot": (SamplingParams(1.0, top_p=0.95, seed=12), "coupled"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_the_same_with_any_drafting(demo_model, prompt, way):
    """On the demo model greedy and coupled text is equal for every drafter and depth."""
    params, mode = WAYS[way]
    expected, _ = decode(demo_model, prompt, None, None, params, mode)
    assert len(expected) > 30
    for name, depth in (("mtp", 1), ("mtp", 3), ("mtp", 7), ("mtp", None), ("ngram", 4)):
        policy = depth_policy(depth, clock_free=False, guarded=name == "mtp")
        found, ledger = decode(demo_model, prompt, MAKERS[name], policy, params, mode)
        assert found == expected, (name, depth)
        if name == "mtp" and depth:
            assert sum(ledger.accepted) > len(found) // 4


def test_drafts_are_as_good_with_caches_in_f16(demo_model, prompt):
    """The text is the same with drafts and without, and most of them stand."""
    plain, _ = decode(demo_model, prompt, None, None, GREEDY, "rejection", kv_dtype="f16")
    text, ledger = decode(
        demo_model, prompt, MtpDrafter, Fixed(3), GREEDY, "rejection", kv_dtype="f16"
    )
    assert text == plain and sum(ledger.accepted) > len(text) // 2


@pytest.mark.parametrize("mode", ["rejection", "probabilistic"])
def test_one_seed_one_text_at_one_setting(demo_model, prompt, mode):
    """Sampled text of the modes that depend on depth is the same twice with the same settings."""
    params = SamplingParams(0.9, seed=5)
    first, second = (
        decode(demo_model, prompt, MtpDrafter, Fixed(3), params, mode)[0] for _ in range(2)
    )
    assert first == second


def test_a_loop_that_outlives_its_session_is_quiet(demo_models, prompt):
    """At exit the collector may free a session before a loop that was left half-way: ending the
    loop then touches nothing that is gone."""
    session = Session(demo_models(1), 256, 64)
    drafter, sampler = MtpDrafter(session), Sampler(GREEDY, session.model.config.vocab_size)
    logits, ledger = session.prefill(prompt), Ledger()
    loop = spec_decode(session, logits, sampler, drafter, None, Limits(64), ledger)
    for _ in range(3):
        next(loop)
    ffi.release(session.handle)
    before = ledger.segments["absorb"].rows
    loop.close()
    assert ledger.segments["absorb"].rows == before
