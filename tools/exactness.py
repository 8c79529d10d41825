"""Exactness at length: the text is byte-identical whatever drafts it, and however deep.

usage: exactness.py [MODEL_DIR] [--prompts 100] [--tokens 256] [--threads N]
Greedy, and coupled sampling at T = 0.7 and 1.0; MTP at DRAFT 0, 1, 2, 3, 5 and unset; the n-gram
drafter, with the MTP layer not loaded, likewise. Exit status 1 when one token differs.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from prompts import mixed

import colibri.demo
from colibri.container import Container
from colibri.depth import depth_policy
from colibri.drafting import Drafter, MtpDrafter, NgramDrafter
from colibri.ledger import Ledger
from colibri.model import Model
from colibri.sampling import Sampler, SamplingParams
from colibri.session import Session
from colibri.speculation import Limits, spec_decode
from colibri.tokenizer import Tokenizer

DEPTHS = (0, 1, 2, 3, 5, None)
WAYS = {
    "greedy": (SamplingParams(temperature=0), "rejection"),
    "coupled T=0.7": (SamplingParams(temperature=0.7, seed=7), "coupled"),
    "coupled T=1.0": (SamplingParams(temperature=1.0, top_p=0.95, seed=8), "coupled"),
}
ROWS = 64


@dataclass
class Total:
    """What one setting made of all prompts."""

    texts: list[bytes] = field(default_factory=list)
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0

    @property
    def digest(self) -> str:
        """A fingerprint of all texts."""
        return hashlib.sha256(b"".join(self.texts)).hexdigest()[:16]


def drafter(session: Session, mtp: bool) -> Drafter:
    """The drafter of a setting."""
    return MtpDrafter(session) if mtp else NgramDrafter()


def run(
    model: Model,
    stops: frozenset[int],
    vocab: int,
    prompts: Iterable[list[int]],
    way: str,
    depth: int | None,
    count: int,
) -> Total:
    """All prompts with one way of sampling, one drafter and one depth."""
    params, mode = WAYS[way]
    policy = depth_policy(depth, clock_free=False, guarded=model.has_mtp)
    total = Total()
    for number, ids in enumerate(prompts):
        session = Session(model, len(ids) + count, ROWS)
        logits, ledger = session.prefill(ids), Ledger()
        made = drafter(session, model.has_mtp) if policy else None
        sampler = Sampler(params, vocab)
        # Every other text runs on past its end: longer, and full of repetition for the n-grams.
        limits = Limits(count, stops if number % 2 == 0 else frozenset())
        loop = spec_decode(session, logits, sampler, made, policy, limits, ledger, mode)
        text = [token for block in loop for token in block]
        total.texts.append(b"".join(token.to_bytes(4, "little") for token in [*text, 1 << 31]))
        total.tokens += len(text)
        total.forwards += ledger.main_forwards
        total.seconds += ledger.wall
    return total


def settings(directory: Path, threads: int) -> Iterator[tuple[str, Model, int | None]]:
    """Every drafter at every depth; the first of a model is the plain text."""
    container = Container.open(directory)
    for name, mtp in (("mtp", True), ("ngram", False)):
        model = Model.open(container, threads=threads, mtp=mtp)
        if mtp and not model.has_mtp:
            continue
        for depth in DEPTHS:
            yield f"{name} DRAFT={'unset' if depth is None else depth}", model, depth


def main() -> int:
    """Print one line per setting; 1 when any text differs from the first."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", type=Path, default=colibri.demo.MODEL)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.model)
    prompts = list(mixed(tokenizer, args.prompts))
    stops = Container.open(args.model).config.eos_token_ids | tokenizer.eos_ids
    first: dict[str, Total] = {}
    different, begun = 0, perf_counter()
    for name, model, depth in settings(args.model, args.threads):
        for way in WAYS:
            found = run(model, stops, tokenizer.vocab_used, prompts, way, depth, args.tokens)
            truth = first.setdefault(way, found)
            wrong = sum(a != b for a, b in zip(truth.texts, found.texts, strict=True))
            different += wrong
            verdict = "same" if not wrong else f"{wrong} TEXTS DIFFER"
            per_forward = found.tokens / max(found.forwards, 1)
            print(f"{name:<18} {way:<14} {found.tokens:>6} tokens {per_forward:5.2f} a forward  "
                  f"{found.digest}  {verdict}", flush=True)  # fmt: skip
    verdict = f"{different} texts differ" if different else "every text is the same"
    print(f"{len(prompts)} prompts, {perf_counter() - begun:.0f} s: {verdict}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
