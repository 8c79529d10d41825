"""colibri's own container, planned: which file holds which tensor, in which format, how large."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from colibri import inventory
from colibri.config import ModelConfig
from colibri.formats import FLOATS, Format, Kind
from colibri.inventory import Entry, expert_shape
from colibri.resolve import FORMAT_VERSION, RECORD_ALIGN

PART_ALIGN = 64
SHARD_BYTES = 5 << 30  # a shard closes before it grows past this, but holds at least one layer
RECORD_ORDER = ("down", "gate", "up")
_INT8 = Format(Kind.INT8, 0, Kind.F16)
_INT4 = Format(Kind.INT4, 64, Kind.F16)
_DTYPES = {Kind.F32: "F32", Kind.BF16: "BF16", Kind.F16: "F16", Kind.INT8: "I8"}
_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class Formats:
    """What to store each part in; the keep-list (norms, router, biases) is always f32."""

    experts: Format = _INT4
    dense: Format = _INT8
    mtp: Format = _INT8
    table: Format = _INT8  # embedding and head

    def of(self, entry: Entry, config: ModelConfig) -> Format:
        """The format of one tensor outside the routed experts."""
        if entry.keep:
            return Format(Kind.F32)
        if entry.layer < 0:
            return self.table
        return self.mtp if entry.layer == config.mtp_layer else self.dense

    def of_experts(self, layer: int, config: ModelConfig) -> Format:
        """The format of a layer's routed experts."""
        return self.mtp if layer == config.mtp_layer else self.experts


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


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of one expert lie in its record: {projection: (data, scales)} offsets."""

    form: Format
    offsets: dict[str, tuple[int, int]]
    nbytes: int


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


def record_layout(config: ModelConfig, form: Format) -> RecordLayout:
    """down, gate, up, each followed by its scales; parts at multiples of 64, padded to 4096."""
    at, offsets = 0, {}
    for projection in RECORD_ORDER:
        rows, cols = expert_shape(config, projection)
        data = at
        scales = _align(data + rows * form.row_bytes(cols), PART_ALIGN)
        at = _align(scales + rows * form.row_scales(cols) * form.scale_bytes, PART_ALIGN)
        offsets[projection] = (data, scales)
    return RecordLayout(form, offsets, _align(at, RECORD_ALIGN))


def plan_shards(
    config: ModelConfig, formats: Formats, mtp: bool, indexers: Iterable[int]
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


def _dense_groups(config: ModelConfig, formats: Formats, owners: set[int]) -> list[_Group]:
    units = [inventory.global_entries(config)]
    units += [_layer_entries(config, layer, owners) for layer in range(config.num_hidden_layers)]
    sizes = [
        sum(formats.of(entry, config).nbytes(*_matrix_shape(entry)) for entry in unit)
        for unit in units
    ]
    return [([], [e for at in group for e in units[at]]) for group in _pack(sizes)]


def _expert_groups(config: ModelConfig, formats: Formats, sparse: list[int]) -> list[_Group]:
    size = config.n_routed_experts * record_layout(config, formats.experts).nbytes
    return [([sparse[at] for at in group], []) for group in _pack([size] * len(sparse))]


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


def _fill(shard: ShardPlan, config: ModelConfig, formats: Formats) -> None:
    """Specs in file order (records, then wide dtypes before narrow, by name) and the metadata."""
    records, layouts = [], {}
    for layer in shard.expert_layers:
        layout = record_layout(config, formats.of_experts(layer, config))
        name, shape = inventory.records_name(layer), (config.n_routed_experts, layout.nbytes)
        records.append(TensorSpec(name, "U8", shape, layout.nbytes))
        layouts[name] = {
            projection: describe(layout.form) | {"offset": data, "scales": scales}
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
    """How one entry is stored: its payload and, when quantised, `NAME.scales`."""
    rows, cols = _matrix_shape(entry)
    shape = entry.shape if form.kind in FLOATS else (rows, form.row_bytes(cols))
    specs = [_spec(entry.name, _DTYPES.get(form.kind, "U8"), shape)]
    if form.kind not in FLOATS:
        shape = (rows, form.row_scales(cols))
        specs.append(_spec(entry.name + ".scales", _DTYPES[form.scale], shape))
    return specs


def _spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    whole = TensorSpec(name, dtype, shape, 0).nbytes
    return TensorSpec(name, dtype, shape, whole)


def describe(form: Format) -> dict[str, str | int]:
    """A format as the metadata writes it."""
    return {
        "format": form.kind.name.lower(),
        "group": form.group,
        "scale": form.scale.name.lower(),
    }


def _matrix_shape(entry: Entry) -> tuple[int, int]:
    rows, cols = entry.shape if len(entry.shape) == 2 else (1, entry.shape[0])
    return rows, cols


def _align(at: int, step: int) -> int:
    return -(-at // step) * step
