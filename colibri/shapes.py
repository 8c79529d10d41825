"""What a model weighs, by the arithmetic it takes: from a container, or from a published shape.

Published shapes are those of the models' own config.json; they let `colibri plan` speak before
anything was downloaded.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from colibri.config import ModelConfig
from colibri.container import Container, format_of
from colibri.contents import INDEX_FULL
from colibri.context import dense_bytes
from colibri.errors import ConfigError, UsageError
from colibri.formats import Format
from colibri.inventory import (
    Entry,
    dense_entries,
    expert_parameters,
    global_entries,
    has_own_indexer,
)
from colibri.layout import Formats, matrix_shape, plan_shards, record_layout
from colibri.paths import expanded
from colibri.probe import ABSORBED
from colibri.session import KV_DTYPES
from colibri.strictjson import parse_object

_GLM_5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
}
_GLM_52 = _GLM_5 | {
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "max_position_embeddings": 1048576,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
}
PUBLISHED = {"glm-5": _GLM_5, "glm-5.1": _GLM_5, "glm-5.2": _GLM_52, "glm-5.3": _GLM_52}


@dataclass(frozen=True)
class Work:
    """Weights met once, and their bytes, by the kind of number they are multiplied as."""

    nbytes: Counter[str]
    weights: Counter[str]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.nbytes.values())


@dataclass(frozen=True)
class Shape:
    """A model's sizes. Work is of one row through all main layers, or through the MTP layer.

    `dense` is everything there but routed experts; `resident` the bytes that loading reads into
    memory, `files` those on disk. `expert` is one routed expert of a main layer, `mtp_expert` one
    of the MTP layer's. With `mtp` False that layer is left on disk. `kv_dtype`: what caches hold.
    """

    name: str
    config: ModelConfig
    formats: str
    dense: Work
    head: Work
    mtp_dense: Work
    expert: Work
    mtp_expert: Work
    resident: int
    files: int
    selecting: int  # main layers that score the context; 0: attention is dense everywhere
    mtp_selecting: int
    mtp: bool
    kv_dtype: str = "f32"

    @property
    def sparse_layer_count(self) -> int:
        """Main layers that route to experts."""
        return self.config.sparse_layer_count

    @property
    def layers(self) -> int:
        """Layers that are loaded."""
        return self.config.num_hidden_layers + self.mtp

    @property
    def kv_bytes(self) -> int:
        """Bytes of one number in the caches."""
        return KV_DTYPES[self.kv_dtype].itemsize

    @property
    def token_bytes(self) -> int:
        """Cache bytes of one token."""
        config = self.config
        width = self.layers * (config.kv_lora_rank + config.qk_rope_head_dim)
        width += (self.selecting + self.mtp_selecting) * config.index_head_dim
        return width * self.kv_bytes


def of_container(container: Container, mtp: bool = True) -> Shape:
    """The shape of an open container, in its own formats."""
    config = container.config
    mtp = mtp and container.has_mtp

    def form(entry: Entry) -> Format:
        return format_of(container.matrix(entry.name))

    kinds = container.index_kinds
    layers = config.num_hidden_layers
    main = [layer for layer in container.sparse_layers if layer < layers]
    experts = format_of(container.expert(main[-1], 0)[0])
    formats = Counter(str(form(e)) for e in container.entries if len(e.shape) == 2)
    return Shape(
        name=container.directory.resolve().name,
        config=config,
        formats=f"{experts} experts, {formats.most_common(1)[0][0]} for most of the rest",
        dense=_work(config, (e for e in container.entries if _each_token(e, layers)), form),
        head=_work(config, [_head(container.entries)], form),
        mtp_dense=_work(config, (e for e in container.entries if e.layer == layers), form),
        expert=_expert_of(container, main[0]),
        mtp_expert=_expert_of(container, layers) if container.has_mtp else _NOTHING,
        resident=dense_bytes(container, mtp),
        files=container.bytes,
        selecting=kinds[:layers].count(INDEX_FULL),
        mtp_selecting=int(mtp and kinds[-1] == INDEX_FULL),
        mtp=mtp,
    )


def of_config(name: str, config: ModelConfig, formats: Formats, mtp: bool = True) -> Shape:
    """The shape a model will have in our own layout."""
    mtp = mtp and config.mtp_layer is not None
    layers = config.num_hidden_layers
    owners = [n for n in range(layers + mtp) if has_own_indexer(config, n)]
    entries = global_entries(config)
    for layer in range(layers + mtp):
        entries += dense_entries(config, layer)

    def form(entry: Entry) -> Format:
        return formats.of(entry, config)

    shards = plan_shards(config, formats, mtp, owners)
    mtp_entries = [e for e in entries if e.layer == layers]
    return Shape(
        name=name,
        config=config,
        formats=f"{formats.experts} experts, {formats.dense} for the rest",
        dense=_work(config, (e for e in entries if _each_token(e, layers)), form),
        head=_work(config, [_head(entries)], form),
        mtp_dense=_work(config, mtp_entries, form),
        expert=_record(config, formats.experts),
        mtp_expert=_record(config, formats.mtp) if mtp else _NOTHING,
        resident=_work(config, entries, form).total,
        files=sum(shard.nbytes for shard in shards),
        selecting=len([n for n in owners if n < layers]),
        mtp_selecting=int(mtp),
        mtp=mtp,
    )


def published(name: str) -> tuple[str, ModelConfig]:
    """A model by its name (glm-5.2), or by a config.json that was fetched alone."""
    raw = PUBLISHED.get(name.lower())
    if raw is not None:
        return name.lower(), ModelConfig.parse(raw, name)
    path = expanded(name, "--shape")
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        known = ", ".join(PUBLISHED)
        raise UsageError(f"--shape is {name!r}; expected {known}, or the path of a config.json")
    try:
        data = path.read_bytes()
    except OSError as why:
        fault = f"--shape {path}: cannot be read: {why.strerror}"
        raise UsageError(f"{fault}; make it readable, or fetch it again") from why
    raw = parse_object(data, str(path), ConfigError)
    return path.resolve().parent.name, ModelConfig.parse(raw, str(path))


# ---- sums ---------------------------------------------------------------------------------------

_NOTHING = Work(Counter(), Counter())


def _work(config: ModelConfig, entries: Iterable[Entry], form: Callable[[Entry], Format]) -> Work:
    """Bytes and weights of tensors, each met once."""
    nbytes, weights = Counter[str](), Counter[str]()
    for entry in entries:
        rows, cols = matrix_shape(entry)
        stored = form(entry)
        keys = rows * config.qk_nope_head_dim if entry.role == "kv_b" else 0
        keys //= config.qk_nope_head_dim + config.v_head_dim
        for kind, count in ((ABSORBED, keys), (stored.kind.name.lower(), rows - keys)):
            nbytes[kind] += stored.nbytes(count, cols) if count else 0
            weights[kind] += count * cols
    return Work(+nbytes, +weights)


def _each_token(entry: Entry, layers: int) -> bool:
    """Whether every token meets it: all of the main layers, and the norm before the head."""
    return 0 <= entry.layer < layers or entry.role == "norm"


def _head(entries: Iterable[Entry]) -> Entry:
    """The head, or the embedding it is tied to."""
    found = {entry.role: entry for entry in entries if entry.layer < 0}
    return found.get("head", found["embed"])


def _record(config: ModelConfig, form: Format) -> Work:
    kind = form.kind.name.lower()
    nbytes = record_layout(config, form).nbytes
    return Work(Counter({kind: nbytes}), Counter({kind: expert_parameters(config)}))


def _expert_of(container: Container, layer: int) -> Work:
    """One routed expert of a layer, as it is read."""
    kind = format_of(container.expert(layer, 0)[0]).kind.name.lower()
    weights = expert_parameters(container.config)
    return Work(Counter({kind: container.expert_bytes(layer)}), Counter({kind: weights}))
