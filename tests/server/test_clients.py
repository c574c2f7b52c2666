"""Do the clients people use work against this server, and do their types parse what it says?"""

from __future__ import annotations

import asyncio
import functools
import json
import operator

import agents
import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter

from tests.support.live_server import serving
from tests.support.scripted_engine import ScriptedCore, byte_tokenizer, counts, says
from tokamak.text import dsml
from tokamak.text.deepseek_chat import DeepseekChat

MESSAGES = [{"role": "user", "content": "Hi"}]

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}

CALL = dsml.write_calls(dsml.V41, [{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}])


def adds(request, position):
    """Call a tool, and say its result once it is there."""
    prompt = byte_tokenizer().decode(request.prompt_ids, skip_special_tokens=False)
    has_result = "<tool_result>5</tool_result>" in prompt
    text = "I have it.</think>It is 5." if has_result else f"I must add.</think>{CALL}"
    return says(text)(request, position)


@pytest.fixture(scope="module")
def talker():
    """A server whose model says one sentence."""
    with serving(says("Hello there.")) as live:
        yield live


@pytest.fixture(scope="module")
def caller():
    """A server whose model reasons and calls a tool."""
    with serving(adds, template=DeepseekChat("deepseek_v41")) as live:
        yield live


@pytest.fixture
def client(talker):
    with openai.OpenAI(base_url=talker.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def parses_strictly(kind, value):
    """The openai client builds its types without checks; this checks."""
    TypeAdapter(kind).validate_python(value.model_dump(warnings=False))


def test_openai_lists_models(client):
    models = list(client.models.list())

    assert [model.id for model in models] == ["scripted"]
    parses_strictly(Model, client.models.retrieve("scripted"))


def test_openai_chats(client):
    answer = client.chat.completions.create(
        model="scripted",
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=2,
        n=2,
        seed=1,
        temperature=1,
    )

    parses_strictly(ChatCompletion, answer)
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].logprobs.content[0].token == "H"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_openai_streams_a_chat(client):
    stream = client.chat.completions.create(
        model="scripted", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )

    chunks = list(stream)

    for chunk in chunks:
        parses_strictly(ChatCompletionChunk, chunk)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello there."
    assert chunks[-1].usage.total_tokens > 12


def test_openai_s_stream_helper_builds_the_final_answer(client):
    with client.chat.completions.stream(model="scripted", messages=MESSAGES) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()

    assert final.choices[0].message.content == "Hello there."
    assert final.choices[0].finish_reason == "stop"


def test_openai_calls_tools_and_reads_reasoning(caller):
    with openai.OpenAI(base_url=caller.url + "/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="scripted", messages=MESSAGES, tools=[ADD], reasoning_effort="high"
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        end = client.chat.completions.create(
            model="scripted",
            messages=[*MESSAGES, message.model_dump(exclude_none=True), result],
            tools=[ADD],
        )

    parses_strictly(ChatCompletion, answer)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.reasoning_content == "I must add."
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    assert end.choices[0].message.content == "It is 5."


def test_openai_s_stream_helper_builds_calls(caller):
    with (
        openai.OpenAI(base_url=caller.url + "/v1", api_key="none") as client,
        client.chat.completions.stream(model="scripted", messages=MESSAGES, tools=[ADD]) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()

    assert "tool_calls.function.arguments.delta" in kinds
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == {"a": 2, "b": 3}


def test_openai_completes(client):
    answer = client.completions.create(
        model="scripted", prompt=["a", "b"], logprobs=1, max_tokens=5
    )

    parses_strictly(Completion, answer)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]


def test_openai_streams_a_completion(client):
    stream = client.completions.create(model="scripted", prompt="a", max_tokens=5, stream=True)

    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello"


def test_openai_works_asynchronously(talker):
    async def talk():
        async with openai.AsyncOpenAI(base_url=talker.url + "/v1", api_key="none") as client:
            whole = await client.chat.completions.create(model="scripted", messages=MESSAGES)
            stream = await client.chat.completions.create(
                model="scripted", messages=MESSAGES, stream=True
            )
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(parts)

    assert asyncio.run(talk()) == ("Hello there.", "Hello there.")


def test_openai_parses_structured_answers():
    class City(BaseModel):
        name: str

    with (
        serving(says('{"name": "Paris"}')) as live,
        openai.OpenAI(base_url=live.url + "/v1", api_key="none") as client,
    ):
        answer = client.chat.completions.parse(
            model="scripted", messages=MESSAGES, response_format=City
        )

    assert answer.choices[0].message.parsed == City(name="Paris")


def test_openai_raises_its_own_errors(client, talker):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with (
        serving(core=ScriptedCore(script=counts, fail_step=4)) as failing,
        openai.OpenAI(base_url=failing.url + "/v1", api_key="none", max_retries=0) as other,
    ):
        stream = other.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError):
            list(stream)

    assert bad.value.param == "temperature"


def test_langchain_chats_and_streams(talker):
    model = ChatOpenAI(
        model="scripted", base_url=talker.url + "/v1", api_key="none", max_tokens=50, logprobs=True
    )

    whole = model.invoke("Hi")
    parts = list(model.stream("Hi"))

    assert whole.content == "Hello there."
    assert whole.usage_metadata["output_tokens"] == 13
    assert "".join(part.content for part in parts) == "Hello there."


def test_langchain_calls_tools(caller):
    model = ChatOpenAI(model="scripted", base_url=caller.url + "/v1", api_key="none")

    whole = model.bind_tools([ADD]).invoke("Hi")
    streamed = functools.reduce(operator.add, model.bind_tools([ADD]).stream("Hi"))

    for answer in (whole, streamed):
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})


def test_langchain_completes(talker):
    model = OpenAI(model="scripted", base_url=talker.url + "/v1", api_key="none", max_tokens=5)

    assert model.invoke("Hi") == "Hello"


def test_openai_agents_run_and_stream(talker):
    agents.set_tracing_disabled(True)

    async def talk():
        async with openai.AsyncOpenAI(base_url=talker.url + "/v1", api_key="none") as client:
            agent = agents.Agent(
                name="greeter",
                instructions="Be kind.",
                model=agents.OpenAIChatCompletionsModel(model="scripted", openai_client=client),
            )
            whole = await agents.Runner.run(agent, "Hi")
            streamed = agents.Runner.run_streamed(agent, "Hi")
            async for _ in streamed.stream_events():
                pass
            return whole.final_output, streamed.final_output

    assert asyncio.run(talk()) == ("Hello there.", "Hello there.")


def test_openai_agents_use_a_tool(caller):
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def talk():
        async with openai.AsyncOpenAI(base_url=caller.url + "/v1", api_key="none") as client:
            agent = agents.Agent(
                name="adder",
                instructions="Add.",
                model=agents.OpenAIChatCompletionsModel(model="scripted", openai_client=client),
                tools=[add],
            )
            whole = await agents.Runner.run(agent, "2 + 3?")
            streamed = agents.Runner.run_streamed(agent, "2 + 3?")
            async for _ in streamed.stream_events():
                pass
            return whole.final_output, streamed.final_output

    assert asyncio.run(talk()) == ("It is 5.", "It is 5.")
