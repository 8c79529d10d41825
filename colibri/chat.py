"""Conversations to token ids.

What people, tools and models wrote can never become control tokens. Before a template runs, every
place in such content where an added token's text appears, or could be completed by what stands
beside it, gets a sentinel: a noncharacter that occurs nowhere else. The rendered text is cut at its
added tokens, the sentinels are taken out, and what lies between is encoded as plain text. So only
markup the template itself wrote becomes control tokens.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from colibri import glm_template
from colibri.errors import ConfigError, UsageError
from colibri.glm_template import PREFIX, PREFIX_TOKENS, GlmTemplate
from colibri.jinja_template import SENTINEL, compile_template
from colibri.strictjson import read_object
from colibri.tokenizer import Room, Tokenizer

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
DEFAULT_VERSION = "5.2"
_POSITIONS_5_1 = 202_752  # GLM-5 and 5.1; later versions have 1,048,576
# Noncharacters: Unicode promises never to assign them, so text has no use for them.
_SENTINELS = [chr(c) for c in (*range(0xFDD0, 0xFDF0), 0xFFFE, 0x1FFFE, 0x2FFFE, 0x3FFFE)]


class Template:
    """How a model wants conversations written. Make one with `load` or `builtin`.

    `name` says where it comes from; `has_thinking_switch`, `has_effort` and `has_tools` say whether
    `thinking`, `effort` and `tools` can change anything. Rendering reads no clock unless the
    template asks for it.
    """

    def __init__(self, name: str, source: str, render: Callable[[dict[str, Any]], str]) -> None:
        self.name = name
        self.has_thinking_switch = "enable_thinking" in source
        self.has_effort = "reasoning_effort" in source
        self.has_tools = "tools" in source
        self._source = source
        self._render = render

    @classmethod
    def load(cls, directory: Path | str) -> Template:
        """The directory's chat_template.jinja, else tokenizer_config.json's, else GLM's own, of the
        version that config.json hints at."""
        directory = Path(directory)
        config = read_object(directory / "tokenizer_config.json", ConfigError) or {}
        path = directory / "chat_template.jinja"
        if path.exists():
            sources: Any = _read_text(path)
        else:
            path = directory / "tokenizer_config.json"
            sources = config.get("chat_template")
        if sources is None:
            return cls.builtin(_hinted_version(directory))
        named = _named_templates(sources, path)
        return cls.from_jinja(named, str(path), _special_texts(config))

    @classmethod
    def from_jinja(
        cls, named: Mapping[str, str], where: str, variables: Mapping[str, str]
    ) -> Template:
        """Templates by name: "default", and optionally "tool_use" for conversations with tools."""
        compiled = {name: compile_template(source, where) for name, source in named.items()}

        def render(context: dict[str, Any]) -> str:
            tools = context["tools"]
            name = "tool_use" if tools and "tool_use" in compiled else "default"
            return compiled[name]({**variables, **context, "tools": tools or None})

        return cls(where, "\n".join(named.values()), render)

    @classmethod
    def builtin(cls, version: str = DEFAULT_VERSION) -> Template:
        """GLM's own template of one version."""
        if version not in glm_template.VERSIONS:
            known = ", ".join(glm_template.VERSIONS)
            raise UsageError(f"no built-in chat template for GLM-{version}; there are: {known}")

        def render(context: dict[str, Any]) -> str:
            template = GlmTemplate(
                version,
                thinking=context.get("enable_thinking", True),
                effort=context.get("reasoning_effort"),
                clear_thinking=context.get("clear_thinking"),
            )
            generate = context["add_generation_prompt"]
            return template.render(context["messages"], context["tools"], generate)

        switches = {"5.2": "enable_thinking reasoning_effort", "5.3": "reasoning_effort"}
        # What decides how assistant history is read (see `_split_reasoning`).
        history = "tools reasoning_content </think>"
        newlines = "" if version in switches else r"rstrip('\n')"
        source = " ".join((switches.get(version, "enable_thinking"), history, newlines))
        return cls(f"built-in GLM-{version}", source, render)

    def render(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        thinking: bool | None = None,
        effort: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        room: Room | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, its prefix included once.

        messages: OpenAI-style mappings (role, content, reasoning_content, tool_calls,
        tool_call_id). thinking and effort reach the template as enable_thinking and
        reasoning_effort, None leaves its default; other options (add_generation_prompt, true
        unless given; clear_thinking ...) reach it by their own names. `room`: as encode_pieces has
        it.
        Raises UsageError for messages no template could take.
        """
        context = self._context(messages, thinking, effort, tools, options)
        guard = _Guard(tokenizer, _free_sentinel(context, self._source))
        return guard.encode(self._render(guard.protect(context)), room)

    def text(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        effort: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> str:
        """The rendered conversation as text, for people to read; arguments as in `render`."""
        return self._render(self._context(messages, thinking, effort, tools, options))

    def _context(
        self,
        messages: Sequence[Message],
        thinking: bool | None,
        effort: str | None,
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        # Two names of one switch: GLM's templates read the first, others the second.
        switches = {"enable_thinking": thinking, "thinking": thinking, "reasoning_effort": effort}
        return {
            "add_generation_prompt": True,
            **{name: value for name, value in {**switches, **options}.items() if value is not None},
            "messages": [self._message(m, i) for i, m in enumerate(messages)],
            "tools": [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
        }

    def _message(self, message: Message, index: int) -> dict[str, Any]:
        where = f"messages[{index}]"
        checked = _plain(message, where)
        if not isinstance(checked, dict) or checked.get("role") not in ROLES:
            role = checked.get("role") if isinstance(checked, dict) else checked
            raise UsageError(f"{where} has role {role!r}; expected one of {', '.join(ROLES)}")
        if checked["role"] == "developer" and "developer" not in self._source:
            checked["role"] = "system"
        checked["content"] = _content(checked.get("content"), where)
        calls = checked.get("tool_calls") or []
        if not isinstance(calls, list):
            raise UsageError(f"{where}.tool_calls is not a list")
        for i, call in enumerate(calls):
            _parse_arguments(call, f"{where}.tool_calls[{i}]")
        if checked["role"] == "assistant":
            self._split_reasoning(checked)
        return checked

    def _split_reasoning(self, message: dict[str, Any]) -> None:
        """Do here what the template would do to raw `<think>..</think>` in an answer.

        The template cannot: guarded content shows it no markup. Pass reasoning_content (may be
        "") to keep a literal </think> in the answer.
        """
        content = message["content"]
        parses = "</think>" in self._source and "reasoning_content" in self._source
        given = isinstance(message.get("reasoning_content"), str)
        if given or not parses or not isinstance(content, str) or "</think>" not in content:
            return
        newline = "\n" if r"rstrip('\n')" in self._source else ""
        before, after = content.split("</think>", 1)[0], content.rsplit("</think>", 1)[1]
        reasoning = before.rstrip(newline).rsplit("<think>", 1)[-1]
        message["reasoning_content"] = reasoning.lstrip(newline)
        message["content"] = after.lstrip(newline)


class _Markup:
    """Tables of a tokenizer's added tokens for _Guard.

    `occurrence` finds whole ones, `heads` and `tails` are their proper beginnings and endings, and
    `all` is searched for a text that is the middle of one.
    """

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self.all = "\0".join(tokens)
        starts = {
            re.escape(first): "|".join(re.escape(t[1:]) for t in tokens if t[0] == first)
            for first in {t[0] for t in tokens}
        }
        # A match consumes one character, the rest is a lookahead: occurrences may overlap.
        either = "|".join(f"{first}(?={rest})" for first, rest in starts.items())
        self.occurrence = re.compile(either) if tokens else None
        self.heads = {t[:n] for t in tokens for n in range(1, len(t))}
        self.tails = {t[n:] for t in tokens for n in range(1, len(t))}
        self.longest = max(map(len, tokens), default=0)


_markup = functools.lru_cache(maxsize=8)(_Markup)


class _Guard:
    """Keeps content from forming added tokens, and takes the guard out again when encoding."""

    def __init__(self, tokenizer: Tokenizer, sentinel: str) -> None:
        self._tokenizer = tokenizer
        self._markup = _markup(tuple(t for t in tokenizer.added if len(t) > 1))
        self._sentinel = sentinel

    def protect(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a template's context with all content guarded."""
        guarded = {key: self._walk(value, key) for key, value in context.items()}
        return {**guarded, SENTINEL: self._sentinel}

    def _walk(self, node: Any, key: str = "") -> Any:
        if isinstance(node, str):
            # A template may build markup from a role or a type, as in '<|' + role + '|>'.
            return self.text(node, whole=key not in ("role", "type"))
        if isinstance(node, dict):
            # Argument names are content; other keys are names the template looks up.
            keys_are_content = key == "arguments"
            return {self.text(k, whole=keys_are_content): self._walk(v, k) for k, v in node.items()}
        if isinstance(node, list):
            return [self._walk(item, key) for item in node]
        return node

    def text(self, text: str, whole: bool = True) -> str:
        """Put the sentinel wherever an added token could reach into this text.

        Inside: full occurrences. At the ends: a token's beginning or ending that a neighbour
        could complete. `whole`: a text that is itself the middle of a token.
        """
        core = text.strip()
        markup = self._markup
        if markup.occurrence is None or not core:
            return text
        cuts = {match.start() + 1 for match in markup.occurrence.finditer(core)}
        for n in range(1, min(markup.longest, len(core) + 1)):
            if core[-n:] in markup.heads:
                cuts.add(len(core) - n + 1)
            if core[:n] in markup.tails:
                cuts.add(n - 1)
        if whole and core in markup.all:
            cuts.add(0)
        start = text.index(core[0])
        bounds = [0, *sorted(start + cut for cut in cuts), len(text)]
        return self._sentinel.join(text[a:b] for a, b in itertools.pairwise(bounds))

    def encode(self, rendered: str, room: Room | None = None) -> list[int]:
        """Ids of rendered text: added tokens as such, all between them as plain text."""
        tokenizer = self._tokenizer
        pieces: list[str | int] = []
        pending = ""
        for piece in tokenizer.split_markup(rendered):
            if isinstance(piece, str):
                pending += piece.replace(self._sentinel, "")
                continue
            text = tokenizer.token_bytes(piece, show_special=True).decode("utf-8")
            if len(text) == 1:  # too short to guard, so never trusted
                pending += text
                continue
            pieces += [pending, piece]
            pending = ""
        return tokenizer.encode_pieces([*pieces, pending], room)


def raw_prompt(text: str, tokenizer: Tokenizer, room: Room | None = None) -> list[int]:
    """A prompt to be continued without a template, GLM's prefix `[gMASK]<sop>` once before it.

    Text that begins with the prefix itself is a whole prompt: its markup is markup, nothing is
    added. Other text is plain. A tokenizer without the two prefix tokens gets no prefix. `room`: as
    encode_pieces has it.
    """
    if text.startswith(PREFIX):
        return tokenizer.encode_template(text, room)
    known = all(tokenizer.id_of(token) is not None for token in PREFIX_TOKENS)
    prefix = tokenizer.encode_template(PREFIX) if known else []
    return tokenizer.encode_pieces([*prefix, text], room)


def opens_thinking(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt ends inside a thinking block, so that the answer starts as reasoning."""
    opening, closing = tokenizer.id_of("<think>"), tokenizer.id_of("</think>")
    last = next((i for i in reversed(ids) if i in (opening, closing)), None)
    return last is not None and last == opening


def adopt(known: Sequence[int], rendered: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """`rendered` with its beginning spelled as `known` spells it, so that a cache still fits.

    A model may write a text in other tokens than encoding gives. Run by run between added tokens,
    where the bytes are the same, known's ids are taken; from the first difference on, rendered's.
    """
    controls = {token.id for token in tokenizer.added.values()}
    adopted: list[int] = []
    at = 0
    for (ours, our_end), (theirs, their_end) in zip(
        _runs(known, controls), _runs(rendered, controls), strict=False
    ):
        if _spelling(ours, tokenizer) != _spelling(theirs, tokenizer):
            break
        adopted += ours
        at += len(theirs)
        if our_end is None or our_end != their_end:
            break
        adopted.append(our_end)
        at += 1
    return adopted + list(rendered[at:])


def _runs(ids: Sequence[int], controls: set[int]) -> Iterator[tuple[list[int], int | None]]:
    run: list[int] = []
    for token in ids:
        if token in controls:
            yield run, token
            run = []
        else:
            run.append(token)
    yield run, None


def _spelling(run: Iterable[int], tokenizer: Tokenizer) -> bytes:
    return b"".join(map(tokenizer.token_bytes, run))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Restore it from the model's repository, "
            "or remove it to use the built-in template."
        ) from None


def _hinted_version(directory: Path) -> str:
    config = read_object(directory / "config.json", ConfigError) or {}
    positions = config.get("max_position_embeddings")
    return "5.1" if positions == _POSITIONS_5_1 else DEFAULT_VERSION


def _named_templates(sources: Any, path: Path) -> dict[str, str]:
    if isinstance(sources, str):
        return {"default": sources}
    try:
        named = {entry["name"]: entry["template"] for entry in sources}
    except (TypeError, KeyError):
        named = {}
    if "default" not in named or not all(isinstance(t, str) for t in named.values()):
        raise ConfigError(
            f"{path}: chat_template must be a string, or a list of {{name, template}} with one "
            'named "default". Restore the file from the model\'s repository.'
        )
    return named


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like from tokenizer_config.json, as templates expect them."""
    texts = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[name] = text
    return texts


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON types only; anything else is the caller's mistake."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    raise UsageError(f"{where} is a {type(value).__name__}; expected text, numbers, lists, objects")


def _content(content: Any, where: str) -> str | list[Any]:
    """None becomes empty text, a list of texts one text; lists with media stay as they are."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else None
    if parts is None or not all(isinstance(part, (str, dict)) for part in parts):
        raise UsageError(f"{where}.content is neither text nor a list of content parts")
    texts = [part if isinstance(part, str) else part.get("text") for part in parts]
    plain = all(isinstance(part, str) or part.get("type") == "text" for part in parts)
    if plain and all(isinstance(text, str) for text in texts):
        return "".join(texts)
    return parts


def _parse_arguments(call: Any, where: str) -> None:
    """Templates walk arguments as an object; clients send them as its JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where} has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}.arguments is not valid JSON: {error}") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise UsageError(f"{where}.arguments must be an object, not {type(arguments).__name__}")
    function["arguments"] = arguments


def _free_sentinel(context: Mapping[str, Any], source: str) -> str:
    """A noncharacter that occurs neither in the content nor in the template, escaped or not."""
    everything = (json.dumps(context, ensure_ascii=False) + source).lower()
    for sentinel in _SENTINELS:
        if sentinel not in everything and json.dumps(sentinel)[1:-1].lower() not in everything:
            return sentinel
    raise UsageError("the conversation uses every Unicode noncharacter; remove some of them")
