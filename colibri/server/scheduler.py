"""Turns that share one engine: a bounded fair queue before one thread that steps them together."""

from __future__ import annotations

import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from colibri.answer import Prompt
from colibri.engine import Engine, Slot
from colibri.errors import ColibriError
from colibri.sampling import SamplingParams
from colibri.server.conversations import Conversations
from colibri.server.refusal import Refusal
from colibri.server.reply import Delta, Reply
from colibri.session import TOGETHER, step_together
from colibri.stats import INTERRUPTED, Receipt
from colibri.turn import Step, Turn


@dataclass(frozen=True)
class Outcome:
    """How a job ended: OpenAI's finish reason and the turn's receipt, or an error."""

    delta: Delta
    finish_reason: str = ""
    receipt: Receipt | None = None
    error: BaseException | None = None
    gone: bool = False  # cancelled: nobody waits for it


@dataclass(eq=False)
class Job:
    """One request on its way.

    Callbacks come from the engine's thread, but `done` of a job that never ran from whoever cancels
    or closes.
    """

    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None
    reply: Reply
    client: str
    deliver: Callable[[Delta], None]
    done: Callable[[Outcome], None]
    asked_at: float = field(default_factory=perf_counter)
    turn: Turn | None = None
    slot: Slot | None = None
    steps: Generator[Step, None, None] | None = None
    cancelled: bool = False


class Watcher(Protocol):
    """Whoever looks on; called on the engine's thread, `ended` also by who cancels or closes."""

    def due(self) -> bool:
        """Whether `look` is wanted now, even if nothing runs."""

    def look(self, active: list[Job]) -> None:
        """Called between rounds."""

    def stepped(self, job: Job) -> None:
        """A job has run one step."""

    def ended(self, job: Job, outcome: Outcome) -> None:
        """A job is over."""


class FairQueue:
    """First come first served for each client, clients in turns."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, job: Job) -> None:
        """At the end of its client's line."""
        self._waiting.setdefault(job.client, deque()).append(job)

    def take(self) -> Job:
        """The next one; its client's next request waits until all others had a turn."""
        client, line = next(iter(self._waiting.items()))
        job = line.popleft()
        del self._waiting[client]
        if line:
            self._waiting[client] = line
        return job

    def remove(self, job: Job) -> bool:
        """Take a job out, wherever it stands; False when it is not there."""
        line = self._waiting.get(job.client)
        if not line or job not in line:
            return False
        line.remove(job)
        if not line:
            del self._waiting[job.client]
        return True


