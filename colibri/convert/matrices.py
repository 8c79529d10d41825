"""Matrices of a checkpoint, found by name: floats and codes, with the scales that codes need."""

from __future__ import annotations

from dataclasses import replace

from colibri.checkpoint import Checkpoint
from colibri.convert.scales import E8M0, SCALE_BYTES, Blocks, Whole, Zeros
from colibri.convert.work import Extent, Matrix
from colibri.encoder import F4, F8, FLOAT_DTYPES, I4, I8
from colibri.errors import ContainerError
from colibri.foreign import PACKED
from colibri.shard import TensorInfo

FP8_BLOCK = (128, 128)
NVFP4_BLOCK, MXFP4_BLOCK = 16, 32  # inputs that share a scale
_SCALE = ("_scale_inv", "_scale")
# One scale of a whole matrix: Model Optimizer's multiplies, compressed-tensors' divides.
_MULTIPLIES, _DIVIDES = "_scale_2", "_global_scale"
_ZEROS, _SHAPE, _ORDER = "_zero_point", "_shape", "_g_idx"
SCALE_SUFFIXES = (_MULTIPLIES, _DIVIDES, *_SCALE, _ZEROS, _SHAPE)  # longer ones first
_FLOAT_SCALES = ("F32", "BF16", "F16")


def is_coded(tensor: TensorInfo) -> bool:
    """Whether only a conversion reads this: it is FP8, packed, or scales of such."""
    return tensor.dtype.startswith("F8") or tensor.name.endswith((PACKED, *_SCALE))


