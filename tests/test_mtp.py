"""MTP caches depend on the committed tokens alone, whatever was drafted, accepted or taken back.

Numbers are held to transformers' in test_oracle.py; here every history is compared, as bytes, with
a computation from scratch.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import oracle
import pytest
import tiny

from colibri.container import Container
from colibri.depth import Fixed
from colibri.drafting import MtpDrafter
from colibri.errors import CoreError
from colibri.ledger import Ledger
from colibri.model import WAITING, Model
from colibri.sampling import Sampler, SamplingParams
from colibri.session import Session
from colibri.speculation import Limits, spec_decode
from colibri.verification import Matching

CONTEXT = 96  # twelve times the tiny models' index_topk
CASES = [(case, way) for case in ("groups", "ragged") for way in oracle.WAYS]


@pytest.fixture(scope="module")
def open_model(tmp_path_factory):
    """Tiny models by case and by where draft steps take their index sets from."""

    @cache
    def model(case: str, way: str) -> Model:
        config = tiny.CASES[case] | {"index_share_for_mtp_iteration": oracle.WAYS[way]}
        directory = tmp_path_factory.mktemp("tiny")
        tiny.write(directory, config, seed=7)
        return Model.open(Container.open(directory))

    return model


def text(model: Model, seed: int, count: int) -> list[int]:
    """Random token ids."""
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(3, model.config.vocab_size, count)]


def mtp_caches(session: Session) -> tuple[bytes, bytes]:
    """The filled rows of the MTP layer's two caches."""
    layer, rows = session.model.config.num_hidden_layers, session.mtp_length
    return tuple(session.cache(layer, kind)[:rows].tobytes() for kind in ("kv", "index"))


def main_caches(session: Session) -> list[bytes]:
    """The filled rows of all other caches."""
    found = []
    for layer in range(session.model.config.num_hidden_layers):
        for kind in ("kv", "index"):
            rows = session.cache(layer, kind)
            found.append(b"" if rows is None else rows[: session.length].tobytes())
    return found


def from_scratch(model: Model, tokens: list[int], following: list[int]) -> Session:
    """A session that ran `tokens` one by one; MTP rows one by one, as far as a next is known."""
    session = Session(model, CONTEXT, 4)
    after = [*tokens[1:], *following]
    for i, token in enumerate(tokens):
        session.step_all([token], "none")
        if i < len(after):
            session.mtp_absorb(session.last_hidden, [after[i]])
    return session


