"""Forecasts: sizes counted by hand, seconds added up by hand, and what limits them named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_config import GLM_52

from colibri.config import ModelConfig
from colibri.container import Container
from colibri.context import advised
from colibri.engine import Engine
from colibri.errors import UsageError
from colibri.forecast import (
    ACCEPTED,
    RETAINED,
    Forecaster,
    budgets,
    cache_bytes,
    calibrated,
    distinct,
    lengths,
    scratch_bytes,
)  # fmt: skip
from colibri.info import info_of
from colibri.knobs import Settings
from colibri.layout import Formats
from colibri.locality import TEXT, Locality, of_trace
from colibri.lrfu import hit_rate
from colibri.memory import RESERVE
from colibri.model import PILOT_SLOTS
from colibri.plan import make_plan
from colibri.probe import ABSORBED, ASSUMED_LATENCY, MANY, STEP_AT, Beside, Speeds
from colibri.shapes import PUBLISHED, of_config, of_container, published
from colibri.trace import Trace

GB, GIB = 1e9, 1 << 30
RECORD = 20_054_016
LATENCY = ASSUMED_LATENCY
SLOW = Speeds(1, memory=50 * GB, disk=5 * GB, layer_seconds=0.0)


@pytest.fixture(scope="module")
def glm():
    """GLM-5.2 in our own layout."""
    return of_config("glm-5.2", published("glm-5.2")[1], Formats())


# ---- sizes --------------------------------------------------------------------------------------


def test_glm_sizes(glm):
    """414 GB on disk, 600 experts of 20,054,016 bytes a token, 193,280 cache bytes a token."""
    assert round(glm.files / GB) == 414 and glm.expert.total == RECORD
    assert glm.sparse_layer_count * glm.config.num_experts_per_tok == 600
    assert glm.token_bytes == 4 * (79 * 576 + 22 * 128) == 193_280
    assert replace(glm, kv_dtype="f16").token_bytes == 193_280 // 2
    assert glm.head.total == 154880 * (6144 + 2)
    forecast = Forecaster(glm, SLOW).forecast(64 * GIB, 4096, 8192)
    assert forecast.cold_bytes == 600 * RECORD == 12_032_409_600
    assert 17.0 * GB < glm.dense.total < 17.1 * GB and 19.2 * GB < glm.resident < 19.3 * GB


def test_published_shapes():
    """GLM-5.2 is what its config.json says; 5 and 5.1 score the context in every layer."""
    assert published("GLM-5.2")[1] == ModelConfig.parse(GLM_52, "GLM-5.2")
    assert published("glm-5.3")[1] == published("glm-5.2")[1]
    old = of_config("glm-5", published("glm-5")[1], Formats())
    assert old.selecting == 78 and old.config.max_position_embeddings == 202752
    assert set(PUBLISHED) == {"glm-5", "glm-5.1", "glm-5.2", "glm-5.3"}


def test_a_container_is_counted_as_it_is(demo_container):
    """The shape of a container agrees with what `colibri info` counts in its files."""
    shape, info = of_container(demo_container), info_of(demo_container)
    parts = {part.name: part.nbytes for part in info.parts}
    assert shape.expert.total == info.expert_bytes and shape.files == info.file_bytes
    assert shape.sparse_layer_count * shape.config.num_experts_per_tok == info.experts_per_token
    embedding = parts["embedding"]
    assert shape.dense.total + shape.head.total == sum(
        parts[name] for name in parts if name not in ("experts", "mtp", "other", "embedding")
    )
    main = shape.dense.total + shape.head.total + embedding
    assert shape.resident == main + shape.mtp_dense.total
    config = demo_container.config
    planned = of_config("demo", config, Formats())
    assert planned.expert == shape.expert and planned.token_bytes == shape.token_bytes
    heads = config.num_attention_heads * config.num_hidden_layers
    keys = heads * config.qk_nope_head_dim * config.kv_lora_rank
    assert shape.dense.weights[ABSORBED] == keys  # kv_b's value rows multiply like the rest
    plain = of_container(demo_container, mtp=False)
    assert plain.resident == main and plain.layers == shape.layers - 1


def test_slow_products_are_the_limit(demo_container):
    """A processor that multiplies slowly is named, not the disk that it keeps waiting."""
    shape = of_container(demo_container)
    kinds = set(shape.dense.nbytes) | set(shape.head.nbytes) | set(shape.expert.nbytes)
    rates = dict.fromkeys(kinds, (1e7, 1e7)) | dict.fromkeys(shape.expert.nbytes, (1e12, 1e12))
    rates |= {"f32": (1e12, 1e12), ABSORBED: (1e12, 1e12)}
    parts = Forecaster(shape, Speeds(1, 1e12, 1e7, rates)).step(0.0, 256)
    assert parts.dense + parts.head > parts.read > 0
    assert parts.limit == "arithmetic"


def test_bytes_of_a_session(demo_container):
    """What caches and scratch take is known within three percent without making them."""
    for context, dtype in ((128, "f32"), (1024, "f32"), (1024, "f16")):
        flags = {"threads": "1", "context": str(context), "kv_dtype": dtype}
        session = Engine.open(Settings.resolve(flags, {})).slot.session
        shape = replace(of_container(demo_container), kv_dtype=dtype)
        caches = cache_bytes(shape, context, session.max_rows)
        assert caches == pytest.approx(session.bytes, rel=0.03)
        scratch = scratch_bytes(shape, context, 1, session.max_rows)
        assert scratch == pytest.approx(session.scratch.bytes, rel=0.03)


# ---- hit rates ----------------------------------------------------------------------------------


def test_hit_rates_of_text():
    """The overlap at one token's experts, its part below, everything at all slots."""
    rates = [TEXT.hits(slots, 256, 8) for slots in (0, 6, 8, 32, 128, 255, 256, 300)]
    assert rates[:3] == pytest.approx([0.0, 0.24, 0.32]) and rates[-2:] == [1.0, 1.0]
    assert rates == sorted(rates) and rates[4] == pytest.approx(0.32 ** (1 / 5))
    alike = Locality("every expert as likely as another", None)
    assert alike.hits(64, 256, 8) == 0.25 and alike.hits(4, 256, 8) == 4 / 256


