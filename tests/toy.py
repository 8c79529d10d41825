"""A core of eight tokens, drafters that misbehave, and a generator whose every branch is walked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from colibri.drafting import Drafts
from colibri.noise import Purpose
from colibri.sampling import Distribution, Sampler, SamplingParams
from colibri.speculation import Limits, spec_decode

VOCAB = 8
Row = np.ndarray
Logits = Callable[[Sequence[int]], Row]


def remembered(logits: Logits) -> Logits:
    """The same function, computed once per text."""
    known = cache(lambda tokens: logits(list(tokens)))
    return lambda tokens: known(tuple(tokens))


def drawn(seed: str, tokens: Sequence[int]) -> Row:
    """Logits [8] that are a fixed function of a name and the tokens before."""
    digest = hashlib.sha256(f"{seed}:{list(tokens)}".encode()).digest()
    return np.frombuffer(digest[: 4 * VOCAB], "<u4").astype(np.float32) / np.float32(2**31)


class ToySession:
    """What the loop needs of a session, over any function from tokens to logits."""

    freed = False

    def __init__(self, logits: Logits, prompt: Sequence[int], context: int = 64) -> None:
        self._next = logits
        self.tokens = list(prompt)
        self.context = context
        self.max_rows = 16
        self.steps: list[list[int]] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def logits(self) -> Row:
        """What the prompt's last row gives."""
        return self._next(self.tokens)

    def step_all(self, ids: Sequence[int], want: str = "all") -> Row:
        self.steps.append(list(ids))
        rows = []
        for token in ids:
            self.tokens.append(token)
            rows.append(self._next(self.tokens))
        return np.stack(rows)

    def rewind(self, length: int) -> None:
        assert length <= len(self.tokens)
        del self.tokens[length:]

    def crowded(self, rows: int) -> bool:
        return False

    def work(self) -> dict[str, dict[str, int]]:
        return {}


class ToyDrafter:
    """Drafts whatever a function of the text so far says; remembers what it was asked about."""

    name = "toy"

    def __init__(self, logits: Logits) -> None:
        self._logits = logits
        self.asked: list[list[int]] = []

    def begin(self, session) -> None:
        self.session = session

    def draft(self, pending, limit, rule, depth, ledger) -> Drafts:
        text, drafts = [*self.session.tokens, pending], Drafts()
        self.asked.append(text)
        for step in range(limit):
            row = self._logits(text + drafts.ids)
            proposal = rule.propose(row, len(text) + step, step)
            if proposal is None or not depth.keep(step, proposal[1]):
                break
            drafts.add(*proposal)
            if step + 1 < limit and not depth.deeper(step + 1):
                break
        return drafts


class Walk:
    """One path through a tree of random choices; `paths` walks them all, depth first."""

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self.taken: list[tuple[int, int]] = []  # (choice, choices)
        self.chance = 1.0

    def branch(self, chances: Sequence[float]) -> int:
        """One of the outcomes with these chances, which sum to 1; impossible ones are skipped."""
        open_ = [i for i, chance in enumerate(chances) if chance > 0]
        at = self._script[len(self.taken)] if len(self.taken) < len(self._script) else 0
        self.taken.append((at, len(open_)))
        self.chance *= chances[open_[at]]
        return open_[at]

    @staticmethod
    def paths(run: Callable[[Walk], object]) -> Iterator[tuple[object, float]]:
        """Every outcome of `run` with its chance."""
        script: list[int] = []
        while True:
            walk = Walk(script)
            result = run(walk)
            yield result, walk.chance
            while walk.taken and walk.taken[-1][0] + 1 == walk.taken[-1][1]:
                walk.taken.pop()
            if not walk.taken:
                return
            script = [at for at, _ in walk.taken]
            script[-1] += 1


_KNOWN: dict[tuple[SamplingParams, bytes], Distribution] = {}


class WalkedSampler(Sampler):
    """A sampler whose uniforms are intervals: each use of a key splits what is left of its own.

    Two draws with one key see the same noise, as with the real generator, so wrong reuse of a key
    shows in the distribution.
    """

    def __init__(self, params: SamplingParams, walk: Walk) -> None:
        super().__init__(params, VOCAB)
        self._walk = walk
        self._left: dict[tuple[int, Purpose], tuple[float, float]] = {}

    def _split(self, key: tuple[int, Purpose], edges: Sequence[float]) -> int:
        low, high = self._left.get(key, (0.0, 1.0))
        cuts = [0.0, *edges, 1.0]
        parts = [(max(low, a), min(high, b)) for a, b in pairwise(cuts)]
        at = self._walk.branch([max(b - a, 0.0) / (high - low) for a, b in parts])
        self._left[key] = parts[at]
        return at

    def draw(self, distribution: Distribution, position, purpose=Purpose.PICK) -> int:
        edges = distribution.p.cumsum()[:-1].tolist()
        return int(distribution.ids[self._split((position, purpose), edges)])

    def distribution(self, logits) -> Distribution:
        key = (self.params, logits.tobytes())
        if key not in _KNOWN:
            _KNOWN[key] = super().distribution(logits)
        return _KNOWN[key]

    def accept(self, probability: float, position: int, purpose=Purpose.ACCEPT) -> bool:
        return not self._split((position, purpose), [min(probability, 1.0)])

    def pick(self, logits, position) -> int:
        return self.draw(self.distribution(logits), position)


def generate(
    session: ToySession, sampler: Sampler, drafter, depth, limits: Limits, ledger, mode: str
) -> tuple[list[int], str]:
    """All tokens of a turn and why it ended."""
    loop = spec_decode(session, session.logits(), sampler, drafter, depth, limits, ledger, mode)  # type: ignore[arg-type]
    tokens: list[int] = []
    while True:
        try:
            tokens.extend(next(loop))
        except StopIteration as end:
            return tokens, end.value


def exact(logits: Logits, params: SamplingParams, prompt: Sequence[int], count: int) -> dict:
    """The true distribution of the next `count` tokens, by the chain rule."""
    sampler = Sampler(params, VOCAB)
    table: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer = {}
        for text, chance in table.items():
            p = sampler.distribution(logits([*prompt, *text]))
            for token, one in zip(p.ids, p.p, strict=True):
                longer[(*text, int(token))] = chance * float(one)
        table = longer
    return table
