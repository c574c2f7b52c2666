"""Does LLM hand prompts to its engine and give back whole answers, in order, also when things go wrong?"""

from __future__ import annotations

import signal
import threading

import pytest

from tests.support.scripted_engine import (
    EOS_ID,
    ScriptedCore,
    ScriptedEngine,
    byte_tokenizer,
    chat_template,
    counts,
    echoes,
    says,
)
from tokamak.core.request import FinishReason, SamplingParams
from tokamak.engine.messages import RequestUpdate
from tokamak.errors import ContextLengthError, EngineError, RequestError, TemplateError
from tokamak.llm import LLM

SHORT = SamplingParams(temperature=0, max_tokens=5)


def an_llm(core: ScriptedCore | None = None, template=True) -> LLM:
    core = core or ScriptedCore(script=counts)
    info = ScriptedEngine(core=core).info
    return LLM.over(core, byte_tokenizer(), chat_template() if template else None, info)


def test_outputs_come_in_the_order_of_the_prompts():
    llm = an_llm(ScriptedCore(script=echoes))

    outputs = llm.generate(["one", "seventeen", "b"], SamplingParams(temperature=0))

    assert [output.text for output in outputs] == ["one", "seventeen", "b"]
    assert [output.prompt for output in outputs] == ["one", "seventeen", "b"]
    assert outputs[2].token_ids == (ord("b"), EOS_ID)
    assert outputs[2].finish_reason is FinishReason.STOP
    assert (outputs[0].usage.prompt_tokens, outputs[0].usage.completion_tokens) == (3, 4)


@pytest.mark.parametrize(
    ("prompts", "prompt_ids"),
    [
        ("Hi", [(72, 105)]),
        ([72, 105], [(72, 105)]),
        (["Hi", "a"], [(72, 105), (97,)]),
        ([[72, 105], (97,)], [(72, 105), (97,)]),
        (["Hi", [97]], [(72, 105), (97,)]),
        ([], []),
    ],
)
def test_prompts_may_be_text_or_ids_alone_or_listed(prompts, prompt_ids):
    outputs = an_llm().generate(prompts, SHORT)

    assert [output.prompt_ids for output in outputs] == prompt_ids
    assert all(len(output.token_ids) == 5 for output in outputs)


def test_each_prompt_may_have_its_own_params():
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 3)]

    outputs = an_llm().generate(["a", "b"], params)

    assert [len(output.token_ids) for output in outputs] == [1, 3]


def test_n_gives_as_many_outputs_and_bills_the_prompt_once():
    (output,) = an_llm().generate("ab", SamplingParams(n=3, max_tokens=4))

    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert len({each.text for each in output.outputs}) == 3
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (2, 12)


def test_logprobs_have_one_entry_a_token_and_prompt_logprobs_begin_with_none():
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)

    (output,) = an_llm().generate("abc", params)

    assert len(output.logprobs) == len(output.token_ids) == 3
    assert output.prompt_logprobs[0] is None
    assert [entry.chosen.token for entry in output.prompt_logprobs[1:]] == ["b", "c"]


def test_a_wrong_prompt_is_named_by_its_index_and_nothing_runs():
    core = ScriptedCore()

    with pytest.raises(ContextLengthError, match=r"prompts\[1\]: .*5000 tokens"):
        an_llm(core).generate(["fine", [5] * 5000, "fine"], SHORT)

    assert core.added == []


@pytest.mark.parametrize("prompts", [[1, "a"], [None], ["a", 3.0]])
def test_what_is_no_prompt_is_refused(prompts):
    with pytest.raises(RequestError, match=r"prompts\[\d\] is"):
        an_llm().generate(prompts, SHORT)


def test_params_must_be_as_many_as_prompts():
    with pytest.raises(RequestError, match="params has 1 entries for 2 prompts"):
        an_llm().generate(["a", "b"], [SHORT])


