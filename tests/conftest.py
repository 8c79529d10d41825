"""Fixtures that many tests share: the demo model in the package, opened once, and tokenizers."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from text_fixtures import write_glm_like

import colibri.demo
from colibri import cli, knobs
from colibri.container import Container
from colibri.model import Model
from colibri.tokenizer import Tokenizer

# How long drawing or an example takes says something about the machine, nothing about the code.
# Examples are the same in every run, so that a commit passes or not; `make search` draws others.
_ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", _ANY)
settings.register_profile("same", _ANY, derandomize=True)
settings.load_profile("same")

# A job in the background of a shell starts with Ctrl-C ignored, and so do its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """Directory of the packaged demo model."""
    return colibri.demo.MODEL


@pytest.fixture(scope="session")
def demo_container(demo_path: Path) -> Container:
    """The packaged demo model, headers read."""
    return Container.open(demo_path)


@pytest.fixture(scope="session")
def demo_models(demo_container: Container) -> Callable[[int], Model]:
    """The demo model by number of threads, each loaded at most once."""
    return cache(lambda threads: Model.open(demo_container, threads=threads))


@pytest.fixture(scope="session")
def demo_model(demo_models: Callable[[int], Model]) -> Model:
    """The demo model on one thread."""
    return demo_models(1)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_path: Path) -> Tokenizer:
    """The demo model's tokenizer."""
    return Tokenizer.load(demo_path)


@pytest.fixture(scope="session")
def demo(demo_tokenizer: Tokenizer) -> Tokenizer:
    """The same, for tests of text alone."""
    return demo_tokenizer


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small tokenizer that splits and marks up as GLM's does."""
    return Tokenizer.load(write_glm_like(tmp_path_factory.mktemp("glm")))


QUIET = {"COLIBRI_THREADS": "1", "COLIBRI_STATE": "off"}  # nothing is left in anybody's home


class Result(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


class Command:
    """The command line inside this process: `command("run", "-p", "Hi")`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = monkeypatch, capsys
        for name in [variable for knob in knobs.KNOBS for variable in knob.variables]:
            monkeypatch.delenv(name, raising=False)

    def __call__(
        self, *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> Result:
        """Run it; stdin is a pipe with these bytes, env is set for this run alone."""
        with self._patch.context() as patch:
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            for name, value in {**QUIET, **(env or {})}.items():
                patch.setenv(name, value)
            self._capture.readouterr()
            status = cli.main(list(arguments))
        return Result(status, *self._capture.readouterr())

    def answer(self, *arguments: str, **more: Any) -> dict[str, Any]:
        """The JSON object of a run that must succeed without a word on stderr."""
        status, out, err = self("run", "--json", *arguments, **more)
        assert (status, err) == (0, "")
        return json.loads(out)


@pytest.fixture
def command(monkeypatch, capsys) -> Command:
    """The command line, in this process, with no knob set by the environment."""
    return Command(monkeypatch, capsys)
