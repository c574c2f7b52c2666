"""How far are Triton backends from the reference, when kernels are interpreted on the CPU?

Whether Triton interprets is settled when it is imported, so the cases run in a process of their own.
Four things of Triton 3.6's interpreter are put right there: it cuts bfloat16 and fp8 off instead of rounding them,
multiplies the bits of bfloat16, knows no NaN of fp8, and NumPy 2.4 refuses the arrays of one number it makes loop
bounds of.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.op_cases import gap
from tokamak.ops.case import Case
from tokamak.ops.load import load_backends
from tokamak.ops.registry import OPS

ROOT = Path(__file__).resolve().parents[2]


def interpreted_gaps(
    cases: Mapping[str, str], backend: str = "triton", limits: Mapping[str, int] | None = None
) -> dict[str, dict[str, float]]:
    """The difference of every case, by op and case. cases: by op, the `module:list` where its cases are.

    limits: values of some `module:NAME`, where a few cases are to look like many to a kernel.
    """
    given = [json.dumps(dict(each)) for each in (cases, limits or {})]
    return printed_by("interpreted", backend, *given)


def printed_by(module: str, *arguments: str) -> Any:
    """The JSON that a module of this folder prints last, in a process in which Triton interprets kernels."""
    command = [sys.executable, "-m", f"tests.support.{module}", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def cases_at(place: str) -> list[Case]:
    """The cases that `module:name` names."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def mend_interpreter() -> None:
    """Convert and multiply numbers as a device does, and let loops run over numbers that kernels computed."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    # How numbers are kept while kernels are interpreted, and what they are.
    kinds = {
        tl.float32: (np.float32, torch.float32),
        tl.float16: (np.float16, torch.float16),
        tl.bfloat16: (np.uint16, torch.bfloat16),
        tl.float8e4nv: (np.uint8, torch.float8_e4m3fn),
    }

    def rounded(numbers, kind, new_kind, rounding_mode):
        (kept, dtype), (new_kept, new_dtype) = kinds[kind], kinds[new_kind]
        found = torch.from_numpy(np.array(numbers, dtype=kept, order="C")).view(dtype).to(new_dtype)
        return found.view(torch.uint8).numpy().view(new_kept).reshape(np.shape(numbers))

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    dot = interpreter.InterpreterBuilder.create_dot

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    def multiplied(self, a, b, d, input_precision, max_num_imprecise_acc):
        return dot(self, wide(a), wide(b), d, input_precision, max_num_imprecise_acc)

    interpreter._convert_float, interpreter._patch_lang_tensor = rounded, patched
    interpreter.InterpreterBuilder.create_dot = multiplied


def _main(backend: str, cases: str, limits: str) -> None:
    load_backends()
    for place, limit in json.loads(limits).items():
        module, name = place.split(":")
        assert hasattr(importlib.import_module(module), name), f"there is no {place}"
        setattr(importlib.import_module(module), name, limit)
    mend_interpreter()
    gaps: dict[str, dict[str, float]] = {}
    for op_name, place in json.loads(cases).items():
        op = OPS[op_name]
        call = next(each.call for each in op.backends if each.name == backend)
        gaps[op_name] = {
            str(case): gap(case.outcome(call), case.outcome(op.reference))
            for case in cases_at(place)
        }
    sys.stdout.write(json.dumps(gaps) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