def test_measured_hit_rates():
    """Between measured points the rate is on the line, at the ends it is none and all."""
    measured = Locality("trace", None, [(8, 0.4), (16, 0.6)])
    slots = [0, 4, 8, 12, 16, 24, 32]
    rates = [measured.hits(n, 32, 8) for n in slots]
    assert rates == pytest.approx([0, 0.2, 0.4, 0.5, 0.6, 0.8, 1])


def test_a_trace_replayed_by_hand(tmp_path):
    """Two layers, three experts, one a token: a pool of two slots, of four, of six."""
    picks = [[0, 0], [1, 0], [0, 1], [0, 1], [1, 0], [0, 1]]
    experts = np.array(picks, np.uint16)[:, :, None]
    rows = len(picks)
    trace = Trace(experts, np.arange(rows), np.ones(rows, bool), np.array([1, 2]), 3)
    # Rows 3..5 count: look-ups (0:0)(1:1) (0:1)(1:0) (0:0)(1:1).
    # Two slots, before row 3: (1:0), used twice, and (1:1). (0:0) takes the slot of (1:1), (1:1)
    # that of (1:0), (0:1) that of (1:1), (1:0) that of (0:1); (0:0) is hit, (1:1) is not.
    assert hit_rate(trace, 1) == pytest.approx(1 / 6)
    assert hit_rate(trace, 2) == 1.0
    trace.save(tmp_path / "t.npz")
    assert of_trace(Trace.load(tmp_path / "t.npz"), "t").hits(1, 3, 1) == pytest.approx(1 / 6)


# ---- seconds ------------------------------------------------------------------------------------


def test_everything_in_memory(glm):
    """Without a miss a token takes its bytes at the memory's speed, and nothing else."""
    parts = Forecaster(glm, SLOW).step(1.0, 0)
    nbytes = glm.dense.total + glm.head.total + 600 * RECORD
    assert parts.seconds == pytest.approx(nbytes / (50 * GB)) and parts.read == 0
    assert parts.limit == "memory bandwidth"


def test_attention_reads_its_keys(glm):
    """Up to index_topk keys of every layer; beyond, the scores of the layers that choose."""
    short = Forecaster(glm, SLOW).step(1.0, 1000).attention
    assert short == pytest.approx(78 * 1000 * 576 * 4 / (50 * GB))
    long = Forecaster(glm, SLOW).step(1.0, 10_000).attention
    chosen, scored = 78 * 2048 * 576 * 4, 21 * 10_000 * 128 * 4
    assert long == pytest.approx((chosen + scored) / (50 * GB))


