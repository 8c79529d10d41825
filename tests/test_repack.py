"""Containers of the public engine and our own, there and back: codes and scales never change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shardkit

from colibri.container import Container, format_of
from colibri.convert import convert_directory, repack_directory
from colibri.convert.hints import hint_name
from colibri.errors import ContainerError, UsageError
from colibri.formats import Format, Kind
from colibri.layout import Formats
from colibri.model import Model
from colibri.quantize import encode
from colibri.session import Session
from colibri.shard import read_shard

WEIGHTS = shardkit.weights()
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
TEXTS = ("int8-f32", "int4-f32", "int4-g16-f32", "int4-g32-f32", "int3-g64-f32", "int2-f32")


def public(path: Path, experts: str, dense: str) -> Path:
    """The small checkpoint as the public converter writes it: 1-D bytes, F32 scales."""
    files: dict[str, dict[str, np.ndarray]] = {}
    for name, weights in WEIGHTS.items():
        family = "out-mtp" if name.startswith("model.layers.3.") else "out"
        family = "out-idx" if ".indexer." in name else family
        out = files.setdefault(f"{family}-00000.safetensors", {})
        if weights.ndim == 1 or name.endswith("mlp.gate.weight"):
            out[name] = weights
            continue
        form = Format.parse(experts if ".experts." in name else dense)
        if form.group and form.group >= weights.shape[1] and form.kind == Kind.INT4:
            form = Format(Kind.INT4)  # one group a row is the row format
        got = encode(weights, form)
        out[name] = got.payload.view(np.uint8).reshape(-1)
        out[name + ".qs"] = got.scales.reshape(-1)
    return shardkit.directory(path, files)


def stored(directory: Path) -> dict[str, bytes]:
    """Payload of every tensor of a directory, whatever file it is in."""
    tensors = {}
    for path in directory.glob("*.safetensors"):
        raw = path.read_bytes()
        for t in read_shard(path).tensors:
            tensors[t.name] = raw[t.offset : t.offset + t.nbytes]
    return tensors


def logits(directory: Path) -> bytes:
    """What the engine makes of eight tokens."""
    session = Session(Model.open(Container.open(directory)), 16)
    return session.step_all(IDS, "all").tobytes()


def tree(directory: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in directory.iterdir() if f.name != "conversion.json"}


@pytest.mark.parametrize(("experts", "dense"), [*zip(TEXTS, TEXTS[::-1], strict=True)])
def test_public_to_own_and_back(tmp_path, experts, dense):
    """In each format the public engine writes, repacking keeps every code and scale: the same
    logits, bit for bit, and back again the same payloads under the same names."""
    source = public(tmp_path / "public", experts, dense)
    convert_directory(source, tmp_path / "own")
    own = Container.open(tmp_path / "own")
    assert own.is_own_layout and own.has_mtp and own.has_indexer
    before = Container.open(source)
    for name in WEIGHTS:
        assert own.read_array(name).tobytes() == before.read_array(name).tobytes()
        assert format_of(own.matrix(name)) == format_of(before.matrix(name))
    assert logits(source) == logits(tmp_path / "own")
    repack_directory(tmp_path / "own", tmp_path / "back", "public")
    assert stored(tmp_path / "back") == stored(source)
    assert logits(tmp_path / "back") == logits(source)


def test_own_to_public_and_back(tmp_path):
    """What convert writes, f16 scales and all, survives the way to the public layout and back: the
    same files to the byte, and the public engine's families of files on the way."""
    source = shardkit.directory(tmp_path / "source")
    forms = Formats(*map(Format.parse, ("int4-g32", "int8-f32", "int8", "int4-g16")))
    convert_directory(source, tmp_path / "own", forms)
    repack_directory(tmp_path / "own", tmp_path / "public", "public")
    names = sorted(path.name for path in (tmp_path / "public").glob("*.safetensors"))
    assert names == [f"{family}-00000.safetensors" for family in ("out", "out-idx", "out-mtp")]
    for tensor in Container.open(tmp_path / "public").tensors.values():
        assert tensor.dtype in ("F32", "U8")
        assert tensor.dtype == "F32" or len(tensor.shape) == 1
    assert logits(tmp_path / "public") == logits(tmp_path / "own")
    repack_directory(tmp_path / "public", tmp_path / "again", "colibri")
    assert tree(tmp_path / "again") == tree(tmp_path / "own")


def test_order_inside_a_public_file(tmp_path):
    """F32 tensors come first, then bytes, each in the order of names: an expert's three payloads
    are one run, down, gate, up, as the public engine reads them."""
    convert_directory(shardkit.directory(tmp_path / "source"), tmp_path / "own")
    repack_directory(tmp_path / "own", tmp_path / "public", "public")
    shard = read_shard(tmp_path / "public" / "out-00000.safetensors")
    inside = [(t.dtype, t.name) for t in sorted(shard.tensors, key=lambda t: t.offset)]
    assert inside == sorted(inside)
    assert shard.data % 8 == 0


@pytest.mark.parametrize("text", ["int8-g16", "int4-g8", "int4-g24"])
def test_formats_the_public_layout_cannot_say(tmp_path, text):
    """A format that the public engine could not infer is refused with the matrix's name."""
    forms = Formats(experts=Format.parse(text))
    convert_directory(shardkit.directory(tmp_path / "source"), tmp_path / "own", forms)
    with pytest.raises(UsageError, match=rf"experts\.0\..*: {text}-f16 of .* has no form in"):
        repack_directory(tmp_path / "own", tmp_path / "public", "public")
    assert not (tmp_path / "public").exists()


