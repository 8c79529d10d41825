"""Bodies from the OpenAPI description, some spoiled: never a 5xx, every refusal has a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Serving, open_engine, serving

from colibri.server.openapi import description

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/responses", "/v1/responses/input_tokens",
)  # fmt: skip
REASONS = ("stop", "length", "tool_calls", "end_turn", "max_tokens", "stop_sequence", "tool_use",
           "completed", "incomplete")  # fmt: skip
ENDS = {
    "/v1/chat/completions": b"[DONE]",
    "/v1/completions": b"[DONE]",
    "/v1/messages": b'"message_stop"',
    "/v1/responses": b'"sequence_number"',
}
SCHEMAS = {
    path: description()["paths"][path]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    for path in PATHS
}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)

spoiled = (
    st.binary(max_size=40),
    st.text(max_size=40).map(str.encode),
    anything.map(json.dumps).map(str.encode),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """A server that answers with one token at most."""
    with serving(open_engine(max_tokens="1", draft="0")) as running:
        yield running


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema allows, now and then one that it does not."""
    valid = _valid(schema)
    return st.integers(0, 12).flatmap(lambda chance: valid if chance else anything)


def _valid(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of(*map(values, schema["anyOf"]))
    kind = schema.get("type")
    if kind == "object":
        return _object(schema)
    if kind == "array":
        least = schema.get("minItems", 0)
        return st.lists(values(schema["items"]), min_size=least, max_size=max(least, 3))
    if kind == "string":
        return st.from_regex(schema["pattern"]) if "pattern" in schema else st.text(max_size=12)
    low, high = schema.get("minimum"), schema.get("maximum")
    if kind == "integer":
        return st.integers(low, high)
    if kind == "number":
        return st.floats(low, high, allow_nan=False)
    return st.booleans() if kind == "boolean" else st.none()


def _object(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "properties" not in schema:
        return st.dictionaries(st.text(max_size=5), anything, max_size=3)
    required = schema.get("required", [])
    fields = {name: values(s) for name, s in schema["properties"].items()}
    some = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    return some.flatmap(
        lambda names: st.fixed_dictionaries({n: fields[n] for n in {*names, *required}})
    )


@pytest.mark.parametrize("path", PATHS)
def test_bodies(server, path):
    """Valid ones are answered, spoiled ones refused with a reason, all in their API's shape."""
    statuses = set()

    @settings(
        max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(_object(SCHEMAS[path]))
    def check(body: dict[str, Any]) -> None:
        answer = server.post(path, json.dumps(body).encode())
        statuses.add(answer.status)
        assert answer.status < 500
        messages = path.startswith("/v1/messages")
        if answer.status != 200:
            error = answer.json["error"] if messages else answer.error
            assert len(error["message"]) > 10
        elif body.get("stream"):
            assert ENDS[path] in answer.body.rstrip().rpartition(b"\n\n")[2]
        elif "input_tokens" not in answer.json:
            choice = answer.json.get("choices", [answer.json])[0]
            reasons = {choice.get(name) for name in ("stop_reason", "finish_reason", "status")}
            assert reasons & {*REASONS}

    check()
    assert 400 in statuses


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.one_of(spoiled), st.sampled_from(PATHS))
def test_any_bytes(server, data, path):
    """Any bytes as a body are refused, and the server lives on."""
    assert server.post(path, data).status in (400, 404)
