"""Row independence: no bit depends on how many rows, threads or chunks a computation is cut into.

Everything is compared as bytes: logits, hidden states, key-value and index caches, MTP caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import oracle
import pytest
import shardkit
import tiny

from colibri.container import Container
from colibri.convert import convert_directory
from colibri.formats import Format
from colibri.layout import Formats
from colibri.model import Model
from colibri.sampling import Sampler, SamplingParams
from colibri.session import Session

THREADS = (1, 2, 3)
ROWS = range(1, 10)
BEFORE = 11  # tokens in the cache; more than the tiny models' index_topk
CONTEXT = 64

Models = Callable[[int], Model]  # by number of threads


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind, as bytes."""

    logits: bytes
    hidden: bytes
    caches: tuple[bytes, ...]


def caches(session: Session) -> tuple[bytes, ...]:
    """The filled part of every cache, MTP layer included."""
    main = session.model.config.num_hidden_layers
    found = []
    for layer, kind in product(range(session.model.layers), ("kv", "index")):
        rows = session.cache(layer, kind)
        length = session.length if layer < main else session.mtp_length
        found.append(b"" if rows is None else rows[:length].tobytes())
    return tuple(found)


class Fork:
    """A session that can run the same tokens again and again from the same BEFORE rows."""

    def __init__(self, model: Model, kv_dtype: str = "f32") -> None:
        ids = tokens(model, BEFORE + max(ROWS))
        self.ids = ids[BEFORE:]
        self.session = Session(model, CONTEXT, max(ROWS), kv_dtype=kv_dtype)
        self.session.prefill(ids[:BEFORE])
        self.last = self.session.last_hidden.copy()

    def run(self, parts: tuple[int, ...]) -> Outcome:
        """Run and absorb in steps of these sizes; draft once from the last row."""
        session, at, before = self.session, 0, self.last
        session.rewind(BEFORE)
        session.mtp_rewind(BEFORE - 1)
        logits, hidden = [], []
        state = np.empty(session.model.config.hidden_size, np.float32)
        for part in parts:
            step = self.ids[at : at + part]
            logits.append(session.step_all(step).tobytes())
            rows = session.hidden[:part].copy()
            hidden.append(rows.tobytes())
            draft = session.mtp_absorb(np.vstack([before, rows[:-1]]), step, state)
            at, before = at + part, rows[-1:]
        logits.append(draft.tobytes())
        hidden.append(state.tobytes())
        return Outcome(b"".join(logits), b"".join(hidden), caches(session))


def compositions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as an ordered sum of at most `most` parts."""
    for count in range(most):
        for cuts in combinations(range(1, total), count):
            yield tuple(end - begin for begin, end in pairwise((0, *cuts, total)))


def tokens(model: Model, count: int) -> list[int]:
    """Token ids, the same for everyone."""
    return np.random.default_rng(7).integers(0, model.config.vocab_size, count).tolist()


@pytest.fixture(scope="module", params=["groups-int4", "ragged-int8", "ragged-f32", "demo"])
def models(request, tmp_path_factory, demo_models) -> Models:
    """Models with sparse attention and odd widths, and the demo."""
    if request.param == "demo":
        return demo_models
    case, kind = request.param.split("-")
    directory = tmp_path_factory.mktemp(request.param)
    source = oracle.load(case).checkpoint(directory / "source")
    container = Container.open(quantised(source, directory / "out", kind))
    return cache(lambda threads: Model.open(container, threads=threads))


def quantised(source: Path, out: Path, kind: str) -> Path:
    """The checkpoint itself for f32, else converted with its experts in `kind`."""
    if kind == "f32":
        return source
    expert = Format.parse("int4-g8" if kind == "int4" else kind)
    int8 = Format.parse("int8")
    convert_directory(source, out, Formats(expert, int8, int8, int8), search=False)
    return out


def test_every_chunking(models):
    """Nine tokens in one to four steps, or one by one, leave the same bytes everywhere: so every
    step comes at every place, and behind it every other one."""
    fork = Fork(models(1))
    ways = [*compositions(max(ROWS), 4), (1,) * max(ROWS)]
    assert len(ways) == 94
    expected = fork.run(ways[0])
    for way in ways:
        assert fork.run(way) == expected, way


def test_caches_in_f16(models):
    """They are half as large, give other bits than f32, and the same for any chunks and threads."""
    forks = [Fork(models(threads), "f16") for threads in THREADS]
    outcomes = {fork.run(way) for fork in forks for way in ((9,), (1, 3, 5), (1,) * 9)}
    exact = Fork(models(1)).run((9,))
    assert len(outcomes) == 1 and exact not in outcomes
    (found,) = outcomes
    assert [2 * len(rows) for rows in found.caches] == [len(rows) for rows in exact.caches]


def test_threads(models):
    """1, 2 and 3 threads, for every number of rows in a step, leave the same bytes."""
    forks = [Fork(models(threads)) for threads in THREADS]
    outcomes = {fork.run(parts(rows)) for fork in forks for rows in ROWS}
    assert len(outcomes) == 1


def parts(rows: int) -> tuple[int, ...]:
    """Steps of so many rows, then the rest."""
    whole, rest = divmod(max(ROWS), rows)
    return (*(rows,) * whole, *(rest,) * (rest > 0))


def test_long_prompt(models):
    """A prompt of 200 tokens prefilled in chunks of any size gives the bytes of single rows."""
    model = models(1)
    ids = tokens(model, 200)
    outcomes = set()
    for rows in (1, 3, 8, 64, 200):
        session = Session(model, 256, rows)
        logits = session.prefill(ids)
        outcomes.add(Outcome(logits.tobytes(), session.last_hidden.tobytes(), caches(session)))
    assert len(outcomes) == 1


def test_a_row_of_nans_stays_alone(tmp_path):
    """A token whose embedding is NaN gets NaN logits and real experts; rows before it stay."""
    arrays = shardkit.weights(tiny.GROUPS)  # two of four groups of experts are kept
    arrays["model.embed_tokens.weight"][5] = np.nan
    directory = shardkit.directory(tmp_path, {"model.safetensors": arrays}, tiny.GROUPS)
    session = Session(Model.open(Container.open(directory)), 16, 4)
    alone = session.step_all([7, 8]).copy()
    session.rewind(0)
    logits = session.step_all([7, 8, 5])
    assert logits[:2].tobytes() == alone.tobytes() and np.isnan(logits[2]).all()
    chosen = session.experts(session.model.config.num_hidden_layers - 1, 3)
    assert all(0 <= a < b < 16 for row in chosen.tolist() for a, b in pairwise(row))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_demo_text(demo_models, demo_tokenizer, temperature):
    """200 generated tokens of the demo are the same for any threads and any prefill chunks."""
    prompt = demo_tokenizer.encode_template("[gMASK]<sop><|user|>Tell me a story.<|assistant|>")
    texts = {
        generate(Session(demo_models(threads), 256, rows), prompt, temperature)
        for threads, rows in ((1, 1), (1, 128), (2, 5), (3, 128))
    }
    assert len(texts) == 1
    assert len(texts.pop()) == 200


def generate(session: Session, prompt: list[int], temperature: float) -> tuple[int, ...]:
    """Plain decoding of 200 tokens, stops ignored."""
    sampler = Sampler(SamplingParams(temperature=temperature, seed=5), 2048)
    logits, made = session.prefill(prompt), []
    while len(made) < 200:
        made.append(sampler.pick(logits, session.length))
        logits = session.step_all([made[-1]])[0]
    return tuple(made)
