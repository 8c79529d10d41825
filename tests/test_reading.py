"""How experts are best read: chosen by rates that are measured once per container and disk."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from colibri import demo, reading
from colibri.container import Container
from colibri.reading import choose, measured, remembered, settled
from colibri.state import State

DISK = {"direct": 2.0e9, "buffered": 0.5e9, "mmap": 0.4e9}


@pytest.fixture
def state(tmp_path) -> State:
    """A state directory."""
    return State(tmp_path / "state", lambda text: pytest.fail(text))


@pytest.fixture(scope="module")
def container() -> Container:
    """The demo."""
    return Container.open(demo.MODEL)


def never(container: Container) -> dict[str, float]:
    """A measurement that must not happen."""
    pytest.fail("measured again")


@pytest.mark.parametrize(
    ("rates", "mode"),
    [
        (DISK, "direct"),
        ({"direct": 1.0e9, "buffered": 1.1e9, "mmap": 0.5e9}, "direct"),
        ({"direct": 1.0e9, "buffered": 1.5e9, "mmap": 0.5e9}, "buffered"),
        ({"buffered": 0.5e9, "mmap": 0.9e9}, "mmap"),
        ({"buffered": 0.5e9}, "buffered"),
        ({}, "direct"),
    ],
)
def test_the_fastest_way_is_chosen_and_direct_when_close(container, state, rates, mode):
    """Direct reads leave memory alone, so another way must be clearly faster."""
    assert choose(container, state, lambda container: rates) == mode


def test_it_is_measured_once(container, state):
    """The second start reads what the first one measured."""
    assert choose(container, state, lambda container: DISK) == "direct"
    assert remembered(container, state) == DISK
    assert choose(container, state, never) == "direct"


def test_another_disk_is_measured_again(container, state, monkeypatch):
    """The same bytes elsewhere may be read at another speed."""
    choose(container, state, lambda container: DISK)
    here = container.shards[-1].path.stat()
    elsewhere = SimpleNamespace(stat=lambda: SimpleNamespace(st_dev=here.st_dev + 1))
    moved = SimpleNamespace(
        fingerprint=container.fingerprint, mirrors=(), shards=[SimpleNamespace(path=elsewhere)]
    )
    assert remembered(moved, state) is None
    assert choose(moved, state, lambda container: {"buffered": 1e9}) == "buffered"
    assert remembered(container, state) == DISK


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format": "colibri-reading-1", "rates": 3}'])
def test_a_damaged_memory_only_costs_a_measurement(container, state, damage):
    """It is measured again and written anew."""
    choose(container, state, lambda container: DISK)
    (path,) = (state.root / "reading").iterdir()
    path.write_bytes(damage)
    assert choose(container, state, lambda container: {"buffered": 1e9}) == "buffered"
    assert remembered(container, state) == {"buffered": 1e9}


def test_without_a_state_directory_nothing_is_kept(container):
    """It is measured every time, and nobody is warned."""
    forgetful = State(None, lambda text: pytest.fail(text))
    assert choose(container, forgetful, lambda container: DISK) == "direct"
    assert remembered(container, forgetful) is None


def test_one_held_up_look_decides_nothing(container, state):
    """Direct reads that were slow once, or another way that was fast once, leave direct chosen."""
    held_up = DISK | {"direct": 0.2e9}
    lucky = DISK | {"mmap": 9e9}
    for looks in ([held_up, DISK], [DISK, held_up], [lucky, DISK], [DISK, lucky]):
        assert settled(looks) == DISK
    assert settled([DISK, {"mmap": 1e9}]) == {"mmap": 0.4e9}
    assert choose(container, state, lambda container: settled([held_up, DISK])) == "direct"


def test_every_way_is_measured(container):
    """Each rate is that of bytes really read; where direct reads are refused there is none."""
    rates = measured(container)
    assert {"buffered", "mmap"} <= set(rates) <= {"buffered", "mmap", "direct"}
    assert all(rate > 0 for rate in rates.values())


def test_mapping_that_fails_is_left_out(container, tmp_path, monkeypatch):
    """A file that cannot be mapped, or a system without the call, has no rate."""
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    assert reading.mapped_rate(empty, [0], 4096) is None
    monkeypatch.setattr(reading, "_POPULATE_READ", 9999)
    assert reading.mapped_rate(container.shards[0].path, [0], 4096) is None
