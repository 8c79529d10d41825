"""Amounts as people read them: memory in GiB, files in GB, times, counts with their noun.

Memory is given out in powers of two, as --ram takes it; disks and files are sold and listed in
powers of ten. The unit says which it is.
"""

_BINARY = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_DECIMAL = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def memory_size(nbytes: float) -> str:
    """An amount of memory, in powers of two: "7.81 GiB", "512 MiB"."""
    return _in_units(nbytes, _BINARY)


def file_size(nbytes: float) -> str:
    """The size of files and of what is read from them, in powers of ten: "20.05 MB"."""
    return _in_units(nbytes, _DECIMAL)


def number(value: float) -> str:
    """To one decimal, which is left out where it is 0: "7", "6.9"."""
    return f"{value:.1f}".removesuffix(".0")


def plural(count: float, noun: str) -> str:
    """A count and a regular noun: "1 file", "2 files", "6.9 slots"."""
    return f"{number(count)} {noun}" + ("" if count == 1 else "s")


def duration(seconds: float) -> str:
    """A length of time, to the second below an hour: "5 s", "2 min 07 s", "1 h 05 min"."""
    minutes = int(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {int(seconds) % 60:02} s" if minutes else f"{int(seconds)} s"


def roughly(seconds: float) -> str:
    """An estimated time, as people say it: "40 ms", "90 s", "7 min", "2.5 h"."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def elapsed(seconds: float) -> str:
    """A measured time: "40 ms", "7.1 s"."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def rate(value: float) -> str:
    """A number a second, three digits or all before the point: "9.87", "1,234"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _in_units(nbytes: float, units: tuple[tuple[str, int], ...]) -> str:
    """Two decimals in GiB or GB and above, four significant digits below."""
    for place, (unit, scale) in enumerate(units):
        if nbytes >= scale:
            value = nbytes / scale
            return f"{value:.2f} {unit}" if place < 2 else f"{value:.4g} {unit}"
    return f"{nbytes:.0f} B"
