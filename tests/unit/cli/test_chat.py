"""A conversation is remembered, commands do what they say, and Ctrl-C ends an answer only."""

from __future__ import annotations

import io
import os
import signal
import sys

import pytest

import tokamak
from tests.support.scripted_engine import (
    ScriptedCore,
    ScriptedEngine,
    byte_tokenizer,
    chat_template,
    counts,
    says,
)
from tokamak.cli import chat, main
from tokamak.core.request import FinishReason, SamplingParams
from tokamak.llm import LLM
from tokamak.text.deepseek_chat import DeepseekChat


def scripted_llm(core: ScriptedCore) -> LLM:
    return LLM.over(core, byte_tokenizer(), chat_template(), ScriptedEngine(core=core).info)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> ScriptedCore:
    made = ScriptedCore(script=says("Four."))
    monkeypatch.setattr(tokamak, "LLM", lambda model, **options: scripted_llm(made), raising=False)
    monkeypatch.setattr(chat, "resolve_model", lambda model, *, progress, revision: model)
    return made


def prompt_text(core: ScriptedCore, at: int) -> str:
    return byte_tokenizer().decode(core.added[at].prompt_ids, skip_special_tokens=True)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_ask_answers_once_and_exits(core: ScriptedCore, capsys: pytest.CaptureFixture[str]) -> None:
    status = main.run(["chat", "--ask", "What is 2 + 2?", "--system", "Be brief."])

    assert (status, capsys.readouterr().out) == (0, "Four.\n")
    assert "Be brief." in prompt_text(core, 0)
    assert core.added[0].params.greedy
    assert core.closed


def test_a_conversation_is_remembered(
    core: ScriptedCore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "What is 2 + 2?\n\nAnd again?\n")

    status = main.run(["chat"])

    assert (status, capsys.readouterr().out) == (0, "Four.\nFour.\n")
    assert len(core.added) == 2
    assert "What is 2 + 2?" in prompt_text(core, 1)
    assert "Four." in prompt_text(core, 1)


def test_reasoning_is_shown_aside_and_not_remembered(
    core: ScriptedCore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core.script = says("They ask. [b]</think>Four.")
    info = ScriptedEngine(core=core).info
    deepseek = LLM.over(core, byte_tokenizer(), DeepseekChat("deepseek_v41"), info)
    monkeypatch.setattr(tokamak, "LLM", lambda model, **options: deepseek, raising=False)
    type_in(monkeypatch, "What is 2 + 2?\nAnd again?\n")

    status = main.run(["chat"])

    shown = capsys.readouterr()
    assert (status, shown.out) == (0, "Four.\nFour.\n")
    assert shown.err == "They ask. [b]\n" * 2
    assert "<｜Assistant｜></think>Four.<｜end" in prompt_text(core, 1)


def test_reset_forgets_and_system_is_kept_until_changed(
    core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "/system Be kind.\nfirst\n/reset\nsecond\n/system\nthird\n/quit\nnever\n")

    main.run(["chat"])

    assert [("first" in prompt_text(core, at)) for at in range(len(core.added))] == [
        True,
        False,
        False,
    ]
    assert ["Be kind." in prompt_text(core, at) for at in range(3)] == [True, True, False]


def test_help_and_unknown_commands_reach_no_model(
    core: ScriptedCore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "/help\n/rest\n")

    main.run(["chat"])

    shown = capsys.readouterr()
    assert shown.out == ""
    assert "/reset" in shown.err
    assert "There is no command /rest." in shown.err
    assert not core.added


def test_a_prompt_that_does_not_fit_is_told_and_the_chat_goes_on(
    core: ScriptedCore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core.max_model_len = 64
    type_in(monkeypatch, "x" * 100 + "\nhi\n")

    status = main.run(["chat"])

    shown = capsys.readouterr()
    assert (status, shown.out) == (0, "Four.\n")
    assert "/reset forgets the conversation" in shown.err


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said() -> None:
    core = ScriptedCore(script=counts)
    conversation = chat.Conversation(scripted_llm(core), SamplingParams(temperature=0))
    step = core.step

    def step_and_press() -> list[object]:
        if core.steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step()  # pyright: ignore[reportReturnType]

    core.step = step_and_press  # pyright: ignore[reportAttributeAccessIssue]

    last = conversation.say("go on")

    assert last is not None
    assert last.finish_reason is None
    assert 1 <= len(conversation.messages[-1]["content"]) <= 10
    assert core.aborted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_figures_tell_tokens_and_pace() -> None:
    conversation = chat.Conversation(
        scripted_llm(ScriptedCore(script=counts)), SamplingParams(temperature=0, max_tokens=3)
    )

    last = conversation.say("hi")

    assert last is not None
    assert last.finish_reason is FinishReason.LENGTH
    assert chat._figures(last).startswith("3 tokens, first after ")
    assert "cut" in chat._figures(last)
