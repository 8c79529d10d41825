"""What decides between equal scores is part of the bits: the lower id or position, and NaN last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import shardkit
import tiny

from colibri.container import Container
from colibri.model import Model
from colibri.session import Session

TOPK = tiny.ONE_GROUP["index_topk"]


def changed(path: Path, change: Callable[[str, np.ndarray], None]) -> Session:
    """A session of a tiny model whose weights were changed, that keeps its index sets."""
    arrays = shardkit.weights(tiny.ONE_GROUP)
    for name, array in arrays.items():
        change(name, array)
    directory = shardkit.directory(path, {"model.safetensors": arrays}, tiny.ONE_GROUP)
    session = Session(Model.open(Container.open(directory)), 64, 32)
    session.capture(True)
    return session


def test_equal_experts(tmp_path):
    """Of experts with equal scores a row takes those with the lowest ids."""

    def change(name: str, array: np.ndarray) -> None:
        if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
            array[:] = 0

    session = changed(tmp_path, change)
    session.step_all([3, 4])
    assert session.experts(7, 2).tolist() == [[0, 1, 2, 3]] * 2


def test_equal_keys(tmp_path):
    """Of keys with equal scores a row attends to the first ones."""
    session = changed(tmp_path, lambda name, array: "indexer.wq_b" in name and array.fill(0))
    session.step_all(list(range(20)))
    assert session.captured(0, 19) == list(range(TOPK))


def test_keys_that_are_no_number_are_the_last(tmp_path):
    """NaN scores are chosen only when there is nothing else."""

    def change(name: str, array: np.ndarray) -> None:
        if name == "model.embed_tokens.weight":
            array[5] = np.nan

    session = changed(tmp_path, change)
    session.step_all([5, 5, 5, *range(6, 23)])
    assert not {0, 1, 2} & set(session.captured(0, 19))
