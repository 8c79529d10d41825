"""How a matrix's numbers are stored: kinds, groups, scales, and where a stored matrix lies."""

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from colibri.errors import UsageError


class Kind(IntEnum):
    """Number formats, with the values of csrc/colibri.h."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    INT4 = 4
    INT3 = 5
    INT2 = 6


FLOATS = (Kind.F32, Kind.BF16, Kind.F16)
FLOAT_BYTES = {Kind.F32: 4, Kind.BF16: 2, Kind.F16: 2}
# A group must be a multiple of so many inputs, those that a SIMD lane multiplies under one scale;
# int3: exactly so many. 0: whole rows only.
_GROUP_STEP = {Kind.INT8: 4, Kind.INT4: 8, Kind.INT3: 64, Kind.INT2: 0}
LARGEST_GROUP = 1 << 20


class MatrixRef(NamedTuple):
    """A matrix [rows][cols] in a shard; field for field clb_tensor of csrc/colibri.h.

    `group` inputs share one scale (0: the whole row). Offsets are bytes from the start of the
    shard file. Float formats have no scales: scale_shard and scale_offset are those of the data.
    """

    format: int
    scale_format: int
    rows: int
    cols: int
    group: int
    shard: int
    scale_shard: int
    offset: int
    scale_offset: int


@dataclass(frozen=True)
class Format:
    """One way to store a matrix: number kind, inputs per scale (0: a row), kind of the scales."""

    kind: Kind
    group: int = 0
    scale: Kind = Kind.F32

    def __post_init__(self) -> None:
        if self.kind in FLOATS:
            if self.group or self.scale != Kind.F32:
                raise UsageError(f"{self.kind.name.lower()} has no groups and no scales")
            return
        step = _GROUP_STEP[self.kind]
        fits = self.group == 0 if step == 0 else self.group % step == 0
        if self.kind == Kind.INT3:
            fits = self.group == 64
        if not fits or not 0 <= self.group <= LARGEST_GROUP:
            rule = {Kind.INT3: "64", Kind.INT2: "a row"}.get(self.kind, f"a multiple of {step}")
            raise UsageError(f"{self.kind.name.lower()} groups must be {rule}, not {self.group}")
        if self.scale not in (Kind.F32, Kind.F16):
            raise UsageError(f"scales must be f32 or f16, not {self.scale.name.lower()}")

    @classmethod
    def parse(cls, text: str) -> "Format":
        """`f32 bf16 f16 int8 int8-g128 int4 int4-g64 int3-g64 int2`, then `-f32` or `-f16`
        for the scales (default f16)."""
        found = re.fullmatch(
            r"(f32|bf16|f16)|(int8|int4|int3|int2)(?:-g(\d{1,7}))?(?:-(f16|f32))?", text.lower()
        )
        if not found:
            raise UsageError(
                f"format {text!r} is not known; use f32, bf16, f16, int8, int4-g64, int3-g64 or "
                "int2, optionally with another group (int4-g32) and scale kind (int4-g64-f32)"
            )
        if found[1]:
            return cls(Kind[found[1].upper()])
        return cls(Kind[found[2].upper()], int(found[3] or 0), Kind[(found[4] or "f16").upper()])

    def __str__(self) -> str:
        name = self.kind.name.lower()
        if self.kind in FLOATS:
            return name
        group = f"-g{self.group}" if self.group else ""
        return f"{name}{group}-{self.scale.name.lower()}"

    def row_bytes(self, cols: int) -> int:
        """Payload bytes of one row of `cols` inputs."""
        if self.kind in FLOATS:
            return cols * FLOAT_BYTES[self.kind]
        if self.kind == Kind.INT3:
            return -(-cols // 64) * 24
        per_byte = {Kind.INT8: 1, Kind.INT4: 2, Kind.INT2: 4}[self.kind]
        return -(-cols // per_byte)

    def row_scales(self, cols: int) -> int:
        """Scales of one row: 0 for floats, 1 for row formats, else one per group."""
        if self.kind in FLOATS:
            return 0
        return -(-cols // self.group) if self.group else 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale."""
        return FLOAT_BYTES[self.scale]

    def nbytes(self, rows: int, cols: int) -> int:
        """Payload and scale bytes of a whole matrix."""
        return rows * (self.row_bytes(cols) + self.row_scales(cols) * self.scale_bytes)
