"""Which parts of a model a set of tensors holds: MTP layer, indexers, and what is missing."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from colibri import inventory
from colibri.amounts import plural
from colibri.checkpoint import MISSING_LIMIT, Checkpoint, missing_error
from colibri.config import ModelConfig
from colibri.experts import expert_tensor_names
from colibri.foreign import require_known
from colibri.inventory import HEAD, Entry
from colibri.shard import Shard, TensorInfo

INDEX_NONE, INDEX_FULL, INDEX_SHARED = 0, 1, 2


class Contents:
    """The parts of a model that its shards hold, judged by names alone.

    `entries` are the tensors outside the routed experts, in layer order; `notes` are sentences
    about what is absent or ignored. Layers are 0..num_hidden_layers-1, then the MTP layer.
    ContainerError names what is missing of a part that is there.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        if HEAD in checkpoint.tensors:  # one that is stored counts, as it does for transformers
            config = replace(config, tie_word_embeddings=False)
        require_known(checkpoint)
        self.config = config
        self.checkpoint = checkpoint
        self.notes: list[str] = list(config.warnings)
        self.has_mtp = self._find_mtp()
        self.has_indexer = self._find_indexers()
        self.has_mtp_indexer = self.has_mtp and self._find_mtp_indexer()
        self.entries = self._require_entries()

    @property
    def directory(self) -> Path:
        """The directory that was opened."""
        return self.checkpoint.directory

    @property
    def shards(self) -> list[Shard]:
        """Files in the order MatrixRef.shard counts them."""
        return self.checkpoint.shards

    @property
    def bytes(self) -> int:
        """Of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every stored tensor by name."""
        return self.checkpoint.tensors

    @property
    def layers(self) -> range:
        """Layer numbers, the MTP layer last when it is there."""
        return inventory.layers(self.config, self.has_mtp)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Per layer: whether it routes to experts."""
        return tuple(inventory.is_sparse(self.config, layer) for layer in self.layers)

    @property
    def index_kinds(self) -> tuple[int, ...]:
        """Per layer: INDEX_FULL, INDEX_SHARED, or INDEX_NONE when its attention is dense."""
        return tuple(self._index_kind(layer) for layer in self.layers)

    @property
    def summary(self) -> str:
        """What there is, counted: layers, experts, tensors."""
        layers = plural(self.config.num_hidden_layers, "layer")
        layers += " and the MTP layer" if self.has_mtp else ""
        experts = len(self.sparse_layers) * self.config.n_routed_experts
        return f"{layers}, {plural(experts, 'expert')}, {plural(len(self.tensors), 'tensor')}"

    def note_unused(
        self, used: set[str], suffixes: tuple[str, ...], beside: tuple[str, ...] = ()
    ) -> None:
        """Say which stored tensors no part of the model uses; `suffixes` are those of scales, and
        names that end as `beside` are known to be of no use here."""
        known = used.union(self._expert_names())
        names = (name for name in self.tensors if not name.endswith(beside))
        unused = [name for name in names if _stem(name, suffixes) not in known]
        if unused:
            self.notes.append(
                f"stored tensors that are not part of this model are ignored: {len(unused)}, "
                f"first {unused[0]}"
            )

    def note_rounded(self, is_f32: Callable[[str], bool]) -> None:
        """Say when router biases are not stored as the model has them."""
        biases = [entry.name for entry in self.entries if entry.role == "router_bias"]
        rounded = [name for name in biases if not is_f32(name)]
        if rounded:
            self.notes.append(f"{rounded[0]} is not F32: routing may differ from the model's")

    @property
    def sparse_layers(self) -> list[int]:
        """Numbers of the layers that route to experts."""
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

    def _expert_names(self) -> Iterator[str]:
        for layer in self.sparse_layers:
            yield from expert_tensor_names(self.checkpoint, self.config, layer)

    def _require_entries(self) -> list[Entry]:
        """All entries outside the routed experts; ContainerError lists what is missing."""
        entries = inventory.global_entries(self.config)
        for layer in self.layers:
            entries += inventory.layer_entries(self.config, layer)
            if self._index_kind(layer) == INDEX_FULL:
                entries += inventory.indexer_entries(self.config, layer)
        names = chain((entry.name for entry in entries), self._expert_names())
        absent = (name for name in names if name not in self.tensors)
        missing = list(islice(absent, MISSING_LIMIT))
        if missing:
            roles = {entry.name: entry for entry in entries}
            raise missing_error(self.checkpoint, missing, _describe(missing[0], roles))
        return entries


def _stem(name: str, suffixes: tuple[str, ...]) -> str:
    for suffix in suffixes:
        name = name.removesuffix(suffix)
    return name


def _describe(name: str, roles: dict[str, Entry]) -> str:
    entry = roles.get(name)
    if entry is not None:
        where = f"layer {entry.layer} " if entry.layer >= 0 else ""
        return f"{where}{entry.role} ({entry.part})"
    found = re.match(r"model\.layers\.(\d+)\.mlp\.experts\.", name)
    return f"layer {found[1]} routed experts" if found else "tensor"
