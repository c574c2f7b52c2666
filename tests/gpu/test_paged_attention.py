"""Is paged attention in Triton the same as the reference on a device, in graphs, beside itself and time after time?"""

from __future__ import annotations

import pytest
import torch

from tests.support.device import no_host_wait
from tokamak.device.facts import device_facts
from tokamak.errors import LateBuffer
from tokamak.ops.case import BFLOAT16, difference
from tokamak.ops.load import load_backends
from tokamak.ops.paged_attention import paged_attention
from tokamak.ops.paged_attention.cases import paged_attention_cases
from tokamak.ops.rope import rotate_and_cache

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]
HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, BLOCKS = 16, 8, 128, 16, 4096
Q, LENGTHS, OUT = 0, 4, 9
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
NAMES = ("triton", "triton_sm90") if IS_HOPPER else ("triton",)
load_backends()


def on_device(arguments):
    return [each.cuda() if isinstance(each, torch.Tensor) else each for each in arguments]


def a_step(queries, before, *, q_width=0, window=0, table_blocks=512, heads=HEADS):
    """Arguments on the device: blocks lie in no order, and what nobody wrote is NaN."""
    lengths = [new + old for new, old in zip(queries, before, strict=True)]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    generator = torch.Generator("cuda").manual_seed(sum(lengths))

    def random(*shape):
        numbers = torch.randn(shape, generator=generator, device="cuda")
        return numbers.bfloat16()

    caches = random(2, BLOCKS, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    caches[:, 0] = float("nan")
    free = (torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    table = torch.zeros((len(lengths), table_blocks), dtype=torch.int32)
    for row, length in enumerate(lengths):
        blocks = -(-length // BLOCK_TOKENS)
        table[row, :blocks] = torch.tensor([free.pop() for _ in range(blocks)])
        if length % BLOCK_TOKENS:
            caches[:, int(table[row, blocks - 1]), :, length % BLOCK_TOKENS :] = float("nan")
    q = random(int(starts[-1]), heads, HEAD_DIM)
    return [
        q, caches[0], caches[1], table.cuda(), torch.tensor(lengths, dtype=torch.int32).cuda(), starts.cuda(),
        q_width, HEAD_DIM**-0.5, window, torch.full_like(q, float("nan")),
    ]  # fmt: skip


def decode_step(lengths, *, q_width=1, **options):
    return a_step(
        [q_width] * len(lengths), [each - q_width for each in lengths], q_width=q_width, **options
    )


@pytest.fixture(params=NAMES)
def backend(request):
    return next(each.call for each in paged_attention.backends if each.name == request.param)


def attend(backend, arguments):
    arguments[OUT].fill_(float("nan"))
    backend(*arguments)
    return arguments[OUT].clone()


def expected_of(arguments):
    out = torch.full_like(arguments[OUT], float("nan"))
    paged_attention(*arguments[:OUT], out)
    return out


@pytest.mark.parametrize("case", paged_attention_cases, ids=str)
def test_the_backend_agrees_with_the_reference_on_a_device(backend, case):
    facts = device_facts("cuda")
    takes = next(each.takes for each in paged_attention.backends if each.call == backend)
    if case.cache_dtype and not takes(facts, case.cache_dtype):
        pytest.skip(f"{facts.arch} has no kernels for caches in {case.cache_dtype}")
    expected = case.outcome(paged_attention.reference)
    arguments = on_device(case.make())

    found = attend(backend, arguments)

    assert difference([found.cpu()], expected) <= case.tolerance


@pytest.mark.parametrize("requests", [1, 3, 8, 40, 200])
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_decode_steps_of_many_sizes_agree_with_the_reference(backend, requests, heads):
    generator = torch.Generator().manual_seed(requests)
    lengths = torch.randint(1, 8000 // max(requests // 8, 1), (requests,), generator=generator)
    arguments = decode_step(lengths.tolist(), heads=heads)

    found = attend(backend, arguments)

    assert difference([found], [expected_of(arguments)]) <= BFLOAT16


@pytest.mark.parametrize("q_width", [2, 5, 40])
@pytest.mark.parametrize("window", [0, 100])
def test_drafts_of_any_width_see_what_came_before_them(backend, q_width, window):
    arguments = decode_step([q_width, 64, 65, 1100, 5000], q_width=q_width, window=window)

    found = attend(backend, arguments)

    assert difference([found], [expected_of(arguments)]) <= BFLOAT16


@pytest.mark.parametrize("window", [0, 1, 300])
def test_chunks_of_many_requests_agree_with_the_reference(backend, window):
    queries = [1, 63, 64, 65, 128, 700, 2, 1, 31, 400] + [3] * 140
    before = [0, 0, 1000, 17, 128, 3, 5000, 0, 33, 0] + [5] * 140
    arguments = a_step(queries, before, window=window)

    found = attend(backend, arguments)

    assert difference([found], [expected_of(arguments)]) <= BFLOAT16


def test_the_same_step_gives_the_same_numbers_every_time(backend):
    arguments = decode_step([1100, 7, 64, 4000])
    first = attend(backend, arguments)

    others = [attend(backend, arguments) for _ in range(300)]

    assert all(torch.equal(each, first) for each in others)


def test_a_wider_block_table_changes_no_number(backend):
    narrow = decode_step([1100, 300], table_blocks=69)
    wide = decode_step([1100, 300], table_blocks=2560)

    assert torch.equal(attend(backend, narrow), attend(backend, wide))


def test_calls_on_two_streams_do_not_count_for_each_other(backend):
    steps = [decode_step([3000, 2900]), decode_step([2000, 1900])]
    expected = [attend(backend, step) for step in steps]
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()

    found = [[], []]
    for _ in range(100):
        for at, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[at].append(attend(backend, steps[at]))
    torch.cuda.synchronize()

    for outs, first in zip(found, expected, strict=True):
        assert all(torch.equal(each, first) for each in outs)


@pytest.mark.parametrize("q_width", [1, 0])
def test_a_recorded_call_follows_the_lengths_on_the_device_and_waits_for_nothing(backend, q_width):
    sizes = [1100, 40, 4000]
    arguments = decode_step(sizes) if q_width else a_step([1, 40, 900], [1099, 0, 3100])
    attend(backend, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend(*arguments)

    for shorter in (0, 3, 17, 30):
        lengths = torch.tensor([1100 - shorter, 40, 4000 - 90 * shorter], dtype=torch.int32)
        arguments[LENGTHS].copy_(lengths)
        arguments[OUT].fill_(float("nan"))
        with no_host_wait():
            graph.replay()

        assert difference([arguments[OUT]], [expected_of(arguments)]) <= BFLOAT16


def test_a_call_waits_for_nothing(backend):
    for arguments in (decode_step([500, 90]), a_step([30, 400], [0, 77])):
        attend(backend, arguments)

        with no_host_wait():
            found = attend(backend, arguments)

        assert found.isfinite().all()


@pytest.mark.parametrize("q_width", [1, 3])
@pytest.mark.parametrize("requests", [1, 8, 200])
def test_queries_and_rows_that_the_kernel_before_wrote_are_seen(backend, requests, q_width):
    sizes = [(1100 - 3 * at) // max(requests // 32, 1) for at in range(requests)]
    arguments = decode_step(sizes, q_width=q_width)
    q, k_cache, v_cache, table, lengths, *_ = arguments
    places = lengths.long()[:, None] - q_width + torch.arange(q_width, device="cuda")
    blocks = table.gather(1, places // BLOCK_TOKENS).long().flatten()
    offsets = (places % BLOCK_TOKENS).flatten()
    width = (q.shape[1] + 2 * KV_HEADS) * HEAD_DIM
    generator = torch.Generator("cuda").manual_seed(requests)
    steps = torch.randn((20, len(q), width), generator=generator, device="cuda").bfloat16()
    rotate = next(each.call for each in rotate_and_cache.backends if each.name == "triton")
    still = torch.zeros((1, HEAD_DIM), device="cuda")
    still[:, : HEAD_DIM // 2] = 1
    positions = torch.zeros(len(q), dtype=torch.int32, device="cuda")

    def run(qkv):
        slots = blocks * BLOCK_TOKENS + offsets
        caches = k_cache, v_cache
        arguments[Q] = rotate(qkv, positions, still, *caches, slots, None, None, 1e-6)
        backend(*arguments)

    run(steps[0])
    graph, outs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for qkv in steps:
            arguments[OUT] = torch.empty_like(q)
            run(qkv)
            outs.append(arguments[OUT])
    graph.replay()

    for qkv, found in zip(steps, outs, strict=True):
        heads = qkv.view(len(q), -1, HEAD_DIM).split([q.shape[1], KV_HEADS, KV_HEADS], dim=1)
        arguments[Q], k_cache[blocks, :, offsets], v_cache[blocks, :, offsets] = heads
        assert difference([found], [expected_of(arguments)]) <= BFLOAT16


def test_a_first_call_that_is_recorded_is_refused(backend, monkeypatch):
    from tokamak.ops.paged_attention import triton_decode

    arguments = decode_step([500])
    attend(backend, arguments)
    monkeypatch.setattr(triton_decode, "_ARRIVED", {})

    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(LateBuffer, match="first decode step on cuda"),
        torch.cuda.graph(graph),
    ):
        attend(backend, arguments)
