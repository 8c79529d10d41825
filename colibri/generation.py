"""generation_config.json: the sampling that a model's authors recommend."""

from pathlib import Path
from typing import Any

from colibri.errors import ConfigError
from colibri.knobs import BY_NAME, Settings
from colibri.sampling import SamplingParams
from colibri.strictjson import read_object

# Field of the file, and of SamplingParams and Settings.
_FIELDS = ("temperature", "top_p", "top_k", "min_p")


def recommended(directory: Path) -> dict[str, float | int]:
    """What the file says about sampling; empty without a file. ConfigError names a bad value."""
    path = directory / "generation_config.json"
    raw = read_object(path, ConfigError) or {}
    found = {name: raw[name] for name in _FIELDS if raw.get(name) is not None}
    return {name: _checked(path, name, value) for name, value in found.items()}


def _checked(path: Path, name: str, value: Any) -> float | int:
    kind = BY_NAME[name].kind
    number = type(value) is int or (type(value) is float and not kind.whole)
    if not number or not kind.least <= value <= kind.most:
        raise ConfigError(f"{path}: {name} is {value!r}; expected {kind.expects}")
    return value


def sampling(settings: Settings, directory: Path) -> tuple[SamplingParams, frozenset[str]]:
    """Sampling of a turn, and the names of the values that came from the model's file."""
    file = recommended(directory)
    given = {name: getattr(settings, name) for name in _FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    params = SamplingParams(**{**file, **given}, seed=settings.seed)
    return params, frozenset(file.keys() - given.keys())
