"""colibri's own container, planned: which file holds which tensor, in which format, how large."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from colibri import inventory
from colibri.config import ModelConfig
from colibri.formats import FLOATS, Format, Kind
from colibri.inventory import PROJECTIONS, Entry, expert_shape
from colibri.resolve import FORMAT_VERSION, RECORD_ALIGN

PART_ALIGN = 64
SHARD_BYTES = 5 << 30  # a shard closes before it grows past this, but holds at least one layer
PIECE_WEIGHTS = 1 << 23  # weights of a dense matrix that are written and checksummed at a time
RECORD_ORDER = ("down", "gate", "up")
_INT8 = Format(Kind.INT8, 0, Kind.F16)
_INT4 = Format(Kind.INT4, 64, Kind.F16)
_DTYPES = {Kind.F32: "F32", Kind.BF16: "BF16", Kind.F16: "F16", Kind.INT8: "I8"}
_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}


class Choice(Protocol):
    """Says in which format each tensor of a container is stored."""

    def of(self, entry: Entry, config: ModelConfig) -> Format:
        """The format of one tensor outside the routed experts."""

    def record(self, layer: int, config: ModelConfig) -> dict[str, Format]:
        """The formats of a layer's routed experts, by projection."""


@dataclass(frozen=True)
class Formats:
    """What to store each part in. The keep-list (norms, router, biases) stays as exact as it is:
    f32, or bf16 for the matrices named in `bf16`, which their source has in bf16."""

    experts: Format = _INT4
    dense: Format = _INT8
    mtp: Format = _INT8
    table: Format = _INT8  # embedding and head
    bf16: frozenset[str] = frozenset()

    def of(self, entry: Entry, config: ModelConfig) -> Format:
        """The format of one tensor outside the routed experts."""
        if entry.keep:
            return Format(Kind.BF16 if entry.name in self.bf16 else Kind.F32)
        if entry.layer < 0:
            return self.table
        return self.mtp if entry.layer == config.mtp_layer else self.dense

    def of_experts(self, layer: int, config: ModelConfig) -> Format:
        """The format of a layer's routed experts."""
        return self.mtp if layer == config.mtp_layer else self.experts

    def record(self, layer: int, config: ModelConfig) -> dict[str, Format]:
        """The formats of a layer's routed experts, by projection: all the same."""
        return dict.fromkeys(PROJECTIONS, self.of_experts(layer, config))


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor; `piece` bytes are written and checksummed at a time."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    piece: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        size = _DTYPE_BYTES[self.dtype]
        for dim in self.shape:
            size *= dim
        return size

    @property
    def pieces(self) -> int:
        """How many pieces the tensor is written in."""
        return -(-self.nbytes // self.piece) if self.piece else 0


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of one expert lie in its record: {projection: (data, scales)} offsets."""

    forms: Mapping[str, Format]
    offsets: dict[str, tuple[int, int]]
    nbytes: int

    @property
    def form(self) -> Format:
        """The format of all three projections."""
        (form,) = set(self.forms.values())
        return form


@dataclass
class ShardPlan:
    """One file: expert layers (records come first), other entries, and the specs of both."""

    name: str
    expert_layers: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, header not counted."""
        return sum(spec.nbytes for spec in self.specs)


def record_layout(config: ModelConfig, forms: Format | Mapping[str, Format]) -> RecordLayout:
    """down, gate, up, each followed by its scales; parts at multiples of 64, padded to 4096.

    `forms`: one format for all three projections, or one for each.
    """
    if isinstance(forms, Format):
        forms = dict.fromkeys(PROJECTIONS, forms)
    at, offsets = 0, {}
    for projection in RECORD_ORDER:
        rows, cols = expert_shape(config, projection)
        form = forms[projection]
        data = at
        scales = _align(data + rows * form.row_bytes(cols), PART_ALIGN)
        at = _align(scales + rows * form.row_scales(cols) * form.scale_bytes, PART_ALIGN)
        offsets[projection] = (data, scales)
    return RecordLayout(forms, offsets, _align(at, RECORD_ALIGN))


def plan_shards(
    config: ModelConfig, formats: Choice, mtp: bool, indexers: Iterable[int]
) -> list[ShardPlan]:
    """Files of a container: dense-*, experts-*, mtp-*. `indexers`: layers that have their own."""
    owners = set(indexers)
    main = range(config.num_hidden_layers)
    shards = _numbered("dense", _dense_groups(config, formats, owners))
    sparse = [layer for layer in main if inventory.is_sparse(config, layer)]
    shards += _numbered("experts", _expert_groups(config, formats, sparse))
    if mtp and config.mtp_layer is not None:
        entries = _layer_entries(config, config.mtp_layer, owners)
        shards += _numbered("mtp", [([config.mtp_layer], entries)])
    for shard in shards:
        _fill(shard, config, formats)
    return shards


_Group = tuple[list[int], list[Entry]]


def _numbered(kind: str, groups: list[_Group]) -> list[ShardPlan]:
    return [
        ShardPlan(f"{kind}-{k:05}-of-{len(groups):05}.safetensors", layers, entries)
        for k, (layers, entries) in enumerate(groups, 1)
    ]


def _layer_entries(config: ModelConfig, layer: int, owners: set[int]) -> list[Entry]:
    indexer = inventory.indexer_entries(config, layer) if layer in owners else []
    return inventory.layer_entries(config, layer) + indexer


def _dense_groups(config: ModelConfig, formats: Choice, owners: set[int]) -> list[_Group]:
    units = [inventory.global_entries(config)]
    units += [_layer_entries(config, layer, owners) for layer in range(config.num_hidden_layers)]
    sizes = [
        sum(formats.of(entry, config).nbytes(*matrix_shape(entry)) for entry in unit)
        for unit in units
    ]
    return [([], [e for at in group for e in units[at]]) for group in _pack(sizes)]


def _expert_groups(config: ModelConfig, formats: Choice, sparse: list[int]) -> list[_Group]:
    records = [record_layout(config, formats.record(layer, config)) for layer in sparse]
    sizes = [config.n_routed_experts * record.nbytes for record in records]
    return [([sparse[at] for at in group], []) for group in _pack(sizes)]


def _pack(sizes: list[int]) -> list[list[int]]:
    """Consecutive units in groups of at most SHARD_BYTES (but at least one unit)."""
    groups: list[list[int]] = []
    room = 0
    for at, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(at)
        room -= size
    return groups


def _fill(shard: ShardPlan, config: ModelConfig, formats: Choice) -> None:
    """Specs in file order (records, then wide dtypes before narrow, by name) and the metadata."""
    records, layouts = [], {}
    for layer in shard.expert_layers:
        layout = record_layout(config, formats.record(layer, config))
        name, shape = inventory.records_name(layer), (config.n_routed_experts, layout.nbytes)
        records.append(TensorSpec(name, "U8", shape, layout.nbytes))
        layouts[name] = {
            projection: describe(layout.forms[projection]) | {"offset": data, "scales": scales}
            for projection, (data, scales) in layout.offsets.items()
        }
    rest, described = [], {}
    for entry in shard.entries:
        form = formats.of(entry, config)
        rest += tensor_specs(entry, form)
        if form.kind not in FLOATS:
            described[entry.name] = describe(form)
    rest.sort(key=lambda spec: (-_DTYPE_BYTES[spec.dtype], spec.name))
    shard.specs = records + rest
    shard.metadata = {"format": "colibri", "format_version": FORMAT_VERSION}
    for key, section in (("tensors", described), ("experts", layouts)):
        if section:
            shard.metadata[key] = json.dumps(section, separators=(",", ":"), sort_keys=True)


def tensor_specs(entry: Entry, form: Format) -> list[TensorSpec]:
    """How one entry is stored: its payload and, when quantised, `NAME.scales`, piece by piece of
    the same rows."""
    rows, cols = matrix_shape(entry)
    step = min(piece_rows(cols), rows)
    shape = entry.shape if form.kind in FLOATS else (rows, form.row_bytes(cols))
    dtype = _DTYPES.get(form.kind, "U8")
    specs = [TensorSpec(entry.name, dtype, shape, step * form.row_bytes(cols))]
    if form.kind not in FLOATS:
        shape, dtype = (rows, form.row_scales(cols)), _DTYPES[form.scale]
        piece = step * form.row_scales(cols) * form.scale_bytes
        specs.append(TensorSpec(entry.name + ".scales", dtype, shape, piece))
    return specs


def piece_rows(cols: int) -> int:
    """Rows of a dense matrix in one piece."""
    return max(1, PIECE_WEIGHTS // cols)


def describe(form: Format) -> dict[str, str | int]:
    """A format as the metadata writes it."""
    return {
        "format": form.kind.name.lower(),
        "group": form.group,
        "scale": form.scale.name.lower(),
    }


def matrix_shape(entry: Entry) -> tuple[int, int]:
    """Rows and columns; a vector is one row."""
    rows, cols = entry.shape if len(entry.shape) == 2 else (1, entry.shape[0])
    return rows, cols


def _align(at: int, step: int) -> int:
    return -(-at // step) * step
