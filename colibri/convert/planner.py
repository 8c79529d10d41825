"""Planning: headers are read, everything that they can tell is checked, the work is laid out."""

from __future__ import annotations

import hashlib
import json
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from colibri.checkpoint import Checkpoint, merge, open_checkpoint
from colibri.config import ModelConfig
from colibri.container import Container
from colibri.convert import sides as side_files
from colibri.convert.hub import PREFIX, Hub
from colibri.convert.jobs import Job, TargetFile, own_files
from colibri.convert.manifest import (
    JOURNAL,
    RECORD,
    WORK,
    Manifest,
    load_journal,
    read_manifest,
    read_record,
    record_text,
    require_same,
    sample_of,
)
from colibri.convert.matrices import FP8_BLOCK, is_coded
from colibri.convert.plan import Plan, Request
from colibri.convert.public import public_files
from colibri.convert.shelf import require_deletable, require_unchanged
from colibri.convert.source import FloatSource, StoredSource
from colibri.errors import ConfigError, ContainerError, UsageError
from colibri.foreign import gguf_fault, lacks_zeros, require_plain
from colibri.layout import Formats
from colibri.resolve import is_own
from colibri.shard import read_shard
from colibri.state import PARTIAL
from colibri.strictjson import parse_object, read_object

ENCODER = "2"  # bits of the encoders: a conversion must not mix two versions


def make_plan(request: Request) -> Plan:
    """Read headers, check everything that headers can tell, and lay out the work; writes nothing.

    ConfigError, ContainerError or UsageError say what is wrong with source, target or request.
    """
    target, work = request.target, request.target / WORK
    _require_place(target)
    old = None if request.replace else read_manifest(work / "manifest.json")
    hub = _open_hub(request, old)
    if old is not None:
        _require_origin(request, hub, old)
    if hub is None and old is None:
        _require_directory(request.source)
    if old is None:
        _require_no_gguf(request.source, hub)
    if hub is None and target.resolve() == Path(request.source).resolve():
        raise UsageError(f"{target}: source and target are one directory")
    sides = _read_sides(request, hub)
    config = (sides.get(side_files.CONFIG) or b"").decode("utf-8", "replace")
    if old is not None:
        manifest, config = old, old.config
        sides = sides | {side_files.CONFIG: old.config.encode()}
    elif side_files.CONFIG not in sides:
        raise ConfigError(
            f"{request.source}: holds no config.json; give the directory that has "
            "the model's config.json and *.safetensors"
        )
    else:
        manifest = _new_manifest(request, hub, config)
    source = _open_source(request, manifest, sides)
    manifest = _with_parameters(request, manifest, source, old)
    files = _files(request, source)
    jobs = _ordered(files)
    manifest = _with_jobs(target, manifest, files, jobs, old)
    finished, done = progress(request, manifest, files, jobs)
    warnings = [*source.notes, *side_files.missing(sides, request.source), *_others(target)]
    plan = Plan(request, manifest, source, files, jobs, done, finished, sides, tuple(warnings), hub)
    if hub is None:
        directory = Path(request.source)
        require_unchanged(directory, manifest.files, set(plan.uses()))
        if request.delete_source:
            require_deletable(directory, manifest.files)
    return plan


def _others(target: Path) -> list[str]:
    """A warning where files lie that no conversion put there."""
    if not target.is_dir() or any((target / name).exists() for name in (WORK, RECORD)):
        return []
    found = sorted(path.name for path in target.iterdir())
    return [f"{target} holds {found[0]!r} and perhaps more, which stay there"] if found else []


def _require_place(target: Path) -> None:
    """UsageError when there can be no directory of this name."""
    kinds = ((path, _kind(path)) for path in (target, *target.absolute().parents))
    path, kind = next((path, kind) for path, kind in kinds if kind)
    if not stat.S_ISDIR(kind):
        raise UsageError(f"{path}: is no directory; give another to write to")


