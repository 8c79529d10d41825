"""What other ways of choosing a victim would have hit: replays recorded traces of routed experts.

python tools/replay_trace.py TRACE... [--slots 8,16,32] [--policies lru,lfu] [--json FILE]

Rates are of (step, layer, expert) look-ups: an expert that several rows of a step share counts
once. Slots are per layer: "own" gives every layer its own, "shared" lets all layers compete for
the same number in total. Belady knows the future: no policy can do better.
"""

import argparse
import heapq
import json
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from colibri import lrfu
from colibri.errors import ColibriError
from colibri.trace import Trace

NEVER = sys.maxsize
SCOPES = ("own", "shared")
PROTECTED = 0.8  # share of the slots that slru keeps for experts that were hit


# ---- policies ---------------------------------------------------------------------------------


class Policy(ABC):
    """Which expert leaves. The driver calls, for each step: `seen` or `admit` (after `evict`, when
    full) per look-up, then for each row that was kept `row` and `used` per expert, in a slot or
    not, and for the others `unused` for what came for them.

    `due` is the time of the next look-up of the expert; only Belady may look at it.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots

    @abstractmethod
    def __contains__(self, key: int) -> bool:
        """Whether the expert has a slot."""

    @abstractmethod
    def __len__(self) -> int:
        """Slots that are taken."""

    @abstractmethod
    def admit(self, key: int, due: int) -> None:
        """The expert takes a slot."""

    def seen(self, key: int, due: int) -> None:  # noqa: B027
        """The expert was found in a slot."""

    def row(self) -> None:  # noqa: B027
        """A row was kept; its uses follow."""

    def used(self, key: int, hit: bool) -> None:  # noqa: B027
        """A row that was kept used it; `hit`: it was there before the step."""

    def unused(self, key: int) -> None:  # noqa: B027
        """It was read in this step for rows that were all rejected."""

    @abstractmethod
    def evict(self, pinned: Collection[int]) -> bool:
        """Free a slot of an expert that is not pinned; False when there is none."""


def _oldest(order: "OrderedDict[int, None]", pinned: Collection[int]) -> int | None:
    return next((key for key in order if key not in pinned), None)


class Lru(Policy):
    """Least recently used."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def admit(self, key: int, due: int) -> None:
        self._order[key] = None

    def used(self, key: int, hit: bool) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def unused(self, key: int) -> None:
        self._order.move_to_end(key, last=False)

    def evict(self, pinned: Collection[int]) -> bool:
        victim = _oldest(self._order, pinned)
        if victim is not None:
            del self._order[victim]
        return victim is not None


class Slru(Policy):
    """Segmented LRU: an expert that was hit moves to a protected part, whose oldest falls back."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._new: OrderedDict[int, None] = OrderedDict()
        self._safe: OrderedDict[int, None] = OrderedDict()
        self._most = int(slots * PROTECTED)

    def __contains__(self, key: int) -> bool:
        return key in self._new or key in self._safe

    def __len__(self) -> int:
        return len(self._new) + len(self._safe)

    def admit(self, key: int, due: int) -> None:
        self._new[key] = None

    def used(self, key: int, hit: bool) -> None:
        if key in self._safe:
            self._safe.move_to_end(key)
        elif key not in self._new:
            return
        elif hit and self._most:
            del self._new[key]
            self._safe[key] = None
            if len(self._safe) > self._most:
                self._new[self._safe.popitem(last=False)[0]] = None
        else:
            self._new.move_to_end(key)

    def unused(self, key: int) -> None:
        self._new.move_to_end(key, last=False)

    def evict(self, pinned: Collection[int]) -> bool:
        for part in (self._new, self._safe):
            victim = _oldest(part, pinned)
            if victim is not None:
                del part[victim]
                return True
        return False


class Ranked(Policy):
    """The resident expert of least rank leaves; ranks only change through `_rank`."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._ranks: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], int]] = []
        self._clock = 0

    def __contains__(self, key: int) -> bool:
        return key in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def _rank(self, key: int, value: float) -> None:
        """Equal values: the one ranked longest ago leaves first."""
        self._clock += 1
        self._ranks[key] = (value, self._clock)
        heapq.heappush(self._heap, (self._ranks[key], key))

    def evict(self, pinned: Collection[int]) -> bool:
        put_back = []
        found = False
        while self._heap and not found:
            rank, key = heapq.heappop(self._heap)
            if self._ranks.get(key) != rank:
                continue
            if key in pinned:
                put_back.append((rank, key))
                continue
            del self._ranks[key]
            found = True
        for entry in put_back:
            heapq.heappush(self._heap, entry)
        return found


