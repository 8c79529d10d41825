"""Many clients at once, some of them leaving: no wrong text, nothing left behind."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from serving import Serving, offline, open_engine, request, serving

PROMPTS = (
    "Tell me a story about a fox.", "Hello", "What is 3 + 4?", "Tell me a story about a mouse.",
    "Write a poem about rain.", "Who are you?",
)  # fmt: skip
CLIENTS = 8
TOKENS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """The demo model, drafting, with fewer slots than clients."""
    with serving(open_engine(draft="3", conversations="3")) as running:
        yield running


def asked(number: int) -> dict[str, Any]:
    """Request `number`: greedy or seeded, one turn or two, streamed or not."""
    messages = [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]
    if number % 3 == 0:
        messages += [{"role": "assistant", "content": "I see."},
                     {"role": "user", "content": PROMPTS[number // 3 % len(PROMPTS)]}]  # fmt: skip
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number % 5}
    return {"messages": messages, "max_tokens": TOKENS, "user": str(number % CLIENTS), **sampling}


def leave(server: Serving, number: int) -> None:
    """Ask for a stream and go away: at once, or after some of it."""
    rng = random.Random(number)
    with closing(server.connect()) as sock:
        body = asked(number) | {"stream": True, "max_tokens": 400}
        sock.sendall(request("POST", "/v1/chat/completions", body))
        if rng.random() < 0.7:
            sock.recv(rng.choice((1, 500, 3000)))


def ask(server: Serving, number: int) -> str | None:
    """The text of an answer; None for a client that left early."""
    if number % 3 == 2:
        leave(server, number)
        return None
    fields = asked(number)
    if number % 4 == 1:
        return server.chat(**fields, stream=True).delta("content")
    return server.chat(**fields).text


def run(server: Serving, numbers: range) -> None:
    """All requests from CLIENTS threads; every answer is the offline one."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda n: ask(server, n), numbers))
    server.settle()
    slot, known = server.engine.new_slot(), {}
    for number, text in zip(numbers, answers, strict=True):
        if text is None:
            continue
        fields = asked(number)
        question = repr({k: v for k, v in fields.items() if k != "user"})
        if question not in known:
            sampling = {k: fields[k] for k in ("temperature", "seed") if k in fields}
            known[question] = offline(server.engine, fields["messages"], TOKENS, slot, **sampling)
        assert text == known[question], fields


def resident() -> int:
    """Bytes of this process's own memory."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def descriptors() -> int:
    """Open files."""
    return len(list(Path("/proc/self/fd").iterdir()))


def acceptance(server: Serving) -> float:
    """The share of all drafts so far that were kept."""
    text = server.get("/metrics").body.decode()
    count = {k: float(v) for k, v in re.findall(r'tokens_total\{kind="(\w+)"\} (\S+)', text)}
    return count["accepted"] / count["drafted"]


def test_clients_that_leave(server):
    """48 requests from 8 clients, a third of them leaving early."""
    run(server, range(48))


@pytest.mark.slow
def test_memory_is_flat(server):
    """200 requests after 200 others leave memory, open files and acceptance as they were."""
    run(server, range(200))
    before, files, kept = resident(), descriptors(), acceptance(server)
    run(server, range(200, 400))
    assert abs(acceptance(server) - kept) < 0.05
    assert resident() - before < 8 << 20
    assert descriptors() <= files + 2
