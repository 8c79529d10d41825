"""What goes where: how a memory budget is divided between weights, caches and expert slots."""

from collections.abc import Callable
from dataclasses import dataclass

from colibri.amounts import memory_size, number
from colibri.config import ModelConfig
from colibri.errors import UsageError
from colibri.memory import RESERVE

_GIB = 1 << 30


@dataclass(frozen=True)
class Demand:
    """What a model and its sessions ask for, in bytes; `layers` counts the sparse main layers."""

    dense: int
    caches: int  # of all conversations
    scratch: int  # of a step
    container: int  # all shards
    experts: int  # routed experts a layer
    layers: int
    slot: int  # one expert slot of a main layer
    mtp_slot: int = 0  # one of the MTP layer's; 0 when it is not loaded
    experts_per_token: int = 1
    spares: int = 0  # slots that the pilot adds, in all; each of a main layer's size
    conversations: int = 1
    process: int = 0  # Python, the tokenizer and their libraries

    @classmethod
    def of(cls, config: ModelConfig, **others: int) -> "Demand":
        """With what the configuration says, and RESERVE; `others`: all else."""
        return cls(
            experts=config.n_routed_experts,
            layers=config.sparse_layer_count,
            experts_per_token=config.num_experts_per_tok,
            process=RESERVE,
            **others,
        )

    @property
    def sessions(self) -> int:
        """Bytes of all conversations: their caches, and the scratch they share."""
        return self.caches + self.scratch

    @property
    def fixed(self) -> int:
        """Bytes of everything but experts."""
        return self.dense + self.sessions + self.process

    @property
    def layer_slots_bytes(self) -> int:
        """Bytes of one more slot in every layer."""
        return self.layers * self.slot + self.mtp_slot


@dataclass(frozen=True)
class Plan:
    """The division. `footprint` is what the process will hold when every slot is full."""

    io: str  # mmap | mmap-tight | buffered | direct
    slots_per_layer: float  # of main layers, on average; 0 when mapped: the page cache holds them
    footprint: int
    budget: int
    notes: tuple[str, ...] = ()
    pilot: bool = False  # whether there are experts to guess, and spare slots for them


def make_plan(
    demand: Demand,
    budget: int,
    io: str = "auto",
    streamed: Callable[[], str] = lambda: "direct",
) -> Plan:
    """Divide `budget` bytes.

    With io "auto", `streamed` says how experts are best read when not all of them stay in memory.
    UsageError when the dense part and the sessions do not fit, or, with io buffered or direct, not
    one slot a layer remains.
    """
    left = budget - demand.fixed
    least = demand.layer_slots_bytes if io in ("buffered", "direct") else 0
    if left < 0:
        raise UsageError(
            f"the dense weights ({memory_size(demand.dense)}), the caches "
            f"({memory_size(demand.sessions)}) and {memory_size(demand.process)} for the process "
            f"do not fit {memory_size(budget)}; "
            f"give more memory with --ram or a smaller --ctx{_fewer(demand, least - left)}"
        )
    fits, spare = _slots(demand, left)
    mode = _choose(demand, left, fits, streamed) if io == "auto" else io
    if mode == "mmap":
        tight = left < demand.container - demand.dense
        return Plan("mmap-tight" if tight else "mmap", 0, demand.fixed, budget)
    if fits < 1:
        raise UsageError(
            f"{memory_size(left)} are left for experts and one slot in each of {demand.layers} "
            f"layers needs {memory_size(demand.layer_slots_bytes)}; give more memory with --ram "
            f"or use --io mmap{_fewer(demand, least - left)}"
        )
    footprint = demand.fixed + _slots_bytes(demand, fits) + spare
    return Plan(mode, fits, footprint, budget, _notes(demand, fits), pilot=spare > 0)


def fitting_context(size: int, demand: Callable[[int], Demand], budget: int, io: str) -> int:
    """`size` tokens, halved until one conversation fits beside the weights, if any size does."""

    def fits(size: int) -> bool:
        wanted = demand(size)
        left = budget - wanted.fixed
        return left >= 0 and (io not in ("buffered", "direct") or _slots(wanted, left)[0] > 0)

    while size > 1 and not fits(size):
        size //= 2
    return size


def _fewer(demand: Demand, lacking: int) -> str:
    """How many conversations would leave the bytes that are lacking, if any number does."""
    each = max(1, demand.caches // demand.conversations)
    most = (demand.caches - lacking) // each
    return f", or --conversations {most} at most" if most > 0 else ""


def _slots(demand: Demand, left: int) -> tuple[float, int]:
    """Slots a layer, and bytes of spare ones: none where all experts or hardly any have one."""
    if not demand.layer_slots_bytes:
        return 0, 0
    spare = demand.spares * demand.slot
    alone = left // demand.layer_slots_bytes
    if alone >= demand.experts or left - spare < demand.layer_slots_bytes:
        return min(alone, demand.experts), 0
    whole, rest = divmod(left - spare, demand.layer_slots_bytes)
    more = min(rest // demand.slot, demand.layers - 1)  # all main layers share them
    return whole + more / demand.layers, spare


def pools(slots_per_layer: float, layers: int) -> tuple[int, int]:
    """Slots of the `layers` sparse main layers together, and of the MTP layer."""
    return round(slots_per_layer * layers), int(slots_per_layer)


def _slots_bytes(demand: Demand, slots_per_layer: float) -> int:
    slots, mtp_slots = pools(slots_per_layer, demand.layers)
    return slots * demand.slot + mtp_slots * demand.mtp_slot


def _choose(demand: Demand, left: int, fits: float, streamed: Callable[[], str]) -> str:
    """Mapped when there is nothing to stream, or no room for slots; else slots of our own."""
    if not demand.layer_slots_bytes or demand.container < _GIB // 4:
        return "mmap"
    if fits < 1:
        return "mmap"
    whole = demand.experts * demand.layer_slots_bytes
    if fits < demand.experts:
        return streamed()
    # A second copy in the page cache makes the next start warm; without room for it, go past it.
    return "buffered" if left > 2 * whole else "direct"


def _notes(demand: Demand, slots: float) -> tuple[str, ...]:
    if slots >= demand.experts_per_token:
        return ()
    need = demand.experts_per_token * demand.layer_slots_bytes
    return (
        f"{number(slots)} expert slots a layer hold less than one token's "
        f"{demand.experts_per_token}, so that most are read for every token; "
        f"{memory_size(need)} for experts alone hold them all",
    )