def test_nothing_in_memory(glm):
    """Reads overlap the computing of a layer's experts; the last one is computed after them."""
    parts = Forecaster(glm, SLOW).step(0.0, 0)
    one = RECORD / (50 * GB)
    layer = LATENCY + 8 * RECORD / (5 * GB) + one
    assert parts.read + parts.experts == pytest.approx(75 * layer)
    assert parts.limit == "disk"
    quick = replace(SLOW, disk=1e15)
    assert Forecaster(glm, quick).step(0.0, 0).read == pytest.approx(
        75 * max(0.0, LATENCY + one - 8 * one)
    )


def test_a_few_missing(glm):
    """Most hits leave layers without a read; in the others a lone read takes all of its latency,
    behind what is computed meanwhile."""
    slow = replace(SLOW, latency=0.01)
    one, some = RECORD / (50 * GB), 1 - 0.95**8
    missed = 8 * 0.05 / some  # of a layer that misses any
    waiting = 0.01 + missed * RECORD / (5 * GB) + one - 8 * one
    assert Forecaster(glm, slow).step(0.95, 0).read == pytest.approx(75 * some * waiting)


def test_cores_that_work_the_disk(glm):
    """Where reading and computing take each other's cores, neither hides the other: with halves
    of both, a step takes the sum; with all of both, the longer."""
    halves = replace(SLOW, beside=Beside(0.5, 0.5))
    one = RECORD / (50 * GB)
    layer = LATENCY + 8 * RECORD / (5 * GB) + 8 * one
    parts = Forecaster(glm, halves).step(0.0, 0)
    assert parts.read + parts.experts == pytest.approx(75 * layer)
    assert Beside().both(3, 2) == 3 and Beside(0.5, 0.5).both(3, 2) == 5
    assert Beside(1, 0.5).both(3, 2) == 3.5  # after 3 s of reading 0.5 s of work is left
    assert Beside(0.5, 1).both(2, 3) == 3.5 and Beside(0.5, 1).both(2, 9) == 9
    cached = Forecaster(glm, halves).step(1.0, 0)
    assert cached == Forecaster(glm, SLOW).step(1.0, 0)


def test_products_limit_a_fast_memory(glm):
    """Where multiplying is slower than reading, weights and not bytes count."""
    products = dict.fromkeys(("int4", "int8", "f32"), (1000000000.0, 2000000000.0))
    speeds = Speeds(4, memory=1e15, disk=5 * GB, products=products, layer_seconds=0.0)
    parts = Forecaster(glm, speeds).step(1.0, 0)
    expert = 3 * 2048 * 6144
    assert parts.experts == pytest.approx(600 * expert / 4e9)
    assert parts.limit == "arithmetic"
    assert speeds.multiply("int8", 1) == 4e9 and speeds.multiply("int8", MANY) == 8e9
    assert speeds.multiply("int8", 4) == pytest.approx(4e9 * 2**0.5)
    assert speeds.multiply("absorbed", 100) == 4e9


def test_small_steps(glm):
    """What a layer takes beside its weights is counted, and found out from a small model."""
    speeds = Speeds(1, memory=1e18, disk=1e18, layer_seconds=1e-3)
    parts = Forecaster(glm, speeds).step(1.0, 0)
    assert parts.other == pytest.approx(0.078) and parts.limit == "small steps"
    assert Forecaster(glm, speeds).step(1.0, 0, rows=2).other == pytest.approx(0.156)
    free = Forecaster(glm, replace(speeds, layer_seconds=0.0)).step(1.0, STEP_AT).seconds
    assert calibrated(speeds, glm, free + 78 * 5e-4).layer_seconds == pytest.approx(5e-4)
    assert calibrated(speeds, glm, 0.0).layer_seconds == 0.0


def test_one_draft(glm):
    """Two rows ask for twice the misses; the MTP layer and the head come on top."""
    forecaster = Forecaster(glm, SLOW)
    one = forecaster.forecast(64 * GIB, 0, 8192)
    verify = forecaster.step(one.hits, 0, 2).seconds
    assert verify > one.parts.seconds
    gain = one.drafted / one.rate
    assert 0.8 < gain < (1 + ACCEPTED)
    without = replace(glm, mtp=False)
    assert Forecaster(without, SLOW).forecast(64 * GIB, 0, 8192).drafted is None


