"""Any change to a header or to metadata gives a sound container or a ContainerError, no third."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import shardkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri.container import Container, format_of
from colibri.convert import convert_directory
from colibri.errors import ContainerError
from colibri.formats import MatrixRef
from colibri.layout import Formats
from colibri.shard import read_shard

FAST = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, 64, 4096, 2**31, 2**63 - 1, 2**63, -1])
    | st.floats()
    | st.sampled_from(["F32", "BF16", "U8", "I8", "F8_E4M3", "int4", "int8", "f16", "colibri"])
    | st.text(max_size=6)
)
JUNK = SCALARS | st.lists(SCALARS, max_size=4) | st.dictionaries(st.text(max_size=4), SCALARS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return shardkit.directory(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("own")
    convert_directory(shardkit.directory(base / "source"), base / "own", Formats(), False)
    return base / "own"


def assert_sound(directory: Path) -> None:
    """The directory opens with every matrix inside its file, or is refused."""
    try:
        container = Container.open(directory)
    except ContainerError:
        return
    refs = [container.matrix(entry.name) for entry in container.entries]
    for layer, sparse in enumerate(container.sparse):
        if sparse:
            table = container.experts(layer).reshape(-1)
            refs += [MatrixRef(*row) for row in table.tolist()]
    for ref in refs:
        form = format_of(ref)
        end = ref.offset + ref.rows * form.row_bytes(ref.cols)
        assert 0 < ref.offset <= end <= container.shards[ref.shard].size
        scales = ref.rows * form.row_scales(ref.cols) * form.scale_bytes
        end = ref.scale_offset + scales
        assert 0 < ref.scale_offset <= end <= container.shards[ref.scale_shard].size


def damage(tree: Any, draw: st.DataObject, depth: int = 0) -> Any:
    """The tree with one random node replaced, removed, renamed or copied."""
    if (
        not isinstance(tree, dict | list)
        or not tree
        or (depth and draw.draw(st.integers(0, 3)) == 0)
    ):
        return draw.draw(JUNK)
    if isinstance(tree, list):
        at = draw.draw(st.integers(0, len(tree) - 1))
        return [*tree[:at], damage(tree[at], draw, depth + 1), *tree[at + 1 :]]
    name = draw.draw(st.sampled_from(sorted(tree)))
    other = draw.draw(st.sampled_from(sorted(tree)))
    kind = draw.draw(st.sampled_from(["inside", "inside", "inside", "remove", "rename", "copy"]))
    rest = {key: value for key, value in tree.items() if key != name}
    if kind == "inside":
        return rest | {name: damage(tree[name], draw, depth + 1)}
    if kind == "rename":
        return rest | {draw.draw(st.text(max_size=5)): tree[name]}
    return rest if kind == "remove" else rest | {name: tree[other]}


@FAST
@given(st.data())
def test_damaged_bytes(plain, tmp_path_factory, data):
    """Bytes of the length and the header changed, inserted or cut."""
    raw = bytearray((plain / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header - 1) | st.integers(0, 8))
        cut = data.draw(st.integers(0, 6))
        raw[at : at + cut] = data.draw(st.binary(max_size=6))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(raw)
    try:
        shard = read_shard(path)
    except ContainerError as error:
        assert str(error).startswith(str(path))
        return
    assert sum(tensor.nbytes for tensor in shard.tensors) + shard.data == shard.size


@FAST
@given(st.data())
def test_damaged_entries(plain, data):
    """One node anywhere in a plain shard's header replaced, removed, renamed or copied."""
    path = plain / "model.safetensors"
    kept = path.read_bytes()
    try:
        header, payload = shardkit.load(path)
        shardkit.store(path, damage(header, data), payload)
        assert_sound(plain)
    finally:
        path.write_bytes(kept)


@FAST
@given(st.sampled_from(["tensors", "experts"]), st.data())
def test_damaged_metadata(own, section, data):
    """One node anywhere in the formats and record layouts of our own metadata changed."""
    name = {"tensors": "dense", "experts": "experts"}[section]
    path = own / f"{name}-00001-of-00001.safetensors"
    kept = path.read_bytes()

    def change(header):
        tree = json.loads(header["__metadata__"][section])
        header["__metadata__"][section] = json.dumps(damage(tree, data))

    try:
        shardkit.edit(path, change)
        assert_sound(own)
    finally:
        path.write_bytes(kept)
