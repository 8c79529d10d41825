"""Log-probabilities of tokens: the model's own, before temperature and cuts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


class Entry(NamedTuple):
    """One token of an answer, and the likeliest ones at its place: (id, log-probability)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def entry(logits: NDArray[np.float32], token: int, count: int, vocab_used: int) -> Entry:
    """From the row of logits that decided a token: its log-probability and the `count` best.

    Equal ones come in the order of their ids. Logits that are no numbers count as minus infinity.
    """
    row = logits[:vocab_used].astype(np.float64)
    row[~np.isfinite(row)] = -np.inf
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    np.maximum(row, LEAST, out=row)
    best: list[int] = []
    if count:
        likely = np.argpartition(-row, min(count, row.size) - 1)[:count]
        edge = np.flatnonzero(row >= row[likely].min())
        best = edge[np.lexsort((edge, -row[edge]))][:count].tolist()
    return Entry(token, float(row[token]), [(i, float(row[i])) for i in best])


def as_chat(tokenizer: Tokenizer, found: Entry) -> dict[str, Any]:
    """An element of `logprobs.content`."""
    top = [_chat(tokenizer, token, logprob) for token, logprob in found.top]
    return _chat(tokenizer, found.token, found.logprob) | {"top_logprobs": top}


def as_completion(tokenizer: Tokenizer, found: list[Entry], offset: int) -> dict[str, Any]:
    """The older form: parallel lists. `offset`: letters of the answer before the first token."""
    texts = [_text(tokenizer, e.token) for e in found]
    ends = np.cumsum([offset, *map(len, texts)]).tolist()
    top = [{_text(tokenizer, token): value for token, value in reversed(e.top)} for e in found]
    return {
        "tokens": texts,
        "token_logprobs": [e.logprob for e in found],
        "top_logprobs": top if any(e.top for e in found) else None,
        "text_offset": ends[:-1],
    }


def _chat(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token, show_special=True)
    return {
        "token": spelled.decode("utf-8", "replace"),
        "logprob": logprob,
        "bytes": list(spelled),
    }


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token, show_special=True).decode("utf-8", "replace")
