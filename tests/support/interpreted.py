"""How far are Triton backends from the reference, when kernels are interpreted on the CPU?

Whether Triton interprets is settled when it is imported, so the cases run in a process of their own.
Two things of Triton 3.6's interpreter are put right there: it cuts bfloat16 and E4M3 off instead of rounding them,
and NumPy 2.4 refuses the arrays of one number it makes loop bounds of.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from tests.support.op_cases import gap
from tokamak.ops.case import Case
from tokamak.ops.load import load_backends
from tokamak.ops.registry import OPS

ROOT = Path(__file__).resolve().parents[2]


def interpreted_gaps(
    cases: Mapping[str, str], backend: str = "triton"
) -> dict[str, dict[str, float]]:
    """The difference of every case, by op and case. cases: by op, the `module:list` where its cases are."""
    command = [sys.executable, "-m", "tests.support.interpreted", backend, json.dumps(dict(cases))]
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
    """Round float32 as a device does, read E4M3, and let loops run over numbers that kernels computed."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, patch = interpreter._convert_float, interpreter._patch_lang_tensor

    def rounded(numbers, kind, new_kind, rounding_mode):
        if kind == tl.float8e4nv:
            codes = torch.from_numpy(np.array(numbers).view(np.uint8)).view(torch.float8_e4m3fn)
            wide = codes.float().numpy()
            if new_kind == tl.float32:
                return wide.view(np.uint32)
            if new_kind == tl.float16:
                return wide.astype(np.float16).view(np.uint16)
            return rounded(wide, tl.float32, new_kind, rounding_mode)
        if kind != tl.float32 or new_kind not in (tl.bfloat16, tl.float8e4nv):
            return convert(numbers, kind, new_kind, rounding_mode)
        wide = torch.from_numpy(np.array(numbers).view(np.float32))
        if new_kind == tl.float8e4nv:
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return wide.bfloat16().view(torch.uint16).numpy()

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._convert_float, interpreter._patch_lang_tensor = rounded, patched


def _main(backend: str, cases: str) -> None:
    load_backends()
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
