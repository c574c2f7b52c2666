"""How far are the Triton products of few rows from their references, when kernels are interpreted on the CPU?

The interpreter of Triton 3.6 multiplies the bits of bfloat16 tiles as if they were integers; here it widens
them first. Every op runs in one process, as importing takes longer than interpreting.
"""

from __future__ import annotations

import json
import sys

from tests.support.interpreted import cases_at, mend_interpreter, printed_by
from tokamak.ops.case import difference
from tokamak.ops.linear.tile import Tile
from tokamak.ops.load import load_backends
from tokamak.ops.registry import OPS

CASES = "tokamak.ops.linear.few_rows_cases"
NAMES = ("few_rows_linear", "few_rows_after_norm", "few_rows_gated", "few_rows_into")


FORMS = {"chosen": None, "lanes": Tile(4, 256, 1), "cores": Tile(16, 32, 2, 2)}
"""Tiles that every case is multiplied with, as far as they take its rows."""


def product_gaps(form: str) -> dict[str, dict[str, tuple[float, float]]]:
    """The difference and the tolerance of every case that a form takes, by op and case."""
    return printed_by("interpreted_products", form)


def mend_products() -> None:
    """Widen bfloat16 tiles before they are multiplied."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def widened(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (
                interpreter.TensorHandle(
                    interpreter._convert_float(each.data, tl.bfloat16, tl.float32, None).view("f4"),
                    tl.float32,
                )
                for each in (a, b)
            )
        return multiply(self, a, b, d, input_precision, max_num_imprecise_acc)

    builder.create_dot = widened


def takes(form: str, case: str) -> bool:
    """Whether a form multiplies as many rows as a case has: lanes take up to 8, cores 2 or more."""
    rows = int(case.split()[0])
    return form == "chosen" or (rows <= 8 if form == "lanes" else rows > 1)


def _main(form: str) -> None:
    load_backends()
    mend_interpreter()
    mend_products()
    tile = FORMS[form]
    if tile is not None:
        from tokamak.ops.linear import triton_few

        triton_few.tile_for = lambda *_, **__: tile
    gaps = {}
    for name in NAMES:
        op = OPS[name]
        call = next(each.call for each in op.backends if each.name == "triton")
        gaps[name] = {
            str(case): (
                difference(case.outcome(call), case.outcome(op.reference)),
                case.tolerance,
            )
            for case in cases_at(f"{CASES}:{name}_cases")
            if takes(form, str(case))
        }
    sys.stdout.write(json.dumps(gaps))


if __name__ == "__main__":
    _main(sys.argv[1])
