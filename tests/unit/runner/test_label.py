"""Does a step's label say what it is, and are dummies never taken for real steps?"""

from __future__ import annotations

import pytest
import torch

from tests.support.preparation import a_decode_plan, shape_of
from tokamak.core.plan import Mode
from tokamak.runner.dummy import dummy_plan
from tokamak.runner.label import profiled_spans, step_label, step_range

DECODE = a_decode_plan([3, 4, 5])
PROMPT = dummy_plan(prefill_tokens=5, decode_rows=0)
MIXED = dummy_plan(prefill_tokens=5, decode_rows=2)

REAL_PREFIXES = ("prefill", "mixed", "decode", "eager_decode")
"""What analysis tools look for."""


@pytest.mark.parametrize(
    ("plan", "shape", "label"),
    [
        (PROMPT, shape_of(PROMPT), "prefill[bs=1/1 tok=5/5 p=1 d=0]"),
        (
            MIXED,
            shape_of(MIXED, token_padding=9, mode=Mode.TOKEN_GRAPH),
            "mixed[bs=3/3 tok=7/16 p=1 d=2]",
        ),
        (
            DECODE,
            shape_of(DECODE, running_requests=4, mode=Mode.REQUEST_GRAPH),
            "decode[bs=3/4 tok=3/4 p=0 d=3]",
        ),
        (DECODE, shape_of(DECODE), "eager_decode[bs=3/3 tok=3/3 p=0 d=3]"),
        (DECODE, shape_of(DECODE, dummy=True), "dummy_eager_decode[bs=3/3 tok=3/3 p=0 d=3]"),
        (PROMPT, shape_of(PROMPT, dummy=True), "dummy_prefill[bs=1/1 tok=5/5 p=1 d=0]"),
    ],
)
def test_a_label_tells_the_kind_and_the_sizes(plan, shape, label):
    assert step_label(shape, plan) == label


@pytest.mark.parametrize("plan", [PROMPT, MIXED, DECODE], ids=["prefill", "mixed", "decode"])
@pytest.mark.parametrize("mode", list(Mode))
def test_no_dummy_begins_like_a_real_step(plan, mode):
    label = step_label(shape_of(plan, mode=mode, dummy=True), plan)

    assert not label.startswith(REAL_PREFIXES)


def test_steps_and_spans_are_ranges_of_pytorchs_profiler():
    spans = profiled_spans()

    with (
        torch.profiler.profile() as profile,
        step_range(DECODE, shape_of(DECODE)),
        spans.span("stage"),
    ):
        torch.ones(3)

    names = {event.name for event in profile.events()}
    assert {"eager_decode[bs=3/3 tok=3/3 p=0 d=3]", "tokamak::stage"} <= names


def test_without_a_profiler_a_step_opens_no_range():
    assert step_range(DECODE, shape_of(DECODE)) is step_range(PROMPT, shape_of(PROMPT))
