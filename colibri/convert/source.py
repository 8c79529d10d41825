"""Where a conversion's matrices come from: a float checkpoint, FP8 too, or a container."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from colibri.checkpoint import Checkpoint
from colibri.config import ModelConfig
from colibri.container import Container, format_of
from colibri.contents import Contents
from colibri.convert.hints import hint_name, read_hints
from colibri.convert.work import Blocks, Copy, Encode, Extent, Floats, Work
from colibri.encoder import F8, SOURCE_BYTES
from colibri.errors import ContainerError
from colibri.experts import expert_tensor_names
from colibri.formats import FLOATS, Format, Kind, MatrixRef
from colibri.inventory import PROJECTIONS, Entry, expert_name, expert_shape
from colibri.shard import TensorInfo

SCALE_SUFFIXES = ("_scale_inv", "_scale")
FP8_BLOCK = (128, 128)
_SCALE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


class FloatSource(Contents):
    """A checkpoint in Hugging Face's layout: F32, BF16, F16, or FP8 (e4m3) with scales.

    Every matrix is checked at opening, by headers alone: dtype, shape, and for FP8 scales that are
    one number, one a row, or one a block (weights down and across). FP8 without scales is refused.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, block: tuple[int, int] = FP8_BLOCK
    ) -> None:
        super().__init__(config, checkpoint)
        self.block = block
        self._entries = {e.name: self._floats(e.name, e.shape) for e in self.entries}
        self._experts = {layer: self._layer_experts(layer) for layer in self.sparse_layers}
        self.note_unused(set(self._entries), SCALE_SUFFIXES)
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
        return Encode(self._entries[entry.name], first, rows, form, search)

    def expert_work(
        self, layer: int, expert: int, projection: str, form: Format, search: bool
    ) -> Work:
        """One matrix of a routed expert."""
        source = self._experts[layer][expert][PROJECTIONS.index(projection)]
        return Encode(source, 0, source.rows, form, search)

    # ---- finding and checking -----------------------------------------------------------------

    def _layer_experts(self, layer: int) -> list[tuple[Floats, ...]]:
        names = expert_tensor_names(self.checkpoint, self.config, layer)
        if len(names) == 2:
            return self._fused(*names)
        return [
            tuple(
                self._floats(expert_name(layer, e, p), expert_shape(self.config, p))
                for p in PROJECTIONS
            )
            for e in range(self.config.n_routed_experts)
        ]

    def _fused(self, gate_up: str, down: str) -> list[tuple[Floats, ...]]:
        """gate_up_proj [E, 2I, H] (gate rows first) and down_proj [E, H, I]."""
        experts, inner = self.config.n_routed_experts, self.config.moe_intermediate_size
        hidden = self.config.hidden_size
        both = self._stack(gate_up, (experts, 2 * inner, hidden))
        below = self._stack(down, (experts, hidden, inner))
        half = inner * hidden * SOURCE_BYTES[both[0].dtype]
        return [
            (
                replace(pair, rows=inner),
                replace(pair, rows=inner, offset=pair.offset + half, first_row=inner),
                single,
            )
            for pair, single in zip(both, below, strict=True)
        ]

    def _stack(self, name: str, shape: tuple[int, int, int]) -> list[Floats]:
        """The matrices of a tensor of three dimensions."""
        tensor = self._checked(name, shape)
        count, rows, cols = shape
        size = rows * cols * SOURCE_BYTES[tensor.dtype]
        blocks = self._blocks(tensor, shape)
        whole = Floats(name, tensor.dtype, rows, cols, tensor.shard, tensor.offset)
        return [
            replace(whole, offset=whole.offset + n * size, blocks=blocks[n]) for n in range(count)
        ]

    def _floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        tensor = self._checked(name, shape)
        rows, cols = shape if len(shape) == 2 else (1, shape[0])
        blocks = self._blocks(tensor, (1, rows, cols))[0]
        return Floats(name, tensor.dtype, rows, cols, tensor.shard, tensor.offset, blocks)

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        tensor = self.tensors[name]
        if tensor.dtype not in SOURCE_BYTES:
            raise self._fail(tensor, f"is {tensor.dtype}; {', '.join(SOURCE_BYTES)} are converted")
        if tensor.shape != shape:
            raise self._fail(
                tensor, f"is {list(tensor.shape)}; config.json describes {list(shape)}"
            )
        return tensor

    def _blocks(self, tensor: TensorInfo, shape: tuple[int, int, int]) -> list[Blocks | None]:
        """FP8 scales of each of `count` matrices [rows, cols]; None where there need not be any."""
        count = shape[0]
        names = [tensor.name + suffix for suffix in SCALE_SUFFIXES]
        scale = next((self.tensors[name] for name in names if name in self.tensors), None)
        if tensor.dtype != F8:
            if scale is not None:
                raise self._fail(tensor, f"is {tensor.dtype} but has scales ({scale.name})")
            return [None] * count
        if scale is None:
            fault = f"is FP8 without scales ({names[0]}), so its values cannot be known"
            raise self._fail(tensor, f"{fault}; fetch the file that holds them")
        if scale.dtype not in _SCALE_BYTES:
            raise self._fail(scale, f"scales of dtype {scale.dtype} cannot be read")
        sides, block = self._grid(tensor, scale, shape)
        size = sides[0] * sides[1] * _SCALE_BYTES[scale.dtype]
        places = (Extent(scale.shard, scale.offset + n * size, size) for n in range(count))
        return [Blocks(place, scale.dtype, *sides, block) for place in places]

    def _grid(
        self, tensor: TensorInfo, scale: TensorInfo, shape: tuple[int, int, int]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """How many scales one matrix has down and across, and the block each of them is for."""
        count, rows, cols = shape
        down, across = self.block
        grid = (-(-rows // down), -(-cols // across))
        own = scale.shape[1:] if count > 1 and len(scale.shape) > 1 else scale.shape
        for sides, block in ((grid, self.block), ((1, 1), (rows, cols)), ((rows, 1), (1, cols))):
            whole = sides[0] * sides[1] * count * _SCALE_BYTES[scale.dtype]
            if (*own, 1, 1)[:2] == sides and scale.nbytes == whole:
                return sides, block
        raise self._fail(
            scale,
            f"is {list(scale.shape)}; FP8 of {list(tensor.shape)} has one scale, one a row, or "
            f"{list(grid)} for blocks of {down} x {across}",
        )

    def _fail(self, tensor: TensorInfo, fault: str) -> ContainerError:
        return ContainerError(f"{self.shards[tensor.shard].path}: tensor {tensor.name}: {fault}")


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
            source = Floats(name, Kind(ref.format).name, ref.rows, ref.cols, ref.shard, ref.offset)
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
