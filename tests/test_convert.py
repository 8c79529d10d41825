"""Conversion: every tensor arrives in the format asked for, with the encoder's own bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import shardkit
from safetensors import safe_open

import colibri
from colibri import inventory
from colibri.config import ModelConfig
from colibri.container import Container, format_of
from colibri.convert import convert_directory
from colibri.errors import ContainerError, UsageError
from colibri.formats import Format, Kind
from colibri.layout import Formats, plan_shards, record_layout
from colibri.quantize import bf16_from_f32, decode, encode

DEMO = Path(colibri.__file__).parent / "demo" / "model"
WEIGHTS = shardkit.weights()
CONFIG = ModelConfig.parse(shardkit.SMALL)
MIXED = Formats(*map(Format.parse, ("int4-g32", "int8-f32", "int8", "int8-g16")))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return shardkit.directory(tmp_path_factory.mktemp("source"))


def expected(name: str, form: Format, search: bool) -> np.ndarray:
    """What a tensor must read back as: the encoder's rounding of the source."""
    weights = np.atleast_2d(WEIGHTS[name])
    got = encode(weights, form, search)
    back = decode(got.payload, got.scales, form, weights.shape[1])
    return back if WEIGHTS[name].ndim == 2 else back[0]


def wanted_format(name: str, formats: Formats) -> Format:
    """The format a tensor must have, by its name alone."""
    keep = ("norm.weight", "norm.bias", "mlp.gate.weight", "bias", "weights_proj.weight")
    mtp = name.startswith("model.layers.3.")
    if ".experts." in name:
        return formats.mtp if mtp else formats.experts
    if name.endswith(keep):
        return Format(Kind.F32)
    if ".layers." not in name:
        return formats.table
    return formats.mtp if mtp else formats.dense


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("formats", [MIXED, Formats(*[Format(Kind.BF16)] * 4)])
def test_every_tensor(source, tmp_path, formats, search):
    """Every tensor has the format of its role and reads back as the encoder rounds it."""
    assert convert_directory(source, tmp_path, formats, search)
    container = Container.open(tmp_path)
    assert container.is_own_layout and container.has_mtp and container.has_indexer
    for name in WEIGHTS:
        form = wanted_format(name, formats)
        assert format_of(container.matrix(name)) == form, name
        assert container.read_array(name).tobytes() == expected(name, form, search).tobytes()


def test_records_are_one_aligned_read(source, tmp_path):
    """An expert's six parts lie down, gate, up in one record, aligned to 4096, in order."""
    convert_directory(source, tmp_path, MIXED)
    container = Container.open(tmp_path)
    for layer, form in ((1, MIXED.experts), (2, MIXED.experts), (3, MIXED.mtp)):
        record = container.tensors[inventory.records_name(layer)]
        assert record.offset % 4096 == record.shape[1] % 4096 == 0
        assert record.shape == (4, record_layout(CONFIG, form).nbytes)
        for expert in range(4):
            gate, up, down = container.expert(layer, expert)
            begin = record.offset + expert * record.shape[1]
            places = [at for ref in (down, gate, up) for at in (ref.offset, ref.scale_offset)]
            assert places == sorted(places) and places[0] == begin
            assert all(at % 64 == 0 for at in places)
            end = places[-1] + up.rows * form.row_scales(up.cols) * form.scale_bytes
            assert end <= begin + record.shape[1]


def test_files_by_part(source, tmp_path):
    """Dense part, experts and MTP layer have files of their own; the library opens them all."""
    convert_directory(source, tmp_path)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"{kind}-00001-of-00001.safetensors" for kind in ("dense", "experts", "mtp")]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for name in names:
        with safe_open(tmp_path / name, "numpy") as file:
            assert set(file.keys()) == {key for key, value in index.items() if value == name}
            assert file.metadata()["format_version"] == "1"
    assert all(name.startswith("model.layers.3.") == (f[:3] == "mtp") for name, f in index.items())


def test_source_forms_give_the_same_container(source, tmp_path):
    """Sharded BF16, fused experts and tied names of one checkpoint convert to equal bytes."""
    rounded = {name: bf16_from_f32(array) for name, array in WEIGHTS.items()}
    for layer in (1, 2, 3):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        rounded[name] = WEIGHTS[name]
    files = shardkit.split(rounded, [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)])
    plain = shardkit.directory(tmp_path / "plain", files)
    fused = shardkit.directory(tmp_path / "fused", {"model.safetensors": fuse(rounded)})
    for way in (plain, fused):
        convert_directory(way, tmp_path / f"{way.name}-out", MIXED)
    assert tree(tmp_path / "plain-out") == tree(tmp_path / "fused-out")


