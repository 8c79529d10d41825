"""Conversions that are interrupted: the next run gives the very bytes of one that never was."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import crash
import pytest
import shardkit

from colibri.container import Container
from colibri.convert import convert_directory, runner
from colibri.convert.conversion import execute
from colibri.convert.manifest import (
    Journal,
    WorkDirectory,
    load_journal,
    read_record,
    write_manifest,
)
from colibri.convert.plan import Request
from colibri.convert.planner import make_plan
from colibri.errors import ContainerError, UsageError
from colibri.formats import Format
from colibri.layout import Formats
from colibri.quantize import bf16_from_f32

MIXED = Formats(*map(Format.parse, ("int4-g32", "int8-f32", "int8", "int8-g16")))
SMALLER = Formats(*[Format.parse("int4-g64")] * 4)
UNIT = 30_000  # bytes of source: many groups in a small checkpoint
SHARDS = 3
_BF16 = {name: bf16_from_f32(array) for name, array in shardkit.weights().items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    names = [f"model-{k:05}-of-{SHARDS:05}.safetensors" for k in range(1, SHARDS + 1)]
    files = shardkit.split(_BF16, names)
    directory = shardkit.directory(tmp_path_factory.mktemp("source"), files)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def run(source: Path, target: Path, delete: bool = False, threads: int = 2, **more) -> None:
    request = Request(str(source), target, MIXED, delete_source=delete, **more)
    execute(make_plan(request), threads, unit_bytes=UNIT)


def tree(directory: Path) -> dict[str, bytes]:
    """Every file, however deep, but the record of where the source lay."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "conversion.json"
    }


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> dict[str, bytes]:
    """What an undisturbed conversion writes."""
    target = tmp_path_factory.mktemp("whole") / "out"
    run(source, target)
    return tree(target)


