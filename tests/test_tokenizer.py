"""Text in, ids out, text back: byte-exact, and markup in plain text stays text."""
# ruff: noqa: RUF001 (look-alike letters are the point)

from __future__ import annotations

import json
import random
import sys
import threading
from types import SimpleNamespace

import pytest
import text_fixtures as fixtures
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.errors import TokenizerError
from colibri.tokenizer import Tokenizer

PIECES = [
    "hello", "Hello", "CAN'T", "I'll", "we've", "it's", " 20", "123", "4567", "3.14159", "(abc",
    "x=1;", "...", "!?", "\n", "\n\n", "\r\n", " ", "  ", "    ", "\t", " \n ", "ďábelské", "北京",
    "日本語テキスト", "Привет", "😀", "👩‍👩‍👧", "e\u0301", "\u00a0", "\u200b", "a_b", "@me",
    "<", ">", "<|", "|>", "</", "[", "]", "<thin", "k>", "//nothink", "\u0000", "\ufeff", "İ", "ſ",
]  # fmt: skip
MARKUP = st.sampled_from([*fixtures.GLM_SPECIAL, *fixtures.GLM_VISIBLE])
NASTY_TEXT = st.lists(st.one_of(MARKUP, st.sampled_from(PIECES), st.text(max_size=5))).map("".join)
BAD_UTF8 = [b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\xe5\x8c"]


@pytest.fixture(scope="module")
def byte_ids(glm) -> list[int]:
    """The id of the single-byte token of every byte."""
    by_bytes = {glm.token_bytes(i): i for i in range(glm.vocab_used)}
    return [by_bytes[bytes([b])] for b in range(256)]


def random_texts(count: int, markup: list[str]) -> list[str]:
    rng = random.Random(20)
    return ["".join(rng.choices(PIECES + markup, k=rng.randrange(1, 16))) for _ in range(count)]


def edited(directory, tmp_path, change) -> Tokenizer:
    """The tokenizer in `directory` after `change` edited its tokenizer.json."""
    raw = fixtures.read(directory)
    raw = change(raw) or raw
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    return Tokenizer.load(tmp_path)


@pytest.mark.parametrize("which", ["glm", "demo"])
def test_template_ids_are_the_librarys(which, tmp_path):
    """encode_template gives the `tokenizers` library's ids on 1,500 texts full of markup."""
    glm = fixtures.write_glm_like(tmp_path)
    directory = glm if which == "glm" else fixtures.demo_directory()
    ours = Tokenizer.load(directory)
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in random_texts(1500, list(ours.added)):
        assert ours.encode_template(text) == library.encode(text, add_special_tokens=False).ids


def test_big_tokenizer_ids_are_the_librarys():
    """The 129k tokenizer agrees too: with markup as template, without markup as plain text."""
    ours, library = fixtures.big_tokenizer(), fixtures.big_reference()
    markup = ["<think>", "</think>", "<｜User｜>", "<｜image｜>", "｜DSML｜", "<｜/table>｜"]
    for text in random_texts(1500, markup):
        assert ours.encode_template(text) == library.encode(text, add_special_tokens=False).ids
    for text in random_texts(500, []):
        text = text.replace("<", "(")  # pieces may join to <think>
        assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_added_token_flags_act_as_in_the_library(flag, tmp_path):
    """lstrip, rstrip, single_word and normalized mean what they mean in the library."""
    raw = fixtures.read(fixtures.write_glm_like(tmp_path))
    for token in raw["added_tokens"][::2]:
        token[flag] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    ours = Tokenizer.load(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in random_texts(800, list(ours.added) * 3):
        assert ours.encode_template(text) == library.encode(text, add_special_tokens=False).ids


@settings(max_examples=60, deadline=None)
@given(text=NASTY_TEXT)
def test_plain_text_never_holds_control_tokens(glm, text):
    """encode keeps markup as text: no added id comes out, and decoding gives the text back."""
    ids = glm.encode(text)
    assert not {token.id for token in glm.added.values()} & set(ids)
    assert glm.decode(ids) == text


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(NASTY_TEXT, st.sampled_from(["<think>", "<｜User｜> hi", "｜DSML｜"])))
def test_big_tokenizer_keeps_markup_as_text(text):
    """The same for a tokenizer whose special=false tokens its library would let through."""
    big = fixtures.big_tokenizer()
    ids = big.encode(text)
    assert not {token.id for token in big.added.values()} & set(ids)
    assert big.decode(ids) == text


def test_demo_tokens_listed_in_the_vocabulary_stay_out_of_reach(demo):
    """Added tokens that are also vocabulary entries cannot be reached from plain text either."""
    for token in demo.added.values():
        assert token.id not in demo.encode(f"x{token.content}.{token.content}")
        assert demo.encode_template(f".{token.content}")[-1] == token.id


def test_vocabulary_entry_of_an_added_token_is_not_taken_whole(tmp_path):
    """With ignore_merges, a pre-token equal to an added token still becomes ordinary pieces."""

    def list_nothink(raw):
        token = next(t for t in raw["added_tokens"] if t["content"] == "/nothink")
        raw["model"]["vocab"]["/nothink"] = token["id"]

    tok = edited(fixtures.write_glm_like(tmp_path), tmp_path, list_nothink)
    assert tok.id_of("/nothink") not in tok.encode("/nothink")
    assert tok.decode(tok.encode("/nothink")) == "/nothink"


def test_added_tokens_that_text_is_made_of_stay_in_the_vocabulary(tmp_path):
    """One that merges make, or that is a single byte's, cannot be left out; all text still encodes.

    The library refuses a vocabulary without what its merges make.
    """

    def change(raw):
        raw["model"]["vocab"]["ab"] = number = len(raw["model"]["vocab"])
        raw["model"]["merges"] = ["a b"]
        ids = {"ab": number, "x": raw["model"]["vocab"]["x"]}
        return raw | {"added_tokens": [{"id": i, "content": c} for c, i in ids.items()]}

    tokenizer = edited(fixtures.write_bytes(tmp_path), tmp_path, change)
    assert tokenizer.decode(tokenizer.encode("cabx")) == "cabx"


def test_digits_come_in_groups_of_three(glm, demo):
    """No token of "1234567" spans more than three digits, and groups start at the left."""
    for tok in (glm, demo, fixtures.big_tokenizer()):
        ids = tok.encode("1234567")
        ends = [len(tok.decode(ids[: n + 1])) for n in range(len(ids))]
        assert {3, 6, 7} <= set(ends)


def test_nothing_is_prepended(tmp_path):
    """A BOS-adding post-processor, truncation and padding in tokenizer.json have no effect."""
    directory = fixtures.write_glm_like(tmp_path)
    plain = Tokenizer.load(directory).encode("hello")

    def add_bos(raw):
        sop = next(t["id"] for t in raw["added_tokens"] if t["content"] == "<sop>")
        bos = {"SpecialToken": {"id": "<sop>", "type_id": 0}}
        single = [bos, {"Sequence": {"id": "A", "type_id": 0}}]
        raw["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single,
            "special_tokens": {"<sop>": {"id": "<sop>", "ids": [sop], "tokens": ["<sop>"]}},
        }
        raw["truncation"] = {
            "direction": "Right",
            "max_length": 1,
            "strategy": "LongestFirst",
            "stride": 0,
        }

    tok = edited(directory, tmp_path, add_bos)
    assert tok.encode("hello") == tok.encode_template("hello") == plain
    assert len(tok.encode("hello world, this is long")) > 1
    assert tok.encode("") == tok.encode_template("") == []


def test_lone_surrogates_do_not_stop_encoding(glm):
    """Halves of a surrogate pair are joined, lone ones become U+FFFD."""
    assert glm.decode(glm.encode("a\ud83d\ude00b")) == "a😀b"
    assert glm.decode(glm.encode("a\ud83db")) == "a\ufffdb"
    assert glm.decode(glm.encode_template("<think>\udcff")) == "<think>\ufffd"


def test_other_threads_run_while_text_is_encoded(demo, monkeypatch):
    """A long text stops nobody: a waiting thread gets its turn though none is taken from us."""
    begin, seen = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: begin.wait() and seen.set(), daemon=True)
    other.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        begin.set()
        for _ in range(20):
            demo.encode("some words and 12345 numbers; " * 5000)
            if seen.is_set():
                break
        there = seen.is_set()
    finally:
        sys.setswitchinterval(before)
    assert there


