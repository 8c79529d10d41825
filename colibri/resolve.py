"""From stored tensors to matrices: plain floats, the public engine's containers, our own layout."""

from functools import lru_cache
from typing import Any

from colibri.checkpoint import Checkpoint
from colibri.errors import ContainerError, UsageError
from colibri.formats import Format, Kind, MatrixRef
from colibri.shard import Shard, TensorInfo
from colibri.strictjson import parse_object

FORMAT_VERSION = "1"
RECORD_ALIGN = 4096  # an expert is one aligned read
_PUBLIC_GROUPS = (16, 32, 48, 64, 96, 128, 192, 256)
FLOAT_KINDS = {"F32": Kind.F32, "BF16": Kind.BF16, "F16": Kind.F16}
_KIND_DTYPES = {kind: dtype for dtype, kind in FLOAT_KINDS.items()}


class Resolver:
    """Turns names into MatrixRefs, checking dtypes, sizes and scales against the shape wanted."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.fail = checkpoint, checkpoint.fault
        self.own = [own_formats(shard) for shard in checkpoint.shards]

    def matrix(self, name: str, rows: int, cols: int) -> MatrixRef:
        """The matrix `name` [rows, cols]; vectors are one row. The tensor must exist."""
        tensor = self.checkpoint.tensors[name]
        declared = self.own[tensor.shard].get(name)
        if declared is not None:
            return self._declared(tensor, declared, rows, cols)
        if tensor.dtype in FLOAT_KINDS:
            return self._plain(tensor, rows, cols)
        scales = self.checkpoint.tensors.get(name + ".qs")
        if tensor.dtype in ("U8", "I8") and scales is not None:
            return self._public(tensor, scales, rows, cols)
        raise self.fail(tensor, self._unreadable(tensor))

    def _unreadable(self, tensor: TensorInfo) -> str:
        if tensor.name + "_scale" in self.checkpoint.tensors or tensor.dtype.startswith("F8"):
            form = "an FP8" if tensor.dtype.startswith("F8") else "a 4-bit"
            return (
                f"is {tensor.dtype}: {form} checkpoint cannot be run as it is; "
                "convert it first: colibri convert SRC DST"
            )
        if tensor.dtype in ("U8", "I8"):
            scales = tensor.name + ".qs"
            return f"is {tensor.dtype} without scales ({scales}); not a container we can read"
        return f"dtype {tensor.dtype} cannot be read; expected F32, BF16 or F16"

    def _plain(self, tensor: TensorInfo, rows: int, cols: int) -> MatrixRef:
        if tensor.name + ".qs" in self.checkpoint.tensors:
            raise self.fail(tensor, f"is {tensor.dtype} but has .qs scales; one of them is wrong")
        if tensor.shape != (rows, cols) and (rows, tensor.shape) != (1, (cols,)):
            shape = list(tensor.shape)
            raise self.fail(tensor, f"is {shape}; config.json describes {_ask(rows, cols)}")
        kind = FLOAT_KINDS[tensor.dtype]
        shard, at = tensor.shard, tensor.offset
        return MatrixRef(int(kind), 0, rows, cols, 0, shard, shard, at, at)

    def _public(self, tensor: TensorInfo, scales: TensorInfo, rows: int, cols: int) -> MatrixRef:
        if scales.dtype != "F32":
            raise self.fail(
                scales,
                f"scales are {scales.dtype} ({scales.nbytes} bytes) for {tensor.name}; "
                "this layout has F32 scales only, so they would be misread; convert again",
            )
        try:
            form = public_format(tensor.nbytes, scales.nbytes // 4, rows, cols)
        except ContainerError as why:
            raise self.fail(tensor, f"{why} (scales {scales.name})") from None
        return MatrixRef(
            int(form.kind), int(Kind.F32), rows, cols, form.group,
            tensor.shard, scales.shard, tensor.offset, scales.offset,
        )  # fmt: skip

    def _declared(self, tensor: TensorInfo, form: Format, rows: int, cols: int) -> MatrixRef:
        scales = self.checkpoint.tensors.get(tensor.name + ".scales")
        if scales is None:
            raise self.fail(tensor, f"is {form} but {tensor.name}.scales is missing; convert again")
        dtype = "I8" if form.kind == Kind.INT8 else "U8"
        shape = (rows, form.row_bytes(cols))
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise self.fail(
                tensor,
                f"is {tensor.dtype} {list(tensor.shape)}; {form} of {_ask(rows, cols)} "
                f"is {dtype} {list(shape)}",
            )
        wanted = (_KIND_DTYPES[form.scale], (rows, form.row_scales(cols)))
        if (scales.dtype, scales.shape) != wanted:
            raise self.fail(
                scales,
                f"is {scales.dtype} {list(scales.shape)}; {form} of {tensor.name} needs "
                f"{wanted[0]} {list(wanted[1])}",
            )
        return MatrixRef(
            int(form.kind), int(form.scale), rows, cols, form.group,
            tensor.shard, scales.shard, tensor.offset, scales.offset,
        )  # fmt: skip


def _ask(rows: int, cols: int) -> str:
    return f"[{cols}]" if rows == 1 else f"[{rows}, {cols}]"


@lru_cache(maxsize=4096)
def public_format(nbytes: int, scales: int, rows: int, cols: int) -> Format:
    """The public engine's format of a [rows, cols] matrix, inferred from its byte counts.

    First match wins: int8, int4, int2, int3; int4 with more than one scale a row is grouped by
    the smallest group of the known ones that gives the count. ContainerError when none fits.
    """
    if scales == 1 and nbytes == rows * -(-cols // 256) * 98:
        raise ContainerError(
            "is in the E8/IQ3 lattice format, which is not supported; use an int4 or int3 container"
        )
    for kind, group in ((Kind.INT8, 0), (Kind.INT4, 0), (Kind.INT2, 0), (Kind.INT3, 64)):
        form = Format(kind, group)
        if nbytes == rows * form.row_bytes(cols):
            break
    else:
        raise ContainerError(f"{nbytes} bytes fit no known format of [{rows}, {cols}]")
    if form.kind == Kind.INT4 and scales > rows:
        for group in _PUBLIC_GROUPS:
            if group <= cols and scales == rows * -(-cols // group):
                return Format(Kind.INT4, group)
    expected = rows * form.row_scales(cols)
    if scales != expected:
        raise ContainerError(
            f"{nbytes} bytes are {form.kind.name.lower()} of [{rows}, {cols}], which needs "
            f"{expected} scales; there are {scales}"
        )
    return form


def own_formats(shard: Shard) -> dict[str, Format]:
    """Formats of the quantised tensors a shard of our own layout declares; else empty."""
    if not is_own(shard):
        return {}
    return {
        name: _format(entry, f"{shard.path}: __metadata__.tensors: {name}")
        for name, entry in _section(shard, "tensors").items()
    }


def is_own(shard: Shard) -> bool:
    """Whether colibri's writer made this shard; ContainerError when by a version unknown here."""
    if shard.metadata.get("format") != "colibri":
        return False
    version = shard.metadata.get("format_version")
    if version != FORMAT_VERSION:
        raise ContainerError(
            f"{shard.path}: container format version {version!r}; this colibri reads "
            f"{FORMAT_VERSION}. Use a newer colibri or convert again"
        )
    return True


