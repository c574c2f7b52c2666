"""The indexer in Triton: scores of a band of rows to memory, then its best (`triton_select.py`).

Decode steps are scored by a plan (`triton_walk.py`), others by tiles (`triton_scores.py`). No tensor holds all rows and all keys of a long context, no number is read to the host, and what is launched depends on
sizes alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.indexer.reference import select_entries
from tokamak.ops.indexer.triton_scores import score_band
from tokamak.ops.indexer.triton_select import SelectForm, Source, best_of_blocks, select
from tokamak.ops.indexer.triton_walk import score_walk
from tokamak.ops.paged_attention.triton_decode import processors_of
from tokamak.ops.records import KVFormat
from tokamak.ops.triton_facts import fits
from tokamak.ops.walk_plan.sizes import score_bands, score_width

CHUNK = 2048
"""Scores a program looks at where there are fewer rows than multiprocessors."""
TILE, WHOLE_TILE, WARPS = 2048, 4096, 8
"""Scores at a time of a chunk and of a whole row; measured on an H200 with lists of 512 and 2048 of 32k to 262k."""
SHARED_READS = 16
"""How many times the keys of a row's own list a prompt's row may score, as its rows share their reading."""


def choose_form(rows: int, device: torch.device) -> SelectForm:
    """How the best of so many rows are found."""
    if rows < processors_of(device):
        return SelectForm(CHUNK, TILE, WARPS)
    return SelectForm(None, WHOLE_TILE, WARPS)


@select_entries.backend("triton", fits=fits)
def triton_select_entries(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    ratio: int,
    within: Tensor | None,
    block_entries: int,
    chosen: Tensor,
    blocks: Tensor | None,
    key_form: KVFormat | None = None,
    plans: Tensor | None = None,
) -> None:
    """List the entries that score highest for each row, among those it may see: of equals the earlier."""
    if within is not None and blocks is not None:
        # No model makes candidates of candidates.
        select_entries.reference(
            q, weights, keys, block_table, positions, query_starts, q_width, ratio, within, block_entries, chosen,
            blocks, key_form,
        )  # fmt: skip
        return
    select_in_form(
        q, weights, keys, block_table, positions, query_starts, q_width, ratio, within, block_entries, chosen,
        blocks, choose_form(q.shape[0], q.device), key_form=key_form, plans=plans,
    )  # fmt: skip


def select_in_form(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    q_width: int,
    ratio: int,
    within: Tensor | None,
    block_entries: int,
    chosen: Tensor,
    blocks: Tensor | None,
    form: SelectForm,
    shared_reads: int = SHARED_READS,
    key_form: KVFormat | None = None,
    plans: Tensor | None = None,
) -> None:
    """Select in a form; other arguments as of the op `select_entries`, whose blocks in `within` come in order."""
    assert within is None or blocks is None, "a layer makes candidates or keeps to them"
    assert keys.shape[1] == 1, f"a cache of {keys.shape[1]} heads"
    strides = (
        q.stride(2),
        weights.stride(1),
        keys.stride(3),
        block_table.stride(1),
        chosen.stride(1),
    )
    assert strides == (1, 1, 1, 1, 1), (
        f"heads, tables and lists lie in steps of {strides}, not of 1"
    )
    if not q.shape[0]:
        return
    columns = block_table.shape[1] * keys.shape[2]
    listed = None
    if within is not None:
        length = within.shape[1] * block_entries
        if length * (1 if q_width else shared_reads) < columns:
            listed, columns = within, length
    count = -(-columns // block_entries)
    parts = score_bands(q.shape[0], columns)
    height = parts[0].stop
    if plans is not None:
        assert listed is None, "lists of rows have no keys to share"
        assert len(parts) <= plans.shape[0], f"{len(parts)} bands, plans of {plans.shape[0]}"
    scores = torch.empty((height, score_width(columns)), dtype=torch.float32, device=q.device)
    best = torch.empty(
        (height, count if blocks is not None else 0), dtype=torch.float32, device=q.device
    )
    for number, band in enumerate(parts):
        if plans is not None:
            score_walk(
                plans[number], q, weights, keys, block_table, positions, query_starts, q_width, ratio, band, scores,
                key_form,
            )  # fmt: skip
        else:
            score_band(
                q, weights, keys, block_table, positions, query_starts, q_width, ratio, listed, block_entries, band,
                scores, key_form,
            )  # fmt: skip
        at = positions[band]
        whole = Source(
            scores[:, :columns], None if within is None else within[band], at, ratio, 1,
            1 if within is None else block_entries, within is not None and listed is None,
        )  # fmt: skip
        select(whole, form, chosen[band])
        if blocks is not None:
            best_of_blocks(scores, at, ratio, block_entries, best)
            select(Source(best, None, at, ratio, block_entries), form, blocks[band])
