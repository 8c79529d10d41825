"""colibri score: figures that are right, and that nothing but model, text and window can change."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import shardkit

from colibri.chat import raw_prompt
from colibri.container import Container
from colibri.errors import Exit, UsageError
from colibri.model import Model
from colibri.score import Score, negative_log_likelihood, score_text
from colibri.session import Session
from colibri.trace import Trace

TEXT = "Luna was a small girl. She was brave and liked to play at the bridge. " * 3


def score(model, tokenizer, window: int = 40, rows: int = 16, text: str = TEXT):
    return score_text(Session(model, 200, rows), tokenizer, text, window)


def test_nothing_but_the_text_counts(demo_models, demo_tokenizer):
    """Threads, rows per step and what a session did before do not change a bit of the result."""
    first = score(demo_models(1), demo_tokenizer)
    assert score(demo_models(2), demo_tokenizer, rows=1) == first
    session = Session(demo_models(1), 200, 7)
    session.step_all([5, 6, 7], "none")
    assert score_text(session, demo_tokenizer, TEXT, 40) == first


def test_against_plain_arithmetic(demo_model, demo_tokenizer):
    """The sum is that of -log softmax of each token's row, window by window, prefix before each."""
    got = score(demo_model, demo_tokenizer)
    prefix, ids = raw_prompt("", demo_tokenizer), demo_tokenizer.encode(TEXT)
    assert len(prefix) == 2
    total = 0.0
    for at in range(0, len(ids), 40):
        rows = prefix + ids[at : at + 40]
        logits = Session(demo_model, 64).step_all(rows, "all").astype(np.float64)
        shifted = logits - logits.max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        total -= sum(logs[k, rows[k + 1]] for k in range(1, len(rows) - 1))
    assert math.isclose(got.nats, total, rel_tol=1e-12)
    assert (got.scored, got.scored_bytes) == (len(ids), len(TEXT))
    assert got.per_token == got.nats / len(ids) and got.per_byte == got.nats / len(TEXT)
    assert math.isclose(got.perplexity, math.exp(got.per_token))


def test_without_a_prefix(demo_model, demo_tokenizer, monkeypatch):
    """A model whose tokenizer knows no prefix cannot predict a window's first token: it is left
    out, of the bytes as well."""
    monkeypatch.setattr("colibri.score.raw_prompt", lambda *_: [])
    ids = demo_tokenizer.encode(TEXT)
    got = score(demo_model, demo_tokenizer)
    firsts = ids[::40]
    assert got.scored == len(ids) - len(firsts)
    lost = sum(len(demo_tokenizer.token_bytes(t)) for t in firsts)
    assert got.scored_bytes == len(TEXT) - lost
    with pytest.raises(UsageError, match="a window of 1 tokens does not fit"):
        score(demo_model, demo_tokenizer, 1)


def test_markup(demo_model, demo_tokenizer):
    """Control tokens in a text are text, unless asked for: a chat then costs far less."""
    chat = "<|user|>What is 2 plus 3?<|assistant|><think></think>That is five.<|endoftext|>"
    plain = score(demo_model, demo_tokenizer, text=chat)
    session = Session(demo_model, 200)
    marked = score_text(session, demo_tokenizer, chat, 40, markup=True)
    assert marked.scored < plain.scored and marked.scored_bytes == plain.scored_bytes
    assert marked.nats < 0.2 * plain.nats


def test_better_text_scores_better(demo_model, demo_tokenizer):
    """Text of the kind the demo model knows costs less than the same bytes shuffled."""
    shuffled = "".join(sorted(TEXT))
    known, strange = (score(demo_model, demo_tokenizer, text=t) for t in (TEXT, shuffled))
    assert known.per_byte < 0.5 * strange.per_byte


