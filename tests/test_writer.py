"""The writer: files the safetensors library opens, aligned, checksummed, whole or not there."""

from __future__ import annotations

import errno
import json
import os
import zlib

import numpy as np
import pytest
import shardkit
from safetensors import safe_open

from colibri.errors import ContainerError
from colibri.layout import TensorSpec
from colibri.shard import read_shard
from colibri.writer import ShardWriter, write_file

RECORDS = TensorSpec("records", "U8", (3, 4096), 4096)
SPECS = [
    RECORDS,
    TensorSpec("norm", "F32", (5,), 20),
    TensorSpec("scales", "F16", (3, 1), 6),
    TensorSpec("codes", "I8", (3, 7), 21),
    TensorSpec("empty", "U8", (0, 4), 0),
]
ARRAYS = {
    "records": np.random.default_rng(1).integers(0, 256, (3, 4096), dtype=np.uint8),
    "norm": np.arange(5, dtype=np.float32),
    "scales": np.arange(3, dtype=np.float16).reshape(3, 1),
    "codes": np.arange(21, dtype=np.int8).reshape(3, 7) - np.int8(9),
    "empty": np.empty((0, 4), np.uint8),
}


def fill(writer: ShardWriter, skip: str = "") -> None:
    """Write every tensor but one; records last expert first."""
    for name in ("codes", "norm", "scales"):
        if name != skip:
            writer.write(name, ARRAYS[name])
    for expert in (2, 0, 1):
        if skip != "records" or expert:
            writer.write("records", ARRAYS["records"][expert], expert)


def test_official_library_reads_it(tmp_path):
    """The safetensors library opens the file and finds every tensor as it was given."""
    path = tmp_path / "a.safetensors"
    with ShardWriter(path, SPECS, {"format": "colibri"}) as writer:
        fill(writer)
    with safe_open(path, "numpy") as file:
        assert file.metadata()["format"] == "colibri"
        assert set(file.keys()) == set(ARRAYS)
        for name, array in ARRAYS.items():
            got = file.get_tensor(name)
            assert got.dtype == array.dtype and got.tobytes() == array.tobytes()


def test_layout_and_checksums(tmp_path):
    """Data begins at a multiple of 4096 in the order of the specs; each piece has its CRC-32."""
    path = tmp_path / "a.safetensors"
    with ShardWriter(path, SPECS, {}) as writer:
        fill(writer)
    shard = read_shard(path)
    assert shard.data % 4096 == 0
    assert [t.name for t in sorted(shard.tensors, key=lambda t: t.offset)][:4] == [
        "records", "norm", "scales", "codes",
    ]  # fmt: skip
    sums = json.loads(shard.metadata["checksums"])
    raw = path.read_bytes()
    for tensor in shard.tensors:
        piece = sums[tensor.name]["piece"]
        ends = range(tensor.offset, tensor.offset + tensor.nbytes, piece) if piece else []
        expected = "".join(f"{zlib.crc32(raw[at : at + piece]):08x}" for at in ends)
        assert sums[tensor.name]["crc32"] == expected


def test_same_bytes_whatever_the_order(tmp_path):
    """The file does not depend on the order in which pieces were written."""
    for name in ("a", "b"):
        with ShardWriter(tmp_path / name, SPECS, {"k": "v"}) as writer:
            if name == "a":
                fill(writer)
            else:
                for expert in range(3):
                    writer.write("records", ARRAYS["records"][expert].tobytes(), expert)
                fill_rest(writer)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def fill_rest(writer: ShardWriter) -> None:
    for name in ("norm", "scales", "codes"):
        writer.write(name, ARRAYS[name].tobytes())


@pytest.mark.parametrize("skip", ["norm", "records"])
def test_unfinished_file_is_not_left(tmp_path, skip):
    """A tensor or piece that was never written is an error, and nothing is left behind."""
    with (
        pytest.raises(ContainerError, match=f"not written, first {skip}"),
        ShardWriter(tmp_path / "a.safetensors", SPECS, {}) as writer,
    ):
        fill(writer, skip)
    assert not list(tmp_path.iterdir())


def test_exception_leaves_the_old_file(tmp_path):
    """An exception half way leaves an earlier file of that name untouched and no other."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), ShardWriter(path, SPECS, {}) as writer:
        writer.write("norm", ARRAYS["norm"])
        assert [p.name for p in tmp_path.glob("*.safetensors")] == ["a.safetensors"]
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_wrong_pieces_are_refused(tmp_path):
    """A piece of the wrong size, out of range or written twice is an error."""
    with (
        pytest.raises(ContainerError, match="written before"),
        ShardWriter(tmp_path / "a", SPECS, {}) as writer,
    ):
        with pytest.raises(ContainerError, match="19 bytes are not the 20 it has"):
            writer.write("norm", b"x" * 19)
        with pytest.raises(ContainerError, match="4095 bytes are not piece 0 of 12288"):
            writer.write("records", b"x" * 4095, 0)
        with pytest.raises(ContainerError, match="are not piece 3"):
            writer.write("records", ARRAYS["records"][0], 3)
        with pytest.raises(ContainerError, match="are not piece -1"):
            writer.write("records", ARRAYS["records"][0], -1)
        writer.write("norm", ARRAYS["norm"])
        writer.write("norm", ARRAYS["norm"])


def test_short_writes_are_completed(tmp_path, monkeypatch):
    """A kernel that writes a few bytes at a time still gives the whole file."""
    plain = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: plain(fd, view[:1000], at))
    path = tmp_path / "a.safetensors"
    with ShardWriter(path, SPECS, {}) as writer:
        fill(writer)
    with safe_open(path, "numpy") as file:
        assert file.get_tensor("records").tobytes() == ARRAYS["records"].tobytes()


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_full_disk_is_an_error_that_leaves_nothing(tmp_path, monkeypatch, call):
    """ENOSPC at a write or at the final sync names the file and removes the partial one."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    path = tmp_path / "a.safetensors"
    with (
        pytest.raises(ContainerError, match=r"a\.safetensors: cannot be written: No space"),
        ShardWriter(path, SPECS, {}) as writer,
    ):
        fill(writer)
    with pytest.raises(ContainerError, match=r"b\.json: cannot be written: No space"):
        if call == "pwrite":
            monkeypatch.setattr(os, "fsync", full)
        write_file(tmp_path / "b.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_missing_directory(tmp_path):
    """A directory that is not there is a ContainerError with the path."""
    with (
        pytest.raises(ContainerError, match=r"none.a: cannot be written"),
        ShardWriter(tmp_path / "none" / "a", SPECS, {}),
    ):
        pass


def test_duplicate_names_are_refused(tmp_path):
    """Two specs of one name are refused before anything is written."""
    with pytest.raises(ContainerError, match="one name"):
        ShardWriter(tmp_path / "a", [RECORDS, RECORDS], {})


def test_readers_ignore_the_partial_file(tmp_path):
    """A directory with a file in the making opens as if it were not there."""
    from colibri.container import Container

    directory = shardkit.directory(tmp_path)
    with (
        pytest.raises(RuntimeError),
        ShardWriter(directory / "b.safetensors", SPECS, {}) as writer,
    ):
        writer.write("norm", ARRAYS["norm"])
        assert len(Container.open(directory).shards) == 1
        raise RuntimeError
