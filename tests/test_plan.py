"""The division of a memory budget."""

from dataclasses import replace

import pytest

from colibri.errors import UsageError
from colibri.plan import Demand, make_plan

MB, GB = 1 << 20, 1 << 30
DEMAND = Demand(
    dense=500 * MB, caches=100 * MB, scratch=0, container=9 * GB, experts=128, layers=21,
    slot=4 * MB, mtp_slot=8 * MB, experts_per_token=8,
)  # fmt: skip


def test_slots_fill_what_is_left():
    """A budget below the container becomes direct slots, as many as fit, shared by all layers."""
    plan = make_plan(replace(DEMAND, process=100 * MB), 2 * GB)
    assert plan.io == "direct"
    assert plan.footprint <= 2 * GB < plan.footprint + DEMAND.slot
    whole, rest = divmod(2 * GB - 700 * MB, 92 * MB)
    assert plan.slots_per_layer == whole + rest // (4 * MB) / 21
    most = make_plan(DEMAND, 600 * MB + 5 * 92 * MB - 1)
    assert most.slots_per_layer == 4 + 20 / 21  # a fifth would need one of the MTP layer's, too
    assert plan.notes == ()


def test_everything_fits():
    """With room for all experts every expert has a slot, and twice the room allows page cache."""
    once = make_plan(DEMAND, 13 * GB)
    twice = make_plan(DEMAND, 64 * GB)
    assert (once.io, once.slots_per_layer) == ("direct", 128)
    assert (twice.io, twice.slots_per_layer) == ("buffered", 128)


def test_the_pilots_slots_are_within_the_budget():
    """Spare slots are paid for before slots a layer are, and not at all when all experts fit."""
    piloted = replace(DEMAND, spares=4)
    plan = make_plan(replace(piloted, process=100 * MB), 2 * GB)
    assert plan.pilot and plan.footprint <= 2 * GB
    main = round(plan.slots_per_layer * DEMAND.layers) + 4
    drafts = int(plan.slots_per_layer)
    assert plan.footprint == 700 * MB + main * DEMAND.slot + drafts * DEMAND.mtp_slot
    whole = make_plan(piloted, 13 * GB)
    assert not whole.pilot and whole.footprint == make_plan(DEMAND, 13 * GB).footprint
    few = make_plan(piloted, 600 * MB + DEMAND.layer_slots_bytes)
    assert not few.pilot and few.slots_per_layer == 1
    assert not make_plan(DEMAND, 2 * GB).pilot


def test_what_the_disk_does_best_is_asked_only_to_stream():
    """The measured way is taken when experts must be streamed; otherwise nobody measures."""
    assert make_plan(DEMAND, 2 * GB, streamed=lambda: "buffered").io == "buffered"
    assert make_plan(DEMAND, 2 * GB, streamed=lambda: "mmap").io == "mmap-tight"
    assert make_plan(DEMAND, 2 * GB, io="direct", streamed=lambda: pytest.fail()).io == "direct"
    assert make_plan(DEMAND, 13 * GB, streamed=lambda: pytest.fail()).io == "direct"


def test_small_containers_are_mapped():
    """A container that starts in a blink is left to the page cache."""
    small = Demand(8 * MB, 4 * MB, 4 * MB, 10 * MB, 32, 5, 49152)
    assert make_plan(small, GB).io == "mmap"


def test_less_than_a_token_is_said():
    """Fewer slots than one token needs is a note with the memory that would change it."""
    plan = make_plan(DEMAND, 700 * MB + 3 * DEMAND.layer_slots_bytes)
    assert 3 < plan.slots_per_layer < 5
    assert "736 MiB for experts alone hold them all" in plan.notes[0]


def test_dense_part_must_fit():
    """Too little for the dense part is refused with both numbers and the flags."""
    with pytest.raises(UsageError, match=r"500 MiB.*100 MiB.*512 MiB; give more memory with --ram"):
        make_plan(DEMAND, 512 * MB)


def test_no_slot_is_refused():
    """A forced slot mode without room for one slot a layer names the bytes it needs."""
    with pytest.raises(UsageError, match=r"needs 92 MiB; give more memory with --ram"):
        make_plan(DEMAND, 640 * MB, io="direct")


@pytest.mark.parametrize(("io", "beside"), [("auto", 500 * MB), ("direct", 592 * MB)])
def test_fewer_conversations_are_suggested(io, beside):
    """When conversations are too many, the number that fits is told, and it does fit."""
    many = replace(DEMAND, caches=64 * 100 * MB, conversations=64)
    with pytest.raises(UsageError, match=r", or --conversations 3 at most$"):
        make_plan(many, beside + 399 * MB, io=io)
    make_plan(replace(many, caches=300 * MB, conversations=3), beside + 399 * MB, io=io)
    for demand in (DEMAND, many):
        with pytest.raises(UsageError) as caught:
            make_plan(demand, beside + 99 * MB, io=io)
        assert "--conversations" not in str(caught.value)


def test_mapped_is_tight_below_the_container():
    """Mapping asks for pages at every use exactly when they cannot all stay."""
    assert make_plan(DEMAND, 2 * GB, io="mmap").io == "mmap-tight"
    assert make_plan(DEMAND, 24 * GB, io="mmap").io == "mmap"