def test_a_request_the_engine_refuses_ends_the_call_and_leaves_the_llm_usable():
    core = ScriptedCore()
    core.fail_requests[7] = RequestUpdate(request_id="", error="bad schema", error_kind="request")
    llm = an_llm(core)

    with pytest.raises(RequestError, match=r"prompts\[2\]: bad schema"):
        llm.generate([[1], [2], [7], [3]], SHORT)

    assert llm.stats().running_requests == 0
    assert len(llm.generate("again", SHORT)[0].token_ids) == 5


def test_more_prompts_than_the_queue_holds_all_run():
    core = ScriptedCore(max_waiting=20, max_running=4)

    outputs = an_llm(core).generate([[at] for at in range(100)], SHORT)

    assert [output.prompt_ids for output in outputs] == [(at,) for at in range(100)]
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)


def test_messages_go_through_the_template_without_further_special_tokens():
    core = ScriptedCore(script=says("Hello!"))
    llm = an_llm(core)

    (output,) = llm.chat([{"role": "user", "content": "Hi"}], SHORT)

    assert output.prompt == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert output.text == "Hello"


def test_several_conversations_give_several_answers():
    llm = an_llm()

    outputs = llm.chat([[{"role": "user", "content": text}] for text in ("a", "b")], SHORT)

    assert len(outputs) == 2
    assert "b<|end|>" in outputs[1].prompt


def test_a_conversation_the_template_refuses_is_named():
    conversations = [
        [{"role": "user", "content": "a"}],
        [{"role": "wizard", "content": "b"}],
    ]

    with pytest.raises(TemplateError, match=r"messages\[1\]: .*wizard"):
        an_llm().chat(conversations, SHORT)


def test_a_model_without_template_cannot_chat():
    with pytest.raises(TemplateError, match="has no chat template"):
        an_llm(template=False).chat([{"role": "user", "content": "a"}])


def test_no_messages_are_refused():
    with pytest.raises(RequestError, match="messages are empty"):
        an_llm().chat([])


def test_a_stream_gives_the_text_piece_by_piece():
    core = ScriptedCore(script=says("Hi, wörld"))

    events = list(an_llm(core).stream("a", SamplingParams(temperature=0)))

    assert len(events) == 10
    assert "".join(event.text for event in events) == "Hi, wörld"


def test_a_stream_that_is_closed_aborts_its_request():
    core = ScriptedCore()
    llm = an_llm(core)
    stream = llm.stream_chat([{"role": "user", "content": "a"}])
    next(stream)

    stream.close()

    assert len(core.aborted) == 1
    assert llm.stats().running_requests == 0


def test_other_calls_may_run_while_a_stream_is_open():
    llm = an_llm()
    (alone,) = llm.generate("ab", SHORT)
    stream = llm.stream("ab", SHORT)
    begun = [next(stream)]

    (between,) = llm.generate("cd", SHORT)

    streamed = "".join(event.text for event in [*begun, *stream])
    assert streamed == alone.text
    assert between.text != alone.text


def test_ctrl_c_waits_for_the_step_aborts_and_leaves_the_llm_usable():
    class Interrupting(ScriptedCore):
        finished_steps = 0

        def step(self):
            if self.steps == 2:
                signal.raise_signal(signal.SIGINT)
            updates = super().step()
            self.finished_steps += 1
            return updates

    core = Interrupting()
    llm = an_llm(core)

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(ignore_eos=True))

    assert core.finished_steps == core.steps == 3
    assert len(core.aborted) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(llm.generate("again", SHORT)[0].token_ids) == 5


def test_an_llm_works_on_another_thread():
    llm = an_llm()
    outputs = []

    thread = threading.Thread(target=lambda: outputs.extend(llm.generate("a", SHORT)))
    thread.start()
    thread.join()

    assert len(outputs) == 1


def test_a_closed_llm_says_so():
    core = ScriptedCore()

    with an_llm(core) as llm:
        pass

    assert core.closed
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a")


def test_an_llm_may_be_closed_while_a_stream_is_open():
    llm = an_llm()
    stream = llm.stream("a")
    next(stream)

    llm.close()

    stream.close()
