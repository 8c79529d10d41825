"""Amounts as people read them: the unit says whether memory or data is meant; nouns agree."""

from __future__ import annotations

import pytest

from colibri.amounts import duration, file_size, memory_size, plural

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0 B", 0),
        ("64 KiB", 64 << 10),
        ("1.5 MiB", 3 << 19),
        ("512 MiB", 512 << 20),
        ("1.00 GiB", GIB),
        ("372.50 GiB", 372.5 * GIB),
        ("2.00 TiB", 2048 * GIB),
    ],
)
def test_memory_is_told_in_powers_of_two(text, nbytes):
    """2^30 bytes are a GiB, as --ram takes them, and small amounts get smaller units."""
    assert memory_size(nbytes) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0 B", 0),
        ("999 B", 999),
        ("28.67 kB", 28672),
        ("9.8 MB", 9_800_000),
        ("1.00 GB", 1e9),
        ("1.07 GB", GIB),
        ("1.51 TB", 1.51e12),
    ],
)
def test_data_is_told_in_powers_of_ten(text, nbytes):
    """10^9 bytes are a GB, as disks and files are counted; what is small is never 0.00 GB."""
    assert file_size(nbytes) == text


def test_nouns_agree():
    """One thing has no plural, none has."""
    assert [plural(n, "file") for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    assert [plural(n, "slot") for n in (1.0, 1.25, 6.96)] == ["1 slot", "1.2 slots", "7 slots"]


def test_durations():
    """Times are shown in the units that fit."""
    shown = [duration(s) for s in (0.4, 59, 60, 3599, 3600, 90061)]
    assert shown == ["0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "25 h 01 min"]
