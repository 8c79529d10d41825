"""config.json: every field with a role is read, and every wrong one is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from colibri.config import ModelConfig, inverse_frequencies
from colibri.errors import ConfigError

GLM_52 = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 192,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "attention_bias": False,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "index_share_for_mtp_iteration": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
}
REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "num_hidden_layers", "first_k_dense_replace", "num_attention_heads", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob",
    "routed_scaling_factor", "rope_parameters", "rms_norm_eps", "index_n_heads",
    "index_head_dim", "index_topk", "max_position_embeddings", "model_type",
)  # fmt: skip


def parse(changes: dict | None = None, without: str = "", **more) -> ModelConfig:
    raw = GLM_52 | (changes or {}) | more
    raw.pop(without, None)
    return ModelConfig.parse(raw)


def full_layers(config: ModelConfig) -> list[int]:
    return [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"]


def test_published_values():
    """GLM-5.2's configuration gives its published values, schedule included."""
    config = parse()
    assert full_layers(config) == [0, 1, 2, *range(6, 75, 4)]
    assert config.mlp_types == ("dense",) * 3 + ("sparse",) * 75
    assert config.eos_token_ids == {154820, 154827, 154829}
    assert (config.mtp_layer, config.qk_head_dim, config.rope_theta) == (78, 256, 8e6)
    assert config.index_share_for_mtp_iteration and not config.warnings


@pytest.mark.parametrize("name", sorted(tiny.CASES))
def test_tiny_checkpoints(name):
    """Configurations as transformers saves them (no interleave flags, no theta at top) load."""
    config = ModelConfig.parse(tiny.CASES[name])
    assert list(config.indexer_types) == tiny.indexer_types(tiny.CASES[name])
    assert config.rope_theta == 1e4


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field_is_named(name):
    """A field the forward needs is never guessed: the error names it and the file."""
    with pytest.raises(ConfigError, match=r"^config\.json: ") as error:
        parse(without=name)
    wanted = "rope_theta" if name == "rope_parameters" else name
    assert f"{wanted} is missing; expected" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, True) for name in ("vocab_size", "num_hidden_layers", "rms_norm_eps")),
        *((name, 8.0) for name in ("hidden_size", "index_topk", "n_group")),
        *((name, "8") for name in ("q_lora_rank", "routed_scaling_factor", "norm_topk_prob")),
        *((name, 0) for name in ("hidden_size", "n_shared_experts", "max_position_embeddings")),
        *((name, -1) for name in ("v_head_dim", "first_k_dense_replace", "rms_norm_eps")),
        *((name, 10**30) for name in ("vocab_size", "index_topk", "routed_scaling_factor")),
        *((name, [1]) for name in ("kv_lora_rank", "attention_bias", "hidden_act")),
        ("norm_topk_prob", 1),
        ("tie_word_embeddings", "no"),
        ("index_share_for_mtp_iteration", 1),
        ("num_nextn_predict_layers", 2),
        ("qk_rope_head_dim", 63),
        ("qk_head_dim", 192),
        ("index_head_dim", 62),
        ("n_group", 3),
        ("topk_group", 2),
        ("num_experts_per_tok", 257),
        ("rope_interleave", False),
        ("indexer_rope_interleave", False),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("rope_parameters", 8000000),
        ("quantization_config", "fp8"),
        ("num_hidden_layers", 513),
        ("first_k_dense_replace", 79),
        ("first_k_dense_replace", 78),
        ("mlp_layer_types", ["dense"] * 78),
        ("moe_layer_freq", 0),
        ("index_topk_freq", 0),
        ("mlp_layer_types", ["sparse"] * 77),
        ("indexer_types", "full"),
        ("index_topk_pattern", "F" * 77 + "X"),
        ("index_topk_pattern", "F" * 77),
        ("eos_token_id", 154880),
        ("eos_token_id", [1, True]),
        ("model_type", "deepseek_v32"),
    ],
)
def test_wrong_value_is_named(name, value):
    """A wrong type, range or choice is one error with the field, the value and what was wanted."""
    with pytest.raises(ConfigError, match=r"^config\.json: ") as error:
        parse({name: value})
    assert f"{name} is " in str(error.value) and "; expected " in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("nested", [False, True])
def test_flash_is_refused_by_name(nested):
    """GLM-5.3-Flash is another architecture and the refusal says what to use."""
    raw = {"model_type": "glm5_next"}
    if nested:
        raw = {"model_type": "glm5_next_vl", "text_config": raw}
    with pytest.raises(ConfigError, match=r"GLM-5\.3-Flash.*Use GLM-5, 5\.1, 5\.2 or 5\.3"):
        ModelConfig.parse(raw)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_theta": 1e6, "type": "linear"}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": 3}},
        {"rope_parameters": {"rope_theta": 1e6, "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "yarn"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e6},
        {"rope_scaling": {"factor": 4.0}},
        {"rope_parameters": {"rope_theta": 0.5}},
        {"rope_parameters": {"rope_theta": "1e6"}},
    ],
)
def test_unknown_rotary_embeddings_are_refused(rope):
    """Scaled or malformed rotary embeddings are refused, not run as if they were plain."""
    with pytest.raises(ConfigError, match=r"rope_(parameters|scaling)\..* is .*; expected"):
        parse(rope)


