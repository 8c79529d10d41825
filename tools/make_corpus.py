"""Write the demo model's training data: a world told by a program, and public-domain prose.

usage: make_corpus.py OUT_DIR TOKENIZER.json [--tokens MILLIONS] [--seed N] [--only DOMAIN ...]
Domains: copy (say it again), drill (sums and tables), talk (chats), story, prose (five novels),
and for judging heldout-world and heldout-prose (a sixth novel). Needs `tokenizers` and, for the
prose, apt-get; nothing is downloaded that corpus/prose.py does not name.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from corpus import drills, prose, stories, talk
from corpus.documents import Piece, encode
from demo_data import save_domain
from tokenizers import Tokenizer

SPECIAL_TOKENS = 16
ECHO_SHARE = 0.1
PROSE_WEIGHT = 5
SHARES = {"copy": 0.2, "drill": 0.25, "talk": 1.0, "story": 0.4}
HELD_OUT_DOCUMENTS = 400
Encoded = tuple[np.ndarray, np.ndarray]


def copies(rng: random.Random, tokenizer: Tokenizer, words: list[str]) -> Iterator[Encoded]:
    """Copying turns, one in five of them bare random tokens."""
    while True:
        if rng.random() < ECHO_SHARE:
            yield drills.echo_tokens(rng, SPECIAL_TOKENS, tokenizer.get_vocab_size())
        else:
            yield encode(tokenizer, drills.copy_document(rng, words))


def written(
    tokenizer: Tokenizer, write: Callable[[random.Random], list[Piece]], rng: random.Random
) -> Iterator[Encoded]:
    while True:
        yield encode(tokenizer, write(rng))


def take(documents: Iterator[Encoded], tokens: int) -> list[Encoded]:
    """Documents until they hold `tokens` tokens."""
    taken, total = [], 0
    while total < tokens:
        taken.append(next(documents))
        total += len(taken[-1][0])
    return taken


def world_document(rng: random.Random) -> list[Piece]:
    """What the held-out set is made of: two chats for every story."""
    return (talk.document if rng.random() < 0.67 else stories.document)(rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--tokens", type=float, default=3.0, help="millions, of the talk domain")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    novels = prose.novels(prose.fetch(args.out / "packages"))
    text = [p for title, book in novels.items() if title != prose.HELD_OUT for p in book]
    words = drills.copy_vocabulary(prose.vocabulary(text))

    def world(name: str) -> list[Encoded]:
        rng = random.Random(f"{name} {args.seed}")
        source = {
            "copy": lambda: copies(rng, tokenizer, words),
            "drill": lambda: written(tokenizer, talk.drill, rng),
            "talk": lambda: written(tokenizer, talk.document, rng),
            "story": lambda: written(tokenizer, stories.document, rng),
        }[name]()
        return take(source, int(args.tokens * 1e6 * SHARES[name]))

    def held_out() -> list[Encoded]:
        rng = random.Random(f"held out {args.seed}")
        return [encode(tokenizer, world_document(rng)) for _ in range(HELD_OUT_DOCUMENTS)]

    makers: dict[str, Callable[[], list[Encoded]]] = {
        name: (lambda name=name: world(name)) for name in SHARES
    }
    makers["prose"] = lambda: [encode(tokenizer, d) for d in prose.excerpts(text, PROSE_WEIGHT)]
    makers["heldout-world"] = held_out
    makers["heldout-prose"] = lambda: [
        encode(tokenizer, d) for d in prose.excerpts(novels[prose.HELD_OUT])
    ]
    for name in args.only or makers:
        print(f"{name}: {save_domain(args.out, name, makers[name]())} tokens", flush=True)


if __name__ == "__main__":
    main()
