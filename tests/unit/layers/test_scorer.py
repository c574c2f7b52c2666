"""Do rows of any indexer, with keys of every token or of several, get their best entries, and when by a plan?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.steps import Chunk, a_build, a_context
from tokamak.cache.launch import LaunchStorage
from tokamak.cache.view import PagedBuffers
from tokamak.layers.attention.compressed import CacheRows
from tokamak.layers.attention.scorer import IndexRows, Scorer
from tokamak.ops.indexer import select_entries

BLOCK, MOST = 4, 3
DECODE = [Chunk([1], computed, blocks) for computed, blocks in ((9, [1, 2, 3]), (4, [4, 5]))]
PROMPT = Chunk([1, 2, 3], 2, [6, 7])


def a_step(chunks, programs):
    """The context of a step whose group has so many programs that walk."""
    context = a_context(chunks, block_tokens=BLOCK)
    rows = context.inputs.rows["keys"]
    buffers = PagedBuffers(
        block_table=rows.block_table,
        lengths=rows.lengths,
        write_slots=rows.write_slots,
        query_starts=context.inputs.query_starts,
        block_tokens=BLOCK,
        launch=LaunchStorage(programs=programs),
    )
    view = buffers.view(len(rows.lengths), context.shape.running_tokens)
    return replace(context, inputs=replace(context.inputs, rows={"keys": view}))


def lists_of(context, ratio):
    """Every row's best entries, and the plans that the op got by half."""
    build, generator = a_build(), torch.Generator().manual_seed(3)
    keys = CacheRows(build, "keys", ratio)
    keys.bind(torch.randn((9, 1, BLOCK // ratio, 8), generator=generator))
    tokens = context.shape.running_tokens
    q = torch.randn((tokens, 2, 8), generator=generator)
    weights = torch.randn((tokens, 2), generator=generator)
    chosen, got = torch.full((tokens, MOST), -7, dtype=torch.int32), []
    scorer = Scorer(build)

    def select(*arguments, plans):
        got.append(plans)
        select_entries(*arguments, plans=plans)

    scorer._select = select
    for half in context.attn.halves:
        rows = IndexRows.of_half(half, q, weights, keys, context)
        scorer.score_topk(rows, chosen[half.tokens])
    return chosen, got


@pytest.mark.parametrize("ratio", [1, 2])
def test_rows_of_a_decode_step_are_walked_by_a_plan_and_listed_as_without(ratio):
    context = a_step(DECODE, programs=3)

    chosen, (plans,) = lists_of(context, ratio)

    without, (none,) = lists_of(a_step(DECODE, programs=0), ratio)
    assert plans.shape == (1, 3, 4)
    assert none is None
    assert torch.equal(chosen, without)
    assert chosen[:, 0].min() >= 0
    assert context.inputs.rows["keys"].fills == 1


def test_rows_beside_a_prompt_are_scored_without_a_plan():
    context = a_step([PROMPT, *DECODE], programs=9)

    chosen, plans = lists_of(context, 1)

    assert plans == [None, None]
    # The first row of the prompt sees three entries, and takes them all.
    assert chosen[0].tolist() == [0, 1, 2]
    assert context.inputs.rows["keys"].fills == 0