def events_of(source: Path, target: Path) -> int:
    """How many times an undisturbed conversion writes, syncs or renames; once in this process."""
    disk = crash.Disk(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", disk.pwrite)
        patch.setattr(os, "fsync", disk.fsync)
        run(source, target, threads=1)
    return disk.events


def test_threads_and_groups_change_nothing(source, tmp_path, whole):
    """One thread or three, large groups or small: the same bytes."""
    run(source, tmp_path / "a", threads=1)
    execute(make_plan(Request(str(source), tmp_path / "b", MIXED)), 3)
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == whole


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("delete", [False, True], ids=["keep", "delete"])
def test_killed_anywhere(source, tmp_path, whole, delete, power):
    """Killed at 6 random writes, syncs or renames, or cut off from power there: the next run
    completes to identical files. Twice, half of the time, before it may complete."""
    rng = random.Random(f"{delete} {power}")
    events = events_of(source, tmp_path / "count")
    for round_ in range(6):
        mine, target = tmp_path / f"source{round_}", tmp_path / f"out{round_}"
        shutil.copytree(source, mine)
        for _ in range(rng.choice((1, 2))):
            disk = crash.Disk(rng.randrange(1, events), rng if power else None)
            status = crash.in_child(lambda a=mine, b=target: run(a, b, delete), disk)
            assert status in (crash.KILLED, 0)
            if status == 0:
                break
        else:
            run(mine, target, delete)
        assert tree(target) == whole
        assert len(list(mine.glob("*.safetensors"))) == (0 if delete else SHARDS)
        shutil.rmtree(mine)
        shutil.rmtree(target)


def test_nothing_is_done_twice(source, tmp_path, monkeypatch):
    """Jobs whose bytes were safe are not run again, and finished files are not touched."""
    target = tmp_path / "out"
    events = events_of(source, tmp_path / "count")
    crash.in_child(lambda: run(source, target), crash.Disk(events * 3 // 4))
    finished = {path: path.stat().st_mtime_ns for path in target.glob("*.safetensors")}
    done, _ = load_journal(target / ".conversion" / "journal")
    plan = make_plan(Request(str(source), target, MIXED))
    assert finished and done and plan.is_begun
    assert not set(plan.pending) & {n for n in done if plan.jobs[n][0] not in plan.finished}
    assert 0 < len(plan.pending) < len(plan.jobs) - len(done) + 1
    execute(plan, 1)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def test_source_goes_only_when_it_is_safe(source, tmp_path):
    """With --delete-source a shard is there until the journal holds every job that reads it."""
    mine, target = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source, mine)
    plan = make_plan(Request(str(mine), target, MIXED, delete_source=True))
    users = {
        shard: {
            n for n, (_, job) in enumerate(plan.jobs) if shard in {e.shard for e in job.extents}
        }
        for shard in range(SHARDS)
    }
    unlink, gone = Path.unlink, []

    def watched(path: Path, missing_ok: bool = False) -> None:
        if path.parent == mine:
            done, _ = load_journal(target / ".conversion" / "journal")
            shard = sorted(f.name for f in plan.manifest.files).index(path.name)
            assert users[shard] <= set(done)
            gone.append(shard)
        unlink(path, missing_ok=missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", watched)
        execute(plan, 2, unit_bytes=UNIT)
    assert sorted(gone) == list(range(SHARDS))
    with pytest.raises(UsageError, match=r"is converted, and .* holds no shards any more"):
        run(mine, target)


def test_other_parameters_are_refused_by_name(source, tmp_path):
    """An unfinished or finished conversion is continued only with its own parameters."""
    target = tmp_path / "out"
    crash.in_child(lambda: run(source, target), crash.Disk(60))
    for _ in range(2):
        for formats, search, word in (
            (Formats(), True, "--dense int8-f32-?.*, not int8-f16"),
            (MIXED, False, "--search on, not off"),
        ):
            with pytest.raises(UsageError, match=f"was begun with {word}"):
                make_plan(Request(str(source), target, formats, search))
        run(source, target)


def test_changed_source_is_refused(source, tmp_path):
    """A source shard that changed, or went before it was done with, stops the next run by name."""
    mine, target = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source, mine)
    crash.in_child(lambda: run(mine, target), crash.Disk(60))
    shard = sorted(mine.glob("*.safetensors"))[-1]
    data = shard.read_bytes()
    for changed, word in ((data[:-1], "size"), (data[:-9000] + bytes(9000), "content")):
        shard.write_bytes(changed)
        with pytest.raises(ContainerError, match=rf"{shard.name}: its {word} has changed"):
            run(mine, target)
    shard.unlink()
    with pytest.raises(ContainerError, match=rf"{shard.name}: is gone"):
        run(mine, target)
    shard.write_bytes(data)
    run(mine, target)


def test_unfinished_is_not_opened(source, tmp_path):
    """A directory into which a conversion has not ended says so to whoever would run it."""
    crash.in_child(lambda: run(source, tmp_path), crash.Disk(60))
    with pytest.raises(ContainerError, match="a conversion into it has not ended; run the same"):
        Container.open(tmp_path)


def test_another_origin_is_refused(source, tmp_path, monkeypatch):
    """What was begun from a directory is not continued from a hub, nor the other way round."""
    crash.in_child(lambda: run(source, tmp_path), crash.Disk(60))
    hub = SimpleNamespace(repo="a/b", revision="main")
    monkeypatch.setattr("colibri.convert.planner._open_hub", lambda *_: hub)
    with pytest.raises(UsageError, match=f"was begun from {source}, not hf://a/b;"):
        make_plan(Request("hf://a/b", tmp_path, MIXED))


def test_links_are_not_deleted(source, tmp_path):
    """--delete-source is refused for links, which free nothing."""
    mine = tmp_path / "source"
    shutil.copytree(source, mine)
    shard = sorted(mine.glob("*.safetensors"))[0]
    shard.rename(tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    with pytest.raises(UsageError, match="is a link, and deleting it frees nothing"):
        run(mine, tmp_path / "out", delete=True)
    run(mine, tmp_path / "out")


def test_two_at_once_are_refused(source, tmp_path):
    """A second conversion into a directory that one is writing to is refused."""
    work = WorkDirectory(tmp_path)
    with pytest.raises(UsageError, match="another conversion is writing here"):
        run(source, tmp_path)
    work.unlock()
    run(source, tmp_path)


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
@pytest.mark.parametrize("begun", [False, True], ids=["empty", "begun"])
def test_another_run_after_the_plan(source, tmp_path, whole, begun, ends):
    """A plan that another run with the same parameters has overtaken is refused, changes nothing
    and leaves no work directory in what is finished; made again, it completes to the same bytes."""
    target = tmp_path / "out"
    if begun:
        crash.in_child(lambda: run(source, target, threads=1), crash.Disk(90))
    plan = make_plan(Request(str(source), target, MIXED))
    assert plan.is_begun == begun
    crash.in_child(lambda: run(source, target, threads=1), crash.Disk(None if ends else 90))
    before = tree(target)
    assert (before == whole) == ends
    with pytest.raises(UsageError, match="another run has worked here since this was planned; run"):
        execute(plan, 1, unit_bytes=UNIT)
    assert tree(target) == before and (target / ".conversion").exists() != ends
    run(source, target)
    assert tree(target) == whole


def test_another_conversion_after_the_plan(source, tmp_path):
    """A plan for a place where another conversion has begun since, or ended, is refused and changes
    nothing there."""
    plan = make_plan(Request(str(source), tmp_path, MIXED))
    other = make_plan(Request(str(source), tmp_path, Formats()))
    work = WorkDirectory(tmp_path)
    write_manifest(work.manifest, other.manifest)
    work.unlock()
    before = tree(tmp_path)
    with pytest.raises(UsageError, match="another run has worked here since this was planned; run"):
        execute(plan)
    assert tree(tmp_path) == before
    execute(other)
    before = tree(tmp_path)
    with pytest.raises(UsageError, match="was begun with --dense"):
        execute(plan)
    assert tree(tmp_path) == before and not (tmp_path / ".conversion").exists()


def test_a_lock_that_is_gone(tmp_path, monkeypatch):
    """A lock file that its run removed after it was opened here, before it was locked, is none."""
    work, flock = WorkDirectory(tmp_path), fcntl.flock

    def late(handle: int, how: int) -> None:
        work.remove()
        work.unlock()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UsageError, match="another conversion has just ended here; run it again"):
        WorkDirectory(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [0, 1, 4])
def test_ctrl_c_again_and_again(source, tmp_path, whole, monkeypatch, more):
    """However often Ctrl-C comes, no file is closed while a thread still writes it, and the next
    run completes to the same bytes."""
    writing, go = threading.Event(), threading.Event()
    write, fetch, left = runner.write_at, runner.Runner._fetch, [KeyboardInterrupt] * more
    pools, files = [], []

    class Pool(ThreadPoolExecutor):
        """Lets the writer go on when it is waited for, unless Ctrl-C ends the waiting."""

        def shutdown(self, *args, **options):
            pools.append(self)
            if left:
                raise left.pop()
            go.set()
            super().shutdown(*args, **options)

    def held(handle: int, offset: int, view: memoryview) -> None:
        writing.set()
        go.wait()
        files.append(os.path.realpath(f"/proc/self/fd/{handle}"))
        write(handle, offset, view)

    def first(self, number: int, window) -> None:
        if window._flight:
            assert writing.wait(60)
            raise KeyboardInterrupt
        fetch(self, number, window)

    def second(window) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "ThreadPoolExecutor", Pool)
        patch.setattr(runner, "write_at", held)
        patch.setattr(runner.Runner, "_fetch", first)
        patch.setattr(runner._Window, "abandon", second)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path, threads=1)
        go.set()
        for pool in pools:
            ThreadPoolExecutor.shutdown(pool)
    assert files and all(path.endswith(".safetensors.partial") for path in files)
    run(source, tmp_path)
    assert tree(tmp_path) == whole


