"""Do reasoning and tool calls reach chat clients in their own fields, and requests with tools the model?"""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from tests.support.live_server import serving, stream_events
from tests.support.scripted_engine import ScriptedCore, byte_tokenizer, chat_template, says
from tokamak.sampling.grammar import compiled
from tokamak.text import dsml
from tokamak.text.deepseek_chat import DeepseekChat

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
        "strict": True,
    },
}

CALLS = dsml.write_calls(
    dsml.V41,
    [
        {"function": {"name": "get_weather", "arguments": {"city": 'Kö"ln', "days": 3}}},
        {"function": {"name": "get_weather", "arguments": {"city": "Bonn"}}},
    ],
)

DEEPSEEK_ANSWER = f"They ask for weather.</think>Let me look.\n\n{CALLS}"

HERMES_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'write <tool_call>{"name": , "arguments": }</tool_call>\n{% endif %}'
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

HERMES_ANSWER = (
    "<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)


def deepseek(text: str, **more: Any):
    """A server of a DeepSeek V4.1 that says this."""
    return serving(says(text), template=DeepseekChat("deepseek_v41"), **more)


def hermes(text: str):
    """A server of a model with a Hermes template that says this."""
    return serving(says(text), template=chat_template(HERMES_TEMPLATE))


def prompt_of(server, at: int = -1) -> str:
    ids = server.engine.core.added[at].prompt_ids
    return byte_tokenizer().decode(ids, skip_special_tokens=False)


def joined(events: list[Any]) -> dict[str, Any]:
    """A streamed choice as the message of a whole answer, with its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                function = {"name": call["function"]["name"], "arguments": ""}
                message["tool_calls"].append({"type": call["type"], "function": function})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"][
                "arguments"
            ]
        message["finish_reason"] = choice["finish_reason"]
    return message


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    """The message of an answer in the same form."""
    (choice,) = answer["choices"]
    message = choice["message"]
    for call in message.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": message.get("tool_calls", []),
        "finish_reason": choice["finish_reason"],
    }


def test_a_deepseek_answer_is_told_apart():
    with deepseek(DEEPSEEK_ANSWER) as server:
        answer = server.chat("Weather?", tools=[WEATHER]).json()
        prompt = prompt_of(server)

    message = answer["choices"][0]["message"]
    calls = [call["function"] for call in message["tool_calls"]]
    assert message["content"] == "Let me look."
    assert message["reasoning_content"] == "They ask for weather."
    assert [json.loads(call["arguments"]) for call in calls] == [
        {"city": 'Kö"ln', "days": 3},
        {"city": "Bonn"},
    ]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert prompt.startswith("<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 75 ")
    assert '{"name": "get_weather", "parameters": {"type": "object"' in prompt
    assert prompt.endswith("<｜User｜>Weather?<｜Assistant｜><think>")


@pytest.mark.parametrize("step_tokens", [1, 5])
@pytest.mark.parametrize("max_tokens", [4, 25, 30, 60, 90, 120, 150, 200, 1000])
def test_a_stream_joins_to_the_whole_answer_wherever_it_is_cut(step_tokens, max_tokens):
    core = ScriptedCore(script=says(DEEPSEEK_ANSWER), step_tokens=step_tokens)
    with serving(core=core, template=DeepseekChat("deepseek_v41")) as server:
        body = {"tools": [WEATHER], "max_tokens": max_tokens, "logprobs": True}
        answer = server.chat("Weather?", **body).json()
        events = stream_events(server.chat("Weather?", stream=True, **body))

    entries = [
        entry
        for event in events
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert entries == answer["choices"][0]["logprobs"]["content"]
    message = whole(answer)
    assert joined(events) == message
    assert message["finish_reason"] == ("tool_calls" if max_tokens == 1000 else "length")
    assert "DSML" not in message["content"]
    assert all(
        event["choices"][0]["delta"] or event["choices"][0]["finish_reason"] for event in events
    )


def test_without_tools_markup_is_text_and_with_choice_none_tools_stay_out_of_the_prompt():
    with deepseek(f"</think>{CALLS}") as server:
        plain = server.chat("Hi").json()["choices"][0]
        none = server.chat("Hi", tools=[WEATHER], tool_choice="none").json()["choices"][0]

        assert "## Tools" not in prompt_of(server)
    assert plain["message"]["content"] == none["message"]["content"] == CALLS
    assert plain["finish_reason"] == "stop"


def test_only_the_first_call_comes_where_calls_are_not_parallel():
    with deepseek(DEEPSEEK_ANSWER) as server:
        answer = server.chat("Hi", tools=[WEATHER], parallel_tool_calls=False).json()

    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_a_conversation_with_calls_is_rendered():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    with deepseek("</think>Done.") as server:
        answer = server.http.post(
            "/v1/chat/completions", json={"messages": messages, "tools": [WEATHER]}
        )

        assert answer.json()["choices"][0]["message"]["content"] == "Done."
        assert "<think>Hm.</think>\n\n<｜DSML｜ calls>" in prompt_of(server)
        assert prompt_of(server).endswith("<tool_result>done</tool_result><｜Assistant｜><think>")


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, "Effort: 75 "),
        ({"reasoning_effort": "max"}, "Effort: 100 "),
        ({"reasoning_effort": 7}, "Effort: 7 "),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "Effort: 50 "),
        ({"reasoning_effort": "none"}, "<｜Assistant｜></think>"),
        ({"chat_template_kwargs": {"thinking": False}}, "<｜Assistant｜></think>"),
        ({"response_format": {"type": "json_object"}}, "<｜Assistant｜></think>"),
    ],
    ids=str,
)
def test_fields_say_how_much_the_model_reasons(fields, place):
    with deepseek('{"a": 1}') as server:
        answer = server.chat("Hi", **fields)

        assert answer.status_code == 200, answer.text
        assert place in prompt_of(server)


def test_an_answer_s_schema_is_shown_to_models_that_read_it():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with deepseek('{"a": 1}') as server:
        answer = server.chat("Hi", response_format=asked).json()

        assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
        assert "## Response Format:\n\n" in prompt_of(server)
        assert json.dumps(schema) in prompt_of(server)


REFUSED = [
    ({"reasoning_effort": "medium"}, "reasoning_effort"),
    ({"reasoning_effort": 101}, "reasoning_effort"),
    ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}}, "reasoning_effort"),
    (
        {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}},
        "reasoning_effort",
    ),
    (
        {"reasoning_effort": "high", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    (
        {
            "chat_template_kwargs": {"thinking": True},
            "structured_outputs": {"regex": "a+"},
        },
        "structured_outputs",
    ),
    ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [WEATHER, {"type": "function"}]}, "tools[1].function"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
        "tools[0].function.parameters",
    ),
]


@pytest.fixture(scope="module")
def thinker():
    with deepseek("</think>Hi.") as server:
        yield server


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_what_the_model_cannot_do_is_refused_by_name(thinker, fields, param):
    answer = thinker.chat("Hi", **fields)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_hermes_answer_is_told_apart():
    with hermes(HERMES_ANSWER) as server:
        answer = server.chat("Weather?", tools=[WEATHER]).json()
        events = stream_events(server.chat("Weather?", tools=[WEATHER], stream=True))

        assert json.dumps(WEATHER) in prompt_of(server)
    message = whole(answer)
    assert joined(events) == message
    assert message == {
        "content": "Look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'},
            }
        ],
        "finish_reason": "tool_calls",
    }


def test_effort_none_turns_a_switchable_template_s_thinking_off():
    with hermes("Yes.") as server:
        server.chat("Hi", reasoning_effort="none")

        assert prompt_of(server).endswith("</think>\n\n")


def accepts(structured, text: str) -> bool:
    """Whether a constraint lets a model write this and end."""
    tokenizer = LLTokenizer("byte")
    matcher = compiled(structured, tokenizer)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str
)
def test_a_call_can_be_required_where_calls_are_json(choice):
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    with hermes(call) as server:
        answer = server.chat("Hi", tools=[WEATHER], tool_choice=choice).json()

        structured = server.engine.core.added[-1].params.structured
    assert accepts(structured, call)
    assert accepts(structured, f"{call}\n{call}") == (choice == "required")
    assert not accepts(structured, "Hello.")
    assert not accepts(structured, call.replace("get_weather", "other"))
    assert not accepts(structured, call.replace("city", "town"))
    assert not accepts(structured, call.replace('"city": ', '"city":\n'))
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert answer["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize(
    "parameters",
    [{"type": "objekt"}, {"type": "object", "properties": {"a": {"minimum": 2, "maximum": 1}}}],
    ids=str,
)
def test_a_required_call_needs_a_schema_that_can_be_met(parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with hermes("x") as server:
        answer = server.chat("Hi", tools=[tool], tool_choice="required")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


def test_a_required_call_must_be_to_a_tool_of_the_request():
    with hermes("x") as server:
        answer = server.chat(
            "Hi", tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "g"}}
        )

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"


def test_tokenize_counts_tools_and_reasoning_as_a_chat_does():
    with deepseek("</think>Hi.") as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
        counted = server.http.post("/tokenize", json={**body, "reasoning_effort": 3}).json()
        answer = server.http.post(
            "/v1/chat/completions", json={**body, "reasoning_effort": 3}
        ).json()
        refused = server.http.post("/tokenize", json={"prompt": "Hi", "tools": [WEATHER]})

    assert counted["count"] == answer["usage"]["prompt_tokens"]
    assert refused.json()["error"]["param"] == "tools"
