"""Do Triton's indexer and attention over listed entries compute what the references do, and do they fit on chips?"""

import functools
import importlib.util

import pytest
import torch

from tests.support.interpreted_compressed import FORMS, OPS, interpreted_forms, runs_in
from tests.support.kernels import uses_of
from tokamak.ops.load import load_backends
from tokamak.ops.records import FP8, MXFP4, NVFP4

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]
PROCESSORS = 132
SHARED_BYTES = {"nvidia": 227 << 10, "amd": 64 << 10}
"""What a program may have of the memory that its threads share."""

load_backends()
form_gaps = functools.cache(interpreted_forms)


@pytest.mark.parametrize(
    ("op", "form", "case"),
    [
        pytest.param(op, form, case, id=f"{op} {form}: {case}")
        for op, (_, cases) in OPS.items()
        for form in FORMS
        for case in cases
        if runs_in(form, case)
    ],
)
def test_every_form_agrees_with_the_reference(op, form, case):
    assert form_gaps(op)[form][case.name] <= case.tolerance


def a_step(tokens, heads, dtype, entries=512, packed=False):
    """Queries of DeepSeek V4.1's sizes, without numbers, turned back; `packed`: caches are records."""
    empty = functools.partial(torch.empty, device="meta")
    q = empty((tokens, heads, 512), dtype=dtype)
    tables = empty((tokens, 4096), dtype=torch.int32)
    ints = empty(tokens + 1, dtype=torch.int32)
    rows, few = empty((99, 1, 128, 512), dtype=dtype), empty((99, 1, 64, 512), dtype=dtype)
    forms = (None, None)
    if packed:
        rows, few = (
            empty((99, 1, 128, 528), dtype=torch.uint8),
            empty((99, 1, 64, 288), dtype=torch.uint8),
        )
        forms = (FP8, NVFP4)
    return (
        q, rows, tables, few, tables, empty((tokens, entries), dtype=torch.int32), ints[:-1], ints, 1, 128,
        None, 512**-0.5, empty(heads), torch.empty_like(q), *forms, empty((4096, 64)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "dtype", "packed"),
    [
        (8, torch.bfloat16, False),
        (64, torch.bfloat16, False),
        (128, torch.bfloat16, False),
        (8, torch.float32, False),
        (64, torch.bfloat16, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("vendor", SHARED_BYTES)
def test_tiles_of_real_sizes_fit(compile_for, monkeypatch, vendor, heads, dtype, packed):
    from tokamak.ops.sparse_attention import triton as backend

    monkeypatch.setattr(torch.version, "hip", "6.4" if vendor == "amd" else None)
    monkeypatch.setattr(backend, "processors_of", lambda device: PROCESSORS)

    kernels = compile_for(vendor, "sparse_attention", [a_step(1, heads, dtype, packed=packed)])

    assert {name for name, *_ in kernels} == {"_sparse_attention_kernel", "_merge_attended_kernel"}
    assert all(kernel.metadata.shared <= SHARED_BYTES[vendor] for kernel in kernels.values())


def test_steps_of_all_sizes_share_kernels(compile_for, monkeypatch):
    from tokamak.ops.sparse_attention import triton as backend

    monkeypatch.setattr(backend, "processors_of", lambda device: PROCESSORS)
    steps = [a_step(tokens, 64, torch.bfloat16) for tokens in (67, 128, 129, 1000)]

    assert len(compile_for("nvidia", "sparse_attention", steps)) == 1


def test_rows_of_far_blocks_are_found_in_64_bits(compile_for, monkeypatch):
    """A cache of a million tokens has more numbers than 32 bits count."""
    from tokamak.ops.sparse_attention import triton as backend

    monkeypatch.setattr(backend, "processors_of", lambda device: PROCESSORS)
    step = a_step(300, 64, torch.bfloat16)
    (kernel,) = compile_for("nvidia", "sparse_attention", [step]).values()

    for stride in ("window_block", "entry_block", "window_table", "entry_table"):
        assert uses_of(f"stride_{stride}", kernel) == {"arith.extsi"}


def a_choice(tokens, kind, q_width=1, form=None):
    """Index queries of DeepSeek V4.1's sizes in a context of 524288 tokens, without numbers."""
    empty = functools.partial(torch.empty, device="meta")
    ints = functools.partial(empty, dtype=torch.int32)
    candidates = ints((tokens, 2048))
    plans = ints((1, 2 * PROCESSORS, 4)) if kind == "walks" else None
    keys = empty((99, 1, 64, 128), dtype=torch.bfloat16)
    if form is not None:
        keys = empty((99, 1, 64, form.bytes_per_row(128)), dtype=torch.uint8)
    return (
        empty((tokens, 32, 128), dtype=torch.bfloat16), empty((tokens, 32)),
        keys, ints((tokens, 4096)), ints(tokens), ints(tokens + 1), q_width, 2,
        candidates if kind == "keeps" else None, 8, ints((tokens, 512)), candidates if kind == "makes" else None,
        form, plans,
    )  # fmt: skip


KINDS = {
    "alone": {"_score_all_kernel", "_select_kernel"},
    "makes": {"_score_all_kernel", "_select_kernel", "_best_of_blocks_kernel"},
    "walks": {"_score_walk_kernel", "_select_kernel"},
    "keeps": {"_score_listed_kernel", "_select_kernel"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vendor", SHARED_BYTES)
def test_kernels_of_long_contexts_fit_and_count_in_64_bits(compile_for, monkeypatch, vendor, kind):
    from tokamak.ops.indexer import triton as backend

    monkeypatch.setattr(backend, "processors_of", lambda device: PROCESSORS)

    kernels = compile_for(vendor, "select_entries", [a_choice(2, kind)])

    assert {name for name, *_ in kernels} == KINDS[kind]
    for (name, *_), kernel in kernels.items():
        assert kernel.metadata.shared <= SHARED_BYTES[vendor]
        if name.startswith("_score"):
            for stride in ("key_block", "table_request", "scores_row"):
                assert uses_of(f"stride_{stride}", kernel) <= {"arith.extsi"}


def test_choices_of_steps_of_all_sizes_share_kernels(compile_for, monkeypatch):
    from tokamak.ops.indexer import triton as backend

    monkeypatch.setattr(backend, "processors_of", lambda device: PROCESSORS)
    steps = [a_choice(tokens, "alone", q_width=0) for tokens in (133, 144, 192)]

    kernels = compile_for("nvidia", "select_entries", steps)

    assert sorted(name for name, *_ in kernels) == ["_score_all_kernel", "_select_kernel"]


@pytest.mark.parametrize("kind", ["alone", "keeps"])
def test_keys_of_four_bits_are_read_in_words(compile_for, monkeypatch, kind):
    """Records of 68 bytes lie at multiples of four, and at no larger ones."""
    from tokamak.ops.indexer import triton as backend

    monkeypatch.setattr(backend, "processors_of", lambda device: PROCESSORS)

    kernels = compile_for("nvidia", "select_entries", [a_choice(2, kind, form=MXFP4)])

    (code,) = [each.asm["ptx"] for (name, *_), each in kernels.items() if name.startswith("_score")]
    # 128 keys of 17 words, by 128 threads.
    assert "ld.global.b8" not in code
    assert code.count("ld.global.b32") >= 17
