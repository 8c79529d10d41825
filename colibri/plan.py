"""What goes where: how a memory budget is divided between weights, caches and expert slots."""

from dataclasses import dataclass

from colibri.errors import UsageError

IO_MODES = ("auto", "mmap", "buffered", "direct")
_GIB = 1 << 30


@dataclass(frozen=True)
class Demand:
    """What a model and a session ask for, in bytes; `layers` counts the sparse main layers."""

    dense: int
    session: int
    container: int  # all shards
    experts: int  # routed experts a layer
    layers: int
    slot: int  # one expert slot of a main layer
    mtp_slot: int = 0  # one of the MTP layer's; 0 when it is not loaded
    experts_per_token: int = 1

    @property
    def slot_round(self) -> int:
        """Bytes of one more slot in every layer."""
        return self.layers * self.slot + self.mtp_slot


@dataclass(frozen=True)
class Plan:
    """The division. `footprint` is what the process will hold when every slot is full."""

    io: str  # mmap | mmap-tight | buffered | direct
    slots_per_layer: int  # 0 when mapped: the page cache holds the experts
    footprint: int
    budget: int
    notes: tuple[str, ...] = ()


def make_plan(demand: Demand, budget: int, io: str = "auto", reserve: int = 0) -> Plan:
    """Divide `budget` bytes; `reserve` of them stay with Python and the tokenizer.

    UsageError when the dense part and the session do not fit, or not one slot a layer remains.
    """
    fixed = demand.dense + demand.session + reserve
    left = budget - fixed
    if left < 0:
        raise UsageError(
            f"the dense weights ({_size(demand.dense)}), the caches ({_size(demand.session)}) and "
            f"{_size(reserve)} for the process do not fit {_size(budget)}; "
            "give more memory with --ram or a smaller --ctx"
        )
    fits = min(left // demand.slot_round, demand.experts) if demand.slot_round else 0
    mode = _choose(demand, left, fits) if io == "auto" else io
    if mode == "mmap":
        tight = left < demand.container - demand.dense
        return Plan("mmap-tight" if tight else "mmap", 0, fixed, budget, ())
    if fits < 1:
        raise UsageError(
            f"{_size(left)} are left for experts and one slot in each of {demand.layers} layers "
            f"needs {_size(demand.slot_round)}; give more memory with --ram or use --io mmap"
        )
    return Plan(mode, fits, fixed + fits * demand.slot_round, budget, _notes(demand, fits))


def _choose(demand: Demand, left: int, fits: int) -> str:
    """Mapped when everything fits twice or there is nothing to stream; else slots of our own."""
    if not demand.slot_round or demand.container < _GIB // 4:
        return "mmap"
    if fits < 1:
        return "mmap"
    whole = demand.experts * demand.slot_round
    # A second copy in the page cache makes the next start warm; without room for it, go past it.
    return "buffered" if fits == demand.experts and left > 2 * whole else "direct"


def _notes(demand: Demand, slots: int) -> tuple[str, ...]:
    if slots >= demand.experts_per_token:
        return ()
    need = demand.experts_per_token * demand.slot_round
    return (
        f"{slots} expert slots a layer hold less than one token's {demand.experts_per_token}: "
        f"every token reads all its experts; {_size(need)} for experts would change that",
    )


def _size(size: int) -> str:
    return f"{size / _GIB:.2f} GB" if size >= _GIB else f"{size / (1 << 20):.0f} MB"
