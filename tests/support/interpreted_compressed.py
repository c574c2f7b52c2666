"""How far are the forms of Triton's attention over listed rows from the reference, interpreted on the CPU?

Run as a process of its own with TRITON_INTERPRET=1. Prints the difference of every case by form, over its tolerance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.interpreted import ROOT, mend_interpreter
from tests.support.interpreted_attention import mend_dots
from tests.support.op_cases import gap
from tokamak.ops.case import Case
from tokamak.ops.sparse_attention import sparse_attention
from tokamak.ops.sparse_attention.cases import sparse_attention_cases

FORMS = ("chosen", "two tiles of heads in four splits")


def runs_in(form: str, case: Case) -> bool:
    """The chosen form runs every case, the other those of one width in float32 and the long ones."""
    return form == "chosen" or "window 33" in case.name or "window 128" in case.name


def interpreted_sparse_attention() -> dict[str, dict[str, float]]:
    """By form, the difference of each case over its tolerance."""
    command = [sys.executable, "-m", "tests.support.interpreted_compressed"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _main() -> None:
    from tokamak.ops.sparse_attention.triton import (
        SparseForm,
        attend_sparsely,
        triton_sparse_attention,
    )

    def split(q, *others):
        if len(q):
            attend_sparsely(q, *others, SparseForm(2, 16, 4, 4, 1))

    mend_interpreter()
    mend_dots()
    gaps: dict[str, dict[str, float]] = {form: {} for form in FORMS}
    for case in sparse_attention_cases:
        expected = case.outcome(sparse_attention.reference)
        for form, call in zip(FORMS, (triton_sparse_attention, split), strict=True):
            if runs_in(form, case):
                gaps[form][case.name] = gap(case.outcome(call), expected) / case.tolerance
    sys.stdout.write(json.dumps(gaps) + "\n")


if __name__ == "__main__":
    _main()
