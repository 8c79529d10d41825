"""What a request asks for, once its fields are checked: one frozen object per request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colibri.arguments import Arguments, compile_arguments
from colibri.errors import UsageError
from colibri.grammar import Node
from colibri.json_grammar import OBJECT, answer
from colibri.schema import compile_schema
from colibri.server import fields
from colibri.server.refusal import Refusal
from colibri.server.tables import CHAT, COMPLETION
from colibri.server.tools import mended

# OpenAI's degrees of reasoning in GLM's words.
_EFFORTS = {"minimal": "low", "medium": "high", "xhigh": "max"}


@dataclass(frozen=True)
class Asked:
    """What every request may ask. None: as the server has it.

    `logprobs`: how many likeliest tokens beside each, None for no log-probabilities at all.
    """

    model: str | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None
    user: str = ""


@dataclass(frozen=True)
class ChatAsked(Asked):
    """A conversation to be continued. `choice`: none, auto, required, or (function name,)."""

    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str | tuple[str] = "auto"
    parallel: bool = True
    thinking: bool | None = None
    switch: str = "thinking"  # the field that set it
    effort: str | None = None
    clear_thinking: bool | None = None
    form: Node | None = None  # what the answer must be
    strict: Mapping[str, Arguments] = field(default_factory=dict)  # of tools that say so, by name

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """JSON Schema of each tool's parameters, by its name."""
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function.get("parameters") or {} for function in functions}

    @property
    def calls(self) -> dict[str, Node | None]:
        """What the arguments of each tool must be, by its name; None: anything."""
        strict = self.strict
        return {name: strict[name].node if name in strict else None for name in self.parameters}


@dataclass(frozen=True)
class CompletionAsked(Asked):
    """A text, or token ids, to be continued."""

    prompt: str | tuple[int, ...] = ""


def chat(body: Mapping[str, Any]) -> ChatAsked:
    """Read the body of /v1/chat/completions; Refusal names the field that cannot be honoured."""
    return conversation(fields.read(body, CHAT))


def conversation(given: Mapping[str, Any], parameters: str = "function.parameters") -> ChatAsked:
    """A chat completion's fields, each checked; Refusal when they contradict each other.

    `parameters`: where refusals shall say that a tool has its schema. `places` among the fields
    says it for each.
    """
    names = {"max_tokens", "max_completion_tokens"} & set(given)
    if len({given[name] for name in names}) > 1:
        raise Refusal("max_tokens and max_completion_tokens differ; send one.", "max_tokens")
    limit = given[names.pop()] if names else None
    if given.get("top_logprobs") and not given.get("logprobs"):
        raise Refusal("top_logprobs needs logprobs: true.", "top_logprobs")
    logprobs = given.get("top_logprobs", 0) if given.get("logprobs") else None
    user = given.get("user") or given.get("safety_identifier") or ""
    return ChatAsked(
        **_shared(given, limit, logprobs, user),
        messages=tuple(_message(m, i) for i, m in enumerate(given["messages"])),
        **_tools(given, parameters),
        **_reasoning(given),
        form=_form(given.get("response_format", {"type": "text"})),
    )


def completion(body: Mapping[str, Any]) -> CompletionAsked:
    """Read the body of /v1/completions; Refusal names the field that cannot be honoured."""
    given = fields.read(body, COMPLETION)
    shared = _shared(given, given.get("max_tokens"), given.get("logprobs"), given.get("user", ""))
    return CompletionAsked(**shared, prompt=given["prompt"])


