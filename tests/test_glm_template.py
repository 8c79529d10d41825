"""The built-in templates of GLM-5, 5.1, 5.2 and 5.3 write what the models were trained on."""

from __future__ import annotations

import json

import pytest
from text_fixtures import DIALOGUE, FOLLOW_UP, WEATHER, user

from colibri.chat import Template

WEATHER_LINE = (
    '{"name": "get_weather", "description": "Wetter für eine Stadt", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}}}'
)
TOOLS_BLOCK = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query."
    "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    + WEATHER_LINE
    + "\n</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>"
    "{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>"
    "...</tool_call>"
)
CALLS = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich</arg_value></tool_call>"
    '<tool_call>now<arg_key>zone</arg_key><arg_value>[1, "ö"]</arg_value>'
    "<arg_key>utc</arg_key><arg_value>true</arg_value></tool_call>"
)
RESULTS = "<tool_response>12:00</tool_response><tool_response>sunny</tool_response>"
SORTED = "<tool_response>sunny</tool_response><tool_response>12:00</tool_response>"
EFFORT = "<|system|>Reasoning Effort: "
HEAD = "<|system|>Be brief.<|user|>Weather in Zürich?<|assistant|>"


def test_glm_52_text():
    """GLM-5.2: effort line, tools, reasoning after the last user turn, results as given."""
    text = Template.builtin("5.2").text(DIALOGUE, tools=[WEATHER])
    assert text == (
        f"[gMASK]<sop>{EFFORT}Max{TOOLS_BLOCK}{HEAD}<think> Ask the tool. </think>Let me look."
        f"{CALLS}<|observation|>{RESULTS}<|assistant|><think>"
    )


def test_glm_52_drops_old_reasoning():
    """GLM-5.2: a new user turn empties earlier reasoning unless clear_thinking is false."""
    template = Template.builtin("5.2")
    later = template.text(DIALOGUE + FOLLOW_UP)
    assert f"{HEAD}<think></think>Let me look.{CALLS}" in later
    assert later.endswith("<|assistant|><think></think>Sunny.<|user|>Thanks!<|assistant|><think>")
    kept = template.text(DIALOGUE + FOLLOW_UP, clear_thinking=False)
    assert "<think> Ask the tool. </think>Let me" in kept and "<think>Done.</think>Sunny." in kept


def test_glm_52_switches():
    """GLM-5.2: thinking off has no effort line and a closed block; effort is High or Max."""
    template = Template.builtin("5.2")
    hello = user("hi")
    assert template.text(hello, False) == "[gMASK]<sop><|user|>hi<|assistant|><think></think>"
    assert template.text(hello, True, "high").startswith(f"[gMASK]<sop>{EFFORT}High<|user|>hi")
    assert template.text(hello, None, "low").startswith(f"[gMASK]<sop>{EFFORT}Max<|user|>hi")
    assert template.text(hello, add_generation_prompt=False) == f"[gMASK]<sop>{EFFORT}Max<|user|>hi"
    assert template.has_thinking_switch and template.has_effort


def test_glm_53_text():
    """GLM-5.3: reasoning kept for all turns, results sorted like the calls, always thinking."""
    template = Template.builtin("5.3")
    text = template.text(DIALOGUE + FOLLOW_UP, False, "low", tools=[WEATHER])
    assert text == (
        f"[gMASK]<sop>{EFFORT}Low{TOOLS_BLOCK}{HEAD}<think> Ask the tool. </think>Let me look."
        f"{CALLS}<|observation|>{SORTED}<|assistant|><think>Done.</think>Sunny.<|user|>Thanks!"
        "<|assistant|><think>"
    )
    assert not template.has_thinking_switch and template.has_effort
    for effort, shown in (("high", "High"), ("HIGH", "Max"), (None, "Max"), ("none", "Max")):
        assert f"{EFFORT}{shown}<|user|>" in template.text(user("x"), None, effort)
    cleared = template.text(DIALOGUE + FOLLOW_UP, clear_thinking=True)
    assert cleared.count("<think></think>") == 2


@pytest.mark.parametrize(
    "change", [{"tool_call_id": "1"}, {"tool_call_id": "9"}, {"tool_call_id": ""}]
)
def test_glm_53_keeps_the_order_of_unclear_results(change):
    """Doubled, unknown or missing ids: results stay in message order."""
    messages = [*DIALOGUE[:3], DIALOGUE[3] | change, DIALOGUE[4]]
    assert RESULTS in Template.builtin("5.3").text(messages)


