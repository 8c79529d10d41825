"""Fixtures that many tests share: the demo model in the package, opened once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import colibri.demo
from colibri.container import Container
from colibri.model import Model
from colibri.tokenizer import Tokenizer


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
