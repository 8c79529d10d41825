"""Model directories: every readable form is read exactly, every damaged one is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import shardkit
from colibri._core import ffi
from shardkit import SMALL

from colibri.container import Container, format_of
from colibri.contents import INDEX_FULL, INDEX_NONE, INDEX_SHARED
from colibri.convert import convert_directory
from colibri.errors import ContainerError
from colibri.experts import MATRIX_DTYPE
from colibri.formats import Format, Kind, MatrixRef
from colibri.info import describe, render
from colibri.layout import Formats
from colibri.quantize import bf16_from_f32, decode, encode
from colibri.resolve import public_format

WEIGHTS = shardkit.weights()
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture
def plain(tmp_path) -> Path:
    """A plain f32 directory of one file."""
    return shardkit.directory(tmp_path / "plain")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A container in colibri's own layout."""
    base = tmp_path_factory.mktemp("own")
    convert_directory(shardkit.directory(base / "source"), base / "own", Formats(), False)
    return base / "own"


@pytest.fixture
def own(written, tmp_path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(written, tmp_path / "own"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [({EXPERT}, EXPERT), ({EXPERT.replace(".2.up", f".{e}.up") for e in range(4)}, ".0.up_proj")],
)
def test_experts_of_several_kinds_are_refused(tmp_path, changed, named):
    """One expert in another kind of number, or all ups beside other gates: named, with the remedy,
    which works."""
    arrays = {n: a.astype(np.float16) if n in changed else a for n, a in WEIGHTS.items()}
    path = shardkit.directory(tmp_path / "mixed", {"model.safetensors": arrays})
    with pytest.raises(ContainerError, match="one kind of number") as told:
        Container.open(path)
    assert named in str(told.value) and "is F16, others of its layer are F32" in str(told.value)
    convert_directory(path, tmp_path / "own", Formats(), False)
    Container.open(tmp_path / "own")


def public(form: Format, names=lambda name: True) -> dict[str, np.ndarray]:
    """The checkpoint as the public engine stores it: 1-D bytes and `.qs`, F32 for the rest."""
    out = {}
    for name, array in WEIGHTS.items():
        if array.ndim == 1 or name.endswith("mlp.gate.weight") or not names(name):
            out[name] = array
            continue
        group = form.group if form.group < array.shape[1] else 0
        used = Format(form.kind, 64 if form.kind == Kind.INT3 else group)
        got = encode(array, used)
        out[name] = got.payload.view(np.uint8).reshape(-1)
        out[name + ".qs"] = got.scales.reshape(-1)
    return out


def fails(directory: Path, *patterns: str) -> None:
    """Opening is a ContainerError that names each of these."""
    with pytest.raises(ContainerError) as error:
        Container.open(directory)
    for pattern in patterns:
        assert pattern in str(error.value), str(error.value)
    assert len(str(error.value)) < 1000


# ---- readable forms ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_plain_floats(tmp_path, kind):
    """Plain F32, F16 and BF16 tensors read back exactly, vectors as vectors."""
    stored = {
        "f32": WEIGHTS,
        "f16": {name: array.astype(np.float16) for name, array in WEIGHTS.items()},
        "bf16": {name: bf16_from_f32(array) for name, array in WEIGHTS.items()},
    }[kind]
    files = shardkit.split(stored, ["b.safetensors", "a.safetensors"])
    container = Container.open(shardkit.directory(tmp_path, files))
    for name, array in WEIGHTS.items():
        form = Format.parse(kind)
        back = decode(encode(np.atleast_2d(array), form).payload, None, form, array.shape[-1])
        got = container.read_array(name)
        assert got.shape == array.shape and got.tobytes() == back.tobytes()
    noted = any("is not F32" in note for note in container.notes)
    assert noted == (kind != "f32") and not container.is_own_layout


def test_fused_experts(tmp_path):
    """Experts fused into 3-D tensors are slices of them, gate rows first."""
    stacked = {
        p: np.stack([WEIGHTS[f"model.layers.1.mlp.experts.{e}.{p}_proj.weight"] for e in range(4)])
        for p in ("gate", "up", "down")
    }
    arrays = {n: a for n, a in WEIGHTS.items() if not n.startswith("model.layers.1.mlp.experts.")}
    prefix = "model.layers.1.mlp.experts."
    arrays[prefix + "gate_up_proj"] = np.concatenate([stacked["gate"], stacked["up"]], axis=1)
    arrays[prefix + "down_proj"] = stacked["down"]
    directory = shardkit.directory(tmp_path, {"a.safetensors": arrays})
    container = Container.open(directory)
    for name in (n for n in WEIGHTS if ".experts." in n):
        assert container.read_array(name).tobytes() == WEIGHTS[name].tobytes()
    shardkit.edit(
        directory / "a.safetensors",
        lambda header: header[prefix + "down_proj"].update(shape=[4, 32, 64]),
    )
    fails(directory, prefix + "down_proj", "F32 [4, 32, 64]", "[4, 64, 32]")


@pytest.mark.parametrize(
    "text", ["int8-f32", "int4-f32", "int4-g16-f32", "int4-g32-f32", "int3-g64-f32", "int2-f32"]
)
def test_public_containers(tmp_path, text):
    """The public engine's formats are inferred from byte counts and decode to the same numbers."""
    form = Format.parse(text)
    long = (".o_proj.weight", ".gate_proj.weight", ".up_proj.weight")  # int3 of short rows is int8
    chosen = (lambda name: True) if form.kind != Kind.INT3 else (lambda name: name.endswith(long))
    arrays = public(form, chosen)
    main = {n: a for n, a in arrays.items() if ".layers.3." not in n and ".indexer." not in n}
    mtp = {n: a for n, a in arrays.items() if ".layers.3." in n and ".indexer." not in n}
    indexer = {n: a for n, a in arrays.items() if ".indexer." in n}
    files = {"out-00000.safetensors": main, "out-mtp-00000.safetensors": mtp,
             "out-idx-00000.safetensors": indexer}  # fmt: skip
    container = Container.open(shardkit.directory(tmp_path, files))
    assert container.has_mtp and container.has_indexer and not container.notes
    for name, array in WEIGHTS.items():
        if name + ".qs" not in arrays:
            assert container.read_array(name).tobytes() == array.tobytes()
            continue
        ref = container.matrix(name)
        used = format_of(ref)
        assert used.kind == form.kind and used.scale == Kind.F32
        payload, scales = arrays[name], arrays[name + ".qs"]
        rows, cols = array.shape
        view = payload.reshape(rows, -1).view(np.int8 if used.kind == Kind.INT8 else np.uint8)
        back = decode(view, scales.reshape(rows, -1), used, cols)
        assert container.read_array(name).tobytes() == back.tobytes()


@pytest.mark.parametrize(
    ("nbytes", "scales", "shape", "expected"),
    [
        (4 * 256, 4, (4, 256), "int8-f32"),
        (4 * 128, 4, (4, 256), "int4-f32"),
        (4 * 128, 16, (4, 256), "int4-g64-f32"),
        (4 * 64, 4, (4, 256), "int2-f32"),
        (4 * 96, 16, (4, 256), "int3-g64-f32"),
        (4 * 24, 4, (4, 24), "int8-f32"),  # row formats before int3 for tiny rows
        (4 * 40, 8, (4, 80), "int4-g48-f32"),  # 48 and 64 both give 2 groups: the smaller
        (4 * 130, 12, (4, 260), "int4-g96-f32"),  # 96 and 128 both give 3
        (2048 * 3072, 2048 * 96, (2048, 6144), "int4-g64-f32"),
        (2048 * 3072, 2048 * 48, (2048, 6144), "int4-g128-f32"),
    ],
)
def test_public_inference(nbytes, scales, shape, expected):
    """Formats are told apart as the public engine does, ambiguous groups included."""
    assert str(public_format(nbytes, scales, *shape)) == expected


@pytest.mark.parametrize(
    ("nbytes", "scales", "fault"),
    [
        (8 * 256, 4, "fit no known format"),
        (4 * 128, 5, "needs 4 scales; there are 5"),
        (4 * 256, 16, "needs 4 scales; there are 16"),
        (4 * 96, 4, "needs 16 scales; there are 4"),
        (4 * 98, 1, "lattice"),
    ],
)
def test_public_inference_refuses(nbytes, scales, fault):
    """Byte counts that fit nothing, wrong scale counts and the lattice are refused in words."""
    with pytest.raises(ContainerError, match=fault):
        public_format(nbytes, scales, 4, 256)


def test_f16_scales_are_never_misread(tmp_path):
    """F16 scales of half the group have the bytes of F32 ones; the dtype gives them away."""
    arrays = public(Format(Kind.INT4, 16))
    halved = arrays["lm_head.weight.qs"].astype(np.float16)
    arrays["lm_head.weight.qs"] = halved
    directory = shardkit.directory(tmp_path, {"a.safetensors": arrays})
    fails(directory, "lm_head.weight.qs", "scales are F16", "F32 scales only")


def test_scale_count_names_both(tmp_path):
    """A wrong number of scales names the tensor and its scales."""
    arrays = public(Format(Kind.INT8))
    arrays[EXPERT + ".qs"] = np.zeros(33, np.float32)
    directory = shardkit.directory(tmp_path, {"a.safetensors": arrays})
    fails(directory, "a.safetensors", EXPERT, "needs 32 scales; there are 33", EXPERT + ".qs")


def test_tied_head(tmp_path):
    """With tied embeddings the head is the embedding, and no lm_head is needed."""
    arrays = {name: array for name, array in WEIGHTS.items() if name != "lm_head.weight"}
    config = SMALL | {"tie_word_embeddings": True}
    container = Container.open(shardkit.directory(tmp_path, {"a.safetensors": arrays}, config))
    assert container.matrix("lm_head.weight") == container.matrix("model.embed_tokens.weight")
    assert all(entry.role != "head" for entry in container.entries)


def test_a_stored_head_counts(tmp_path):
    """Where a head is stored it is used, whatever config.json says of tied embeddings."""
    config = SMALL | {"tie_word_embeddings": True}
    container = Container.open(shardkit.directory(tmp_path / "a", config=config))
    assert np.array_equal(container.read_array("lm_head.weight"), WEIGHTS["lm_head.weight"])
    convert_directory(tmp_path / "a", tmp_path / "b", Formats(), False)
    head = Container.open(tmp_path / "b").matrix("lm_head.weight")
    assert head != Container.open(tmp_path / "b").matrix("model.embed_tokens.weight")


def test_symlinks_and_subdirectories(plain, tmp_path):
    """Linked shards (a hub cache) are followed; files below the directory are not read."""
    linked = tmp_path / "linked"
    (linked / "below").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (linked / name).symlink_to(plain / name)
    (linked / "below" / "other.safetensors").write_bytes(b"junk")
    (linked / "model.safetensors.partial").write_bytes(b"junk")
    assert len(Container.open(linked).shards) == 1
    (plain / "model.safetensors").unlink()
    fails(linked, "model.safetensors", "cannot be read", "No such file")


def test_read_only_directory(own):
    """Opening, reading and describing write nothing: a read-only directory is enough."""
    before = {path.name: path.stat().st_mtime_ns for path in own.iterdir()}
    for path in (*own.iterdir(), own):
        path.chmod(0o500 if path.is_dir() else 0o400)
    container = Container.open(own)
    container.read_array(EXPERT)
    assert {path.name: path.stat().st_mtime_ns for path in own.iterdir()} == before


def test_expert_table_is_the_cores_struct(own):
    """A table entry has the very layout of clb_tensor, and expert() is its rows."""
    assert MATRIX_DTYPE.itemsize == ffi.sizeof("clb_tensor")
    for name in MatrixRef._fields:
        assert MATRIX_DTYPE.fields[name][1] == ffi.offsetof("clb_tensor", name)
    container = Container.open(own)
    table = container.experts(2)
    assert table.shape == (4, 3) and table.flags.c_contiguous
    assert container.expert(2, 3) == tuple(MatrixRef(*row) for row in table[3].tolist())
    names = [f"model.layers.2.mlp.experts.3.{p}_proj.weight" for p in ("gate", "up", "down")]
    assert container.expert(2, 3) == tuple(map(container.matrix, names))


def test_unknown_requests(own):
    """Asking for what the model does not have is a ContainerError."""
    container = Container.open(own)
    for ask in (
        lambda: container.matrix("model.layers.9.mlp.gate.weight"),
        lambda: container.matrix("model.layers.1.mlp.experts.4.up_proj.weight"),
        lambda: container.expert(1, 4),
        lambda: container.expert(1, -1),
        lambda: container.experts(0),
    ):
        with pytest.raises(ContainerError, match=r"is not a matrix|has no (expert|routed)"):
            ask()


def test_short_read_after_opening(plain):
    """A file cut while open is an error at the read, not zeros."""
    container = Container.open(plain)
    with (plain / "model.safetensors").open("rb+") as file:
        file.truncate(50_000)
    with pytest.raises(ContainerError, match=r"short read of model\.norm\.weight|short read"):
        for name in WEIGHTS:
            container.read_array(name)


# ---- what is missing --------------------------------------------------------------------------


def test_layer_kinds(plain):
    """Sparse layers and index kinds per layer, the MTP layer last."""
    container = Container.open(plain)
    assert container.sparse == (False, True, True, True)
    assert container.index_kinds == (INDEX_FULL, INDEX_SHARED, INDEX_FULL, INDEX_FULL)


@pytest.mark.parametrize("drop", [".layers.3.", ".indexer.", ".layers.3.self_attn.indexer."])
def test_optional_parts(tmp_path, drop):
    """Without MTP layer or indexers a directory opens, and its notes say what follows."""
    kept = {n: a for n, a in WEIGHTS.items() if drop not in n}
    container = Container.open(shardkit.directory(tmp_path, {"a.safetensors": kept}))
    assert container.has_mtp == (drop != ".layers.3.")
    assert container.has_indexer == (drop != ".indexer.")
    assert len(container.notes) == 1
    if container.has_mtp:
        assert container.index_kinds[-1] == INDEX_NONE


def test_half_a_part_is_an_error(tmp_path):
    """A part that is only half there is missing tensors, not an absent part."""
    for lost in ("model.layers.3.enorm.weight", "model.layers.2.self_attn.indexer.wk.weight",
                 "model.layers.3.self_attn.indexer.wk.weight"):  # fmt: skip
        kept = {name: array for name, array in WEIGHTS.items() if name != lost}
        fails(shardkit.directory(tmp_path, {"a.safetensors": kept}), "1 tensor is missing", lost)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_missing_shard_by_count(tmp_path, lost):
    """Numbering `-of-00003` names the missing file, be it first, middle or last."""
    names = [f"model-{k:05}-of-00003.safetensors" for k in (1, 2, 3)]
    directory = shardkit.directory(tmp_path, shardkit.split(WEIGHTS, names))
    (directory / names[lost - 1]).unlink()
    fails(directory, names[lost - 1], "is missing", str(directory))


def test_missing_shard_by_gap(tmp_path):
    """Numbering `out-00000` names the gap together with the first tensor and its role."""
    names = [f"out-{k:05}.safetensors" for k in range(4)]
    directory = shardkit.directory(tmp_path, shardkit.split(WEIGHTS, names))
    (directory / names[1]).unlink()
    fails(directory, "out-00001.safetensors (gap in the numbering)", "tensors are missing", "layer")


def test_missing_shard_by_index(tmp_path):
    """The index names the file that should hold what is missing."""
    files = shardkit.split(WEIGHTS, ["one.safetensors", "two.safetensors"])
    directory = shardkit.directory(tmp_path, files)
    weights = {name: file for file, arrays in files.items() for name in arrays}
    index = {"weight_map": weights}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    Container.open(directory)
    (directory / "two.safetensors").unlink()
    fails(directory, "two.safetensors (listed in model.safetensors.index.json)")
    (directory / "model.safetensors.index.json").write_text("{broken")
    fails(directory, "no gap in the file numbering")


def test_missing_by_role(tmp_path):
    """A missing tensor is described by layer and role."""
    lost = "model.layers.1.self_attn.kv_b_proj.weight"
    kept = {name: array for name, array in WEIGHTS.items() if name != lost}
    fails(shardkit.directory(tmp_path, {"a.safetensors": kept}), "layer 1 kv_b (attention)", lost)
    kept = {name: array for name, array in WEIGHTS.items() if name != EXPERT}
    fails(shardkit.directory(tmp_path, {"a.safetensors": kept}), "layer 1 routed experts", EXPERT)


def test_no_shards(tmp_path):
    """A directory without weights, or no directory, says what to give."""
    directory = shardkit.directory(tmp_path)
    (directory / "model.safetensors").unlink()
    fails(directory, "no *.safetensors file")


def test_duplicates_across_shards(tmp_path):
    """A tensor in two files is refused with both names."""
    files = {"a.safetensors": WEIGHTS, "b.safetensors": {EXPERT: WEIGHTS[EXPERT]}}
    fails(shardkit.directory(tmp_path, files), "b.safetensors", EXPERT, "also in a.safetensors")


def test_unused_tensors_are_noted(tmp_path):
    """Tensors the model has no use for are ignored, with a note."""
    arrays = WEIGHTS | {"model.layers.3.shared_head.head.weight": WEIGHTS["lm_head.weight"]}
    container = Container.open(shardkit.directory(tmp_path, {"a.safetensors": arrays}))
    assert "shared_head.head.weight" in container.notes[0]


# ---- damaged files ----------------------------------------------------------------------------


def entry(**changes):
    return lambda header: header[EXPERT].update(changes)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (entry(dtype="F31"), "unknown dtype F31"),
        (entry(dtype="F16"), "needs 4096 bytes, its data_offsets span 8192"),
        (entry(dtype=4), "expected dtype, shape and two data_offsets"),
        (entry(shape=[64, 32]), "is [64, 32]; config.json describes [32, 64]"),
        (entry(shape=[2**62, 2**62]), "needs"),
        (entry(shape=[2**64, 0]), "bad shape"),
        (entry(shape=[-32, -64]), "bad shape"),
        (entry(shape=[32.0, 64]), "bad shape"),
        (entry(shape=[True, 2048]), "bad shape"),
        (entry(shape=[1] * 9), "bad shape"),
        (entry(shape="32x64"), "expected dtype, shape"),
        (entry(data_offsets=[0]), "expected dtype, shape"),
        (entry(data_offsets=[8, 0]), "bad data_offsets"),
        (entry(data_offsets=[-8, 0]), "bad data_offsets"),
        (entry(data_offsets=[0, 8192]), "overlaps"),
        (entry(data_offsets=[2**40, 2**40 + 8192]), "leaves a hole"),
        (entry(more=1), "expected dtype, shape"),
        (lambda header: header.pop(EXPERT), "leaves a hole after"),
        (lambda header: header.update({EXPERT: []}), "expected dtype, shape"),
        (lambda header: header.update({"__metadata__": {"a": 1}}), "__metadata__"),
        (lambda header: header.update({"__metadata__": []}), "__metadata__"),
    ],
)
def test_damaged_header(plain, change, fault):
    """Every malformed header entry is named before anything is allocated or read."""
    shardkit.edit(plain / "model.safetensors", change)
    fails(plain, "model.safetensors", fault)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "0 bytes are too few"),
        (bytes(7), "7 bytes are too few"),
        (bytes(4096), "header length is 0"),
        ((2**63).to_bytes(8, "little") + b"{}", "over the limit"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "over the limit"),
        ((1000).to_bytes(8, "little") + b"{}", "998 missing"),
        ((2).to_bytes(8, "little") + b"[]", "does not begin"),
        ((2).to_bytes(8, "little") + b"{}", "holds no tensors"),
        ((3).to_bytes(8, "little") + b"{}\xff", "not UTF-8"),
        ((2).to_bytes(8, "little") + b"{,", "not valid JSON"),
        ((50).to_bytes(8, "little") + b'{"__metadata__":{"a":"b"}}'.ljust(50), "holds no tensors"),
        ((40_006).to_bytes(8, "little") + b'{"a": ' + b"[" * 40_000, "nested too deeply"),
        ((26).to_bytes(8, "little") + b'{"a": {}, "b": {}, "a": 1}', "'a' appears twice"),
    ],
)
def test_damaged_file(plain, content, fault):
    """Zeros, an empty or oversized header, broken JSON or no tensors name the file."""
    (plain / "model.safetensors").write_bytes(content)
    fails(plain, str(plain / "model.safetensors"), fault)


