"""Every form of source: FP8 and NVFP4 with their scales, BF16 that stays, what is refused, how."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from pathlib import Path

import fourbit
import fp8
import numpy as np
import pytest
import shardkit
import tiny

from colibri.container import Container, format_of
from colibri.convert import convert_directory
from colibri.convert.plan import Request
from colibri.convert.planner import make_plan, open_contents
from colibri.convert.work import Reader
from colibri.errors import ConfigError, ContainerError, Exit, UsageError
from colibri.formats import Format, Kind
from colibri.layout import Formats
from colibri.model import Model
from colibri.quantize import bf16_from_f32, f32_from_bf16
from colibri.session import Session

MIXED = Formats(*map(Format.parse, ("int4-g32", "int8-f32", "int8", "int8-g16")))
FLOATS = Formats(*[Format(Kind.F32)] * 4)
BIG = "model.layers.1.mlp.experts.1.up_proj.weight"
SCALE = BIG + "_scale_inv"


def directory(path: Path, arrays: dict[str, np.ndarray], files: int = 1, **config) -> Path:
    """A checkpoint of fp8.CONFIG in so many shards."""
    names = [f"model-{k:05}-of-{files:05}.safetensors" for k in range(1, files + 1)]
    return shardkit.directory(path, shardkit.split(arrays, names), fp8.CONFIG | config)


def tree(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in path.glob("*.safetensors")}


@pytest.mark.parametrize("formats", [MIXED, FLOATS], ids=["mixed", "f32"])
@pytest.mark.parametrize("way", ["block", "row", "one", "bf16 scales", "fused"])
def test_fp8_is_its_values(tmp_path, way, formats):
    """An FP8 checkpoint converts to the very bytes of the f32 checkpoint of its values: scales by
    block, by row or one, in F32 or BF16; whole matrices or fused experts; spread over shards so
    that some matrices lie apart from their scales."""
    stored, meant = fp8.fused() if way == "fused" else fp8.checkpoint(way.split()[0].replace(
        "bf16", "block"))  # fmt: skip
    if way == "bf16 scales":
        for name in [n for n in stored if n.endswith("_scale_inv")]:
            bits = bf16_from_f32(stored[name])
            weights, stored[name] = name.removesuffix("_scale_inv"), bits
            spread = np.repeat(np.repeat(f32_from_bf16(bits), 128, 0), 128, 1)
            rows, cols = meant[weights].shape
            meant[weights] = fp8.VALUES[np.asarray(stored[weights])] * spread[:rows, :cols]
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    eight = directory(tmp_path / "fp8", stored, 5, **config)
    plain = directory(tmp_path / "f32", meant)
    for source in (eight, plain):
        convert_directory(source, source.with_name(source.name + "-out"), formats)
    assert tree(tmp_path / "fp8-out") == tree(tmp_path / "f32-out")
    config = json.loads((tmp_path / "fp8-out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not [n for n in open_contents(eight).notes if "ignored" in n]


def test_other_block_sizes(tmp_path):
    """Blocks are as quantization_config says, when it says so; nonsense there is refused."""
    stored, _ = fp8.checkpoint()
    weights = stored["model.layers.0.self_attn.q_a_proj.weight"]
    for name in [n for n in stored if n.endswith("_scale_inv")]:
        rows, cols = stored[name.removesuffix("_scale_inv")].shape
        stored[name] = np.ones((-(-rows // 32), -(-cols // 64)), np.float32)
    given = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    convert_directory(
        directory(tmp_path / "a", stored, quantization_config=given), tmp_path / "out", FLOATS
    )
    got = Container.open(tmp_path / "out").read_array("model.layers.0.self_attn.q_a_proj.weight")
    assert got.tobytes() == fp8.VALUES[np.asarray(weights)].tobytes()
    with pytest.raises(ContainerError, match=r"one scale, one a row, or \[1, 2\] for blocks"):
        convert_directory(directory(tmp_path / "b", stored), tmp_path / "out2")
    for bad in ([32], [0, 64], "32", [32, 64.0]):
        given = {"quant_method": "fp8", "weight_block_size": bad}
        with pytest.raises(ConfigError, match="weight_block_size"):
            convert_directory(
                directory(tmp_path / "c", stored, quantization_config=given), tmp_path / "out3"
            )


def damage(name: str, change) -> dict[str, np.ndarray]:
    """The FP8 checkpoint with one tensor changed, or removed where the change is None."""
    stored, _ = fp8.checkpoint()
    changed = change(stored[name].copy())
    return {
        n: changed if n == name else a
        for n, a in stored.items()
        if n != name or changed is not None
    }


def put(value, at=(3, 5)):
    """Sets one element."""

    def change(array: np.ndarray) -> np.ndarray:
        array[at] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (SCALE, lambda a: None, rf"{BIG}: is FP8 without scales \({SCALE}\)"),
        (SCALE, lambda a: a[:1], r"_scale_inv: is \[1, 2\]; FP8 of \[144, 160\] has one scale"),
        (SCALE, lambda a: a.astype(np.float64), "scales of dtype F64 cannot be read"),
        (BIG, put(0x7F), rf"{BIG}: FP8 code 0x7F at \[3, 5\] is NaN"),
        (BIG, put(0xFF, (143, 159)), r"0xFF at \[143, 159\] is NaN"),
        (SCALE, put(np.nan, (1, 1)), f"the scales of {BIG} are not finite"),
        (SCALE, put(3e38, (0, 0)), f"{BIG}: a weight in rows 0 to .* is not finite"),
        (BIG, lambda a: a[:, :150], r"is \[144, 150\]; config.json describes \[144, 160\]"),
        (BIG, lambda a: np.zeros(a.shape, np.float32), "is F32 but has scales"),
        ("lm_head.weight", lambda a: a.astype(np.float64), "is F64; F32, BF16, F16, F8_E4M3"),
    ],
)  # fmt: skip
def test_damaged_fp8_is_named(tmp_path, name, change, message):
    """Missing, misshapen or damaged scales and NaN codes stop the conversion and are named; the
    source is never taken for something else."""
    source = directory(tmp_path / "source", damage(name, change))
    with pytest.raises(ContainerError, match=message):
        convert_directory(source, tmp_path / "out")


FOUR = "model.layers.1.mlp.experts.1.up_proj.weight"  # [144, 160]
PACKED = "model.layers.1.mlp.experts.1.down_proj.weight"  # [160, 144]


@pytest.mark.parametrize("formats", [MIXED, FLOATS], ids=["mixed", "f32"])
@pytest.mark.parametrize("kind", [fourbit.modelopt, fourbit.compressed, fourbit.mxfp4])
def test_four_bits_are_their_values(tmp_path, kind, formats):
    """A checkpoint of NVFP4 or MXFP4 experts, FP8 with one scale and floats, spread over shards,
    converts to the very bytes of the f32 checkpoint of its values; scales of activations and of the
    cache are known to be of no use."""
    stored, meant = kind()
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    four = directory(tmp_path / "four", stored, 5, **config)
    (four / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    for source in (four, directory(tmp_path / "f32", meant)):
        convert_directory(source, source.with_name(source.name + "-out"), formats)
    assert tree(tmp_path / "four-out") == tree(tmp_path / "f32-out")
    config = json.loads((tmp_path / "four-out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "four-out" / "hf_quant_config.json").exists()
    assert not [n for n in open_contents(four).notes if "ignored" in n]


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 0, -1])
def test_integers_are_their_values(tmp_path, bits, group, asymmetric):
    """Packed integers of 4 or 8 bits, with scales by group, row or matrix, with and without zero
    points, spread over shards, convert to what they stand for."""
    stored, meant = fourbit.integers(bits, group, asymmetric)
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    packed = directory(tmp_path / "packed", stored, 5, **config)
    convert_directory(packed, tmp_path / "out", FLOATS)
    made = Container.open(tmp_path / "out")
    for name in filter(fourbit.is_expert, meant):
        assert made.read_array(name).tobytes() == meant[name].tobytes()
    assert not [n for n in open_contents(packed).notes if "ignored" in n]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 0])
@pytest.mark.parametrize("scale", ["f32", "f16"])
def test_integers_are_kept(tmp_path, bits, group, scale):
    """Integers without zero points that a format asked for has too keep every value; scales that
    are not exact in f16 have their matrix encoded as another one would be."""
    form = Format.parse(f"int{bits}" + (f"-g{group}" if group else "") + f"-{scale}")
    formats = Formats(form, form, *[Format(Kind.F32)] * 2)
    stored, meant = fourbit.integers(bits, group, False)
    inexact = stored[FOUR + "_scale"]
    inexact[3, 0] = 0x0001  # a subnormal of BF16
    meant[FOUR][3, : group or 160] *= 0
    convert_directory(directory(tmp_path / "packed", stored), tmp_path / "out", formats)
    kept = Container.open(tmp_path / "out")
    for name in [n for n in meant if fourbit.is_expert(n) and (n != FOUR or scale == "f32")]:
        wanted = np.where(np.abs(meant[name]) > 0, meant[name], kept.read_array(name))
        assert kept.read_array(name).tobytes() == wanted.tobytes()
    if scale == "f16":
        convert_directory(directory(tmp_path / "plain", meant), tmp_path / "encoded", formats)
        encoded = Container.open(tmp_path / "encoded")
        assert kept.read_array(FOUR).tobytes() == encoded.read_array(FOUR).tobytes()


def test_pieces_read_their_own_scales(tmp_path, monkeypatch):
    """A matrix made in pieces of rows is the same, and each piece reads no other's scales."""
    stored, _ = fourbit.modelopt()
    source = directory(tmp_path / "source", stored)
    convert_directory(source, tmp_path / "whole", MIXED)
    monkeypatch.setattr("colibri.convert.jobs.piece_rows", lambda cols: 50)
    plan = make_plan(Request(str(source), tmp_path / "pieces", MIXED))
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    parts = [part for _, job in plan.jobs for part in job.parts if part.work.name == name]
    assert [[e.nbytes for e in part.work.extents()] for part in parts] == [
        [rows * 80, rows * 10, 4] for rows in (50, 50, 44)
    ]
    for part in parts:
        codes, scales = (bytearray(slot.nbytes) for slot in (part.codes, part.scales))
        with closing(Reader()) as reader:
            reader.open(0, source / "model-00001-of-00001.safetensors")
            part.work.run(reader, memoryview(codes), memoryview(scales))
        at = part.work.first
        whole = Container.open(tmp_path / "whole").read_array(name)[at : at + part.work.rows]
        made = np.frombuffer(codes, np.int8).reshape(-1, 160)
        made = made * np.frombuffer(scales, np.float32)[:, None]
        assert made.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (FOUR + "_scale", None, f"{FOUR}: is U8 without {FOUR}_scale, which NVFP4 has"),
        (FOUR + "_scale_2", None, f"{FOUR}: is U8 without {FOUR}_scale_2, which NVFP4 has"),
        (FOUR, lambda a: a[:100], r"is U8 \[100, 80\]; config.json describes \[144, 160\]"),
        (FOUR, lambda a: a[:, :72], r"which is \[144, 80\] as NVFP4"),
        (FOUR + "_scale", lambda a: a[:, :5], r"is F8_E4M3 \[144, 5\]; .* has F8_E4M3 \[144, 10\]"),
        (FOUR + "_scale", lambda a: np.asarray(a), r"is U8 \[144, 10\]; MXFP4 .* U8 \[144, 5\]"),
        (FOUR + "_scale", lambda a: np.ones((144, 10), "f4"), r"is F32 .*; NVFP4 .* has F8_E4M3"),
        (PACKED + "_scale", lambda a: np.asarray(a), "is MXFP4, but 144 columns are no whole"),
        (FOUR + "_scale_2", lambda a: np.ones(144, "f4"), r"is F32 \[144\]; NVFP4 has one F32"),
        (FOUR + "_scale_2", lambda a: a.astype("f8"), r"is F64 \[\]; NVFP4 has one F32"),
        (FOUR + "_scale_2", lambda a: a * 0, rf"{FOUR}: {FOUR}_scale_2 is 0.0; the source is dam"),
        (FOUR + "_scale_2", lambda a: a + np.inf, rf"{FOUR}_scale_2 is inf; the source is damaged"),
        (FOUR + "_scale_2", lambda a: a + np.nan, rf"{FOUR}_scale_2 is nan; the source is damaged"),
        (FOUR + "_scale_2", lambda a: a * 0 + 3e38, f"the scales of {FOUR} are not finite"),
        (FOUR + "_scale", put(0x7F), f"{FOUR}: the scales of {FOUR} are not finite"),
        ("lm_head.weight", lambda a: np.zeros((256, 80), "u1"), "U8 without lm_head.weight_scale,"),
        (PACKED + "_global_scale", None, f"{PACKED}_packed: is U8 without {PACKED}_global_sc"),
        (PACKED + "_global_scale", lambda a: a * 0, f"{PACKED}_global_scale is 0.0; the source"),
        (PACKED + "_packed", None, rf"1 tensor is missing, first layer 1 routed .*\({PACKED}\)"),
        ("model.norm.weight", lambda a: a.astype("u1"), "is U8; F32, BF16, F16, F8_E4M3 are conv"),
    ],
)  # fmt: skip
def test_damaged_nvfp4_is_named(tmp_path, name, change, message):
    """Missing, misshapen or damaged scales and codes stop the conversion and are named."""
    stored, _ = fourbit.compressed() if name.startswith(PACKED) else fourbit.modelopt()
    if change is None:
        del stored[name]
    else:
        stored[name] = np.asanyarray(change(stored[name].copy()))
    source = directory(tmp_path / "source", stored)
    with pytest.raises(ContainerError, match=message):
        convert_directory(source, tmp_path / "out")


