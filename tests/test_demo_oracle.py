"""The demo model, at its trained weights, against transformers on the dequantised container."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
from reference import Reference, read_config
from stored import getter

import colibri.demo
from colibri.container import Container
from colibri.model import Model
from colibri.session import Session

DEMO = Path(colibri.demo.__file__).parent / "model"
PROMPTS = (0, 1)
HEADS = 8  # rows whose logits the fixture keeps


@pytest.fixture(scope="module")
def fixture() -> dict[str, np.ndarray]:
    """oracle-demo.npz: arrays [prompts, ...]."""
    with np.load(oracle.FIXTURES / "oracle-demo.npz") as file:
        arrays = dict(file)
    assert oracle.digest(DEMO) == str(arrays["digest"]), (
        "the demo container changed: run tools/make_demo_oracle.py"
    )
    return arrays


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities in float64."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def assert_close(logits: np.ndarray, expected: np.ndarray) -> None:
    """Rounding activations to int8 costs under 0.01 nats, and no arg max that was at all clear."""
    p, q = log_softmax(expected), log_softmax(logits)
    assert (np.exp(p) * (p - q)).sum(-1).max() < 0.01
    top = np.sort(np.exp(p), axis=-1)
    clear = top[..., -1] - top[..., -2] > 0.1
    assert clear.sum() > len(clear) / 2
    assert np.array_equal(p.argmax(-1)[clear], q.argmax(-1)[clear])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_reference_on_trained_weights(fixture, prompt):
    """Without rounded activations the reference gives transformers' numbers, MTP layer included."""
    get, run = getter(Container.open(DEMO)), {k: v[prompt] for k, v in fixture.items() if v.ndim}
    reference = Reference(read_config(DEMO), lambda name: np.asarray(get(name), np.float32))
    logits = reference.step_all(run["ids"])
    assert oracle.worst(logits[-HEADS:], run["logits"]) < 2e-5
    assert oracle.worst(reference.hidden, run["hidden"]) < 2e-5
    logits, state = reference.mtp_absorb(run["hidden"][:-1], run["ids"][1:])
    for step, token in enumerate(run["draft_fed"]):
        if step:
            logits, state = reference.mtp_draft(token, step, state)
        assert oracle.worst(logits, run["draft_logits"][step]) < 2e-5, step


@pytest.mark.parametrize("prompt", PROMPTS)
def test_engine_on_trained_weights(fixture, prompt):
    """The engine, which does round them, predicts the same text and the same drafts."""
    run = {k: v[prompt] for k, v in fixture.items() if v.ndim}
    session = Session(Model.open(Container.open(DEMO)), 128, 128)
    ids = run["ids"].tolist()
    rows = [session.step_all(ids)[-HEADS:].copy()]
    state = np.empty(run["hidden"].shape[1], np.float32)
    logits = session.mtp_absorb(np.ascontiguousarray(run["hidden"][:-1]), ids[1:], state)
    for step, token in enumerate(run["draft_fed"].tolist()):
        if step:
            logits = session.mtp_draft(token, step, state)
        rows.append(logits[None].copy())
    assert_close(np.concatenate(rows), np.concatenate([run["logits"], run["draft_logits"]]))