class Lfu(Ranked):
    """Least frequently used, counted since the beginning."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._heat: defaultdict[int, float] = defaultdict(float)

    def admit(self, key: int, due: int) -> None:
        self._rank(key, self._heat[key])

    def used(self, key: int, hit: bool) -> None:
        self._heat[key] += 1
        if key in self:
            self._rank(key, self._heat[key])

    def unused(self, key: int) -> None:
        self._rank(key, -1)


class Lrfu(Policy):
    """Uses count half after eight rows: what csrc/experts.c does."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._pool = lrfu.Lrfu()

    def __contains__(self, key: int) -> bool:
        return key in self._pool

    def __len__(self) -> int:
        return len(self._pool)

    def admit(self, key: int, due: int) -> None:
        self._pool.admit(key)

    def row(self) -> None:
        self._pool.row()

    def used(self, key: int, hit: bool) -> None:
        self._pool.used(key)

    def evict(self, pinned: Collection[int]) -> bool:
        return self._pool.evict(pinned)


class Belady(Ranked):
    """The expert whose next use is furthest away."""

    def admit(self, key: int, due: int) -> None:
        self._rank(key, -due)

    def seen(self, key: int, due: int) -> None:
        self._rank(key, -due)


POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": Lru, "lfu": Lfu, "slru": Slru, "lrfu": Lrfu, "belady": Belady,
}  # fmt: skip


# ---- replay -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """Look-ups and hits of one policy over one trace with `slots` a layer."""

    policy: str
    scope: str
    slots: int
    lookups: int
    hits: int

    @property
    def rate(self) -> float:
        """Hits per look-up."""
        return self.hits / self.lookups if self.lookups else 0.0


@dataclass(frozen=True)
class Lookup:
    """One expert of one layer in one step: `due` is when it is looked up next."""

    key: int
    due: int


@dataclass(frozen=True)
class Step:
    """Look-ups by layer, in order; and the rows: kept or not, and their keys."""

    lookups: list[list[Lookup]]
    rows: list[tuple[bool, list[int]]]


def steps_of(trace: Trace) -> list[Step]:
    """A trace as the driver wants it, with the future of every look-up."""
    layers = len(trace.layers)
    keys = trace.experts.astype(np.int64) + np.arange(layers)[:, None] * trace.count
    due: dict[int, int] = {}
    steps: list[Step] = []
    for number, rows in reversed(list(enumerate(trace.batches()))):
        batch = keys[rows]
        lookups: list[list[Lookup]] = []
        for layer in range(layers):
            distinct = np.unique(batch[:, layer]).tolist()
            lookups.append([Lookup(key, due.get(key, NEVER)) for key in distinct])
            due.update((key, number * layers + layer) for key in distinct)
        flat = batch.reshape(len(batch), -1).tolist()
        steps.append(Step(lookups, list(zip(trace.kept[rows].tolist(), flat, strict=True))))
    return steps[::-1]


def replay(
    trace: Trace, policy: str, slots: int, scope: str = "own", steps: list[Step] | None = None
) -> Replay:
    """Run a trace (or what `steps_of` made of it) through `slots` a layer that begin empty."""
    layers = len(trace.layers)
    if scope == "own":
        pools = [POLICIES[policy](slots) for _ in range(layers)]
    else:
        pools = [POLICIES[policy](slots * layers)] * layers
    lookups = hits = 0
    for step in steps or steps_of(trace):
        loaded: set[int] = set()
        for pool, wanted in zip(pools, step.lookups, strict=True):
            lookups += len(wanted)
            hits += len(wanted) - _look_up(pool, wanted, loaded)
        _commit(pools, step, loaded, trace.count)
    return Replay(policy, scope, slots, lookups, hits)