def _kind(path: Path) -> int:
    """What a path leads to, as os.stat's mode; 0 when there is nothing. UsageError otherwise."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as why:
        raise UsageError(
            f"{path}: cannot be reached: {why.strerror}; give a directory that you may read"
        ) from why


def _require_origin(request: Request, hub: Hub | None, old: Manifest) -> None:
    """UsageError when a conversion was begun from elsewhere; a directory may have been moved."""
    before = old.origin.get("repository"), old.origin.get("revision")
    now = (hub.repo, hub.revision) if hub else (None, None)
    if before != now:
        place = f"hf://{before[0]}@{before[1]}" if before[0] else old.origin.get("directory")
        raise UsageError(
            f"{request.target}: was begun from {place}, not {request.source}; continue with the "
            "same, give another directory, or start again with --replace"
        )


# ---- the source ---------------------------------------------------------------------------------


def _open_hub(request: Request, old: Manifest | None) -> Hub | None:
    if not request.source.startswith(PREFIX):
        return None
    return Hub(request.source, old.origin.get("commit") if old else None)


def _require_directory(source: str) -> None:
    """UsageError when there is no such directory: what was looked for, and how a hub is named."""
    kind = _kind(Path(source))
    if stat.S_ISDIR(kind):
        return
    if kind:
        fault = gguf_fault([source])
        raise UsageError(fault or f"{source}: is a file; give the directory that it lies in")
    name = source.strip("/")
    example = name if name.count("/") == 1 and not source.startswith(("/", ".")) else "owner/name"
    raise UsageError(
        f"{source}: there is no such directory; give one with config.json and *.safetensors, or "
        f"{PREFIX}{example} to fetch a checkpoint from a hub"
    )


def _require_no_gguf(source: str, hub: Hub | None) -> None:
    fault = gguf_fault(hub.files if hub else (path.name for path in Path(source).glob("*.*")))
    if fault:
        raise UsageError(f"{source}: {fault}")


def _read_sides(request: Request, hub: Hub | None) -> side_files.Sides:
    if hub is None:
        return side_files.read_directory(Path(request.source))
    with tempfile.TemporaryDirectory() as directory:
        return side_files.read_hub(hub, Path(directory))


def _new_manifest(request: Request, hub: Hub | None, config: str) -> Manifest:
    if hub is not None:
        shards = [
            hub.header(file, number, Path(request.source))
            for number, file in enumerate(hub.shards())
        ]
        checkpoint = Checkpoint(Path(request.source), shards, merge(shards))
        origin = {"repository": hub.repo, "revision": hub.revision, "commit": hub.commit}
        return Manifest.of({}, origin, config, checkpoint, {})
    directory = Path(request.source)
    if read_record(request.target) and not any(directory.glob("*.safetensors")):
        raise UsageError(
            f"{request.target}: is converted, and {directory} holds no shards any more; there is "
            "nothing to do (colibri verify shows whether it is whole)"
        )
    checkpoint = open_checkpoint(directory)
    samples = {s.path.name: sample_of(s.path, s.size) for s in checkpoint.shards}
    origin = {"directory": str(Path(request.source).resolve())}
    return Manifest.of({}, origin, config, checkpoint, samples)


def open_contents(directory: Path) -> FloatSource | Container:
    """A model directory of any form that is run or converted, checked by its headers."""
    checkpoint, config = open_checkpoint(directory), ModelConfig.load(directory)
    if not any(is_coded(tensor) for tensor in checkpoint.tensors.values()):
        return Container(config, checkpoint)
    fields = read_object(directory / side_files.CONFIG, ConfigError) or {}
    return _float_source(config, checkpoint, fields)


def _open_source(
    request: Request, manifest: Manifest, sides: side_files.Sides
) -> FloatSource | StoredSource:
    where = f"{request.source}/config.json"
    fields = parse_object(manifest.config.encode(), where, ConfigError)
    generation = parse_object(
        sides.get(side_files.GENERATION, b"{}"), side_files.GENERATION, ConfigError
    )
    config = ModelConfig.parse(fields, where, generation)
    checkpoint = manifest.checkpoint(Path(request.source))
    own = any(is_own(shard) for shard in checkpoint.shards)
    if not own and not any(name.endswith(".qs") for name in checkpoint.tensors):
        return _float_source(config, checkpoint, fields)
    if request.layout == "colibri" and own:
        raise UsageError(
            f"{request.source}: is already quantised, and in colibri's own layout; there is "
            "nothing to convert"
        )
    if request.formats is not None:
        raise UsageError(
            f"{request.source}: is already quantised; converting its numbers again would lose "
            "twice. Leave the formats out to keep them, or convert from the float checkpoint"
        )
    return StoredSource(config, checkpoint)


def _float_source(
    config: ModelConfig, checkpoint: Checkpoint, fields: Mapping[str, Any]
) -> FloatSource:
    """A checkpoint by what its quantization_config says; ConfigError when it is not converted."""
    quantization = fields.get("quantization_config")
    require_plain(quantization, "config.json")
    return FloatSource(config, checkpoint, _fp8_block(quantization), lacks_zeros(quantization))


def _fp8_block(quantization: Any) -> tuple[int, int]:
    """weight_block_size, 128 x 128 by default; ConfigError when it is none."""
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if block is None:
        return FP8_BLOCK
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block)):
        raise ConfigError(f"config.json: weight_block_size is {block!r}; expected two numbers")
    if not all(0 < n <= 1 << 20 for n in block):
        raise ConfigError(f"config.json: weight_block_size is {block!r}, which is out of range")
    return block[0], block[1]


def _formats(request: Request, source: FloatSource) -> Formats:
    return replace(request.formats or Formats(), bf16=source.bf16)


def _files(request: Request, source: FloatSource | StoredSource) -> tuple[TargetFile, ...]:
    if isinstance(source, FloatSource):
        if request.layout != "colibri":
            raise UsageError(f"{request.source}: is not quantised; convert it first")
        return tuple(own_files(source, _formats(request, source), request.search))
    if request.layout == "public":
        return tuple(public_files(source))
    return tuple(own_files(source, source, False))


# ---- being the same as before -------------------------------------------------------------------


def _with_parameters(
    request: Request, manifest: Manifest, source: FloatSource | StoredSource, old: Manifest | None
) -> Manifest:
    """The manifest with this request's parameters, which must be those of `old`."""
    parameters = {"layout": request.layout, "encoder": ENCODER}
    if isinstance(source, FloatSource):
        formats = _formats(request, source)
        for name in ("experts", "dense", "mtp", "table"):
            parameters[f"--{name}"] = str(getattr(formats, name))
        parameters["--search"] = "on" if request.search else "off"
    if old is not None:
        require_same(request.target, old.parameters, parameters)
    return replace(manifest, parameters=parameters)