def test_refusals(tmp_path):
    """Formats for numbers that are quantised already, floats, and our own layout once more are
    refused before anything is written."""
    source = public(tmp_path / "public", "int4-f32", "int8-f32")
    with pytest.raises(UsageError, match="lose twice"):
        convert_directory(source, tmp_path / "a", Formats())
    with pytest.raises(UsageError, match="is not quantised; convert it first"):
        repack_directory(shardkit.directory(tmp_path / "plain"), tmp_path / "b", "public")
    convert_directory(source, tmp_path / "own")
    with pytest.raises(UsageError, match="already quantised, and in colibri's own layout"):
        repack_directory(tmp_path / "own", tmp_path / "c", "colibri")
    assert not [p for p in (tmp_path / "a", tmp_path / "b", tmp_path / "c") if p.exists()]


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ("int4-g16-f32", "layer 2 have up matrices in several formats"),
        ("int8-f32", r"up_proj.weight is INT8, others of its layer are INT4.*convert the original"),
    ],
)
def test_experts_of_several_formats(tmp_path, form, fault):
    """Experts of a layer in unlike formats cannot share a record: refused with the layer."""
    source = public(tmp_path / "public", "int4-f32", "int8-f32")
    path = source / "out-00000.safetensors"
    name = "model.layers.2.mlp.experts.1.up_proj.weight"
    got = encode(WEIGHTS[name], Format.parse(form))

    def swap(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays[name] = got.payload.view(np.uint8).reshape(-1)
        arrays[name + ".qs"] = got.scales.reshape(-1)
        return arrays

    raw = path.read_bytes()
    types = {"F32": np.float32, "U8": np.uint8}
    arrays = {
        t.name: np.frombuffer(raw, types[t.dtype], t.nbytes // types[t.dtype]().nbytes, t.offset)
        .reshape(t.shape)
        for t in read_shard(path).tensors
    }  # fmt: skip
    shardkit.write(path, swap(arrays))
    with pytest.raises(ContainerError, match=fault):
        convert_directory(source, tmp_path / "own")


def test_mixed_projections(tmp_path):
    """A public container with other bits for one projection keeps them in its records."""
    source = public(tmp_path / "public", "int4-f32", "int8-f32")
    for path in source.glob("out*.safetensors"):
        raw, types = path.read_bytes(), {"F32": np.float32, "U8": np.uint8}
        arrays = {}
        for t in read_shard(path).tensors:
            size = types[t.dtype]().nbytes
            arrays[t.name] = np.frombuffer(raw, types[t.dtype], t.nbytes // size, t.offset)
            arrays[t.name] = arrays[t.name].reshape(t.shape)
        for name in [n for n in arrays if n.endswith("down_proj.weight") and ".experts." in n]:
            got = encode(WEIGHTS[name], Format.parse("int8-f32"))
            arrays[name] = got.payload.view(np.uint8).reshape(-1)
            arrays[name + ".qs"] = got.scales.reshape(-1)
        shardkit.write(path, arrays)
    convert_directory(source, tmp_path / "own")
    gate, up, down = Container.open(tmp_path / "own").expert(1, 2)
    assert (gate.format, up.format, down.format) == (Kind.INT4, Kind.INT4, Kind.INT8)
    assert logits(tmp_path / "own") == logits(source)
    repack_directory(tmp_path / "own", tmp_path / "back", "public")
    assert stored(tmp_path / "back") == stored(source)


def test_hints_are_not_believed_blindly(tmp_path):
    """A hint that does not fit the stored matrix, or f16 scales that are not exact, are refused."""
    convert_directory(shardkit.directory(tmp_path / "source"), tmp_path / "own")
    repack_directory(tmp_path / "own", tmp_path / "public", "public")
    path = tmp_path / "public" / "out-00000.safetensors"
    good = path.read_bytes()
    name = hint_name(1, "up")

    def edit(old: str, new: str) -> None:
        shardkit.edit(path, lambda header: header["__metadata__"].update(
            colibri=header["__metadata__"]["colibri"].replace(old, new)))  # fmt: skip

    edit(f'"{name}":"int4-g64-f16"', f'"{name}":"int8-f16"')
    with pytest.raises(ContainerError, match=f"{name} is said to be int8-f16, but is int4"):
        convert_directory(tmp_path / "public", tmp_path / "x")
    path.write_bytes(good)
    shardkit.edit(path, lambda header: header["__metadata__"].update(colibri="\ud800"))
    with pytest.raises(ContainerError, match=r"__metadata__\.colibri: not UTF-8"):
        convert_directory(tmp_path / "public", tmp_path / "x")
    path.write_bytes(good)
    edit(f'"{name}":"int4-g64-f16"', f'"{name}":"int5"')
    with pytest.raises(ContainerError, match=r"__metadata__\.colibri: format 'int5'"):
        convert_directory(tmp_path / "public", tmp_path / "x")
    path.write_bytes(good)
    tensor = next(t for t in read_shard(path).tensors if t.name.endswith("up_proj.weight.qs"))
    changed = bytearray(good)
    changed[tensor.offset] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ContainerError, match="are not exact in f16"):
        convert_directory(tmp_path / "public", tmp_path / "y")
