"""`colibri serve` as a process: what it refuses to start with, what it says, how it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import uvicorn
from serving import open_engine
from test_run import environment

from colibri.errors import UsageError
from colibri.knobs import Settings
from colibri.serve_cli import announce, http_config, is_loopback
from colibri.server.guard import Guard
from colibri.server.log import Log

LIMIT = 60


@contextmanager
def served(*flags: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address."""
    command = [sys.executable, "-m", "colibri", "serve", "--port", "0", "--threads", "1", *flags]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment(**env),
    )  # fmt: skip
    try:
        said = ""
        while not (found := re.search(r"the page at (http://\S+)/", said)):
            line = process.stderr.readline()
            assert line, f"it ended after {said!r}"
            said += line
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def chat(url: str, **fields: object) -> urllib.request.Request:
    """A request."""
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], **fields}
    headers = {"content-type": "application/json"}
    return urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_and_ends(number):
    """It answers, and a signal ends it cleanly in the middle of an answer."""
    with served() as (process, url):
        greedy = chat(url, max_tokens=3, temperature=0)
        with urllib.request.urlopen(greedy, timeout=LIMIT) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        with urllib.request.urlopen(chat(url, stream=True), timeout=LIMIT) as stream:
            stream.readline()
            process.send_signal(number)
            rest = stream.read().decode()
        assert rest.endswith("data: [DONE]\n\n") or "shutting_down" in rest
        out, errors = process.communicate(timeout=LIMIT)
        assert (process.returncode, out) == (0, "") and "Traceback" not in errors


def test_a_line_for_every_answer():
    """The log has receipts, and not what was said; when nobody reads it the server serves on."""
    with served("--seed", "1") as (process, url):
        with urllib.request.urlopen(chat(url, stop=["time"]), timeout=LIMIT) as answer:
            assert json.load(answer)["choices"][0]["finish_reason"] == "stop"
        line = process.stderr.readline()
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d prompt 11 tokens .*, answer \d+ tokens .*, complete, seed 1\n", line
        )
        process.stderr.close()
        for _ in range(2):
            with urllib.request.urlopen(chat(url, max_tokens=3), timeout=LIMIT) as answer:
                assert answer.status == 200
        process.stderr = None


def missed(url: str) -> float:
    """Experts that answers asked for and did not find in memory."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT) as answer:
        found = re.search(r'colibri_experts_total{kind="missed"} (\S+)', answer.read().decode())
    return float(found[1])


def test_a_server_begins_with_the_experts_it_ended_with(tmp_path):
    """What was in memory when it ended is there again, at once or while nobody asks."""
    few, flags = (
        ("--io", "buffered", "--ram", "300M", "--draft", "0"),
        {"COLIBRI_STATE": str(tmp_path)},
    )
    counts, texts = [], []
    for warm in ("--no-warm", "--warm"):
        with served(*few, warm, **flags) as (process, url):
            asked = chat(url, max_tokens=40, temperature=0)
            with urllib.request.urlopen(asked, timeout=LIMIT) as answer:
                texts.append(json.load(answer)["choices"][0]["message"]["content"])
            counts.append(missed(url))
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LIMIT)
    assert texts[0] == texts[1] and counts[0] > 40 and counts[1] == 0
    with served(*few, **flags) as (process, url):  # it reads until somebody asks
        with urllib.request.urlopen(
            chat(url, max_tokens=3, temperature=0), timeout=LIMIT
        ) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert "Traceback" not in process.communicate(timeout=LIMIT)[1]


def test_a_server_keeps_its_conversations(tmp_path):
    """With --keep a prompt read before a restart is not read again, and the text is the same."""
    found = []
    for _ in range(2):
        with served("--keep", COLIBRI_STATE=str(tmp_path)) as (process, url):
            asked = chat(url, max_tokens=9, temperature=0)
            with urllib.request.urlopen(asked, timeout=LIMIT) as answer:
                found.append(json.load(answer))
            process.send_signal(signal.SIGTERM)
            assert "Traceback" not in process.communicate(timeout=LIMIT)[1]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    assert cached[0] == 0 and cached[1] >= found[1]["usage"]["prompt_tokens"] - 2
    assert found[0]["choices"] == found[1]["choices"]


def test_beyond_loopback_needs_a_key(command):
    """Another address without a key is refused, with the knob that gives one."""
    for host in ("0.0.0.0", "::", "192.0.2.1", "example"):
        result = command("serve", "--host", host)
        assert result.status == 2 and "COLIBRI_API_KEY" in result.err
    result = command("serve", env={"COLIBRI_API_KEY": " "})
    assert result.status == 2 and "--api-key is empty" in result.err


def test_addresses(command):
    """An address that cannot be had is refused before the model is loaded."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = command("serve", "--port", str(port))
        assert result.status == 2 and f"port {port} cannot be listened on" in result.err
    result = command("serve", "--host", "192.0.2.1", env={"COLIBRI_API_KEY": "k"})
    assert result.status == 2 and "must be an address of this machine" in result.err
    assert [is_loopback(h) for h in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "box")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_with_a_key():
    """The key from the environment is asked for, on every interface."""
    with served("--host", "0.0.0.0", COLIBRI_API_KEY="k") as (_, url):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(chat(url), timeout=LIMIT)
        request = chat(url, max_tokens=1)
        request.add_header("Authorization", "Bearer k")
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            assert answer.status == 200


