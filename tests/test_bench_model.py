"""The benchmark models: shapes, bytes and numbers of what tools/make_bench_model.py writes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from toolbox import tool

from colibri.config import ModelConfig
from colibri.container import Container
from colibri.errors import UsageError
from colibri.formats import Format
from colibri.inventory import records_name
from colibri.layout import Formats, plan_shards, record_layout
from colibri.model import Model
from colibri.session import Session
from colibri.verify import verify

maker = tool("make_bench_model")
G64, ROW, INT8 = (Format.parse(text) for text in ("int4-g64", "int4", "int8"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny shape, written with the real writer; and the bytes that were promised."""
    target = tmp_path_factory.mktemp("made") / "model"
    total = maker.make_model(target, tiny.GROUPS, Formats(G64, ROW, INT8, G64), seed=2)
    return target, total


def test_a_container_with_the_expected_bytes(made):
    """The directory opens without a note, in colibri's own layout; each file is its header, padded
    to 4096, and its tensors; the tensors add up to what was promised."""
    target, total = made
    container = Container.open(target)
    assert container.notes == [] and container.is_own_layout and container.has_mtp
    assert sum(tensor.nbytes for tensor in container.tensors.values()) == total
    for number, shard in enumerate(container.shards):
        size = sum(t.nbytes for t in container.tensors.values() if t.shard == number)
        assert (shard.size - size) % 4096 == 0 and shard.size > size
    layout = record_layout(container.config, G64)
    assert container.tensors[records_name(2)].shape == (16, layout.nbytes)


def test_the_same_arguments_give_the_same_bytes(made, tmp_path):
    """Written again, every file is equal; with another seed the weights differ."""
    target, _ = made
    maker.make_model(tmp_path / "again", tiny.GROUPS, Formats(G64, ROW, INT8, G64), seed=2)
    for path in target.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    maker.make_model(tmp_path / "other", tiny.GROUPS, Formats(G64, ROW, INT8, G64), seed=3)
    name = next(target.glob("experts-*")).name
    assert (tmp_path / "other" / name).read_bytes() != (target / name).read_bytes()


def test_weights_have_the_spread_of_a_trained_model(made):
    """Matrices have mean 0 and deviation gain / sqrt(inputs); norms are near 1; no expert equals
    another, no projection equals another."""
    container = Container.open(made[0])
    config = container.config
    for name, gain in (
        ("model.layers.3.self_attn.q_b_proj.weight", 1.0),
        ("model.layers.3.self_attn.o_proj.weight", 0.5),
        ("model.layers.2.mlp.experts.7.up_proj.weight", 1.0),
        ("model.layers.8.mlp.experts.3.down_proj.weight", 0.5),
        ("lm_head.weight", 3.0),
    ):
        weights = container.read_array(name)
        expected = gain / np.sqrt(weights.shape[1])
        assert weights.std() == pytest.approx(expected, rel=0.1)
        assert abs(weights.mean()) < 0.1 * expected
    assert container.read_array("model.embed_tokens.weight").std() == pytest.approx(1, rel=0.1)
    assert abs(container.read_array("model.norm.weight") - 1).max() < 0.5
    experts = [
        container.read_array(f"model.layers.2.mlp.experts.{e}.{projection}_proj.weight").tobytes()
        for e in range(config.n_routed_experts)
        for projection in ("gate", "up")
    ]
    assert len(set(experts)) == len(experts)


def test_the_model_runs_and_stays_finite(made):
    """Prefill, single steps and drafts give finite logits of ordinary size."""
    model = Model.open(Container.open(made[0]))
    session = Session(model, 64, 16)
    rows = [session.prefill(list(range(3, 33))).copy()]
    rows += [session.step_all([token], "last")[0].copy() for token in (5, 9, 200)]
    draft = np.empty(model.config.hidden_size, np.float32)
    rows.append(session.mtp_absorb(session.last_hidden, [7], draft).copy())
    for row in rows:
        assert np.isfinite(row).all() and 0.5 < row.std() < 10