def test_ids_do_not_depend_on_the_librarys_version(demo, monkeypatch):
    """The fast batch, the older batch and a single text give the same ids."""
    core = demo._core
    texts = random_texts(500, list(demo.added))
    fast = [demo.encode(text) for text in texts]
    monkeypatch.setattr(demo, "_core", SimpleNamespace(encode_batch=core.encode_batch))
    assert [demo.encode(text) for text in texts] == fast
    assert [core.encode(text, add_special_tokens=False).ids for text in texts] == fast


class Full(Exception):
    """No room."""


def full(count: int, nbytes: int) -> None:
    """Refuse everything, with the numbers."""
    raise Full(count, nbytes)


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(demo, monkeypatch):
    """`room` hears the size of a long text and may refuse before any of it is encoded."""
    text = "word " * 20_000
    count = len(demo.encode(text))
    monkeypatch.setattr(demo, "_core", None)
    for refused in (
        lambda: demo.encode_pieces([7, text], full),
        lambda: demo.encode_template("<|user|>" + text, full),
    ):
        with pytest.raises(Full) as caught:
            refused()
        least, nbytes = caught.value.args
        assert nbytes == len(text) and len(text) // 15 < least <= count + 1


@settings(max_examples=60, deadline=None)
@given(text=NASTY_TEXT)
def test_no_text_has_fewer_tokens_than_are_said_to_be_least(glm, demo, text):
    """What `room` hears is never more than the tokens there are, runs of any byte included."""
    for tok in (glm, demo, fixtures.big_tokenizer()):
        for longer in (text, text * 20, " " * len(text) * 7):
            assert tok._least(longer.encode()) <= len(tok.encode(longer))