def _shared(
    given: Mapping[str, Any], limit: int | None, logprobs: int | None, user: str
) -> dict[str, Any]:
    if "stream_options" in given and not given.get("stream"):
        raise Refusal("stream_options needs stream: true.", "stream_options")
    sampling = ("temperature", "top_p", "top_k", "min_p", "seed")
    return {
        "model": given.get("model"),
        "max_tokens": limit,
        "sampling": {name: given[name] for name in sampling if name in given},
        "stops": given.get("stop", ()),
        "stream": given.get("stream", False),
        "include_usage": given.get("stream_options", {}).get("include_usage", False),
        "logprobs": logprobs,
        "user": user,
    }


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message as templates take it; only an assistant may say nothing, and only it calls."""
    where, role = f"messages[{index}]", message["role"]
    for name in ("tool_calls", "reasoning_content"):
        if role != "assistant" and name in message:
            raise Refusal(f"{where}.{name} belongs to an assistant's message.", f"{where}.{name}")
    if role != "assistant" and "content" not in message:
        raise Refusal(f"{where}.content is missing.", f"{where}.content")
    kept = {k: v for k, v in message.items() if k not in ("refusal", "annotations")}
    for function in (call["function"] for call in kept.get("tool_calls", ())):
        function["arguments"] = mended(function.get("arguments", ""))
    return {"content": "", **kept}


def _form(wanted: Mapping[str, Any]) -> Node | None:
    """The grammar of a response_format; `where` in it: the field that a refusal shall name."""
    if wanted["type"] == "text":
        return None
    asked = wanted.get("json_schema", wanted)  # a json_object may have its schema beside its type
    if "schema" not in asked:
        return answer(OBJECT)
    usual = "response_format.schema" if asked is wanted else "response_format.json_schema.schema"
    where = asked.get("where", usual)
    try:
        return answer(compile_schema(asked["schema"], where, asked.get("strict", False)))
    except UsageError as error:
        raise Refusal(f"{error}.", where) from None


def _tools(given: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise Refusal("two tools have the same name.", "tools")
    if choice not in ("none", "auto") and not tools:
        raise Refusal("tool_choice asks for a call, and there are no tools.", "tool_choice")
    if isinstance(choice, tuple) and choice[0] not in names:
        shown = fields.brief(choice[0])
        raise Refusal(f"tool_choice names {shown}, which is none of the tools.", "tool_choice")
    usual = [f"tools[{i}].{parameters}" for i in range(len(tools))]
    strict = {
        tool["function"]["name"]: _arguments(tool["function"], where)
        for tool, where in zip(tools, given.get("places", usual), strict=True)
        if tool["function"].get("strict")
    }
    return {
        "tools": () if choice == "none" else tuple(tools),
        "choice": choice,
        "parallel": given.get("parallel_tool_calls", True),
        "strict": strict,
    }


def _arguments(function: Mapping[str, Any], where: str) -> Arguments:
    try:
        return compile_arguments(function.get("parameters", {}), where)
    except UsageError as error:
        raise Refusal(f"{error}.", where) from None


def _reasoning(given: Mapping[str, Any]) -> dict[str, Any]:
    """Three ways to say one thing; where they contradict each other nobody can be right."""
    options, switch = given.get("chat_template_kwargs", {}), given.get("thinking", {})
    efforts = {given.get("reasoning_effort"), options.get("reasoning_effort")} - {None}
    switches = {options.get("enable_thinking")} - {None}
    clears = {options.get("clear_thinking"), switch.get("clear_thinking")} - {None}
    if "type" in switch:
        switches.add(switch["type"] == "enabled")
    if "none" in efforts:
        switches.add(False)
    said = (("reasoning_effort", efforts), ("thinking", switches), ("clear_thinking", clears))
    for name, found in said:
        if len(found) > 1:
            raise Refusal(f"{name} is given in more than one way, and they differ.", name)
    effort = next(iter(efforts - {"none"}), None)
    switch = "thinking" if "type" in switch else "chat_template_kwargs"
    return {
        "thinking": next(iter(switches), None),
        "switch": "reasoning_effort" if "none" in efforts else switch,
        "effort": _EFFORTS.get(effort, effort) if effort else None,
        "clear_thinking": next(iter(clears), None),
    }