def test_a_lost_file_is_made_again(source, tmp_path, whole):
    """A finished conversion from which a file was removed makes that file alone; one that is whole
    makes nothing; another source is refused."""
    run(source, tmp_path)
    lost = tmp_path / "experts-00001-of-00001.safetensors"
    lost.unlink()
    plan = make_plan(Request(str(source), tmp_path, MIXED))
    assert {plan.files[plan.jobs[n][0]].name for n in plan.pending} == {lost.name}
    execute(plan, 1)
    assert tree(tmp_path) == whole
    plan = make_plan(Request(str(source), tmp_path, MIXED))
    assert not plan.pending
    execute(plan)
    assert tree(tmp_path) == whole
    record = tmp_path / "conversion.json"
    record.write_text(record.read_text().replace('"size": ', '"size": 1'))
    with pytest.raises(UsageError, match="another source"):
        make_plan(Request(str(source), tmp_path, MIXED))


def test_strangers_are_not_overwritten(source, tmp_path):
    """Shards that no conversion of ours wrote are refused, and replaced only when asked."""
    tmp_path.joinpath("experts-00001-of-00001.safetensors").write_bytes(b"x")
    with pytest.raises(UsageError, match="already holds experts-00001"):
        run(source, tmp_path)
    run(source, tmp_path, replace=True)


