"""colibri verify: what is whole is called whole, and every kind of damage is told with the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fourbit
import fp8
import numpy as np
import pytest
import shardkit
import text_fixtures

from colibri.convert import convert_directory, repack_directory
from colibri.convert.manifest import WorkDirectory
from colibri.errors import Exit
from colibri.shard import read_shard
from colibri.verify import verify

EXPERTS = "experts-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A finished conversion with all its files."""
    base = tmp_path_factory.mktemp("verify")
    source = shardkit.directory(base / "source")
    (source / "generation_config.json").write_text("{}")
    text_fixtures.write_bytes(source)
    convert_directory(source, base / "own")
    return base / "own"


@pytest.fixture
def copy(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def faults(directory: Path, deep: bool = False) -> str:
    """All faults as one text; there must be some."""
    verdict = verify(directory, deep)
    assert not verdict.is_whole
    return "\n".join(verdict.faults)


def test_whole(good):
    """A finished conversion is whole; the counts are told, and with --deep every byte compared."""
    verdict = verify(good, deep=True, threads=2)
    assert verdict.is_whole and not verdict.warnings
    assert "3 layers and the MTP layer, 12 experts" in verdict.facts[0]
    assert "kB compared with their checksums" in verdict.facts[1]
    assert "without" not in verdict.facts[1]


def test_every_form_can_be_verified(good, tmp_path):
    """Float, FP8 and NVFP4 checkpoints too; ours are compared even in the public layout."""
    plain = shardkit.directory(tmp_path / "plain")
    eight = shardkit.directory(tmp_path / "fp8", {"a.safetensors": fp8.checkpoint()[0]}, fp8.CONFIG)
    stored = {"a.safetensors": fourbit.modelopt()[0]}
    four = shardkit.directory(tmp_path / "four", stored, fourbit.CONFIG)
    repack_directory(good, tmp_path / "public", "public")
    for directory, word in (
        (plain, "without"),
        (eight, "without"),
        (four, "without"),
        (tmp_path / "public", "compared"),
    ):
        verdict = verify(directory, deep=True)
        assert verdict.is_whole and word in verdict.facts[1]


@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_one_flipped_bit_anywhere(copy, at):
    """A flipped bit is invisible to the quick look and found by the deep one: file and tensor."""
    for path in sorted(copy.glob("*.safetensors")):
        tensors = sorted(read_shard(path).tensors, key=lambda t: t.offset)
        tensor = {"first": tensors[0], "middle": tensors[len(tensors) // 2], "last": tensors[-1]}[
            at
        ]
        raw = bytearray(path.read_bytes())
        place = (
            tensor.offset
            + {"first": 0, "middle": tensor.nbytes // 2, "last": tensor.nbytes - 1}[at]
        )
        raw[place] ^= 16
        path.write_bytes(raw)
        assert verify(copy).is_whole
        text = faults(copy, deep=True)
        assert text.count("\n") == 0 and str(path) in text and tensor.name in text
        assert "checksum differs" in text and f"Remove {path.name} and run the conversion" in text
        raw[place] ^= 16
        path.write_bytes(raw)


def test_which_expert(copy):
    """Damage in the records is told by expert."""
    path = copy / EXPERTS
    records = next(t for t in read_shard(path).tensors if "layers.2." in t.name)
    raw = bytearray(path.read_bytes())
    raw[records.offset + 3 * records.shape[1] + 5] ^= 1
    path.write_bytes(raw)
    assert "model.layers.2.mlp.experts.records, piece 3, is damaged" in faults(copy, deep=True)


def test_repair(copy, good):
    """Doing what verify says makes the directory whole again."""
    path = copy / EXPERTS
    path.write_bytes(path.read_bytes()[:-5])
    text = faults(copy)
    assert "truncated" in text and "(5 missing)" in text and f"Remove {EXPERTS}" in text
    path.unlink()
    text = faults(copy)
    assert f"{path}: is missing" in text
    convert_directory(good.with_name("source"), copy)
    assert verify(copy, deep=True).is_whole
    assert path.read_bytes() == (good / EXPERTS).read_bytes()


def test_damage_is_told_file_by_file(copy):
    """Two bad files are two faults, each with its name."""
    names = sorted(path.name for path in copy.glob("*.safetensors"))[:2]
    (copy / names[0]).write_bytes(bytes(100))
    (copy / names[1]).write_bytes((copy / names[1]).read_bytes() + b"x")
    text = faults(copy)
    assert f"{names[0]}: header length is 0" in text
    assert f"{names[1]}: 1 bytes follow the last tensor" in text


@pytest.mark.parametrize("table", ["null", "[]", '{"a": ["b"]}', '{"a": null}'])
def test_an_index_that_is_no_table(copy, table):
    """Whatever stands in the index is a fault and no traceback."""
    (copy / "model.safetensors.index.json").write_text(f'{{"weight_map": {table}}}')
    assert "no table of file names" in faults(copy)


def test_files_that_do_not_belong_together(copy, tmp_path):
    """An index that disagrees with the files, a strange file and a missing config are
    faults."""
    index = copy / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    text = json.dumps(
        fields | {"weight_map": fields["weight_map"] | {"model.norm.weight": EXPERTS}}
    )
    index.write_text(text)
    assert "disagrees with the files about model.norm.weight" in faults(copy)
    index.write_text("{")
    assert f"{index}: not valid JSON" in faults(copy)
    index.write_text(json.dumps(fields))
    shardkit.write(copy / "z.safetensors", {"strange": np.zeros(4, np.float32)})
    assert "disagrees with the files about strange" in faults(copy)
    (copy / "z.safetensors").unlink()
    (copy / "config.json").write_text("{")
    assert faults(copy).count("config.json") == 1
    (copy / "config.json").unlink()
    assert "config.json: is missing" in faults(copy) and faults(copy).count("config.json") == 1
    assert "holds no *.safetensors file" in faults(tmp_path)


def test_without_a_tokenizer(command, copy):
    """It may be meant so: whole, and said to be of no use to what reads and writes text."""
    (copy / "tokenizer.json").unlink()
    verdict = verify(copy)
    assert verdict.is_whole and "tokenizer.json: is missing" in verdict.warnings[0]
    status, out, _ = command("verify", str(copy))
    last = out.splitlines()[-1]
    assert status == Exit.OK and last.startswith(f"{copy}: whole, but run, chat, serve and score ")
    assert last.endswith("cannot use it: tokenizer.json is missing")


def _directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("tokenizer.json", _directory, "cannot be read: Is a directory"),
        ("tokenizer.json", lambda path: path.write_text("{"), "not valid JSON"),
        ("tokenizer.json", lambda path: path.write_text("{}"), "no model with a vocabulary"),
        ("tokenizer.json", lambda path: grow(path), "has 257 tokens, the model 256"),
        ("chat_template.jinja", _directory, "Is a directory"),
        ("chat_template.jinja", lambda path: path.write_bytes(b"caf\xe9"), "cannot be read"),
        ("chat_template.jinja", lambda path: path.write_text("{% if %}"), "chat_template.jinja"),
        ("tokenizer_config.json", lambda path: path.write_text("["), "not valid JSON"),
        ("generation_config.json", _directory, "cannot be read: Is a directory"),
        ("generation_config.json", lambda path: path.write_text('{"top_p": 7}'), "top_p is 7"),
    ],
)
def test_files_beside_the_weights(command, copy, name, damage, message):
    """What `run` could not open is a fault here, told with the file."""
    damage(copy / name)
    text = faults(copy)
    assert str(copy) in text and message in text and text.count("\n") == 0
    told = command("run", str(copy), "-p", "Hi")
    assert told.status == Exit.ERROR and message in told.err


def test_a_configuration_that_cannot_be_read(copy, tmp_path):
    """It is a fault of a container, and of a checkpoint in codes."""
    stored = {"a.safetensors": fp8.checkpoint()[0]}
    codes = shardkit.directory(tmp_path / "fp8", stored, fp8.CONFIG)
    for place in (copy, codes):
        _directory(place / "config.json")
        assert f"{place / 'config.json'}: cannot be read: Is a directory" in faults(place)


@pytest.mark.parametrize("source", ["", "\n\n", "[gMASK]<sop>", "{% for m in messages %}"
                                              "{{ m.role }}{% endfor %}"])  # fmt: skip
def test_a_template_that_says_nothing(copy, source):
    """A template that compiles and shows nothing of a conversation is a fault; one that cannot
    render it is too."""
    path = copy / "chat_template.jinja"
    path.write_text(source)
    assert faults(copy).startswith(f"{path}: makes nothing of what is said to it")
    path.write_text("{{ raise_exception('never') }}")
    assert f"{path}: the chat template cannot render" in faults(copy)
    path.write_text("{{ messages[0].content }}")
    assert verify(copy).is_whole


def grow(path: Path) -> None:
    """One token more than the model has rows."""
    raw = json.loads(path.read_text())
    raw["model"]["vocab"]["more"] = 256
    path.write_text(json.dumps(raw))


def test_unfinished_conversion(copy):
    """A directory into which a conversion has not ended is not whole."""
    WorkDirectory(copy).unlock()
    assert "a conversion into it has not ended" in faults(copy)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('\\"piece\\":', '\\"piecf\\":', "is no checksum"),
        ('\\"crc32\\":\\"', '\\"crc32\\":\\"00000000', "sums, not"),
        ('\\"crc32\\":\\"', '\\"crc32\\":\\"zzzzzzzz', "sums, not"),
        ('{\\"piece\\":', '{\\"piece\\":-', "is no checksum"),
        ('"checksums": "{', '"checksums": "[', "not valid JSON"),
        ('"checksums": "{', '"checksums": "\\ud800{', "not UTF-8"),
        ("layers.1.mlp.experts.records\\", "layers.1.mlp.experts.recordz\\", "has none"),
    ],
)  # fmt: skip
def test_bad_checksums(copy, old, new, message):
    """Checksums that make no sense are a fault of their file, never a crash."""
    header, data = shardkit.load(copy / EXPERTS)
    text = json.dumps(header)
    assert old in text
    at = text.index('"checksums"')
    changed = text[:at] + text[at:].replace(old, new, 1)
    changed = changed.ljust(-(-(len(changed) + 8) // 4096) * 4096 - 8)
    shardkit.store(copy / EXPERTS, changed.encode(), data)
    text = faults(copy, deep=True)
    assert message in text and EXPERTS in text


def test_command(command, good, copy):
    """The command prints what it found, and its exit status is 0 only for what is whole."""
    status, out, err = command("verify", str(good), "--deep")
    assert (status, err) == (Exit.OK, "") and out.endswith(f"{good}: whole\n")
    (copy / EXPERTS).unlink()
    status, out, err = command("verify", str(copy))
    assert status == Exit.ERROR and f"colibri: fault: {copy / EXPERTS}: is missing" in err
    assert "whole" not in out
    assert command("verify", str(copy / "nowhere")).status == Exit.USAGE
