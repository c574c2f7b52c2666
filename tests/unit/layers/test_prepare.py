"""Is each half of a step prepared with its own real sizes, and does padding belong to none?"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from tests.support.preparation import a_decode_plan, an_arena, prepared, shape_of
from tokamak.core.inputs import AttnHalf, AttnStep
from tokamak.core.plan import Grants, Mode, StepPlan, StepShape
from tokamak.layers.attention.prepare import AttnBuilder

CPU = torch.device("cpu")
MODEL_TOKENS = 256


def a_plan(*prefill: tuple[int, int], decode: tuple[int, ...] = (), q_width: int = 1) -> StepPlan:
    """Prefill rows of (computed before, tokens), and decode rows with so many cached tokens."""
    rows = [*prefill, *((before, q_width) for before in decode)]
    final = np.zeros(len(rows), dtype=np.bool_)
    final[: len(prefill)] = True
    return StepPlan(
        seq=3,
        request_ids=tuple(f"r{row}" for row in range(len(rows))),
        slots=np.arange(1, len(rows) + 1, dtype=np.int32),
        query_lens=np.array([tokens for _, tokens in rows], dtype=np.int32),
        computed_before=np.array([before for before, _ in rows], dtype=np.int32),
        prefill_rows=len(prefill),
        final_chunk=final,
        admissions=(),
        grants=Grants.none(),
    )


def a_builder(kind: type[AttnBuilder] = AttnBuilder) -> AttnBuilder:
    return kind(CPU, max_requests=8, max_model_len=MODEL_TOKENS, widths=(1, 4))


def attention_of(
    plan: StepPlan, shape: StepShape | None = None, builder: AttnBuilder | None = None
) -> AttnStep:
    """The halves of a plan, at its own size unless a shape says otherwise."""
    shape = shape or shape_of(plan)
    inputs = prepared(an_arena(), plan, shape)
    return (builder or a_builder()).prepare(plan, shape, inputs, None)


def at_bucket(plan: StepPlan, tokens: int, mode: Mode = Mode.TOKEN_GRAPH) -> StepShape:
    """The shape of a plan that a token bucket holds."""
    return shape_of(plan, token_padding=tokens - plan.scheduled_tokens, mode=mode)


def numbers(half: AttnHalf) -> dict[str, object]:
    """Everything a half says."""
    return {
        "requests": (half.first_request, half.last_request),
        "tokens": (half.first_token, half.last_token),
        "q_width": half.q_width,
        "query_starts": half.query_starts.tolist(),
        "longest_tokens": half.longest_tokens,
    }


MIXED = a_plan((0, 5), (8, 3), decode=(30, 41, 12))


class BoundHalves(AttnBuilder):
    """Takes calls of either half as long as the real one would, and notes what it was given."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.given: dict[str, dict[str, object]] = {}

    def prepare_prefill(self, **sizes):
        return self._bound("prefill", AttnBuilder.prepare_prefill, sizes)

    def prepare_decode(self, **sizes):
        return self._bound("decode", AttnBuilder.prepare_decode, sizes)

    def _bound(self, name, real, sizes):
        bound = inspect.signature(real).bind(self, **sizes)
        bound.apply_defaults()
        self.given[name] = {key: value for key, value in bound.arguments.items() if key != "self"}
        return name


@pytest.mark.parametrize("tokens", [11, 16, 24])
def test_a_mixed_step_calls_both_halves_as_they_are_declared_and_with_their_real_sizes(tokens):
    """MIX-2, MIX-3 and F4."""
    builder = a_builder(BoundHalves)
    shape = shape_of(MIXED) if tokens == 11 else at_bucket(MIXED, tokens)
    assert isinstance(builder, BoundHalves)

    step = attention_of(MIXED, shape, builder)

    starts = builder.given["prefill"].pop("query_starts")
    assert isinstance(starts, torch.Tensor)
    assert starts[:3].tolist() == [0, 5, 8]
    assert builder.given == {
        "prefill": {"running_requests": 2, "running_tokens": 8, "longest_tokens": 11},
        "decode": {
            "first_request": 2,
            "first_token": 8,
            "running_requests": 3,
            "running_tokens": 3,
            "longest_tokens": 42,
        },
    }
    assert (step.prefill, step.decode) == ("prefill", "decode")


def demanding_decode(self, *, page_tokens, **sizes):
    """A half that was given one more required argument, which its caller does not know."""


def test_a_half_that_asks_for_more_than_its_caller_gives_is_found(monkeypatch):
    """F4: every mixed step of the source system raised, while a test of the source text passed."""
    monkeypatch.setattr(AttnBuilder, "prepare_decode", demanding_decode)

    with pytest.raises(TypeError, match="page_tokens"):
        attention_of(MIXED, builder=a_builder(BoundHalves))


class PaddedHalves(AttnBuilder):
    """Hands the decode half the padding too: the fault of a size that was rounded up."""

    def prepare_mixed(self, **sizes):
        return super().prepare_mixed(**{**sizes, "decode_requests": 6, "decode_tokens": 6})