def own_records(shard: Shard) -> dict[str, Any]:
    """The record layouts a shard declares: {records tensor: {projection: part}}."""
    return _section(shard, "experts") if is_own(shard) else {}


def _section(shard: Shard, name: str) -> dict[str, Any]:
    text = shard.metadata.get(name, "{}").encode("utf-8", "surrogatepass")
    return parse_object(text, f"{shard.path}: __metadata__.{name}", ContainerError)


def _format(entry: Any, where: str) -> Format:
    try:
        form = Format(Kind[entry["format"].upper()], entry["group"], Kind[entry["scale"].upper()])
        good = type(entry["group"]) is int
    except (TypeError, KeyError, AttributeError, UsageError):
        good = False
    if not good:
        raise ContainerError(f"{where}: {str(entry)[:120]} is not a format this colibri reads")
    return form


def record_part(
    layout: Any, projection: str, record: int, shape: tuple[int, int], where: str
) -> tuple[Format, int, int]:
    """Format, data offset and scale offset of one projection inside a record, checked."""
    part = layout.get(projection) if isinstance(layout, dict) else None
    form = _format(part, f"{where}: {projection}")
    rows, cols = shape
    sizes = {
        "offset": rows * form.row_bytes(cols),
        "scales": rows * form.row_scales(cols) * form.scale_bytes,
    }
    for key, size in sizes.items():
        at = part.get(key)
        if type(at) is not int or not 0 <= at <= record - size or at % 64:
            raise ContainerError(
                f"{where}: {projection}: {key} {str(at)[:40]} does not lie in a record of {record} "
                f"bytes with room for the {size} that {form} of [{rows}, {cols}] needs"
            )
    return form, part["offset"], part["scales"]
