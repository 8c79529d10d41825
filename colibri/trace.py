"""Which experts every token asked for: recorded from a session, replayed by tools/replay_trace.py.

writer = TraceWriter(session)
session.step_all(ids)
writer.add(len(ids))          # of a verified step: writer.add(rows, kept)
writer.trace().save(path)
"""

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from colibri.errors import UsageError
from colibri.session import Session
from colibri.state import PARTIAL

_FORMAT = "colibri-trace-1"


@dataclass(frozen=True)
class Trace:
    """Routed experts of the main layers, row by row.

    `experts` u16 [rows, layers, k] ascending in k; `step` i64 [rows]: rows of one number ran
    together; `kept` bool [rows]: False for a draft that verification rejected; `layers` i64
    [layers]: their numbers in the model; `count`: experts a layer has.
    """

    experts: np.ndarray
    step: np.ndarray
    kept: np.ndarray
    layers: np.ndarray
    count: int

    def __post_init__(self) -> None:
        if self.experts.ndim != 3 or self.experts.dtype.kind not in "iu":
            raise UsageError("the experts of this trace are no table; record it again")
        rows, layers, _ = self.experts.shape
        if not self.step.shape == self.kept.shape == (rows,) or self.layers.shape != (layers,):
            raise UsageError("the parts of this trace do not belong together; record it again")
        if self.experts.size and not 0 <= self.experts.min() <= self.experts.max() < self.count:
            raise UsageError(f"this trace names an expert beyond {self.count}; record it again")

    def save(self, path: Path) -> None:
        """Write a .npz file under exactly this name; it appears whole or not at all."""
        partial = path.with_name(path.name + PARTIAL)
        try:
            with partial.open("wb") as file:
                np.savez_compressed(
                    file, format=_FORMAT, experts=self.experts, step=self.step, kept=self.kept,
                    layers=self.layers, count=self.count,
                )  # fmt: skip
            partial.replace(path)
        except OSError as why:
            partial.unlink(missing_ok=True)
            raise UsageError(f"{path}: the trace cannot be written: {why.strerror}") from why

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read what `save` wrote; UsageError when it is something else."""
        try:
            with path.open("rb") as raw, np.lib.npyio.NpzFile(raw) as file:
                if str(file["format"]) != _FORMAT:
                    raise KeyError
                parts = [file[name] for name in ("experts", "step", "kept", "layers")]
                return cls(*parts, int(file["count"]))
        except FileNotFoundError:
            raise UsageError(f"{path}: there is no such trace") from None
        except (OSError, EOFError, KeyError, ValueError, TypeError, AttributeError, RuntimeError,
                zipfile.BadZipFile, zlib.error) as why:  # fmt: skip
            raise UsageError(f"{path}: is not a trace that colibri recorded") from why

    def batches(self) -> Iterator[slice]:
        """Rows of each step, in order."""
        edges = np.flatnonzero(np.diff(self.step)) + 1
        bounds = [0, *edges.tolist(), len(self.step)]
        yield from (slice(a, b) for a, b in pairwise(bounds) if a < b)


class TraceWriter:
    """Collects a session's routing; call `add` after each step, before the next one."""

    def __init__(self, session: Session) -> None:
        config = session.model.config
        layers = range(config.num_hidden_layers)
        self._session = session
        self._layers = [n for n in layers if session.experts(n, 1) is not None]
        self._count, self._width = config.n_routed_experts, config.num_experts_per_tok
        self._parts: list[np.ndarray] = []
        self._kept: list[int] = []

    def add(self, rows: int, kept: int | None = None) -> None:
        """The last step's `rows` rows, of which the first `kept` stayed (None: all)."""
        tables = [self._session.experts(layer, rows) for layer in self._layers]
        found = [table.astype(np.uint16) for table in tables if table is not None]
        empty = np.empty((rows, 0, self._width), np.uint16)
        self._parts.append(np.stack(found, axis=1) if found else empty)
        self._kept.append(rows if kept is None else kept)

    def add_apart(self, rows: int) -> None:
        """The last step's `rows` rows, as if each had been a step of its own."""
        self.add(rows)
        self._parts[-1:] = np.split(self._parts[-1], rows)
        self._kept[-1:] = [1] * rows

    def trace(self) -> Trace:
        """Everything so far."""
        sizes = [len(part) for part in self._parts]
        empty = np.empty((0, len(self._layers), self._width), np.uint16)
        flags = [np.arange(n) < k for n, k in zip(sizes, self._kept, strict=True)]
        return Trace(
            np.concatenate([empty, *self._parts]),
            np.repeat(np.arange(len(sizes)), sizes),
            np.concatenate([np.empty(0, bool), *flags]),
            np.array(self._layers, np.int64),
            self._count,
        )
