"""What a request to the API may hold: one table of fields per endpoint."""

from __future__ import annotations

from dataclasses import dataclass
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
    Typed,
    Words,
    brief,
    wrong,
)  # fmt: skip
from colibri.server.refusal import Refusal
from colibri.server.tools import NAME

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
CHOICES = ("none", "auto", "required")
ROLES = ("system", "developer", "user", "assistant", "tool")
_TOKENS = Number(1, 1 << 24, whole=True, clamp=True)


@dataclass(frozen=True)
class Content:
    """A message's content: text, or a list of text parts."""

    def read(self, value: Any, where: str) -> str:
        """The text."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise wrong(where, value, "text or a list of text parts")
        texts = []
        for i, part in enumerate(value):
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            text = part.get("text") if isinstance(part, dict) else part
            if kind != "text":
                raise Refusal(
                    f"{where}[{i}] is {brief(kind)}; this model reads text only.",
                    f"{where}[{i}].type",
                    code="unsupported_content",
                )
            texts.append(Text().read(text, f"{where}[{i}].text"))
        return "".join(texts)

    def schema(self) -> dict[str, Any]:
        """string or array."""
        part = {
            "type": "object",
            "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
            "required": ["type", "text"],
        }
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}


@dataclass(frozen=True)
class FunctionName:
    """The name of a function."""

    def read(self, value: Any, where: str) -> str:
        """str."""
        if not isinstance(value, str) or not NAME.fullmatch(value):
            raise wrong(where, value, "a name of at most 128 letters, digits and _ . : -")
        return value

    def schema(self) -> dict[str, Any]:
        """string."""
        return {"type": "string", "pattern": f"^{NAME.pattern}$"}


@dataclass(frozen=True)
class ToolChoice:
    """Whether a tool may, or must, be called; or the name of the one that must."""

    def read(self, value: Any, where: str) -> str | tuple[str]:
        """none, auto or required; or (name,)."""
        if isinstance(value, dict) and value.get("type") == "function":
            table = Table((Field("name", FunctionName(), "", required=True),))
            return (table.read(value.get("function"), f"{where}.function")["name"],)
        if value not in CHOICES:
            raise wrong(where, value, f'{", ".join(CHOICES)} or {{"type": "function", ...}}')
        return value

    def schema(self) -> dict[str, Any]:
        """enum or object."""
        name = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        one = {
            "type": "object",
            "properties": {"type": {"enum": ["function"]}, "function": name},
            "required": ["type", "function"],
        }
        return {"anyOf": [{"type": "string", "enum": list(CHOICES)}, one]}


@dataclass(frozen=True)
class RawPrompt:
    """Text to be continued, or token ids; a list of one such is the same."""

    def read(self, value: Any, where: str) -> str | tuple[int, ...]:
        """str or ids."""
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
            value = value[0]
        if isinstance(value, str):
            return value
        ids = value if isinstance(value, list) else []
        if not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise wrong(where, value, "one text, or one list of token ids")
        return tuple(ids)

    def schema(self) -> dict[str, Any]:
        """string or array."""
        ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
        return {"anyOf": [{"type": "string"}, ids]}


_FORMAT = Typed(
    {
        "text": (),
        "json_object": (Field("schema", Object(), "As in json_schema, not strict."),),
        "json_schema": (
            Field(
                "json_schema",
                Table(
                    (
                        Field("name", Text(), "Accepted; nothing is done with it."),
                        Field("description", Text(), "Accepted; nothing is done with it."),
                        Field("schema", Object(), "A JSON Schema; left out: any object."),
                        Field("strict", Flag(), "Refuse a schema that cannot be kept to whole."),
                    )
                ),
                "What the answer must be.",
                required=True,
            ),
        ),
    }
)
FUNCTION = (
    Field("name", FunctionName(), "Its name.", required=True),
    Field("description", Text(), "What it does."),
    Field("parameters", Object(), "Its parameters, in JSON Schema."),
    Field("strict", Flag(), "Arguments keep to the schema, or it is refused."),
)
_TOOL = Table(
    (
        Field("type", Words(("function",)), "Functions are the only tools.", required=True),
        Field("function", Table(FUNCTION), "The function.", required=True),
    )
)
_CALL = Table(
    (
        Field("id", Text(), "The call's id."),
        Field("index", Number(0, 1 << 20, whole=True), "Its place, as a streamed answer says it."),
        Field("type", Words(("function",)), "Functions are the only tools."),
        Field(
            "function",
            Table(
                (
                    Field("name", FunctionName(), "The function's name.", required=True),
                    Field("arguments", Text(), "Its arguments: a JSON object, as text."),
                    # What OpenAI's own client adds to an answer that is then sent back.
                    Field("parsed_arguments", Object(), "Accepted; arguments are what counts."),
                )
            ),
            "What was called.",
            required=True,
        ),
    )
)
_MESSAGE = Table(
    (
        Field("role", Words(ROLES), "Who speaks.", required=True),
        Field("content", Content(), "What is said."),
        Field("name", Text(), "Reaches the model where its template shows names."),
        Field("reasoning_content", Text(), "An assistant's reasoning, as it was answered."),
        Field("tool_calls", ListOf(_CALL), "An assistant's calls, as they were answered."),
        Field("tool_call_id", Text(), "Which call a tool's content answers."),
        *(Field(name, Only(([], {})), "Not supported.") for name in ("refusal", "annotations")),
        *(Field(name, Only(()), "Not supported.") for name in ("audio", "function_call")),
    )
)
_THINKING = Table(
    (
        Field("type", Words(("enabled", "disabled")), "Whether the model reasons.", required=True),
        Field("clear_thinking", Flag(), "Drop the reasoning of earlier turns."),
    )
)
_TEMPLATE = Table(
    (
        Field("enable_thinking", Flag(), "Whether the model reasons."),
        Field("reasoning_effort", Words(EFFORTS), "How much."),
        Field("clear_thinking", Flag(), "Drop the reasoning of earlier turns."),
    )
)

SHARED = (
    Field("model", Text(), "The model's name; left out: the only one there is."),
    Field("max_tokens", _TOKENS, "Most tokens to generate; more than there is room for is fine."),
    Field("temperature", Number(0, 100), "0 always takes the likeliest token."),
    Field("top_p", Number(0, 1), "Sample from the likeliest tokens that together reach this."),
    Field("top_k", Number(0, 1 << 24, whole=True), "Sample from so many tokens; 0: all."),
    Field("min_p", Number(0, 1), "Drop tokens less likely than this times the likeliest."),
    Field("seed", Number(-(1 << 63), (1 << 63) - 1, whole=True), "Same seed, same text."),
    Field("stop", Stops(), "The answer ends before any of these."),
    Field("stream", Flag(), "Send the answer as it is made, as server-sent events."),
    Field(
        "stream_options",
        Table(
            (
                Field("include_usage", Flag(), "A last event with the usage."),
                Field("include_obfuscation", Only((False,)), "Not supported."),
            )
        ),
        "For streams.",
    ),
    Field("user", Text(), "Requests of one user wait for each other before others wait."),
    Field("metadata", Object(), "Accepted; nothing is done with it."),
    Field("n", Only((1,)), "One answer a request."),
    Field("presence_penalty", Only((0, 0.0)), "Not supported."),
    Field("frequency_penalty", Only((0, 0.0)), "Not supported."),
    Field("logit_bias", Only(({},)), "Not supported."),
)

CHAT = (
    *SHARED,
    Field("messages", ListOf(_MESSAGE, 1), "The conversation so far.", required=True),
    Field("max_completion_tokens", _TOKENS, "The newer name of max_tokens."),
    Field("logprobs", Flag(), "Log-probabilities of the answer's tokens."),
    Field("top_logprobs", Number(0, 20, whole=True), "And of so many likeliest ones beside each."),
    Field("tools", ListOf(_TOOL), "What the model may call."),
    Field("tool_choice", ToolChoice(), "none, auto, required, or one function."),
    Field("parallel_tool_calls", Flag(), "false: the answer ends after its first call."),
    Field("reasoning_effort", Words(EFFORTS), "How much to reason; none: not at all."),
    Field("thinking", _THINKING, "Whether to reason, as Z.ai's API has it."),
    Field("chat_template_kwargs", _TEMPLATE, "Whether to reason, as other servers have it."),
    Field("response_format", _FORMAT, "What the answer must be: text, JSON, or JSON by a schema."),
    Field("store", Only((False,)), "Nothing is stored."),
    Field("service_tier", Only(("auto", "default")), "There is one."),
    Field("modalities", Only((["text"],)), "Text is the only one."),
    Field("verbosity", Only(("medium",)), "Not supported."),
    Field("prompt_cache_key", Text(), "Accepted; prefixes are found without it."),
    Field("safety_identifier", Text(), "As user."),
)

COMPLETION = (
    *SHARED,
    Field("prompt", RawPrompt(), "Text to be continued, or its token ids.", required=True),
    Field("logprobs", Number(0, 20, whole=True), "Log-probabilities, of so many likeliest tokens."),
    Field("best_of", Only((1,)), "Not supported."),
    Field("echo", Only((False,)), "Not supported."),
    Field("suffix", Only(("",)), "Not supported."),
)
