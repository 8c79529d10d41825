"""What a request to the Messages API may hold: content in blocks, one table per endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from colibri.server.fields import (
    Field,
    Flag,
    ListOf,
    Number,
    Object,
    Only,
    Stops,
    Table,
    Text,
    TextOr,
    Typed,
    Words,
)  # fmt: skip
from colibri.server.refusal import NO_THREADS
from colibri.server.tables import SHARED, FunctionName


class Blocks(TextOr):
    """Text, or a list of blocks."""

    def __init__(self, tables: Mapping[str, Sequence[Field]]) -> None:
        super().__init__(ListOf(Typed(tables)), "blocks")

    def read(self, value: Any, where: str) -> list[dict[str, Any]]:
        """The blocks; text is one."""
        found = super().read(value, where)
        return [{"type": "text", "text": found}] if isinstance(found, str) else found


_CACHE = Field("cache_control", Object(), "Accepted; prefixes are found without it.")
_TEXT = (
    Field("text", Text(), "The text.", required=True),
    _CACHE,
    Field("citations", Only(([],)), "Not supported."),
)
_THOUGHT = (
    Field("thinking", Text(), "Reasoning, as it was answered.", required=True),
    Field("signature", Text(), "Accepted; nothing is signed."),
)
_USE = (
    Field("id", Text(), "The call's id.", required=True),
    Field("name", FunctionName(), "The tool's name.", required=True),
    Field("input", Object(), "Its arguments.", required=True),
    _CACHE,
    Field("caller", Only(({"type": "direct"},)), "The model is the only one."),
    Field("toolset_name", Only(()), "Not supported."),
)
_TEXTS = Blocks({"text": _TEXT})
_RESULT = (
    Field("tool_use_id", Text(), "Which call it answers.", required=True),
    Field("content", _TEXTS, "What came of it."),
    Field("is_error", Flag(), "The model is told so."),
    _CACHE,
)


def _content(**tables: Sequence[Field]) -> tuple[Field]:
    return (Field("content", Blocks(tables), "What is said.", required=True),)


_MESSAGE = Typed(
    {
        "user": _content(text=_TEXT, tool_result=_RESULT),
        "assistant": _content(text=_TEXT, thinking=_THOUGHT, tool_use=_USE),
        "system": _content(text=_TEXT),
    },
    key="role",
)
_TOOL = (
    Field("name", FunctionName(), "Its name.", required=True),
    Field("description", Text(), "What it does."),
    Field("input_schema", Object(), "Its input, in JSON Schema.", required=True),
    _CACHE,
    Field("strict", Flag(), "The input keeps to the schema, or that is refused."),
    Field("eager_input_streaming", Flag(), "Accepted; text is sent as it is written either way."),
)
_ONE_CALL = Field("disable_parallel_tool_use", Flag(), "The answer ends after its first call.")
_CHOICE = Typed(
    {
        "auto": (_ONE_CALL,),
        "any": (_ONE_CALL,),
        "tool": (Field("name", FunctionName(), "Which one.", required=True), _ONE_CALL),
        "none": (),
    }
)
_DISPLAY = Field(
    "display", Words(("summarized", "omitted")), "Accepted; reasoning is shown as it is written."
)
_THINKING = Typed(
    {
        "enabled": (
            Field("budget_tokens", Number(1, 1 << 24, whole=True, clamp=True), "Accepted only."),
            _DISPLAY,
        ),
        "disabled": (),
        "adaptive": (_DISPLAY,),
    }
)
_EDIT = Typed(
    {
        "clear_thinking_20251015": (
            Field("keep", Only(("all", {"type": "all"})), "All of it.", required=True),
        )
    }
)
_SCHEMA = Field("schema", Object(), "A JSON Schema.", required=True)
_FORMAT = Typed({"json_schema": (_SCHEMA,)})
_OWN = {field.name: field for field in SHARED}

COUNT = (
    _OWN["model"],
    Field("messages", ListOf(_MESSAGE, 1), "The conversation so far.", required=True),
    Field("system", _TEXTS, "Instructions."),
    Field("tools", ListOf(Typed({"custom": _TOOL}, usual="custom")), "What the model may call."),
    Field("tool_choice", _CHOICE, "Whether it may, or must; or the one that it must."),
    Field("thinking", _THINKING, "Whether to reason; adaptive: as the server has it."),
    Field(
        "output_config",
        Table(
            (
                Field("effort", Words(("low", "medium", "high", "xhigh", "max")), "How much."),
                Field("format", _FORMAT, "What the answer must be."),
            )
        ),
        "How much to reason, and in what form to answer.",
    ),
    Field(
        "context_management",
        Table((Field("edits", ListOf(_EDIT), "Reasoning of earlier turns is kept."),)),
        "Not supported, but for keeping all reasoning.",
    ),
    _CACHE,
)
MESSAGES = (
    *COUNT,
    replace(_OWN["max_tokens"], required=True),
    *(_OWN[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stream")),
    Field("stop_sequences", Stops(), "The answer ends before any of these."),
    Field("metadata", Table((Field("user_id", Text(), "As user elsewhere."),)), "Who asks."),
    Field("service_tier", Only(("auto", "standard_only")), "There is one."),
    Field("thread", Only((), NO_THREADS), "Not supported: every request has all messages."),
)
