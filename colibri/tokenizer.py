"""Text to token ids and back, byte-exact, for byte-level BPE tokenizers (`tokenizer.json`).

Two promises. Plain text never becomes a control token: `encode` knows no added tokens at all, only
`encode_template` does. And text comes out of bytes, not of tokens: a character split over several
tokens is held back until it is whole, so streaming shows exactly what one-shot decoding shows.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from colibri.errors import ConfigError, TokenizerError
from colibri.state import checksum
from colibri.strictjson import parse_object
from colibri.vocabulary import Vocabulary

EOS_NAMES = ("<|endoftext|>", "<|user|>", "<|observation|>")
_MAX_ID = 1 << 24  # a corrupt id must not size a table
_CHEAP = 1 << 16  # texts of up to so many bytes are encoded without a bound of their tokens
_COUNTED = 1 << 20  # bytes counted at a time: np.bincount makes 8 bytes of each
Room = Callable[[int, int], None]  # (least tokens, bytes of text); raises when they are too many


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
# For str.translate: the stand-in of a byte becomes chr(byte); any other character up to U+00FF
# becomes U+0100, which latin-1 cannot encode.
_TO_LATIN = dict.fromkeys(range(256), 256) | {ord(char): byte for char, byte in _BYTE_OF.items()}
# 0xC0, 0xC1 and 0xF5.. never occur in UTF-8, so a vocabulary may lack them.
_NEEDED_BYTES = [b for b in range(256) if b not in (0xC0, 0xC1) and b < 0xF5]


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One entry of tokenizer.json's `added_tokens`, matched whole before anything else."""

    id: int
    content: str
    special: bool
    normalized: bool
    single_word: bool
    lstrip: bool
    rstrip: bool

    @classmethod
    def parse(cls, entry: Any, path: Path) -> AddedToken:
        ok = isinstance(entry, dict) and isinstance(entry.get("content"), str)
        if not ok or not entry["content"] or type(entry.get("id")) is not int:
            raise _broken(path, f"added token {entry!r} has no usable id and content")
        flags = ("special", "normalized", "single_word", "lstrip", "rstrip")
        return cls(entry["id"], entry["content"], *(bool(entry.get(f, False)) for f in flags))


class _Matcher:
    """Finds added tokens in text: leftmost, then longest, as the `tokenizers` library does."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._of = {token.content: token for token in tokens}
        longest_first = sorted(self._of, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if self._of else None

    def split(self, text: str) -> list[str | int]:
        """Cut text into plain strings and the ids of the added tokens between them."""
        if self._pattern is None:
            return [text]
        pieces: list[str | int] = []
        at = 0
        for match in self._pattern.finditer(text):
            token = self._of[match[0]]
            start, end = match.span()
            if start < at or (token.single_word and _touches_word(text, start, end)):
                continue
            if token.lstrip:
                start = at + len(text[at:start].rstrip())
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip())
            pieces += [text[at:start], token.id]
            at = end
        pieces.append(text[at:])
        return pieces


def _touches_word(text: str, start: int, end: int) -> bool:
    return any(map(_is_word, text[max(start - 1, 0) : start] + text[end : end + 1]))


def _is_word(char: str) -> bool:
    """The library's idea of a word character: marks and joiners count, fractions do not."""
    kind = unicodedata.category(char)
    return kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or char in "\u200c\u200d"


