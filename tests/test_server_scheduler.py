"""The queue and the slots: who is next, who gets which cache, and nobody waits for a prompt."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from serving import LIMIT, STORY, offline, open_engine, wait_for

from colibri import stats, turn
from colibri.errors import CoreError
from colibri.ledger import PLAIN, TEXT, Ledger
from colibri.server import scheduler as schedulers
from colibri.server.conversations import Conversations
from colibri.server.refusal import Refusal
from colibri.server.reply import Delta, Reply, Wish
from colibri.server.scheduler import FairQueue, Job, Outcome, Scheduler
from colibri.server.service import Service
from colibri.session import Session, common_prefix, step_together
from colibri.status import status


class Nobody:
    """A watcher that looks away, or fails when it looks."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def due(self) -> bool:
        return False

    def look(self, active: list[Job]) -> None:
        raise AssertionError("nothing was due")

    def stepped(self, job: Job) -> None:
        return

    def ended(self, job: Job, outcome: Outcome) -> None:
        if self.fails:
            raise ValueError("a watcher's own mistake")


@dataclass
class Diary:
    """What happened, in order."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def job(self, engine: Any, name: str, text: str, tokens: int, client: str = "") -> Job:
        """A greedy request that writes into the diary."""
        prompt = engine.chat([{"role": "user", "content": text}])

        def deliver(delta: Delta) -> None:
            self.lines.append((name, delta.content))

        def done(outcome: Outcome) -> None:
            self.lines.append((name, "end"))
            self.outcomes[name] = outcome

        reply = Reply(engine.tokenizer, prompt, Wish())
        return Job(prompt, engine.sampling, tokens, reply, client or name, deliver, done)


@pytest.fixture(scope="module")
def engine():
    """Room for two conversations, no drafts."""
    return open_engine(conversations="2", temperature="0", draft="0")


def run(engine: Any, jobs: list[Job], fails: bool = False) -> None:
    """All of them, submitted before the engine's thread begins."""
    finish(Scheduler(engine, 8, Nobody(fails)), jobs)


def finish(scheduler: Scheduler, jobs: list[Job]) -> None:
    """The same by a given scheduler."""
    for job in jobs:
        scheduler.submit(job)
    scheduler.start()
    wait_for(lambda: not (scheduler.active or scheduler.waiting))
    scheduler.close()
    assert scheduler.join(LIMIT)


def test_steps_in_turns(engine):
    """Two answers grow together, a step each; a short one does not wait for a long prompt."""
    diary = Diary()
    story = STORY[0]["content"]
    run(engine, [diary.job(engine, "a", story, 12), diary.job(engine, "b", story, 12)])
    assert [name for name, _ in diary.lines[:20]] == ["a", "b"] * 10
    diary = Diary()
    long, short = "Tell me a story. " * 120, "Hello"
    run(engine, [diary.job(engine, "long", long, 3), diary.job(engine, "short", short, 3)])
    ends = [name for name, what in diary.lines if what == "end"]
    assert ends == ["short", "long"] and diary.lines[0][0] == "short"


def test_rows_of_all_answers_share_a_pass(engine, monkeypatch, capsys):
    """While two answers grow each pass has a row of both; the texts are those of answers alone, and
    so they are where every such pass fails and each runs its own: mistakes are told in the log."""
    sizes, texts = [], []

    def lines(fault: Exception | None) -> list[str]:
        def together(sessions):
            sizes.append(len(sessions))
            if fault:
                raise fault
            step_together(sessions)

        monkeypatch.setattr(schedulers, "step_together", together)
        diary = Diary()
        run(engine, [diary.job(engine, "a", "Hello", 9), diary.job(engine, "b", "Who are you?", 7)])
        return ["".join(what for name, what in diary.lines if name == who) for who in "ab"]

    texts = [lines(fault) for fault in (None, CoreError("a disk is gone"), ValueError("a mistake"))]
    log = capsys.readouterr().err
    assert log.count("ValueError: a mistake") == 6 and "a disk" not in log
    assert sizes == [2] * 3 * 6
    diary = Diary()
    run(engine, [diary.job(engine, "a", "Hello", 9)])
    run(engine, [diary.job(engine, "b", "Who are you?", 7)])
    alone = ["".join(what for name, what in diary.lines if name == who) for who in "ab"]
    assert texts == [alone] * 3


