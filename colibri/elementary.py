"""exp and log with the same bits on every machine.

NumPy takes its exp and log from libm or from SIMD code of its own, whose last bits differ between
builds, and one last bit can change a sampled token. These use only additions, multiplications,
divisions and integer steps on float64, each one rounded as IEEE 754 says because each is a NumPy
operation of its own (or a plain Python float); tables and constants come from `decimal`, exact
arithmetic in every Python. Relative errors: exp below 1e-14 on -50..50, log below 1e-13.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_CHUNK = 8192  # floats whose temporaries stay in the cache
_STEPS = 2048  # exp's table holds 2^(j/2048)
_LOG_TERMS = 7


def _constants() -> tuple[Floats, float, float, float]:
    """The table of 2^(j/2048), 2048/ln 2, ln 2/2048 and ln 2, each rounded once."""
    with localcontext() as context:
        context.prec = 40
        ln2 = Decimal(2).ln()
        step = ln2 / _STEPS
        coarse = [(step * 64 * j).exp() for j in range(32)]
        fine = [(step * j).exp() for j in range(64)]
        table = [float(a * b) for a in coarse for b in fine]
        return np.array(table), float(1 / step), float(step), float(ln2)


_TABLE, _PER_STEP, _STEP, _LN2 = _constants()
_LOG_SERIES = [2.0 / (2 * n + 1) for n in range(_LOG_TERMS, 0, -1)]
_SQRT_HALF = 0.7071067811865476
_LOW = np.int64(_STEPS - 1)
_HIGH = ~_LOW


def exp(x: Floats) -> Floats:
    """e^x for an array of float64 in -700..700, element by element."""
    if x.size <= _CHUNK:
        return _exp(x)
    out = np.empty_like(x)
    for at in range(0, x.size, _CHUNK):
        out[at : at + _CHUNK] = _exp(x[at : at + _CHUNK])
    return out


def _exp(x: Floats) -> Floats:
    k = x * _PER_STEP
    np.rint(k, k)
    whole = k.astype(np.int64)
    k *= _STEP
    r = x - k  # |r| <= ln 2/4096, so e^r = 1 + r + r^2/2 + r^3/6 to the last bit
    p = r * (1.0 / 6.0)
    p += 0.5
    p *= r
    p += 1.0
    p *= r
    power = _TABLE.take(whole & _LOW)
    whole &= _HIGH
    whole <<= 41  # 11 table bits below, 52 mantissa bits above: k // 2048 lands in the exponent
    bits = power.view(np.int64)
    bits += whole
    p *= power
    p += power
    return p


def log(x: float) -> float:
    """ln x for one positive float."""
    m, exponent = math.frexp(x)  # exact: x = m * 2^exponent, m from 1/2 to 1
    if m < _SQRT_HALF:
        m, exponent = 2.0 * m, exponent - 1
    s = (m - 1.0) / (m + 1.0)  # ln m = 2 (s + s^3/3 + s^5/5 + ...), |s| < 0.172
    square = s * s
    series = 0.0
    for coefficient in _LOG_SERIES:
        series = (series + coefficient) * square
    return (series + 2.0) * s + exponent * _LN2


def fold_sum(x: Floats) -> float:
    """The sum of a non-empty float64 array in one fixed order: halves added, then left to right."""
    while x.size > 256:
        half = x.size // 2
        folded = x[:half] + x[half : 2 * half]
        if x.size % 2:
            folded[0] += x[-1]
        x = folded
    return float(x.cumsum()[-1])
