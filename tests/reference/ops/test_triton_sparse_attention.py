"""Does Triton's attention over listed rows compute what the reference does, and does it fit on the chips it is for?"""

import functools
import importlib.util

import pytest
import torch

from tests.support.interpreted_compressed import FORMS, interpreted_sparse_attention, runs_in
from tests.support.kernels import uses_of
from tokamak.ops.load import load_backends
from tokamak.ops.sparse_attention.cases import sparse_attention_cases

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
    pytest.mark.timeout(300),
]
PROCESSORS = 132
SHARED_BYTES = {"nvidia": 227 << 10, "amd": 64 << 10}
"""What a program may have of the memory that its threads share."""

load_backends()
form_gaps = functools.cache(interpreted_sparse_attention)


@pytest.mark.parametrize(
    ("form", "case"),
    [
        pytest.param(form, case.name, id=f"{form}: {case}")
        for form in FORMS
        for case in sparse_attention_cases
        if runs_in(form, case)
    ],
)
def test_every_form_agrees_with_the_reference(form, case):
    assert form_gaps()[form][case] <= 1.0


def a_step(tokens, heads, dtype, entries=512):
    """Queries of DeepSeek V4.1's sizes, without numbers."""
    empty = functools.partial(torch.empty, device="meta")
    q = empty((tokens, heads, 512), dtype=dtype)
    tables = empty((tokens, 4096), dtype=torch.int32)
    ints = empty(tokens + 1, dtype=torch.int32)
    return (
        q, empty((99, 1, 128, 512), dtype=dtype), tables, empty((99, 1, 64, 512), dtype=dtype), tables,
        empty((tokens, entries), dtype=torch.int32), ints[:-1], ints, 1, 128, 512**-0.5, empty(heads),
        torch.empty_like(q),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("vendor", SHARED_BYTES)
def test_tiles_of_real_sizes_fit(compile_for, monkeypatch, vendor, heads, dtype):
    from tokamak.ops.sparse_attention import triton as backend

    monkeypatch.setattr(torch.version, "hip", "6.4" if vendor == "amd" else None)
    monkeypatch.setattr(backend, "processors_of", lambda device: PROCESSORS)

    kernels = compile_for(vendor, "sparse_attention", [a_step(1, heads, dtype)])

    assert {name for name, *_ in kernels} == {"_sparse_attention_kernel", "_merge_attended_kernel"}
    assert all(kernel.metadata.shared <= SHARED_BYTES[vendor] for kernel in kernels.values())


def test_steps_of_all_sizes_share_kernels(compile_for, monkeypatch):
    from tokamak.ops.sparse_attention import triton as backend

    monkeypatch.setattr(backend, "processors_of", lambda device: PROCESSORS)
    steps = [a_step(tokens, 64, torch.bfloat16) for tokens in (67, 128, 129, 1000)]

    assert len(compile_for("nvidia", "sparse_attention", steps)) == 1


def test_rows_of_far_blocks_are_found_in_64_bits(compile_for):
    """A cache of a million tokens has more numbers than 32 bits count."""
    step = a_step(300, 64, torch.bfloat16)
    (kernel,) = compile_for("nvidia", "sparse_attention", [step]).values()

    for stride in ("window_block", "entry_block", "window_table", "entry_table"):
        assert uses_of(f"stride_{stride}", kernel) == {"arith.extsi"}
