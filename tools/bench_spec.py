"""Never for the worse: tokens a second by draft depth, paired and interleaved, medians of pairs.

usage: bench_spec.py [MODEL_DIR ...] [--slots N ...] [--pairs 5] [--tokens 256] [--prompts 3]
A cell is a model, a memory (everything cached, or N expert slots a layer so that experts are read
again and again) and a kind of text. In a cell every depth runs in turn, order reversed every other
round, each time from a cold start: new session, new controller. Texts must be equal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from prompts import KINDS, prompt

import colibri.demo
from colibri.container import Container
from colibri.depth import depth_policy
from colibri.drafting import MtpDrafter, NgramDrafter
from colibri.ledger import Ledger
from colibri.model import Model
from colibri.sampling import Sampler, SamplingParams
from colibri.session import Session
from colibri.speculation import Limits, spec_decode
from colibri.tokenizer import Tokenizer

DEPTHS = (0, 1, 2, 3, 5, 7, None)
ROWS = 64
BEST, WORST = 0.97, 0.98  # the controller against the best fixed depth, and against none

Run = tuple[list[int], float, float]  # tokens, tokens per second, tokens per forward


def decode(model: Model, vocab: int, prompts: Sequence[list[int]],
           depth: int | None, count: int) -> Run:  # fmt: skip
    """All prompts of a cell, greedy, with one depth."""
    policy = depth_policy(depth, clock_free=False, guarded=model.has_mtp)
    text: list[int] = []
    seconds, forwards = 0.0, 0
    for ids in prompts:
        session = Session(model, len(ids) + count, ROWS)
        logits, ledger = session.prefill(ids), Ledger()
        drafter = (MtpDrafter(session) if model.has_mtp else NgramDrafter()) if policy else None
        sampler = Sampler(SamplingParams(temperature=0), vocab)
        limits = Limits(count)  # no stops: all cells are of one length
        for block in spec_decode(session, logits, sampler, drafter, policy, limits, ledger):
            text += block
        seconds += ledger.wall
        forwards += ledger.main_forwards
    return text, len(text) / seconds, len(text) / max(forwards, 1)


def cell(model: Model, vocab: int, prompts: Sequence[list[int]],
         pairs: int, count: int) -> dict[int | None, list[Run]]:  # fmt: skip
    """Runs by depth; round i of every depth was made within the same minute."""
    decode(model, vocab, prompts, 0, count)  # pages and expert slots as in a long run
    runs: dict[int | None, list[Run]] = {depth: [] for depth in DEPTHS}
    for i in range(pairs):
        for depth in DEPTHS if i % 2 == 0 else DEPTHS[::-1]:
            runs[depth].append(decode(model, vocab, prompts, depth, count))
    return runs


def line(name: str, runs: dict[int | None, list[Run]]) -> tuple[str, float, float]:
    """A table row; the controller's share of the best fixed depth and of no drafts."""
    speed = {depth: median(run[1] for run in made) for depth, made in runs.items()}
    texts = {tuple(run[0]) for made in runs.values() for run in made}
    best = max((depth for depth in DEPTHS if depth is not None), key=lambda d: speed[d])

    def share(depth: int) -> float:
        pairs = zip(runs[None], runs[depth], strict=True)
        return median(mine[1] / theirs[1] for mine, theirs in pairs)

    cells = [f"{speed[depth]:,.1f}" for depth in DEPTHS]
    tail = [f"{best}", f"{share(best):.3f}", f"{share(0):.3f}", f"{runs[None][0][2]:.2f}",
            "equal" if len(texts) == 1 else "DIFFER"]  # fmt: skip
    return f"| {' | '.join([name, *cells, *tail])} |", share(best), share(0)


def main() -> int:
    """Print a Markdown table; 1 when the controller misses a bar or texts differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="*", type=Path, default=[colibri.demo.MODEL])
    parser.add_argument("--slots", type=int, nargs="*", default=[])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--no-mtp", action="store_true", help="draft with n-grams")
    args = parser.parse_args()
    heads = ["auto" if depth is None else f"{depth}" for depth in DEPTHS]
    print(f"| cell | {' | '.join(heads)} | best | auto/best | auto/0 | tokens a forward | text |")
    print("|---|" + "---:|" * (len(heads) + 4) + "---|")
    met = True
    for directory in args.models:
        container, tokenizer = Container.open(directory), Tokenizer.load(directory)
        model = Model.open(container, threads=args.threads, mtp=not args.no_mtp)
        for slots in [0, *args.slots]:
            model.set_residency("direct" if slots else "mmap", slots)
            for kind in args.kinds:
                prompts = [prompt(tokenizer, kind, i) for i in range(args.prompts)]
                runs = cell(model, tokenizer.vocab_used, prompts, args.pairs, args.tokens)
                memory = f"{slots} slots" if slots else "cached"
                row, best, none = line(f"{directory.name}, {memory}, {kind}", runs)
                met = met and best >= BEST and none >= WORST and "DIFFER" not in row
                print(row, flush=True)
    print(f"bars ({BEST:.0%} of the best, {WORST:.0%} of none): {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