def test_glm_53_orders_results_by_calls_that_can_be_told_apart():
    """Results of some of the calls go in the calls' order; where two share an id, none do."""
    calls = [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in ("1", "2", "3")]
    results = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("3", "1")]

    def shown(calls: list[dict]) -> str:
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        text = Template.builtin("5.3").text([*user("x"), said, *results])
        return "".join(part[0] for part in text.split("<tool_response>")[1:])

    assert shown(calls) == "13"
    assert shown([*calls, calls[0]]) == "31"


def test_glm_53_content_lists():
    """GLM-5.3: media become reminders; outputs and tool references have their own forms."""
    template = Template.builtin("5.3")
    seen = template.text(user([{"type": "text", "text": "Look:"}, {"type": "image_url"}, "!"]))
    assert "<|user|>Look:<reminder>You are unable to process this image because" in seen
    assert "Try different methods.</reminder>!<|assistant|>" in seen
    outputs = [{"id": "2", "output": "b"}, {"id": "1", "output": [{"type": "text", "text": "a"}]}]
    messages = [*DIALOGUE[:3], {"role": "tool", "content": outputs}]
    assert (
        "<|observation|><tool_response>a</tool_response><tool_response>b</tool_response><|"
        in template.text(messages)
    )
    found = [{"type": "tool_reference", "name": "get_weather"}]
    hidden = WEATHER["function"] | {"defer_loading": True}
    text = template.text([{"role": "tool", "content": found}], tools=[hidden])
    assert f"<tool_response><tools>\n{WEATHER_LINE}\n</tools></tool_response>" in text
    assert text.count("get_weather") == 1


def test_glm_5_text():
    """GLM-5: no effort line, tools with their wrapper, lone </think> without reasoning."""
    template = Template.builtin("5")
    text = template.text(DIALOGUE + FOLLOW_UP, tools=[WEATHER])
    wrapped = TOOLS_BLOCK.replace(WEATHER_LINE, json.dumps(WEATHER, ensure_ascii=False))
    assert text == (
        f"[gMASK]<sop>{wrapped}{HEAD}</think>Let me look.{CALLS}<|observation|>{RESULTS}"
        "<|assistant|></think>Sunny.<|user|>Thanks!<|assistant|><think>"
    )
    assert template.text(user("hi"), False) == "[gMASK]<sop><|user|>hi<|assistant|></think>"
    assert f"{HEAD}<think>Ask the tool.</think>Let" in template.text(DIALOGUE)
    assert not template.has_effort


def test_glm_51_text():
    """GLM-5.1: as 5, but bare tool signatures, and an empty block for the turn in progress."""
    template = Template.builtin("5.1")
    last = [*user("hi"), {"role": "assistant", "content": "ho"}]
    assert template.text(last).startswith("[gMASK]<sop><|user|>hi<|assistant|><think></think>ho")
    assert template.text(last, False).startswith("[gMASK]<sop><|user|>hi<|assistant|></think>ho")
    assert template.text([*last, *user("x")]).startswith(
        "[gMASK]<sop><|user|>hi<|assistant|></think>"
    )
    assert TOOLS_BLOCK in template.text(DIALOGUE, tools=[WEATHER])


@pytest.mark.parametrize(
    ("version", "raw", "reasoning", "answer"),
    [
        ("5.2", "<think>\na\n</think>\nb", "\na\n", "b"),
        ("5.3", "x<think>a</think>b</think>c", "a", "c"),
        ("5.1", "<think>\na\n</think>\nb", "a", "b"),
        ("5", "a</think>b", "a", "b"),
    ],
)
def test_raw_answers_are_split_into_reasoning(glm, version, raw, reasoning, answer):
    """An assistant turn with <think> markup and no reasoning_content is read as it was written."""
    template = Template.builtin(version)
    split = {"role": "assistant", "content": answer, "reasoning_content": reasoning}
    messages = [*user("q"), {"role": "assistant", "content": raw}]
    assert template.render(messages, glm) == template.render([*user("q"), split], glm)


def test_reasoning_content_keeps_literal_markup_in_answers(glm):
    """With reasoning_content given, </think> in the answer is text."""
    turn = {"role": "assistant", "content": "The tag </think> ends it.", "reasoning_content": ""}
    ids = Template.builtin("5.2").render([*user("q"), turn], glm)
    assert ids.count(glm.id_of("</think>")) == 1
    assert "</think>The tag </think> ends it." in glm.decode(ids)
