"""Do conversations become the prompts DeepSeek V4 and V4.1 were trained on, character by character?"""

from __future__ import annotations

import json

import pytest

from tokamak.errors import TemplateError
from tokamak.text.deepseek_chat import DeepseekChat

V4, V41 = DeepseekChat("deepseek_v4"), DeepseekChat("deepseek_v41")

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"

EFFORT_75 = (
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für heute",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

SCHEMA_LINE = (
    '{"name": "get_weather", "description": "Wetter für heute", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}}}'
)

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {
        "name": "get_weather",
        "arguments": '{"city": "Köln <3", "days": 3, "units": {"t": null}}',
    },
}

V41_CALLS = """<｜DSML｜ calls>
<｜DSML｜ invoke name="get_weather">
<｜DSML｜ parameter name="city" string="true">Köln <3</｜DSML｜ parameter>
<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>
<｜DSML｜ parameter name="units" string="false">{"t": null}</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>"""

V4_CALLS = V41_CALLS.replace("｜DSML｜ calls", "｜DSML｜tool_calls").replace(
    "｜DSML｜ ", "｜DSML｜"
)

V41_TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜ calls>" block like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{SCHEMA_LINE}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

V4_TOOLS = V41_TOOLS.replace("｜DSML｜ calls", "｜DSML｜tool_calls").replace(
    "｜DSML｜ ", "｜DSML｜"
)


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def result(call_id, text):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


TWO_TURNS = [
    system("Be kind."),
    user("Hi"),
    assistant("Hello.", reasoning_content="They greet."),
    user("And?"),
]


@pytest.mark.parametrize(
    ("chat", "variables", "prompt"),
    [
        (V41, {}, "<｜System｜>" + EFFORT_75 + "<｜User｜>Hi<｜Assistant｜><think>"),
        (V41, {"thinking": False}, "<｜User｜>Hi<｜Assistant｜></think>"),
        (V41, {"reasoning_effort": "none"}, "<｜User｜>Hi<｜Assistant｜></think>"),
        (V4, {}, "<｜User｜>Hi<｜Assistant｜><think>"),
        (V4, {"enable_thinking": False}, "<｜User｜>Hi<｜Assistant｜></think>"),
    ],
)
def test_a_question_alone(chat, variables, prompt):
    assert chat.render([user("Hi")], **variables) == BOS + prompt


@pytest.mark.parametrize(
    ("chat", "variables", "prompt"),
    [
        (
            V41,
            {},
            f"<｜System｜>{EFFORT_75}Be kind.<｜User｜>Hi<｜Assistant｜></think>Hello.{EOS}"
            "<｜User｜>And?<｜Assistant｜><think>",
        ),
        (
            V41,
            {"thinking": False},
            f"<｜System｜>Be kind.<｜User｜>Hi<｜Assistant｜></think>Hello.{EOS}"
            "<｜User｜>And?<｜Assistant｜></think>",
        ),
        (
            V4,
            {},
            f"Be kind.<｜User｜>Hi<｜Assistant｜></think>Hello.{EOS}<｜User｜>And?<｜Assistant｜><think>",
        ),
    ],
)
def test_reasoning_of_turns_that_are_over_is_dropped(chat, variables, prompt):
    assert chat.render(TWO_TURNS, **variables) == BOS + prompt