def _look_up(pool: Policy, wanted: list[Lookup], loaded: set[int]) -> int:
    """Find or load a layer's experts; returns how many were loaded. None leaves for another of
    them, unless the slots cannot hold them all at once."""
    pinned = {lookup.key for lookup in wanted}
    missing = [lookup for lookup in wanted if lookup.key not in pool]
    for lookup in wanted:
        if lookup.key in pool:
            pool.seen(lookup.key, lookup.due)
    for lookup in missing:
        if len(pool) >= pool.slots and not pool.evict(pinned):
            pool.evict(())
        pool.admit(lookup.key, lookup.due)
        loaded.add(lookup.key)
    return len(missing)


def _commit(pools: list[Policy], step: Step, loaded: set[int], count: int) -> None:
    """Uses in the order of the rows; what only rejected rows wanted is the first to leave."""
    used: set[int] = set()
    for kept, keys in step.rows:
        for pool in dict.fromkeys(pools) if kept else ():
            pool.row()
        for key in keys:
            pool = pools[key // count]
            if kept:
                pool.used(key, key not in loaded)
                used.add(key)
            elif key in pool and key in loaded and key not in used:
                pool.unused(key)


# ---- what is printed ----------------------------------------------------------------------------


def describe(trace: Trace) -> str:
    """Size of a trace and how predictable it is."""
    rows, layers, k = trace.experts.shape
    distinct = [len(np.unique(trace.experts[:, layer])) for layer in range(layers)]
    again = [
        np.isin(trace.experts[row, layer], trace.experts[row - 1, layer]).mean()
        for row in range(1, rows)
        for layer in range(layers)
    ]
    return (
        f"{rows} rows in {len(list(trace.batches()))} steps, {layers} layers, {k} of "
        f"{trace.count} experts each; distinct experts a layer {np.mean(distinct):.0f}; "
        f"shared with the row before {100 * np.mean(again) if again else 0:.0f}%"
    )


def table(results: list[Replay]) -> Iterator[str]:
    """Hit rates in percent: a line per scope and number of slots, a column per policy."""
    names = list(dict.fromkeys(result.policy for result in results))
    rates = {(r.scope, r.slots, r.policy): 100 * r.rate for r in results}
    yield f"{'slots/layer':>12}" + "".join(f"{name:>9}" for name in names)
    for scope, slots in dict.fromkeys((result.scope, result.slots) for result in results):
        cells = "".join(f"{rates[scope, slots, name]:>8.1f}%" for name in names)
        yield f"{scope:>7} {slots:>4}{cells}"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--slots", default="8,16,19,32,64", help="slots a layer, with commas")
    parser.add_argument("--policies", default=",".join(POLICIES), help="with commas")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    try:
        slots = [int(text) for text in args.slots.split(",")]
        policies = args.policies.split(",")
    except ValueError:
        parser.error(f"--slots is {args.slots!r}; expected whole numbers with commas")
    if min(slots) < 1 or not set(policies) <= set(POLICIES):
        parser.error(f"slots are at least 1, and policies are {', '.join(POLICIES)}")
    report = {}
    for path in args.traces:
        try:
            trace = Trace.load(path)
        except ColibriError as why:
            print(f"replay_trace: error: {why}", file=sys.stderr)
            return 1
        steps = steps_of(trace)
        results = [
            replay(trace, policy, n, scope, steps)
            for scope in SCOPES
            for n in slots
            if n <= trace.count
            for policy in policies
        ]
        print(f"{path}: {describe(trace)}", *table(results), sep="\n")
        report[str(path)] = [asdict(result) | {"rate": result.rate} for result in results]
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
