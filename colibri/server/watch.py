"""What the page draws: the last or running turn's receipt, and where the experts are.

Everything is counted where it happens; here it is only collected, on the engine's thread, a few
times a second and only while somebody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic, perf_counter, strftime
from typing import Any

import numpy as np

from colibri.engine import Engine
from colibri.server.metrics import Metrics
from colibri.server.scheduler import Job, Outcome
from colibri.session import Session
from colibri.stats import line, missed

LOOKED_FOR = 5.0  # seconds a look keeps the collecting alive
EVERY = 0.25  # seconds between two states
RECENT = 12  # ended turns remembered
_FADE = 0.97  # of an expert's heat a step
_DIGITS = "0123456789"
_EXPERTS = (
    "expert_uses", "expert_loads", "pilot_useful", "expert_bytes", "read_bytes", "read_wait_ns",
)  # fmt: skip


class Watch:
    """The scheduler's watcher. `state` asks for a fresh one and returns the latest."""

    def __init__(
        self, engine: Engine, metrics: Metrics, model_id: str, tell: Callable[[str], None]
    ) -> None:
        self.engine, self.metrics, self.model_id, self._tell = engine, metrics, model_id, tell
        config = engine.container.config
        # The MTP layer runs rows of its own, so its use is not counted; its slots are.
        count = engine.model.layers if _has_slots(engine) else config.num_hidden_layers
        self.layers = [i for i, s in enumerate(engine.container.sparse[:count]) if s]
        self._heat = np.zeros((len(self.layers), config.n_routed_experts), np.float32)
        self._wanted = self._taken = 0.0
        self._changed = True
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._latest: dict[str, Any] = {"turns": [], "residency": self._residency()}

    # ---- on the event loop --------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The latest state."""
        self._wanted = monotonic()
        engine = self.engine
        plan = engine.plan
        return {
            "model": {
                "id": self.model_id,
                "isa": engine.model.isa,
                "threads": engine.model.threads,
                "context": engine.context,
                "conversations": engine.conversations,
                "mode": engine.settings.mode,
                "io": plan.io if plan else "mmap",
                "slots_per_layer": round(plan.slots_per_layer, 2) if plan else 0,
                "thinking_switch": engine.template.has_thinking_switch,
            },
            **self._latest,
        }

    # ---- on the engine's thread ---------------------------------------------------------------

    @property
    def watched(self) -> bool:
        """Whether somebody looked lately."""
        return monotonic() - self._wanted < LOOKED_FOR

    def due(self) -> bool:
        """Whether something changed that somebody wants to see now."""
        return self._changed and self.watched and monotonic() - self._taken >= EVERY

    def stepped(self, job: Job) -> None:
        """Count the experts of the step, if somebody looks."""
        self._changed = True
        if self.watched and job.turn:
            self._warm(job.turn.session)

    def look(self, active: list[Job]) -> None:
        """Take the state."""
        self._taken = monotonic()
        self._changed = bool(active)
        running = [_running(job) for job in active if job.turn]
        self._latest = {
            "turns": [*running, *self._recent],
            "residency": self._residency(),
        }

    def ended(self, job: Job, outcome: Outcome) -> None:
        """Remember the receipt, and tell it in a line."""
        self._changed, self._taken = True, 0.0
        self.metrics.ended(outcome, perf_counter() - job.asked_at)
        if outcome.receipt and job.turn:
            self._recent.appendleft(_ended(job, outcome))
            self._tell(f"{strftime('%H:%M:%S')} {line(outcome.receipt)}")

    def _warm(self, session: Session) -> None:
        self._heat *= _FADE
        for row, layer in enumerate(self.layers):
            used = session.experts(layer, session.rows) if session.rows else None
            if used is not None:
                np.add.at(self._heat[row], used.ravel(), 1.0)

    def _residency(self) -> dict[str, Any]:
        """A digit per expert and layer: 9 the last to make room (or most used), 0 not in memory."""
        slots = _has_slots(self.engine)
        heat = self._ranks() if slots else self._heat
        most = float(heat.max()) or 1.0
        levels = np.ceil(9 * np.sqrt(np.minimum(heat / most, 1.0))).astype(int)
        rows = ["".join(_DIGITS[v] for v in row) for row in levels.tolist()]
        return {"kind": "resident" if slots else "use", "layers": self.layers, "rows": rows}

    def _ranks(self) -> np.ndarray:
        heat = np.zeros_like(self._heat)
        row_of = {layer: row for row, layer in enumerate(self.layers)}
        resident = self.engine.model.resident()
        for rank, (layer, expert) in enumerate(resident):
            heat[row_of[layer], expert] = 1.0 - 0.95 * rank / len(resident)
        return heat


def _has_slots(engine: Engine) -> bool:
    return bool(engine.plan and engine.plan.slots_per_layer)


def _running(job: Job) -> dict[str, Any]:
    """A turn that is not over, in the words of a receipt."""
    assert job.turn is not None
    turn, ledger = job.turn, job.turn.ledger
    seconds = ledger.seconds + ledger.others  # as a client sees it
    return {
        "running": True,
        "prompt_tokens": len(turn.prompt.ids),
        "read_tokens": min(turn.session.length, len(turn.prompt.ids)),
        "answer_tokens": len(turn.token_ids),
        "answer_tokens_per_second": len(turn.token_ids) / seconds if seconds else None,
        **_ledger(ledger.as_dict()),
    }


def _ended(job: Job, outcome: Outcome) -> dict[str, Any]:
    """What the page shows of a receipt."""
    receipt = outcome.receipt
    assert receipt is not None
    both = {k: v + receipt.prompt_counters[k] for k, v in receipt.answer_counters.items()}
    return {
        "running": False,
        "prompt_tokens": receipt.prompt_tokens,
        "read_tokens": receipt.read_tokens,
        "cached_tokens": receipt.reused_tokens,
        "prompt_tokens_per_second": receipt.prompt_rate,
        "answer_tokens": receipt.answer_tokens,
        "answer_tokens_per_second": receipt.answer_rate,
        "first_token_seconds": receipt.first_token_seconds,
        "finish_reason": outcome.finish_reason or receipt.finish_reason,
        "seed": None if receipt.sampling.greedy else receipt.seed,
        "drafter": receipt.drafter,
        "experts": _experts(both),
        **_ledger(receipt.ledger.as_dict()),
    }


def _ledger(ledger: dict[str, Any]) -> dict[str, Any]:
    segments = ledger["segments"]
    total: dict[str, int] = {}
    for segment in segments.values():
        for name in _EXPERTS:
            total[name] = total.get(name, 0) + segment.get(name, 0)
    return {
        "proposed": ledger["proposed"],
        "offered_by_position": ledger["offered_by_position"],
        "accepted_by_position": ledger["accepted_by_position"],
        "tokens_per_forward": ledger["tokens_per_forward"],
        "segments": {name: segment["seconds"] for name, segment in segments.items()},
        "answer_experts": _experts(total),
    }


def _experts(counters: dict[str, int]) -> dict[str, float]:
    return {
        "used": counters["expert_uses"],
        "missed": missed(counters),
        "used_bytes": counters["expert_bytes"],
        "read_bytes": counters["read_bytes"],
        "wait_seconds": counters["read_wait_ns"] / 1e9,
    }
