"""The chat templates of GLM-5, 5.1, 5.2 and 5.3, for model directories that carry none.

Written from the published behaviour: prefix `[gMASK]<sop>` once, no newline after role tokens,
turns simply concatenated, and no end-of-turn token (the next role token ends a turn).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX_TOKENS = ("[gMASK]", "<sop>")
PREFIX = "".join(PREFIX_TOKENS)
VERSIONS = ("5", "5.1", "5.2", "5.3")

_TOOLS_HEAD = """<|system|>
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_TAIL = (
    "</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>"
    "<arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key>"
    "<arg_value>{arg-value-2}</arg_value>...</tool_call>"
)
_REMINDER = (
    "<reminder>You are unable to process this {} because you don't have multi-modal input "
    "ability. Try different methods.</reminder>"
)
_MEDIA = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}


@dataclass(frozen=True)
class GlmTemplate:
    """One conversation's settings. `clear_thinking` None means the version's default."""

    version: str
    thinking: bool = True
    effort: str | None = None
    clear_thinking: bool | None = None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], generate: bool
    ) -> str:
        """The conversation as text. Messages are OpenAI-style; tool arguments are objects."""
        parts = [PREFIX, self._effort_line()]
        if tools:
            parts += [_TOOLS_HEAD, *self._tool_lines(tools), _TOOLS_TAIL]
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        for i, message in enumerate(messages):
            role = message["role"]
            if role in ("system", "user"):
                parts.append(f"<|{role}|>{self._visible(message['content'])}")
            elif role == "assistant":
                parts += self._assistant(message, after_last_user=i > last_user)
            elif role == "tool" and (i == 0 or messages[i - 1]["role"] != "tool"):
                parts += ["<|observation|>", *self._tool_run(messages, i, tools)]
        return "".join(parts) + (self._generation_prompt() if generate else "")

    def _effort_line(self) -> str:
        if self.version in ("5", "5.1") or (self.version == "5.2" and not self.thinking):
            return ""
        known = ("low", "high") if self.version == "5.3" else ("high",)
        effort = self.effort if self.effort in known else "max"
        return f"<|system|>Reasoning Effort: {effort.capitalize()}"

    def _generation_prompt(self) -> str:
        if self.thinking or self.version == "5.3":
            return "<|assistant|><think>"
        closed = "<think></think>" if self.version == "5.2" else "</think>"
        return f"<|assistant|>{closed}"

    def _tool_lines(self, tools: Sequence[Any]) -> Iterable[str]:
        for tool in tools:
            if self.version == "5":
                yield _json(tool) + "\n"
            elif not (self.version == "5.3" and _function(tool).get("defer_loading")):
                yield _signature(tool)

    def _assistant(self, message: Mapping[str, Any], after_last_user: bool) -> Iterable[str]:
        yield "<|assistant|>"
        yield self._reasoning(message.get("reasoning_content"), after_last_user)
        yield self._visible(message["content"]).strip()
        for call in message.get("tool_calls") or []:
            function = _function(call)
            yield f"<tool_call>{function['name']}"
            for key, value in function["arguments"].items():
                text = value if isinstance(value, str) else _json(value)
                yield f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>"
            yield "</tool_call>"

    def _reasoning(self, reasoning: Any, after_last_user: bool) -> str:
        clear = self.clear_thinking
        if clear is None:
            clear = self.version != "5.3"
        keep = (after_last_user or not clear) and isinstance(reasoning, str)
        if self.version in ("5.2", "5.3"):
            return f"<think>{reasoning}</think>" if keep else "<think></think>"
        if keep and reasoning:
            return f"<think>{reasoning.strip()}</think>"
        empty = self.version == "5.1" and after_last_user and self.thinking
        return "<think></think>" if empty else "</think>"

    def _tool_run(
        self, messages: Sequence[Mapping[str, Any]], start: int, tools: Sequence[Any]
    ) -> Iterable[str]:
        """The results of consecutive tool messages; 5.3 puts them in the order of the calls."""
        end = start
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = [result for m in messages[start:end] for result in _results(m)]
        before = messages[start - 1] if start else {}
        calls = before.get("tool_calls") or []
        if self.version == "5.3" and before.get("role") == "assistant":
            results = _in_call_order(results, [_id(call) for call in calls])
        for _, content in results:
            yield self._tool_response(content, tools)

    def _tool_response(self, content: Any, tools: Sequence[Any]) -> str:
        references = _references(content) if self.version == "5.3" else None
        if references is None:
            return f"<tool_response>{self._visible(content)}</tool_response>"
        found = [
            _signature(tool)
            for name in references
            for tool in tools
            if _function(tool).get("name") == name
        ]
        return f"<tool_response><tools>\n{''.join(found)}</tools></tool_response>"

    def _visible(self, content: Any) -> str:
        if isinstance(content, str):
            return content
        return "".join(map(self._part, content)) if isinstance(content, list) else str(content)

    def _part(self, part: Any) -> str:
        if isinstance(part, str):
            return part
        if part.get("type") == "text":
            return part.get("text") or ""
        media = _MEDIA.get(part.get("type")) if self.version == "5.3" else None
        return _REMINDER.format(media) if media else ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _function(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool or a call without its {"type": "function", "function": ...} wrapper."""
    return entry.get("function") or entry


def _signature(tool: Mapping[str, Any]) -> str:
    """One line per tool, keys in order and raw, without the two that only servers read."""
    items = _function(tool).items()
    kept = [(key, value) for key, value in items if key not in ("defer_loading", "strict")]
    return "{" + ", ".join(f'"{key}": {_json(value)}' for key, value in kept) + "}\n"


def _id(entry: Mapping[str, Any]) -> str | None:
    return entry.get("tool_call_id") or entry.get("id")


def _results(message: Mapping[str, Any]) -> list[tuple[str | None, Any]]:
    """A tool message's (id, content): several when its content lists {"output": ...} entries."""
    content = message["content"]
    if isinstance(content, list) and content and _holds(content[0], "output"):
        return [(_id(entry), entry["output"]) for entry in content if _holds(entry, "output")]
    return [(_id(message), content)]


def _in_call_order(
    results: list[tuple[str | None, Any]], calls: list[str | None]
) -> list[tuple[str | None, Any]]:
    """Sorted like the calls when every id on both sides is there once and known; else as given."""
    ids = [i for i, _ in results]
    distinct = all([*ids, *calls]) and len(set(ids)) == len(ids) and len(set(calls)) == len(calls)
    if not distinct or not set(ids) <= set(calls):
        return results
    return sorted(results, key=lambda result: calls.index(result[0]))


def _references(content: Any) -> list[Any] | None:
    """The names in a list of tool references, None when the content is something else."""
    if not isinstance(content, list) or not content:
        return None
    first = content[0]
    if not isinstance(first, Mapping) or first.get("type") != "tool_reference":
        return None
    return [entry.get("name") for entry in content if isinstance(entry, Mapping)]


def _holds(entry: Any, key: str) -> bool:
    return isinstance(entry, Mapping) and key in entry