class Scheduler:
    """Owns the engine. Other threads `submit` and `cancel`; all else happens on its own thread.

    Every active turn gets one step a round: a chunk of its prompt, or one step of decoding, whose
    rows share a pass of the model. `ready` is called before turns begin.
    """

    def __init__(
        self,
        engine: Engine,
        queue_limit: int,
        watcher: Watcher,
        ready: Callable[[], None] = lambda: None,
        slots: Sequence[Slot] = (),
    ) -> None:
        self.engine = engine
        self._limit, self._watcher, self._ready = queue_limit, watcher, ready
        self._conversations = Conversations(
            engine.new_slot, engine.conversations, first=slots or [engine.slot]
        )
        self._queue = FairQueue()
        self._active: list[Job] = []
        self._changed = threading.Condition()
        self._closing = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs and takes requests."""
        return self._thread.is_alive() and not self._closing

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def active(self) -> int:
        """Requests being answered."""
        return len(self._active)

    @property
    def kept(self) -> list[int]:
        """Tokens in each kept cache."""
        return self._conversations.kept

    # ---- for other threads ------------------------------------------------------------------

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; Refusal 429 when too many wait, 503 when nothing is answered any more."""
        with self._changed:
            if self._closing or self._stopped:
                raise _shutting_down() if self._closing else _engine_stopped()
            most = self.engine.conversations + self._limit
            if len(self._active) + len(self._queue) >= most:
                raise Refusal(
                    f"{len(self._active)} requests are being answered and {len(self._queue)} wait, "
                    "which is the limit (--queue). Try again later.",
                    status=429,
                    code="queue_full",
                    headers={"Retry-After": "5"},
                )
            self._queue.put(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End a job soon: within a layer at most, if it runs."""
        with self._changed:
            job.cancelled = True
            if self._queue.remove(job):
                self._finish(job, Outcome(Delta(), gone=True))
            elif job in self._active and job.turn:
                job.turn.cancel()

    def nudge(self) -> None:
        """Let the watcher look, even if nothing runs."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Refuse what comes, end what runs or waits; returns at once."""
        with self._changed:
            self._closing = True
            self._drop_waiting(_shutting_down())
            for job in self._active:
                if job.turn:
                    job.turn.cancel()
            self._changed.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread to end; whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # also after a mistake in here: nobody may wait for a thread that is gone
            with self._changed:
                self._stopped = True
                self._drop_waiting(_engine_stopped())
                for job in list(self._active):
                    self._end(job, Outcome(Delta(), error=_engine_stopped()), keep=False)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._active or len(self._queue) or self._watcher.due()):
                    if self._closing:
                        return
                    self._changed.wait()
                if self._closing and not self._active:
                    return
                admitted = self._admit()
            if admitted:
                self._ready()
            for job in admitted:
                self._attend(job, self._begin)
            self._step_together()
            for job in list(self._active):
                self._attend(job, self._advance)
            if self._watcher.due():
                _told(self._watcher.look, self._active)

    def _admit(self) -> list[Job]:
        """As many as there are slots; `_begin` then finds each one's slot."""
        jobs: list[Job] = []
        room = self.engine.conversations - len(self._active)
        while len(self._queue) and len(jobs) < room:
            jobs.append(self._queue.take())
        self._active += jobs
        return jobs

    def _attend(self, job: Job, work: Callable[[Job], None]) -> None:
        """Work for one job; whatever goes wrong ends it and no other, whose clocks stand."""
        begun = perf_counter()
        try:
            work(job)
        except Exception as error:
            self._fail(job, error)
        seconds = perf_counter() - begun
        for other in self._active:
            if other is not job and other.turn:
                other.turn.waited(seconds)

    def _step_together(self) -> None:
        """One pass for the rows that turns have staged, as many as it has room for.

        Where it fails nothing has happened: each turn then runs its own and meets its own error.
        """
        rows = self._staged()
        if len(rows) < 2:
            return
        begun = perf_counter()
        try:
            step_together([turn.session for turn in rows])
        except Exception as error:
            if not isinstance(error, ColibriError):
                traceback.print_exception(error)
        seconds, total = perf_counter() - begun, sum(rows.values())
        for job in self._active:
            if job.turn:
                job.turn.waited(seconds * (1 - rows.get(job.turn, 0) / total))

    def _staged(self) -> dict[Turn, int]:
        """Turns whose rows one pass can run, and how many each has."""
        rows: dict[Turn, int] = {}
        for turn in (job.turn for job in self._active if job.turn and job.turn.session.staged):
            count = len(turn.session.staged)
            if len(rows) < TOGETHER and sum(rows.values()) + count <= turn.session.max_rows:
                rows[turn] = count
        return rows

    def _begin(self, job: Job) -> None:
        job.slot = self._conversations.take(job.prompt.ids)
        turn = self.engine.answer(
            job.prompt, job.slot, job.sampling, job.max_tokens, others=self._conversations.sessions
        )
        with self._changed:
            job.turn, job.steps = turn, turn.steps(pause=True)
            if job.cancelled or self._closing:
                turn.cancel()

    def _advance(self, job: Job) -> None:
        """One step of one turn, up to the rows that it wants to run next."""
        while job.turn and job.steps:
            step = next(job.steps, None)
            if step is None:
                self._end(job, self._outcome(job))
            elif not job.turn.session.staged:
                self._deliver(job, step)
                if step.tokens:
                    continue
            return

    def _deliver(self, job: Job, step: Step) -> None:
        delta = job.reply.push(step.tokens, job.turn.session.logits)
        self._watcher.stepped(job)
        if delta:
            job.deliver(delta)
        if job.reply.enough:
            job.steps.close()
            self._end(job, self._outcome(job))

    def _fail(self, job: Job, error: Exception) -> None:
        """After a bug, or without memory, nothing that the slot holds is believed."""
        expected = isinstance(error, ColibriError)
        if not expected:
            traceback.print_exception(error)
        receipt = job.turn.receipt if job.turn else None
        self._end(job, Outcome(Delta(), receipt=receipt, error=error), keep=expected)

    def _outcome(self, job: Job) -> Outcome:
        assert job.turn is not None
        if job.turn.finish_reason == INTERRUPTED:
            closing = None if job.cancelled else _shutting_down()
            return Outcome(Delta(), receipt=job.turn.receipt, error=closing, gone=job.cancelled)
        delta, reason = job.reply.finish(job.turn.finish_reason)
        return Outcome(delta, reason, job.turn.receipt)

    def _end(self, job: Job, outcome: Outcome, keep: bool = True) -> None:
        with self._changed:
            self._active.remove(job)
            if job.slot:
                self._conversations.give_back(job.slot, keep)
            job.steps = None
        self._finish(job, outcome)

    def _drop_waiting(self, error: Refusal) -> None:
        while len(self._queue):
            self._finish(self._queue.take(), Outcome(Delta(), error=error))

    def _finish(self, job: Job, outcome: Outcome) -> None:
        _told(self._watcher.ended, job, outcome)
        _told(job.done, outcome)


def _told(listener: Callable[..., None], *arguments: Any) -> None:
    """Whoever is told must not end the thread that everyone waits for."""
    try:
        listener(*arguments)
    except Exception:
        traceback.print_exc()


def _shutting_down() -> Refusal:
    return Refusal("the server is shutting down.", status=503, code="shutting_down")


def _engine_stopped() -> Refusal:
    text = "the engine has stopped after a mistake; the server's log has the details."
    return Refusal(text, status=503, code="engine_stopped")
