"""`colibri run` in one process: answers, receipts, how it ends, prompts from anywhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from colibri.engine import Engine
from colibri.knobs import Settings
from colibri.memory import RESERVE

STORY = "Tell me a story about a fox."
RUN = ("-p", STORY, "--temp", "0")


@pytest.fixture(scope="module")
def tight() -> str:
    """--ram that leaves eight slots a layer for the demo's 32 experts."""
    engine = Engine.open(Settings.resolve({"threads": "1"}, {}))
    demand = engine.demand()
    slots = 8 * demand.layer_slots_bytes + demand.spares * demand.slot
    need = demand.dense + demand.sessions + RESERVE + slots
    return f"{need / (1 << 20) + 0.01:.3f}M"


def test_answer_ends_with_a_newline_and_a_receipt(command):
    """stdout is the answer alone, stderr one line with counts, rates, the end and the seed."""
    done = command("run", "-p", "Hello", "--seed", "4")
    assert done.status == 0
    assert done.out.endswith("\n") and not done.out.endswith("\n\n")
    pattern = r"prompt \d+ tokens \(.*/s\), answer \d+ tokens \(.*/s\), first after .*, seed 4\n"
    assert re.fullmatch(pattern, done.err)


def test_json(command, demo_tokenizer):
    """One object; the text is the tokens' text; the stats agree with it."""
    got = command.answer(*RUN, "-n", "12")
    assert list(got) == ["text", "reasoning", "token_ids", "finish_reason", "stats"]
    assert got["text"] == demo_tokenizer.decode(got["token_ids"])
    assert (got["finish_reason"], got["reasoning"], len(got["token_ids"])) == ("length", None, 12)
    stats = got["stats"]
    assert stats["answer_tokens"] == 12 and stats["prompt_tokens"] == 14
    assert stats["ledger"]["tokens"] == 12
    assert stats["first_token_seconds"] >= stats["prompt_seconds"] > 0
    rows = stats["answer_counters"]["rows"]
    assert stats["answer_counters"]["forwards"] <= rows
    assert stats["drafts_accepted"] <= stats["drafts_proposed"] < rows


def test_seeds(command):
    """A seed gives the same text twice, another seed another, none a fresh one that is shown."""
    one, again, two = (command.answer("-p", STORY, "--seed", seed) for seed in ("1", "1", "2"))
    assert one["token_ids"] == again["token_ids"] != two["token_ids"]
    fresh = {command.answer("-p", "Hi", "-n", "1")["stats"]["seed"] for _ in range(2)}
    assert len(fresh) == 2
    drawn = command.answer("-p", STORY)
    seed = str(drawn["stats"]["seed"])
    assert command.answer("-p", STORY, "--seed", seed)["text"] == drawn["text"]


def test_nothing_but_the_clock_changes(command, tight):
    """Threads, instruction sets, drafting and memory limits give the same greedy text."""
    ways = [
        {}, {"COLIBRI_THREADS": "1"}, {"COLIBRI_THREADS": "3"}, {"COLIBRI_ISA": "scalar"},
        {"DRAFT": "0"}, {"DRAFT": "3"}, {"MTP": "0"}, {"DRAFT": "0", "MTP": "0", "SPEC": "1"},
        {"RAM_GB": "1"}, {"CTX": "200"}, {"COLIBRI_IO": "direct", "COLIBRI_RAM": tight},
        {"COLIBRI_IO": "buffered", "COLIBRI_RAM": tight, "SPEC": "1"},
    ]  # fmt: skip
    texts = {command("run", *RUN, "-n", "80", env=way).out for way in ways}
    assert len(texts) == 1 and len(texts.pop()) > 100


def test_defaults_come_from_the_model(command):
    """generation_config.json's temperature and top_p are used and marked; flags win."""
    table = command("run", "-p", "Hi", "--stats", "--seed", "3").err
    assert "temperature 0.8*, top_p 0.95*, top_k 0, min_p 0, seed 3 (* the model's own)" in table
    table = command("run", "-p", "Hi", "--stats", "--seed", "3", "--top-p", "1").err
    assert "temperature 0.8*, top_p 1, top_k 0" in table


@pytest.mark.parametrize(
    ("arguments", "reason", "words"),
    [
        (("-n", "3"), "length", "stopped at the limit of 3 tokens"),
        (("-n", "1"), "length", "answer 1 token, first after"),
        (("-n", "1"), "length", "stopped at the limit of 1 token\n"),
        (("--ctx", "20"), "context", "the context of 20 tokens is full"),
        (("--ctx", "20", "-n", "1000"), "context", "the context of 20 tokens is full"),
        ((), "stop", "complete"),
    ],
)
def test_how_it_ended(command, arguments, reason, words):
    """finish_reason and the receipt say why the answer ended."""
    run = (*RUN, *arguments)
    assert command.answer(*run)["finish_reason"] == reason
    assert words in command("run", *run).err