class Tokenizer:
    """A byte-level BPE tokenizer. Make one with `Tokenizer.load(directory)`.

    `added` maps an added token's text to its `AddedToken`; `vocab_used` is the largest id + 1, so
    logits at and beyond it are padding rows that no text can stand for. `digest`, 32 hex digits, is
    of the bytes it was made of: the file may be another one by now.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        added: list[AddedToken],
        vocab: dict[str, int],
        digest: str,
        keeps_text: bool = True,
    ) -> None:
        self._core = core
        self._keeps_text = keeps_text
        self.digest = digest
        self.added = {token.content: token for token in added}
        # The library looks for the un-normalised tokens first, then for the others in the rest.
        self._matchers = [
            _Matcher(token for token in added if not token.normalized),
            _Matcher(token for token in added if token.normalized),
        ]
        self._all = _byte_table(vocab, added)
        self._visible = list(self._all)
        for token in added:
            if token.special:
                self._visible[token.id] = b""
        self.vocab_used = len(self._all)
        self.eos_ids = frozenset(self.added[n].id for n in EOS_NAMES if n in self.added)

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Read `directory/tokenizer.json`; raise TokenizerError when it cannot be used."""
        path = Path(directory) / "tokenizer.json"
        data = _read(path)
        raw = parse_object(data, str(path), TokenizerError)
        vocab = _check_byte_level(raw, path)
        entries = raw.get("added_tokens") or []
        if not isinstance(entries, list):
            raise _broken(path, f"added_tokens is {type(entries).__name__}, not a list")
        added = [AddedToken.parse(entry, path) for entry in entries]
        top = max([*vocab.values(), *(t.id for t in added)])
        if top >= _MAX_ID or min([0, *vocab.values(), *(t.id for t in added)]) < 0:
            raise _broken(path, f"token ids must lie in 0..{_MAX_ID - 1}")
        core = _plain_core(raw, added, path)
        return cls(core, added, vocab, checksum([data]), _keeps_text(raw))

    def require_rows(self, count: int, directory: Path) -> None:
        """ConfigError when a model of so many rows has none for some token."""
        if self.vocab_used > count:
            raise ConfigError(
                f"{directory}: tokenizer.json has {self.vocab_used} tokens, "
                f"the model {count}; they do not belong together"
            )

    def id_of(self, content: str) -> int | None:
        """The id of an added token by its text, None when the tokenizer has no such token."""
        token = self.added.get(content)
        return None if token is None else token.id

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; markup such as `<|user|>` in it stays text. Nothing is prepended."""
        return self.encode_pieces([text])

    def encode_template(self, text: str, room: Room | None = None) -> list[int]:
        """Ids of a template's text: added tokens are recognised. Nothing is prepended."""
        return self.encode_pieces(self.split_markup(text), room)

    def encode_pieces(self, pieces: Iterable[str | int], room: Room | None = None) -> list[int]:
        """Ids of plain texts and of the ids between them, in order.

        `room` is called with a lower bound of the tokens of a long text before it is encoded; what
        it raises stops the encoding. Other threads run meanwhile.
        """
        whole = [p if isinstance(p, int) else _without_surrogates(p) for p in pieces]
        if room is not None:
            data = "".join(p for p in whole if isinstance(p, str)).encode()
            if len(data) > _CHEAP:
                room(self._least(data) + sum(isinstance(p, int) for p in whole), len(data))
        ids: list[int] = []
        for piece in whole:
            ids += [piece] if isinstance(piece, int) else self._encode(piece)
        return ids

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        # A batch is encoded with the interpreter's lock released, a single text is not.
        core = self._core
        batch = getattr(core, "encode_batch_fast", core.encode_batch)
        return batch([text], add_special_tokens=False)[0].ids

    def _least(self, data: bytes) -> int:
        """A lower bound of the tokens of plain text with these UTF-8 bytes."""
        if not self._keeps_text:
            return 0
        parts = (data[at : at + _COUNTED] for at in range(0, len(data), _COUNTED))
        counts = (np.bincount(np.frombuffer(part, np.uint8), minlength=256) for part in parts)
        return int(sum(count @ self._shares for count in counts))

    @cached_property
    def _shares(self) -> np.ndarray:
        """f64 [256]: 1 / (length of the longest token that contains the byte).

        The shares of one token's bytes add up to at most 1, so those of a text's bytes are a lower
        bound of its tokens.
        """
        shares = np.zeros(256)
        for token in sorted(set(self._all), key=len, reverse=True):
            for byte in token:
                shares[byte] = shares[byte] or 1 / len(token)
        return shares

    def split_markup(self, text: str) -> list[str | int]:
        """Cut text at its added tokens: plain strings (some empty) and ids, in order."""
        pieces: list[str | int] = [text]
        for matcher in self._matchers:
            cuts = ([p] if isinstance(p, int) else matcher.split(p) for p in pieces)
            pieces = [piece for cut in cuts for piece in cut]
        return pieces

    @cached_property
    def text_bytes(self) -> list[bytes]:
        """The bytes of each token that text may consist of, by id; of all others none."""
        added = {token.id for token in self.added.values()}
        return [b"" if i in added else data for i, data in enumerate(self._all)]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens that text may consist of, for grammars."""
        return Vocabulary(self.text_bytes)

    def token_bytes(self, token: int, show_special: bool = False) -> bytes:
        """The bytes a token stands for; empty for hidden special tokens and unknown ids."""
        table = self._all if show_special else self._visible
        return table[token] if 0 <= token < len(table) else b""

    def decode(self, ids: Iterable[int], show_special: bool = False) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD, as in `bytes.decode`."""
        joined = b"".join(self.token_bytes(int(i), show_special) for i in ids)
        return joined.decode("utf-8", "replace")

    def stream(self, show_special: bool = False) -> StreamDecoder:
        """A decoder that takes one id at a time."""
        return StreamDecoder(self._all if show_special else self._visible)


