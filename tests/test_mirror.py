"""Copies on other drives: they share the reads, change no bit, and what is no copy is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import tiny
from colibri._core import lib

from colibri import demo, machine
from colibri.container import Container
from colibri.convert import Formats, convert_directory
from colibri.errors import ContainerError, Exit, UsageError
from colibri.formats import Format
from colibri.machine import Disk, DiskWay
from colibri.mirror import MOST, directories
from colibri.model import Model
from colibri.reading import choose
from colibri.session import Session
from colibri.state import State
from colibri.verify import verify

PROMPT = [(7 * i + 3) % 251 for i in range(24)]
WIDE = tiny.ONE_GROUP | {  # an expert of int8 has 1.6 MB: two pieces
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "hidden_size": 1024,
    "moe_intermediate_size": 520, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "indexer_types": ["full", "full"], "num_nextn_predict_layers": 0,
}  # fmt: skip
MANY = tiny.GROUPS | {"num_hidden_layers": 4, "indexer_types": ["full"] * 4}


@pytest.fixture(scope="module", params=["large experts", "small experts"])
def own(request, tmp_path_factory) -> Path:
    """A model whose experts take several reads each; one with an MTP layer's and small ones."""
    base = tmp_path_factory.mktemp("mirror")
    shape, form = (WIDE, "int8") if request.param == "large experts" else (MANY, "int4-g8")
    tiny.write(base / "plain", shape, seed=8)
    convert_directory(base / "plain", base / "own", Formats(experts=Format.parse(form)))
    return base / "own"


@pytest.fixture
def copies(own, tmp_path) -> list[Path]:
    """As many mirrors as there may be, each with every file of the model."""
    names = [tmp_path / f"drive {number}" for number in range(MOST)]
    return [Path(shutil.copytree(own, name)) for name in names]


def run(
    container: Container, io: str, slots: int, threads: int = 1, pilot: str = "router"
) -> tuple[bytes, dict[str, int]]:
    """Logits of a prompt and of two rows more, with what was counted."""
    model = Model.open(container, threads=threads)
    model.set_residency(io, slots, pilot)
    session = Session(model, 64, 8)
    seen = session.prefill(PROMPT).tobytes() + session.step_all([5, 6]).tobytes()
    return seen, session.counters()


def test_every_way_of_sharing_gives_the_same_bits(own, copies):
    """With 0 to 3 mirrors, past the page cache and through it, in few slots and many."""
    plain, counted = run(Container.open(own), "mmap", 0)
    assert counted["mirror_bytes"] == 0
    for count in (1, 2, MOST):
        container = Container.open(own, copies[:count])
        for io, slots, threads in (("direct", 2, 1), ("direct", 9, 2), ("buffered", 3, 1)):
            seen, counted = run(container, io, slots, threads)
            assert seen == plain and counted["repeated_reads"] == 0
            shared = io == "direct" or own.joinpath(experts_file(own)).stat().st_size > 2 << 20
            assert (counted["mirror_bytes"] > 0) == shared
        seen, counted = run(container, "direct", 2, pilot="off")
        assert seen == plain and 0 < counted["mirror_bytes"] < counted["read_bytes"]
    assert run(Container.open(own, copies), "mmap", 0)[1]["mirror_bytes"] == 0


def test_a_mirror_may_have_some_of_the_files(own, copies):
    """Files that it lacks are read from the model's own directory."""
    container = Container.open(own)
    names = [container.shards[number].path.name for number in container.expert_shards]
    plain = run(container, "direct", 2)[0]
    for name in names:
        for path in copies[0].iterdir():
            path.unlink()
        shutil.copy(own / name, copies[0])
        container = Container.open(own, copies[:1])
        assert [path.name for path in container.mirrors[0].files.values()] == [name]
        assert run(container, "direct", 2)[0] == plain


@pytest.mark.parametrize("rest", [0, 1000])
def test_what_one_drive_cannot_read_another_does(own, copies, rest):
    """A file cut while the model runs, the mirror's or its own, before a read or within one, costs
    repeated reads and no bit."""
    plain = run(Container.open(own), "direct", 2)[0]
    moved = shutil.copytree(own, copies[0].parent / "moved")
    container = Container.open(moved, copies[:1])
    for victim in (copies[0], moved):
        model = Model.open(container)
        model.set_residency("direct", 2)
        kept = {}
        for number in container.expert_shards:
            path = victim / container.shards[number].path.name
            kept[path] = path.read_bytes()
            os.truncate(path, 8 + int.from_bytes(kept[path][:8], "little") + rest)
        session = Session(model, 64, 8)
        seen = session.prefill(PROMPT).tobytes() + session.step_all([5, 6]).tobytes()
        most = 6 * len(
            container.expert_shards
        )  # those in flight (CLB_READS): then it is left alone
        assert seen == plain and 0 < session.counters()["repeated_reads"] <= most
        for path, data in kept.items():
            path.write_bytes(data)


def test_the_core_checks_a_copy(own, copies):
    """Its size, its place, and that there is no other; a refused one leaves the model usable."""
    model = Model.open(Container.open(own))
    error = machine.ffi.new("clb_error *")
    short = copies[0] / "short"
    short.write_bytes(b"x")
    whole = os.fsencode(copies[0] / model.container.shards[0].path.name)
    for shard, drive, path in (
        (0, 1, os.fsencode(short)), (0, 1, b"/nowhere"), (0, 0, whole), (0, MOST + 1, whole),
        (99, 1, whole), (-1, 1, whole),
    ):  # fmt: skip
        assert lib.clb_model_add_copy(model.handle, shard, drive, path, error) != 0
    assert lib.clb_model_add_copy(model.handle, 0, 1, whole, error) == 0
    assert lib.clb_model_add_copy(model.handle, 0, 1, whole, error) != 0
    assert lib.CLB_DRIVES - 1 == MOST


