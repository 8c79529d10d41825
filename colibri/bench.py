"""The engine's speed beside the machine's limits: rounds of short runs, interleaved and repeated.

Every round measures a limit right before the run that is held to it, and visits the runs in turn,
forwards and then backwards, so that a machine that changes its pace disturbs all of them alike.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from colibri import figures, machine
from colibri.amounts import memory_size, plural, rate
from colibri.container import Container
from colibri.context import dense_bytes, token_bytes
from colibri.errors import UsageError
from colibri.figures import Figure, Sample, hash_of, spent
from colibri.limits import Limits
from colibri.machine import Disk, record_bytes
from colibri.memory import budget
from colibri.model import PILOT_SLOTS, Model, available_isas
from colibri.pagecache import evict
from colibri.plan import Demand, Plan, make_plan
from colibri.reading import choose
from colibri.session import STREAMED_ROWS, Session
from colibri.spread import Spread
from colibri.state import State
from colibri.trace import Trace, TraceWriter

_PILOTS = {
    "router": "read ahead by the router", "off": "nothing read ahead",
    "random": "random experts read ahead", "oracle": "the true experts read ahead",
}  # fmt: skip
SECTIONS = ("machine", "decode", "prefill", "rows", "stream")
CACHED = {"decode", "prefill", "rows"}  # these need the whole model in memory
VERSION = 1
ROWS = (1, 2, 4)
_SETTLE = 8  # steps of one token before it is timed: its experts are then in memory

Say = Callable[[str], None]


@dataclass(frozen=True)
class Arm:
    """One way to stream: an io mode, with so many slots a layer or within so many bytes.

    Neither: within what the machine has free, as `colibri run` would. `pilot` reads ahead by the
    next layer's router, not at all, at random, or with foreknowledge.
    """

    io: str
    slots: int | None = None
    ram: int | None = None
    pilot: str = "router"

    def __str__(self) -> str:
        if self.slots is not None and not self.io.startswith("mmap"):
            name = f"{self.io}, {self.slots} slots a layer"
        else:
            name = self.io if self.ram is None else f"{self.io} in {memory_size(self.ram)}"
        return name if self.pilot == "router" else f"{name}, {_PILOTS[self.pilot]}"


@dataclass(frozen=True)
class Request:
    """What to measure.

    `tokens` are decoded and timed after as many that are not; `prompt` is the length of the
    prefill, `chunk` the rows it runs at once (None: all); `arms` are ways to stream; `greedy`
    decodes the model's own picks instead of random ids; `busy` adds a run beside a process that
    spins on one core. Random ids ask for other experts at every token, a greedy text of random
    weights soon goes round in circles: real text lies between. `trace` records which experts the
    first streamed run asks for, which takes time of its own.
    """

    threads: tuple[int, ...] = (1,)
    sections: tuple[str, ...] = SECTIONS
    arms: tuple[Arm, ...] = (Arm("auto"),)
    repeat: int = 5
    tokens: int = 48
    prompt: int = 512
    chunk: int | None = None
    cached_io: str = "mmap"
    isa: str | None = None
    greedy: bool = False
    trace: bool = False
    busy: bool = False
    quick: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        unknown = set(self.sections) - set(SECTIONS)
        if unknown:
            names = ", ".join(SECTIONS)
            raise UsageError(f"there is no section {min(unknown)!r}; sections are {names}")
        if self.repeat < 1 or self.tokens < 2 or self.prompt < 1 or not self.threads:
            raise UsageError("repeat, prompt and threads are at least 1, and tokens at least 2")
        here = available_isas()
        if self.isa not in (None, *here):
            raise UsageError(f"this processor has no {self.isa}; it runs {', '.join(here)}")


class Bench:
    """Measures one container; `run` returns the report, a tree of plain values.

    `trace` is then the routing of the first streamed run, if the request wants one.
    """

    def __init__(self, container: Container, request: Request, say: Say = lambda text: None):
        self.container = container
        self.request = request
        self.trace: Trace | None = None
        self._true: np.ndarray | None = None  # i32 [steps, layers, k]: experts of a `_decode`
        self._say = say
        self._figures: dict[str, Figure] = {}
        self._notes: dict[str, None] = {}
        self._record = record_bytes(container)
        disk = Disk.of_container(container, self._record, request.seed)
        self._limits = Limits(request.isa or available_isas()[-1], disk, request.quick)
        draw = random.Random(request.seed)
        vocab = container.config.vocab_size
        self._ids = [draw.randrange(vocab) for _ in range(max(request.prompt, 2 * request.tokens))]

    def run(self) -> dict[str, Any]:
        """All rounds."""
        request = self.request
        if {"machine", "stream"} & set(request.sections):
            self._say("measuring the disk")
            self._limits.measure_disk(request.repeat)
            for _ in range(request.repeat):
                self._limits.measure_beside(max(request.threads))
        for number in range(request.repeat):
            turn = slice(None, None, -1 if number % 2 else 1)
            self._say(f"round {number + 1} of {request.repeat}")
            for threads in request.threads[turn]:
                self._limits.measure_cores(threads)
                if CACHED & set(request.sections):
                    self._cached_round(threads)
            for arm in request.arms[turn] if "stream" in request.sections else ():
                self._stream_round(arm)
        return self._report()

    def _open(self, threads: int) -> Model:
        gc.collect()  # the model before is gone before this one is read
        return Model.open(self.container, threads=threads, isa=self.request.isa, mtp=False)

    # ---- everything in memory -------------------------------------------------------------------

    def _cached_round(self, threads: int) -> None:
        request = self.request
        if self._everything() > budget(None).bytes:
            self._notes["memory cannot hold the model: cached figures are left out"] = None
            return
        model = self._open(threads)
        slots = 0 if request.cached_io == "mmap" else self.container.config.n_routed_experts
        model.set_residency(request.cached_io, slots)
        context = max(request.prompt, 2 * request.tokens) + 2 * _SETTLE
        session = Session(model, context, request.chunk or request.prompt)
        facts = {"threads": threads, "io": request.cached_io, "slots": slots or None, "rows": 1}
        self._prefill(session)  # once without a clock: now every expert is in memory
        self._decode(session)
        if "prefill" in request.sections:
            name = f"prefill of {request.prompt} tokens"
            self._add("prefill", name, facts, "dot", self._prefill(session))
        if "decode" in request.sections:
            self._add("decode", "decode", facts, "memory", self._bounded(session))
        if "rows" in request.sections:
            self._rows(session, facts)
        if request.busy and threads == max(request.threads):
            self._busy(session, facts)

    def _everything(self) -> int:
        config = self.container.config
        experts = config.sparse_layer_count * config.n_routed_experts * self._record
        return dense_bytes(self.container, False) + experts

    def _prefill(self, session: Session) -> Sample:
        """The first `prompt` ids as a prompt."""
        ids = self._ids[: self.request.prompt]
        session.rewind(0)
        before, begin = session.counters(), time.perf_counter()
        logits = session.prefill(ids, prime=False)
        seconds = time.perf_counter() - begin
        products = figures.products_per_token(self.container)
        limit = figures.dot_limit(products, self._limits.dots(session.model.threads))
        used = spent(before, session.counters())
        return Sample(len(ids), seconds, hash_of([], logits), *used, limit=limit)

    def _bounded(self, session: Session) -> Sample:
        """A decode run and its limit: the weights, and the caches of its mean position, read once
        a token."""
        sample = self._decode(session)
        caches = token_bytes(self.container, False) * 1.5 * self.request.tokens
        touched = sample.weight_bytes / sample.tokens + caches
        bandwidth = self._limits.bandwidth(session.model.threads)
        limit = figures.memory_limit(touched, bandwidth)
        if sample.read_bytes > sample.weight_bytes // 100:
            self._notes["not everything stayed in memory: a cached run read from the disk"] = None
        return replace(sample, limit=limit, details={"cache_bytes_per_token": caches})

    def _decode(
        self,
        session: Session,
        writer: TraceWriter | None = None,
        feed: Iterator[np.ndarray] | None = None,
    ) -> Sample:
        """The ids from the start, one a step: the first half not timed, the second half timed."""
        count = self.request.tokens
        session.rewind(0)
        picks = self._walk(session, self._ids[:count], writer, feed)
        first = picks[-1] if self.request.greedy else self._ids[count]
        before, disk = session.counters(), machine.bytes_from_disk()
        begin = time.perf_counter()
        picks = self._walk(session, [first, *self._ids[count + 1 : 2 * count]], writer, feed)
        seconds = time.perf_counter() - begin
        weights, missed = spent(before, session.counters())
        after = machine.bytes_from_disk()
        if not missed and disk is not None and after is not None:
            missed = after - disk  # mapped: only the system counts
        return Sample(count, seconds, hash_of(picks, session.last_hidden), weights, missed)

    def _walk(
        self,
        session: Session,
        ids: Sequence[int],
        writer: TraceWriter | None = None,
        feed: Iterator[np.ndarray] | None = None,
    ) -> list[int]:
        """One step an id (when greedy: a pick, after the first); returns the likeliest tokens.

        `feed`: guessed experts for each step, as Model.feed_pilot takes them."""
        picks: list[int] = []
        for given in ids:
            if feed is not None:
                session.model.feed_pilot(next(feed))
            token = picks[-1] if self.request.greedy and picks else given
            picks.append(int(session.step_all([token], "last")[0].argmax()))
            if writer:
                writer.add(1)
        return picks

    def _rows(self, session: Session, facts: dict[str, Any]) -> None:
        """Steps of several rows of one repeated token. Their attention averages equal values, so
        that their states, and with them their experts, are the same but for rounding."""
        token = self._ids[0]
        session.rewind(0)
        self._walk(session, [token] * _SETTLE)
        runs: dict[int, list[Sample]] = {rows: [] for rows in ROWS}
        for _ in range(max(4, self.request.tokens // 4)):
            for rows in ROWS:
                session.rewind(_SETTLE)
                before, begin = session.counters(), time.perf_counter()
                logits = session.step_all([token] * rows)
                seconds = time.perf_counter() - begin
                used = spent(before, session.counters())
                runs[rows].append(Sample(rows, seconds, hash_of([], logits[0]), *used))
        single = Spread.of(sample.seconds for sample in runs[1]).median
        for rows in ROWS:
            middle = Spread.of(sample.seconds for sample in runs[rows]).median
            details = {"cost": middle / single}
            sample = replace(runs[rows][-1], seconds=middle, details=details)
            self._add("rows", f"{rows}-row steps", facts | {"rows": rows}, None, sample)

    def _busy(self, session: Session, facts: dict[str, Any]) -> None:
        """Decoding beside a process that spins on one core, held to decoding without."""
        clean = self._decode(session)
        with machine.busy_neighbour():
            disturbed = replace(self._decode(session), limit=clean.rate)
        self._add("busy", "decode, one core busy", facts, "the clean run", disturbed)

    # ---- larger than memory ---------------------------------------------------------------------

    def _stream_round(self, arm: Arm) -> None:
        threads = max(self.request.threads)
        disk = self._limits.disk_rate()
        room = budget(arm.ram).bytes  # before the model takes its part
        model = self._open(threads)
        session = Session(model, 2 * self.request.tokens + 2 * _SETTLE, STREAMED_ROWS)
        plan = self._plan(arm, model, session, room)
        self._notes.update(dict.fromkeys(plan.notes))
        feed = self._guesses(arm, session, plan)
        pilot = "off" if not plan.pilot else "router" if feed is None else "fed"
        model.set_residency(plan.io, plan.slots_per_layer, pilot)
        evict(shard.path for shard in self.container.shards)
        compute = self._same_token_seconds(session)
        writer = TraceWriter(session) if self.request.trace and self.trace is None else None
        before = session.counters()
        sample = self._decode(session, writer, feed)
        self.trace = writer.trace() if writer else self.trace
        again = self._limits.disk_rate()  # one reading may be far off: the better of two
        disk = max(disk, again) if disk and again else disk
        slots = round(plan.slots_per_layer, 2) or None
        facts = {
            "threads": threads, "io": plan.io, "slots": slots, "rows": 1,
            "asked": str(arm), "planned_bytes": plan.footprint or None,
        }  # fmt: skip
        limit = figures.stream_limit(sample.read_bytes / sample.tokens, disk, compute)
        details = {"compute_seconds_per_token": compute, "disk_bytes_per_second": disk or 0.0}
        for name in ("pilot_reads", "pilot_useful"):
            total = session.counters()[name] - before[name]
            details[f"{name}_per_token"] = total / (2 * sample.tokens)
        details["resident_bytes"] = float(machine.resident_bytes() or 0)
        sample = replace(sample, limit=limit, details=details)
        self._add("stream", f"stream {arm}", facts, "disk or compute", sample)

    def _plan(self, arm: Arm, model: Model, session: Session, room: int) -> Plan:
        """Where experts live: in as many slots as were asked for, else as the plan says."""
        config = self.container.config
        if arm.slots is not None and arm.io != "auto":
            mapped = arm.io.startswith("mmap")
            slots = 0 if mapped else min(arm.slots, config.n_routed_experts)
            return Plan(arm.io, slots, 0, room, pilot=slots > 0 and arm.pilot != "off")
        demand = Demand.of(
            config,
            dense=model.dense_bytes,
            caches=session.bytes,
            scratch=session.scratch.bytes,
            container=self.container.bytes,
            slot=model.slot_bytes(),
            spares=0 if arm.pilot == "off" else PILOT_SLOTS,
        )
        forgetful = State(None, self._say)
        return make_plan(demand, room, arm.io, lambda: choose(self.container, forgetful))

    def _guesses(self, arm: Arm, session: Session, plan: Plan) -> Iterator[np.ndarray] | None:
        """What to feed a pilot before each step of `_decode`; None when it guesses itself."""
        if arm.pilot not in ("random", "oracle") or not plan.pilot:
            return None
        config, steps = self.container.config, 2 * self.request.tokens
        shape = (steps, config.num_hidden_layers, config.num_experts_per_tok)
        if arm.pilot == "random":
            draw = np.random.default_rng(self.request.seed)
            return iter(draw.integers(0, config.n_routed_experts, shape, np.int32))
        if self._true is None:
            session.model.set_residency(plan.io, plan.slots_per_layer)
            writer = TraceWriter(session)
            self._decode(session, writer)
            trace = writer.trace()
            self._true = np.full(shape, -1, np.int32)
            self._true[:, trace.layers] = trace.experts
        return iter(self._true)

    def _same_token_seconds(self, session: Session) -> float:
        """Seconds a token when no expert is missing: one token, over and over."""
        session.rewind(0)
        self._walk(session, [self._ids[0]] * _SETTLE)
        count = max(2, self.request.tokens // 2)
        begin = time.perf_counter()
        for _ in range(count):
            session.step_all([self._ids[0]], "last")
        return (time.perf_counter() - begin) / count

    # ---- the report -----------------------------------------------------------------------------

    def _add(
        self, kind: str, what: str, facts: dict[str, Any], limit: str | None, sample: Sample
    ) -> None:
        threads = facts["threads"]
        name = f"{what}, {plural(threads, 'thread')}"
        self._figures.setdefault(name, Figure(name, kind, facts, limit)).samples.append(sample)
        self._say(f"  {name}: {rate(sample.rate)} tok/s")

    def _report(self) -> dict[str, Any]:
        found = [figure.as_dict() for figure in self._figures.values()]
        return {
            "format": "colibri-bench",
            "version": VERSION,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "request": asdict(self.request),
            "machine": machine.describe() | self._limits.as_dict(),
            "model": describe_model(self.container),
            "figures": found,
            "outputs_agree": figures.outputs_agree(found),
            "notes": [*self._limits.notes, *self._notes],
        }


def describe_model(container: Container) -> dict[str, Any]:
    """Which model, and the sizes that its figures depend on."""
    config = container.config
    return {
        "name": container.directory.resolve().name,
        "fingerprint": container.fingerprint,
        "bytes": container.bytes,
        "dense_bytes": dense_bytes(container, False),
        "record_bytes": record_bytes(container),
        "sparse_layers": config.sparse_layer_count,
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "products_per_token": figures.products_per_token(container),
    }
