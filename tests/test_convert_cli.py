"""colibri convert and repack on the command line: plans, progress, refusals, Ctrl-C."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import fourbit
import fp8
import pytest
import shardkit
import text_fixtures

from colibri import convert_cli
from colibri.container import Container, format_of
from colibri.errors import Exit
from colibri.formats import Format
from colibri.verify import verify


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    directory = shardkit.directory(tmp_path_factory.mktemp("source"))
    (directory / "generation_config.json").write_text("{}")
    return text_fixtures.write_bytes(directory)


def test_convert(command, source, tmp_path):
    """The command converts in the formats named and the defaults, and says what it counted."""
    target = tmp_path / "out"
    done = command("convert", str(source), str(target), "--experts", "int4-g32", "--absmax")
    assert done.status == Exit.OK
    assert re.fullmatch(
        rf"{target}: [\d.]+ [kM]B, 3 layers and the MTP layer, 12 experts, \d+ tensors\n", done.out
    )
    container = Container.open(target)
    assert format_of(container.expert(1, 0)[0]) == Format.parse("int4-g32")
    assert format_of(container.matrix("lm_head.weight")) == Format.parse("int8")
    again = command("convert", str(source), str(target), "--experts", "int4-g32")
    assert again.status == Exit.USAGE and "--search off, not on" in again.err
    same = command("convert", str(source), str(target), "--experts", "int4-g32", "--absmax")
    assert same.status == Exit.OK and verify(target, deep=True).is_whole
    assert "is complete already" in same.err and "holds" not in done.err + same.err


def test_into_other_files(command, source, tmp_path):
    """Files that no conversion put there stay, and one of them is named."""
    (tmp_path / "letter.txt").write_text("Dear")
    done = command("convert", str(source), str(tmp_path))
    assert done.status == Exit.OK and "holds 'letter.txt' and perhaps more" in done.err
    assert (tmp_path / "letter.txt").read_text() == "Dear"


def test_dry_run(command, source, tmp_path, monkeypatch):
    """The plan shows source, every part and the exact end, writes nothing, and fails for want of
    room with the plan shown all the same."""
    target = tmp_path / "out"
    done = command("convert", str(source), str(target), "--dry-run")
    assert done.status == Exit.OK and not target.exists()
    sizes = dict(re.findall(r"^  ([a-z ]+?) {2,}(\d+)", done.out, re.MULTILINE))
    total = int(sizes.pop("in all"))
    assert sum(map(int, sizes.values())) == total and {"experts", "mtp", "headers"} <= set(sizes)
    assert "--experts int4-g64-f16" in done.out and "needed now" in done.out
    assert f"{source}: 1 file, " in done.out and "0.00 GB" not in done.out
    command("convert", str(source), str(target))
    assert sum(path.stat().st_size for path in target.iterdir()) == total
    monkeypatch.setattr("colibri.convert.plan.free_bytes", lambda _: 1000)
    done = command("convert", str(source), str(tmp_path / "b"), "--dry-run")
    assert done.status == Exit.USAGE and "in all" in done.out and "short; free some" in done.err
    assert "--delete-source" in done.err
    done = command("repack", str(target), str(tmp_path / "c"), "--to", "public")
    assert done.status == Exit.USAGE and "short; free some" in done.err
    assert "--delete-source" not in done.err  # which it has not


def test_larger_than_the_source(command, source, tmp_path):
    """A result larger than its source is announced before it is made."""
    floats = [
        word for part in ("experts", "dense", "mtp", "table") for word in (f"--{part}", "f32")
    ]
    done = command("convert", str(source), str(tmp_path / "out"), "--dry-run", *floats)
    assert "the result is larger than the source" in done.out


def test_repack(command, source, tmp_path):
    """There and back by the commands gives a whole container with the same bytes."""
    command("convert", str(source), str(tmp_path / "own"))
    done = command("repack", str(tmp_path / "own"), str(tmp_path / "public"), "--to", "public")
    assert done.status == Exit.OK
    done = command("convert", str(tmp_path / "public"), str(tmp_path / "again"))
    assert done.status == Exit.OK
    for path in (tmp_path / "own").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    done = command("repack", str(tmp_path / "own"), str(tmp_path / "x"), "--to", "colibri")
    assert done.status == Exit.USAGE and "nothing to convert" in done.err


def test_delete_source(command, source, tmp_path):
    """--delete-source leaves configuration and tokenizer, and no shard."""
    mine = shardkit.directory(tmp_path / "source")
    done = command("convert", str(mine), str(tmp_path / "out"), "--delete-source")
    assert done.status == Exit.OK
    assert [path.name for path in mine.iterdir()] == ["config.json"]
    assert verify(tmp_path / "out", deep=True).is_whole


def test_interrupted(command, source, tmp_path, monkeypatch):
    """Ctrl-C ends it with status 130 and says how to go on, which then works."""
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert_cli._Meter, "progress", interrupt)
        done = command("convert", str(source), str(tmp_path / "out"))
    assert done.status == Exit.INTERRUPTED
    assert "what is done is kept; the same command continues" in done.err
    assert not verify(tmp_path / "out").is_whole
    done = command("convert", str(source), str(tmp_path / "out"))
    assert done.status == Exit.OK and "continues: " in done.err
    assert verify(tmp_path / "out", deep=True).is_whole


def test_progress_where_nobody_watches(command, source, tmp_path, monkeypatch):
    """Without a terminal, a line of progress appears now and then, with rate and time to go."""
    monkeypatch.setattr(convert_cli, "_LOG_EVERY", 0.0)
    done = command("convert", str(source), str(tmp_path / "out"))
    lines = [line for line in done.err.splitlines() if line.startswith("converting ")]
    assert lines and re.fullmatch(r"converting 100% \d/\d MB [\d.]+ [MG]B/s, 0 s to go", lines[-1])


def test_progress_of_a_long_conversion(command, tmp_path, monkeypatch):
    """Every half minute at most one line says how far it is, from the plan to the end."""
    names = [f"model-{k:05}-of-00006.safetensors" for k in range(1, 7)]
    source = shardkit.directory(tmp_path / "source", shardkit.split(shardkit.weights(), names))
    now = itertools.count(0, 20)
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr(convert_cli, "time", clock)
    done = command("convert", str(source), str(tmp_path / "out"), "--threads", "1")
    percents = [int(p) for p in re.findall(r"^converting (\d+)% ", done.err, re.MULTILINE)]
    assert len(percents) >= 2 and percents == sorted(percents) and 0 < percents[0] < 100


@pytest.mark.parametrize("kind", [fp8.checkpoint, fourbit.modelopt])
def test_check_of_codes(command, tmp_path, kind):
    """--check scores an FP8 or NVFP4 source where the target's directory is still to be made, and
    leaves nothing beside it."""
    source = shardkit.directory(tmp_path / "source", {"model.safetensors": kind()[0]}, fp8.CONFIG)
    text_fixtures.write_bytes(source)
    text = tmp_path / "text.txt"
    text.write_text("A fox and a hare.")
    target = tmp_path / "a" / "b" / "out"
    done = command("convert", str(source), str(target), "--check", str(text))
    assert done.status == Exit.OK and "nats per token" in done.out, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"source", "text.txt", "a"}
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts", "int5"], "format 'int5' is not known"),
        (["--experts", "int4-g7"], "groups must be a multiple of 8"),
        (["--threads", "0"], "0 is not in the range"),
        (["--check", "/nowhere"], "does not exist"),
        (["--spam"], "No such option"),
    ],
)
def test_wrong_usage(command, source, tmp_path, arguments, message):
    """What cannot be honoured is refused with status 2, before anything is written."""
    done = command("convert", str(source), str(tmp_path / "out"), *arguments)
    assert done.status == Exit.USAGE and message in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [("convert",), ("repack", "--to", "public")])
def test_empty_paths(command, source, tmp_path, monkeypatch, more):
    """An empty path, as of an unset variable, is refused by name, not taken for the directory one
    is in."""
    here = shardkit.directory(tmp_path / "here")
    monkeypatch.chdir(here)
    before = sorted(here.iterdir())
    for name, places in (("TARGET", (str(source), "")), ("SOURCE", ("", "out"))):
        for dry in ([], ["--dry-run"]):
            done = command(*more, *places, *dry)
            assert (done.status, done.out) == (Exit.USAGE, "")
            assert f"Invalid value for '{name}': it is empty" in done.err
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("below", ["", "/out"])
def test_targets_that_cannot_be(command, source, tmp_path, below):
    """A target that is a file, lies below one, or cannot be reached is refused with status 2."""
    (tmp_path / "file").write_text("x")
    for place, message in (
        (f"/dev/null{below}", "/dev/null: is no directory; give another"),
        (f"{tmp_path}/file{below}", f"{tmp_path}/file: is no directory; give another"),
        (f"{tmp_path}/{'x' * 300}{below}", "cannot be reached: File name too long; give a dir"),
    ):
        for dry in ([], ["--dry-run"]):
            done = command("convert", str(source), place, *dry)
            assert (done.status, done.out) == (Exit.USAGE, "") and message in done.err
            assert "Errno" not in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/" + "x" * 300, "cannot be reached: File name too long; give a directory"),
        ("/nonexist", "/nonexist: there is no such directory; give one with config.json and "
                      "*.safetensors, or hf://owner/name"),
        ("some/model", "or hf://some/model to fetch"),
        ("./some/model", "or hf://owner/name to fetch"),
        (__file__, "is a file; give the directory that it lies in"),
        (str(Path(__file__).parent), "holds no config.json; give the directory that has"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [("convert",), ("repack", "--to", "public")])
def test_no_such_source(command, tmp_path, source, message, more):
    """A source that is not there is told as what was looked for, with the way to name a hub's."""
    done = command(*more, source, str(tmp_path / "out"))
    assert done.status != Exit.OK and message in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
