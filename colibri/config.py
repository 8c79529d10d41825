"""config.json: what the model is. Every field that has a role is read, checked and kept."""

from dataclasses import asdict, dataclass
from decimal import Context, Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from colibri.errors import ConfigError
from colibri.paths import unreadable
from colibri.strictjson import parse_object

MODEL_TYPE = "glm_moe_dsa"
FULL, SHARED = "full", "shared"
DENSE, SPARSE = "dense", "sparse"
CONFIG_BYTES = 16 << 20

# Field: (least, most). Rows times columns times eight of any matrix fit an int64.
_LIMITS = {
    "vocab_size": (1, 1 << 20),
    "hidden_size": (1, 1 << 17),
    "intermediate_size": (1, 1 << 18),
    "moe_intermediate_size": (1, 1 << 17),
    "num_hidden_layers": (1, 512),  # CLB_MAX_LAYERS of csrc/core.h
    "num_attention_heads": (1, 1024),
    "q_lora_rank": (1, 1 << 16),
    "kv_lora_rank": (1, 1 << 16),
    "qk_nope_head_dim": (1, 4096),
    "qk_rope_head_dim": (2, 1024),
    "v_head_dim": (1, 4096),
    "n_routed_experts": (1, 4096),
    "n_shared_experts": (1, 64),
    "num_experts_per_tok": (1, 256),
    "n_group": (1, 4096),
    "topk_group": (1, 4096),
    "index_n_heads": (1, 1024),
    "index_head_dim": (1, 1024),
    "index_topk": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 30),
}
_ALIASES = {"n_routed_experts": ("num_experts", "num_local_experts")}


@dataclass(frozen=True)
class ModelConfig:
    """A validated GLM-MoE-DSA architecture; names follow config.json.

    `indexer_types` and `mlp_types` have one entry per main layer (0..num_hidden_layers-1).
    `eos_token_ids` is the union of config.json and generation_config.json.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rope_theta: float
    rms_norm_eps: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    index_share_for_mtp_iteration: bool
    num_nextn_predict_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    warnings: tuple[str, ...]

    @classmethod
    def load(cls, directory: Path | str) -> "ModelConfig":
        """Read config.json (and generation_config.json, if there) of a model directory."""
        directory = Path(directory)
        path = directory / "config.json"
        raw = _read(path)
        if raw is None:
            raise ConfigError(
                f"{path}: not found; give the directory that holds the model's config.json"
            )
        generation_path = directory / "generation_config.json"
        generation = _read(generation_path)
        return cls.parse(raw, str(path), generation or {}, str(generation_path))

    @classmethod
    def parse(
        cls,
        raw: dict[str, Any],
        where: str = "config.json",
        generation: dict[str, Any] | None = None,
        generation_where: str = "generation_config.json",
    ) -> "ModelConfig":
        """Validate the parsed JSON; `where` names the files in errors."""
        fields = _Fields(raw, where)
        _check_family(fields)
        values: dict[str, Any] = {name: fields.integer(name, *_LIMITS[name]) for name in _LIMITS}
        values["routed_scaling_factor"] = fields.number("routed_scaling_factor", 1e-6, 1e6)
        values["rms_norm_eps"] = fields.number("rms_norm_eps", 1e-12, 0.1)
        values["norm_topk_prob"] = fields.boolean("norm_topk_prob")
        values["tie_word_embeddings"] = fields.boolean("tie_word_embeddings", False)
        values["index_share_for_mtp_iteration"] = fields.boolean(
            "index_share_for_mtp_iteration", False
        )
        values["num_nextn_predict_layers"] = fields.integer("num_nextn_predict_layers", 0, 1, 0)
        values["rope_theta"] = _rope_theta(fields)
        _check_shapes(fields, values)
        extra = values["num_nextn_predict_layers"]
        values["indexer_types"] = _indexer_types(fields, values["num_hidden_layers"], extra)
        values["mlp_types"] = _mlp_types(fields, values["num_hidden_layers"], extra)
        vocab = values["vocab_size"]
        generation_fields = _Fields(generation or {}, generation_where)
        eos = fields.token_ids("eos_token_id", vocab)
        values["eos_token_ids"] = eos | generation_fields.token_ids("eos_token_id", vocab)
        if not values["eos_token_ids"]:
            fields.warnings.append(
                f"{where}: no eos_token_id here or in generation_config.json; "
                "only the tokenizer's own end tokens will stop generation"
            )
        return cls(**values, warnings=tuple(fields.warnings))

    @property
    def architecture(self) -> dict[str, Any]:
        """The fields that a computed number can depend on: not when a text ends, nor warnings."""
        beside = ("eos_token_ids", "max_position_embeddings", "warnings")
        return {name: value for name, value in asdict(self).items() if name not in beside}

    @property
    def sparse_layer_count(self) -> int:
        """Main layers that route to experts."""
        return self.mlp_types.count(SPARSE)

    @property
    def mtp_layer(self) -> int | None:
        """Number of the multi-token-prediction layer, or None when config.json declares none."""
        return self.num_hidden_layers if self.num_nextn_predict_layers else None

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the shared expert."""
        return self.moe_intermediate_size * self.n_shared_experts

    @cached_property
    def inv_freq(self) -> np.ndarray:
        """RoPE frequencies, f32 [qk_rope_head_dim / 2], as torch computes them."""
        return inverse_frequencies(self.rope_theta, self.qk_rope_head_dim)


