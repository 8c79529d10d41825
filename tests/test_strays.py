"""What is gone from a model directory, or lies there and does not belong: each is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import shardkit

from colibri.checkpoint import INDEX, open_checkpoint
from colibri.config import ModelConfig
from colibri.container import Container
from colibri.convert import Formats, convert_directory
from colibri.convert.source import FloatSource
from colibri.errors import ContainerError
from colibri.verify import verify

LAYER = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A float checkpoint of one file."""
    return shardkit.directory(tmp_path_factory.mktemp("plain"))


def test_missing_experts_of_our_own_layout(plain, tmp_path):
    """Whole layers of experts lie in one tensor; the index still names the file that held it."""
    convert_directory(plain, tmp_path / "own", Formats(), False)
    weights = json.loads((tmp_path / "own" / INDEX).read_text())["weight_map"]
    lost = weights[LAYER + "records"]
    (tmp_path / "own" / lost).unlink()
    with pytest.raises(ContainerError, match="layer 1 routed experts") as error:
        Container.open(tmp_path / "own")
    assert f"file {lost} (listed in {INDEX}) is missing; fetch or convert" in str(error.value)


def test_missing_fused_experts(tmp_path):
    """So it is where a layer's experts are fused into two tensors."""
    arrays = {n: a for n, a in shardkit.weights().items() if not n.startswith(LAYER)}
    directory = shardkit.directory(tmp_path, {"a.safetensors": arrays})
    index = {"weight_map": {LAYER + "gate_up_proj": "b.safetensors"}}
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(ContainerError, match=r"file b\.safetensors \(listed in "):
        Container.open(directory)


def float_source(directory: Path) -> FloatSource:
    """A directory as conversion reads it."""
    return FloatSource(ModelConfig.load(directory), open_checkpoint(directory))


@pytest.mark.parametrize("opened", [Container.open, float_source])
@pytest.mark.parametrize("name", [LAYER + "64.up_proj.weight", LAYER + "0.up_proj.bias"])
def test_experts_too_many(tmp_path, opened, name):
    """An expert that config.json does not know is told like any other stray tensor."""
    arrays = shardkit.weights()
    arrays[name] = arrays[LAYER + "0.up_proj.weight"]
    notes = opened(shardkit.directory(tmp_path, {"a.safetensors": arrays})).notes
    told = "stored tensors that are not part of this model are ignored: 1, first "
    assert notes == [told + name]


def test_a_pipe_named_like_a_shard(tmp_path):
    """It is refused, not waited for."""
    directory = shardkit.directory(tmp_path)
    os.mkfifo(directory / "pipe.safetensors")
    with pytest.raises(ContainerError, match=r"pipe\.safetensors: is no regular file; remove it"):
        Container.open(directory)
    assert "is no regular file" in verify(directory).faults[0]
