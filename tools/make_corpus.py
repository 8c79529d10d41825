"""Write the demo model's training data: a world told by a program, and public-domain prose.

usage: make_corpus.py OUT_DIR TOKENIZER.json [--tokens MILLIONS] [--seed N] [--only DOMAIN ...]
Domains: copy (say it again), sums, drill (tables), talk (chats), story, prose (five novels),
and for judging heldout-world and heldout-prose (a sixth novel), which are written as text too
(NAME.txt, a document a line, NUL for newline: what bench_acceptance.py reads). Needs `tokenizers`
and, for the prose, apt-get; nothing is downloaded that corpus/prose.py does not name.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from corpus import drills, prose, stories, talk
from corpus.documents import END, Piece, encode, text_of
from demo_data import save_domain
from tokenizers import Tokenizer

SPECIAL_TOKENS = 16
ECHO_SHARE = 0.1
PROSE_WEIGHT = 5
SHARES = {"copy": 0.2, "sums": 0.2, "drill": 0.25, "talk": 1.0, "story": 0.4}
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


def write_lines(path: Path, documents: list[list[Piece]]) -> None:
    """One document a line, its newlines as NUL, without the end token."""
    texts = (text_of(document).removesuffix(END) for document in documents)
    path.write_text("".join(text.replace("\n", "\0") + "\n" for text in texts))


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
            "sums": lambda: written(tokenizer, drills.sum_document, rng),
            "drill": lambda: written(tokenizer, talk.drill, rng),
            "talk": lambda: written(tokenizer, talk.document, rng),
            "story": lambda: written(tokenizer, stories.document, rng),
        }[name]()
        return take(source, int(args.tokens * 1e6 * SHARES[name]))

    def held_out(name: str) -> list[Encoded]:
        rng = random.Random(f"held out {args.seed}")
        documents = {
            "heldout-world": lambda: [world_document(rng) for _ in range(HELD_OUT_DOCUMENTS)],
            "heldout-prose": lambda: prose.excerpts(novels[prose.HELD_OUT]),
        }[name]()
        write_lines(args.out / f"{name}.txt", documents)
        return [encode(tokenizer, document) for document in documents]

    makers: dict[str, Callable[[], list[Encoded]]] = {
        name: (lambda name=name: world(name)) for name in SHARES
    }
    makers["prose"] = lambda: [encode(tokenizer, d) for d in prose.excerpts(text, PROSE_WEIGHT)]
    for name in ("heldout-world", "heldout-prose"):
        makers[name] = lambda name=name: held_out(name)
    for name in args.only or makers:
        print(f"{name}: {save_domain(args.out, name, makers[name]())} tokens", flush=True)


if __name__ == "__main__":
    main()
