"""Do decode rows that are rotated, cached and attended at once give what the two ops give, on a device, every time?"""

from __future__ import annotations

import pytest
import torch

from tests.support.device import no_host_wait
from tokamak.ops.case import BFLOAT16, difference
from tokamak.ops.load import load_backends
from tokamak.ops.rotate_cache_attend import rotate_cache_attend

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
NAMES = ("triton", "triton_sm90") if IS_HOPPER else ("triton",)
HEAD_DIM, BLOCK_TOKENS, BLOCKS = 128, 16, 6000
QKV, POSITIONS, K_CACHE, V_CACHE, SLOTS, LENGTHS, OUT = 0, 1, 3, 4, 5, 10, 15
HEADS = {"qwen3": (16, 8, True), "llama": (32, 8, False), "experts": (32, 4, True)}
load_backends()


@pytest.fixture(params=NAMES)
def backend(request):
    return next(each.call for each in rotate_cache_attend.backends if each.name == request.param)


def place(arguments, lengths, table, q_width):
    """Say where the newest rows of requests of these lengths stand and go."""
    at = lengths.long()[:, None] - q_width + torch.arange(q_width, device="cuda")
    blocks = table.gather(1, at // BLOCK_TOKENS).long()
    arguments[POSITIONS].copy_(at.flatten().int())
    arguments[SLOTS].copy_((blocks * BLOCK_TOKENS + at % BLOCK_TOKENS).flatten())
    arguments[LENGTHS].copy_(lengths)


def a_step(sizes, *, heads="qwen3", q_width=1, window=0, table_blocks=1024):
    """Arguments on the device: blocks lie in no order, rows past a request's are NaN."""
    q_heads, kv_heads, norms = HEADS[heads]
    generator = torch.Generator("cuda").manual_seed(sum(sizes))

    def random(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    caches = random(2, BLOCKS, kv_heads, BLOCK_TOKENS, HEAD_DIM)
    free = (torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    table = torch.zeros((len(sizes), table_blocks), dtype=torch.int32)
    for row, length in enumerate(sizes):
        blocks = -(-length // BLOCK_TOKENS)
        table[row, :blocks] = torch.tensor([free.pop() for _ in range(blocks)])
        if length % BLOCK_TOKENS:
            caches[:, int(table[row, blocks - 1]), :, length % BLOCK_TOKENS :] = float("nan")
    table, tokens = table.cuda(), len(sizes) * q_width
    angles = torch.rand((8192, HEAD_DIM // 2), generator=generator, device="cuda") * 6.3
    weights = [random(HEAD_DIM) if norms else None for _ in range(2)]
    arguments = [
        random(tokens, (q_heads + 2 * kv_heads) * HEAD_DIM),
        torch.zeros(tokens, dtype=torch.int32, device="cuda"),
        torch.cat([angles.cos(), angles.sin()], dim=1), caches[0], caches[1],
        torch.zeros(tokens, dtype=torch.int64, device="cuda"), *weights, 1e-6, table,
        torch.zeros(len(sizes), dtype=torch.int32, device="cuda"),
        torch.arange(0, tokens + 1, q_width, dtype=torch.int32, device="cuda"),
        q_width, HEAD_DIM**-0.5, window,
        torch.full((tokens, q_heads, HEAD_DIM), float("nan"), dtype=torch.bfloat16, device="cuda"),
    ]  # fmt: skip
    place(arguments, torch.tensor(sizes, dtype=torch.int32).cuda(), table, q_width)
    return arguments


def run(call, arguments):
    """What a call writes: rows of `out`, and the newest keys and values."""
    arguments[OUT].fill_(float("nan"))
    slots = arguments[SLOTS]
    blocks, offsets = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    for cache in (arguments[K_CACHE], arguments[V_CACHE]):
        cache[blocks, :, offsets] = float("nan")
    call(*arguments)
    newest = (arguments[at][blocks, :, offsets] for at in (K_CACHE, V_CACHE))
    return arguments[OUT].clone(), *newest


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("requests", [1, 3, 8, 40, 200])
def test_steps_of_many_sizes_agree_with_the_reference(backend, requests, heads):
    generator = torch.Generator().manual_seed(requests)
    sizes = torch.randint(1, 8000 // max(requests // 8, 1), (requests,), generator=generator)
    arguments = a_step(sizes.tolist(), heads=heads)
    expected = run(rotate_cache_attend.reference, arguments)

    found = run(backend, arguments)

    assert difference(found, expected) <= BFLOAT16


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("q_width", [2, 5, 40])
@pytest.mark.parametrize("window", [0, 100])
def test_drafts_of_any_width_see_what_came_before_them(backend, q_width, window, heads):
    arguments = a_step([q_width, 64, 65, 1100, 5000], heads=heads, q_width=q_width, window=window)
    expected = run(rotate_cache_attend.reference, arguments)

    found = run(backend, arguments)

    assert difference(found, expected) <= BFLOAT16


def test_the_same_step_gives_the_same_numbers_every_time(backend):
    arguments = a_step([1100, 7, 64, 4000])
    first = run(backend, arguments)

    others = [run(backend, arguments) for _ in range(300)]

    for each in others:
        assert all(torch.equal(a, b) for a, b in zip(each, first, strict=True))


def test_a_wider_block_table_changes_no_number(backend):
    narrow = a_step([1100, 300], table_blocks=69)
    wide = a_step([1100, 300], table_blocks=2560)

    assert torch.equal(run(backend, narrow)[0], run(backend, wide)[0])


@pytest.mark.parametrize("requests", [1, 8, 100])
def test_recorded_steps_follow_each_other_token_by_token(backend, requests):
    """Rows that a step writes are read by the next, a few kernels later; lengths grow on the device."""
    sizes = [600 - at for at in range(requests)]
    arguments = a_step([size + 40 for size in sizes])
    table, lengths = arguments[9], torch.tensor(sizes, dtype=torch.int32).cuda()
    fresh = torch.randn((40, *arguments[QKV].shape), device="cuda").bfloat16()
    place(arguments, lengths, table, 1)
    backend(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arguments[QKV].copy_(fresh[0] * 1)
        backend(*arguments)
    outs = []
    for qkv in fresh[:20]:
        arguments[QKV].copy_(qkv)
        place(arguments, lengths, table, 1)
        outs.append(run(backend, arguments)[0])
        lengths += 1
    caches = [arguments[at].clone() for at in (K_CACHE, V_CACHE)]

    found = []
    lengths -= 20
    for qkv in fresh[:20]:
        fresh[0].copy_(qkv)
        place(arguments, lengths, table, 1)
        with no_host_wait():
            graph.replay()
        found.append(arguments[OUT].clone())
        lengths += 1

    assert all(torch.equal(a, b) for a, b in zip(found, outs, strict=True))
    for at, before in zip((K_CACHE, V_CACHE), caches, strict=True):
        torch.testing.assert_close(arguments[at], before, rtol=0, atol=0, equal_nan=True)