@pytest.mark.parametrize(("kind", "is_whole"), [(AttnBuilder, True), (PaddedHalves, False)])
def test_padding_of_a_token_bucket_lies_behind_both_halves(kind, is_whole):
    step = attention_of(MIXED, at_bucket(MIXED, 14), a_builder(kind))

    assert (step.tokens == MIXED.scheduled_tokens) is is_whole


@pytest.mark.parametrize("name", ["prepare_prefill", "prepare_decode", "prepare_mixed"])
def test_every_size_is_required_and_given_by_name(name):
    parameters = list(inspect.signature(getattr(AttnBuilder, name)).parameters.values())[1:]

    assert parameters
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters)
    assert all(p.default is inspect.Parameter.empty for p in parameters)


def test_halves_of_a_mixed_step_lie_one_behind_the_other():
    step = attention_of(MIXED, at_bucket(MIXED, 16))

    assert [numbers(half) for half in step.halves] == [
        {
            "requests": (0, 2),
            "tokens": (0, 8),
            "q_width": 0,
            "query_starts": [0, 5, 8],
            "longest_tokens": 11,
        },
        {
            "requests": (2, 5),
            "tokens": (8, 11),
            "q_width": 1,
            "query_starts": [0, 1, 2, 3],
            "longest_tokens": 42,
        },
    ]


@pytest.mark.parametrize("tokens", [8, 16])
def test_a_step_of_prefill_rows_alone_has_no_decode_half(tokens):
    """MIX-8."""
    plan = a_plan((0, 5), (8, 3))

    step = attention_of(plan, shape_of(plan) if tokens == 8 else at_bucket(plan, tokens))

    assert step.decode is None
    assert step.prefill is not None
    assert numbers(step.prefill) == {
        "requests": (0, 2),
        "tokens": (0, 8),
        "q_width": 0,
        "query_starts": [0, 5, 8],
        "longest_tokens": 11,
    }


@pytest.mark.parametrize(
    ("mode", "running", "longest"),
    [(Mode.EAGER, 3, 42), (Mode.EAGER, 4, 42), (Mode.REQUEST_GRAPH, 4, MODEL_TOKENS)],
)
def test_a_step_of_decode_rows_alone_has_no_prefill_half_and_holds_its_padding(
    mode, running, longest
):
    """MIX-8; what may be recorded whole is as wide as any step."""
    plan = a_decode_plan([30, 41, 12])

    step = attention_of(plan, shape_of(plan, running_requests=running, mode=mode))

    assert step.prefill is None
    assert step.decode is not None
    assert numbers(step.decode) == {
        "requests": (0, running),
        "tokens": (0, running),
        "q_width": 1,
        "query_starts": list(range(running + 1)),
        "longest_tokens": longest,
    }


@pytest.mark.parametrize("tokens", [4, 6, 7, 16])
@pytest.mark.parametrize("mode", [Mode.EAGER, Mode.TOKEN_GRAPH])
def test_decode_rows_beside_a_prefilling_peer_leave_the_bucket_s_padding_behind_them(tokens, mode):
    plan = a_decode_plan([30, 41, 12])

    step = attention_of(plan, at_bucket(plan, tokens, mode))

    assert step.prefill is None
    assert step.decode is not None
    assert numbers(step.decode) == {
        "requests": (0, 3),
        "tokens": (0, 3),
        "q_width": 1,
        "query_starts": [0, 1, 2, 3],
        "longest_tokens": 42,
    }


def test_wide_decode_rows_are_counted_by_requests():
    step = attention_of(a_plan((0, 5), decode=(30, 41), q_width=4))

    assert step.decode is not None
    assert numbers(step.decode) == {
        "requests": (1, 3),
        "tokens": (5, 13),
        "q_width": 4,
        "query_starts": [0, 4, 8],
        "longest_tokens": 45,
    }


def test_rejected_tokens_shorten_what_the_host_knows_of_a_request():
    plan = a_decode_plan([30, 41], q_width=4)
    shape = shape_of(plan)
    inputs = prepared(an_arena(), plan, shape)

    step = a_builder().prepare(plan, shape, inputs, np.array([0, 3], dtype=np.int32))

    assert step.decode is not None
    assert step.decode.longest_tokens == 42


def test_steps_of_request_buckets_are_told_apart_by_size_alone():
    builder = a_builder()
    plans = [a_decode_plan([9, 20]), a_decode_plan([9]), a_decode_plan([5], q_width=4)]
    shapes = [
        shape_of(plan, running_requests=size, mode=Mode.REQUEST_GRAPH)
        for plan, size in zip(plans, (4, 2, 2), strict=True)
    ]

    steps = [attention_of(plan, shape, builder) for plan, shape in zip(plans, shapes, strict=True)]

    sizes = [(step.decode.last_request, step.decode.last_token) for step in steps]
    assert sizes == [(4, 4), (2, 2), (2, 8)]
    assert [step.decode.longest_tokens for step in steps] == [MODEL_TOKENS] * 3
    again = a_decode_plan([40, 41, 42])
    shape = shape_of(again, running_requests=4, mode=Mode.REQUEST_GRAPH)
    assert attention_of(again, shape, builder) is steps[0]