def caches(session: Session) -> list[bytes]:
    """Committed rows of every cache that main layers have."""
    layers = range(session.model.config.num_hidden_layers)
    found = [session.cache(layer, kind) for layer in layers for kind in ("kv", "index")]
    return [rows[: session.length].tobytes() for rows in found if rows is not None]


@pytest.mark.parametrize("draft", ["0", "3"])
def test_a_prompt_is_read_once(draft):
    """Two prompts that begin alike and are read at the same time cost little more than one: each
    copies the rows that the other has run; answers, caches and sums are those of prompts alone."""
    engine = open_engine(conversations="2", temperature="0", draft=draft)
    alike = "Tell me a story. " * 100
    diary, alone = Diary(), Diary()
    jobs = [diary.job(engine, name, alike + name, 9) for name in "ab"]
    run(engine, jobs)
    receipts = [job.turn.receipt for job in jobs]
    assert [r.reused_tokens + r.prefill_tokens for r in receipts] == [
        len(job.prompt.ids) for job in jobs
    ]
    assert sum(r.prefill_tokens for r in receipts) < 1.1 * len(jobs[0].prompt.ids)
    assert sum(r.prompt_counters["rows"] for r in receipts) == sum(
        r.prefill_tokens for r in receipts
    )
    for job in jobs:
        engine = open_engine(temperature="0", draft=draft)
        run(engine, [alone.job(engine, job.client, alike + job.client, 9)])
        assert caches(engine.slot.session) == caches(job.turn.session)
    assert sorted(diary.lines) == sorted(alone.lines)


def test_one_that_leaves_stops_no_other(engine, monkeypatch):
    """A client that leaves between two passes, when its rows are staged: the other's text is whole,
    and of the one that left the cache holds what was sent."""
    diary = Diary()
    jobs = [diary.job(engine, "a", "Hello", 9), diary.job(engine, "b", "Who are you?", 7)]
    scheduler, passes = Scheduler(engine, 8, Nobody()), []

    def together(sessions):
        passes.append(len(sessions))
        if len(passes) == 3:
            scheduler.cancel(jobs[0])
        step_together(sessions)

    monkeypatch.setattr(schedulers, "step_together", together)
    finish(scheduler, jobs)
    assert passes == [2, 2, 2] and diary.outcomes["a"].gone and not diary.outcomes["b"].gone
    left, stayed = (job.turn for job in jobs)
    assert left.session.tokens == [*left.prompt.ids, *left.token_ids[:-1]]
    assert len(left.token_ids) == 3 and len(stayed.token_ids) == 7


def test_a_client_with_many_requests(engine):
    """One client's third request waits until another client's first is through."""
    diary = Diary()
    jobs = [diary.job(engine, f"many{i}", "Hello", 2, client="many") for i in range(4)]
    run(engine, [*jobs, diary.job(engine, "one", "Hello", 2)])
    ends = [name for name, what in diary.lines if what == "end"]
    assert ends.index("one") < ends.index("many2")


def test_a_failing_watcher(engine):
    """Whoever looks on may fail; requests are answered."""
    diary = Diary()
    run(engine, [diary.job(engine, "a", "Hello", 2)], fails=True)
    assert diary.outcomes["a"].finish_reason == "length"


def test_a_mistake_while_a_turn_is_made(engine, monkeypatch, capsys):
    """It ends that job, its traceback is shown, and the jobs after it are answered."""
    diary, answer = Diary(), engine.answer

    def broken(prompt, *rest, **others):
        if prompt is jobs[0].prompt:
            raise ValueError("a bug while a turn is made")
        return answer(prompt, *rest, **others)

    jobs = [diary.job(engine, name, "Hello", 2) for name in "abc"]
    monkeypatch.setattr(engine, "answer", broken)
    run(engine, jobs)
    assert isinstance(diary.outcomes["a"].error, ValueError)
    assert [diary.outcomes[name].finish_reason for name in "bc"] == ["length"] * 2
    assert "a bug while a turn is made" in capsys.readouterr().err


