"""The public engine's layout as a target: one-dimensional bytes, F32 scales in `T.qs`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from colibri.convert.hints import hint_name, write_hints
from colibri.convert.jobs import Job, TargetFile, entry_jobs, expert_job
from colibri.convert.source import StoredSource
from colibri.errors import ContainerError, UsageError
from colibri.formats import FLOATS, Format, Kind
from colibri.inventory import PROJECTIONS, Entry, expert_name, expert_shape
from colibri.layout import SHARD_BYTES, TensorSpec, matrix_shape, piece_rows
from colibri.resolve import public_format
from colibri.writer import ShardImage

_EXPERTS_A_UNIT = 32
_ALIGN = 8
_WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1}


@dataclass
class _Unit:
    """Tensors that stay together: of the globals, of a layer, or of some of its experts."""

    entries: list[Entry] = field(default_factory=list)
    experts: list[tuple[int, int]] = field(default_factory=list)  # (layer, expert)


def public_files(source: StoredSource) -> list[TargetFile]:
    """The files out-*, out-mtp-* and out-idx-* of a container.

    UsageError names the first matrix whose format the public layout cannot say.
    """
    config = source.config
    mtp, indexers = config.mtp_layer, [e for e in source.entries if e.part == "indexer"]
    main = [_Unit([e for e in source.entries if e.layer < 0])]
    last: list[_Unit] = []
    for layer in source.layers:
        entries = [e for e in source.entries if e.layer == layer and e.part != "indexer"]
        units = last if layer == mtp else main
        units.append(_Unit(entries))
        if layer in source.sparse_layers:
            for at in range(0, config.n_routed_experts, _EXPERTS_A_UNIT):
                experts = range(at, min(at + _EXPERTS_A_UNIT, config.n_routed_experts))
                units.append(_Unit(experts=[(layer, e) for e in experts]))
    families = (
        ("out", main),
        ("out-mtp", last),
        ("out-idx", [_Unit(indexers)] if indexers else []),
    )
    return [
        _file(source, f"{prefix}-{number:05}.safetensors", unit)
        for prefix, units in families
        for number, unit in enumerate(_packed(source, units))
    ]


def _packed(source: StoredSource, units: list[_Unit]) -> Iterator[_Unit]:
    """Units joined in order to files of at most SHARD_BYTES (but at least one unit)."""
    joined, room = _Unit(), SHARD_BYTES
    for unit in units:
        size = sum(spec.nbytes for spec, _ in _tensors(source, unit))
        if size > room and (joined.entries or joined.experts):
            yield joined
            joined, room = _Unit(), SHARD_BYTES
        joined = _Unit(joined.entries + unit.entries, joined.experts + unit.experts)
        room -= size
    if joined.entries or joined.experts:
        yield joined


def _file(source: StoredSource, name: str, unit: _Unit) -> TargetFile:
    tensors = list(_tensors(source, unit))
    specs = sorted((spec for spec, _ in tensors), key=lambda s: (-_WIDTH[s.dtype], s.name))
    forms = {hint: form for _, (hint, form) in tensors if form.kind not in FLOATS}
    jobs: list[Job] = []
    for entry in unit.entries:
        jobs += entry_jobs(source, entry, _public(source.of(entry, source.config)), ".qs")
    for layer, expert in unit.experts:
        record = source.record(layer, source.config)
        names = [(p, expert_name(layer, expert, p), _public(record[p])) for p in PROJECTIONS]
        jobs.append(expert_job(source, layer, expert, names, ".qs"))
    return TargetFile(name, ShardImage(specs, write_hints(forms), _ALIGN), jobs)


def _tensors(source: StoredSource, unit: _Unit) -> Iterator[tuple[TensorSpec, tuple[str, Format]]]:
    """Every stored tensor with the hint for its matrix and the format the matrix has now."""
    config = source.config
    for entry in unit.entries:
        form, shape = source.of(entry, config), matrix_shape(entry)
        for spec in _specs(entry.name, form, *shape, entry.shape):
            yield spec, (entry.name, form)
    for layer, expert in unit.experts:
        for projection, form in source.record(layer, config).items():
            name, shape = expert_name(layer, expert, projection), expert_shape(config, projection)
            for spec in _specs(name, form, *shape, shape, whole=True):
                yield spec, (hint_name(layer, projection), form)


def _specs(
    name: str, form: Format, rows: int, cols: int, shape: tuple[int, ...], whole: bool = False
) -> Iterator[TensorSpec]:
    step = rows if whole else min(piece_rows(cols), rows)
    if form.kind in FLOATS:
        yield TensorSpec(name, form.kind.name, shape, step * form.row_bytes(cols))
        return
    public = _public(form)
    nbytes, scales = rows * form.row_bytes(cols), rows * form.row_scales(cols)
    if not _sayable(public, nbytes, scales, rows, cols):
        raise UsageError(
            f"{name}: {form} of [{rows}, {cols}] has no form in the public engine's layout, which "
            "knows int8, int4 and int2 by row, int4 in groups of 16 to 256, and int3-g64"
        )
    yield TensorSpec(name, "U8", (nbytes,), step * form.row_bytes(cols))
    yield TensorSpec(name + ".qs", "F32", (scales,), step * form.row_scales(cols) * 4)


def _public(form: Format) -> Format:
    return form if form.kind in FLOATS else replace(form, scale=Kind.F32)


def _sayable(form: Format, nbytes: int, scales: int, rows: int, cols: int) -> bool:
    """Whether the byte counts lead back to a format of the same codes and scales."""
    try:
        read = public_format(nbytes, scales, rows, cols)
    except ContainerError:
        return False
    spread = [f.group or cols for f in (form, read)]
    return read.kind == form.kind and (spread[0] == spread[1] or min(spread) >= cols)
