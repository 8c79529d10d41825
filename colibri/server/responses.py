"""A request to the Responses API, as the one that /v1/chat/completions would have been sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from colibri.server import fields
from colibri.server.asked import ChatAsked, conversation
from colibri.server.items import COUNT, CREATE, LOGPROBS
from colibri.server.refusal import Refusal
from colibri.server.tables import FunctionName

T = TypeVar("T")
_SAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "stream_options", "user",
    "safety_identifier", "parallel_tool_calls", "top_logprobs",
)  # fmt: skip
_SAID = ("description", "parameters", "strict")  # of a function, to the model
_KEPT = {"all_turns": False, "current_turn": True}  # reasoning.context as clear_thinking
_NAMES = {"messages": "input", "reasoning_effort": "reasoning.effort"}  # a chat's, and ours
_SEAL = "colibri:"  # tells reasoning that was answered here from other servers'


@dataclass(frozen=True)
class ResponseAsked(ChatAsked):
    """A conversation to be continued. `given`: the request's fields, which the answer repeats."""

    given: Mapping[str, Any] = field(default_factory=dict)


def response(body: Mapping[str, Any]) -> ResponseAsked:
    """Read the body of /v1/responses; Refusal names the field that cannot be honoured."""
    given = fields.read(body, CREATE)
    return ResponseAsked(**vars(conversation(_as_chat(given))), given=given)


def count(body: Mapping[str, Any]) -> ChatAsked:
    """Read the body of /v1/responses/input_tokens."""
    return conversation(_as_chat(fields.read(body, COUNT)))


def renamed(make: Callable[[ChatAsked], T]) -> Callable[[ChatAsked], T]:
    """`make`, whose refusals name the fields of this API."""

    def made(asked: ChatAsked) -> T:
        try:
            return make(asked)
        except Refusal as refusal:
            chat = refusal.param or ""
            ours = refusal.param = _NAMES.get(chat, refusal.param)
            refusal.message = refusal.message.replace(f"leave {chat} out", f"leave {ours} out")
            raise

    return made


class Function(NamedTuple):
    """A function: its name for the model, its namespace if it is in one, itself, and its place."""

    name: str
    space: str | None
    said: Mapping[str, Any]
    where: str


def functions(given: Mapping[str, Any]) -> Iterator[Function]:
    """Every function of a request."""
    for i, tool in enumerate(given.get("tools", ())):
        if tool["type"] == "function":
            yield Function(tool["name"], None, tool, f"tools[{i}]")
        for k, one in enumerate(tool.get("tools", ())):
            space = tool["name"]
            name = _called({**one, "namespace": space})
            yield Function(name, space, one, f"tools[{i}].tools[{k}]")


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`: some clients send back nothing else. It is no secret."""
    return _SEAL + reasoning


def _as_chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat completion that ask for the same."""
    chat = {name: given[name] for name in _SAME if name in given}
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    chat["logprobs"] = LOGPROBS in given.get("include", ())
    if chat.get("top_logprobs") and not chat["logprobs"]:
        raise Refusal(f'top_logprobs needs include: ["{LOGPROBS}"].', "top_logprobs")
    chat["messages"] = _messages(given)
    chat["response_format"] = _form(given.get("text", {}).get("format", {"type": "text"}))
    return chat | _tools(given) | _reasoning(given.get("reasoning", {}))


def _form(form: Mapping[str, Any]) -> Mapping[str, Any]:
    if form["type"] != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {**form, "where": "text.format.schema"}}


def _reasoning(wanted: Mapping[str, Any]) -> dict[str, Any]:
    effort = {"reasoning_effort": wanted["effort"]} if "effort" in wanted else {}
    context = wanted.get("context", "auto")
    clear = {"clear_thinking": _KEPT[context]} if context in _KEPT else {}
    return {"chat_template_kwargs": clear, **effort}


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tools; of those that are not allowed, the model is told nothing."""
    found = [*functions(given)]
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        allowed = [_called(one) for one in choice["tools"]]
        known = {one.name for one in found}
        odd = next((name for name in allowed if name not in known), None)
        if odd is not None:
            text = f"tool_choice allows {fields.brief(odd)}, which is none of the tools."
            raise Refusal(text, "tool_choice")
        found = [one for one in found if one.name in allowed]
        choice = choice["mode"]
    elif isinstance(choice, dict):
        choice = (_called(choice),)
    places = [f"{one.where}.parameters" for one in found]
    return {"tools": [*map(_tool, found)], "places": places, "tool_choice": choice}


def _tool(one: Function) -> dict[str, Any]:
    said = {key: one.said[key] for key in _SAID if key in one.said}
    whole = FunctionName().read(one.name, "tools")  # with a namespace it may be too long
    return {"type": "function", "function": {"name": whole, **said}}


def _called(one: Mapping[str, Any]) -> str:
    """A function's name for the model."""
    return f"{one['namespace']}.{one['name']}" if "namespace" in one else one["name"]


# ---- items --------------------------------------------------------------------------------------


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A chat's messages: what the assistant's items in a row have in turn is one of them."""
    said: list[dict[str, Any]] = []
    if given.get("instructions"):
        said.append({"role": "system", "content": given["instructions"]})
    for item in given["input"]:
        role = {"message": item.get("role"), "function_call_output": "tool"}.get(item["type"])
        if role == "tool":
            said.append({"role": role, "tool_call_id": item["call_id"], "content": item["output"]})
        elif role in (None, "assistant"):
            _answered(said, item)
        else:
            said.append({"role": role, "content": item["content"]})
    return said


def _answered(said: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """One more item of the assistant's: an answer has reasoning, then text, then calls."""
    kind = item["type"]
    if kind == "reasoning" and not _reasoned(item):
        return
    last = said[-1] if said else {}
    full = not {"content", "tool_calls"}.isdisjoint(last)
    if last.get("role") != "assistant" or (full and kind != "function_call"):
        last = {"role": "assistant"}
        said.append(last)
    if kind == "reasoning":
        last["reasoning_content"] = last.get("reasoning_content", "") + _reasoned(item)
    elif kind == "message":
        last["content"] = item["content"]
    else:
        last.setdefault("tool_calls", []).append(_call(item))


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": _called(item), "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _reasoned(item: Mapping[str, Any]) -> str:
    """The reasoning itself, or what stands for it."""
    told = item.get("encrypted_content", "")
    kept = told.removeprefix(_SEAL) if told.startswith(_SEAL) else ""
    return item.get("content") or kept or item.get("summary", "")
