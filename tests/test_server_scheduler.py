"""The queue and the slots: who is next, who gets which cache, and nobody waits for a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from serving import LIMIT, STORY, open_engine, wait_for

from colibri.server.conversations import Conversations
from colibri.server.refusal import Refusal
from colibri.server.reply import Delta, Reply, Wish
from colibri.server.scheduler import FairQueue, Job, Outcome, Scheduler


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
    scheduler = Scheduler(engine, 8, Nobody(fails))
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
        return SimpleNamespace(session=session)

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
    kept.give_back(kept.take(ids), keep=False)
    assert len(kept.kept) == before - 1