@pytest.mark.parametrize("lost", [1, 4096, 100_000])
def test_truncated_shard_names_missing_bytes(plain, lost):
    """A shard shorter than its header says is refused at once with the bytes it lacks."""
    path = plain / "model.safetensors"
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - lost)
    fails(plain, "model.safetensors", "truncated", f"({lost} missing)")


def test_trailing_bytes(plain):
    """Bytes after the last tensor are refused."""
    with (plain / "model.safetensors").open("ab") as file:
        file.write(b"12345")
    fails(plain, "model.safetensors", "5 bytes follow the last tensor")


def test_fp8_says_convert_first(plain):
    """An FP8 tensor is named with the command that makes it readable."""
    arrays = WEIGHTS | {EXPERT: np.zeros((32, 64), np.uint8)}
    shardkit.write(plain / "model.safetensors", arrays)
    shardkit.edit(plain / "model.safetensors", entry(dtype="F8_E4M3"))
    fails(plain, EXPERT, "F8_E4M3", "colibri convert SRC DST")


def test_nvfp4_says_convert_first(plain):
    """So is an NVFP4 tensor."""
    four = {EXPERT: np.zeros((32, 32), np.uint8), EXPERT + "_scale": np.zeros((32, 4), np.uint8)}
    shardkit.write(plain / "model.safetensors", WEIGHTS | four)
    fails(plain, EXPERT, "is U8: a 4-bit checkpoint", "colibri convert SRC DST")


