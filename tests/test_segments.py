"""The segments' costs from GLM-5.2's shapes, against figures published about it."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

import pytest
from test_config import GLM_52
from toolbox import tool

from colibri.config import ModelConfig
from colibri.formats import Format
from colibri.inventory import dense_entries, expert_parameters, is_sparse
from colibri.layout import Formats

segment_costs = tool("segment_costs").segment_costs
BYTE_A_WEIGHT = Formats(*(Format.parse("int8") for _ in range(4)))  # as FP8, but for its scales
CONTEXT = 131072


@pytest.fixture(scope="module")
def glm() -> ModelConfig:
    """GLM-5.2."""
    return ModelConfig.parse(GLM_52)


def test_five_drafts_are_four_draft_forwards_and_six_verified_rows(glm):
    """The absorb makes the first draft, so five cost four draft forwards; verify has six rows."""
    costs = segment_costs(glm, 5)
    assert costs["draft"].forwards == 4 and costs["draft"].rows == 1
    assert costs["absorb"].forwards == costs["verify"].forwards == 1
    assert costs["verify"].rows == costs["verify"].head_rows == 6
    layers = {name: (cost.attention_layers, cost.moe_layers) for name, cost in costs.items()}
    assert layers == {"draft": (4, 4), "verify": (78, 75), "absorb": (1, 1), "plain": (78, 75)}
    assert segment_costs(glm, 1)["draft"].nbytes == 0


def test_a_draft_reads_300_megabytes_of_experts(glm):
    """At a byte a weight one draft's eight experts are about 300 MB, four drafts' 1.2 GB."""
    costs = segment_costs(glm, 5, BYTE_A_WEIGHT)
    assert costs["draft"].experts == 4 * 8
    assert costs["draft"].expert_bytes == pytest.approx(1.2e9, rel=0.02)
    assert costs["absorb"].expert_bytes == pytest.approx(300e6, rel=0.02)


def test_the_head_outweighs_the_rest_of_a_draft(glm):
    """154880 x 6144 weights: 1.90 GB in BF16 for each drafted token, whatever the layer costs."""
    bf16 = Formats(*(Format.parse("bf16") for _ in range(4)))
    assert segment_costs(glm, 2, bf16)["draft"].head_bytes == 154880 * 6144 * 2
    one = segment_costs(glm, 2, BYTE_A_WEIGHT)["draft"]
    assert one.head_bytes > one.expert_bytes + one.dense_bytes


def test_index_work(glm):
    """Verify scores 21 x 6 rows, the absorb one; shared drafts none, unshared ones their own."""
    costs = segment_costs(glm, 5, context=CONTEXT)
    rows = {name: cost.index_rows for name, cost in costs.items()}
    assert rows == {"draft": 0, "verify": 21 * 6, "absorb": 1, "plain": 21}
    assert costs["verify"].index_scores == 126 * CONTEXT
    unshared = ModelConfig.parse(GLM_52 | {"index_share_for_mtp_iteration": False})
    assert segment_costs(unshared, 5, context=CONTEXT)["draft"].index_rows == 4
    assert segment_costs(glm, 5, context=2048)["verify"].index_rows == 0


def touched(config, layer):
    """Weights of one layer that one row meets, by part; "experts" are the routed ones."""
    parts = Counter()
    for entry in dense_entries(config, layer):
        parts[entry.part] += prod(entry.shape)
    if is_sparse(config, layer):
        parts["experts"] = config.num_experts_per_tok * expert_parameters(config)
    return parts


def test_active_weights(glm):
    """40.30 billion weights a token; attention 165.0 M, nine experts 339.7 M a sparse layer."""
    total = sum(touched(glm, layer).total() for layer in range(78)) + 154880 * 6144
    assert total == pytest.approx(40.30e9, rel=0.0005)
    layer = touched(glm, 40)
    assert layer["attention"] == pytest.approx(165.0e6, rel=0.001)
    assert layer["experts"] + layer["shared expert"] == pytest.approx(339.7e6, rel=0.001)
    assert layer["router"] == pytest.approx(1.6e6, rel=0.02)
    assert touched(glm, 78)["attention"] - layer["attention"] == 6144 * 12288  # eh_proj


def test_distinct_experts_grow_slower_than_rows(glm):
    """Rows share experts by chance alone: 6 rows meet 5.55 rows' worth of 600."""
    costs = segment_costs(glm, 5)
    assert costs["plain"].experts == pytest.approx(600)
    assert 5.5 < costs["verify"].experts / 600 < 6
    assert costs["verify"].dense_bytes == costs["plain"].dense_bytes


def test_the_documented_table_is_what_the_tool_prints():
    """docs/speculation.md shows this very table."""
    docs = Path(__file__).parent.parent / "docs" / "speculation.md"
    assert tool("segment_costs").documented() in docs.read_text()