@pytest.mark.parametrize("window", [0, 199, 10_000])
def test_windows_that_do_not_fit(demo_model, demo_tokenizer, window):
    """A window that the session cannot hold with its prefix is refused."""
    with pytest.raises(UsageError, match="does not fit a context of 200: at most 198 do"):
        score(demo_model, demo_tokenizer, window)


def test_extreme_logits():
    """Differences that underflow and certain tokens cost nothing; the rest is exact."""
    logits = np.zeros(1000, np.float32)
    logits[7] = 3000
    assert negative_log_likelihood(logits, 7) == pytest.approx(0, abs=1e-12)
    assert negative_log_likelihood(logits, 3) == pytest.approx(3000)
    assert negative_log_likelihood(np.zeros(8, np.float32), 2) == pytest.approx(math.log(8))


def test_extreme_scores():
    """A text that was next to impossible has figures all the same."""
    score = Score(nats=3000.0, scored=1, scored_bytes=2, window=8)
    assert score.per_byte == 1500 and math.isfinite(score.perplexity)


def test_commands(command, demo_path, tmp_path):
    """`score` prints the figures or JSON; a text that is empty or not UTF-8 is refused."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    status, out, _ = command("score", str(demo_path), "--text", str(text), "--window", "50")
    assert status == Exit.OK and "nats per byte" in out and "window 50" in out
    answer = command("score", str(demo_path), "--text", str(text), "--window", "50", "--json")
    assert command("score", "--text", "-", "--window", "50", stdin=TEXT.encode()).out == out
    fields = json.loads(answer.out)
    assert f"{fields['per_byte']:.6f}" in out and fields["scored_bytes"] == len(TEXT)
    text.write_bytes(b"ab\xff")
    assert command("score", str(demo_path), "--text", str(text)).status == Exit.USAGE
    text.write_bytes(b"")
    done = command("score", str(demo_path), "--text", str(text))
    assert done.status == Exit.USAGE and "no token to score" in done.err


def test_a_text_leaves_a_trace(command, demo_path, demo_model, demo_tokenizer, tmp_path):
    """--trace keeps the experts of every token that ran, as steps of one row, and `plan` takes it;
    a place that cannot be written is refused before the text is read."""
    text, kept = tmp_path / "text.txt", tmp_path / "kept.trace"
    text.write_text(TEXT)
    run = ("score", str(demo_path), "--text", str(text), "--window", "50", "--trace")
    assert command(*run, str(kept)).status == Exit.OK
    session, ids = Session(demo_model, 64), demo_tokenizer.encode(TEXT)
    rows = []
    for at in range(0, len(ids), 50):
        part = [*raw_prompt("", demo_tokenizer), *ids[at : at + 50]][:-1]
        session.rewind(0)
        session.step_all(part, "none")
        rows.append(session.experts(1, len(part)))
    trace = Trace.load(kept)
    assert np.array_equal(trace.experts[:, 0], np.concatenate(rows))
    assert list(trace.step) == list(range(len(trace.experts))) and trace.kept.all()
    assert command("plan", str(demo_path), "--trace", str(kept), "--disk", "1").status == Exit.OK
    assert command(*run, str(tmp_path / "none" / "t")).status == Exit.USAGE


def test_cost_of_quantisation(command, demo_path, demo_tokenizer, tmp_path):
    """convert --check scores the source and the container, and prints what quantisation costs."""
    source = shardkit.directory(tmp_path / "source", config=shardkit.SMALL | {"vocab_size": 2048})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_path / name, source)
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:60])
    done = command("convert", str(source), str(tmp_path / "out"), "--check", str(text))
    assert done.status == Exit.OK
    table = [line.split() for line in done.out.splitlines() if line.startswith("nats per token")]
    before, after, difference = map(float, table[0][3:])
    assert before != after and difference == pytest.approx(after - before, abs=2e-5)
    model = Model.open(Container.open(tmp_path / "out"))
    got = score_text(Session(model, 128), demo_tokenizer, TEXT[:60], 100)
    assert f"{got.per_token:.5f}" == f"{after:.5f}"
