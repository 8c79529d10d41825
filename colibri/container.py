"""A model directory, opened: its configuration, and where every matrix lies in its shards."""

import hashlib
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from colibri.checkpoint import Checkpoint, open_checkpoint
from colibri.config import ModelConfig
from colibri.contents import Contents
from colibri.errors import ContainerError
from colibri.experts import expert_table, matrix_ref
from colibri.foreign import require_runnable
from colibri.formats import FLOATS, Format, Kind, MatrixRef
from colibri.inventory import EMBED, HEAD, PROJECTIONS, Entry, records_name
from colibri.mirror import Mirror, open_mirror
from colibri.quantize import decode
from colibri.resolve import Resolver, is_own

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_NUMPY = {Kind.F32: "<f4", Kind.F16: "<f2", Kind.BF16: "<u2", Kind.INT8: "<i1"}


class Container(Contents):
    """Opened by `Container.open(directory)`, which reads headers only and checks everything."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        require_runnable(checkpoint)
        super().__init__(config, checkpoint)
        resolver = Resolver(checkpoint)
        self._matrices = {entry.name: _entry_matrix(resolver, entry) for entry in self.entries}
        self._experts = {
            layer: expert_table(resolver, config, layer) for layer in self.sparse_layers
        }
        self.mirrors: tuple[Mirror, ...] = ()
        self.note_unused(set(self._matrices), (".qs", ".scales"))
        self.note_rounded(lambda name: self._matrices[name].format == Kind.F32)

    @classmethod
    def open(cls, directory: Path | str, mirrors: Sequence[Path] = ()) -> "Container":
        """Open a model directory, and directories with copies of its expert files on other drives.

        ConfigError or ContainerError names file, fault and next step.
        """
        config = ModelConfig.load(directory)
        container = cls(config, open_checkpoint(directory))
        wanted = container.expert_shards
        container.mirrors = tuple(open_mirror(path, container.shards, wanted) for path in mirrors)
        container.notes += [
            f"{mirror.directory} is on the same drive as the model; a mirror there gains nothing"
            for mirror in container.mirrors
            if mirror.same_drive(container.shards)
        ]
        return container

    @property
    def expert_shards(self) -> list[int]:
        """Numbers of the shards that hold routed experts."""
        tables = self._experts.values()
        places = (table[name] for table in tables for name in ("shard", "scale_shard"))
        return sorted(set().union(*(place.ravel().tolist() for place in places)))

    @property
    def is_own_layout(self) -> bool:
        """Whether all shards were written by colibri's writer."""
        return all(is_own(shard) for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over names, sizes and headers of all shards and the architecture."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            digest.update(os.fsencode(shard.path.name))
            digest.update(f"\0{shard.size}\0{shard.digest}\n".encode())
        digest.update(repr(self.config.architecture).encode())
        return digest.hexdigest()

    def matrix(self, name: str) -> MatrixRef:
        """Where a matrix lies (a vector is one row). The tied head is the embedding."""
        if name == HEAD and self.config.tie_word_embeddings:
            name = EMBED
        found = _EXPERT.fullmatch(name)
        if (
            found
            and int(found[1]) in self._experts
            and int(found[2]) < self.config.n_routed_experts
        ):
            table = self._experts[int(found[1])]
            return matrix_ref(table, int(found[2]), PROJECTIONS.index(found[3]))
        if name not in self._matrices:
            raise ContainerError(f"{self.directory}: {name} is not a matrix of this model")
        return self._matrices[name]

    def expert(self, layer: int, expert: int) -> tuple[MatrixRef, MatrixRef, MatrixRef]:
        """Gate, up and down matrices of one routed expert."""
        table = self.experts(layer)
        if not 0 <= expert < self.config.n_routed_experts:
            raise ContainerError(f"{self.directory}: layer {layer} has no expert {expert}")
        gate, up, down = (matrix_ref(table, expert, column) for column in range(3))
        return gate, up, down

    def expert_bytes(self, layer: int) -> int:
        """Bytes of one routed expert of a layer as it is read: its record, else its matrices."""
        records = self.tensors.get(records_name(layer))
        if records is not None:
            return records.shape[1]
        return sum(format_of(ref).nbytes(ref.rows, ref.cols) for ref in self.expert(layer, 0))

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
