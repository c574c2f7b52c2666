"""Do the layers compute their formulas, from weights in one part or several?"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.support.steps import Chunk, a_build, a_context
from tokamak.core.context import installed
from tokamak.core.weight import DenseWeight, GroupedWeight
from tokamak.layers.attention.gqa import GroupedQueryAttention
from tokamak.layers.embedding import Embedding, Head
from tokamak.layers.linear import Linear
from tokamak.layers.mlp import GatedMLP
from tokamak.layers.norm import RMSNorm
from tokamak.layers.vector import Vector

FLOAT64 = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}


@pytest.fixture
def numbers():
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(shape, generator=generator)


def test_a_linear_stacks_its_parts_by_rows(numbers):
    first, second, x = numbers(3, 8), numbers(5, 8), numbers(4, 8)
    linear = Linear(a_build(), 8, (3, 5))

    linear.load([DenseWeight(first), DenseWeight(second)])

    assert linear.part_shapes == ((3, 8), (5, 8))
    expected = torch.cat([x.double() @ first.double().T, x.double() @ second.double().T], dim=1)
    torch.testing.assert_close(linear(x), expected, **FLOAT64)


def test_a_linear_adds_its_bias(numbers):
    weight, bias, x = numbers(6, 8), numbers(6), numbers(4, 8)
    linear = Linear(a_build(), 8, (2, 4), bias=True)

    linear.load([DenseWeight(weight[:2]), DenseWeight(weight[2:])])
    linear.bias.load([DenseWeight(bias[:2]), DenseWeight(bias[2:])])

    torch.testing.assert_close(linear(x), x.double() @ weight.double().T + bias, **FLOAT64)


def test_an_exact_linear_computes_with_the_weight_a_file_stores(numbers):
    codes = torch.randint(0, 16, (6, 64), dtype=torch.uint8)
    weight = GroupedWeight(codes, numbers(6, 2).abs(), numbers(6, 2), bits=4)
    x = numbers(3, 64)
    linear = Linear(a_build(), 64, (6,))

    linear.load([weight])

    expected = functional.linear(x, weight.dense(torch.float32))
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-4)


def test_a_linear_without_weights_cannot_be_called():
    linear = Linear(a_build(), 8, (3,))

    with pytest.raises(AssertionError, match="before its weight was loaded"):
        linear(torch.ones(1, 8))


def test_parts_of_another_shape_are_not_taken(numbers):
    linear, vector = Linear(a_build(), 8, (3, 5)), Vector(a_build(), (4,))

    with pytest.raises(AssertionError, match=r"\(5, 8\)"):
        linear.load([DenseWeight(numbers(5, 8)), DenseWeight(numbers(3, 8))])
    with pytest.raises(AssertionError, match=r"\(3,\)"):
        vector.load([DenseWeight(numbers(3))])


def test_random_weights_repeat_with_their_seed_and_keep_scale():
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))

    def output(seed: int) -> torch.Tensor:
        linear = Linear(a_build(), 256, (100, 28))
        linear.load(linear.draw(torch.Generator().manual_seed(seed)))
        return linear(x)

    assert torch.equal(output(7), output(7))
    assert not torch.equal(output(7), output(8))
    assert output(7).std().item() == pytest.approx(1.0, rel=0.1)


def test_a_norm_scales_rows_to_unit_size(numbers):
    x, weight = numbers(4, 8), numbers(8)
    norm = RMSNorm(a_build(), 8, 1e-5)
    norm.weight.load([DenseWeight(weight)])

    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    torch.testing.assert_close(norm(x), expected, **FLOAT64)


def test_a_norm_with_add_leaves_the_sum_in_the_residual_stream(numbers):
    x, residual, weight = numbers(4, 8), numbers(4, 8), numbers(8)
    norm = RMSNorm(a_build(), 8, 1e-5)
    norm.weight.load([DenseWeight(weight)])
    total = x + residual

    normed = norm.add(x, residual)

    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(normed, norm(total))


def test_the_mlp_gates_with_silu(numbers):
    gate, up, down, x = numbers(6, 8), numbers(6, 8), numbers(8, 6), numbers(4, 8)
    mlp = GatedMLP(a_build(), 8, 6)
    mlp.gate_up.load([DenseWeight(gate), DenseWeight(up)])
    mlp.down.load([DenseWeight(down)])
    norm = RMSNorm(a_build(), 8, 0.0)
    norm.weight.load([DenseWeight(torch.ones(8))])
    x /= x.pow(2).mean(-1, keepdim=True).sqrt()

    wide = x.double()
    opened = wide @ gate.double().T
    inner = opened / (1 + (-opened).exp()) * (wide @ up.double().T)

    expected = inner @ down.double().T
    torch.testing.assert_close(mlp(None, x, norm), expected, **FLOAT64)
    residual = torch.ones_like(x)
    torch.testing.assert_close(mlp(x - 1, residual, norm), expected, **FLOAT64)
    torch.testing.assert_close(residual, x)


def test_a_tied_head_scores_with_the_embedding(numbers):
    table = numbers(10, 8)
    head = Head(a_build(), 10, 8)
    embedding = Embedding(a_build(), 10, 8, head=head)

    embedding.load([DenseWeight(table)])

    ids = torch.tensor([3, 0, 9], dtype=torch.int32)
    assert torch.equal(embedding(ids), table[ids])
    torch.testing.assert_close(head(table[:2]), table[:2] @ table.T)


def test_scores_are_float32_in_a_bfloat16_model(numbers):
    head = Head(a_build(torch.bfloat16), 10, 64)

    head.load([DenseWeight(numbers(10, 64))])

    assert head(numbers(2, 64).bfloat16()).dtype == torch.float32


def test_an_embedding_gives_rows_that_may_be_written_to(numbers):
    table = numbers(10, 8)
    embedding = Embedding(a_build(), 10, 8, head=None)
    embedding.load([DenseWeight(table)])
    ids = torch.tensor([3], dtype=torch.int32)

    embedding(ids).zero_()

    assert torch.equal(embedding(ids), table[ids])


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_attention_follows_its_formula(numbers, window, rotary_dim):
    width, heads, kv_heads, head_dim, tokens = 16, 4, 2, 8, 9
    weight, out, x = (
        numbers((heads + 2 * kv_heads) * head_dim, width),
        numbers(width, 32),
        numbers(tokens, width),
    )
    angles = numbers(tokens, rotary_dim // 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    attention = GroupedQueryAttention(
        a_build(), width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        cos_sin=table, eps=1e-6, window_tokens=window,
    )  # fmt: skip
    rows = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    attention.qkv.load([DenseWeight(part) for part in weight.split(rows)])
    attention.out.load([DenseWeight(out)])
    attention.bind_caches(*(torch.full((5, kv_heads, 4, head_dim), float("nan")) for _ in "kv"))

    chunk = Chunk(range(tokens), 0, [4, 1, 3])
    context = a_context([chunk], block_tokens=4, layers=[attention])

    norm = RMSNorm(a_build(), width, 0.0)
    norm.weight.load([DenseWeight(torch.ones(width))])
    x /= x.pow(2).mean(-1, keepdim=True).sqrt()

    with installed(context):
        mixed = attention(None, x, norm, context.inputs)

    expected = attention_in_float64(x, weight, out, angles, heads, kv_heads, head_dim, window)
    torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("at_once", [False, True], ids=["by parts", "at once"])
def test_sinks_take_their_share_in_prompts_and_in_decode_steps(numbers, at_once):
    width, heads, kv_heads, head_dim, tokens, window = 16, 4, 2, 8, 9, 5
    weight, out = numbers((heads + 2 * kv_heads) * head_dim, width), numbers(width, 32)
    x, sinks, angles = numbers(tokens, width), numbers(heads), numbers(tokens, head_dim // 2)
    build = a_build(prefer={"rotate_cache_attend": "reference"} if at_once else None)
    attention = GroupedQueryAttention(
        build, width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=-1), eps=1e-6, window_tokens=window, sinks=True,
    )  # fmt: skip
    rows = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    attention.qkv.load([DenseWeight(part) for part in weight.split(rows)])
    attention.out.load([DenseWeight(out)])
    attention.sinks.load([DenseWeight(sinks)])
    attention.bind_caches(*(torch.full((5, kv_heads, 4, head_dim), float("nan")) for _ in "kv"))
    norm = RMSNorm(a_build(), width, 0.0)
    norm.weight.load([DenseWeight(torch.ones(width))])
    x /= x.pow(2).mean(-1, keepdim=True).sqrt()

    mixed = []
    for step in (range(tokens - 2), [tokens - 2], [tokens - 1]):
        context = a_context([Chunk(step, step[0], [4, 1, 3])], block_tokens=4, layers=[attention])
        with installed(context):
            mixed.append(attention(None, x[step[0] : step[-1] + 1], norm, context.inputs))

    expected = attention_in_float64(
        x, weight, out, angles, heads, kv_heads, head_dim, window, sinks
    )
    torch.testing.assert_close(torch.cat(mixed), expected, rtol=1e-4, atol=1e-4, check_dtype=False)


def test_sinks_are_float32_in_a_bfloat16_model_and_none_unless_asked_for(numbers):
    sizes = {
        "width": 16,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "cos_sin": numbers(9, 8),
        "eps": 0,
    }
    build = a_build(torch.bfloat16)

    attention = GroupedQueryAttention(build, **sizes, sinks=True)

    assert attention.sinks.part_shapes == ((4,),)
    assert attention.sinks.values.dtype == torch.float32
    assert GroupedQueryAttention(build, **sizes).sinks is None


def attention_in_float64(x, weight, out, angles, heads, kv_heads, head_dim, window, sinks=None):
    """One head and one query at a time, with rotation as multiplication of complex numbers."""
    projected = (x.double() @ weight.double().T).view(len(x), -1, head_dim)
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
    half = angles.shape[1]

    def rotated(vector, position):
        pairs = torch.complex(vector[:half], vector[half : 2 * half]) * turns[position]
        return torch.cat([pairs.real, pairs.imag, vector[2 * half :]])

    result = torch.zeros(len(x), heads * head_dim, dtype=torch.float64)
    for at in range(len(x)):
        first = max(0, at - window + 1) if window else 0
        for head in range(heads):
            key_head = heads + head // (heads // kv_heads)
            query = rotated(projected[at, head], at)
            keys = torch.stack([rotated(projected[i, key_head], i) for i in range(first, at + 1)])
            values = projected[first : at + 1, key_head + kv_heads]
            scores = keys @ query / head_dim**0.5
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            weights = scores.softmax(0)[: len(keys)]
            result[at, head * head_dim : (head + 1) * head_dim] = weights @ values
    return result @ out.double().T


def test_a_build_counts_the_forms_its_weights_took(numbers):
    build = a_build()
    for _ in range(2):
        Linear(build, 8, (3,)).load([DenseWeight(numbers(3, 8))])
    Head(build, 10, 8).load([DenseWeight(numbers(10, 8))])

    assert sum(build.forms["linear"].values()) == 2
    assert sum(build.forms["head"].values()) == 1
    assert build.choices["linear"].backend in build.forms["linear"]
