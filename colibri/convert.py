"""Conversion: from a float checkpoint to colibri's own container.

python -m colibri.convert SRC DST --experts int4-g64 --dense int8 --mtp int8
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from colibri.checkpoint import INDEX
from colibri.config import ModelConfig
from colibri.container import INDEX_FULL, Container
from colibri.errors import ColibriError, ContainerError, UsageError
from colibri.formats import FLOATS, Format
from colibri.inventory import Entry, expert_name, records_name
from colibri.layout import Formats, ShardPlan, plan_shards, record_layout
from colibri.quantize import encode
from colibri.writer import ShardWriter, write_file

# Files that make a directory usable besides its weights: copied as they are.
_REQUIRED_BESIDE = ("config.json", "tokenizer.json")
_OPTIONAL_BESIDE = (
    "generation_config.json", "tokenizer_config.json", "chat_template.jinja",
    "special_tokens_map.json", "LICENSE",
)  # fmt: skip

Progress = Callable[[str, int, int], None]  # file name, bytes done, bytes in all


def convert_directory(
    source: Path | str,
    target: Path | str,
    formats: Formats | None = None,
    search: bool = True,
    replace: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write `source` (float weights) to `target` as a container; returns sentences of warning.

    `search` looks for the scale of least squared error per group. A target that already holds
    shards is refused unless `replace`, which removes the ones the new container does not have.
    """
    formats = formats or Formats()
    source, target = Path(source), Path(target)
    container = Container.open(source)
    _check_source(container)
    owners = [n for n, kind in enumerate(container.index_kinds) if kind == INDEX_FULL]
    shards = plan_shards(container.config, formats, container.has_mtp, owners)
    _prepare(source, target, replace)
    warnings = container.notes + copy_beside(source, target)
    total, done = sum(shard.nbytes for shard in shards), 0
    for shard in shards:
        write_shard(container, shard, target, formats, search)
        done += shard.nbytes
        if progress:
            progress(shard.name, done, total)
    _finish(shards, target)
    return warnings


def write_shard(
    container: Container, shard: ShardPlan, target: Path, formats: Formats, search: bool
) -> None:
    """Encode and write one planned file."""
    config = container.config
    with ShardWriter(target / shard.name, shard.specs, shard.metadata) as writer:
        for layer in shard.expert_layers:
            layout = record_layout(config, formats.of_experts(layer, config))
            for expert in range(config.n_routed_experts):
                record = np.zeros(layout.nbytes, np.uint8)
                for projection, places in layout.offsets.items():
                    name = expert_name(layer, expert, projection)
                    for part, at in zip(
                        _encode(container, name, layout.form, search), places, strict=True
                    ):
                        record[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)
                writer.write(records_name(layer), record, expert)
        for entry in shard.entries:
            _write_entry(container, entry, formats.of(entry, config), writer, search)


def _write_entry(
    container: Container, entry: Entry, form: Format, writer: ShardWriter, search: bool
) -> None:
    if form.kind in FLOATS:
        weights = np.atleast_2d(container.read_array(entry.name))
        writer.write(entry.name, encode(weights, form).payload)
        return
    payload, scales = _encode(container, entry.name, form, search)
    writer.write(entry.name, payload)
    writer.write(entry.name + ".scales", scales)


def _encode(
    container: Container, name: str, form: Format, search: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Payload and scales of one matrix; float formats have no scales (an empty array)."""
    try:
        encoded = encode(container.read_array(name), form, search)
    except UsageError as why:
        raise ContainerError(f"{container.directory}: {name}: {why}") from why
    scales = encoded.scales if encoded.scales is not None else np.empty((0, 0), np.float32)
    return encoded.payload, scales


def copy_beside(source: Path, target: Path) -> list[str]:
    """Copy configuration, tokenizer and template; returns a warning per file that is missing."""
    warnings = []
    for name in (*_REQUIRED_BESIDE, *_OPTIONAL_BESIDE):
        try:
            data = (source / name).read_bytes()
        except FileNotFoundError:
            if name in _REQUIRED_BESIDE or name == "generation_config.json":
                warnings.append(f"{source / name} is missing: the container will lack it too")
            continue
        write_file(target / name, _unquantised(data) if name == "config.json" else data)
    return warnings


def _unquantised(config: bytes) -> bytes:
    """config.json without the source's quantization_config, which our container does not have."""
    fields = json.loads(config)
    if "quantization_config" not in fields:
        return config
    del fields["quantization_config"]
    return json.dumps(fields, indent=1).encode()


def _check_source(container: Container) -> None:
    quantised = next(
        (e for e in container.entries if container.matrix(e.name).format not in FLOATS), None
    )
    if quantised is not None:
        raise UsageError(
            f"{container.directory}: {quantised.name} is already quantised; converting again "
            "would lose twice. Convert from the float checkpoint"
        )


def _prepare(source: Path, target: Path, replace: bool) -> None:
    if target.resolve() == source.resolve():
        raise UsageError(f"{target}: source and target are one directory")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        raise ContainerError(f"{target}: cannot be made: {why.strerror}") from why
    held = sorted(target.glob("*.safetensors"))
    if held and not replace:
        raise UsageError(
            f"{target}: already holds {held[0].name}; give another directory or --replace"
        )


def _finish(shards: list[ShardPlan], target: Path) -> None:
    """Write the index and remove shards of an earlier container."""
    weights = {spec.name: shard.name for shard in shards for spec in shard.specs}
    size = sum(shard.nbytes for shard in shards)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weights.items()))}
    write_file(target / INDEX, json.dumps(index, indent=0).encode())
    names = {shard.name for shard in shards}
    for stale in target.glob("*.safetensors"):
        if stale.name not in names:
            stale.unlink()


def main(arguments: list[str] | None = None) -> int:
    """The module's own command line, for remaking the demo container."""
    parser = argparse.ArgumentParser(prog="python -m colibri.convert", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--experts", default="int4-g64")
    parser.add_argument("--dense", default="int8")
    parser.add_argument("--mtp", default="int8")
    parser.add_argument("--no-search", action="store_true", help="plain absmax scales")
    parser.add_argument("--replace", action="store_true", help="write over an older container")
    given = parser.parse_args(arguments)
    try:
        chosen = Formats(*(Format.parse(f) for f in (given.experts, given.dense, given.mtp)))
        for warning in convert_directory(
            given.source, given.target, chosen, not given.no_search, given.replace, _report
        ):
            print(f"warning: {warning}", file=sys.stderr)
        ModelConfig.load(given.target)
        Container.open(given.target)
    except ColibriError as why:
        print(f"error: {why}", file=sys.stderr)
        return 1
    return 0


def _report(name: str, done: int, total: int) -> None:
    print(f"{name}  {done / 1e6:.1f} of {total / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
