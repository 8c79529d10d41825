"""How well a model predicts a text: negative log-likelihood per token and per byte, perplexity."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from colibri import elementary
from colibri.chat import raw_prompt
from colibri.errors import UsageError
from colibri.session import STREAMED_ROWS, Session
from colibri.tokenizer import Tokenizer
from colibri.trace import TraceWriter

WINDOW = 1024  # tokens that a token may look back on, at most
_LEAST = -700.0  # e^x below this is nothing beside the largest term's 1

Report = Callable[[int, int], None]  # (tokens scored, of how many)


@dataclass(frozen=True)
class Score:
    """Nats over a text. `scored` tokens hold `scored_bytes` of it."""

    nats: float
    scored: int
    scored_bytes: int
    window: int

    @property
    def per_token(self) -> float:
        """Nats a token."""
        return self.nats / self.scored

    @property
    def per_byte(self) -> float:
        """Nats a byte of text: comparable between tokenizers."""
        return self.nats / self.scored_bytes

    @property
    def perplexity(self) -> float:
        """Of a token; at most e^700, near the largest float, so that JSON can hold it."""
        return math.exp(min(self.per_token, -_LEAST))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        derived = ("per_token", "per_byte", "perplexity")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def score_text(
    session: Session,
    tokenizer: Tokenizer,
    text: str,
    window: int = WINDOW,
    report: Report | None = None,
    markup: bool = False,
    trace: TraceWriter | None = None,
) -> Score:
    """Score every token of `text`, given the tokens before it in its window.

    The text is cut into windows of `window` tokens, each behind the model's own prefix
    ([gMASK]<sop>, when its tokenizer has it); without a prefix a window's first token has nothing
    to be predicted from and is left out. With `markup`, control tokens written in the text are
    control tokens; else all of it is plain text. Sums are exact, so the result depends on the
    model, the text and the window alone: not on threads, nor on how many rows run at a time.
    `trace` keeps which experts the tokens asked for, as if each had been a step of its own.
    UsageError for a text without tokens, or a window the session cannot hold.
    """
    prefix = raw_prompt("", tokenizer)
    ids = tokenizer.encode_template(text) if markup else tokenizer.encode(text)
    if not ids or (len(ids) == 1 and not prefix):
        raise UsageError("the text has no token to score; give a longer one")
    most = session.context - len(prefix)
    if not 1 <= window <= most or window + len(prefix) < 2:
        raise UsageError(
            f"a window of {window} tokens does not fit a context of {session.context}: at most "
            f"{most} do, behind the {len(prefix)} that every window begins with"
        )
    nats: list[float] = []
    scored: list[int] = []
    for begin in range(0, len(ids), window):
        part = ids[begin : begin + window]
        nats += score_ids(session, prefix, part, trace)
        scored += part if prefix else part[1:]
        if report:
            report(begin + len(part), len(ids))
    size = len(text.encode()) if len(scored) == len(ids) else _bytes_of(tokenizer, scored)
    if not size:
        raise UsageError("the text has control tokens alone to score; give one with words")
    return Score(math.fsum(nats), len(scored), size, window)


def score_ids(
    session: Session, prefix: Sequence[int], ids: Sequence[int], trace: TraceWriter | None = None
) -> list[float]:
    """Nats of each of `ids` behind `prefix`, but of the first when nothing comes before it.

    The session begins anew; it must hold them all.
    """
    session.rewind(0)
    rows = [*prefix, *ids]
    first = max(len(prefix), 1)  # the first token that has one before it
    nats = []
    most = min(session.max_rows, STREAMED_ROWS)  # each of them has logits: 0.6 MB of GLM-5's
    for at in range(0, len(rows) - 1, most):
        chunk = rows[at : min(at + most, len(rows) - 1)]
        logits = session.step_all(chunk, "all")
        if trace:
            trace.add_apart(len(chunk))
        for number, row in enumerate(logits, at + 1):
            if number >= first:
                nats.append(negative_log_likelihood(row, rows[number]))
    return nats


def negative_log_likelihood(logits: np.ndarray, token: int) -> float:
    """-ln softmax(logits)[token] in float64, with the same bits on every machine."""
    row = logits.astype(np.float64)
    top = float(row.max())
    terms = elementary.exp(np.maximum(row - top, _LEAST))
    return elementary.log(elementary.fold_sum(terms)) + (top - float(row[token]))


def _bytes_of(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    return sum(len(tokenizer.token_bytes(token)) for token in ids)
