"""Where a layer's routed experts lie: one table [experts, 3] (gate, up, down) per sparse layer."""

import numpy as np

from colibri.checkpoint import Checkpoint
from colibri.config import ModelConfig
from colibri.errors import ContainerError
from colibri.formats import FLOAT_BYTES, FLOATS, Kind, MatrixRef
from colibri.inventory import PROJECTIONS, expert_name, expert_shape, records_name
from colibri.resolve import FLOAT_KINDS, RECORD_ALIGN, Resolver, own_records, record_part

# One entry of a table: clb_tensor of csrc/colibri.h, byte for byte.
MATRIX_DTYPE = np.dtype(
    [
        ("format", np.int32), ("scale_format", np.int32),
        ("rows", np.int64), ("cols", np.int64), ("group", np.int64),
        ("shard", np.int32), ("scale_shard", np.int32),
        ("offset", np.int64), ("scale_offset", np.int64),
    ]
)  # fmt: skip


def expert_tensor_names(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> list[str]:
    """Tensors that must exist for a layer's experts, by the form this checkpoint stores them in."""
    if records_name(layer) in checkpoint.tensors:
        return [records_name(layer)]
    fused = _fused_names(layer)
    if any(name in checkpoint.tensors for name in fused):
        return list(fused)
    experts = range(config.n_routed_experts)
    return [expert_name(layer, e, projection) for e in experts for projection in PROJECTIONS]


def expert_table(resolver: Resolver, config: ModelConfig, layer: int) -> np.ndarray:
    """MATRIX_DTYPE [experts, 3] of a layer whose tensors all exist; ContainerError if unsound."""
    table = _table(resolver, config, layer)
    _require_one_form(resolver, table, layer)
    return table


def _require_one_form(resolver: Resolver, table: np.ndarray, layer: int) -> None:
    """A token's numbers are prepared once for all experts, so they cannot differ in kind."""
    kinds = table["format"]
    wanted = kinds[0, [0, 0, 2]]
    if (kinds == wanted).all():
        return
    expert, column = np.argwhere(kinds != wanted)[0].tolist()
    name, found = expert_name(layer, expert, PROJECTIONS[column]), Kind(kinds[expert, column])
    floats = all(Kind(kind) in FLOATS for kind in np.unique(kinds))
    remedy = "run `colibri convert` on this directory" if floats else "convert the original again"
    raise ContainerError(
        f"{resolver.checkpoint.directory}: {name} is {found.name}, others of its layer are "
        f"{Kind(wanted[column]).name}; gate and up of all experts need one kind of number, and so "
        f"do down: {remedy}"
    )


def _table(resolver: Resolver, config: ModelConfig, layer: int) -> np.ndarray:
    tensors = resolver.checkpoint.tensors
    if records_name(layer) in tensors:
        return _from_records(resolver, config, layer)
    if _fused_names(layer)[0] in tensors:
        return _from_fused(resolver, config, layer)
    shapes = [expert_shape(config, projection) for projection in PROJECTIONS]
    rows = [
        [
            resolver.matrix(expert_name(layer, e, projection), *shape)
            for projection, shape in zip(PROJECTIONS, shapes, strict=True)
        ]
        for e in range(config.n_routed_experts)
    ]
    return np.array(rows, dtype=MATRIX_DTYPE)


def _fused_names(layer: int) -> tuple[str, str]:
    prefix = f"model.layers.{layer}.mlp.experts."
    return prefix + "gate_up_proj", prefix + "down_proj"


def _from_records(resolver: Resolver, config: ModelConfig, layer: int) -> np.ndarray:
    tensor = resolver.checkpoint.tensors[records_name(layer)]
    shard = resolver.checkpoint.shards[tensor.shard]
    experts = config.n_routed_experts
    if tensor.dtype != "U8" or len(tensor.shape) != 2 or tensor.shape[0] != experts:
        raise resolver.fail(
            tensor, f"is {tensor.dtype} {list(tensor.shape)}; expected U8 [{experts}, record bytes]"
        )
    record = tensor.shape[1]
    if record % RECORD_ALIGN or tensor.offset % RECORD_ALIGN:
        raise resolver.fail(tensor, f"records are not aligned to {RECORD_ALIGN} bytes")
    layout = own_records(shard).get(tensor.name)
    if layout is None:
        raise resolver.fail(tensor, "__metadata__.experts of its file does not describe it")
    starts = tensor.offset + record * np.arange(experts, dtype=np.int64)
    table = np.zeros((experts, 3), MATRIX_DTYPE)
    for column, projection in enumerate(PROJECTIONS):
        shape = expert_shape(config, projection)
        where = f"{shard.path}: layout of {tensor.name}"
        form, data, scales = record_part(layout, projection, record, shape, where)
        ref = MatrixRef(
            form.kind, form.scale, *shape, form.group, tensor.shard, tensor.shard, data, scales
        )
        table[:, column] = np.array(tuple(ref), MATRIX_DTYPE)
        table["offset"][:, column] += starts
        table["scale_offset"][:, column] += starts
    return table


def _from_fused(resolver: Resolver, config: ModelConfig, layer: int) -> np.ndarray:
    """Hugging Face's fused gate_up_proj [E, 2I, H] (gate rows first) and down_proj [E, H, I]."""
    experts, inner = config.n_routed_experts, config.moe_intermediate_size
    hidden = config.hidden_size
    table = np.zeros((experts, 3), MATRIX_DTYPE)
    gate_up, down = _fused_names(layer)
    for columns, name, shape in (
        ((0, 1), gate_up, (experts, 2 * inner, hidden)),
        ((2,), down, (experts, hidden, inner)),
    ):
        tensor = resolver.checkpoint.tensors[name]
        kind = FLOAT_KINDS.get(tensor.dtype)
        if kind is None or tensor.shape != shape:
            raise resolver.fail(
                tensor,
                f"is {tensor.dtype} {list(tensor.shape)}; fused experts must be F32, BF16 or F16 "
                f"{list(shape)}",
            )
        rows = shape[1] // len(columns)
        size = rows * shape[2] * FLOAT_BYTES[kind]
        for part, column in enumerate(columns):
            slices = np.arange(experts, dtype=np.int64) * len(columns) + part
            ref = MatrixRef(kind, Kind.F32, rows, shape[2], 0, tensor.shard, tensor.shard, 0, 0)
            table[:, column] = np.array(tuple(ref), MATRIX_DTYPE)
            table["offset"][:, column] = tensor.offset + slices * size
            table["scale_offset"][:, column] = table["offset"][:, column]
    return table


def matrix_ref(table: np.ndarray, expert: int, column: int) -> MatrixRef:
    """One entry of a table."""
    return MatrixRef(*table[expert, column].tolist())
