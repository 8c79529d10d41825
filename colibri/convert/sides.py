"""The files beside the weights: configuration, tokenizer, template; copied, or told as missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from colibri.convert.hub import Hub
from colibri.errors import ContainerError
from colibri.paths import unreadable
from colibri.writer import write_file

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
EXPECTED = (CONFIG, TOKENIZER, GENERATION)
OPTIONAL = (
    "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "LICENSE",
)  # fmt: skip

Sides = dict[str, bytes]  # content by name


def read_directory(directory: Path) -> Sides:
    """Those a model directory has."""

    def read(name: str) -> bytes | None:
        try:
            return (directory / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as why:
            raise ContainerError(unreadable(directory / name, why)) from why

    return _collect(read)


def read_hub(hub: Hub, directory: Path) -> Sides:
    """Those a repository has, fetched into `directory`."""

    def read(name: str) -> bytes | None:
        return hub.fetch(name, directory).read_bytes() if name in hub.files else None

    return _collect(read)


def _collect(read: Callable[[str], bytes | None]) -> Sides:
    found = {name: read(name) for name in (*EXPECTED, *OPTIONAL)}
    return {name: data for name, data in found.items() if data is not None}


def missing(sides: Sides, where: str) -> list[str]:
    """A sentence for each expected file that is not there."""
    return [
        f"{where}: {name} is missing, so the container will lack it too"
        for name in EXPECTED
        if name not in sides
    ]


def written(sides: Sides) -> Sides:
    """The files as they are written: config.json without the source's quantization."""
    return sides | {CONFIG: _unquantised(sides[CONFIG])}


def write(sides: Sides, target: Path) -> None:
    """Write those that are not there as they should be."""
    for name, data in written(sides).items():
        path = target / name
        if not path.exists() or path.read_bytes() != data:
            write_file(path, data)


def _unquantised(config: bytes) -> bytes:
    fields = json.loads(config)
    if "quantization_config" not in fields:
        return config
    del fields["quantization_config"]
    return json.dumps(fields, indent=1).encode()