def shrink_disk(monkeypatch, target: Path, size: int) -> None:
    """Have the target's disk hold `size` bytes, of which its own files take their blocks."""

    def free(_: Path) -> int:
        held = sum(p.lstat().st_blocks * 512 for p in target.rglob("*") if p.is_file())
        return max(0, size - held)

    monkeypatch.setattr("colibri.convert.plan.free_bytes", free)


@pytest.mark.parametrize("part", [0.3, 0.5, 0.7, 0.9])
def test_room_for_the_first_run_is_room_for_the_next(source, tmp_path, monkeypatch, whole, part):
    """On a disk with exactly the room that was asked for, what was cut off goes on, whatever its
    half-written files hold."""
    target = tmp_path / "out"
    plan = make_plan(Request(str(source), target, MIXED))
    shrink_disk(monkeypatch, target, plan.needed())
    last = int(events_of(source, tmp_path / "count") * part)
    assert crash.in_child(lambda: execute(plan, 1), crash.Disk(last)) == crash.KILLED
    run(source, target)
    assert tree(target) == whole


def test_room_of_what_is_replaced(source, tmp_path, monkeypatch, whole):
    """--replace needs no room beside the files that it deletes; those with a second name free none,
    and one byte too few leaves the old container as it was."""
    target = tmp_path / "out"
    size = make_plan(Request(str(source), target, MIXED)).needed()
    convert_directory(source, target, SMALLER)
    before = tree(target)
    shrink_disk(monkeypatch, target, size - 1)
    with pytest.raises(UsageError, match=r": 1 B short; free some"):
        run(source, target, replace=True)
    shrink_disk(monkeypatch, target, size)
    os.link(target / "experts-00001-of-00001.safetensors", tmp_path / "link")
    with pytest.raises(UsageError, match=r"are needed and .* are free: .* short"):
        run(source, target, replace=True)
    assert tree(target) == before
    (tmp_path / "link").unlink()
    run(source, target, replace=True)
    assert tree(target) == whole


def test_torn_journal(tmp_path):
    """A torn or damaged line and all after it count as never written, and go when it is opened."""
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append({1: (7, 0xFFFFFFFF), 2: ()})
    good = path.stat().st_size
    journal.append({3: (8,)})
    journal.close()
    data = path.read_bytes()
    for torn in (data[:-1], data[: good + 1], data[: good + 5] + b"!" + data[good + 6 :]):
        path.write_bytes(torn)
        assert load_journal(path) == ({1: (7, 0xFFFFFFFF), 2: ()}, good)
    journal = Journal(path)
    journal.append({3: (9,)})
    journal.close()
    assert load_journal(path)[0] == {1: (7, 0xFFFFFFFF), 2: (), 3: (9,)}