@pytest.mark.parametrize(
    ("array", "fault"),
    [
        (np.zeros((32, 64), np.float64), "dtype F64 cannot be read"),
        (np.zeros((32, 64), np.uint8), "U8 without scales"),
        (np.zeros((32, 64), np.int8), "I8 without scales"),
    ],
)
def test_unreadable_dtypes(plain, array, fault):
    """Known dtypes that are no matrix of ours are refused, not reinterpreted."""
    shardkit.write(plain / "model.safetensors", WEIGHTS | {EXPERT: array})
    fails(plain, EXPERT, fault)


def test_quantised_vector_is_refused(tmp_path):
    """Norms and biases must be floats."""
    arrays = dict(WEIGHTS)
    arrays["model.norm.weight"] = np.zeros(64, np.uint8)
    arrays["model.norm.weight.qs"] = np.zeros(1, np.float32)
    fails(shardkit.directory(tmp_path, {"a.safetensors": arrays}), "model.norm.weight", "vector")


def test_floats_with_scales_are_refused(tmp_path):
    """A float tensor with scales beside it is ambiguous and refused."""
    arrays = WEIGHTS | {EXPERT + ".qs": np.zeros(32, np.float32)}
    fails(shardkit.directory(tmp_path, {"a.safetensors": arrays}), EXPERT, ".qs")


