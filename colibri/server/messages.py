"""A request to the Messages API, as the one that /v1/chat/completions would have been sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from colibri.server import fields
from colibri.server.asked import ChatAsked, conversation
from colibri.server.blocks import COUNT, MESSAGES
from colibri.server.refusal import Refusal

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stream")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def message(body: Mapping[str, Any]) -> ChatAsked:
    """Read the body of /v1/messages; Refusal names the field that cannot be honoured."""
    return conversation(_as_chat(fields.read(body, MESSAGES)), "input_schema")


def count(body: Mapping[str, Any]) -> ChatAsked:
    """Read the body of /v1/messages/count_tokens."""
    return conversation(_as_chat(fields.read(body, COUNT)), "input_schema")


def _as_chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat completion that ask for the same."""
    if given["messages"][-1]["role"] == "assistant":
        raise Refusal(
            "the last of messages is the assistant's, and answers cannot be begun for the model; "
            "let the user's be the last.",
            "messages",
        )
    chat = {name: given[name] for name in _SAME if name in given}
    chat["stop"] = given.get("stop_sequences", ())
    chat["tools"] = [_tool(tool) for tool in given.get("tools", ())]
    chat["user"] = given.get("metadata", {}).get("user_id", "")
    chat["messages"] = _messages(given)
    form = given.get("output_config", {}).get("format")
    if form:
        asked = {"schema": form["schema"], "strict": True, "where": "output_config.format.schema"}
        chat["response_format"] = {"type": "json_schema", "json_schema": asked}
    return chat | _choice(given.get("tool_choice")) | _reasoning(given)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**kept, "parameters": tool["input_schema"]}}


def _choice(choice: Mapping[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    return {
        "tool_choice": (choice["name"],) if "name" in choice else _CHOICES[choice["type"]],
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
    }


def _reasoning(given: Mapping[str, Any]) -> dict[str, Any]:
    switch: dict[str, Any] = {}
    kind = given.get("thinking", {}).get("type", "adaptive")
    if kind != "adaptive":
        switch["type"] = kind
    if given.get("context_management", {}).get("edits"):  # there is one: to keep all
        switch["clear_thinking"] = False
    effort = given.get("output_config", {}).get("effort")
    return {"thinking": switch, **({"reasoning_effort": effort} if effort else {})}


# ---- messages -----------------------------------------------------------------------------------


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = _text(given.get("system", ()))
    said = [{"role": "system", "content": system}] if system else []
    for one in given["messages"]:
        role, blocks = one["role"], one["content"]
        if role == "user":
            said += _user(blocks)
        else:
            said.append({"role": role, "content": _text(blocks), **_assistant(blocks)})
    return said


def _user(blocks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results become the tools' own messages; text between them is one message."""
    said: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            content = ("Error: " if block.get("is_error") else "") + _text(block.get("content", ()))
            said.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        elif said and said[-1]["role"] == "user":
            said[-1]["content"] += block["text"]
        else:
            said.append({"role": "user", "content": block["text"]})
    return said or [{"role": "user", "content": ""}]


def _assistant(blocks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Reasoning and calls, where there are any."""
    uses = [block for block in blocks if block["type"] == "tool_use"]
    reasoning = _text(blocks, "thinking")
    more: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
    return more | ({"tool_calls": [*map(_call, uses)]} if uses else {})


def _call(use: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(use["input"], ensure_ascii=False)
    function = {"name": use["name"], "arguments": arguments}
    return {"id": use["id"], "type": "function", "function": function}


def _text(blocks: Iterable[Mapping[str, Any]], kind: str = "text") -> str:
    return "".join(block[kind] for block in blocks if block["type"] == kind)
