"""Matrices of a checkpoint, found by name: floats, FP8 and NVFP4, with the scales they need."""

from __future__ import annotations

from dataclasses import replace

from colibri.checkpoint import Checkpoint
from colibri.convert.scales import SCALE_BYTES, Blocks, Whole
from colibri.convert.work import Extent, Matrix
from colibri.encoder import F4, F8, FLOAT_DTYPES
from colibri.errors import ContainerError
from colibri.shard import TensorInfo

FP8_BLOCK = (128, 128)
NVFP4_BLOCK = 16  # inputs that share a scale
_SCALE, _PACKED = ("_scale_inv", "_scale"), "_packed"
# One scale of a whole matrix: Model Optimizer's multiplies, compressed-tensors' divides.
_MULTIPLIES, _DIVIDES = "_scale_2", "_global_scale"
SCALE_SUFFIXES = (_MULTIPLIES, _DIVIDES, *_SCALE)  # longer ones first
_FP8_SCALES = ("F32", "BF16", "F16")


def is_coded(tensor: TensorInfo) -> bool:
    """Whether only a conversion reads this: it is FP8, scales of NVFP4, or packed."""
    return tensor.dtype.startswith("F8") or tensor.name.endswith(_PACKED)


def by_weight(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with `T_packed`, as compressed-tensors names codes, under the name `T`."""
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        stem = name.removesuffix(_PACKED)
        if stem != name and stem in checkpoint.tensors:
            path = checkpoint.shards[tensor.shard].path
            raise ContainerError(f"{path}: {name}: there is a {stem} too; one of them is wrong")
        tensors[stem] = tensor
    return checkpoint._replace(tensors=tensors)


class Matrices:
    """Finds them in a checkpoint; `block` is FP8's. ContainerError names what is wrong."""

    def __init__(self, checkpoint: Checkpoint, block: tuple[int, int] = FP8_BLOCK) -> None:
        self._checkpoint, self._tensors, self._block = checkpoint, checkpoint.tensors, block

    def one(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """A matrix, or a vector as one row."""
        tensor = self._tensors[name]
        rows, cols = shape if len(shape) == 2 else (1, shape[0])
        if tensor.dtype == "U8" and len(shape) == 2:
            return self._nvfp4(tensor, rows, cols)
        self._check(tensor, shape)
        blocks = self._blocks(tensor, (1, rows, cols))[0]
        return Matrix(name, tensor.dtype, rows, cols, tensor.shard, tensor.offset, blocks)

    def stack(self, name: str, shape: tuple[int, int, int]) -> list[Matrix]:
        """The matrices of a tensor of three dimensions."""
        tensor = self._tensors[name]
        self._check(tensor, shape)
        count, rows, cols = shape
        blocks = self._blocks(tensor, shape)
        whole = Matrix(name, tensor.dtype, rows, cols, tensor.shard, tensor.offset)
        size = rows * whole.row_bytes
        return [
            replace(whole, offset=whole.offset + n * size, blocks=blocks[n]) for n in range(count)
        ]

    def _check(self, tensor: TensorInfo, shape: tuple[int, ...]) -> None:
        known = (*FLOAT_DTYPES, F8)
        if tensor.dtype not in known:
            raise self._fail(tensor, f"is {tensor.dtype}; {', '.join(known)} are converted")
        if tensor.shape != shape:
            raise self._fail(
                tensor, f"is {list(tensor.shape)}; config.json describes {list(shape)}"
            )

    def _scales(self, tensor: TensorInfo) -> TensorInfo | None:
        names = [_stem(tensor) + suffix for suffix in _SCALE]
        return next((self._tensors[name] for name in names if name in self._tensors), None)

    # ---- FP8 ----------------------------------------------------------------------------------

    def _blocks(self, tensor: TensorInfo, shape: tuple[int, int, int]) -> list[Blocks | None]:
        """FP8 scales of each of `count` matrices [rows, cols]; None where there need not be any."""
        count, scale = shape[0], self._scales(tensor)
        if tensor.dtype != F8:
            if scale is not None:
                raise self._fail(tensor, f"is {tensor.dtype} but has scales ({scale.name})")
            return [None] * count
        if scale is None:
            fault = f"is FP8 without scales ({tensor.name + _SCALE[0]}), so its values cannot be"
            raise self._fail(tensor, f"{fault} known; fetch the file that holds them")
        if scale.dtype not in _FP8_SCALES:
            raise self._fail(scale, f"scales of dtype {scale.dtype} cannot be read")
        sides, block = self._grid(tensor, scale, shape)
        size = sides[0] * sides[1] * SCALE_BYTES[scale.dtype]
        places = (Extent(scale.shard, scale.offset + n * size, size) for n in range(count))
        return [Blocks(place, scale.dtype, *sides, block) for place in places]

    def _grid(
        self, tensor: TensorInfo, scale: TensorInfo, shape: tuple[int, int, int]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """How many scales one matrix has down and across, and the block each of them is for."""
        count, rows, cols = shape
        down, across = self._block
        grid = (-(-rows // down), -(-cols // across))
        own = scale.shape[1:] if count > 1 and len(scale.shape) > 1 else scale.shape
        for sides, block in ((grid, self._block), ((1, 1), (rows, cols)), ((rows, 1), (1, cols))):
            whole = sides[0] * sides[1] * count * SCALE_BYTES[scale.dtype]
            if (*own, 1, 1)[:2] == sides and scale.nbytes == whole:
                return sides, block
        raise self._fail(
            scale,
            f"is {list(scale.shape)}; FP8 of {list(tensor.shape)} has one scale, one a row, or "
            f"{list(grid)} for blocks of {down} x {across}",
        )

    # ---- NVFP4 --------------------------------------------------------------------------------

    def _nvfp4(self, tensor: TensorInfo, rows: int, cols: int) -> Matrix:
        """Codes U8 [rows, cols / 2], scales F8_E4M3 [rows, cols / 16], and one F32 for all."""
        if cols % NVFP4_BLOCK:
            raise self._fail(tensor, f"is U8; NVFP4 of {cols} columns has no whole blocks of 16")
        if tensor.shape != (rows, cols // 2):
            fault = f"is U8 {list(tensor.shape)}; config.json describes {[rows, cols]}, which is"
            raise self._fail(tensor, f"{fault} {[rows, cols // 2]} as NVFP4")
        divides = tensor.name.endswith(_PACKED)
        stem, suffix = _stem(tensor), _DIVIDES if divides else _MULTIPLIES
        scale, whole = self._scales(tensor), self._tensors.get(stem + suffix)
        if scale is None or whole is None:
            absent = stem + (_SCALE[1] if scale is None else suffix)
            fault = f"is U8 without {absent}, which NVFP4 has; fetch the file that holds it, or"
            raise self._fail(tensor, f"{fault} convert the BF16 or FP8 checkpoint")
        grid = (rows, cols // NVFP4_BLOCK)
        if scale.dtype != F8 or scale.shape != grid:
            raise self._fail(
                scale,
                f"is {scale.dtype} {list(scale.shape)}; NVFP4 of {[rows, cols]} has {F8} "
                f"{list(grid)}",
            )
        if whole.dtype != "F32" or whole.nbytes != 4:
            raise self._fail(
                whole, f"is {whole.dtype} {list(whole.shape)}; NVFP4 has one F32 for a matrix"
            )
        factor = Whole(whole.name, _place(whole), divides)
        blocks = Blocks(_place(scale), F8, *grid, (1, NVFP4_BLOCK), factor)
        return Matrix(tensor.name, F4, rows, cols, tensor.shard, tensor.offset, blocks)

    def _fail(self, tensor: TensorInfo, fault: str) -> ContainerError:
        path = self._checkpoint.shards[tensor.shard].path
        return ContainerError(f"{path}: tensor {tensor.name}: {fault}")


def _stem(tensor: TensorInfo) -> str:
    """The name of the matrix whose codes this tensor holds."""
    return tensor.name.removesuffix(_PACKED)


def _place(tensor: TensorInfo) -> Extent:
    return Extent(tensor.shard, tensor.offset, tensor.nbytes)