def test_nobody_waits_for_an_engine_that_has_stopped(engine, monkeypatch):
    """When the engine's thread dies, jobs that ran or waited end; later ones are refused."""
    diary, mistakes = Diary(), []
    monkeypatch.setattr(threading, "excepthook", lambda given: mistakes.append(given.exc_value))

    def broken() -> None:
        raise ValueError("what is called before turns begin has failed")

    scheduler = Scheduler(engine, 8, Nobody(), broken)
    for name in "abc":
        scheduler.submit(diary.job(engine, name, "Hello", 2))
    scheduler.start()
    assert scheduler.join(LIMIT) and not scheduler.alive
    assert [type(mistake) for mistake in mistakes] == [ValueError]
    assert {diary.outcomes[name].error.code for name in "abc"} == {"engine_stopped"}
    with pytest.raises(Refusal) as refused:
        scheduler.submit(diary.job(engine, "d", "Hello", 2))
    assert refused.value.status == 503 and not (scheduler.active or scheduler.waiting)


def test_a_callback_that_fails(engine):
    """A mistake of whoever is told the outcome ends nobody else's answer."""
    diary = Diary()
    jobs = [diary.job(engine, name, "Hello", 2) for name in "ab"]

    def broken(outcome: Outcome) -> None:
        raise ValueError("a mistake after the answer")

    jobs[0].done = broken
    run(engine, jobs)
    assert diary.outcomes["b"].finish_reason == "length"


def test_after_a_mistake_a_slot_is_as_new():
    """Nothing of a failed turn is kept, and no slot is made beyond those that memory is for."""
    engine, diary, made = open_engine(conversations="2", temperature="0"), Diary(), []
    new_slot, story = engine.new_slot, STORY[0]["content"]
    engine.new_slot = lambda: made.append(new_slot()) or made[-1]
    texts = {"a": story, "b": "Hello", "c": story}
    jobs = [diary.job(engine, name, text, 12) for name, text in texts.items()]

    def broken(delta: Delta) -> None:
        diary.lines.append(("a", "breaks"))
        raise ValueError("a mistake in the middle of an answer")

    jobs[0].deliver = broken
    finish(scheduler := Scheduler(engine, 8, Nobody()), jobs)
    assert ("a", "breaks") in diary.lines and len(made) == 1 and len(scheduler.kept) == 2
    for name in "bc":
        expected = offline(engine, [{"role": "user", "content": texts[name]}], 12, new_slot())
        assert "".join(text for who, text in diary.lines if who == name) == expected + "end"
    alike = common_prefix(jobs[1].prompt.ids, jobs[2].prompt.ids)
    assert diary.outcomes["c"].receipt.reused_tokens < alike  # of what b has


# ---- what is counted ----------------------------------------------------------------------------


def told(service: Service, name: str) -> dict[str, float]:
    """A counter of /metrics, by its label."""
    found = re.findall(name + r'{\w+="(\w+)"} (\S+)', service.metrics.text().decode())
    return {label: float(value) for label, value in found}


def test_a_prompt_cut_off_counts_what_was_read(engine, monkeypatch):
    """Cancelled in its second chunk: metrics, page, status and receipt count the first only."""
    service, diary, chunks = Service(engine), Diary(), []
    job, step = diary.job(engine, "a", "Count the words. " * 60, 5), Session.step_all

    def leaving(self, ids, want="all"):
        chunks.append(len(ids))
        if len(chunks) == 2:
            service.scheduler.cancel(job)
        return step(self, ids, want)

    monkeypatch.setattr(Session, "step_all", leaving)
    finish(service.scheduler, [job])
    receipt = diary.outcomes["a"].receipt
    read = receipt.reused_tokens + chunks[0]
    assert diary.outcomes["a"].gone and receipt.read_tokens == read < receipt.prompt_tokens
    assert told(service, "colibri_tokens_total")["prompt"] == read
    service.watch.look([])
    shown = service.watch.state()["turns"][0]
    assert (shown["read_tokens"], shown["prompt_tokens"]) == (read, receipt.prompt_tokens)
    assert f"{read}/{receipt.context} context" in status(receipt, 200)
    assert re.search(rf"context +{read} of {receipt.context} tokens", stats.table(receipt))


