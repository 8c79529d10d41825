"""Examine a demo model: what it knows, what it copies, how well it drafts.

Exit status 1: the gate failed.

usage: exam_demo.py MODEL_DIR DATA_DIR [--engine torch|colibri] [--json FILE] [--topk N]
MODEL_DIR is an HF directory (torch) or a container (colibri); DATA_DIR is make_corpus.py's output.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from demo_data import Domain
from exam_engines import DRAFT_STEPS, Engine, open_engine
from exam_questions import SETS, Question, names_in, story_pairs

SEED = "exam 1"
STORIES = 20
WINDOWS = 24
HELD_OUT = {"world": 256, "world-long": 512, "prose": 512}  # tokens per window
# Release thresholds: shares of right answers, and nats per token for the held-out world.
AT_LEAST = {
    "persona": 0.95, "facts": 0.95, "opposites": 0.90, "colours": 0.90, "days": 0.90,
    "capitals": 0.80, "sums": 0.80, "code": 0.95, "repeat": 0.80, "story names": 0.80,
}  # fmt: skip
AT_MOST = {"world nll": 0.60}
SAMPLES = (
    "Hello!", "Who are you?", "Tell me a story about Ruby and Max.", "Tell me a story about a fox.",
    "What is 7 plus 5?",
    "Write a Python function that adds up a list.", "Write a poem about an owl.",
    "What is the capital of Japan?", "Repeat after me: blue lantern seven owls",
    "What is quantum physics?",
)  # fmt: skip


def prompt(question: str) -> str:
    return f"[gMASK]<sop><|user|>{question}<|assistant|><think></think>"


@dataclass
class Agreement:
    """How often drafts are right, by position: alone, after right ones, and at temperature 1."""

    rows: list[int] = field(default_factory=lambda: [0] * DRAFT_STEPS)
    alone: list[int] = field(default_factory=lambda: [0] * DRAFT_STEPS)
    chained: list[int] = field(default_factory=lambda: [0] * DRAFT_STEPS)
    reached: list[int] = field(default_factory=lambda: [0] * DRAFT_STEPS)
    overlap: list[float] = field(default_factory=lambda: [0.0] * DRAFT_STEPS)

    def add(self, logits: np.ndarray, drafts: list[np.ndarray], first: int = 0) -> None:
        """Compare every draft of rows `first`.. with the trunk's own row for the same token."""
        best = logits.argmax(-1)
        alive = np.ones(len(drafts[-1]) - first, bool)
        for step in range(DRAFT_STEPS):
            main = slice(first + step + 1, first + step + 1 + len(alive))
            rows = drafts[step][first : first + len(alive)]
            right = rows.argmax(-1) == best[main]
            self.rows[step] += len(alive)
            self.alone[step] += int(right.sum())
            self.reached[step] += int(alive.sum())
            alive &= right
            self.chained[step] += int(alive.sum())
            self.overlap[step] += float(np.minimum(softmax(logits[main]), softmax(rows)).sum())

    def shares(self) -> dict[str, list[float]]:
        """Per position: argmax agreement, agreement after right drafts, sum min(p,q)."""
        divide = lambda a, b: [round(x / max(1, y), 4) for x, y in zip(a, b, strict=True)]  # noqa: E731
        return {
            "agree": divide(self.alone, self.rows),
            "agree given earlier": divide(self.chained, self.reached),
            "sum min(p,q)": divide(self.overlap, self.rows),
        }


def softmax(logits: np.ndarray) -> np.ndarray:
    exponent = np.exp(logits - logits.max(-1, keepdims=True))
    return exponent / exponent.sum(-1, keepdims=True)


def windows(directory: Path, name: str, length: int) -> Iterable[list[int]]:
    """Evenly spaced pieces of a held-out domain, each from a document's start."""
    domain = Domain(directory, name)
    starts = domain.usable(length)
    for index in np.linspace(0, len(starts) - 1, WINDOWS).astype(int):
        yield domain.row(int(starts[index]), length)[0].tolist()