def fuse(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of each layer as Hugging Face fuses them in memory."""
    out = {name: array for name, array in arrays.items() if ".experts." not in name}
    for layer in (1, 2, 3):
        parts = {
            p: np.stack([arrays[inventory.expert_name(layer, e, p)] for e in range(4)])
            for p in inventory.PROJECTIONS
        }
        prefix = f"model.layers.{layer}.mlp.experts."
        out[prefix + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        out[prefix + "down_proj"] = parts["down"]
    return out


def tree(directory: Path) -> dict[str, bytes]:
    """Every file of a container but the record of where it came from."""
    paths = (path for path in directory.iterdir() if path.name != "conversion.json")
    return {path.name: path.read_bytes() for path in paths}


def test_conversion_repeats_to_the_byte(source, tmp_path):
    """Two conversions of one source are equal, and replacing removes shards of the older one."""
    convert_directory(source, tmp_path / "a", MIXED)
    convert_directory(source, tmp_path / "b", Formats())
    (tmp_path / "b" / "dense-00002-of-00002.safetensors").write_bytes(b"stale")
    with pytest.raises(UsageError, match="was begun with --dense int8-f16, not int8-f32"):
        convert_directory(source, tmp_path / "b", MIXED)
    convert_directory(source, tmp_path / "b", MIXED, replace=True)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_without_mtp_and_indexers(tmp_path):
    """A source without MTP layer and indexers converts, and the warnings say what is absent."""
    kept = {
        name: array
        for name, array in WEIGHTS.items()
        if ".layers.3." not in name and ".indexer." not in name
    }
    source = shardkit.directory(tmp_path / "source", {"model.safetensors": kept})
    warnings = "\n".join(convert_directory(source, tmp_path / "out"))
    assert "no MTP layer" in warnings and "no indexers" in warnings
    container = Container.open(tmp_path / "out")
    assert not container.has_mtp and not container.has_indexer
    assert not list((tmp_path / "out").glob("mtp*"))


def test_side_files(source, tmp_path):
    """Tokenizer, template and configs are copied as they are; missing ones are warned about."""
    origin = shardkit.directory(tmp_path / "source", config=shardkit.SMALL | {
        "quantization_config": {"quant_method": "fp8"}
    })  # fmt: skip
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (origin / name).write_text(f'{{"from": "{name}"}}')
    assert convert_directory(origin, tmp_path / "out") == []
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (origin / name).read_bytes()
    kept = json.loads((tmp_path / "out" / "config.json").read_text())
    assert kept == shardkit.SMALL
    warnings = convert_directory(source, tmp_path / "bare")
    assert [w.split(" is missing")[0].split(": ")[-1] for w in warnings] == [
        "tokenizer.json", "generation_config.json",
    ]  # fmt: skip


def test_refusals(source, tmp_path):
    """Converting onto itself, or what is already quantised, is refused before any writing."""
    with pytest.raises(UsageError, match="one directory"):
        convert_directory(source, source, replace=True)
    convert_directory(source, tmp_path / "a")
    with pytest.raises(UsageError, match="already quantised"):
        convert_directory(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_damaged_source_is_named(tmp_path):
    """A NaN in one expert stops the conversion with its name and leaves no half file."""
    bad = "model.layers.2.mlp.experts.3.up_proj.weight"
    arrays = WEIGHTS | {bad: np.full_like(WEIGHTS[bad], np.nan)}
    source = shardkit.directory(tmp_path / "source", {"model.safetensors": arrays})
    with pytest.raises(ContainerError, match=f"{bad}.*not finite"):
        convert_directory(source, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").glob("*safetensors*")] == [
        "dense-00001-of-00001.safetensors"
    ]


def test_plan_of_the_large_model():
    """GLM-5.2's plan: 80 files, exact bytes, no file past its bound but the single-layer ones."""
    from test_config import GLM_52

    config = ModelConfig.parse(GLM_52)
    owners = [n for n in range(79) if inventory.has_own_indexer(config, n)]
    shards = plan_shards(config, Formats(), True, owners)
    layers = [layer for shard in shards for layer in shard.expert_layers]
    assert layers == list(range(3, 79)) and len(shards) == 80
    record = record_layout(config, Formats().experts).nbytes
    experts = [shard for shard in shards if shard.name.startswith("experts")]
    assert all(shard.nbytes == 256 * record for shard in experts)
    assert record == 20054016
    assert sum(shard.nbytes for shard in shards) < 414e9


def test_shipped_demo():
    """The demo container is ours, small, complete, and in the formats its README names."""
    container = Container.open(DEMO)
    assert container.is_own_layout and container.has_mtp and container.has_indexer
    assert not container.notes
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 12e6
    assert format_of(container.expert(1, 0)[0]) == Format.parse("int4-g64")
    assert format_of(container.expert(container.config.mtp_layer, 0)[0]) == Format.parse("int8")
    assert {"tokenizer.json", "generation_config.json"} <= {p.name for p in DEMO.iterdir()}