def inverse_frequencies(theta: float, width: int) -> np.ndarray:
    """f32(1) / f32(theta^f32(2j / width)) for j < width / 2, both correctly rounded to f32."""
    context = Context(prec=60)
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    powers = [
        _nearest_f32(context.power(Decimal(theta), Decimal(exponent)))
        for exponent in exponents.tolist()
    ]
    frequencies = np.float32(1) / np.array(powers, dtype=np.float32)
    frequencies.flags.writeable = False
    return frequencies


def _nearest_f32(exact: Decimal) -> np.float32:
    # Decimal -> double -> float rounds twice; a neighbour may be nearer to the exact value.
    guess = np.float32(float(exact))
    near = (guess, np.nextafter(guess, np.float32(0)), np.nextafter(guess, np.float32(np.inf)))
    return min(near, key=lambda value: abs(Decimal(float(value)) - exact))


class _Fields:
    """Typed look-ups in one JSON object; every failure is a ConfigError naming the field."""

    def __init__(self, raw: dict[str, Any], where: str, prefix: str = "") -> None:
        self.raw, self.where, self.prefix = raw, where, prefix
        self.warnings: list[str] = []

    def fail(self, name: str, expected: str) -> ConfigError:
        name = self.spelling(name)
        found = f"is {_show(self.raw[name])}" if name in self.raw else "is missing"
        return ConfigError(f"{self.where}: {self.prefix}{name} {found}; expected {expected}")

    def spelling(self, name: str) -> str:
        """The name or, when only that is present, the alias some repacked checkpoints use."""
        spellings = (name, *_ALIASES.get(name, ()))
        return next((word for word in spellings if self.raw.get(word) is not None), name)

    def get(self, name: str) -> Any:
        """The value; None when absent or null."""
        return self.raw.get(self.spelling(name))

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.fail(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float:
        value = self.get(name)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.fail(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not bool:
            raise self.fail(name, "true or false")
        return value

    def only(self, name: str, allowed: Any, why: str) -> None:
        """Refuse every value but `allowed` (or an absent field)."""
        value = self.get(name)
        if value is not None and (type(value) is not type(allowed) or value != allowed):
            raise self.fail(name, f"{_show(allowed)}: {why}")

    def entries(self, name: str, count: int, extra: int, allowed: tuple[str, str]) -> list[str]:
        """A list of one word per layer; entries for the MTP layers may follow."""
        value = self.get(name)
        size = f"{count}" if not extra else f"{count} (or {count + extra}, with the MTP layer)"
        if not isinstance(value, list) or not count <= len(value) <= count + extra:
            raise self.fail(name, f"a list of {size} entries, one per layer")
        for at, word in enumerate(value):
            if word not in allowed:
                raise ConfigError(
                    f"{self.where}: {self.prefix}{name}[{at}] is {_show(word)}; "
                    f"expected {_show(allowed[0])} or {_show(allowed[1])}"
                )
        return value[:count]

    def token_ids(self, name: str, vocab: int) -> frozenset[int]:
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token) is not int or not 0 <= token < vocab for token in ids):
            raise self.fail(name, f"a token id from 0 to {vocab - 1}, or a list of them")
        return frozenset(ids)


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    return text if len(text) <= 80 else text[:77] + "..."


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as why:
        raise ConfigError(unreadable(path, why)) from why
    if len(data) > CONFIG_BYTES:
        raise ConfigError(f"{path}: larger than {CONFIG_BYTES >> 20} MiB; not a model's config")
    return parse_object(data, str(path), ConfigError)


def _check_family(fields: _Fields) -> None:
    kind = fields.get("model_type")
    text = fields.raw.get("text_config")
    nested = text.get("model_type") if isinstance(text, dict) else None
    if any(isinstance(name, str) and name.startswith("glm5_next") for name in (kind, nested)):
        raise ConfigError(
            f'{fields.where}: model_type is "glm5_next" (GLM-5.3-Flash); that is another '
            "architecture (linear attention, hyper-connections) which colibri does not run. "
            "Use GLM-5, 5.1, 5.2 or 5.3."
        )
    if kind != MODEL_TYPE:
        raise fields.fail("model_type", f'"{MODEL_TYPE}" (GLM-5, 5.1, 5.2, 5.3)')
    fields.only("scoring_func", "sigmoid", "the only router of this architecture")
    fields.only("topk_method", "noaux_tc", "sigmoid scores with a selection-only bias")
    fields.only("hidden_act", "silu", "the only activation of this architecture")
    fields.only("attention_bias", False, "biased attention projections are not supported")
    fields.only("mlp_bias", False, "biased MLP projections are not supported")
    fields.only("rope_interleave", True, "GLM rotates adjacent pairs")
    fields.only("indexer_rope_interleave", True, "GLM's indexer rotates adjacent pairs")
    if not isinstance(fields.get("quantization_config"), (dict, type(None))):
        raise fields.fail("quantization_config", "an object")