ORDER = r"_g_idx: groups the inputs in an order of its own, which is not converted"


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("_packed", lambda a: a[:, :-1], r"is I32 \[144, 19\]; .* \[144, 20\] or \[144, 40\]"),
        ("_packed", lambda a: a.astype("i8"), r"is I64; F32, BF16, F16, F8_E4M3 are converted"),
        ("_scale", lambda a: None, f"is I32 without {FOUR}_scale, which pack-quant"),
        ("_scale", lambda a: a[:, :3], r"is \[144, 3\]; .* or \[144, groups\] with groups"),
        ("_scale", lambda a: a[:9], r"is \[9, 10\]; integers of \[144, 160\] have one scale, or"),
        ("_scale", lambda a: a.astype("f8"), "scales of dtype F64 cannot be read"),
        ("_scale", put(0x7FC0, (3, 1)), f"the scales of {FOUR}_packed are not finite"),
        ("_zero_point", lambda a: a[:9], r"is I32 \[9, 10\]; zero points of .* \[18, 10\]"),
        ("_zero_point", lambda a: a.astype("i1"), r"is I8 \[18, 10\]; zero points of"),
        ("_g_idx", lambda a: np.arange(160, dtype="i4"), ORDER),
    ],
)  # fmt: skip
def test_damaged_integers_are_named(tmp_path, suffix, change, message):
    """What is missing, misshapen or not converted of packed integers is named."""
    stored, _ = fourbit.integers(4, 16, True)
    changed = change(stored.pop(FOUR + suffix, None))
    stored |= {} if changed is None else {FOUR + suffix: changed}
    source = directory(tmp_path / "source", stored)
    with pytest.raises(ContainerError, match=message):
        convert_directory(source, tmp_path / "out")


