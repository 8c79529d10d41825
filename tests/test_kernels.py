"""The kernels: scalar bits are the documented ones, and every instruction set gives the same."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lanes
import numpy as np
import pytest
from colibri._core import ffi, lib
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Lanes
from reference import Quantised

from colibri.model import available_isas

ROOT = Path(__file__).resolve().parent.parent
FLOATS = (lib.CLB_F32, lib.CLB_BF16, lib.CLB_F16)
STEPS = {lib.CLB_INT8: 4, lib.CLB_INT4: 8}  # groups are multiples of a lane's inputs
GROUPS = (0, 8, 16, 32, 48, 64, 96, 128, 192, 256, 4, 12, 20, 72, 100, 320)
f32 = np.float32
isas = pytest.mark.parametrize("isa", available_isas())


# --- one linear -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A matrix in memory and the rows that go through it, made from a seed."""

    format: int
    scale_format: int
    group: int
    rows: int
    cols: int
    s: int
    seed: int

    @property
    def row_bytes(self) -> int:
        """Payload bytes of one row."""
        blocks = -(-self.cols // 64)
        return {
            lib.CLB_F32: 4 * self.cols,
            lib.CLB_BF16: 2 * self.cols,
            lib.CLB_F16: 2 * self.cols,
            lib.CLB_INT8: self.cols,
            lib.CLB_INT4: -(-self.cols // 2),
            lib.CLB_INT3: 24 * blocks,
            lib.CLB_INT2: -(-self.cols // 4),
        }[self.format]

    def payload(self) -> np.ndarray:
        """uint8 [rows, row_bytes]: any bytes for integers, ordinary finite numbers for floats."""
        rng = np.random.default_rng(self.seed)
        if self.format not in FLOATS:
            return rng.integers(0, 256, (self.rows, self.row_bytes), np.uint8)
        w = rng.normal(size=(self.rows, self.cols)).astype(f32)
        if self.format == lib.CLB_F16:
            return w.astype(np.float16).view(np.uint8)
        return w.view(np.uint8) if self.format == lib.CLB_F32 else bf16(w).view(np.uint8)

    def scales(self) -> np.ndarray:
        """[rows, groups], some subnormal, some negative."""
        groups = -(-self.cols // self.group) if self.group else 1
        rng = np.random.default_rng(self.seed + 1)
        scales = rng.normal(size=(self.rows, groups)) * 2.0 ** rng.integers(-24, 3, groups)
        return scales.astype(np.float16 if self.scale_format == lib.CLB_F16 else f32)

    def x(self) -> np.ndarray:
        """float32 [s, cols]; each row of another kind: plain, wide range, gaps, tiny, extreme."""
        rng = np.random.default_rng(self.seed + 2)
        x = rng.normal(size=(self.s, self.cols)).astype(f32)
        for row in range(self.s):
            kind = rng.integers(0, 5)
            if kind == 1:
                x[row] *= f32(2.0) ** rng.integers(-40, 40, self.cols).astype(f32)
            elif kind == 2:
                x[row] *= np.arange(self.cols) // 64 % 2
            elif kind == 3:
                x[row] *= f32(2.0**-126)
            elif kind == 4:
                x[row] = rng.choice(np.array([-0.0, 1e-45, 65504, -1e20], f32), self.cols)
        return x

    def run(self, isa: str, x: np.ndarray | None = None) -> np.ndarray:
        """What the table of an instruction set makes of x (default: of its own) [s, rows]."""
        shape = ffi.new(
            "clb_tensor *",
            {
                "format": self.format,
                "scale_format": self.scale_format,
                "group": self.group,
                "rows": self.rows,
                "cols": self.cols,
            },
        )
        x = self.x() if x is None else np.ascontiguousarray(x)
        y = np.full((len(x), self.rows), -7, f32)
        data, scales, error = self.payload(), self.scales(), ffi.new("clb_error *")
        code = lib.clb_linear_test(
            isa.encode(),
            shape,
            ffi.from_buffer("uint8_t[]", data),
            ffi.from_buffer(scales),
            ffi.from_buffer("float[]", x),
            len(x),
            ffi.from_buffer("float[]", y),
            error,
        )
        assert code == lib.CLB_OK, ffi.string(error.text)
        return y

    def codes(self) -> np.ndarray:
        """The integers [rows, cols], decoded one value at a time."""
        p, k = self.payload().astype(np.int32), np.arange(self.cols)
        if self.format == lib.CLB_INT8:
            codes = p[:, k].astype(np.uint8).view(np.int8)
        elif self.format == lib.CLB_INT4:
            codes = (p[:, k // 2] >> 4 * (k % 2) & 15) - 8
        elif self.format == lib.CLB_INT2:
            codes = (p[:, k // 4] >> 2 * (k % 4) & 3) - 2
        else:
            block, i = k // 64 * 24, k % 64
            low = p[:, block + i // 4] >> 2 * (i % 4) & 3
            codes = low + 4 * (p[:, block + 16 + i // 8] >> i % 8 & 1) - 4
        return codes.astype(np.int8)

    def expected(self) -> np.ndarray:
        """The same by docs/arithmetic.md, in NumPy."""
        if self.format in FLOATS:
            kinds = {lib.CLB_F32: f32, lib.CLB_F16: np.float16, lib.CLB_BF16: np.uint16}
            w = self.payload().view(kinds[self.format])
            if self.format == lib.CLB_BF16:
                w = (w.astype(np.uint32) << 16).view(f32)
            return Lanes().linear(self.x(), w.astype(f32))
        group = self.group or self.cols
        matrix = Quantised(self.codes(), self.scales(), group, self.format == lib.CLB_INT4)
        return Lanes().linear(self.x(), matrix)


def bf16(w: np.ndarray) -> np.ndarray:
    """The upper halves of floats, as uint16."""
    return (w.view(np.uint32) >> 16).astype(np.uint16)


@st.composite
def cases(draw, most_cols: int = 700) -> Case:
    """Any format, group, ragged shape and 1 to 9 rows."""
    form = draw(st.sampled_from(range(lib.CLB_FORMATS)))
    groups = [g for g in GROUPS if g % STEPS[form] == 0] if form in STEPS else [0]
    return Case(
        form,
        draw(st.sampled_from([lib.CLB_F32, lib.CLB_F16])),
        64 if form == lib.CLB_INT3 else draw(st.sampled_from(groups)),
        draw(st.integers(1, 11)),
        draw(st.one_of(st.integers(1, most_cols), st.sampled_from([64, 128, 1024, 1088, 2112]))),
        draw(st.integers(1, 9)),
        draw(st.integers(0, 2**32)),
    )


def assert_same(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bits, where NaNs need not have equal payloads."""
    assert a.dtype == b.dtype == f32 and a.shape == b.shape
    differ = (a.view(np.int32) != b.view(np.int32)) & ~(np.isnan(a) & np.isnan(b))
    assert not differ.any(), f"{differ.sum()} of {a.size} differ, first at {np.argwhere(differ)[0]}"


@isas
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_every_instruction_set_gives_the_scalar_bits(isa, case):
    """A table's linear equals the scalar one by bytes: every format, group, ragged shape, rows."""
    assert_same(case.run(isa), case.run("scalar"))


@settings(max_examples=100, deadline=None)
@given(case=cases(most_cols=300))
def test_scalar_bits_are_the_documented_ones(case):
    """The scalar table equals a NumPy program that shares nothing with it but the document."""
    with np.errstate(over="ignore"):
        assert_same(case.run("scalar"), case.expected())


@isas
@settings(max_examples=40, deadline=None)
@given(case=cases(most_cols=300))
def test_rows_do_not_know_of_each_other(isa, case):
    """Each row of a batch has the bits it has alone."""
    together = case.run(isa)
    for row, x in enumerate(case.x()):
        assert_same(case.run(isa, x[None])[0], together[row])


@isas
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("form", range(lib.CLB_FORMATS))
def test_a_poisoned_row_is_nan_and_alone(isa, poison, form):
    """An infinity or NaN among the inputs reaches that row's outputs, never another row's."""
    case = Case(form, lib.CLB_F32, 64 if form == lib.CLB_INT3 else 0, 5, 130, 5, 3)
    x = np.random.default_rng(5).normal(size=(5, 130)).astype(f32)
    clean = case.run(isa, x)
    x[2, 70] = poison
    poisoned = case.run(isa, x)
    assert not np.isfinite(poisoned[2]).any()
    keep = [0, 1, 3, 4]
    assert_same(poisoned[keep], clean[keep])


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": lib.CLB_FORMATS},
        {"format": -1},
        {"rows": 0},
        {"cols": 0},
        {"cols": 2**62},
        {"group": 12},
        {"group": -8},
        {"scale_format": lib.CLB_INT8},
    ],
)
def test_wrong_shapes_are_errors(wrong):
    """A shape that makes no sense is refused before a byte is read."""
    fields = {"format": lib.CLB_INT4, "scale_format": lib.CLB_F16, "group": 64, "rows": 2}
    shape = ffi.new("clb_tensor *", fields | {"cols": 64} | wrong)
    error, x = ffi.new("clb_error *"), ffi.new("float[64]")
    code = lib.clb_linear_test(ffi.NULL, shape, ffi.NULL, ffi.NULL, x, 1, x, error)
    assert code == lib.CLB_INVALID and ffi.string(error.text)


def test_an_unknown_instruction_set_is_an_error():
    """A name that is no table here is refused by name."""
    error, x = ffi.new("clb_error *"), ffi.new("float[64]")
    shape = ffi.new("clb_tensor *", {"rows": 1, "cols": 1})
    code = lib.clb_linear_test(b"mmx", shape, ffi.NULL, ffi.NULL, x, 1, x, error)
    assert code == lib.CLB_INVALID and b"mmx" in ffi.string(error.text)
    assert not lib.clb_isa_available(b"mmx") and lib.clb_isa_available(b"scalar")


# --- numerics ---------------------------------------------------------------------------------


def numerics(isa: str, function: int, a, b=None, c=None) -> np.ndarray:
    """One function of a table on float32 vectors of one length."""
    vectors = [np.ascontiguousarray(a if v is None else v, f32) for v in (a, b, c)]
    out, error = np.zeros(len(a), f32), ffi.new("clb_error *")
    pointers = [ffi.from_buffer("float[]", v) for v in vectors]
    target = ffi.from_buffer("float[]", out)
    code = lib.clb_numerics_test(isa.encode(), function, *pointers, len(a), target, error)
    assert code == lib.CLB_OK, ffi.string(error.text)
    return out


def softmax(a: np.ndarray) -> np.ndarray:
    weight = lanes.exp(a - a.max())
    return weight * (f32(1) / lanes.total(weight))


def rope(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out, n = a.copy(), len(a) // 2 * 2
    pairs = Lanes().rotate(a[0:n:2], a[1:n:2], b[0:n:2], b[1:n:2])
    out[:n] = np.stack(pairs, 1).reshape(-1)
    return out


EXPECTED = {
    lib.CLB_TEST_DOT: lambda a, b, c: np.append(lanes.dot(a, b), a[1:]),
    lib.CLB_TEST_AXPY: lambda a, b, c: lanes.fma(b[0], c, a),
    lib.CLB_TEST_RMSNORM: lambda a, b, c: Lanes().rms_norm(a, b, 1e-5),
    lib.CLB_TEST_LAYERNORM: lambda a, b, c: Lanes().layer_norm(a, b, c),
    lib.CLB_TEST_SOFTMAX: lambda a, b, c: softmax(a),
    lib.CLB_TEST_SIGMOID: lambda a, b, c: Lanes().sigmoid(a),
    lib.CLB_TEST_SWIGLU: lambda a, b, c: a * Lanes().sigmoid(a) * b,
    lib.CLB_TEST_ROPE: lambda a, b, c: rope(a, b),
    lib.CLB_TEST_INDEX_SCORES: lambda a, b, c: Lanes().index_scores(a[:, None], b, c[:, None]),
}


@isas
@pytest.mark.parametrize("function", EXPECTED)
@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 200), seed=st.integers(0, 2**32), wide=st.booleans())
def test_numerics_are_the_documented_ones(isa, function, n, seed, wide):
    """Dot, norms, softmax, sigmoid, SwiGLU, RoPE and index scores: bits of the NumPy program."""
    rng = np.random.default_rng(seed)
    a, b, c = rng.normal(size=(3, n)).astype(f32)
    if wide:
        a *= f32(40)
    found = numerics(isa, function, a, b, c)
    assert_same(found, np.asarray(EXPECTED[function](a, b, c), f32))


def test_the_ends_of_the_exponential():
    """Sigmoid and softmax at the extremes: exact limits, no subnormal, NaN is not hidden."""
    x = np.array([-np.inf, -200, -88.8, 0, 88.8, 200, np.inf, np.nan], f32)
    y = numerics("scalar", lib.CLB_TEST_SIGMOID, x)
    assert y[:4].tolist() == [0, 0, 0, 0.5] and y[4:7].tolist() == [1, 1, 1] and np.isnan(y[7])
    y = numerics("scalar", lib.CLB_TEST_SOFTMAX, np.array([0, -87.4, -87.3, -np.inf], f32))
    assert y[0] == 1 and y[1] == 0 and y[2] >= 2.0**-126 and y[3] == 0
    assert np.isnan(numerics("scalar", lib.CLB_TEST_SOFTMAX, np.array([0, np.nan, 1], f32))).all()


@isas
def test_the_exponential_ends_at_the_same_float(isa):
    """Of the floats around ln 2^-126 and the largest finite e^x, C and NumPy cut off the same."""
    ends = np.array([np.log(2.0**-126), -np.log(2.0**128)], f32)
    near = (ends.view(np.int32)[:, None] + np.arange(-20, 20, dtype=np.int32)).ravel().view(f32)
    a = np.append(f32(0), near)  # the greatest: softmax takes each e^x as it is
    assert_same(numerics(isa, lib.CLB_TEST_SOFTMAX, a), softmax(a))
    with np.errstate(over="ignore"):
        assert_same(numerics(isa, lib.CLB_TEST_SIGMOID, near), Lanes().sigmoid(near))


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 2**20), seed=st.integers(0, 2**32))
def test_rotary_angles(position, seed):
    """cos and sin of float32(position) * frequency, within half a unit of float32 at 1."""
    frequency = np.random.default_rng(seed).uniform(-1, 1, 64).astype(f32) ** 5
    found = numerics("scalar", lib.CLB_TEST_ANGLES, frequency, np.full(64, position, f32))
    angle = (f32(position) * frequency[:32]).astype(np.longdouble)
    exact = np.stack([np.cos(angle), np.sin(angle)], 1).reshape(-1)
    assert np.abs(found - exact).max() <= 2.0**-25 * 1.001


@isas
def test_floats_in_two_bytes(isa):
    """Every float of 16 bits, the middles between two, and their neighbours round as in NumPy."""
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(f32)
    halves[-1] = 65536  # where the next one would be
    middles = (halves[1:] + halves[:-1]) / 2
    near = np.concatenate([halves, middles, *(np.nextafter(middles, f32(to)) for to in (0, 1e9))])
    x = np.concatenate([near, -near, np.array([3e38, np.inf, -np.inf, 1e-45], f32)])
    found = numerics(isa, lib.CLB_TEST_TO_F16, x).view(np.uint16)[: len(x)]
    with np.errstate(over="ignore"):
        assert np.array_equal(found, x.astype(np.float16).view(np.uint16))
    (bits, *_) = numerics(isa, lib.CLB_TEST_TO_F16, np.array([np.nan], f32)).view(np.uint16)
    assert np.isnan(bits.view(np.float16))


# --- the same source elsewhere ------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_kernels_of_other_processors(tmp_path):
    """AVX-512, AVX-VNNI and NEON sources, with what this processor lacks emulated, give the scalar
    bits."""
    emulations = {
        "kernels_avx512": "emulate_avx512.h",
        "kernels_neon": "emulate_neon.h",
        "kernels_neon_dot": "emulate_neon.h",
    }
    avx2 = "avx2" in available_isas()  # only there AVX-VNNI can be made of it
    if avx2:
        emulations["kernels_avx_vnni"] = "emulate_avx_vnni.h"
    sources = list((ROOT / "csrc").glob("kernels*.c"))
    sources += [ROOT / "csrc" / "angles.c", ROOT / "tests" / "c" / "test_kernels.c"]

    def compile_one(source: Path) -> str:
        extra = emulations.get(source.stem)
        include = ["-include", str(ROOT / "tests" / "c" / extra)] if extra else []
        out = str(tmp_path / f"{source.stem}.o")
        flags = ["-std=c11", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
        flags += [
            "-DCLB_INLINE=static __attribute__((unused))"
        ]  # one tile for all shapes: 1 s, not 30
        subprocess.run(
            ["cc", *flags, *include, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", out],
            check=True,
        )
        return out

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = tmp_path / "test_kernels"
    subprocess.run(["cc", *objects, "-o", str(program), "-lm"], check=True)
    result = subprocess.run([str(program), "60"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert "avx512: 60 rounds" in result.stdout
    assert result.stdout.count("neon: 60 rounds") == 2
    assert ("avxvnni: 60 rounds" in result.stdout) == avx2