def _with_jobs(
    target: Path, manifest: Manifest, files: Sequence[TargetFile],
    jobs: Sequence[tuple[int, Job]], old: Manifest | None,
) -> Manifest:  # fmt: skip
    """The manifest with the digest of the plan, which must be that of `old`."""
    digest = hashlib.blake2b(digest_size=16)
    for file, job in jobs:
        digest.update(f"{files[file].name} {job.outputs} {job.extents}\n".encode())
    if old is not None and old.jobs != digest.hexdigest():
        raise UsageError(
            f"{target}: was begun by another version of colibri, which divides the work "
            "differently; continue with that version, or start again with --replace"
        )
    return replace(manifest, jobs=digest.hexdigest())


def progress(
    request: Request, manifest: Manifest, files: Sequence[TargetFile],
    jobs: Sequence[tuple[int, Job]],
) -> tuple[frozenset[int], dict[int, tuple[int, ...]]]:  # fmt: skip
    """Files that are finished, and jobs whose bytes lie safely in partial files."""
    target, work = request.target, request.target / WORK
    if request.replace:
        return frozenset(), {}
    begun = (work / "manifest.json").exists()
    record = None if begun else read_record(target)
    if record is not None:
        _require_record(target, record, manifest)
    held = sorted(path.name for path in target.glob("*.safetensors"))
    names = {file.name: number for number, file in enumerate(files)}
    stray = held if not begun and record is None else [n for n in held if n not in names]
    if stray:
        raise UsageError(
            f"{target}: already holds {stray[0]}, which this conversion did not write; give "
            "another directory or --replace"
        )
    finished = frozenset(names[name] for name in held)
    for number in finished:
        _require_image(target / files[number].name, files[number])
    done, _ = load_journal(work / JOURNAL) if begun else ({}, 0)
    whole = {
        number
        for number, file in enumerate(files)
        if _size(work / f"{file.name}{PARTIAL}") == file.image.size
    }
    return finished, {n: sums for n, sums in done.items() if jobs[n][0] in whole}


def _require_record(target: Path, record: Mapping[str, Any], manifest: Manifest) -> None:
    """UsageError when a finished conversion in `target` was another one."""
    require_same(target, record["parameters"], manifest.parameters)
    ours = json.loads(record_text(manifest))["source"]["files"]
    if record["source"].get("files") != ours:
        raise UsageError(
            f"{target}: holds a conversion of another source; give another directory or --replace"
        )


def _require_image(path: Path, file: TargetFile) -> None:
    """ContainerError when a file under its final name is not what this conversion writes."""
    shard = read_shard(path)
    tensors = {t.name: (t.dtype, t.shape) for t in shard.tensors}
    wanted = {spec.name: (spec.dtype, spec.shape) for spec in file.image.specs.values()}
    if shard.size != file.image.size or tensors != wanted:
        raise ContainerError(
            f"{path}: is not what this conversion writes; remove it, or start again with --replace"
        )


# ---- order --------------------------------------------------------------------------------------


def _ordered(files: Sequence[TargetFile]) -> tuple[tuple[int, Job], ...]:
    """All jobs, by the last source shard they need; first those that need an earlier one too, so
    that it can go; then by place in the shard."""

    def key(item: tuple[int, Job]) -> tuple[int, bool, int, int]:
        extents = item[1].extents
        last = max(e.shard for e in extents)
        first = min(e.shard for e in extents)
        return last, first == last, first, min(e.offset for e in extents if e.shard == last)

    return tuple(sorted(((n, job) for n, f in enumerate(files) for job in f.jobs), key=key))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