@pytest.mark.parametrize(
    ("chat", "prefix", "tools"),
    [(V41, "<｜System｜>" + EFFORT_75, V41_TOOLS), (V4, "", V4_TOOLS)],
)
def test_with_tools_all_reasoning_is_kept_and_schemas_follow_the_system_s_text(chat, prefix, tools):
    prompt = chat.render(TWO_TURNS, tools=[WEATHER])

    assert prompt == (
        f"{BOS}{prefix}Be kind.\n\n{tools}<｜User｜>Hi<｜Assistant｜><think>They greet.</think>Hello.{EOS}"
        "<｜User｜>And?<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(("chat", "calls"), [(V41, V41_CALLS), (V4, V4_CALLS)])
def test_a_call_and_its_result_are_written_in_the_dialect(chat, calls):
    messages = [user("Weather?"), assistant(None, tool_calls=[CALL]), result("call_1", "12 °C")]

    prompt = chat.render(messages, thinking=False)

    assert prompt == (
        f"{BOS}<｜User｜>Weather?<｜Assistant｜></think>\n\n{calls}{EOS}"
        "<｜User｜><tool_result>12 °C</tool_result><｜Assistant｜></think>"
    )


def test_results_are_sorted_like_the_calls_and_joined_to_the_text_after_them():
    calls = [{**CALL, "id": name} for name in ("a", "b")]
    messages = [
        user("Weather?"),
        assistant("Let me see.", tool_calls=calls),
        result("b", "second"),
        result("a", "first"),
        user("Go on."),
    ]

    prompt = V41.render(messages, thinking=False)

    assert prompt.endswith(
        f"{EOS}<｜User｜><tool_result>first</tool_result>\n\n<tool_result>second</tool_result>\n\n"
        "Go on.<｜Assistant｜></think>"
    )


def test_results_alone_do_not_end_the_turn_whose_reasoning_they_serve():
    messages = [
        user("Weather?"),
        assistant("", reasoning_content="I must look.", tool_calls=[CALL]),
        result("call_1", "12 °C"),
    ]

    prompt = V41.render(messages)

    assert (
        f"<｜User｜>Weather?<｜Assistant｜><think>I must look.</think>\n\n{V41_CALLS}{EOS}"
        in prompt
    )
    assert prompt.endswith("<tool_result>12 °C</tool_result><｜Assistant｜><think>")


def test_a_later_system_message_is_a_turn_of_its_own_in_v41():
    messages = [user("Hi"), assistant("Hello.", reasoning_content="x"), system("Now in French.")]

    assert V41.render(messages) == (
        f"{BOS}<｜System｜>{EFFORT_75}<｜User｜>Hi<｜Assistant｜></think>Hello.{EOS}"
        "<｜System｜>Now in French.<｜Assistant｜><think>"
    )


def test_tools_without_a_system_message_come_in_one_before_the_question():
    prompt = V41.render([user("Hi")], tools=[WEATHER], thinking=False)

    assert prompt == f"{BOS}<｜System｜>\n\n{V41_TOOLS}<｜User｜>Hi<｜Assistant｜></think>"


def test_a_developer_s_message_takes_tools_and_schema():
    messages = [{"role": "developer", "content": "Be kind."}, user("Hi")]

    prompt = V41.render(
        messages, tools=[WEATHER], response_schema={"type": "string"}, thinking=False
    )

    assert prompt == (
        f"{BOS}<｜User｜>Be kind.\n\n{V41_TOOLS}\n\n## Response Format:\n\n"
        'You MUST strictly adhere to the following schema to reply:\n{"type": "string"}'
        "<｜User｜>Hi<｜Assistant｜></think>"
    )


@pytest.mark.parametrize(
    ("effort", "number"), [("low", 50), ("high", 75), ("xhigh", 75), ("max", 100), (1, 1), (42, 42)]
)
def test_v41_states_effort_as_a_number(effort, number):
    prompt = V41.render([user("Hi")], reasoning_effort=effort)

    assert prompt.startswith(f"{BOS}<｜System｜>Reasoning Effort: {number} (range 1-100, ")


def test_v4_states_only_the_greatest_effort():
    assert V4.render([user("Hi")], reasoning_effort="high") == V4.render([user("Hi")])
    assert V4.render([user("Hi")], reasoning_effort="max").startswith(
        f"{BOS}Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very "
    )


@pytest.mark.parametrize(
    ("chat", "variables", "field"),
    [
        (V41, {"reasoning_effort": "medium"}, "reasoning_effort"),
        (V41, {"reasoning_effort": 0}, "reasoning_effort"),
        (V41, {"reasoning_effort": 101}, "reasoning_effort"),
        (V41, {"reasoning_effort": True}, "reasoning_effort"),
        (V41, {"reasoning_effort": 1.5}, "reasoning_effort"),
        (V41, {"reasoning_effort": ["max"]}, "reasoning_effort"),
        (V4, {"reasoning_effort": "low"}, "reasoning_effort"),
        (V4, {"reasoning_effort": 50}, "reasoning_effort"),
        (V4, {"reasoning_effort": ["max"]}, "reasoning_effort"),
        (V41, {"thinking": False, "reasoning_effort": "high"}, "reasoning_effort"),
        (V41, {"thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        (V41, {"thinking": "yes"}, "chat_template_kwargs"),
        (V41, {"thinking": True, "enable_thinking": False}, "chat_template_kwargs"),
        (V41, {"mood": "sad"}, "chat_template_kwargs"),
    ],
    ids=lambda value: "" if value in (V4, V41) else str(value),
)
def test_what_a_release_does_not_know_is_refused_by_name(chat, variables, field):
    with pytest.raises(TemplateError) as refusal:
        chat.render([user("Hi")], **variables)

    assert refusal.value.field == field


@pytest.mark.parametrize(
    "message",
    [
        {"role": "boss", "content": "Hi"},
        {"content": "Hi"},
        user(3),
        user([{"type": "image_url"}]),
        user("\ud83d"),
        assistant("", tool_calls=[{"id": "x"}]),
        assistant("", tool_calls=["x"]),
    ],
    ids=repr,
)
def test_a_message_that_cannot_be_written_is_refused(message):
    with pytest.raises(TemplateError) as refusal:
        V41.render([message])

    assert refusal.value.field == "messages"


def test_parts_of_a_message_are_joined_by_blank_lines():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    prompt = V41.render([user(parts), user("three")], thinking=False)

    assert prompt == f"{BOS}<｜User｜>one\n\ntwo\n\nthree<｜Assistant｜></think>"


def test_the_place_of_the_answer_can_be_left_out():
    assert V4.render([user("Hi")], add_generation_prompt=False) == f"{BOS}<｜User｜>Hi"
    assert V4.render([assistant("Hi")], thinking=False) == f"{BOS}Hi{EOS}<｜Assistant｜></think>"


@pytest.mark.parametrize("arguments", ["no json", "[1]", json.dumps("text")])
def test_arguments_that_are_no_object_are_handed_on_as_one(arguments):
    call = {"id": "x", "function": {"name": "f", "arguments": arguments}}

    prompt = V41.render([user("Hi"), assistant("", tool_calls=[call])], thinking=False)

    assert f'name="arguments" string="true">{arguments}</' in prompt
