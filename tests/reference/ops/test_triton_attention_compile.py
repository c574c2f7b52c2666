"""What do the kernels of decode rows become on a chip: is what nobody writes asked for before the wait?

Compiling takes no device: launches are replaced by it, and what would be launched is kept.
"""

import importlib.util
import re

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]
TARGETS = {"nvidia": ("cuda", 90, 32), "amd": ("hip", "gfx942", 64)}
REQUESTS = {"few": 1, "some": 20, "many": 70}
CROWD = 80
"""Requests whose heads fill a chip better in two launches."""
WAIT, BEGIN, FETCH = (
    "griddepcontrol.wait", "griddepcontrol.launch_dependents", "cp.async.bulk.prefetch.L2",
)  # fmt: skip
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128


def arguments_of(requests, cache_dtype=torch.bfloat16):
    """Rows of Qwen3's heads, without numbers."""
    on_meta = {"device": "meta"}
    caches = torch.empty((9, 2, KV_HEADS, 16, HEAD_DIM), dtype=cache_dtype, **on_meta)
    ints = torch.empty(requests, dtype=torch.int32, **on_meta)
    weight = torch.empty(HEAD_DIM, dtype=torch.bfloat16, **on_meta)
    qkv = torch.empty((requests, 32 * HEAD_DIM), dtype=torch.bfloat16, **on_meta)
    return (
        qkv, ints, torch.empty((64, HEAD_DIM), **on_meta), caches[:, 0], caches[:, 1], ints.long(), weight, weight,
        1e-6, torch.empty((requests, 2560), dtype=torch.int32, **on_meta), ints, ints, 1, HEAD_DIM**-0.5, 0,
        torch.empty((requests, HEADS, HEAD_DIM), dtype=torch.bfloat16, **on_meta),
    )  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """Calls a function with launches replaced; returns the code of what it launched, by kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from tokamak.ops.paged_attention import triton_decode

    monkeypatch.setattr(triton_decode, "processors_of", lambda device: 132)

    code = {}

    def run(vendor, call, *arguments):
        target = GPUTarget(*TARGETS[vendor])
        backend = make_backend(target)

        def compile_instead(self, *args, grid, warmup, **kwargs):
            bind = create_function_from_signature(self.signature, self.params, backend)
            bound, specialization, options = bind(*args, **kwargs)
            options, signature, constants, attributes = self._pack_args(
                backend, kwargs, bound, specialization, options
            )
            source = ASTSource(self, signature, constants, attributes)
            kernel = compile(source, target=target, options=options.__dict__)
            code[self.fn.__name__] = kernel.asm["ptx" if vendor == "nvidia" else "amdgcn"]

        monkeypatch.setattr(JITFunction, "run", compile_instead)
        call(*arguments)
        return code

    return run


def places(word, text):
    """Where a word stands."""
    return [found.start() for found in re.finditer(re.escape(word), text)]


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("vendor", TARGETS)
def test_every_form_compiles_for_both_vendors(compiled, vendor, requests):
    from tokamak.ops.rotate_cache_attend.triton import triton_rotate_cache_attend

    code = compiled(vendor, triton_rotate_cache_attend, *arguments_of(requests))

    assert code["_rotate_cache_attend_kernel"]
    assert WAIT not in code["_rotate_cache_attend_kernel"]


def test_where_many_heads_fill_the_chip_rotation_and_attention_are_two_launches(compiled):
    from tokamak.ops.rotate_cache_attend.triton import MOST_PAIRS, triton_rotate_cache_attend

    assert REQUESTS["many"] * KV_HEADS <= MOST_PAIRS < CROWD * KV_HEADS

    code = compiled("nvidia", triton_rotate_cache_attend, *arguments_of(CROWD))

    assert set(code) == {"_rotate_and_cache_kernel", "_paged_decode_kernel"}


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_hopper_asks_for_blocks_before_it_waits_and_reads_rows_after(compiled, requests):
    from tokamak.ops.rotate_cache_attend.triton_sm90 import sm90_rotate_cache_attend

    code = compiled("nvidia", sm90_rotate_cache_attend, *arguments_of(requests))

    kernel = code["_rotate_cache_attend_kernel"]
    assert kernel.count(WAIT) == 2, "programs without keys wait as well"
    assert kernel.index(BEGIN) < kernel.index(WAIT)
    assert any(kernel.rindex(FETCH) < at < kernel.index("st.global") for at in places(WAIT, kernel))


@pytest.mark.parametrize("requests", [REQUESTS["few"], REQUESTS["many"]], ids=["few", "many"])
def test_paged_decode_on_hopper_stores_nothing_before_it_waits(compiled, requests):
    from tokamak.ops.paged_attention.triton_sm90 import sm90_paged_attention

    *_, table, lengths, starts, q_width, scale, window, out = arguments_of(requests)
    caches = arguments_of(requests)[3:5]

    code = compiled(
        "nvidia", sm90_paged_attention, out, *caches, table, lengths, starts, q_width, scale, window, out
    )  # fmt: skip

    kernel = code["_paged_decode_kernel"]
    assert kernel.count(WAIT) == 2, "programs without keys wait as well"
    assert kernel.index(BEGIN) < kernel.index(WAIT) < kernel.index("st.global")


@pytest.mark.parametrize("vendor", TARGETS)
def test_kernels_over_fp8_caches_compile_for_both_vendors(compiled, vendor):
    from tokamak.ops.paged_attention.triton import triton_paged_attention
    from tokamak.ops.rotate_cache_attend.triton import triton_rotate_cache_attend

    for requests in (REQUESTS["few"], REQUESTS["many"], CROWD):
        arguments = arguments_of(requests, torch.float8_e4m3fn)
        code = compiled(vendor, triton_rotate_cache_attend, *arguments)
    *_, table, lengths, starts, _, scale, window, out = arguments
    prompts = (out, *arguments[3:5], table, lengths, starts, 0, scale, window, out)
    code = compiled(vendor, triton_paged_attention, *prompts)

    kernels = (
        "_rotate_cache_attend_kernel", "_rotate_and_cache_kernel", "_paged_decode_kernel", "_paged_prefill_kernel"
    )  # fmt: skip
    assert set(code) == set(kernels)
    if vendor == "nvidia":
        assert "cvt.rn.satfinite.e4m3x2" in code["_rotate_cache_attend_kernel"]
        assert all("e4m3x2" in code[kernel] for kernel in kernels)


@pytest.mark.parametrize("vendor", TARGETS)
def test_kernels_with_sinks_compile_and_without_them_have_no_place_for_them(compiled, vendor):
    from tokamak.ops.paged_attention.triton import triton_paged_attention
    from tokamak.ops.rotate_cache_attend.triton import triton_rotate_cache_attend

    sinks = torch.empty(HEADS, device="meta")
    several, crowd = arguments_of(REQUESTS["some"]), arguments_of(CROWD)
    prompts = (several[15], *several[3:5], *several[9:12], 0, *several[13:])

    without = [dict(compiled(vendor, triton_paged_attention, *prompts))]
    without += [
        dict(compiled(vendor, triton_rotate_cache_attend, *each)) for each in (several, crowd)
    ]
    having = [dict(compiled(vendor, triton_paged_attention, *prompts, sinks))]
    having += [
        dict(compiled(vendor, triton_rotate_cache_attend, *each, sinks))
        for each in (several, crowd)
    ]

    for name in ("_paged_prefill_kernel", "_rotate_cache_attend_kernel", "_paged_decode_kernel"):
        plain, other = without[-1][name], having[-1][name]
        assert plain != other, name
        if vendor == "nvidia":
            assert plain.count(".param .u64") + 1 == other.count(".param .u64"), name