def test_zero_points_that_are_gone(tmp_path):
    """Where all groups are said to be without symmetry each matrix must have its zero points."""
    stored, _ = fourbit.integers(4, 16, True)
    del stored[FOUR + "_zero_point"]
    groups = {n: {"weights": {"num_bits": 4, "symmetric": n == "b"}} for n in "ab"}
    for said, fault in (("a", True), ("ab", False)):
        given = {"config_groups": {name: groups[name] for name in said}}
        source = directory(tmp_path / f"{said}-in", stored, quantization_config=given)
        refused = pytest.raises(ContainerError, match=f"without {FOUR}_zero_point, which pack-quan")
        with refused if fault else nullcontext():
            convert_directory(source, tmp_path / said)
        assert (tmp_path / said).exists() != fault


@pytest.mark.parametrize(
    ("names", "tool"),
    [
        (("qweight", "qzeros", "scales"), "AWQ (AutoAWQ)"),
        (("qweight", "qzeros", "scales", "g_idx"), "GPTQ"),
        (("weight", "pre_quant_scale"), "AWQ (Model Optimizer)"),
        (("weight", "scales", "biases"), "MLX"),
        (("weight", "weight.absmax", "weight.quant_map"), "bitsandbytes"),
        (("trellis", "suh", "svh"), "EXL3"),
    ],
)
def test_formats_of_other_tools(command, tmp_path, names, tool):
    """A checkpoint that nothing here reads is told by the tool that wrote it, with what is read."""
    stem = FOUR.removesuffix("weight")
    arrays = {n: a for n, a in shardkit.weights().items() if n != FOUR}
    arrays |= {stem + name: np.zeros(4, np.int32) for name in names}
    source = shardkit.directory(tmp_path / "source", {"model.safetensors": arrays})
    for words in (f"convert {source} {tmp_path / 'out'}", f"info {source}"):
        done = command(*words.split())
        assert done.status == Exit.ERROR and f"is quantised by {tool} ({stem}" in done.err
        assert "BF16, F16, F32, FP8, NVFP4, MXFP4 and compressed-tensors'" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [fourbit.modelopt, fourbit.compressed])