# ---- our own layout, damaged ------------------------------------------------------------------


def metadata(key: str, change):
    """An edit of one JSON section of the metadata."""

    def apply(header):
        section = json.loads(header["__metadata__"][key])
        change(section)
        header["__metadata__"][key] = json.dumps(section)

    return apply


RECORDS = "model.layers.1.mlp.experts.records"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def up(**changes):
    return metadata("experts", lambda section: section[RECORDS]["up"].update(changes))


def o_proj(**changes):
    return metadata("tensors", lambda section: section[O_PROJ].update(changes))


@pytest.mark.parametrize(
    ("file", "change", "fault"),
    [
        ("experts", up(offset=4096), "offset 4096 does not lie in a record"),
        ("experts", up(offset=-64), "offset -64 does not lie"),
        ("experts", up(offset=True), "offset True does not lie"),
        ("experts", up(offset=10**30), "does not lie in a record"),
        ("experts", up(scales=4095), "scales 4095 does not lie"),
        ("experts", up(scales=None), "scales None does not lie"),
        ("experts", up(format="int5"), "is not a format"),
        ("experts", up(format="bf16"), "is not a format"),
        ("experts", up(format="int8"), "does not lie in a record"),
        ("experts", up(group=63), "is not a format"),
        ("experts", up(group=8.0), "is not a format"),
        ("experts", up(scale="int8"), "is not a format"),
        ("experts", metadata("experts", lambda s: s[RECORDS].pop("up")), "None is not a format"),
        ("experts", metadata("experts", lambda s: s.pop(RECORDS)), "does not describe it"),
        ("experts", lambda h: h["__metadata__"].update(experts="["), "not valid JSON"),
        ("experts", lambda h: h["__metadata__"].update(experts="\ud800"), "not UTF-8"),
        ("experts", lambda h: h["__metadata__"].update(format_version="2"), "version '2'"),
        ("experts", lambda h: h["__metadata__"].pop("format"), "does not describe it"),
        ("experts", lambda h: h[RECORDS].update(shape=[2, 2 * h[RECORDS]["shape"][1]]), "[4, rec"),
        ("dense", o_proj(format="int4"), "is U8"),
        ("dense", o_proj(group=16), "needs F16 [64, 4]"),
        ("dense", o_proj(scale="f32"), "needs F32 [64, 1]"),
        ("dense", o_proj(format="f32"), "is not a format"),
        ("dense", lambda h: h["__metadata__"].pop("tensors"), "without scales"),
    ],
)
def test_damaged_own_layout(own, file, change, fault):
    """Metadata of our own that does not fit the bytes is refused, never followed."""
    shardkit.edit(own / f"{file}-00001-of-00001.safetensors", change)
    fails(own, file, fault)


