"""Where a conversion's matrices come from: a checkpoint of floats or codes, or a container."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from colibri.checkpoint import Checkpoint
from colibri.config import ModelConfig
from colibri.container import Container, format_of
from colibri.contents import Contents
from colibri.convert.hints import hint_name, read_hints
from colibri.convert.matrices import FP8_BLOCK, SCALE_SUFFIXES, Matrices, by_weight
from colibri.convert.work import Copy, Encode, Extent, Keep, Matrix, Work
from colibri.encoder import I4, I8
from colibri.errors import ContainerError
from colibri.experts import expert_tensor_names
from colibri.formats import FLOATS, Format, Kind, MatrixRef
from colibri.inventory import PROJECTIONS, Entry, expert_name, expert_shape

# Scales of activations and of the cache of keys and values: those are not quantised so here.
_BESIDE = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")


class FloatSource(Contents):
    """A checkpoint in Hugging Face's layout: F32, BF16, F16, FP8, NVFP4 or integers.

    Every matrix is checked at opening, by headers alone (matrices.py): dtype, shape, and that codes
    have the scales that make them numbers.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        block: tuple[int, int] = FP8_BLOCK,
        lacks_zeros: bool = True,
    ) -> None:
        super().__init__(config, by_weight(checkpoint))
        self._matrices = Matrices(self.checkpoint, block, lacks_zeros)
        self._entries = {e.name: self._matrices.one(e.name, e.shape) for e in self.entries}
        self._experts = {layer: self._layer_experts(layer) for layer in self.sparse_layers}
        self.note_unused(set(self._entries), SCALE_SUFFIXES, _BESIDE)
        self.note_rounded(lambda name: self._entries[name].dtype == "F32")

    @property
    def bf16(self) -> frozenset[str]:
        """Matrices that are BF16 here: stored as BF16 they stay exact at half the bytes of f32."""
        return frozenset(
            e.name
            for e in self.entries
            if len(e.shape) == 2 and self._entries[e.name].dtype == "BF16"
        )

    def entry_work(self, entry: Entry, form: Format, first: int, rows: int, search: bool) -> Work:
        """Rows of a tensor outside the routed experts."""
        return _to(form, Encode(self._entries[entry.name], first, rows, form, search))

    def expert_work(
        self, layer: int, expert: int, projection: str, form: Format, search: bool
    ) -> Work:
        """One matrix of a routed expert."""
        source = self._experts[layer][expert][PROJECTIONS.index(projection)]
        return _to(form, Encode(source, 0, source.rows, form, search))

    # ---- finding and checking -----------------------------------------------------------------

    def _layer_experts(self, layer: int) -> list[tuple[Matrix, ...]]:
        names = expert_tensor_names(self.checkpoint, self.config, layer)
        if len(names) == 2:
            return self._fused(*names)
        return [
            tuple(
                self._matrices.one(expert_name(layer, e, p), expert_shape(self.config, p))
                for p in PROJECTIONS
            )
            for e in range(self.config.n_routed_experts)
        ]

    def _fused(self, gate_up: str, down: str) -> list[tuple[Matrix, ...]]:
        """gate_up_proj [E, 2I, H] (gate rows first) and down_proj [E, H, I]."""
        experts, inner = self.config.n_routed_experts, self.config.moe_intermediate_size
        hidden = self.config.hidden_size
        both = self._matrices.stack(gate_up, (experts, 2 * inner, hidden))
        below = self._matrices.stack(down, (experts, hidden, inner))
        half = inner * both[0].row_bytes
        return [
            (
                replace(pair, rows=inner),
                replace(pair, rows=inner, offset=pair.offset + half, first_row=inner),
                single,
            )
            for pair, single in zip(both, below, strict=True)
        ]


def _to(form: Format, encode: Encode) -> Work:
    """The work as it is, or to keep integers that `form` has too."""
    source, kinds = encode.source, {I4: Kind.INT4, I8: Kind.INT8}
    blocks = source.blocks
    if blocks is None or kinds.get(source.dtype) != form.kind or blocks.zeros is not None:
        return encode
    group = blocks.block[1] if blocks.cols > 1 else 0
    same = blocks.block[0] == 1 and form.group == group
    return Keep(encode) if same and form.row_bytes(source.cols) == source.row_bytes else encode


class StoredSource(Container):
    """A quantised container, the public engine's or colibri's own: its codes are copied.

    It is also its own choice of formats (layout.Choice): what it has is what is written. Public
    files that colibri wrote say in which kind of scales a matrix was before.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        super().__init__(config, checkpoint)
        self._hints = {k: v for shard in checkpoint.shards for k, v in read_hints(shard).items()}
        self._records: dict[int, dict[str, Format]] = {}

    def of(self, entry: Entry, config: ModelConfig) -> Format:
        """The format a tensor outside the routed experts has."""
        return self._hinted(entry.name, self.matrix(entry.name))

    def record(self, layer: int, config: ModelConfig) -> dict[str, Format]:
        """The formats of a layer's experts; ContainerError when experts differ among themselves."""
        if layer not in self._records:
            self._records[layer] = self._record(layer)
        return self._records[layer]

    def _record(self, layer: int) -> dict[str, Format]:
        table = self.experts(layer)
        forms = {}
        for column, projection in enumerate(PROJECTIONS):
            shapes = table[["format", "scale_format", "group"]][:, column]
            if len(np.unique(shapes)) > 1:
                raise ContainerError(
                    f"{self.directory}: experts of layer {layer} have {projection} matrices in "
                    "several formats; colibri's own layout stores a layer's in one"
                )
            name = expert_name(layer, 0, projection)
            forms[projection] = self._hinted(hint_name(layer, projection), self.matrix(name))
        return forms

    def entry_work(self, entry: Entry, form: Format, first: int, rows: int, search: bool) -> Work:
        """Rows of a tensor outside the routed experts."""
        return self._work(entry.name, form, first, rows)

    def expert_work(
        self, layer: int, expert: int, projection: str, form: Format, search: bool
    ) -> Work:
        """One matrix of a routed expert."""
        name = expert_name(layer, expert, projection)
        return self._work(name, form, 0, self.matrix(name).rows)

    def _work(self, name: str, form: Format, first: int, rows: int) -> Work:
        ref = self.matrix(name)
        if form.kind in FLOATS:
            source = Matrix(name, Kind(ref.format).name, ref.rows, ref.cols, ref.shard, ref.offset)
            return Encode(source, first, rows, form, False)
        row, scales = form.row_bytes(ref.cols), form.row_scales(ref.cols)
        stored = Kind(ref.scale_format)
        scale_row = scales * Format(form.kind, form.group, stored).scale_bytes
        payload = Extent(ref.shard, ref.offset + first * row, rows * row)
        place = Extent(ref.scale_shard, ref.scale_offset + first * scale_row, rows * scale_row)
        return Copy(name, payload, place, stored, form.scale)

    def _hinted(self, name: str, ref: MatrixRef) -> Format:
        """The format of a matrix, or the one it had before it was made public, of equal layout."""
        form = format_of(ref)
        hint = self._hints.get(name)
        if hint is None:
            return form
        sizes = [(f.kind, f.row_bytes(ref.cols), f.row_scales(ref.cols)) for f in (form, hint)]
        if sizes[0] != sizes[1]:
            raise ContainerError(f"{self.directory}: {name} is said to be {hint}, but is {form}")
        return hint