# ---- what is no copy ----------------------------------------------------------------------------


def experts_file(own: Path) -> str:
    """Name of the file that holds the main layers' experts."""
    return next(path.name for path in sorted(own.glob("experts-*")))


def test_a_mirror_without_copies(own, tmp_path):
    """An empty directory, and one with other files, are told with what belongs there."""
    (tmp_path / "other.safetensors").write_bytes(b"x")
    with pytest.raises(ContainerError, match="holds no copy of the model's files") as told:
        Container.open(own, [tmp_path])
    assert str(own / experts_file(own)) in str(told.value)


@pytest.mark.parametrize("damage", ["short", "header", "tail", "middle"])
def test_files_that_differ_are_refused(own, copies, damage):
    """A copy that ended early, of another conversion, or not written to its end."""
    path = copies[0] / experts_file(own)
    data = bytearray(path.read_bytes())
    size = len(data)
    if damage == "short":
        del data[-4096:]
    elif damage == "header":
        at = data.index(b"crc32") + 10
        data[at] ^= 1
    elif damage == "tail":
        data[-5000:] = bytes(5000)
    else:
        data[size // 4 :] = data[: size - size // 4]
    path.write_bytes(data)
    fault = {"short": "bytes, and", "header": "another header"}.get(damage, "other bytes")
    with pytest.raises(ContainerError, match=fault) as told:
        Container.open(own, copies[:1])
    assert str(path) in str(told.value) and "copy it again" in str(told.value)


def test_directories(tmp_path):
    """Several with colons between them; too many, and what is no directory, are refused."""
    names = [tmp_path / name for name in "abcd"]
    for path in names[:MOST]:
        path.mkdir()
    assert directories(None) == directories("") == []
    assert directories(f"{names[0]}:{names[1]}:") == names[:2]
    with pytest.raises(UsageError, match="4 directories; expected 3"):
        directories(":".join(map(str, names)))
    with pytest.raises(UsageError, match="is no directory; make it"):
        directories(str(names[MOST]))


# ---- around it ----------------------------------------------------------------------------------


def test_deep_verification_reads_copies(own, copies):
    """A flipped bit that no sample meets is found, and the file to copy again is named."""
    path = copies[1] / experts_file(own)
    whole = verify(own, deep=True, mirrors=copies[:2])
    assert whole.is_whole and any(str(copies[1]) in fact for fact in whole.facts)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 3)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert verify(own, mirrors=copies[:2]).is_whole
    found = verify(own, deep=True, mirrors=copies[:2])
    assert len(found.faults) == 1 and "checksum differs" in found.faults[0]
    assert f"Copy {own / path.name} there again" in found.faults[0]
    path.unlink()
    path.write_bytes(b"short")
    assert "copy it again" in verify(own, mirrors=[copies[1]]).faults[0]


def test_mapping_is_not_chosen_beside_a_mirror(own, copies, tmp_path):
    """Mapped pages come from one drive, however fast that is."""
    rates = {"direct": 1e9, "buffered": 1.1e9, "mmap": 5e9}
    state = State(tmp_path / "state", lambda text: pytest.fail(text))
    assert choose(Container.open(own), state, lambda container: rates) == "mmap"
    assert choose(Container.open(own, copies[:1]), state, lambda container: rates) == "direct"


def test_all_drives_are_measured_together(own, copies, monkeypatch):
    """The rate of a mirrored disk is that of all drives at once."""
    container = Container.open(own, copies[:2])
    seen = []

    def measured(self, way, path, places):
        seen.append(path)
        return 1e9

    monkeypatch.setattr(Disk, "_measure", measured)
    size = machine.record_bytes(container)
    assert Disk.of_container(container, size).measure(DiskWay(True, 4096, 1)) == 3e9
    assert {path.parent for path in seen} == {own, *copies[:2]}
    alone = Disk.of_container(container, size, mirrored=False)
    assert alone.measure(DiskWay(True, 4096, 1)) == 1e9


def test_commands_take_mirrors(command, tmp_path):
    """run shares its reads and says so; a mirror on the same drive, or none at all, is told."""
    arguments = ("run", "-p", "Tell me a story about a fox.", "--temp", "0", "-n", "30")
    streamed = (*arguments, "--io", "direct", "--ram", "110M", "--ctx", "128", "--stats")
    plain = command(*streamed)
    for path in demo.MODEL.glob("experts-*"):
        shutil.copy(path, tmp_path)
    shared = command(*streamed, "--mirror", str(tmp_path))
    assert (plain.status, shared.status) == (Exit.OK, Exit.OK) and shared.out == plain.out
    assert "from mirrors" in shared.err and "from mirrors" not in plain.err
    same = tmp_path.stat().st_dev == demo.MODEL.stat().st_dev
    assert ("is on the same drive as the model" in shared.err) == same
    nowhere = command(*arguments, "--mirror", str(tmp_path / "nowhere"))
    assert nowhere.status == Exit.USAGE and nowhere.err.count("\n") == 1
    done = command("verify", str(demo.MODEL), "--mirror", str(tmp_path))
    assert done.status == Exit.OK and f"1 file of them in {tmp_path} too" in done.out