def test_conversations_fit_the_memory(command):
    """More conversations than memory has room for are refused with how many would fit."""
    result = command("serve", "--ram", "130M", "--conversations", "64")
    assert result.status == 2 and "the caches" in result.err and "do not fit" in result.err
    most = re.search(r"--conversations (\d+) at most", result.err)
    assert open_engine(ram="130M", conversations=most[1]).conversations == int(most[1]) > 1


@pytest.mark.parametrize(
    "origins",
    ["***", "app.example", "https://", "https://*.example", "https://a.example/app", "https://[",
     "https://a.example, b.example", "https://a b.example", "https://me@a.example"],
)  # fmt: skip
def test_origins_that_are_none(command, origins):
    """What no browser would send as an origin is refused before the model is looked for."""
    result = command("serve", "/nowhere", "--allow-origin", origins)
    assert result.status == 2 and "which is no origin" in result.err
    assert repr(origins.split(", ")[-1]) in result.err and "https://app.example" in result.err


def test_hosts_with_a_star():
    """A name with a star would match no host, so it is refused."""
    with pytest.raises(UsageError, match="--allow-host has '\\*', which matches no host"):
        Guard.of(Settings.resolve({"allow_host": "box.lan, *"}, {}))


def test_origins():
    """Origins are taken as browsers write them; * stands for all."""
    given = "https://App.example/, http://127.0.0.1:3000,http://[::1]:80,null, app://obsidian.md,"
    guard = Guard.of(Settings.resolve({"allow_origin": given}, {}))
    assert guard.origins == {
        "https://app.example", "http://127.0.0.1:3000", "http://[::1]:80", "null",
        "app://obsidian.md",
    }  # fmt: skip
    assert not guard.lets("https://b.example") and guard.lets("https://app.example")
    assert Guard.of(Settings.resolve({"allow_origin": "*"}, {})).lets("https://b.example")


def test_no_model(command):
    """A wrong directory is told at once."""
    result = command("serve", "/nowhere")
    assert result.status == 2 and "no model directory" in result.err


def test_defaults():
    """Loopback, port 8000, no key, speculation on."""
    settings = Settings.resolve({}, {})
    assert (settings.host, settings.port, settings.api_key) == ("127.0.0.1", 8000, None)
    assert settings.draft is None and settings.mtp


def test_clients_hang_up_first():
    """Idle connections are kept for longer than clients keep them (Go 90 s, aiohttp 15): a request
    that meets a server hanging up is an error that nobody can explain."""
    assert http_config(uvicorn, None).timeout_keep_alive > 90


@pytest.mark.parametrize(
    ("flags", "drafter"), [({}, "mtp"), ({"mtp": "0"}, "ngram"), ({"draft": "0"}, "none")]
)
def test_announcement(flags, drafter):
    """What is said of drafts is what the engine will do, not what was asked for."""
    engine = open_engine(conversations="2", **flags)
    text = announce(engine.settings, engine, ("0.0.0.0", 80), "m")
    assert f"drafts: {drafter}" in text and "2 conversations at once" in text
    assert "http://127.0.0.1:80/v1" in text


def test_a_log_that_nobody_reads_delays_nobody():
    """Lines wait while the first cannot be written; what is too many is lost, and told."""
    written: list[str] = []
    reading, taken = threading.Event(), threading.Event()

    def write(line: str) -> None:
        taken.set()
        assert reading.wait(60)
        written.append(line)

    log = Log(write, most=3)
    log.tell("0")
    assert taken.wait(60)
    for number in range(1, 6):  # would never return if it waited
        log.tell(str(number))
    reading.set()
    log.close(60)
    assert written == ["0", "1\n(2 lines before this one were not taken)", "2", "3"]


def test_a_log_that_cannot_be_written():
    """An error of the stream loses the line and not the thread."""
    written: list[str] = []

    def write(line: str) -> None:
        if line == "bad":
            raise OSError
        written.append(line)

    log = Log(write)
    for line in ("one", "bad", "two"):
        log.tell(line)
    log.close(60)
    assert written == ["one", "two"]
