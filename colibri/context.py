"""How many tokens the context holds: what was asked for, the model's limit, and memory."""

from colibri.amounts import memory_size
from colibri.container import Container, format_of
from colibri.contents import INDEX_FULL
from colibri.errors import UsageError
from colibri.memory import RESERVE, Budget
from colibri.session import KV_DTYPES

MOST = 32768  # without --ctx; more is a flag away
LEAST = 4096  # without --ctx, memory permitting
USEFUL = 1024  # fewer hold hardly a question and its answer
_SHARE = 8  # without --ctx, caches take at most 1/8 of what the weights leave, LEAST permitting
_SCRATCH = 8  # 1/8 of what is left is set aside for a step's scratch
_REMEDY = "Free memory or raise --ram."


def token_bytes(container: Container, mtp: bool, kv_dtype: str = "f32") -> int:
    """Cache bytes of one token: a compressed key-value row a layer, an index key where selected."""
    config = container.config
    kinds = container.index_kinds[: config.num_hidden_layers + mtp]
    width = len(kinds) * (config.kv_lora_rank + config.qk_rope_head_dim)
    width += kinds.count(INDEX_FULL) * config.index_head_dim
    return width * KV_DTYPES[kv_dtype].itemsize


def dense_bytes(container: Container, mtp: bool) -> int:
    """Bytes of all weights but the routed experts: what loading puts into memory."""
    layers = container.config.num_hidden_layers + mtp
    refs = (container.matrix(e.name) for e in container.entries if e.layer < layers)
    return sum(format_of(ref).nbytes(ref.rows, ref.cols) for ref in refs)


def choose(
    container: Container, mtp: bool, asked: int | None, budget: Budget, kv_dtype: str = "f32"
) -> int:
    """The context in tokens; UsageError when what was asked for, or anything at all, cannot fit."""
    limit = container.config.max_position_embeddings
    weights = dense_bytes(container, mtp)
    each = token_bytes(container, mtp, kv_dtype)
    if asked is None:
        fixed = weights + RESERVE
        budget.require(fixed + each, "the model's dense part with the process", _REMEDY)
        return default(limit, (budget.bytes - fixed) // each)
    if asked > limit:
        raise UsageError(
            f"--ctx is {asked}, and this model handles {limit} tokens; ask for at most {limit}"
        )
    room = advised(budget.bytes, weights, each)
    budget.require(
        weights + asked * each,
        f"a context of {asked} tokens ({memory_size(asked * each)}) beside the dense weights",
        f"About --ctx {room} fits{_more(kv_dtype)}." if room else _REMEDY,
    )
    return asked


def _more(kv_dtype: str) -> str:
    return ", or twice as many with --kv-dtype f16" if kv_dtype == "f32" else ""


def advised(budget: int, weights: int, each: int) -> int:
    """About the most tokens of `each` bytes that fit beside the weights and what a step needs."""
    rest = max(budget - weights - RESERVE, 0)
    return (rest - rest // _SCRATCH) // each


def default(limit: int, room: int) -> int:
    """MOST, halved while it would take more than its share of the room, LEAST if possible."""
    size = MOST
    while size > LEAST and size > room // _SHARE:
        size //= 2
    return max(1, min(size, limit, room))
