"""How the calling thread rounds and what it makes of denormals changes nothing, and stays."""

from __future__ import annotations

import floatmode
import numpy as np
import pytest
import shardkit
from colibri._core import ffi, lib

from colibri.container import Container
from colibri.encoder import Rows, encode_rows
from colibri.formats import Format
from colibri.model import Model, available_isas
from colibri.session import Session

pytestmark = pytest.mark.skipif(not floatmode.SUPPORTED, reason="knows glibc's fenv_t only")
RANDOM = np.random.default_rng(3)


def test_sessions(demo_model):
    """A step, an absorb and a draft give the same bytes."""

    def run() -> list[bytes]:
        session = Session(demo_model, 32, 8)
        state = np.empty(demo_model.config.hidden_size, np.float32)
        seen = [session.step_all([3, 5, 7, 11]).tobytes()]
        seen.append(session.mtp_absorb(session.hidden, [5, 7, 11, 13], state).tobytes())
        return [*seen, session.mtp_draft(17, 1, state).tobytes()]

    expected = run()
    with floatmode.spoiled():
        found = run()
    assert found == expected


def test_threads_of_the_core(demo_container, demo_model):
    """Threads that were started by such a one compute as others do."""
    prompt = [(7 * i + 3) % 251 for i in range(24)]
    expected = Session(demo_model, 32, 24).prefill(prompt).tobytes()
    with floatmode.spoiled():
        model = Model.open(demo_container, threads=3, load=False)
    model.load()
    assert Session(model, 32, 24).prefill(prompt).tobytes() == expected


@pytest.mark.parametrize("isa", available_isas())
def test_loading(tmp_path, isa):
    """Norms of f16 denormals become the floats that they are."""
    arrays = shardkit.weights()
    gain = arrays["model.norm.weight"]
    arrays["model.norm.weight"] = RANDOM.uniform(1e-7, 5e-5, gain.shape).astype(np.float16)
    container = Container.open(shardkit.directory(tmp_path, {"model.safetensors": arrays}))
    models = [Model.open(container, isa=isa, load=False) for _ in range(2)]
    models[0].load()
    with floatmode.spoiled():
        models[1].load()
    first, second = (Session(model, 16, 4).prefill([5, 6, 7]).tobytes() for model in models)
    assert first == second


@pytest.mark.parametrize("isa", ["scalar", None])
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("text", ["int8", "int4-g32", "int3-g64-f32", "f16", "f32"])
def test_encoding(text, search, isa):
    """Weights of every size become the same codes and scales."""
    form = Format.parse(text)
    weights = RANDOM.standard_t(3, (6, 256)) * 2.0 ** RANDOM.integers(-24, 2, (6, 1))
    weights = weights.astype(np.float16)
    weights[0] = RANDOM.uniform(-5e-5, 5e-5, 256)

    def run() -> tuple[bytes, bytes]:
        codes = bytearray(6 * form.row_bytes(256))
        scales = bytearray(6 * form.row_scales(256) * form.scale_bytes)
        encode_rows(Rows("F16", 6, 256, weights), form, search, codes, scales, isa)
        return bytes(codes), bytes(scales)

    expected = run()
    with floatmode.spoiled():
        found = run()
    assert found == expected


def test_confidence():
    """How sure a drafter is, which decides how far it goes on."""
    logits = (RANDOM.standard_normal(300) * 8).astype(np.float32)
    scratch = np.empty(300, np.float32)

    def run() -> list[float]:
        views = ffi.from_buffer("float[]", logits), ffi.from_buffer("float[]", scratch)
        return [lib.clb_confidence(views[0], 300, i, 0.7, views[1]) for i in range(300)]

    expected = run()
    with floatmode.spoiled():
        found = run()
    assert found == expected
