"""Is a request turned into engine requests, or refused with the numbers that matter?"""

from __future__ import annotations

import pytest

from tests.support.scripted_engine import BOS_ID, EOS_ID, VOCAB_TOKENS, byte_tokenizer
from tokamak.core.generation import GenerationRequest
from tokamak.core.request import SamplingParams
from tokamak.engine.admission import Admission
from tokamak.errors import ContextLengthError, RequestError


def an_admission(max_model_len: int = 128) -> Admission:
    return Admission(byte_tokenizer(), VOCAB_TOKENS, max_model_len)


def a_request(prompt: str | tuple[int, ...] = "Hi", **params) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt=prompt, params=SamplingParams(**params))


def test_each_sibling_becomes_an_engine_request_of_the_same_prompt():
    adds = an_admission().admit(a_request("Hi", n=3, max_tokens=7))

    assert [add.request_id for add in adds] == ["r:0", "r:1", "r:2"]
    assert [add.sibling for add in adds] == [0, 1, 2]
    assert all(add.prompt_ids == [72, 105] and add.max_tokens == 7 for add in adds)


@pytest.mark.parametrize(("prompt_tokens", "room"), [(1, 127), (126, 2), (127, 1)])
def test_without_max_tokens_the_rest_of_the_context_is_allowed(prompt_tokens, room):
    (add,) = an_admission().admit(a_request((5,) * prompt_tokens))

    assert add.max_tokens == room


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "numbers"),
    [
        (128, None, ("128",)),
        (128, 1, ("128",)),
        (129, None, ("129", "128")),
        (129, 0, ("129", "128")),
        (126, 3, ("126", "3", "129", "128")),
        (126, 200, ("126", "200", "326", "128")),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(prompt_tokens, max_tokens, numbers):
    request = a_request((5,) * prompt_tokens, max_tokens=max_tokens)

    with pytest.raises(ContextLengthError) as refused:
        an_admission().admit(request)

    assert all(number in refused.value.message for number in numbers)
    assert refused.value.field in ("prompt", "max_tokens")
    assert refused.value.hint is not None


def test_a_prompt_that_fills_the_context_may_be_computed_without_output():
    (add,) = an_admission().admit(a_request((5,) * 128, max_tokens=0, prompt_logprobs=1))

    assert add.max_tokens == 0


def test_more_min_tokens_than_the_context_leaves_is_refused():
    with pytest.raises(ContextLengthError, match="min_tokens is 10") as refused:
        an_admission().admit(a_request((5,) * 120, min_tokens=10))

    assert refused.value.field == "min_tokens"


@pytest.mark.parametrize("prompt", ["", ()])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(RequestError, match="empty") as refused:
        an_admission().admit(a_request(prompt))

    assert refused.value.field == "prompt"


@pytest.mark.parametrize("token_id", [-1, VOCAB_TOKENS, True, "5", 1.0])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(token_id):
    with pytest.raises(RequestError, match=r"prompt\[2\]") as refused:
        an_admission().admit(a_request((5, 6, token_id)))

    assert repr(token_id) in refused.value.message
    assert refused.value.field == "prompt"


def test_a_parameter_out_of_range_is_refused():
    with pytest.raises(RequestError) as refused:
        an_admission().admit(a_request(logit_bias={VOCAB_TOKENS + 100: 5.0}))

    assert refused.value.field == "logit_bias"
    assert str(VOCAB_TOKENS + 100) in refused.value.message


def test_the_end_of_sequence_ends_a_generation_unless_it_is_ignored():
    (normal,) = an_admission().admit(a_request(stop_token_ids=(9, 3)))
    (ignoring,) = an_admission().admit(a_request(stop_token_ids=(9, 3), ignore_eos=True))

    assert normal.stop_ids == [3, 9, EOS_ID]
    assert ignoring.stop_ids == [3, 9]


def test_special_tokens_written_in_a_chat_prompt_become_their_ids():
    (add,) = an_admission().admit(a_request("<bos>a"))

    assert add.prompt_ids == [BOS_ID, ord("a")]


def test_a_text_that_cannot_fit_is_refused_without_being_encoded(monkeypatch):
    admission = an_admission()
    longest = max(len(admission.tokenizer.token_bytes(i)) for i in range(VOCAB_TOKENS))
    monkeypatch.setattr(admission.tokenizer, "encode", None)

    with pytest.raises(ContextLengthError, match="at least 129 tokens") as refused:
        admission.admit(a_request("x" * (128 * longest + 1)))

    assert str(128 * longest + 1) in refused.value.message