def held_out(
    engine: Engine, directory: Path, name: str, length: int
) -> tuple[float, dict[str, list[float]]]:
    """Nats per token and draft agreement on a held-out domain, in windows of `length` tokens."""
    total, count, agreement = 0.0, 0, Agreement()
    for ids in windows(directory, name, length):
        scores = engine.score(ids)
        rows = scores.logits[:-1].astype(np.float64)
        top = rows.max(-1)
        norm = top + np.log(np.exp(rows - top[:, None]).sum(-1))
        total += float((norm - rows[np.arange(len(rows)), ids[1:]]).sum())
        count += len(rows)
        agreement.add(scores.logits, scores.drafts)
    return total / count, agreement.shares()


def answer(engine: Engine, question: str, limit: int) -> str:
    return engine.decode(engine.greedy(engine.encode(prompt(question)), limit))


def ask_all(engine: Engine, questions: list[Question], misses: list[list[str]]) -> float:
    """Share of right answers; the first three wrong ones are kept."""
    right = 0
    for question in questions:
        reply = answer(engine, question.text, question.limit)
        good = question.right(reply)
        right += good
        if not good and len(misses) < 3:
            misses.append([question.text, reply])
    return right / len(questions)


def tell_stories(engine: Engine, rng: random.Random) -> dict[str, object]:
    """Stories about two children: are both named, is anyone else; and drafts on them."""
    both = strangers = 0
    agreement = Agreement()
    for first, second in story_pairs(rng, STORIES):
        ids = engine.encode(prompt(f"Tell me a story about {first} and {second}."))
        told = engine.greedy(ids, 260)
        found = names_in(engine.decode(told))
        both += {first, second} <= found
        strangers += bool(found - {first, second})
        scores = engine.score([*ids, *told])
        agreement.add(scores.logits, scores.drafts, first=len(ids) - 1)
    return {
        "story names": both / STORIES,
        "story strangers": strangers / STORIES,
        "greedy stories": agreement.shares(),
    }


def examine(engine: Engine, data: Path, only: list[str]) -> dict[str, object]:
    """The whole exam, or only some of its question sets."""
    result: dict[str, object] = {"misses": {}}
    for name, make in SETS.items():
        if only and name not in only:
            continue
        misses: list[list[str]] = []
        result[name] = ask_all(engine, make(random.Random(f"{SEED} {name}")), misses)
        result["misses"][name] = misses
    if not only or "stories" in only:
        result.update(tell_stories(engine, random.Random(f"{SEED} stories")))
        result["samples"] = {text: answer(engine, text, 260) for text in SAMPLES}
    for name, length in HELD_OUT.items() if not only or "held-out" in only else ():
        domain = f"heldout-{name.removesuffix('-long')}"
        result[f"{name} nll"], result[name] = held_out(engine, data, domain, length)
    return result


def report(result: dict[str, object]) -> list[str]:
    """Print the exam; returns what failed."""
    failed = []
    for name in (*SETS, "story names", "story strangers", *(f"{name} nll" for name in HELD_OUT)):
        if name not in result:
            continue
        value, mark = result[name], ""
        if name in AT_LEAST:
            mark = f">= {AT_LEAST[name]:.2f}"
            failed += [name] if value < AT_LEAST[name] else []
        elif name in AT_MOST:
            mark = f"<= {AT_MOST[name]:.2f}"
            failed += [name] if value > AT_MOST[name] else []
        print(f"{name:16s} {value:7.3f}  {mark}{'  FAILS' if name in failed else ''}")
    for where in ("greedy stories", *HELD_OUT):
        for kind, shares in result.get(where, {}).items():
            print(f"{where:16s} {kind:20s} {' '.join(f'{share:.3f}' for share in shares)}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--engine", choices=("torch", "colibri"), default="torch")
    parser.add_argument("--topk", type=int, help="index_topk instead of the config's (torch)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=(*SETS, "stories", "held-out"))
    args = parser.parse_args()
    engine = open_engine(args.engine, args.model, args.topk)
    result = examine(engine, args.data, args.only)
    failed = report(result)
    result["failed"] = failed
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"gate: {'failed: ' + ', '.join(failed) if failed else 'passed'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
