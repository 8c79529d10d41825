"""Conversations that decode side by side: a pass for each in turn, against one pass for all.

usage: bench_together.py MODEL_DIR [--conversations 2] [--io direct --slots 21] [--tokens 16]
Rounds A B B A, random ids, tokens timed after as many others; the ids that follow are the same.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

from colibri.container import Container
from colibri.model import Model
from colibri.scratch import Scratch
from colibri.session import Session, step_together

PROMPT = 16
WAYS = ("in turn", "together")


class Timed(NamedTuple):
    """One run: seconds and bytes read of the timed part, and all tokens picked."""

    seconds: float
    read: int
    picked: list[list[int]]


def advance(sessions: list[Session], way: str) -> None:
    """One token for each."""
    for session in sessions:
        session.staged = [int(session.logits[0].argmax())]
    if way == "together":
        step_together(sessions)
    for session in sessions:
        if session.staged:
            session.step_all(session.staged)


def run(model: Model, conversations: int, tokens: int, way: str) -> Timed:
    """Prompts, as many tokens as will be timed, and those."""
    context, rng = PROMPT + 2 * tokens, random.Random(1)
    scratch = Scratch(model, context, PROMPT)
    sessions = [Session(model, context, PROMPT, scratch) for _ in range(conversations)]
    for session in sessions:
        session.prefill([rng.randrange(model.config.vocab_size) for _ in range(PROMPT)])
    for _ in range(tokens):
        advance(sessions, way)
    before, begun = read(sessions), perf_counter()
    for _ in range(tokens):
        advance(sessions, way)
    seconds = perf_counter() - begun
    return Timed(seconds, read(sessions) - before, [s.tokens[PROMPT:] for s in sessions])


def read(sessions: list[Session]) -> int:
    """Bytes of experts read for all of them so far."""
    return sum(session.counters()["read_bytes"] for session in sessions)


def main() -> int:
    """Print a line a way, then the pairs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--io", default="mmap")
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    model = Model.open(Container.open(args.model), threads=args.threads)
    model.set_residency(args.io, args.slots, pilot="router" if args.slots else "off")
    runs: dict[str, list[Timed]] = {way: [] for way in WAYS}
    for pair in range(args.pairs):
        for way in WAYS if pair % 2 == 0 else reversed(WAYS):
            runs[way].append(run(model, args.conversations, args.tokens, way))
            print(f"{way}: {runs[way][-1].seconds:.2f} s", file=sys.stderr)
    count = args.conversations * args.tokens
    for way in WAYS:
        speeds = sorted(count / one.seconds for one in runs[way])
        bytes_each = median(one.read for one in runs[way]) / count / 1e6
        spread = f"{speeds[0]:.2f} to {speeds[-1]:.2f}"
        print(f"{way}: {median(speeds):.2f} tokens/s ({spread}), {bytes_each:.1f} MB read a token")
    gains = sorted(a.seconds / b.seconds for a, b in zip(*runs.values(), strict=True))
    print(f"together / in turn: {median(gains):.3f} ({gains[0]:.3f} to {gains[-1]:.3f})")
    texts = [one.picked for way in WAYS for one in runs[way]]
    same = all(text == texts[0] for text in texts)
    print("the same tokens everywhere" if same else "TOKENS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
