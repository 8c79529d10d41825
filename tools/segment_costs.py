"""What the segments of a speculative step read and compute, from GLM-5.2's shapes alone.

python tools/segment_costs.py

Prints the table of docs/speculation.md: the same four segments as in the ledger of a run. Experts
are counted as if each row chose uniformly and alone: the most that rows can differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from colibri.amounts import file_size
from colibri.config import ModelConfig
from colibri.forecast import distinct
from colibri.inventory import Entry, dense_entries, has_own_indexer, is_sparse
from colibri.layout import Formats, matrix_shape, record_layout
from colibri.ledger import ABSORB, DRAFT, PLAIN, VERIFY
from colibri.shapes import published


@dataclass(frozen=True)
class SegmentCost:
    """One segment of a mean step. Bytes and experts are sums over its forwards.

    Each forward runs `rows` whole rows; `key_rows` more leave their keys and go no further.
    """

    name: str
    forwards: int
    rows: int
    key_rows: float
    attention_layers: int  # layers whose attention runs, forwards counted
    moe_layers: int
    experts: float  # distinct experts read, expected
    expert_bytes: float
    dense_bytes: int
    head_rows: int
    head_bytes: int
    index_rows: int  # rows that score the whole context, layers counted
    index_scores: int

    @property
    def nbytes(self) -> float:
        """All weights read when no expert is cached."""
        return self.expert_bytes + self.dense_bytes + self.head_bytes


def segment_costs(
    config: ModelConfig,
    depth: int,
    formats: Formats | None = None,
    context: int = 0,
    accepted: float = 0.0,
) -> dict[str, SegmentCost]:
    """draft, verify and absorb of a step with `depth` drafts of which `accepted` stand, and plain.

    `context` tokens are in the cache; up to index_topk of them no index score is needed. Needs a
    model with an MTP layer.
    """
    shapes = _Shapes(config, formats or Formats(), context)
    main = range(config.num_hidden_layers)
    layer = config.num_hidden_layers
    own = 0 if config.index_share_for_mtp_iteration else depth - 1
    return {
        DRAFT: shapes.segment(DRAFT, depth - 1, [layer], 1, heads=1, index_rows=own),
        VERIFY: shapes.segment(VERIFY, 1, main, depth + 1, heads=depth + 1),
        ABSORB: shapes.segment(ABSORB, 1, [layer], 1, heads=1, key_rows=accepted),
        PLAIN: shapes.segment(PLAIN, 1, main, 1, heads=1),
    }


def render(costs: dict[str, SegmentCost]) -> str:
    """A Markdown table of segments."""
    rows = [
        ("forwards", [f"{c.forwards}" for c in costs.values()]),
        ("rows", [f"{c.rows * c.forwards}" for c in costs.values()]),
        ("rows, keys only", [f"{c.key_rows:.2f}" for c in costs.values()]),
        ("attention layers run", [f"{c.attention_layers}" for c in costs.values()]),
        ("MoE layers run", [f"{c.moe_layers}" for c in costs.values()]),
        ("distinct experts", [f"{c.experts:,.0f}" for c in costs.values()]),
        ("expert bytes", [file_size(c.expert_bytes) for c in costs.values()]),
        ("dense bytes", [file_size(c.dense_bytes) for c in costs.values()]),
        ("head rows", [f"{c.head_rows}" for c in costs.values()]),
        ("head bytes", [file_size(c.head_bytes) for c in costs.values()]),
        ("rows scoring the context", [f"{c.index_rows}" for c in costs.values()]),
        ("index scores", [f"{c.index_scores:,}" for c in costs.values()]),
    ]
    lines = [f"| | {' | '.join(costs)} |", "|---|" + "---:|" * len(costs)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows)])


class _Shapes:
    """Bytes of a model's parts in given formats."""

    def __init__(self, config: ModelConfig, formats: Formats, context: int) -> None:
        self.config = config
        self.formats = formats
        self.context = context

    def segment(
        self,
        name: str,
        forwards: int,
        layers: Sequence[int],
        rows: int,
        heads: int,
        key_rows: float = 0.0,
        index_rows: int | None = None,
    ) -> SegmentCost:
        """`forwards` passes of `rows` rows through `layers` and `heads` rows through the head."""
        config = self.config
        sparse = [layer for layer in layers if is_sparse(config, layer)]
        each = distinct(config, rows)
        expert = {layer: self._expert_bytes(layer) for layer in sparse}
        scoring = sum(has_own_indexer(config, layer) for layer in layers) * rows * forwards
        scoring = scoring if index_rows is None else index_rows
        scoring = scoring if self.context > config.index_topk else 0
        dense = sum(self._bytes(dense_entries(config, layer)) for layer in layers)
        return SegmentCost(
            name=name,
            forwards=forwards,
            rows=rows,
            key_rows=key_rows,
            attention_layers=forwards * len(layers),
            moe_layers=forwards * len(sparse),
            experts=forwards * each * len(sparse),
            expert_bytes=forwards * each * sum(expert.values()),
            dense_bytes=forwards * dense,
            head_rows=forwards * heads,
            head_bytes=forwards * self.formats.table.nbytes(config.vocab_size, config.hidden_size),
            index_rows=scoring,
            index_scores=scoring * self.context,
        )

    def _bytes(self, entries: Iterable[Entry]) -> int:
        total = 0
        for entry in entries:
            rows, cols = matrix_shape(entry)
            total += self.formats.of(entry, self.config).nbytes(rows, cols)
        return total

    def _expert_bytes(self, layer: int) -> int:
        return record_layout(self.config, self.formats.of_experts(layer, self.config)).nbytes


def documented() -> str:
    """The table of docs/speculation.md: five drafts, four of them accepted, 131,072 tokens."""
    _, config = published("glm-5.2")
    return render(segment_costs(config, 5, context=131072, accepted=4.0))


if __name__ == "__main__":
    print(documented())
