"""What a request to the Responses API may hold: a conversation in items, one table per endpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colibri.server.fields import (
    Field,
    Flag,
    Kind,
    ListOf,
    Number,
    Object,
    Only,
    Table,
    Text,
    TextOr,
    Typed,
    Words,
    wrong,
)  # fmt: skip
from colibri.server.tables import CHAT, CHOICES, EFFORTS, FUNCTION, FunctionName
from colibri.server.tools import mended

RESPONSES = "/v1/responses"
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
_HOSTED = (
    "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation",
    "mcp", "computer", "computer_use_preview", "tool_search",
)  # fmt: skip
_CLIENTS = ("custom", "shell", "local_shell", "apply_patch")


class Parts(TextOr):
    """Text, or a list of parts that are text."""

    def __init__(self, tables: Mapping[str, Sequence[Field]]) -> None:
        super().__init__(ListOf(Typed(tables)), "parts")

    def read(self, value: Any, where: str) -> str:
        """The text of all parts."""
        parts = super().read(value, where)
        if isinstance(parts, str):
            return parts
        return "".join(part["refusal" if part["type"] == "refusal" else "text"] for part in parts)


class Items(TextOr):
    """What the user says, or a list of items."""

    def __init__(self, item: Typed) -> None:
        super().__init__(ListOf(item, 1), "items")

    def read(self, value: Any, where: str) -> list[dict[str, Any]]:
        """The items; text is one."""
        found = super().read(value, where)
        said = {"type": "message", "role": "user", "content": found}
        return [said] if isinstance(found, str) else found


@dataclass(frozen=True)
class Arguments:
    """The text of a JSON object, which may have broken off."""

    def read(self, value: Any, where: str) -> str:
        """The text, as it is."""
        text = Text().read(value, where)
        try:
            fine = not text.strip() or isinstance(json.loads(mended(text)), dict)
        except (ValueError, RecursionError):
            fine = False
        if not fine:
            raise wrong(where, value, "the text of a JSON object")
        return text

    def schema(self) -> dict[str, Any]:
        """string."""
        return Text().schema()


@dataclass(frozen=True)
class WordOr:
    """One of a few words, or an object."""

    words: tuple[str, ...]
    object: Kind

    def read(self, value: Any, where: str) -> Any:
        """str or dict."""
        kind = self.object if isinstance(value, dict) else Words(self.words)
        return kind.read(value, where)

    def schema(self) -> dict[str, Any]:
        """enum or object."""
        return {"anyOf": [Words(self.words).schema(), self.object.schema()]}


# ---- input --------------------------------------------------------------------------------------

_ID = Field("id", Text(), "Accepted, as it was answered; nothing is stored by it.")
_STATUS = Field("status", Text(), "Accepted, as it was answered.")
_DIRECT = Field("caller", Only(({"type": "direct"},)), "The model is the only one.")
_NOT_ASYNC = Field("async", Only((False,)), "Not supported.")
_NAMESPACE = Field("namespace", FunctionName(), "The namespace that the function is in.")
_TEXT = Field("text", Text(), "The text.", required=True)
_CACHE = Field("prompt_cache_breakpoint", Object(), "Accepted; prefixes are found without it.")
_INPUT = {"input_text": (_TEXT, _CACHE)}
_OUTPUT = (
    _TEXT,
    Field("annotations", ListOf(Object()), "Accepted, as they were answered."),
    Field("logprobs", ListOf(Object()), "Accepted, as they were answered."),
    Field("parsed", Object(), "Accepted; text is what counts."),  # added by OpenAI's own client
)
_REFUSAL = (Field("refusal", Text(), "The text.", required=True),)
_SAID = Parts({**_INPUT, "output_text": _OUTPUT, "refusal": _REFUSAL})
_MESSAGE = (
    Field(
        "role", Words(("user", "assistant", "system", "developer")), "Who speaks.", required=True
    ),
    Field("content", _SAID, "What is said.", required=True),
    _ID,
    _STATUS,
    Field("phase", Text(), "Accepted, as it was answered."),
)
_REASONING = (
    Field("content", Parts({"reasoning_text": (_TEXT,)}), "Reasoning, as it was answered."),
    Field("summary", Parts({"summary_text": (_TEXT,)}), "Counts where nothing else is."),
    Field("encrypted_content", Text(), "The same, where content is left out; others' is no use."),
    _ID,
    _STATUS,
)
_CALL = (
    Field("call_id", Text(), "Which call it is.", required=True),
    Field("name", FunctionName(), "The function's name.", required=True),
    Field("arguments", Arguments(), "Its arguments: a JSON object, as text.", required=True),
    _NAMESPACE,
    _ID,
    _STATUS,
    _DIRECT,
    _NOT_ASYNC,
    Field("parsed_arguments", Object(), "Accepted; arguments are what counts."),
)
_RESULT = (
    Field("call_id", Text(), "Which call it answers.", required=True),
    Field("output", Parts(_INPUT), "What came of it.", required=True),
    Field("name", FunctionName(), "Accepted; call_id is what counts."),
    _NAMESPACE,
    _ID,
    _STATUS,
    _DIRECT,
)
_ITEM = Typed(
    {
        "message": _MESSAGE,
        "reasoning": _REASONING,
        "function_call": _CALL,
        "function_call_output": _RESULT,
    },
    usual="message",
    advice={
        "item_reference": "nothing is stored, so send the item itself, as clients do that are "
        "told store: false"
    },
)

# ---- tools --------------------------------------------------------------------------------------

_FUNCTION = (
    *FUNCTION,
    Field("output_schema", Object(), "Accepted; nothing is done with it."),
    Field("allowed_callers", Only((["direct"], [])), "The model is the only one."),
    Field("defer_loading", Only((False,)), "Not supported."),
    _NOT_ASYNC,
)
_SPACE = (
    Field(
        "name",
        FunctionName(),
        "Its name, before a dot and the function's for the model.",
        required=True,
    ),
    Field("description", Text(), "Accepted; the functions' own reach the model."),
    Field("tools", ListOf(Typed({"function": _FUNCTION})), "Its functions.", required=True),
)
_TOOL = Typed(
    {"function": _FUNCTION, "namespace": _SPACE},
    advice={
        **dict.fromkeys(_HOSTED, "it would have to run here, so leave it out"),
        **dict.fromkeys(_CLIENTS, "leave it out, or offer a function that does the same"),
    },
)
_NAMED = (Field("name", FunctionName(), "Which one.", required=True), _NAMESPACE)
_ALLOWED = (
    Field("mode", Words(("auto", "required")), "Whether one must be called.", required=True),
    Field("tools", ListOf(Typed({"function": _NAMED}), 1), "Those that may.", required=True),
)

# ---- all of it ----------------------------------------------------------------------------------

_FORMAT = Typed(
    {
        "text": (),
        "json_object": (),
        "json_schema": (
            Field("name", Text(), "Accepted; nothing is done with it."),
            Field("description", Text(), "Accepted; nothing is done with it."),
            Field("schema", Object(), "A JSON Schema.", required=True),
            Field("strict", Flag(), "Refuse a schema that cannot be kept to whole."),
        ),
    }
)
_SUMMARY = Words(("auto", "concise", "detailed"))
_EFFORT = (
    Field("effort", Words(EFFORTS), "How much; none: not at all."),
    Field("context", Words(("auto", "current_turn", "all_turns")), "Which reasoning is kept."),
    Field("summary", _SUMMARY, "Accepted; reasoning is shown as it is written."),
    Field("generate_summary", _SUMMARY, "Accepted, as summary."),
    Field("mode", Only(("standard",)), "There is one."),
)
_OWN = {field.name: field for field in CHAT}
_WHOLE = "nothing is stored, so send all items as input"

COUNT = (
    _OWN["model"],
    Field("input", Items(_ITEM), "The conversation so far.", required=True),
    Field("instructions", Text(), "A system message before it."),
    Field("tools", ListOf(_TOOL), "What the model may call."),
    Field(
        "tool_choice",
        WordOr(CHOICES, Typed({"function": _NAMED, "allowed_tools": _ALLOWED})),
        "none, auto, required, one function, or some of them.",
    ),
    _OWN["parallel_tool_calls"],
    Field("reasoning", Table(_EFFORT), "How much to reason."),
    Field(
        "text",
        Table((Field("format", _FORMAT, "Text, or JSON."), _OWN["verbosity"])),
        "What the answer must be: text, JSON, or JSON by a schema.",
    ),
    Field(
        "truncation", Only(("disabled",), advice="shorten input yourself"), "Nothing is left out."
    ),
    Field("previous_response_id", Only((), advice=_WHOLE), "Not supported."),
    Field("conversation", Only((), advice=_WHOLE), "Not supported."),
)
CREATE = (
    *COUNT,
    *(
        _OWN[name]
        for name in (
            "temperature", "top_p", "top_k", "min_p", "seed", "stream", "top_logprobs", "user",
            "safety_identifier", "prompt_cache_key", "service_tier",
        )
    ),
    Field("max_output_tokens", _OWN["max_tokens"].kind, "Most tokens to generate."),
    Field("include", ListOf(Words((SEALED, LOGPROBS))), "What else the answer shall hold."),
    Field(
        "stream_options",
        Table((Field("include_obfuscation", Only((False,)), "Not supported."),)),
        "For streams.",
    ),
    Field("metadata", Object(), "The answer repeats it."),
    Field("store", Flag(), "Accepted; nothing is stored, and the answer says so."),
    Field("background", Only((False,), advice="streams stay open"), "Not supported."),
    Field("prompt", Only((), advice="send the text itself as input"), "Not supported."),
    Field("context_management", Only(([],)), "Not supported."),
    Field("max_tool_calls", Number(0, 1 << 24, whole=True), "Accepted; it is for hosted tools."),
    Field("prompt_cache_options", Object(), "Accepted; prefixes are found without it."),
    Field("prompt_cache_retention", Text(), "Accepted; prefixes are found without it."),
    Field("client_metadata", Object(), "Accepted; nothing is done with it."),
)  # fmt: skip