class StreamDecoder:
    """Ids in, text out. All that `push` and `finish` return, joined, equals `Tokenizer.decode`."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became certain with this token: whole characters only, often none."""
        if 0 <= token < len(self._table):
            return self._utf8.decode(self._table[token])
        return ""

    def finish(self) -> str:
        """What an unfinished last character leaves: U+FFFD, or nothing. Ready for reuse after."""
        tail = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return tail


def _without_surrogates(text: str) -> str:
    """Text that UTF-8 can hold: halves of a pair are joined, lone ones become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _broken(path: Path, reason: str) -> TokenizerError:
    return TokenizerError(
        f"{path}: {reason}. Copy tokenizer.json from the original model's repository."
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise TokenizerError(
            f"{path} is missing: text cannot become tokens. "
            "Copy tokenizer.json from the original model's repository beside config.json."
        ) from None
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}. Check the file.") from None


def _check_byte_level(raw: dict[str, Any], path: Path) -> dict[str, int]:
    """Return the vocabulary, or raise: only BPE over the byte alphabet decodes byte-exactly."""
    model = raw.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise _broken(path, "no model with a vocabulary")
    kind = model.get("type", "BPE" if "merges" in model else "unknown")
    if kind != "BPE" or model.get("byte_fallback") or not _has_byte_level(raw.get("pre_tokenizer")):
        detail = "BPE without a ByteLevel pre-tokenizer" if kind == "BPE" else kind
        raise TokenizerError(
            f"{path}: this tokenizer is {detail}; colibri reads byte-level BPE, "
            "which every GLM-MoE-DSA model uses. Check that the file belongs to the model."
        )
    vocab = model["vocab"]
    if not all(type(value) is int for value in vocab.values()):
        raise _broken(path, "a vocabulary id is not an integer")
    char_of = {byte: char for char, byte in _BYTE_OF.items()}
    missing = [f"{b:02X}" for b in _NEEDED_BYTES if char_of[b] not in vocab]
    if missing:
        raise _broken(path, f"no token for the bytes {' '.join(missing[:8])}: text would be lost")
    return vocab


def _has_byte_level(node: Any) -> bool:
    if not isinstance(node, dict):
        return False
    nested = node.get("pretokenizers")
    inner = nested if isinstance(nested, list) else []
    return node.get("type") == "ByteLevel" or any(map(_has_byte_level, inner))


def _keeps_text(raw: dict[str, Any]) -> bool:
    """Whether every byte of a text is in some token: nothing normalises or removes any."""
    normalizer = raw.get("normalizer") or {}
    nothing = not normalizer or normalizer == {"type": "Sequence", "normalizers": []}
    return nothing and '"Removed"' not in json.dumps(raw.get("pre_tokenizer"))


def _plain_core(raw: dict[str, Any], added: list[AddedToken], path: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer without added tokens, prefix, truncation or padding.

    Its `encode_special_tokens` switch is not enough: it lets `special: false` tokens through.
    """
    model = dict(raw["model"])
    model["vocab"] = _without_added(model, {t.content for t in added}, path)
    off = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(raw | off | {"model": model}))
    except Exception as error:  # the library raises plain Exception
        raise _broken(path, f"the tokenizers library refuses it ({error})") from None


def _without_added(model: dict[str, Any], contents: set[str], path: Path) -> dict[str, int]:
    """The vocabulary without added tokens that no merge makes, so that no text can hit them."""
    listed = {c for c in contents if c in model["vocab"] and c not in _BYTE_OF}
    if not listed:
        return model["vocab"]
    merges = model.get("merges") or []
    if not isinstance(merges, list):
        raise _broken(path, f"model.merges is {type(merges).__name__}, not a list")
    for at, merge in enumerate(merges):
        parts = merge.split(" ", 1) if isinstance(merge, str) else merge
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise _broken(path, f"model.merges[{at}] is {json.dumps(merge)[:80]}, not two strings")
        listed.discard("".join(parts))
    kept = dict(model["vocab"])
    for token in listed:
        del kept[token]
    return kept


def _byte_table(vocab: dict[str, int], added: list[AddedToken]) -> list[bytes]:
    """Bytes by id; holes are empty. Added tokens stand for their own text, letter by letter."""
    size = 1 + max([*vocab.values(), *(token.id for token in added)])
    table = [b""] * size
    for text, i in vocab.items():
        try:
            table[i] = text.translate(_TO_LATIN).encode("latin-1")
        except UnicodeEncodeError:  # a character outside the byte alphabet
            table[i] = text.encode("utf-8", "replace")
    for token in added:
        table[token.id] = token.content.encode("utf-8", "replace")
    return table
