"""Conversion from a hub: through drops, short answers, damage and kills, two shards at a time."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import fakehub
import fourbit
import pytest
import shardkit
import text_fixtures

from colibri.convert import convert_directory
from colibri.convert.hub import Hub, Unfetched
from colibri.convert.shelf import AT_ONCE, Stream
from colibri.errors import ContainerError, UsageError
from colibri.verify import verify

pytest.importorskip("huggingface_hub")
SHARDS = 6
ADDRESS = f"hf://{fakehub.REPO}@main"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """NVFP4 and FP8, of which some matrices and their scales lie in different shards."""
    names = [f"model-{k:05}-of-{SHARDS:05}.safetensors" for k in range(1, SHARDS + 1)]
    files = shardkit.split(fourbit.modelopt()[0], names)
    directory = shardkit.directory(tmp_path_factory.mktemp("hub"), files, fourbit.CONFIG)
    return text_fixtures.write_bytes(directory)


@pytest.fixture(scope="module")
def wanted(source, tmp_path_factory) -> dict[str, bytes]:
    """The container that the local checkpoint converts to."""
    target = tmp_path_factory.mktemp("local") / "out"
    convert_directory(source, target)
    return tree(target)


def tree(directory: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes()
        for p in directory.iterdir()
        if p.is_file() and p.name != "conversion.json"
    }


def start(hub: fakehub.Hub, home: Path, *runs: tuple[Path, ...]) -> subprocess.Popen[str]:
    """Conversions into a target, with flags: one after the other, in a process of their own, since
    huggingface_hub reads its environment once. Its status is the last one's."""
    code = "import json, sys; from colibri.convert import hub; hub._PAUSE = 0.001; \
from colibri.cli import main; sys.exit([main(run) for run in json.loads(sys.argv[1])][-1])"
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
    commands = [["convert", ADDRESS, *map(str, run), "--threads", "1"] for run in runs]
    command = [sys.executable, "-c", code, json.dumps(commands)]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


class Watch:
    """The most source shards that were on the disk at once, whole or arriving."""

    def __init__(self, target: Path) -> None:
        self.most, self._target, self._stop = 0, target, False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop:
            # From the top down: a file that moves up into place is never counted twice.
            names = [name for _, _, files in os.walk(self._target) for name in files]
            shards = [name for name in names if re.match(r"model-.*\d\.safetensors$", name)]
            arriving = [name for name in names if name.endswith(".incomplete")]
            self.most = max(self.most, len(shards) + len(arriving))
            time.sleep(0.001)

    def end(self) -> int:
        """Stop looking."""
        self._stop = True
        self._thread.join()
        return self.most


def test_through_every_trouble(source, wanted, tmp_path):
    """503s, connections that drop, answers that end early and damaged bytes delay the conversion;
    it ends complete, verified, equal to the local one, with at most two shards on the disk."""
    name = "model-{:05}-of-00006.safetensors".format

    def trouble(method: str, file: str, count: int) -> str:
        plan = {
            ("GET", name(1), 1): "503", ("GET", name(2), 2): "503", ("HEAD", name(3), 1): "503",
            ("GET", name(3), 2): "drop", ("GET", name(4), 2): "short",
            ("GET", name(5), 2): "damage", ("GET", name(5), 3): "short",
            ("GET", "config.json", 1): "503",
        }  # fmt: skip
        return plan.get((method, file, count), "")

    hub, target = fakehub.Hub(source, trouble), tmp_path / "out"
    watch = Watch(target)
    process = start(hub, tmp_path / "home", (target,))
    _, errors = process.communicate(timeout=120)
    most = watch.end()
    hub.close()
    assert process.returncode == 0, errors
    assert tree(target) == wanted
    assert verify(target, deep=True).is_whole
    assert 1 <= most <= AT_ONCE
    assert not (target / ".conversion").exists()


def test_killed_and_continued(source, wanted, tmp_path):
    """Killed while the fourth shard is on its way, the next run goes on from there: what was
    recorded is not fetched again, and the container is the same."""
    hub, target = fakehub.Hub(source), tmp_path / "out"
    name = "model-{:05}-of-00006.safetensors".format
    process = start(hub, tmp_path / "home", (target,))

    def stop(method: str, file: str, count: int) -> str:
        if (method, file, count) == ("GET", name(4), 2):
            process.send_signal(signal.SIGKILL)
            process.wait()
        return ""

    hub.trouble = stop
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    hub.trouble = lambda *_: ""
    asked = dict(hub.asked)
    process = start(hub, tmp_path / "home", (target,))
    _, errors = process.communicate(timeout=60)
    hub.close()
    assert process.returncode == 0, errors
    assert tree(target) == wanted
    assert "continues: " in errors
    assert hub.asked["GET", name(1)] == asked["GET", name(1)]