def test_codes_use_their_range_evenly_around_zero():
    """int4 codes are -7..7 and int8 codes -127..127, all of them, as often above 0 as below."""
    bits = maker.raw_bits(1, "codes", 0, 1 << 15)
    nibbles = maker.draw_codes(bits, G64.kind)
    codes = np.concatenate([nibbles & 15, nibbles >> 4]).astype(int) - 8
    assert sorted(set(codes.tolist())) == list(range(-7, 8)) and abs(codes.mean()) < 0.05
    codes = maker.draw_codes(bits, INT8.kind).view(np.int8).astype(int)
    assert codes.min() == -127 and codes.max() == 127 and abs(codes.mean()) < 1


@pytest.mark.parametrize(
    ("shape", "experts", "touched", "layers", "record"),
    [
        ("glm-bench-8g", 8.99e9, 0.985e9, 21, 3.342e6),
        ("glm-bench-19m", 3.85e9, 1.14e9, 3, 20.05e6),
    ],
)
def test_real_shapes_have_the_bytes_of_their_names(shape, experts, touched, layers, record):
    """Planned, not written: bytes of all main experts, of one record, and touched per token."""
    config = ModelConfig.parse(maker.SHAPES[shape])
    formats = Formats(G64, G64, INT8, G64)
    owners = [n for n, kind in enumerate(config.indexer_types) if kind == "full"]
    shards = plan_shards(config, formats, False, owners)
    one = record_layout(config, G64).nbytes
    specs = [spec for shard in shards for spec in shard.specs]
    records = sum(spec.nbytes for spec in specs if spec.name.endswith("records"))
    dense = sum(spec.nbytes for spec in specs if not spec.name.endswith("records"))
    embedding = sum(spec.nbytes for spec in specs if "embed_tokens" in spec.name)
    assert one == pytest.approx(record, rel=0.001)
    assert records == pytest.approx(experts, rel=0.01)
    token = dense - embedding + layers * config.num_experts_per_tok * one
    assert token == pytest.approx(touched, rel=0.01)


def test_hollow_experts(made, tmp_path):
    """Experts left as holes take no room, read as zeros, have checksums that hold, and everything
    else is as in a model that has them."""
    whole, hollow = made[0], tmp_path / "hollow"
    formats = Formats(G64, ROW, INT8, G64)
    assert maker.make_model(hollow, tiny.GROUPS, formats, 2, hollow=True) == made[1]
    for path in hollow.glob("*.safetensors"):
        assert path.stat().st_size == (whole / path.name).stat().st_size
    name = next(hollow.glob("experts-*")).name
    assert (hollow / name).stat().st_blocks < (whole / name).stat().st_blocks / 4
    verdict = verify(hollow, deep=True)
    assert [fault for fault in verdict.faults if "tokenizer" not in fault] == []
    container, full = Container.open(hollow), Container.open(whole)
    expert, head = "model.layers.2.mlp.experts.7.up_proj.weight", "lm_head.weight"
    assert not container.read_array(expert).any() and full.read_array(expert).any()
    assert np.array_equal(container.read_array(head), full.read_array(head))
    model = Model.open(container)
    assert np.isfinite(Session(model, 64, 16).prefill(list(range(3, 33)))).all()


def test_what_cannot_be_written_is_refused(made, tmp_path, capsys, monkeypatch):
    """A directory with shards, a format without a recipe, a disk that is too small."""
    with pytest.raises(UsageError, match="already holds"):
        maker.make_model(made[0], tiny.GROUPS, Formats(G64, ROW, INT8, G64))
    with pytest.raises(UsageError, match="int3"):
        maker.make_model(tmp_path / "a", tiny.GROUPS, Formats(Format.parse("int3-g64")))
    monkeypatch.setattr("sys.argv", ["make", str(made[0]), "--experts", "int4-row"])
    assert maker.main() == 1
    assert "already holds" in capsys.readouterr().err
    monkeypatch.setattr(maker.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(UsageError, match="are free"):
        maker.make_model(tmp_path / "b", tiny.GROUPS, Formats(G64, ROW, INT8, G64))