def _rope_theta(fields: _Fields) -> float:
    """The first of rope_scaling's, rope_parameters' and the top level's, as transformers has it."""
    found = {name: _block_theta(fields, name) for name in ("rope_scaling", "rope_parameters")}
    if fields.get("rope_theta") is not None:
        found["rope_theta"] = fields.number("rope_theta", 1, 1e15)
    thetas = {name: theta for name, theta in found.items() if theta is not None}
    if not thetas:
        raise fields.fail("rope_theta", "it here or as rope_parameters.rope_theta")
    used, theta = next(iter(thetas.items()))
    for name, other in thetas.items():
        if other != theta:
            fields.warnings.append(
                f"{fields.where}: {used}.rope_theta {theta:g} is used; the different one of "
                f"{'the top level' if name == 'rope_theta' else name} is ignored"
            )
    return theta


def _block_theta(fields: _Fields, name: str) -> float | None:
    """rope_theta of one object, which may hold nothing that scales."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.fail(name, "an object with rope_theta and rope_type")
    inner = _Fields(value, fields.where, f"{name}.")
    for key in ("rope_type", "type"):
        inner.only(key, "default", "scaled rotary embeddings are not supported")
    for key in ("factor", "partial_rotary_factor"):
        if inner.get(key) is not None:
            inner.number(key, 1, 1)
    return None if inner.get("rope_theta") is None else inner.number("rope_theta", 1, 1e15)


def _check_shapes(fields: _Fields, values: dict[str, Any]) -> None:
    """Rules that tie several fields together."""
    rope, group = values["qk_rope_head_dim"], values["n_group"]
    head = values["qk_nope_head_dim"] + rope
    if rope % 2:
        raise fields.fail("qk_rope_head_dim", "an even number: rotary pairs")
    if values["index_head_dim"] < rope:
        raise fields.fail("index_head_dim", f"at least qk_rope_head_dim ({rope})")
    if fields.get("qk_head_dim") is not None and fields.integer("qk_head_dim", 1, 8192) != head:
        raise fields.fail("qk_head_dim", f"qk_nope_head_dim + qk_rope_head_dim = {head}")
    experts = values["n_routed_experts"]
    if experts % group:
        raise fields.fail("n_group", f"a divisor of n_routed_experts ({experts})")
    if group > 1 and experts // group < 2:
        raise fields.fail("n_group", "groups of at least two experts")
    if values["topk_group"] > group:
        raise fields.fail("topk_group", f"at most n_group ({group})")
    reachable = values["topk_group"] * (experts // group)
    if values["num_experts_per_tok"] > reachable:
        raise fields.fail("num_experts_per_tok", f"at most {reachable}, the experts in reach")


def _indexer_types(fields: _Fields, layers: int, extra: int) -> tuple[str, ...]:
    """Explicit list, else pattern, else formula (glm_moe_dsa's own order of precedence)."""
    if fields.get("indexer_types") is not None:
        name = "indexer_types"
        types = fields.entries(name, layers, extra, (FULL, SHARED))
    elif fields.get("index_topk_pattern") is not None:
        name = "index_topk_pattern"
        types = _pattern(fields, layers, extra)
    else:
        name = "index_skip_topk_offset"
        freq = fields.integer("index_topk_freq", 1, 1024, 1)
        offset = fields.integer("index_skip_topk_offset", 0, 1024, 2)
        types = [SHARED if max(i - offset + 1, 0) % freq else FULL for i in range(layers)]
    if types[0] != FULL:
        raise fields.fail(name, "layer 0 full: a shared layer needs a full one before it")
    return tuple(types)


def _pattern(fields: _Fields, layers: int, extra: int) -> list[str]:
    text = fields.get("index_topk_pattern")
    if (
        not isinstance(text, str)
        or not layers <= len(text) <= layers + extra
        or set(text) - {"F", "S"}
    ):
        raise fields.fail("index_topk_pattern", f"{layers} letters, F (full) or S (shared)")
    return [FULL if letter == "F" else SHARED for letter in text[:layers]]


def _mlp_types(fields: _Fields, layers: int, extra: int) -> tuple[str, ...]:
    """Explicit list, else first_k_dense_replace with moe_layer_freq."""
    if fields.get("mlp_layer_types") is not None:
        name = "mlp_layer_types"
        kinds = tuple(fields.entries(name, layers, extra, (DENSE, SPARSE)))
    else:
        name = "first_k_dense_replace"
        first = fields.integer(name, 0, layers)
        freq = fields.integer("moe_layer_freq", 1, 1024, 1)
        kinds = tuple(SPARSE if i >= first and i % freq == 0 else DENSE for i in range(layers))
    if SPARSE not in kinds:
        raise fields.fail(name, "a layer with routed experts")
    return kinds