def test_what_does_not_pass(source, tmp_path):
    """A hub that stays down ends the run with what failed and the way on; nothing is lost."""
    name = "model-{:05}-of-00006.safetensors".format
    hub, target = fakehub.Hub(source), tmp_path / "out"
    hub.trouble = lambda method, file, count: "damage" if file == name(3) and count > 1 else ""
    process = start(hub, tmp_path / "home", (target,))
    _, errors = process.communicate(timeout=60)
    hub.close()
    assert process.returncode == 1
    assert f"{name(3)} could not be fetched: arrived damaged" in errors
    assert "; run the same command again: what is done is kept\n" in errors
    assert (target / ".conversion" / "journal").stat().st_size > 0


def test_nothing_is_kept_where_nothing_was_done(source, tmp_path):
    """A hub that cannot be reached, or whose first shard does not come: nobody is told that what is
    done is kept, nor is a dry run, even where something was done."""
    hub, target = fakehub.Hub(source), tmp_path / "out"
    hub.trouble = lambda method, file, count: "damage" if "00001-" in file and count > 1 else ""
    errors = [start(hub, tmp_path / "home", (target,)).communicate(timeout=60)[1]]
    hub.trouble = lambda method, file, count: "damage" if "00003-" in file and count > 1 else ""
    kept = start(hub, tmp_path / "home", (target,)).communicate(timeout=60)[1]
    assert "what is done is kept" in kept
    hub.close()
    again = (tmp_path / "new",), (target, "--dry-run"), (target, "--replace")
    told = start(hub, tmp_path / "home", *again).communicate(timeout=60)[1]
    errors += told.splitlines()
    assert len(errors) == 1 + len(again)
    for text in errors:
        assert "could not be fetched: " in text and "run the same command again" in text
        assert "is kept" not in text


def test_addresses(monkeypatch):
    """Malformed addresses are refused; without huggingface_hub the extra to install is named."""
    for address in ("hf://", "hf://alone", "hf://a/b/c", "hf://a/b@", "hf://a/b@c d"):
        with pytest.raises(UsageError, match="is not hf://owner/name"):
            Hub(address)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[hub\]'"):
        Hub("hf://a/b")


def test_a_full_disk_is_told_at_once():
    """What the disk has no room for is not asked for again for minutes."""
    hub, asked = Hub.__new__(Hub), []
    errors = SimpleNamespace(RepositoryNotFoundError=KeyError, RevisionNotFoundError=KeyError)
    hub._hub = SimpleNamespace(errors=errors)

    def action() -> None:
        asked.append(None)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(Unfetched, match=r"No space left on device; free some and run the same"):
        hub._patiently("a shard", action)
    assert len(asked) == 1


class Shop:
    """Files that a Stream fetches, and how many of them it holds."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.most = directory, 0

    def fetch(self, shard: int) -> Path:
        path = self.directory / str(shard)
        path.write_bytes(b"x")
        self.most = max(self.most, len(list(self.directory.iterdir())))
        return path


def test_stream_holds_two(tmp_path):
    """Shards come in order, the next while one is read, and never a third before one is back."""
    shop = Shop(tmp_path)
    stream = Stream(range(20), shop.fetch, {})
    for shard in range(20):
        while not stream.is_coming(shard):
            time.sleep(0.001)
        assert stream.path(shard).read_bytes() == b"x"
        stream.release(shard)
    stream.close()
    assert shop.most <= AT_ONCE and not list(tmp_path.iterdir())


def test_stream_goes_beyond_two_for_a_job_that_needs_it(tmp_path):
    """A job that reads three shards gets them, rather than waiting for ever."""
    shop = Shop(tmp_path)
    stream = Stream(range(5), shop.fetch, {})
    for shard in range(3):
        stream.path(shard)
    assert shop.most == 3 and not stream.is_coming(3)
    for shard in range(3):
        stream.release(shard)
    assert stream.path(3) and stream.path(4)
    stream.close()


def test_stream_tells_errors(tmp_path):
    """What goes wrong while a shard is fetched is told to whoever waits for it."""

    def fail(shard: int) -> Path:
        raise ContainerError("no such shard")

    stream = Stream(range(3), fail, {})
    with pytest.raises(ContainerError, match="no such shard"):
        stream.path(1)
    stream.close()
