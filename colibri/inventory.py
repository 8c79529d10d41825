"""Every tensor of a GLM-MoE-DSA model: its role, name, shape and the part it belongs to."""

from collections.abc import Iterator
from typing import NamedTuple

from colibri.config import FULL, SPARSE, ModelConfig

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
PROJECTIONS = ("gate", "up", "down")

# Parts in which bytes are reported.
PARTS = ("embedding", "head", "attention", "indexer", "mlp", "shared expert", "router", "norms")


class Entry(NamedTuple):
    """One tensor outside the routed experts.

    `role` is the name of csrc/colibri.h's role in lower case (q_a for CLB_Q_A); `shape` is
    (n,) or (out, in); `keep` says that the tensor stays f32 in every container we write.
    """

    role: str
    layer: int
    name: str
    shape: tuple[int, ...]
    part: str
    keep: bool


def global_entries(config: ModelConfig) -> list[Entry]:
    """Embedding, final norm and head; without the head when it is tied to the embedding."""
    table = (config.vocab_size, config.hidden_size)
    entries = [
        Entry("embed", -1, EMBED, table, "embedding", False),
        Entry("head", -1, HEAD, table, "head", False),
        Entry("norm", -1, NORM, (config.hidden_size,), "norms", True),
    ]
    return [e for e in entries if e.role != "head" or not config.tie_word_embeddings]


def layer_entries(config: ModelConfig, layer: int) -> list[Entry]:
    """Tensors of one layer but its routed experts and indexer; the MTP layer has extra ones."""
    return [
        Entry(role, layer, f"model.layers.{layer}.{name}", shape, part, keep)
        for role, name, shape, part, keep in (
            *_attention(config),
            *(_sparse_mlp(config) if is_sparse(config, layer) else _dense_mlp(config)),
            *(_mtp(config) if layer == config.mtp_layer else ()),
        )
    ]


def indexer_entries(config: ModelConfig, layer: int) -> list[Entry]:
    """The five tensors of a full layer's indexer."""
    dim, heads = config.index_head_dim, config.index_n_heads
    rows = (
        ("index_q", "wq_b.weight", (heads * dim, config.q_lora_rank), False),
        ("index_k", "wk.weight", (dim, config.hidden_size), False),
        ("index_k_norm", "k_norm.weight", (dim,), True),
        ("index_k_bias", "k_norm.bias", (dim,), True),
        ("index_weights", "weights_proj.weight", (heads, config.hidden_size), True),
    )
    prefix = f"model.layers.{layer}.self_attn.indexer."
    return [
        Entry(role, layer, prefix + name, shape, "indexer", keep)
        for role, name, shape, keep in rows
    ]


def dense_entries(config: ModelConfig, layer: int) -> list[Entry]:
    """Everything of a layer but its routed experts."""
    indexer = indexer_entries(config, layer) if has_own_indexer(config, layer) else []
    return layer_entries(config, layer) + indexer


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a layer routes to experts; the MTP layer always does."""
    return layer == config.mtp_layer or config.mlp_types[layer] == SPARSE


def has_own_indexer(config: ModelConfig, layer: int) -> bool:
    """Whether a layer computes its own index set; the MTP layer always does."""
    return layer == config.mtp_layer or config.indexer_types[layer] == FULL


def layers(config: ModelConfig, mtp: bool) -> range:
    """Layer numbers, the MTP layer's included when `mtp`."""
    return range(config.num_hidden_layers + (1 if mtp and config.mtp_layer is not None else 0))


def expert_name(layer: int, expert: int, projection: str) -> str:
    """Name of one routed expert's `gate`, `up` or `down` matrix."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"


def records_name(layer: int) -> str:
    """Name of a layer's expert records in colibri's own layout."""
    return f"model.layers.{layer}.mlp.experts.records"


def expert_shape(config: ModelConfig, projection: str) -> tuple[int, int]:
    """(out, in) of one routed expert's projection."""
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    return (hidden, inner) if projection == "down" else (inner, hidden)


def expert_parameters(config: ModelConfig) -> int:
    """Weights of one routed expert."""
    return 3 * config.moe_intermediate_size * config.hidden_size


_Row = tuple[str, str, tuple[int, ...], str, bool]


def _attention(config: ModelConfig) -> Iterator[_Row]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q, kv, nope = config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim
    rope, value = config.qk_rope_head_dim, config.v_head_dim
    yield "input_norm", "input_layernorm.weight", (hidden,), "norms", True
    yield "post_norm", "post_attention_layernorm.weight", (hidden,), "norms", True
    yield "q_a", "self_attn.q_a_proj.weight", (q, hidden), "attention", False
    yield "q_a_norm", "self_attn.q_a_layernorm.weight", (q,), "norms", True
    yield "q_b", "self_attn.q_b_proj.weight", (heads * (nope + rope), q), "attention", False
    yield "kv_a", "self_attn.kv_a_proj_with_mqa.weight", (kv + rope, hidden), "attention", False
    yield "kv_a_norm", "self_attn.kv_a_layernorm.weight", (kv,), "norms", True
    yield "kv_b", "self_attn.kv_b_proj.weight", (heads * (nope + value), kv), "attention", False
    yield "o", "self_attn.o_proj.weight", (hidden, heads * value), "attention", False


def _dense_mlp(config: ModelConfig) -> Iterator[_Row]:
    yield from _swiglu("mlp.", config.intermediate_size, config.hidden_size, "mlp")


def _sparse_mlp(config: ModelConfig) -> Iterator[_Row]:
    experts, hidden = config.n_routed_experts, config.hidden_size
    inner = config.shared_intermediate_size
    yield from _swiglu("mlp.shared_experts.", inner, hidden, "shared expert")
    yield "router", "mlp.gate.weight", (experts, hidden), "router", True
    yield "router_bias", "mlp.gate.e_score_correction_bias", (experts,), "router", True


def _swiglu(prefix: str, inner: int, hidden: int, part: str) -> Iterator[_Row]:
    yield "gate", f"{prefix}gate_proj.weight", (inner, hidden), part, False
    yield "up", f"{prefix}up_proj.weight", (inner, hidden), part, False
    yield "down", f"{prefix}down_proj.weight", (hidden, inner), part, False


def _mtp(config: ModelConfig) -> Iterator[_Row]:
    hidden = config.hidden_size
    yield "eh", "eh_proj.weight", (hidden, 2 * hidden), "attention", False
    yield "e_norm", "enorm.weight", (hidden,), "norms", True
    yield "h_norm", "hnorm.weight", (hidden,), "norms", True
    yield "head_norm", "shared_head.norm.weight", (hidden,), "norms", True