def test_theta_from_either_place():
    """rope_parameters wins over a top-level rope_theta, which is enough when alone."""
    assert parse({"rope_parameters": None, "rope_theta": 1e6}).rope_theta == 1e6
    assert parse({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5}).rope_theta == 5
    both = parse({"rope_theta": 1e6})
    assert both.rope_theta == 8e6 and "one of the top level is ignored" in both.warnings[0]
    scaling = parse({"rope_scaling": {"rope_type": "default", "rope_theta": 7e3}})
    assert scaling.rope_theta == 7e3 and "one of rope_parameters is ign" in scaling.warnings[0]


def test_index_schedule_precedence():
    """indexer_types beats index_topk_pattern beats the formula, whose default is all full."""
    listed = ["full"] + ["shared"] * 77
    pattern = "FF" + "S" * 76
    assert full_layers(parse(indexer_types=listed, index_topk_pattern=pattern)) == [0]
    assert full_layers(parse(index_topk_pattern=pattern)) == [0, 1]
    assert full_layers(parse(indexer_types=[*listed, "full"])) == [0]
    bare = parse(index_topk_freq=None, index_skip_topk_offset=None)
    assert len(full_layers(bare)) == 78
    with pytest.raises(ConfigError, match="layer 0 full"):
        parse(indexer_types=["shared"] * 78)
    with pytest.raises(ConfigError, match=r'indexer_types\[1\] is "half"'):
        parse(indexer_types=["full", "half"] + ["shared"] * 76)


def test_mlp_schedule_precedence():
    """mlp_layer_types beats first_k_dense_replace and moe_layer_freq."""
    listed = ["sparse"] + ["dense"] * 77
    assert list(parse(mlp_layer_types=listed).mlp_types) == listed
    every_third = parse(moe_layer_freq=3).mlp_types
    assert [i for i, kind in enumerate(every_third) if kind == "sparse"] == list(range(3, 78, 3))


def test_experts_alias():
    """Repacked checkpoints name the expert count otherwise, and errors use their word."""
    assert parse({"num_experts": 128}, without="n_routed_experts").n_routed_experts == 128
    with pytest.raises(ConfigError, match='num_local_experts is "9"'):
        parse({"num_local_experts": "9"}, without="n_routed_experts")


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        ([1, 2], [2, 3], {1, 2, 3}),
        (None, 7, {7}),
        (5, None, {5}),
        (5, {}, {5}),
        ([], [9], {9}),
    ],
)
def test_eos_is_a_union(tmp_path, own, generation, expected):
    """Stop tokens of both files count, as a number or a list."""
    (tmp_path / "config.json").write_text(json.dumps(GLM_52 | {"eos_token_id": own}))
    if generation is not None:
        content = {"eos_token_id": generation} if generation != {} else {}
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert ModelConfig.load(tmp_path).eos_token_ids == expected


def test_no_eos_warns():
    """A model without any stop token is allowed, and says so."""
    assert "no eos_token_id" in parse(eos_token_id=None).warnings[0]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[1]", "expected a JSON object"),
        (b'{"model_type": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1} trailing', "not valid JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json_names_the_file(tmp_path, name, content, fault):
    """Damaged JSON in either file is a ConfigError that names the file and the fault."""
    (tmp_path / "config.json").write_text(json.dumps(GLM_52))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=fault) as error:
        ModelConfig.load(tmp_path)
    assert str(error.value).startswith(str(tmp_path / name))


def test_missing_config(tmp_path):
    """A directory without config.json is refused with the path and what to give."""
    with pytest.raises(ConfigError, match=r"config\.json: not found; give the directory"):
        ModelConfig.load(tmp_path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*GLM_52, "indexer_types", "mlp_layer_types"]), JUNK))
def test_any_values_load_or_raise_config_error(changes):
    """Whatever the values are, the result is a configuration or a ConfigError."""
    try:
        config = ModelConfig.parse(GLM_52 | changes)
    except ConfigError:
        return
    assert len(config.indexer_types) == len(config.mlp_types) == config.num_hidden_layers


def test_frequencies_are_rounded_once():
    """Each frequency is f32(1) / f32(power), with the power within half an f32 step of exact."""
    for theta, width in ((8e6, 64), (1e6, 64), (1e4, 16), (10007.5, 20)):
        got = inverse_frequencies(theta, width)
        exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        powers = np.array([theta**exponent for exponent in exponents.tolist()], np.float32)
        assert got.dtype == np.float32 and got.shape == (width // 2,)
        assert got.tobytes() == (np.float32(1) / powers).tobytes()


def test_frequencies_are_torchs():
    """Where the width is no power of two they are the bits that torch 2.13 computes, too."""
    torchs = ["0x1.00000p+0", "0x1.31a96ap-1", "0x1.6cf51ep-2", "0x1.b3c190p-3", "0x1.0424fep-3",
              "0x1.369c3ap-4", "0x1.72ddb2p-5"]  # fmt: skip
    assert inverse_frequencies(37.0, 14).tolist() == [float.fromhex(text) for text in torchs]


def test_frequencies_are_read_only():
    """The shared frequency table cannot be changed by a caller."""
    with pytest.raises(ValueError):
        parse().inv_freq[0] = 2