def test_converted_first(command, tmp_path, kind):
    """Commands on a checkpoint that must be converted say so."""
    arrays = {n: a for n, a in kind()[0].items() if "o_proj" not in n}
    for name, shape in tiny.shapes(fourbit.CONFIG).items():
        if name.endswith("o_proj.weight"):
            arrays[name] = np.zeros(shape, np.float32)
    source = directory(tmp_path / "source", arrays)
    for words in ("info {}", "plan {}", "doctor {}", "run {} -p Hi"):
        done = command(*words.format(source).split())
        told = " ".join((done.out + done.err).split()).replace(" ->", ";")  # as doctor says it
        assert done.status == Exit.ERROR
        assert "cannot be run as it is; convert it first: colibri convert SRC DST" in told


def test_gguf(command, tmp_path):
    """GGUF, as a file or in a directory, is told by its name, whatever else lies there."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a-Q4_K_M.gguf").write_bytes(b"GGUF")
    for words in (f"convert {source} out", f"convert {source}/a-Q4_K_M.gguf out", f"info {source}"):
        done = command(*words.split())
        assert done.status == Exit.USAGE and "a-Q4_K_M.gguf is GGUF, which is not read" in done.err


def test_rotated_weights(tmp_path):
    """Weights that are stored rotated are refused: activations would have to be rotated too."""
    given = {"quant_method": "compressed-tensors", "transform_config": {}}
    stored = fourbit.compressed()[0]
    convert_directory(
        directory(tmp_path / "plain", stored, quantization_config=given), tmp_path / "out"
    )
    given["transform_config"] = {"config_groups": {"u": {}}}
    source = directory(tmp_path / "source", stored, quantization_config=given)
    with pytest.raises(ConfigError, match="transform_config rotates the weights, which is not und"):
        convert_directory(source, tmp_path / "out2")


def test_codes_and_weights(tmp_path):
    """A matrix that is there both packed and plain is refused."""
    stored = fourbit.compressed()[0] | {PACKED: np.zeros((160, 144), np.float32)}
    with pytest.raises(ContainerError, match=f"{PACKED}_packed: there is a {PACKED} too"):
        convert_directory(directory(tmp_path / "source", stored), tmp_path / "out")


def test_bf16_stays_bf16(tmp_path):
    """Router and index weights that the source has in BF16 stay BF16: half the bytes, the same
    values, and the same logits, bit for bit, as with f32."""
    weights = shardkit.weights()
    kept = ("mlp.gate.weight", "indexer.weights_proj.weight")
    rounded = {n: bf16_from_f32(a) if n.endswith(kept) else a for n, a in weights.items()}
    wide = {n: f32_from_bf16(a) if a.dtype == np.uint16 else a for n, a in rounded.items()}
    logits = []
    for name, arrays in (("bf16", rounded), ("f32", wide)):
        source = shardkit.directory(tmp_path / name, {"model.safetensors": arrays})
        convert_directory(source, tmp_path / f"{name}-out", MIXED)
        container = Container.open(tmp_path / f"{name}-out")
        kinds = {format_of(container.matrix(n)).kind for n in arrays if n.endswith(kept)}
        assert kinds == {Kind.BF16 if name == "bf16" else Kind.F32}
        session = Session(Model.open(container), 16)
        logits.append(session.step_all([3, 1, 4, 1, 5, 9, 2, 6], "all").tobytes())
    assert logits[0] == logits[1]


def test_plan_is_exact(tmp_path):
    """A dry plan knows every byte of the finished directory, by part, and writes nothing."""
    stored, _ = fp8.checkpoint()
    source = directory(tmp_path / "source", stored, 3)
    (source / "tokenizer.json").write_text("{}")
    target = tmp_path / "out"
    plan = make_plan(Request(str(source), target, MIXED))
    assert not target.exists()
    assert plan.source_bytes == sum(p.stat().st_size for p in source.glob("*.safetensors"))
    convert_directory(source, target, MIXED)
    assert plan.final_bytes == sum(path.stat().st_size for path in target.iterdir())
    assert sum(plan.parts().values()) == plan.final_bytes
    assert plan.needed() >= plan.final_bytes


def test_no_room(tmp_path, monkeypatch):
    """Too small a disk is refused before anything is written, with the shortfall and a way out."""
    source = directory(tmp_path / "source", fp8.checkpoint()[0])
    plan = make_plan(Request(str(source), tmp_path / "out"))
    monkeypatch.setattr("colibri.convert.plan.free_bytes", lambda _: plan.needed() - 5_000_000)
    with pytest.raises(UsageError, match=r"5 MB short; .*--delete-source"):
        convert_directory(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("colibri.convert.plan.free_bytes", lambda _: plan.needed())
    convert_directory(source, tmp_path / "out")


def test_deleting_makes_room(tmp_path):
    """With --delete-source on one disk, source and target never need both their sizes at once."""
    arrays = shardkit.weights()
    names = [f"model-{k:05}-of-00008.safetensors" for k in range(1, 9)]
    source = shardkit.directory(tmp_path / "source", shardkit.split(arrays, names))
    keep = make_plan(Request(str(source), tmp_path / "out", FLOATS)).needed()
    drop = make_plan(Request(str(source), tmp_path / "out", FLOATS, delete_source=True)).needed()
    assert drop < 0.5 * keep


@pytest.mark.parametrize("text", ["int4", "int4-f32", "int2"])
def test_dead_half_of_the_draft_head(tmp_path, text):
    """Per-row codes that would make a half of eh_proj all zero are refused before a byte is
    written; int8 and groups are not, and neither is a half that is zero in the source."""
    arrays = shardkit.weights()
    name = "model.layers.3.eh_proj.weight"
    arrays[name] = arrays[name].copy()
    arrays[name][:, :64] *= 1 / 300
    source = shardkit.directory(tmp_path / "source", {"model.safetensors": arrays})
    with pytest.raises(UsageError, match=f"embedding half of {name} would become all zero"):
        convert_directory(source, tmp_path / "out", Formats(mtp=Format.parse(text)), search=False)
    assert not (tmp_path / "out").exists()
    convert_directory(source, tmp_path / "out8", Formats(mtp=Format.parse("int8")))
    convert_directory(source, tmp_path / "out64", Formats(mtp=Format.parse("int4-g64")))
    arrays[name][:, :64] = 0
    zero = shardkit.directory(tmp_path / "zero", {"model.safetensors": arrays})
    warnings = convert_directory(zero, tmp_path / "out0", Formats(mtp=Format.parse(text)), False)
    assert "embedding half of the MTP layer's eh_proj is all zero" in warnings[-1]


def test_sources_that_are_none(tmp_path):
    """An empty directory, one without config.json, and one that is not there are told apart."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        convert_directory(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(shardkit.SMALL))
    with pytest.raises(ContainerError, match=r"no \*\.safetensors file"):
        convert_directory(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(UsageError, match="there is no such directory"):
        convert_directory(tmp_path / "nowhere", tmp_path / "out")
