"""What speed to expect: a model's sizes and a machine's figures, put together.

A token takes as long as its parts. The dense part of each layer, attention and the head are bound
by memory or by products, whichever is slower. A layer's experts are read while those in memory are
computed; the last that arrives is computed after it. Nothing is fitted to this engine's results but
`Speeds.layer_seconds`, which the demo model measures.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from colibri import demo, probe
from colibri.amounts import memory_size
from colibri.config import ModelConfig
from colibri.container import Container
from colibri.context import MOST, default
from colibri.errors import UsageError
from colibri.locality import TEXT, Locality
from colibri.memory import RESERVE
from colibri.model import KEY_TILE, PAIR_BLOCK, PILOT_SLOTS, ROW_BLOCK, WAITING
from colibri.plan import Demand, Plan, fitting_context, make_plan
from colibri.probe import ABSORBED, STEP_AT, DiskSpeed, Speeds
from colibri.session import more_rows, rows_of
from colibri.shapes import Shape, Work, of_container

ACCEPTED = 0.85  # of first drafts, as published for GLM-5.2 (85 to 88%)
RETAINED = 0.5  # of what fits, where a chunk asks for more: measured, slots for 16% had 9% of it
DISK, MEMORY, PRODUCTS, STEPS = "disk", "memory bandwidth", "arithmetic", "small steps"


@dataclass(frozen=True)
class Parts:
    """Seconds of one step: `experts` computing them, `read` waiting for them beyond that."""

    dense: float
    attention: float
    head: float
    experts: float
    read: float
    other: float
    limit: str

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.dense + self.attention + self.head + self.experts + self.read + self.other


@dataclass(frozen=True)
class Forecast:
    """One memory budget and one length of text.

    Bytes are per token. `first_token` is the seconds of a prompt of `length` tokens and the first
    pick, no expert being in memory; `drafted` tokens a second when every step has one draft and
    ACCEPTED of them stand (None without an MTP layer).
    """

    budget: int
    length: int
    io: str
    slots: float  # experts a layer that stay in memory
    footprint: int
    hits: float
    cold_bytes: float
    warm_bytes: float
    memory_bytes: float
    parts: Parts
    rate: float
    drafted: float | None
    first_token: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Forecaster:
    """Forecasts for one model on one machine, with the router's lookahead as it is by default."""

    def __init__(self, shape: Shape, speeds: Speeds, locality: Locality = TEXT) -> None:
        self.shape, self.speeds, self.locality = shape, speeds, locality

    # ---- where things go --------------------------------------------------------------------

    def context(self, budget: int, asked: int | None = None, io: str = "auto") -> int:
        """The context the engine would choose; UsageError when not even the weights fit."""
        shape = self.shape
        limit = shape.config.max_position_embeddings
        if asked is not None:
            if asked > limit:
                raise UsageError(f"--ctx is {asked}, and this model handles {limit} tokens")
            return asked
        room = budget - shape.resident - RESERVE
        if room < shape.token_bytes:
            raise UsageError(
                f"the dense weights ({memory_size(shape.resident)}) and {memory_size(RESERVE)} for "
                f"the process do not fit {memory_size(budget)}"
            )
        return fitting_context(
            default(limit, room // shape.token_bytes),
            lambda size: self.demand(size, budget),
            budget,
            io,
        )

    def demand(self, context: int, budget: int) -> Demand:
        """What the model and one session of it ask for in so many bytes."""
        shape, rows = self.shape, self.rows(context, budget)
        return Demand.of(
            shape.config,
            dense=shape.resident,
            caches=cache_bytes(shape, context, rows),
            scratch=scratch_bytes(shape, context, self.speeds.threads, rows),
            container=shape.files,
            slot=shape.expert.total,
            mtp_slot=shape.mtp_expert.total if shape.mtp else 0,
            spares=PILOT_SLOTS,
        )

    def rows(self, context: int, budget: int) -> int:
        """Rows of a step, as the engine chooses them."""
        room = budget - self.shape.resident - RESERVE
        least = rows_of(self.shape.files, budget)
        return more_rows(least, room, lambda rows: self._sessions(context, rows))

    def _sessions(self, context: int, rows: int) -> int:
        scratch = scratch_bytes(self.shape, context, self.speeds.threads, rows)
        return cache_bytes(self.shape, context, rows) + scratch

    def whole(self, context: int) -> int:
        """The budget that holds every expert."""
        demand = self.demand(context, self.shape.files)
        experts = demand.experts * demand.layer_slots_bytes
        return demand.fixed + experts

    def slots(self, plan: Plan, demand: Demand) -> float:
        """Experts a layer that stay in memory, in slots or in the page cache."""
        if plan.slots_per_layer:
            return plan.slots_per_layer
        if plan.io == "mmap":
            return float(demand.experts)
        left = plan.budget - demand.fixed
        return min(float(demand.experts), max(0.0, left / demand.layer_slots_bytes))

    # ---- forecasts --------------------------------------------------------------------------

    def forecast(self, budget: int, length: int, context: int, io: str = "auto") -> Forecast:
        """With `budget` bytes and a text of `length` tokens in a context of `context`.

        UsageError when the budget is too small, with both numbers.
        """
        demand = self.demand(context, budget)
        plan = make_plan(demand, budget, io)
        slots = self.slots(plan, demand)
        config = self.shape.config
        used = config.num_experts_per_tok
        hits = self.locality.hits(slots, config.n_routed_experts, used)
        parts = self.step(hits, length)
        cold = self.shape.sparse_layer_count * used * self.shape.expert.total
        return Forecast(
            budget=budget,
            length=length,
            io=plan.io,
            slots=slots,
            footprint=plan.footprint,
            hits=hits,
            cold_bytes=cold,
            warm_bytes=cold * (1 - hits),
            memory_bytes=self.shape.dense.total + self.shape.head.total + cold,
            parts=parts,
            rate=1 / parts.seconds,
            drafted=self._drafted(hits, length, slots),
            first_token=self.prefill(length, slots, self.rows(context, budget)) + parts.head,
        )

    def step(self, hits: float, position: int, rows: int = 1) -> Parts:
        """A step of `rows` rows (which share no expert) at a position."""
        shape, config = self.shape, self.shape.config
        layers, sparse = config.num_hidden_layers, shape.sparse_layer_count
        dense, bound = self._seconds(shape.dense, rows)
        head, _ = self._seconds(shape.head, rows)
        attention = rows * self._attention(position)
        used = rows * config.num_experts_per_tok
        one, expert_bound = self._seconds(shape.expert, 1)
        computing = used * one
        missed = used * (1 - hits)
        some = 1 - hits**used  # of the layers: those that miss any
        reading = self._reading(missed / some, shape.expert) if some else 0.0
        waiting = some * (self._last_behind(reading, one, used) - computing)
        other = rows * layers * self.speeds.layer_seconds  # norms, choices: each row its own
        parts = {DISK: sparse * waiting, MEMORY: 0.0, PRODUCTS: attention, STEPS: other}
        parts[bound] += dense + head
        parts[expert_bound] += sparse * computing
        limit = max(parts, key=parts.__getitem__)
        return Parts(dense, attention, head, sparse * computing, sparse * waiting, other, limit)

    def prefill(self, length: int, slots: float, chunk: int) -> float:
        """Seconds to read a prompt in chunks, no expert being in memory at its beginning."""
        shape, config = self.shape, self.shape.config
        seconds = 0.0
        for start in range(0, length, chunk):
            rows = min(chunk, length - start)
            dense, _ = self._seconds(shape.dense, rows)
            union = distinct(config, rows)
            pairs = rows * config.num_experts_per_tok
            computing, _ = self._seconds(shape.expert, pairs / union, union)
            missing = union - (self._kept(slots, union) if start else 0.0)
            reading = self._reading(missing, shape.expert)
            attention = rows * self._attention(start + rows // 2)
            both = self.speeds.beside.both(reading, computing)
            seconds += dense + attention + shape.sparse_layer_count * both
            seconds += config.num_hidden_layers * self.speeds.layer_seconds
        return seconds

    def _kept(self, slots: float, union: float) -> float:
        """Of a chunk's experts, those still there from the chunk before."""
        share = min(1.0, slots / self.shape.config.n_routed_experts)
        return union * share * (1.0 if slots >= union else RETAINED)

    def _drafted(self, hits: float, length: int, slots: float) -> float | None:
        """Tokens a second with one draft a step."""
        shape, config = self.shape, self.shape.config
        if not shape.mtp:
            return None
        verify = self.step(hits, length, 2).seconds
        dense, _ = self._seconds(shape.mtp_dense, 1)
        head, _ = self._seconds(shape.head, 1)
        used = config.num_experts_per_tok
        one, _ = self._seconds(shape.mtp_expert, 1)
        mtp_hits = self.locality.hits(slots, config.n_routed_experts, used)
        reading = self._reading(used * (1 - mtp_hits), shape.mtp_expert)
        draft = dense + head + self._last_behind(reading, one, used) + self.speeds.layer_seconds
        return (1 + ACCEPTED) / (verify + draft)

    # ---- seconds ----------------------------------------------------------------------------

    def _seconds(self, work: Work, rows: float, times: float = 1.0) -> tuple[float, str]:
        """Seconds of meeting these weights with `rows` rows, `times` over, and what binds them."""
        bound: dict[str, float] = {MEMORY: 0.0, PRODUCTS: 0.0}
        for kind, nbytes in work.nbytes.items():
            reading = nbytes / self.speeds.memory
            rate = self.speeds.multiply(kind, max(1.0, rows))
            computing = work.weights[kind] * rows / rate if rate else 0.0
            bound[PRODUCTS if computing > reading else MEMORY] += max(reading, computing)
        limit = max(bound, key=lambda name: bound[name])
        return times * sum(bound.values()), limit

    def _last_behind(self, reading: float, one: float, used: float) -> float:
        """Seconds of computing `used` experts while some are read, the last one after that."""
        return one + self.speeds.beside.both(reading, (used - 1) * one)

    def _reading(self, experts: float, expert: Work) -> float:
        """Seconds until so many experts of a layer are there."""
        if experts <= 0:
            return 0.0
        waiting = min(1.0, experts) * self.speeds.latency
        return waiting + experts * expert.total / self.speeds.disk

    def _attention(self, position: int) -> float:
        """Seconds of all layers' attention for one row: scores, index scores, values."""
        shape, config = self.shape, self.shape.config
        latent = config.kv_lora_rank
        width = latent + config.qk_rope_head_dim
        keys = min(position, config.index_topk) if shape.selecting else position
        products = config.num_hidden_layers * config.num_attention_heads * keys * (width + latent)
        scored = position if shape.selecting and position > config.index_topk else 0
        index = shape.selecting * scored * config.index_head_dim
        products += index * config.index_n_heads
        nbytes = shape.kv_bytes * (config.num_hidden_layers * keys * width + index)
        rate = self.speeds.multiply(ABSORBED, 1)
        seconds = nbytes / self.speeds.memory
        return max(seconds, products / rate) if rate else seconds


def cache_bytes(shape: Shape, context: int, rows: int) -> int:
    """Bytes of one conversation: its caches, and what it keeps of the last step's rows."""
    config, n = shape.config, min(rows, context)
    kept = (n + WAITING * shape.mtp) * config.hidden_size
    kept += 2 * n * config.num_experts_per_tok * (shape.sparse_layer_count + shape.mtp)
    return context * shape.token_bytes + 4 * (kept + min(config.index_topk, context))


def scratch_bytes(shape: Shape, context: int, threads: int, rows: int) -> int:
    """Bytes of a step's scratch: the larger parts of csrc/scratch.c."""
    config = shape.config
    hidden, heads, n = config.hidden_size, config.num_attention_heads, min(rows, context)
    pairs = max(n, PAIR_BLOCK)
    shared = config.moe_intermediate_size * config.n_shared_experts
    inner = max(config.intermediate_size, shared)
    floats = n * (config.q_lora_rank + heads * (config.qk_head_dim + config.v_head_dim))
    key = config.kv_lora_rank + config.qk_rope_head_dim
    floats += ROW_BLOCK * heads * key
    floats += (n + KEY_TILE * threads) * max(key, config.index_head_dim)
    floats += n * config.index_n_heads * (config.index_head_dim + 1) + ROW_BLOCK * context
    floats += n * min(config.index_topk, context)
    floats += 10 * threads * context  # 8-byte order, scores of 8 heads
    floats += 2 * max(pairs * config.moe_intermediate_size, n * inner)
    floats += n * (config.n_routed_experts + config.qk_rope_head_dim)
    floats += (3 + 2 * shape.mtp + bool(config.n_shared_experts)) * n * hidden + pairs * hidden
    floats += 3 * n * config.num_experts_per_tok
    quantised = 3 * n * hidden + n * (config.q_lora_rank + heads * config.v_head_dim)
    quantised += ROW_BLOCK * heads * config.kv_lora_rank
    quantised += pairs * (hidden + inner) + 2 * shape.mtp * n * hidden
    quantised *= 2  # in two orders; beside 64 inputs two floats
    return 4 * floats + quantised * 9 // 8


def distinct(config: ModelConfig, rows: int) -> float:
    """Experts of a layer that so many rows meet together, when each row chooses alone."""
    experts = config.n_routed_experts
    return experts * (1 - (1 - config.num_experts_per_tok / experts) ** rows)


def calibrated(speeds: Speeds, small: Shape, seconds: float) -> Speeds:
    """With the seconds a layer takes beside its weights, from a small model's step of `seconds`."""
    free = Forecaster(small, replace(speeds, layer_seconds=0.0))
    rest = seconds - free.step(1.0, STEP_AT).seconds
    return replace(speeds, layer_seconds=max(0.0, rest / small.config.num_hidden_layers))


def measure_machine(
    shape: Shape, threads: int, disk: DiskSpeed, source: str, isa: str | None = None
) -> Speeds:
    """Measure this machine for a model; the disk's figures are known already, from `source`."""
    demo_container = Container.open(demo.MODEL)
    small = of_container(demo_container, mtp=False)
    found = probe.measure(threads, kinds_of(shape, small), disk.rate, source, shape.files, isa)
    seconds = probe.step_seconds(demo_container, threads, isa)
    cached = probe.measure(threads, kinds_of(small), disk.rate, source, small.files, isa)
    layer = calibrated(cached, small, seconds).layer_seconds
    return replace(found, layer_seconds=layer, latency=disk.latency, beside=disk.beside)


def kinds_of(*shapes: Shape) -> set[str]:
    """The kinds of numbers these models multiply."""
    works = [w for s in shapes for w in (s.dense, s.head, s.expert, s.mtp_dense, s.mtp_expert)]
    found = {kind for work in works for kind in work.nbytes}
    return (found - {ABSORBED}) | {"f32"}


def lengths(context: int) -> list[int]:
    """A few lengths of text worth telling, up to the context."""
    return [n for n in (512, 4096, MOST) if n < context] + [context]


def budgets(budget: int, whole: int) -> list[int]:
    """A few budgets worth telling, rising: about this one, and what holds everything."""
    sizes = (budget // 2, budget, 2 * budget)
    return sorted({*(size for size in sizes if size < whole), whole})