def test_full_receipt_has_the_ledger(command):
    """--stats=full adds the segments to the table."""
    text = command("run", *RUN, "--stats=full").err
    for word in ("model", "engine", "finish", "draft", "verify", "absorb", "plain"):
        assert re.search(rf"^ *{word}\b", text, re.MULTILINE), word


def test_memory_for_experts(command, tight):
    """With less memory than experts some are read again; the receipt counts and names them."""
    run = ("run", *RUN, "-n", "40", "--stats", "--io", "direct", "--ram")
    table = command(*run, tight).err
    found = re.search(r"(\d+) used .*, (\d+) read .*, (\d+) slots a layer", table)
    used, read, slots = map(int, found.groups())
    assert slots == 8 and 0 < read < used
    assert "Free memory or raise --ram" in command(*run, "90M").err


def test_quiet(command):
    """--quiet leaves stderr empty and changes nothing else."""
    loud = command("run", *RUN, "--spec")
    quiet = command("run", *RUN, "--spec", "--quiet")
    assert quiet.err == "" and quiet.out == loud.out
    assert "--spec has no effect" in loud.err


# ---- where the prompt comes from ----------------------------------------------------------------


def test_prompt_sources(command, tmp_path):
    """Flag, file, stdin and - give the same answer; one final newline and a BOM are dropped."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + STORY.encode() + b"\r\n")
    expected = command.answer("-p", STORY, "--temp", "0", "-n", "8")["token_ids"]
    run = ("--temp", "0", "-n", "8")
    assert command.answer(*run, "--prompt-file", str(file))["token_ids"] == expected
    assert command.answer(*run, stdin=STORY.encode())["token_ids"] == expected
    assert command.answer(*run, stdin=STORY.encode() + b"\n")["token_ids"] == expected
    assert command.answer(*run, "-f", "-", stdin=STORY.encode())["token_ids"] == expected
    assert command.answer(*run, "-p", STORY, stdin=b"something else")["token_ids"] == expected


def prompt_tokens(command, *arguments: str) -> int:
    """How many tokens a prompt becomes."""
    return command.answer(*arguments, "-n", "1")["stats"]["prompt_tokens"]


def test_markup_in_a_prompt_is_text(command, demo_tokenizer):
    """A role token in the prompt becomes letters, no control token."""
    marked = "Hi<|user|></think>"
    more = prompt_tokens(command, "-p", marked) - prompt_tokens(command, "-p", "Hi")
    assert more == len(demo_tokenizer.encode(marked)) - len(demo_tokenizer.encode("Hi")) > 2


def test_nothing_but_reasoning(command, demo_path, tmp_path):
    """Where the limit comes before any answer, stdout is empty and stderr says why."""
    model = Path(shutil.copytree(demo_path, tmp_path / "model"))
    thinking = "<|user|>{{ messages[0].content }}<|assistant|><think>Once upon"
    (model / "chat_template.jinja").write_text(thinking)
    done = command("run", str(model), *RUN, "-n", "5")
    assert done.out == "" and "all of the answer is reasoning" in done.err
    assert "at the limit of 5 tokens, still reasoning" in done.err
    assert "is reasoning" not in command("run", *RUN, "-n", "5").err


def test_raw(command):
    """--raw continues text after the prefix alone, which is never doubled."""
    run = ("--raw", "--temp", "0", "-n", "5", "-p")
    raw = command.answer(*run, "Once upon a time")
    whole = command.answer(*run, "[gMASK]<sop>Once upon a time")
    assert raw["token_ids"] == whole["token_ids"]
    assert raw["stats"]["prompt_tokens"] == whole["stats"]["prompt_tokens"]


def test_system(command):
    """--system adds a message of its own."""
    added = prompt_tokens(command, "-p", "Hi", "--system", "You are a fox.")
    assert added > prompt_tokens(command, "-p", "Hi")


def test_model_directory_is_left_alone(command, demo_path, tmp_path):
    """Nothing is written beside the model: same files, same times, though it could be."""
    directory = tmp_path / "model"
    shutil.copytree(demo_path, directory)
    directory.chmod(0o555)
    before = times(directory)
    assert command.answer(str(directory), "-p", "Hi", "-n", "2")["text"]
    directory.chmod(0o755)
    assert times(directory) == before


def times(directory: Path) -> dict[str, int]:
    """When each file was last written."""
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


def test_model_from_the_environment(command, demo_path, tmp_path):
    """COLIBRI_MODEL names the model; the command line wins over it."""
    link = tmp_path / "linked model"
    link.symlink_to(demo_path)
    env = {"COLIBRI_MODEL": str(link)}
    run = ("-p", "Hi", "-n", "1")
    assert command.answer(*run, env=env)["stats"]["model"] == str(link)
    assert command.answer(str(demo_path), *run, env=env)["stats"]["model"] == str(demo_path)