def test_failed_append(tmp_path, monkeypatch):
    """An append that fails, even after a torn line was cut off, leaves the journal as it was; what
    is appended after it counts."""
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append({1: (7,)})
    journal.close()
    good = path.read_bytes()
    path.write_bytes(good + b"x" * 40)
    journal = Journal(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails(errno.ENOSPC))
        with pytest.raises(ContainerError, match=f"{path}: cannot be written"):
            journal.append({2: (8,)})
    assert path.read_bytes() == good
    journal.append({3: (9,)})
    journal.close()
    assert load_journal(path)[0] == {1: (7,), 3: (9,)}


def fails(number: int):
    """A call that the kernel answers with this error."""

    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "no space is left on the disk. Nothing is lost: free some and run the same"),
        (errno.EACCES, "cannot be written: Permission denied"),
    ],
)
def test_file_that_cannot_be_made(source, tmp_path, monkeypatch, number, message):
    """A partial file that cannot be made ends the conversion with its name and the way on."""
    call = os.open

    def watched(path, *args, **options) -> int:
        action = fails(number) if str(path).endswith(".safetensors.partial") else call
        return action(path, *args, **options)

    monkeypatch.setattr(os, "open", watched)
    with pytest.raises(ContainerError, match=rf"\.conversion/\S+\.safetensors\.partial: {message}"):
        run(source, tmp_path)


def test_manifest_of_another_version(source, tmp_path):
    """A work directory that another version of colibri began is refused, and says how to go on."""
    crash.in_child(lambda: run(source, tmp_path), crash.Disk(60))
    manifest = tmp_path / ".conversion" / "manifest.json"
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(fields | {"jobs": "0" * 32}))
    with pytest.raises(UsageError, match="another version of colibri"):
        run(source, tmp_path)
    manifest.write_text(json.dumps(fields | {"version": 2}))
    with pytest.raises(ContainerError, match="another version of colibri"):
        run(source, tmp_path)
    for damaged in ({}, {"files": [1]}, fields | {"more": 1}):
        manifest.write_text(json.dumps(damaged | {"version": 1}))
        with pytest.raises(ContainerError, match="lacks something of a manifest"):
            run(source, tmp_path)
    run(source, tmp_path, replace=True)


@pytest.mark.parametrize("text", ['{"source": 5}', '{"parameters": {}, "source": {"origin": []}}'])
def test_a_record_of_something_else(tmp_path, text):
    """A conversion.json that says something else is named, not taken for an empty one."""
    (tmp_path / "conversion.json").write_text(text)
    with pytest.raises(ContainerError, match=r"conversion\.json: is no record of a conversion"):
        read_record(tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A small tmpfs, and a function that gives it another size in bytes."""
    point = tmp_path / "disk"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")

    def resize(size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(point)], check=True)

    yield point, resize
    subprocess.run(["umount", "--lazy", str(point)], check=True)


def test_full_disk(source, small_disk, monkeypatch, whole):
    """A disk that fills up while a conversion runs ends it with the way on, keeps what is safe
    and readers unharmed; after space was made the same command completes to the same bytes."""
    disk, resize = small_disk
    target, needed = disk / "out", sum(map(len, whole.values()))
    with pytest.raises(UsageError, match=r"are needed and .* are free: .* short"):
        run(source, target)
    monkeypatch.setattr("colibri.convert.plan.free_bytes", lambda _: 1 << 40)
    begun = 0
    for part in (0.5, 0.7, 0.9):
        resize(int(needed * part) + 24_576)  # the manifest takes a part
        with pytest.raises(ContainerError, match=r"no space is left.*run the same command again"):
            run(source, target)
        for path in target.glob("*.safetensors"):
            assert path.read_bytes() == whole[path.name]
        before, begun = begun, make_plan(Request(str(source), target, MIXED)).done_bytes
        assert begun >= before
    assert begun > 0
    resize(4 * needed)
    run(source, target)
    assert tree(target) == whole