def _replacing(raw):
    raw["normalizer"] = {"type": "Replace", "pattern": {"String": "word "}, "content": ""}


def _removing(raw):
    words = {"type": "Split", "pattern": {"String": "word "}, "invert": False}
    raw["pre_tokenizer"]["pretokenizers"].insert(0, {**words, "behavior": "Removed"})


@pytest.mark.parametrize("change", [_replacing, _removing])
def test_text_that_may_vanish_is_not_counted(change, tmp_path):
    """A tokenizer that removes text may fit any text: none is refused unseen."""
    tok = edited(fixtures.write_glm_like(tmp_path), tmp_path, change)
    heard = []
    ids = tok.encode_pieces(["word " * 20_000], lambda *sizes: heard.append(sizes))
    assert (ids, heard) == ([], [(0, 100_000)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_streaming_equals_one_shot_decoding(glm, byte_ids, data):
    """Any id sequence, byte halves, specials and padding rows included, streams to its decode."""
    byte = st.sampled_from(byte_ids)
    rare = st.integers(-3, glm.vocab_used + 5)
    broken = st.sampled_from(BAD_UTF8).map(lambda raw: [byte_ids[b] for b in raw])
    whole = NASTY_TEXT.map(lambda text: [byte_ids[b] for b in text.encode("utf-8")])
    single = st.one_of(byte, rare).map(lambda i: [i])
    parts = data.draw(st.lists(st.one_of(single, broken, whole)))
    ids = [i for part in parts for i in part]
    for show in (False, True):
        stream = glm.stream(show)
        pieces = [stream.push(i) for i in ids] + [stream.finish()]
        assert "".join(pieces) == glm.decode(ids, show)
        joined = b"".join(glm.token_bytes(i, show) for i in ids)
        assert "".join(pieces) == joined.decode("utf-8", "replace")


@pytest.mark.parametrize("char", ["😀", "北", "ď"])
def test_half_a_character_is_held_back(glm, byte_ids, char):
    """The bytes of a character give nothing until the last one, then the character."""
    stream = glm.stream()
    shown = [stream.push(byte_ids[b]) for b in f'{{"{char}"}}'.encode()]
    assert shown == ["{", '"', *[""] * (len(char.encode()) - 1), char, '"', "}"]
    assert stream.finish() == ""


def test_bad_bytes_are_replaced_as_soon_as_they_are_known(glm, byte_ids):
    """A byte that can never be UTF-8 shows at once; a broken lead byte when the next one comes."""
    stream = glm.stream()
    assert stream.push(byte_ids[0xFF]) == "\ufffd"
    assert stream.push(byte_ids[0xE5]) == ""
    assert stream.push(byte_ids[ord("a")]) == "\ufffda"


@pytest.mark.parametrize("raw", BAD_UTF8)
def test_invalid_utf8_is_replaced_and_generation_goes_on(glm, byte_ids, raw):
    """Bytes that are never UTF-8 become U+FFFD, text after them survives, JSON stays valid."""
    text = glm.decode([byte_ids[b] for b in raw + b"ok"])
    assert text == raw.decode("utf-8", "replace") + "ok"
    assert json.loads(json.dumps(text).encode()) == text


def test_stream_cut_inside_a_character(glm, byte_ids):
    """An answer that ends in half an emoji ends in U+FFFD, and the decoder is ready again."""
    stream = glm.stream()
    assert stream.push(byte_ids[0xF0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(byte_ids[ord("a")]) == "a"


def test_special_tokens_are_hidden_and_others_shown(glm):
    """special=true tokens are silent unless asked for; <think> and <tool_call> are visible."""
    ids = glm.encode_template("<|user|>hi<think></think><tool_call>")
    assert glm.decode(ids) == "hi<think></think><tool_call>"
    assert glm.decode(ids, show_special=True) == "<|user|>hi<think></think><tool_call>"


def test_padding_rows_decode_as_nothing(glm):
    """Ids at or beyond vocab_used, and negative ones, stand for no bytes."""
    assert glm.vocab_used == 1 + max(t.id for t in glm.added.values())
    assert glm.decode([glm.vocab_used, 10**9, -1]) == ""
    assert glm.stream().push(glm.vocab_used) == ""


def test_eos_ids_by_name(glm, tmp_path):
    """The three GLM stops are found by name; a tokenizer without them has none."""
    assert glm.eos_ids == {glm.id_of(n) for n in ("<|endoftext|>", "<|user|>", "<|observation|>")}
    bare = edited(
        fixtures.write_glm_like(tmp_path), tmp_path, lambda raw: raw | {"added_tokens": []}
    )
    assert bare.eos_ids == frozenset() and bare.id_of("<|user|>") is None


def test_demo_tokenizer_round_trips(demo):
    """The demo's tokenizer loads, has GLM's stops 0, 7 and 9, and gives text back."""
    assert demo.eos_ids == {0, 7, 9} and demo.vocab_used == 2048
    for text in fixtures.TEXTS:
        assert demo.decode(demo.encode(text)) == text


def test_missing_file_is_named(tmp_path):
    """No tokenizer.json: the error names the file and says where to get it."""
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing.*Copy"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\ufeff{}", '{"model": 3}', '{"model": {"vocab": 1}}']
)
def test_broken_json_is_an_error(text, tmp_path):
    """Truncated, mistyped or empty files raise TokenizerError, nothing else."""
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def _set(path, value):
    def change(raw):
        node = raw
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set(["model", "type"], "Unigram"), "Unigram; colibri reads byte-level BPE"),
        (_set(["model", "type"], "WordPiece"), "WordPiece"),
        (_set(["model", "byte_fallback"], True), "without a ByteLevel"),
        (_set(["pre_tokenizer"], {"type": "Whitespace"}), "without a ByteLevel"),
        (_set(["pre_tokenizer"], None), "without a ByteLevel"),
        (_set(["model", "vocab", "a"], "x"), "not an integer"),
        (_set(["model", "vocab", "a"], 1 << 40), "must lie in"),
        (_set(["model", "vocab", "a"], -1), "must lie in"),
        (_set(["model", "merges"], [["zz", "qq"]]), "library refuses"),
        (_set(["added_tokens"], 1), "added_tokens is int, not a list"),
        (_set(["added_tokens", 0, "content"], ""), "no usable id"),
        (_set(["added_tokens", 0, "id"], None), "no usable id"),
        (lambda raw: raw["model"]["vocab"].pop("a"), "no token for the bytes 61"),
    ],
)
def test_unusable_tokenizers_are_refused(change, reason, tmp_path):
    """Each kind of unusable tokenizer gives an error that says what is wrong."""

    def apply(raw):
        change(raw)

    with pytest.raises(TokenizerError, match=reason):
        edited(fixtures.write_glm_like(tmp_path), tmp_path, apply)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set(["model", "merges", 3], 7), r"model\.merges\[3\] is 7, not two strings"),
        (_set(["model", "merges", 3], ["a", 7]), r'merges\[3\] is \["a", 7\], not two strings'),
        (_set(["model", "merges"], 1), r"model\.merges is int, not a list"),
    ],
)
def test_merges_of_another_kind_are_refused(change, reason, tmp_path):
    """The same where merges are looked through, as added tokens are also in the vocabulary."""
    with pytest.raises(TokenizerError, match=reason):
        edited(fixtures.demo_directory(), tmp_path, change)