class History:
    """A session in the middle of a conversation, and random things that happen to it."""

    def __init__(self, model: Model, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.vocab = model.config.vocab_size
        self.session = Session(model, CONTEXT, 16)
        self.session.prefill(text(model, seed, int(self.rng.integers(2, 30))))
        self.hidden = [self.session.last_hidden[0].copy()]  # of rows the MTP cache lacks
        self.state = np.empty(model.config.hidden_size, np.float32)
        self.pending = self.token()

    def token(self) -> int:
        return int(self.rng.integers(3, self.vocab))

    def absorb(self) -> None:
        """The rows that wait, in random chunks; the last chunk with or without logits."""
        following = [*self.session.tokens, self.pending][self.session.mtp_length + 1 :]
        rows = np.stack(self.hidden)
        while len(rows):
            n = int(self.rng.integers(1, len(rows) + 1))
            last = n == len(rows)
            state = self.state if last and self.rng.random() < 0.7 else None
            self.session.mtp_absorb(np.ascontiguousarray(rows[:n]), following[:n], state)
            rows, following = rows[n:], following[n:]
            self.drafting = state is not None
        self.hidden = []

    def draft(self) -> list[int]:
        """A chain of random drafts, made by the MTP layer when it can."""
        drafts = [self.token() for _ in range(int(self.rng.integers(1, 6)))]
        if not self.hidden and self.drafting:
            for step, token in enumerate(drafts[:-1], 1):
                self.session.mtp_draft(token, step, self.state)
        return drafts

    def verify(self, drafts: list[int]) -> None:
        """Run the pending token and the drafts, keep a random number of them."""
        session, kept = self.session, int(self.rng.integers(0, len(drafts) + 1))
        base = session.length + 1
        session.step_all([self.pending, *drafts])
        session.rewind(base + kept)
        self.hidden += [row.copy() for row in session.hidden[: kept + 1]]
        self.pending = self.token()

    def edit(self) -> None:
        """The history is cut and continued with other tokens, as when a message is edited."""
        session = self.session
        keep = int(self.rng.integers(1, session.length + 1))
        prompt = session.tokens[:keep] + [self.token() for _ in range(3)]
        session.prefill(prompt[session.reuse(prompt) :])
        self.hidden = [session.last_hidden[0].copy()]
        self.pending = self.token()

    def go_on(self) -> None:
        """One random event."""
        if self.session.length > CONTEXT - 16 or self.rng.random() < 0.15:
            self.edit()
        if self.rng.random() < 0.7:
            self.absorb()
        self.verify(self.draft() if self.rng.random() < 0.8 else [])


@pytest.mark.parametrize("case, way", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_any_history_leaves_the_caches_of_its_tokens(open_model, case, way, seed):
    """Drafts, acceptances, rewinds and chunked absorbs: caches equal those made token by token."""
    model = open_model(case, way)
    history = History(model, seed)
    history.drafting = False
    for _ in range(12):
        history.go_on()
    history.absorb()
    session = history.session
    assert session.mtp_length == session.length
    scratch = from_scratch(model, session.tokens, [history.pending])
    assert mtp_caches(session) == mtp_caches(scratch)
    assert main_caches(session) == main_caches(scratch)


class Cheating(Matching):
    """Drafts the text that is to come, wrong now and then."""

    def __init__(self, sampler: Sampler, truth: list[int], wrong_every: int) -> None:
        super().__init__(sampler)
        self.truth, self.every = truth, wrong_every

    def propose(self, logits, position, step):
        token = self.truth[position] if position < len(self.truth) else 3
        return (token ^ 1) if position % self.every == 0 else token, 0.5, None


class Sometimes(Fixed):
    """Plain steps for a while, then drafts for a while."""

    def __init__(self, depth: int, plain: int, drafted: int) -> None:
        super().__init__(depth)
        self.plain, self.drafted, self.at = plain, drafted, 0

    def plan(self, limit: int) -> int:
        self.at += 1
        return super().plan(limit) if self.at % (self.plain + self.drafted) >= self.plain else 0


def run(model, prompt, count, drafter=None, depth=None, stops=frozenset()):
    """A greedy turn: its session, tokens and ledger."""
    session = Session(model, CONTEXT, 16)
    logits, ledger = session.prefill(prompt), Ledger()
    sampler = Sampler(SamplingParams(0), model.config.vocab_size)
    made = drafter(session) if drafter else None
    loop = spec_decode(session, logits, sampler, made, depth, Limits(count, stops), ledger)
    return session, [token for block in loop for token in block], ledger


@pytest.fixture
def cheat(monkeypatch):
    """Make the loop's drafts right except at every n-th position."""

    def install(truth: list[int], wrong_every: int) -> None:
        monkeypatch.setattr(
            "colibri.speculation.verification",
            lambda sampler, mode: Cheating(sampler, truth, wrong_every),
        )

    return install


DEPTHS = {
    "every step": lambda: Fixed(3),
    "deep": lambda: Fixed(7),
    "in turns": lambda: Sometimes(3, 5, 2),
    "rarely": lambda: Sometimes(2, 40, 1),
    "never": lambda: None,
}


@pytest.mark.parametrize("case, way", CASES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_turn_leaves_the_caches_of_its_tokens(open_model, cheat, case, way, depth):
    """After a turn with any depth policy the caches are, byte for byte, those of its tokens."""
    model = open_model(case, way)
    prompt = text(model, 3, 13)
    _, plain, _ = run(model, prompt, 60)
    cheat(prompt + plain, 5)
    session, tokens, ledger = run(model, prompt, 60, MtpDrafter, DEPTHS[depth]())
    assert tokens == plain
    assert depth == "never" or sum(ledger.accepted) > 0
    assert session.length == len(prompt) + len(tokens) - 1
    session.catch_up(tokens[-1])
    assert session.mtp_length == session.length
    scratch = from_scratch(model, session.tokens, tokens[-1:])
    assert mtp_caches(session) == mtp_caches(scratch)
    assert main_caches(session) == main_caches(scratch)


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_a_stop_inside_a_block_leaves_no_trace(open_model, cheat, depth):
    """The caches end where the text ends when an accepted draft was a stop."""
    model = open_model("groups", "shared")
    prompt = text(model, 4, 11)
    _, plain, _ = run(model, prompt, 40)
    for at in (5, 6, 7, 8):
        if plain.index(plain[at]) != at:
            continue
        cheat(prompt + plain, 1000)
        stops = frozenset({plain[at]})
        session, tokens, ledger = run(model, prompt, 40, MtpDrafter, Fixed(depth), stops)
        assert tokens == plain[:at]
        assert ledger.proposed == sum(ledger.accepted)
        assert session.tokens == prompt + tokens
        session.catch_up()
        assert session.mtp_length == session.length - 1
        scratch = from_scratch(model, session.tokens, [])
        assert mtp_caches(session) == mtp_caches(scratch)
        assert main_caches(session) == main_caches(scratch)


def test_the_next_turn_runs_no_old_token_again(open_model):
    """After a turn without drafts the MTP cache catches up, so that reuse keeps all."""
    model = open_model("groups", "shared")
    session, tokens, _ = run(model, text(model, 5, 9), 30, MtpDrafter, None)
    assert session.mtp_length == 9 - 1
    assert session.reuse([*session.tokens, tokens[-1], 8, 9]) == session.length == 9 + 29
    assert session.mtp_length == session.length - 1


def long_turn(model, depth, prime=True):
    """The session, tokens and ledger of a greedy turn for whose rows there is no room to wait."""
    session = Session(model, 2 * WAITING, 16)
    logits, ledger = session.prefill(text(model, 6, 9), prime=prime), Ledger()
    sampler, drafter = Sampler(SamplingParams(0), model.config.vocab_size), MtpDrafter(session)
    loop = spec_decode(session, logits, sampler, drafter, depth, Limits(WAITING + 40), ledger)
    return session, [token for block in loop for token in block], ledger


def test_rows_that_wait_are_bounded(open_model):
    """With no room left for rows to wait, all enter the cache in batches, keys only, with the bytes
    of rows that did not wait."""
    model = open_model("groups", "shared")
    session, tokens, ledger = long_turn(model, None)
    absorb = ledger.segments["absorb"]
    assert absorb.rows == session.mtp_length - 8 == WAITING + 16 - 1
    assert absorb.core["head_bytes"] == absorb.core["expert_uses"] == 0
    hidden, config = model.config.hidden_size, model.config
    rows = config.kv_lora_rank + config.qk_rope_head_dim + config.index_head_dim  # keys
    weights = 2 * hidden * hidden + rows * hidden  # eh_proj, then the keys of both caches
    assert absorb.core["dense_bytes"] == -(-absorb.rows // session.max_rows) * weights * 4
    session.catch_up(tokens[-1])
    other, same, _ = long_turn(model, Fixed(3))
    other.catch_up(same[-1])
    assert same == tokens and session.mtp_length == other.mtp_length == session.length
    assert mtp_caches(session) == mtp_caches(other)


def test_a_cache_that_cannot_catch_up_is_not_drafted_from(open_model):
    """A gap in the MTP cache switches its drafts off instead of drafting from stale rows."""
    model = open_model("groups", "shared")
    session = Session(model, 2 * WAITING, 16)
    ids = text(model, 6, WAITING + 40)
    logits = session.prefill(ids, prime=False)
    assert not session.mtp_ready
    sampler, ledger = Sampler(SamplingParams(0), model.config.vocab_size), Ledger()
    loop = spec_decode(session, logits, sampler, MtpDrafter(session), Fixed(3), Limits(20), ledger)
    assert len([token for block in loop for token in block]) == 20
    assert ledger.proposed == 0 and session.mtp_length == 0
    assert ledger.segments["absorb"].forwards == 0
    assert session.reuse([*ids, 7]) == 0  # nothing can be kept without its MTP rows
    session.prefill([*ids, 7])
    scratch = Session(model, 2 * WAITING, 4)
    scratch.prefill([*ids, 7])
    assert mtp_caches(session) == mtp_caches(scratch)


def test_a_draft_needs_a_fresh_absorb(open_model):
    """Drafting from a state that a later absorb or rewind made stale is refused."""
    model = open_model("groups", "shared")
    ids = text(model, 8, 12)
    session = Session(model, CONTEXT, 16)
    state = np.empty(model.config.hidden_size, np.float32)
    session.step_all(ids, "none")
    hidden = session.hidden[: len(ids)].copy()
    session.mtp_absorb(hidden[:4], ids[1:5], state)
    session.mtp_draft(5, 1, state)
    session.mtp_absorb(hidden[4:6], ids[5:7])
    with pytest.raises(CoreError, match="follows an absorb"):
        session.mtp_draft(5, 1, state)
    session.mtp_absorb(hidden[6:8], ids[7:9], state)
    session.mtp_draft(5, 1, state)
    session.rewind(7)
    with pytest.raises(CoreError, match="follows an absorb"):
        session.mtp_draft(5, 1, state)
    session.mtp_absorb(hidden[7:8], ids[8:9], state)
    session.mtp_draft(5, 1, state)
    for step in (0, CONTEXT + 1, 2**63 - 1):
        with pytest.raises(CoreError, match="follows an absorb"):
            session.mtp_draft(5, step, state)
    session.mtp_rewind(3)
    with pytest.raises(CoreError, match="follows an absorb"):
        session.mtp_draft(5, 1, state)


def test_without_mtp_the_layer_is_not_read(open_model, tmp_path):
    """MTP=0 holds one layer less, and MTP calls are refused with a message."""
    tiny.write(tmp_path, tiny.GROUPS, seed=7)
    model = Model.open(Container.open(tmp_path), mtp=False)
    assert not model.has_mtp and model.layers == tiny.GROUPS["num_hidden_layers"]
    assert model.dense_bytes < open_model("groups", "shared").dense_bytes
    session = Session(model, CONTEXT, 16)
    session.prefill([5, 6, 7])
    with pytest.raises(CoreError, match="without its MTP layer"):
        session.mtp_absorb(session.last_hidden, [4])


def test_acceptance_does_not_decay_over_a_conversation(demo_model, demo_tokenizer):
    """When a prompt comes back in one session, exactly as many drafts stand as the first time."""
    session = Session(demo_model, 256, 64)
    drafter = MtpDrafter(session)
    seen: dict[str, list[tuple[list[int], list[int], list[int]]]] = {}
    for subject in ("a fox", "an owl", "Luna and Ben") * 4:
        text = f"[gMASK]<sop><|user|>Tell me a story about {subject}.<|assistant|><think></think>"
        ids = demo_tokenizer.encode_template(text)
        logits, ledger = session.prefill(ids[session.reuse(ids) :]), Ledger()
        sampler = Sampler(SamplingParams(0), demo_model.config.vocab_size)
        loop = spec_decode(session, logits, sampler, drafter, Fixed(3), Limits(40), ledger)
        tokens = [token for block in loop for token in block]
        seen.setdefault(subject, []).append((tokens, ledger.offered, ledger.accepted))
    for runs in seen.values():
        assert len(runs) == 4 and all(run == runs[0] for run in runs)
        assert sum(runs[0][2]) > 20


def test_an_mtp_cache_ahead_of_the_others(open_model):
    """Rows absorbed for positions that are yet to come: hidden states are kept as without them."""
    model = open_model("groups", "own")
    kept = []
    for ahead in (False, True):
        session = Session(model, 1200, 8)
        rows = np.zeros((8, model.config.hidden_size), np.float32)
        for _ in range(80 * ahead):
            session.mtp_absorb(rows, [5] * 8)
        for start in range(0, WAITING + 16, 8):
            session.step_all([(start + i) % 251 for i in range(8)], "none")
        kept.append(session.hidden.tobytes())
    assert kept[0] == kept[1]
