"""How often drafts stand, by position: by model, by verification mode, greedy and at T = 1.

usage: bench_acceptance.py MODEL_DIR ... [--documents FILE] [--count 100] [--tokens 128] [--depth 3]
FILE holds documents, one a line, NUL for newline; each is cut after its first <think></think> (or
its first 40 tokens) and continued. Without a file the benchmark prompts are used. Acceptance of
position i is conditional: of the drafts whose predecessors all stood.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from prompts import COPY, QUESTION, STORY, prompt

from colibri.container import Container
from colibri.depth import Fixed
from colibri.drafting import MtpDrafter
from colibri.ledger import Ledger
from colibri.model import Model
from colibri.sampling import Sampler, SamplingParams
from colibri.session import Session
from colibri.speculation import Limits, spec_decode
from colibri.tokenizer import Tokenizer

WAYS = (("greedy", 0.0), ("rejection", 1.0), ("coupled", 1.0), ("probabilistic", 1.0))
MARK = "<think></think>"
PLAIN_CUT = 40  # tokens of a document without a turn


def prompts(tokenizer: Tokenizer, documents: Path | None, count: int) -> list[list[int]]:
    """Token ids to continue."""
    if documents is None:
        kinds = (STORY, QUESTION, COPY)
        return [prompt(tokenizer, kinds[i % 3], i) for i in range(count)]
    found = []
    for text in documents.read_text("utf-8").splitlines()[:count]:
        head, mark, _ = text.replace("\0", "\n").partition(MARK)
        ids = tokenizer.encode_template(head + mark)
        found.append(ids if mark else ids[:PLAIN_CUT])
    return found


def measure(
    model: Model, vocab: int, stops: frozenset[int], ids: Sequence[list[int]], way: str,
    temperature: float, depth: int, count: int,
) -> tuple[list[int], list[int], float]:  # fmt: skip
    """Drafts offered and accepted by position, and tokens per forward, over all prompts."""
    offered, accepted, tokens, forwards = [0] * depth, [0] * depth, 0, 0
    for number, one in enumerate(ids):
        session = Session(model, len(one) + count, 64)
        logits, ledger = session.prefill(one), Ledger()
        sampler = Sampler(SamplingParams(temperature, seed=number), vocab)
        mode = "rejection" if way == "greedy" else way
        loop = spec_decode(session, logits, sampler, MtpDrafter(session), Fixed(depth),
                           Limits(count, stops), ledger, mode)  # fmt: skip
        tokens += sum(map(len, loop))
        forwards += ledger.main_forwards
        for i, (a, b) in enumerate(zip(ledger.offered, ledger.accepted, strict=True)):
            offered[i] += a
            accepted[i] += b
    return offered, accepted, tokens / max(forwards, 1)


def main() -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--documents", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=3)
    args = parser.parse_args()
    heads = " | ".join(f"draft {i + 1}" for i in range(args.depth))
    print(f"| model | sampling | {heads} | tokens a forward |")
    print("|---|---|" + "---:|" * (args.depth + 1))
    for directory in args.models:
        container, tokenizer = Container.open(directory), Tokenizer.load(directory)
        model = Model.open(container)
        stops = container.config.eos_token_ids | tokenizer.eos_ids
        ids = prompts(tokenizer, args.documents, args.count)
        for way, temperature in WAYS:
            offered, accepted, each = measure(model, tokenizer.vocab_used, stops, ids, way,
                                              temperature, args.depth, args.tokens)  # fmt: skip
            pairs = zip(accepted, offered, strict=True)
            cells = [f"{100 * stood / of:.1f}% of {of}" if of else "-" for stood, of in pairs]
            label = way if way == "greedy" else f"{way}, T=1"
            print(f"| {directory.name} | {label} | {' | '.join(cells)} | {each:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
