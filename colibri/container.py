"""A model directory, opened: its configuration, and where every matrix lies in its shards."""

import hashlib
import re
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy as np

from colibri import inventory
from colibri.checkpoint import MISSING_LIMIT, Checkpoint, missing_error, open_checkpoint
from colibri.config import ModelConfig
from colibri.errors import ContainerError
from colibri.experts import expert_table, expert_tensor_names, matrix_ref
from colibri.formats import FLOATS, Format, Kind, MatrixRef
from colibri.inventory import EMBED, HEAD, PROJECTIONS, Entry
from colibri.quantize import decode
from colibri.resolve import Resolver, is_own
from colibri.shard import Shard, TensorInfo

INDEX_NONE, INDEX_FULL, INDEX_SHARED = 0, 1, 2
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_NUMPY = {Kind.F32: "<f4", Kind.F16: "<f2", Kind.BF16: "<u2", Kind.INT8: "<i1"}


class Container:
    """Opened by `Container.open(directory)`, which reads headers only and checks everything.

    `entries` are the tensors outside the routed experts, in layer order; `notes` are sentences
    about what is absent or ignored. Layers are 0..num_hidden_layers-1, then the MTP layer.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.notes: list[str] = list(config.warnings)
        self.has_mtp = self._find_mtp()
        self.has_indexer = self._find_indexers()
        self.has_mtp_indexer = self.has_mtp and self._find_mtp_indexer()
        self.entries = self._require_entries()
        resolver = Resolver(checkpoint)
        self._matrices = {entry.name: _entry_matrix(resolver, entry) for entry in self.entries}
        self._experts = {
            layer: expert_table(resolver, config, layer) for layer in self._sparse_layers()
        }
        self._note_ignored()

    @classmethod
    def open(cls, directory: Path | str) -> "Container":
        """Open a model directory. ConfigError or ContainerError names file, fault and next step."""
        config = ModelConfig.load(directory)
        return cls(config, open_checkpoint(directory))

    @property
    def directory(self) -> Path:
        """The directory that was opened."""
        return self.checkpoint.directory

    @property
    def shards(self) -> list[Shard]:
        """Files in the order MatrixRef.shard counts them."""
        return self.checkpoint.shards

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every stored tensor by name."""
        return self.checkpoint.tensors

    @property
    def layers(self) -> range:
        """Layer numbers, the MTP layer last when it is there."""
        return inventory.layers(self.config, self.has_mtp)

    @property
    def is_own_layout(self) -> bool:
        """Whether all shards were written by colibri's writer."""
        return all(is_own(shard) for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over names, sizes and headers of all shards and the architecture."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            digest.update(f"{shard.path.name}\0{shard.size}\0{shard.digest}\n".encode())
        digest.update(repr(self.config).encode())
        return digest.hexdigest()

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Per layer: whether it routes to experts."""
        return tuple(inventory.is_sparse(self.config, layer) for layer in self.layers)

    @property
    def index_kinds(self) -> tuple[int, ...]:
        """Per layer: INDEX_FULL, INDEX_SHARED, or INDEX_NONE when its attention is dense."""
        return tuple(self._index_kind(layer) for layer in self.layers)

    def matrix(self, name: str) -> MatrixRef:
        """Where a matrix lies (a vector is one row). The tied head is the embedding."""
        if name == HEAD and self.config.tie_word_embeddings:
            name = EMBED
        found = _EXPERT.fullmatch(name)
        if found and int(found[1]) in self._experts and int(found[2]) < self._expert_count:
            table = self._experts[int(found[1])]
            return matrix_ref(table, int(found[2]), PROJECTIONS.index(found[3]))
        if name not in self._matrices:
            raise ContainerError(f"{self.directory}: {name} is not a matrix of this model")
        return self._matrices[name]

    def expert(self, layer: int, expert: int) -> tuple[MatrixRef, MatrixRef, MatrixRef]:
        """Gate, up and down matrices of one routed expert."""
        table = self.experts(layer)
        if not 0 <= expert < self._expert_count:
            raise ContainerError(f"{self.directory}: layer {layer} has no expert {expert}")
        gate, up, down = (matrix_ref(table, expert, column) for column in range(3))
        return gate, up, down

    def experts(self, layer: int) -> np.ndarray:
        """All experts of a layer as an array of clb_tensor: MATRIX_DTYPE [experts, 3]."""
        if layer not in self._experts:
            raise ContainerError(f"{self.directory}: layer {layer} has no routed experts")
        return self._experts[layer]

    def read_array(self, name: str) -> np.ndarray:
        """A tensor as f32, dequantised: [rows, cols], or [n] for a vector."""
        ref = self.matrix(name)
        form = format_of(ref)
        data = self._read(ref.shard, ref.offset, ref.rows * form.row_bytes(ref.cols), name)
        payload = np.frombuffer(data, _NUMPY.get(form.kind, "<u1")).reshape(ref.rows, -1)
        scales = None
        if form.kind not in FLOATS:
            count = ref.rows * form.row_scales(ref.cols)
            raw = self._read(ref.scale_shard, ref.scale_offset, count * form.scale_bytes, name)
            scales = np.frombuffer(raw, _NUMPY[form.scale]).reshape(ref.rows, -1)
        array = decode(payload, scales, form, ref.cols)
        vector = any(entry.name == name and len(entry.shape) == 1 for entry in self.entries)
        return array[0] if vector else array

    def _read(self, shard: int, offset: int, size: int, name: str) -> bytes:
        path = self.shards[shard].path
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as why:
            raise ContainerError(f"{path}: cannot read {name}: {why.strerror}") from why
        if len(data) != size:
            raise ContainerError(f"{path}: short read of {name}: the file changed while open")
        return data

    # ---- what is there ------------------------------------------------------------------------

    @property
    def _expert_count(self) -> int:
        return self.config.n_routed_experts

    def _sparse_layers(self) -> list[int]:
        return [layer for layer in self.layers if inventory.is_sparse(self.config, layer)]

    def _index_kind(self, layer: int) -> int:
        if layer == self.config.mtp_layer:
            return INDEX_FULL if self.has_mtp_indexer else INDEX_NONE
        if not self.has_indexer:
            return INDEX_NONE
        return INDEX_FULL if inventory.has_own_indexer(self.config, layer) else INDEX_SHARED

    def _any(self, names: list[str]) -> bool:
        """Whether a part is there: one tensor is enough, the rest of it is then required."""
        return any(name in self.tensors for name in names)

    def _find_mtp(self) -> bool:
        layer = self.config.mtp_layer
        if layer is None:
            return False
        names = [entry.name for entry in inventory.layer_entries(self.config, layer)]
        names += expert_tensor_names(self.checkpoint, self.config, layer)
        if self._any(names):
            return True
        self.notes.append(
            f"no MTP layer (model.layers.{layer}.*): the model cannot draft for itself"
        )
        return False

    def _find_indexers(self) -> bool:
        full = [
            layer
            for layer in range(self.config.num_hidden_layers)
            if inventory.has_own_indexer(self.config, layer)
        ]
        if self._any([e.name for n in full for e in inventory.indexer_entries(self.config, n)]):
            return True
        self.notes.append(
            "no indexers: attention is dense, which differs from the model once a text is "
            f"longer than index_topk ({self.config.index_topk} tokens)"
        )
        return False

    def _find_mtp_indexer(self) -> bool:
        layer = self.config.num_hidden_layers
        if self._any([entry.name for entry in inventory.indexer_entries(self.config, layer)]):
            return True
        if self.has_indexer:
            self.notes.append("the MTP layer has no indexer: its drafts attend to every key")
        return False

    def _require_entries(self) -> list[Entry]:
        """All entries outside the routed experts; ContainerError lists what is missing."""
        entries = inventory.global_entries(self.config)
        for layer in self.layers:
            entries += inventory.layer_entries(self.config, layer)
            if self._index_kind(layer) == INDEX_FULL:
                entries += inventory.indexer_entries(self.config, layer)
        experts = (
            name
            for layer in self._sparse_layers()
            for name in expert_tensor_names(self.checkpoint, self.config, layer)
        )
        names = chain((entry.name for entry in entries), experts)
        absent = (name for name in names if name not in self.tensors)
        missing = list(islice(absent, MISSING_LIMIT))
        if missing:
            roles = {entry.name: entry for entry in entries}
            raise missing_error(self.checkpoint, missing, _describe(missing[0], roles))
        return entries

    def _note_ignored(self) -> None:
        used = set(self._matrices)
        sparse = {f"model.layers.{layer}" for layer in self._experts}
        unused = [
            name
            for name in self.tensors
            if name.partition(".mlp.experts.")[0] not in sparse
            and name.removesuffix(".qs").removesuffix(".scales") not in used
        ]
        if unused:
            self.notes.append(
                f"{len(unused)} stored tensors are not part of this model and are ignored, "
                f"first {unused[0]}"
            )
        biases = [entry.name for entry in self.entries if entry.role == "router_bias"]
        rounded = [name for name in biases if self._matrices[name].format != Kind.F32]
        if rounded:
            self.notes.append(f"{rounded[0]} is not F32: routing may differ from the model's")


def format_of(ref: MatrixRef) -> Format:
    """The storage format of a matrix."""
    kind = Kind(ref.format)
    return Format(kind) if kind in FLOATS else Format(kind, ref.group, Kind(ref.scale_format))


def _entry_matrix(resolver: Resolver, entry: Entry) -> MatrixRef:
    if len(entry.shape) == 2:
        return resolver.matrix(entry.name, *entry.shape)
    ref = resolver.matrix(entry.name, 1, entry.shape[0])
    if ref.format not in FLOATS:
        tensor = resolver.checkpoint.tensors[entry.name]
        raise resolver.fail(tensor, "is quantised; a vector must be F32, BF16 or F16")
    return ref


def _describe(name: str, roles: dict[str, Entry]) -> str:
    entry = roles.get(name)
    if entry is not None:
        where = f"layer {entry.layer} " if entry.layer >= 0 else ""
        return f"{where}{entry.role} ({entry.part})"
    found = re.match(r"model\.layers\.(\d+)\.mlp\.experts\.", name)
    return f"layer {found[1]} routed experts" if found else "tensor"