def test_seconds_are_those_of_the_turn_that_took_them(engine, monkeypatch):
    """With a clock that only steps and the showing move: together the turns took what passed, of a
    pass that both share half each."""
    now, steps, chunks, diary, service = [1.0], Counter(), Counter(), Diary(), Service(engine)
    jobs = [diary.job(engine, "a", "Hello", 6), diary.job(engine, "b", "Tell me. " * 120, 4)]
    step, deliver, seen = Session.step_all, jobs[0].deliver, []
    together = schedulers.step_together

    def timed(self, ids, want="all"):
        now[0] += 1.0
        steps[self] += 1
        chunks[self] += want != "all"
        return step(self, ids, want)

    def both(sessions):
        now[0] += 1.0
        steps.update(dict.fromkeys(sessions, 0.5))
        return together(sessions)

    def shown(delta: Delta) -> None:
        service.watch.look([jobs[0]])
        seen.append((now[0], service.watch.state()["turns"][0]))
        now[0] += 0.25
        deliver(delta)

    jobs[0].deliver = shown
    monkeypatch.setattr(Session, "step_all", timed)
    monkeypatch.setattr(schedulers, "step_together", both)
    for module in (turn, schedulers):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(turn, "Ledger", lambda: Ledger(lambda: now[0]))
    finish(service.scheduler, jobs)
    for job in jobs:
        receipt = job.turn.receipt
        seconds = {name: s.seconds for name, s in receipt.ledger.segments.items()}
        assert receipt.prompt_seconds + seconds[PLAIN] == steps[job.turn.session]
        assert receipt.answer_seconds == sum(seconds.values())
        assert receipt.answer_rate == receipt.answer_tokens / receipt.answer_seconds
    first, second = (job.turn.receipt for job in jobs)
    showings = sum(name == "a" for name, _ in diary.lines) - 1
    assert first.ledger.segments[TEXT].seconds == 0.25 * showings > 0
    for at, running in seen[1:]:
        rate = running["answer_tokens"] / (at - seen[0][0])
        assert running["running"] and running["answer_tokens_per_second"] == rate
    assert first.ledger.others > 0 == second.ledger.segments[TEXT].seconds
    assert second.first_token_seconds > second.prompt_seconds == chunks[jobs[1].turn.session] == 4
    assert sum(told(service, "colibri_step_seconds_total").values()) == now[0] - 1.0


# ---- the queue and the slots --------------------------------------------------------------------


def test_queue():
    """Clients in turns, each in its own order; anyone may leave."""
    queue = FairQueue()
    jobs = {n: SimpleNamespace(client=n[0]) for n in ("a1", "a2", "a3", "b1", "c1")}
    for job in jobs.values():
        queue.put(job)
    assert queue.remove(jobs["c1"]) and not queue.remove(jobs["c1"]) and len(queue) == 4
    taken = [queue.take() for _ in range(4)]
    assert taken == [jobs[n] for n in ("a1", "b1", "a2", "a3")]


def test_limit(engine):
    """Beyond the slots and the queue a request is refused, with what fills them."""
    scheduler = Scheduler(engine, 1, Nobody())
    diary = Diary()
    for i in range(3):
        scheduler.submit(diary.job(engine, str(i), "Hello", 1))
    with pytest.raises(Refusal, match="3 wait") as refused:
        scheduler.submit(diary.job(engine, "4", "Hello", 1))
    assert refused.value.status == 429
    scheduler.close()
    assert len(diary.outcomes) == 3 and all(o.error.status == 503 for o in diary.outcomes.values())


def slots(*histories: list[int], most: int = 3) -> Conversations:
    """Kept slots with these tokens, the longest unused first."""

    def make(tokens: list[int]) -> Any:
        session = SimpleNamespace(tokens=tokens, length=len(tokens))
        session.rewind = lambda length: vars(session).update(tokens=[], length=length)
        return SimpleNamespace(session=session, drafting={})

    return Conversations(lambda: make([]), most, first=[make(h) for h in histories])


@pytest.mark.parametrize(
    ("histories", "ids", "taken"),
    [
        ([[1, 2, 3], [1, 2, 9]], [1, 2, 9, 4], [1, 2, 9]),  # continues the second
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9]], [1, 5, 6, 7], []),  # shares too little: a new one
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9], [], [4]], [1, 5, 6], []),  # the empty one
        ([[7, 7], [8, 8], [9, 9]], [1, 2], [7, 7]),  # all full: the longest unused
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9]], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9]),  # goes back
    ],
)
def test_which_slot(histories, ids, taken):
    """The history that a prompt continues, else one that costs nobody anything."""
    kept = slots(*histories)
    slot = kept.take(ids)
    assert slot.session.tokens == taken
    kept.give_back(slot)
    before = len(kept.kept)
    assert before <= 3
    kept.give_back(slot := kept.take(ids), keep=False)
    assert len(kept.kept) == before and slot.session.tokens == []
