"""Never for the worse: tokens a second by draft depth, paired and interleaved, medians of pairs.

usage: bench_spec.py [MODEL_DIR ...] [--slots N ...] [--pairs 5] [--tokens 256] [--prompts 3]
A cell is a model, a memory (everything cached, or N expert slots a layer so that experts are read
again and again) and a kind of text. In each round every depth writes the cell's texts from a cold
start: new sessions, new controller. With everything cached the depths write in lockstep, 16 tokens
each in turn, the order reversed every turn, so that a noisy host disturbs all of them alike; where
experts are read each depth has the machine to itself for one text. Texts must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

from prompts import KINDS, prompt

import colibri.demo
from colibri.container import Container
from colibri.depth import DepthPolicy, depth_policy
from colibri.drafting import MtpDrafter, NgramDrafter
from colibri.ledger import TEXT, Ledger
from colibri.model import Model
from colibri.sampling import Sampler, SamplingParams
from colibri.session import Session
from colibri.speculation import Limits, spec_decode
from colibri.tokenizer import Tokenizer

DEPTHS = (0, 1, 2, 3, 5, 7)
ROWS = 64
SLICE = 16  # tokens of one turn in lockstep
BEST, WORST = 0.97, 0.98  # the controller against the best fixed depth, and against none

Depth = int | None  # None: the controller decides


@dataclass
class Run:
    """What one depth made of a cell's texts in one round."""

    policy: DepthPolicy | None
    text: list[int] = field(default_factory=list)
    seconds: float = 0.0
    forwards: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return len(self.text) / self.seconds


class Writer:
    """One text in the making, with one depth; its time is that of the loop while it is asked."""

    def __init__(self, model: Model, vocab: int, ids: list[int], run: Run, count: int) -> None:
        session = Session(model, len(ids) + count, ROWS)
        drafter = (MtpDrafter(session) if model.has_mtp else NgramDrafter()) if run.policy else None
        self.run, self.made, self.ledger = run, 0, Ledger()
        self._loop = spec_decode(
            session, session.prefill(ids), Sampler(SamplingParams(temperature=0), vocab), drafter,
            run.policy, Limits(count), self.ledger,  # no stops: all texts are of one length
        )  # fmt: skip

    def write(self, goal: int) -> None:
        """Go on until so many tokens are there."""
        while self.made < goal and (block := next(self._loop, None)):
            self.made += len(block)
            self.run.text += block

    def close(self) -> None:
        """The text is done: its time counts, that between two turns does not."""
        next(self._loop, None)
        self.run.seconds += self.ledger.wall - self.ledger.segments[TEXT].seconds
        self.run.forwards += self.ledger.main_forwards


def round_of(model: Model, vocab: int, prompts: Sequence[list[int]], depths: Sequence[Depth],
             count: int, turn: int) -> dict[Depth, Run]:  # fmt: skip
    """Every depth writes every text once, `turn` tokens at a time."""
    runs = {
        depth: Run(depth_policy(depth, clock_free=False, guarded=model.has_mtp)) for depth in depths
    }
    for ids in prompts:
        writers = [Writer(model, vocab, ids, run, count) for run in runs.values()]
        for goal in range(turn, count + turn, turn):
            for writer in writers:
                writer.write(min(goal, count))
            writers.reverse()
        for writer in writers:
            writer.close()
    return runs


def line(name: str, rounds: list[dict[Depth, Run]]) -> tuple[str, bool]:
    """A table row, and whether the controller met both bars."""
    depths = list(rounds[0])
    speed = {depth: median(runs[depth].rate for runs in rounds) for depth in depths}
    best = max((depth for depth in depths if depth is not None), key=lambda d: speed[d])
    texts = {tuple(run.text) for runs in rounds for run in runs.values()}
    auto = [runs[None] for runs in rounds]
    against_best = sorted(runs[None].rate / runs[best].rate for runs in rounds)
    against_none = sorted(runs[None].rate / runs[0].rate for runs in rounds)
    cells = [f"{speed[depth]:,.{0 if speed[depth] >= 100 else 2}f}" for depth in depths]
    cells += [f"{best}", _spread(against_best), _spread(against_none)]
    cells += [f"{len(auto[0].text) / auto[0].forwards:.2f}", _digest(texts)]
    met = median(against_best) >= BEST and median(against_none) >= WORST and len(texts) == 1
    return f"| {' | '.join([name, *cells])} |", met


def _spread(shares: list[float]) -> str:
    return f"{median(shares):.3f} ({shares[0]:.2f} to {shares[-1]:.2f})"


def _digest(texts: set[tuple[int, ...]]) -> str:
    if len(texts) > 1:
        return "DIFFER"
    return hashlib.sha256(repr(next(iter(texts))).encode()).hexdigest()[:8]


def tokenizer_of(directory: Path) -> Tokenizer:
    """The model's own; a bench model has none, and takes the demo's ids for words of its own."""
    return Tokenizer.load(directory if has_words(directory) else colibri.demo.MODEL)


def has_words(directory: Path) -> bool:
    """Whether a model directory comes with a tokenizer."""
    return (directory / "tokenizer.json").exists()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="*", type=Path, default=[colibri.demo.MODEL])
    parser.add_argument("--slots", type=int, nargs="*", default=[0], help="0: everything cached")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--depths", type=int, nargs="*", default=DEPTHS)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--no-mtp", action="store_true", help="draft with n-grams")
    return parser.parse_args()


def main() -> int:
    """Print a Markdown table; 1 when the controller misses a bar or texts differ."""
    args = arguments()
    depths = [*args.depths, None]
    heads = [*map(str, args.depths), "auto", "best", "auto/best", "auto/0", "tokens a forward"]
    print(f"| cell | {' | '.join(heads)} | text |\n|---|{'---:|' * len(heads)}---|")
    missed = 0
    for directory in args.models:
        container, tokenizer = Container.open(directory), tokenizer_of(directory)
        model, vocab = (
            Model.open(container, args.threads, mtp=not args.no_mtp),
            tokenizer.vocab_used if has_words(directory) else container.config.vocab_size,
        )
        for slots, kind in product(args.slots, args.kinds):
            model.set_residency("direct" if slots else "mmap", slots)
            prompts = [prompt(tokenizer, kind, i) for i in range(args.prompts)]
            turn = args.tokens if slots else SLICE
            round_of(model, vocab, prompts, [0], args.tokens, turn)  # pages and slots fill up
            rounds = [
                round_of(model, vocab, prompts, depths[:: 1 - i % 2 * 2], args.tokens, turn)
                for i in range(args.pairs)
            ]
            memory = f"{slots} slots" if slots else "cached"
            row, met = line(f"{directory.name}, {memory}, {kind}", rounds)
            missed += not met
            print(row, flush=True)
    verdict = f"MISSED in {missed} cells" if missed else "met"
    print(f"bars ({BEST:.0%} of the best, {WORST:.0%} of none): {verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