def by_weight(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with `T_packed`, as compressed-tensors names codes, under the name `T`."""
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        stem = name.removesuffix(PACKED)
        if stem != name and stem in checkpoint.tensors:
            path = checkpoint.shards[tensor.shard].path
            raise ContainerError(f"{path}: {name}: there is a {stem} too; one of them is wrong")
        tensors[stem] = tensor
    return checkpoint._replace(tensors=tensors)


class Matrices:
    """Finds them in a checkpoint; `block` is FP8's, `lacks_zeros` says that packed integers may be
    without zero points. ContainerError names what is wrong."""

    def __init__(
        self, checkpoint: Checkpoint, block: tuple[int, int] = FP8_BLOCK, lacks_zeros: bool = True
    ) -> None:
        self._fail, self._tensors = checkpoint.fault, checkpoint.tensors
        self._block, self._lacks_zeros = block, lacks_zeros

    def one(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """A matrix, or a vector as one row."""
        tensor = self._tensors[name]
        rows, cols = shape if len(shape) == 2 else (1, shape[0])
        if tensor.dtype == "U8" and len(shape) == 2:
            return self._fours(tensor, rows, cols)
        if tensor.dtype == "I32" and tensor.name.endswith(PACKED):
            return self._integers(tensor, rows, cols)
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
        if scale.dtype not in _FLOAT_SCALES:
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

    # ---- NVFP4 and MXFP4 ----------------------------------------------------------------------

    def _fours(self, tensor: TensorInfo, rows: int, cols: int) -> Matrix:
        """Codes U8 [rows, cols / 2]; scales of blocks, F8_E4M3 with one F32 for all, or E8M0."""
        stem, scale = _stem(tensor), self._scales(tensor)
        if scale is None:
            raise self._absent(tensor, stem + _SCALE[1], "NVFP4")
        form = "MXFP4" if scale.dtype in E8M0 else "NVFP4"
        wide, dtypes = (MXFP4_BLOCK, E8M0) if form == "MXFP4" else (NVFP4_BLOCK, (F8,))
        if cols % wide:
            raise self._fail(tensor, f"is {form}, but {cols} columns are no whole blocks of {wide}")
        if tensor.shape != (rows, cols // 2):
            fault = f"is U8 {list(tensor.shape)}; config.json describes {[rows, cols]}, which is"
            raise self._fail(tensor, f"{fault} {[rows, cols // 2]} as {form}")
        grid = (rows, cols // wide)
        if scale.dtype not in dtypes or scale.shape != grid:
            wanted = f"{form} of {[rows, cols]} has {dtypes[0]} {list(grid)}"
            raise self._fail(scale, f"is {scale.dtype} {list(scale.shape)}; {wanted}")
        whole = None if form == "MXFP4" else self._whole(tensor)
        blocks = Blocks(_place(scale), scale.dtype, *grid, (1, wide), whole)
        return Matrix(tensor.name, F4, rows, cols, tensor.shard, tensor.offset, blocks)

    def _whole(self, tensor: TensorInfo) -> Whole:
        divides = tensor.name.endswith(PACKED)
        name = _stem(tensor) + (_DIVIDES if divides else _MULTIPLIES)
        whole = self._tensors.get(name)
        if whole is None:
            raise self._absent(tensor, name, "NVFP4")
        if whole.dtype != "F32" or whole.nbytes != 4:
            raise self._fail(
                whole, f"is {whole.dtype} {list(whole.shape)}; NVFP4 has one F32 for a matrix"
            )
        return Whole(name, _place(whole), divides)

    def _absent(self, tensor: TensorInfo, name: str, form: str) -> ContainerError:
        fault = f"is {tensor.dtype} without {name}, which {form} has; fetch the file that holds it,"
        return self._fail(tensor, f"{fault} or convert the BF16 or FP8 checkpoint")

    # ---- integers -----------------------------------------------------------------------------

    def _integers(self, tensor: TensorInfo, rows: int, cols: int) -> Matrix:
        """Codes of 4 or 8 bits in I32 words along a row; scales [rows, groups] or one; perhaps zero
        points in I32 words down a column."""
        stem, dtypes = _stem(tensor), {(rows, -(-cols * bits // 32)): bits for bits in (4, 8)}
        bits = dtypes.get(tensor.shape)
        if bits is None:
            fault = f"is I32 {list(tensor.shape)}; config.json describes {[rows, cols]}, which is"
            raise self._fail(
                tensor, f"{fault} {' or '.join(str(list(s)) for s in dtypes)} in 4 or 8 bits"
            )
        order, scale = self._tensors.get(stem + _ORDER), self._scales(tensor)
        if order is not None:
            raise self._fail(
                order,
                "groups the inputs in an order of its own, which is not converted; take a "
                "checkpoint that was quantised without it (actorder), or the BF16 one",
            )
        if scale is None:
            raise self._absent(tensor, stem + _SCALE[1], "pack-quantized")
        grid, block = self._groups(scale, rows, cols, bits)
        zeros = self._zero_points(stem, grid, bits)
        if zeros is None and not self._lacks_zeros:
            raise self._absent(tensor, stem + _ZEROS, "pack-quantized that is not symmetric")
        blocks = Blocks(_place(scale), scale.dtype, *grid, block, None, zeros)
        dtype = I4 if bits == 4 else I8
        return Matrix(tensor.name, dtype, rows, cols, tensor.shard, tensor.offset, blocks)

    def _groups(
        self, scale: TensorInfo, rows: int, cols: int, bits: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """How many scales there are down and across, and the block each of them is for."""
        if scale.dtype not in _FLOAT_SCALES:
            raise self._fail(scale, f"scales of dtype {scale.dtype} cannot be read")
        if scale.nbytes == SCALE_BYTES[scale.dtype]:
            return (1, 1), (rows, cols)
        count = scale.shape[-1]
        group, rest = divmod(cols, count) if count else (0, 1)
        if scale.shape != (rows, count) or rest or (bits < 8 and count > 1 and group % 2):
            raise self._fail(
                scale,
                f"is {list(scale.shape)}; integers of {[rows, cols]} have one scale, or "
                f"[{rows}, groups] with groups that divide {cols}",
            )
        return (rows, count), (1, group)

    def _zero_points(self, stem: str, grid: tuple[int, int], bits: int) -> Zeros | None:
        tensor = self._tensors.get(stem + _ZEROS)
        if tensor is None:
            return None
        shape = (-(-grid[0] * bits // 32), grid[1])
        if tensor.dtype != "I32" or tensor.shape != shape:
            raise self._fail(
                tensor,
                f"is {tensor.dtype} {list(tensor.shape)}; zero points of {list(grid)} scales "
                f"are I32 {list(shape)}",
            )
        return Zeros(_place(tensor), bits)


def _stem(tensor: TensorInfo) -> str:
    """The name of the matrix whose codes this tensor holds."""
    return tensor.name.removesuffix(PACKED)


def _place(tensor: TensorInfo) -> Extent:
    return Extent(tensor.shard, tensor.offset, tensor.nbytes)