def test_records_must_be_aligned(own):
    """Records that are not at multiples of 4096 are refused: one expert is one aligned read."""
    path = own / "experts-00001-of-00001.safetensors"
    shardkit.edit(path, lambda header: header["__metadata__"].update(pad="x"), align=False)
    fails(own, "experts", "not aligned to 4096")


def test_own_scales_missing(own):
    """A quantised tensor of ours without its scales is named."""
    path = own / "dense-00001-of-00001.safetensors"

    def rename(header):
        header["elsewhere"] = header.pop(O_PROJ + ".scales")

    shardkit.edit(path, rename)
    fails(own, O_PROJ, f"{O_PROJ}.scales is missing")


# ---- colibri info -----------------------------------------------------------------------------


def test_info_adds_up(own, plain, tmp_path):
    """Parts sum to the bytes of the files; counts of weights are the checkpoint's."""
    small = shardkit.directory(tmp_path / "public", {"a.safetensors": public(Format(Kind.INT4))})
    for directory in (own, plain, small):
        info = describe(directory)
        files = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        assert sum(part.nbytes for part in info.parts) == info.file_bytes == files
        assert sum(p.parameters for p in info.parts) == sum(a.size for a in WEIGHTS.values())
        assert json.loads(json.dumps(info.as_dict()))["layout"] == info.layout
    expert = 3 * 32 * 64 * 4
    info = describe(plain)
    assert (info.expert_bytes, info.experts_per_token) == (expert, 4)
    assert (info.cold_bytes, info.mtp_cold_bytes) == (4 * expert, 2 * expert)
    dense = sum(
        a.nbytes for n, a in WEIGHTS.items() if ".experts." not in n and ".layers.3." not in n
    )
    table = WEIGHTS["model.embed_tokens.weight"].nbytes
    assert info.dense_bytes == dense - table + table // shardkit.SMALL["vocab_size"]