def test_first_token(glm):
    """A prompt's chunks each read the dense part once and every expert they meet."""
    union = distinct(glm.config, 128)
    assert union == pytest.approx(256 * (1 - (248 / 256) ** 128))
    forecaster = Forecaster(glm, replace(SLOW, memory=1e15))
    one, two = forecaster.prefill(128, 64, 128), forecaster.prefill(256, 64, 128)
    assert one == pytest.approx(75 * (LATENCY + union * RECORD / (5 * GB)), rel=1e-4)
    assert two == pytest.approx((2 - RETAINED / 4) * one, rel=1e-3)  # slots for a quarter
    assert forecaster.prefill(256, 256, 128) == pytest.approx(
        one, rel=1e-3
    )  # the second finds them
    all_of_them = 75 * (LATENCY + distinct(glm.config, 512) * RECORD / (5 * GB))
    assert forecaster.prefill(512, 8, 512) == pytest.approx(all_of_them, rel=1e-4)


# ---- budgets ------------------------------------------------------------------------------------


def test_slots_are_the_plans(glm):
    """A budget is divided as the engine divides it, and never exceeded."""
    forecaster = Forecaster(glm, SLOW)
    demand = forecaster.demand(8192, 64 * GIB)
    forecast = forecaster.forecast(64 * GIB, 1000, 8192)
    left = 64 * GIB - glm.resident - demand.sessions - RESERVE
    whole, rest = divmod(left - PILOT_SLOTS * RECORD, 75 * RECORD + glm.mtp_expert.total)
    assert forecast.slots == whole + rest // RECORD / 75
    assert forecast.footprint <= 64 * GIB and forecast.io == "direct"
    whole = forecaster.forecast(forecaster.whole(8192), 1000, 8192)
    assert whole.hits == 1.0 and whole.warm_bytes == 0


def test_more_memory_is_never_slower(glm):
    """Rates rise with the budget until everything is in memory."""
    forecaster = Forecaster(glm, SLOW)
    sizes = [n * GIB for n in (24, 32, 48, 64, 96, 128, 256, 400)]
    rates = [forecaster.forecast(size, 1000, 4096).rate for size in sizes]
    assert rates == sorted(rates) and rates[-1] > 2 * rates[0]


def test_what_does_not_fit(glm):
    """Too little memory is refused with both numbers."""
    forecaster = Forecaster(glm, SLOW)
    with pytest.raises(UsageError, match=r"17\.95 GiB.*do not fit 16\.00 GiB"):
        forecaster.context(16 * GIB)
    with pytest.raises(UsageError, match="--ctx is 2000000, and this model handles 1048576"):
        forecaster.context(64 * GIB, 2_000_000)


def test_a_context_leaves_room_for_the_slots_that_are_asked_for(glm):
    """With --io direct a context is as short as one slot a layer asks for, as in the engine; where
    the page cache may hold the experts it need not be."""
    forecaster, shorter = Forecaster(glm, SLOW), 0
    for tenths in range(205, 240):
        budget = tenths * GIB // 10
        size = forecaster.context(budget, io="direct")
        shorter += size < forecaster.context(budget)
        assert make_plan(forecaster.demand(size, budget), budget, "direct")
    assert shorter


def test_rows_of_the_tables():
    """Budgets about the given one and the whole; lengths up to the context."""
    assert list(budgets(64, 400)) == [32, 64, 128, 400]
    assert list(budgets(64, 100)) == [32, 64, 100] and list(budgets(64, 20)) == [20]
    assert lengths(16384) == [512, 4096, 16384] and lengths(100) == [100]


def test_the_demo_is_mapped(demo_container: Container):
    """A model that is small is left to the page cache, all of it in memory."""
    forecast = Forecaster(of_container(demo_container), SLOW).forecast(4 * GIB, 100, 1024)
    assert (forecast.io, forecast.hits) == ("mmap", 1.0)


def test_the_context_that_is_advised_fits():
    """A refusal of GLM-5.2's full context names one that the plan then has room for."""
    shape = of_config("glm-5.2", published("glm-5.2")[1], Formats())
    forecaster = Forecaster(shape, Speeds(8, 1e11, 1e9))
    for ram in (24 << 30, 48 << 30, 120 << 30):
        size = advised(ram, shape.resident, shape.token_bytes)
        demand = forecaster.demand(size, ram)
        assert demand.dense + demand.sessions + RESERVE <= ram
        larger = forecaster.demand(size * 5 // 4, ram)
        assert larger.dense + larger.sessions + RESERVE > ram
