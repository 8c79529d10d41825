"""The engine against the NumPy reference in the engine's own arithmetic: equal bits, every format.

No tolerance would do. Activations are rounded to int8: in the few rows where two correct
computations straddle a rounding boundary they differ by ten thousand times more than in the others
(reference.py). Equality has no such excuse, and one wrong order of addition anywhere breaks it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import oracle
import pytest
import tiny
from lanes import Lanes
from reference import Reference, read_config
from stored import getter

import colibri.demo
from colibri.container import Container
from colibri.convert import convert_directory
from colibri.formats import Format
from colibri.layout import Formats
from colibri.model import Model, available_isas
from colibri.quantize import encode
from colibri.session import KV_DTYPES, Session

# Formats of the experts, the dense part, the MTP layer, embedding and head; and of the caches.
MIXES = (
    ("f32", "f32", "f32", "f32", "f32"),
    ("int4-g64", "int8", "int8", "int8", "f16"),
    ("int8-g32-f32", "int4-g8", "bf16", "f16", "f32"),
    ("int3-g64", "f16", "int4-f32", "int4-g64", "f16"),
    ("int2", "int3-g64", "int2", "bf16", "f32"),
)
ROWS = 10  # more than index_topk


def converted(case: str, mix: tuple[str, ...], directory: Path, way: str = "shared") -> Container:
    """A tiny checkpoint written by colibri in some mix of formats."""
    source = oracle.load(case).checkpoint(directory / "source", way)
    convert_directory(source, directory / "out", Formats(*map(Format.parse, mix)), search=False)
    return Container.open(directory / "out")


def public(case: str, experts: str, dense: str, directory: Path) -> Container:
    """A tiny checkpoint as the public engine's converter lays it out: one-dimensional bytes with
    float32 scales beside them, everything that is no large matrix left in float32."""
    source = Container.open(oracle.load(case).checkpoint(directory / "source"))
    forms = {True: Format.parse(experts), False: Format.parse(dense)}
    kept = {entry.name for entry in source.entries if entry.keep}

    def stored() -> Iterator[tuple[str, np.ndarray]]:
        for name in source.tensors:
            weights, form = source.read_array(name), forms[".experts." in name]
            if name in kept:
                yield name, weights
                continue
            encoded = encode(weights, form)
            yield name, encoded.payload.reshape(-1).view(np.uint8)
            yield name + ".qs", encoded.scales.reshape(-1).astype(np.float32)

    (directory / "public").mkdir()
    tiny.write_safetensors(directory / "public" / "out-00000.safetensors", stored())
    shutil.copy(directory / "source" / "config.json", directory / "public")
    return Container.open(directory / "public")


def pair(
    container: Container, isa: str | None = None, kv_dtype: str = "f32"
) -> tuple[Session, Reference]:
    """The engine and the reference on one container."""
    session = Session(Model.open(container, isa=isa), 64, 32, kv_dtype=kv_dtype)
    session.capture(True)
    config = read_config(container.directory)
    return session, Reference(config, getter(container), Lanes(), KV_DTYPES[kv_dtype])


def assert_same(a: np.ndarray, b: np.ndarray, what: str) -> None:
    """Equal bytes; the message counts what differs."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    assert a.shape == b.shape and a.dtype == b.dtype, what
    differ = np.count_nonzero(a.view(np.int32) != b.view(np.int32))
    assert not differ, f"{what}: {differ} of {a.size} differ, by {oracle.worst(a, b):.1e}"


def floats(session: Session, layer: int, kind: str, rows: int) -> np.ndarray:
    """The first rows of a cache, as float32."""
    cache = session.cache(layer, kind)
    assert cache.dtype == KV_DTYPES[session.kv_dtype]
    return cache[:rows].astype(np.float32)