def test_info_in_words(own, tmp_path):
    """The text names formats, parts, the cold token and what is missing."""
    text = render(describe(own))
    for word in ("int4-g64-f16", "int8-f16", "experts", "mtp", "from disk", "layout: colibri",
                 "MTP layer", "2 layers select, 1 share"):  # fmt: skip
        assert word in text
    kept = {n: a for n, a in WEIGHTS.items() if ".indexer." not in n and ".layers.3." not in n}
    text = render(describe(shardkit.directory(tmp_path / "a", {"a.safetensors": kept})))
    assert "note: no MTP layer" in text and "note: no indexers" in text


def test_fingerprint(own, plain):
    """The fingerprint is stable, and another container or configuration has another."""
    first = Container.open(own).fingerprint
    assert first == Container.open(own).fingerprint != Container.open(plain).fingerprint
    (own / "config.json").write_text(json.dumps(SMALL | {"index_topk": 9}))
    assert Container.open(own).fingerprint != first


def test_a_fingerprint_is_of_weights(own, monkeypatch):
    """It is the same by every path, and whatever is said to end an answer."""
    monkeypatch.chdir(own.parent)
    found = {Container.open(own).fingerprint}
    for stops in (None, 5, [5, 6]):
        (own / "config.json").write_text(json.dumps(SMALL | {"eos_token_id": stops}))
        found |= {Container.open(path).fingerprint for path in (own, own.name)}
    assert len(found) == 1


def test_a_shard_whose_name_is_no_text(own):
    """A file name with a byte that is not UTF-8 is a name like any other."""
    first = Container.open(own).fingerprint
    old = next(own.glob("*.safetensors"))
    old.rename(own / os.fsdecode(b"x\xff.safetensors"))
    assert Container.open(own).fingerprint != first
