"""Counters for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from colibri.stats import missed

if TYPE_CHECKING:
    from colibri.server.scheduler import Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_PARTS = ("prompt", "cached", "answer", "drafted", "accepted")


class Metrics:
    """What /metrics tells. Everything is counted when a request ends."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._http = Counter(
            "colibri_http_responses", "Answers by path and status.", ["path", "status"],
            registry=registry,
        )  # fmt: skip
        self._ended = Counter(
            "colibri_requests", "Requests that reached the engine, by how they ended.", ["finish"],
            registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "colibri_tokens", "Tokens by kind: prompt (read or cached), cached, answer, drafted, "
            "accepted.", ["kind"], registry=registry,
        )  # fmt: skip
        self._seconds = Counter(
            "colibri_step_seconds", "Seconds by segment of a step, none of them another "
            "conversation's; prompt: reading it.", ["segment"], registry=registry,
        )  # fmt: skip
        self._experts = Counter(
            "colibri_experts", "Experts computed (used), and those that had to be read (missed).",
            ["kind"], registry=registry,
        )  # fmt: skip
        self._read = Counter(
            "colibri_expert_read_bytes", "Bytes of experts read, ahead or when asked for.",
            registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            "colibri_first_token_seconds", "From a turn's start to its first token.",
            buckets=_FIRST, registry=registry,
        )  # fmt: skip
        self._whole = Histogram(
            "colibri_request_seconds", "From arrival to the last token, waiting included.",
            buckets=_FIRST, registry=registry,
        )  # fmt: skip
        for kind in _PARTS:
            self._tokens.labels(kind)

    def gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        """A figure that is asked for when it is told."""
        Gauge(name, help, registry=self._registry).set_function(value)

    def answered(self, path: str, status: int) -> None:
        """An HTTP answer began."""
        self._http.labels(path, str(status)).inc()

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """A request to the engine ended, however it did."""
        gone = "gone" if outcome.gone else "error" if outcome.error else outcome.finish_reason
        self._ended.labels(gone).inc()
        self._whole.observe(seconds)
        receipt = outcome.receipt
        if receipt is None:
            return
        counts = (receipt.read_tokens, receipt.reused_tokens, receipt.answer_tokens)
        for kind, count in zip(_PARTS, (*counts, *receipt.drafts), strict=True):
            self._tokens.labels(kind).inc(count)
        self._seconds.labels("prompt").inc(receipt.prompt_seconds)
        for segment in receipt.ledger.segments.values():
            self._seconds.labels(segment.name).inc(max(segment.seconds, 0.0))
        for counters in (receipt.prompt_counters, receipt.answer_counters):
            self._experts.labels("used").inc(counters["expert_uses"])
            self._experts.labels("missed").inc(missed(counters))
            self._read.inc(counters["read_bytes"])
        if receipt.first_token_seconds is not None:
            self._first.observe(receipt.first_token_seconds)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
