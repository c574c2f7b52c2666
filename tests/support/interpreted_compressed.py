"""How far are the forms of Triton's attention over listed entries, and of its indexer, from the references?

Run as a process of its own with TRITON_INTERPRET=1: kernels are interpreted on the CPU. Prints the difference of
every case by form.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from tests.support.interpreted import mend_interpreter, printed_by
from tests.support.op_cases import gap
from tokamak.ops.case import Case
from tokamak.ops.indexer import select_entries
from tokamak.ops.indexer.cases import select_entries_cases
from tokamak.ops.registry import Op
from tokamak.ops.sparse_attention import sparse_attention
from tokamak.ops.sparse_attention.cases import sparse_attention_cases
from tokamak.ops.walk_plan import sizes

OPS: dict[str, tuple[Op[..., Any], list[Case]]] = {
    "sparse_attention": (sparse_attention, sparse_attention_cases),
    "select_entries": (select_entries, select_entries_cases),
}
FORMS = ("chosen", "in pieces")
"""In pieces: two tiles of heads in four splits; few scores of a row at a time, in chunks that leave their best, and few
rows at a time."""
SCORE_ROOM = {"chosen": sizes.SCORE_ROOM, "in pieces": 300}
IN_PIECES = (
    "small blocks window 33 and entries float32", "decode window 33 and entries float32",
    "equal scores decode alone", "equal scores small blocks makes candidates",
    "walked drafts", "decode of records", "decode window 33 and entries turned back",
)  # fmt: skip
LEFT_TO_DEVICES = (
    "window 1 bfloat16",
    "window 1 and entries bfloat16",
    "window 8 bfloat16",
    "window 8 and entries bfloat16",
)


def runs_in(form: str, case: Case) -> bool:
    """The chosen form runs nearly every case, the other some of every kind; a device runs all."""
    if form == "chosen":
        return not case.name.endswith(LEFT_TO_DEVICES)
    return any(part in case.name for part in IN_PIECES)


def interpreted_forms(op: str) -> dict[str, dict[str, float]]:
    """By form, the difference of each case of an op."""
    return printed_by("interpreted_compressed", op)


def _calls(op: str) -> tuple[Callable[..., object], ...]:
    """What every form calls."""
    from tokamak.ops.indexer.triton import select_in_form, triton_select_entries
    from tokamak.ops.indexer.triton_select import SelectForm
    from tokamak.ops.sparse_attention.triton import (
        SparseForm,
        attend_sparsely,
        triton_sparse_attention,
    )

    def attend(*arguments: Any) -> None:
        if len(arguments[0]):
            attend_sparsely(*arguments[:14], SparseForm(2, 16, 4, 4, 1), *arguments[14:])  # pyright: ignore[reportCallIssue]

    def choose(*arguments: Any) -> None:
        form, plans = arguments[12:]
        select_in_form(*arguments[:12], SelectForm(4, 16), 1, form, plans)  # pyright: ignore[reportCallIssue]

    if op == "select_entries":
        return triton_select_entries, choose
    return triton_sparse_attention, attend


def _main(name: str) -> None:
    mend_interpreter()
    op, cases = OPS[name]
    gaps: dict[str, dict[str, float]] = {form: {} for form in FORMS}
    for case in cases:
        expected = case.outcome(op.reference)
        for form, call in zip(FORMS, _calls(name), strict=True):
            sizes.SCORE_ROOM = SCORE_ROOM[form]
            if runs_in(form, case):
                gaps[form][case.name] = gap(case.outcome(call), expected)
    sys.stdout.write(json.dumps(gaps) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
