"""How far are the forms of Triton's paged attention from the reference, interpreted on the CPU?

Run as a process of its own with TRITON_INTERPRET=1. Prints the largest difference of every case by form, as a part of
the case's tolerance, and what the counters of merged splits hold afterwards.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from tests.support.interpreted import mend_interpreter, printed_by
from tests.support.op_cases import gap
from tokamak.ops.case import Case, difference
from tokamak.ops.paged_attention.cases import paged_attention_cases
from tokamak.ops.paged_attention.reference import paged_attention
from tokamak.ops.rotate_cache_attend import rotate_cache_attend
from tokamak.ops.rotate_cache_attend.cases import rotate_cache_attend_cases

FORMS = (
    "chosen", "three splits", "three splits ahead", "four splits merged afterwards", "one split ahead", "one loop"
)  # fmt: skip

AHEAD = "three splits ahead"

DECODE_FORMS = (
    "chosen", "three splits", "three splits ahead", "four splits merged afterwards", "one split ahead",
    "two splits asking",
)  # fmt: skip
"""Of rotate_cache_attend."""


def runs_in(form: str, case: Case) -> bool:
    """The chosen form runs every case, the others those in float32; one of them also those cached in fp8."""
    in_fp8 = form == AHEAD and case.name.endswith(" float32 cached in fp8")
    return form == "chosen" or in_fp8 or case.name.endswith(" float32")


def interpreted_forms(op: str = "paged_attention") -> dict[str, dict[str, float]]:
    """By form, the largest difference of each case over its tolerance; `counters` of zero and others."""
    return printed_by("interpreted_attention", op)


def _forms() -> dict[str, Callable[..., None]]:
    """What each form calls for a case of its kind: the backend, decode twice, prefill."""
    from tokamak.ops.paged_attention.triton import triton_paged_attention
    from tokamak.ops.paged_attention.triton_decode import DecodeForm, paged_decode
    from tokamak.ops.paged_attention.triton_prefill import PrefillForm, paged_prefill

    def decode(form):
        def call(q, k, v, table, lengths, starts, q_width, scale, window, out, sinks):
            del starts
            paged_decode(q, k, v, table, lengths, q_width, scale, window, out, form, sinks=sinks)

        return call

    def prefill(q, k, v, table, lengths, starts, q_width, scale, window, out, sinks):
        del q_width
        form = PrefillForm(32, 32, 4, 2, one_loop=True)
        paged_prefill(q, k, v, table, lengths, starts, scale, window, out, form, sinks)

    kinds = (
        triton_paged_attention,
        decode(DecodeForm(3, 32, 4, 3, "here")),
        decode(DecodeForm(3, 32, 2, 3, "here", ahead=True)),
        decode(DecodeForm(4, 16, 4, 3, "after", ahead=True)),
        decode(DecodeForm(1, 64, 4, 3, "here", ahead=True)),
        prefill,
    )
    return dict(zip(FORMS, kinds, strict=True))


def _decode_forms() -> dict[str, Callable[..., None]]:
    """What each form of rotate_cache_attend calls."""
    from tokamak.ops.paged_attention.triton_decode import DecodeForm
    from tokamak.ops.rotate_cache_attend.triton import TritonDecode
    from tokamak.ops.rotate_cache_attend.triton_kernel import fetch_nothing

    forms = (
        (None, None),
        (None, DecodeForm(3, 32, 4, 3, "here")),
        (None, DecodeForm(3, 32, 2, 3, "here", ahead=True)),
        (None, DecodeForm(4, 16, 4, 3, "after", ahead=True)),
        (None, DecodeForm(1, 64, 4, 3, "here", ahead=True)),
        (fetch_nothing, DecodeForm(2, 32, 2, 3, "here")),
    )
    calls = (TritonDecode(fetch=fetch, form=form).rotate_cache_attend for fetch, form in forms)
    return dict(zip(DECODE_FORMS, calls, strict=True))


def _of_decode() -> dict[str, dict[str, float]]:
    gaps: dict[str, dict[str, float]] = {form: {} for form in DECODE_FORMS}
    forms = _decode_forms()
    for case in rotate_cache_attend_cases:
        expected = case.outcome(rotate_cache_attend.reference)
        for form, call in forms.items():
            if runs_in(form, case):
                gaps[form][case.name] = gap(case.outcome(call), expected) / case.tolerance
    return gaps


def _of_attention() -> dict[str, dict[str, float]]:
    gaps: dict[str, dict[str, float]] = {form: {} for form in FORMS}
    forms = _forms()
    for case in paged_attention_cases:
        expected = case.outcome(paged_attention.reference)
        q_width = case.make()[6]
        for form, call in forms.items():
            if form == "chosen" or (runs_in(form, case) and (q_width or "split" not in form)):
                gaps[form][case.name] = difference(case.outcome(call), expected) / case.tolerance
    return gaps


def _main(op: str) -> None:
    mend_interpreter()
    gaps = _of_attention() if op == "paged_attention" else _of_decode()
    from tokamak.ops.paged_attention.triton_decode import arrivals

    counters = arrivals(torch.device("cpu"))
    assert counters is not None
    gaps["counters"] = {"raised": int(counters.count_nonzero())}
    sys.stdout.write(json.dumps(gaps) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