def assert_caches(session: Session, reference: Reference) -> None:
    """Key, value and index caches, and the choices made from them, of every layer."""
    for layer, sets in reference.sets.items():
        length = session.length if layer < reference.config.num_hidden_layers else len(sets)
        kv = floats(session, layer, "kv", len(reference.kv[layer]))
        assert_same(kv, reference.kv[layer], f"layer {layer} kv")
        if layer in reference.keys:
            keys = floats(session, layer, "index", len(reference.keys[layer]))
            assert_same(keys, reference.keys[layer], f"layer {layer} index keys")
        if layer == reference.config.num_hidden_layers:
            continue
        for row, chosen in enumerate(sets):
            found = session.captured(layer, row)
            all_before = list(range(length - len(sets) + row + 1))
            assert (all_before if found is None else found) == chosen.tolist(), (layer, row)
        if layer in reference.experts:
            experts = reference.experts[layer]
            assert np.array_equal(session.experts(layer, len(sets)), experts), layer


def compare(session: Session, reference: Reference, ids: list[int], parts: list[int]) -> None:
    """A prompt in parts, then an absorb of all its rows and two draft steps."""
    hidden = []
    for part in np.split(np.array(ids), np.cumsum(parts)[:-1]):
        assert_same(session.step_all(part.tolist()), reference.step_all(part), "logits")
        assert_same(session.hidden[: len(part)], reference.hidden, "hidden")
        assert_caches(session, reference)
        hidden.append(session.hidden[: len(part)].copy())
    hidden, following = np.concatenate(hidden), [*ids[1:], 3]
    state = np.empty(hidden.shape[1], np.float32)
    logits = session.mtp_absorb(hidden, following, state)
    expected, expected_state = reference.mtp_absorb(hidden, following)
    for step in range(3):
        if step:
            token = int(expected.argmax())
            logits = session.mtp_draft(token, step, state)
            expected, expected_state = reference.mtp_draft(token, step, expected_state)
        assert_same(logits, expected, f"draft step {step} logits")
        assert_same(state, expected_state, f"draft step {step} hidden")
    assert_same(
        floats(session, reference.config.num_hidden_layers, "kv", len(ids)),
        reference.kv[reference.config.num_hidden_layers][: len(ids)],
        "MTP cache",
    )


@pytest.mark.parametrize("mix", MIXES, ids="/".join)
def test_every_format(mix, tmp_path):
    """Widths that fill no block: logits, hiddens, caches, choices and drafts, bit for bit."""
    session, reference = pair(converted("ragged", mix[:4], tmp_path), kv_dtype=mix[4])
    compare(session, reference, oracle.load("ragged").ids[:ROWS].tolist(), [7, 1, 2])


@pytest.mark.parametrize("isa", available_isas())
def test_every_instruction_set(isa, tmp_path):
    """The same bits on whatever this processor runs; here every draft step selects for itself."""
    container = converted("ragged", ("int4-g32", "int8-g64", "int8", "int4-g64"), tmp_path, "own")
    session, reference = pair(container, isa)
    compare(session, reference, oracle.load("ragged").ids[:ROWS].tolist(), [ROWS])


@pytest.mark.parametrize(
    "mix", [("int4-g16", "int8"), ("int4", "int4-g32"), ("int3-g64", "int2")], ids="/".join
)
def test_public_containers(mix, tmp_path):
    """The public engine's layout, whose formats are told from byte counts alone."""
    session, reference = pair(public("ragged", *(f"{text}-f32" for text in mix), tmp_path))
    compare(session, reference, oracle.load("ragged").ids[:ROWS].tolist(), [ROWS])


def test_float64_agrees_where_no_code_flips(tmp_path):
    """Plain float64 arithmetic with rounded activations: within 1e-5 in most rows, and on average
    five times nearer than arithmetic that rounds no activations."""
    container, fixture = converted("ragged", ("int8",) * 4, tmp_path), oracle.load("ragged")
    get, config = getter(container), read_config(container.directory)
    logits = Session(Model.open(container), 64, 64).step_all(fixture.ids.tolist())
    rounded = Reference(config, get).step_all(fixture.ids)
    plain = Reference(config, lambda name: np.asarray(get(name), np.float32)).step_all(fixture.ids)
    near, far = (np.abs(logits - other).max(1) for other in (rounded, plain))
    assert np.median(near) < 1e-5 < 1e-2 < np.median(far)
    assert near.mean() < far.mean() / 5


def test_demo():
    """The demo model: int4-g64 experts, int8 everything else, f16 scales."""
    container = Container.open(Path(colibri.demo.__file__).parent / "model")
    session, reference = pair(container)
    compare(session, reference, [5, 100, 900, 17, 42, 300], [5, 1])
