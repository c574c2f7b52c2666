"""How many bytes will recordings take? One pure function, for a real start and for a plan of one.

In: the buckets, who shares a pool, and a GraphCost. A cost is measured by recording two buckets, kept between starts,
or worked out from the model's shapes; it says which. Integers only: no tensor is made here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tokamak import __version__
from tokamak.checkpoint.cache_folder import cache_folder
from tokamak.config.engine import EngineConfig
from tokamak.config.reasons import size
from tokamak.errors import PoolOverrun

logger = logging.getLogger(__name__)

Source = Literal["measured", "saved", "default"]

DEFAULT_BUCKET_BYTES = 256 * 1024
"""Default: what a recording takes beside its rows, such as outlets and scratch of kernels that split their work."""

DEFAULT_ROW_SHARE = 2
"""Default: numbers a row leaves in the pool per output feature of a matrix. Norms, activations and residual sums
leave about as many as the products they follow."""

WARNED_SHARE = 0.2
"""A difference between estimate and reality that is worth a warning (GR-24)."""

RESERVE_SHARE = 0.25
"""What is set aside beyond the estimate."""

PAGES_BYTES = {"cuda": 3 * 22 * 1024**2, "sim": 4 * 1024**2, "none": 0}
"""As much again, by backend: pools grow by whole pages, which no estimate from rows knows.

PyTorch's allocator takes 20 MiB at a time for tensors of 1 to 10 MiB, and 2 MiB for smaller ones; tokens, requests and
choices have a pool each.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCost:
    """What recording takes: so much a bucket, and so much a token row of it."""

    bytes_per_bucket: int
    bytes_per_row: int
    source: Source

    def bytes_of(self, rows: int) -> int:
        """A bucket of this many token rows in a pool of its own."""
        return self.bytes_per_bucket + rows * self.bytes_per_row

    def at_least(self, other: GraphCost) -> GraphCost:
        """The larger number of each."""
        return GraphCost(
            bytes_per_bucket=max(self.bytes_per_bucket, other.bytes_per_bucket),
            bytes_per_row=max(self.bytes_per_row, other.bytes_per_row),
            source=self.source,
        )


def graph_pool_estimate(
    *,
    request_buckets: Sequence[int],
    token_buckets: Sequence[int],
    late_buckets: Sequence[int],
    q_width: int,
    pools: Literal["per_graph", "per_bucket"],
    cost: GraphCost,
    choice_row_bytes: int,
) -> int:
    """Bytes all recordings take together; 0 without buckets.

    Args:
        request_buckets: decode requests of each bucket, which run `q_width` token rows each.
        token_buckets: token rows of each bucket.
        late_buckets: tail rows of each bucket of late layers.
        q_width: token rows of a decode request.
        pools: with `per_graph` the buckets of a graph share one pool, which the largest fills; with
            `per_bucket` none share.
        cost: what a bucket and a row take.
        choice_row_bytes: scores of a request whose choice is recorded too; 0 where choices are not.
    """
    choices = choice_row_bytes * (
        sum(request_buckets) if pools == "per_bucket" else max(request_buckets, default=0)
    )
    decode = [requests * q_width for requests in request_buckets]
    graphs = (decode, list(token_buckets), list(late_buckets))
    if pools == "per_bucket":
        return choices + sum(cost.bytes_of(rows) for buckets in graphs for rows in buckets)
    return choices + sum(
        len(buckets) * cost.bytes_per_bucket + max(buckets) * cost.bytes_per_row
        for buckets in graphs
        if buckets
    )


def reserve_bytes(estimate: int, backend: str) -> int:
    """What is set aside for recordings of a backend estimated at so many bytes; 0 for none."""
    return estimate + int(estimate * RESERVE_SHARE) + PAGES_BYTES[backend] if estimate else 0


def check_reserve(*, estimate: int, real: int, source: Source, backend: str) -> str:
    """Compare what recordings took with what was set aside, after recording and after every one on demand.

    Returns one line for the log. It is logged here as a warning when a measured cost differs by more than WARNED_SHARE
    (and by more than whole pages explain).

    Raises:
        PoolOverrun: recordings took more than the reserve, and the reserve came from a measurement. A default
            is a guess, and is warned of; the next start finds what was measured.
    """
    reserve = reserve_bytes(estimate, backend)
    if real > reserve and source != "default":
        raise PoolOverrun(
            f"recordings take {size(real)}, more than the {size(reserve)} set aside for an estimate of "
            f"{size(estimate)} ({source})",
            hint="record fewer or smaller sizes (req_graph_sizes, token_graph_sizes), or use graphs=off",
        )
    line = f"recordings take {size(real)}; estimated {size(estimate)} ({source}), set aside {size(reserve)}"
    if source == "default":
        warned = real > reserve
    else:
        warned = abs(real - estimate) > max(WARNED_SHARE * estimate, PAGES_BYTES[backend])
    if warned:
        logger.warning("%s", line)
    return line


def measured(*, rows_a: int, bytes_a: int, rows_b: int, bytes_b: int) -> GraphCost:
    """The cost that explains two recordings in one throw-away pool: the largest bucket, then the next.

    What the second adds is what a bucket takes beside the rows it shares.

    Args:
        rows_a: token rows of the largest bucket.
        bytes_a: what the pool held after it.
        rows_b: token rows of the next; as many as rows_a where there is only one.
        bytes_b: what the pool held after both.
    """
    assert 0 < rows_b <= rows_a, f"buckets of {rows_a}, then {rows_b} rows: the largest comes first"
    assert 0 <= bytes_a <= bytes_b, f"a pool of {bytes_a} bytes shrank to {bytes_b}"
    per_bucket = min(bytes_b - bytes_a, bytes_a)
    per_row = -(-(bytes_a - per_bucket) // rows_a)
    return GraphCost(bytes_per_bucket=bytes_b - bytes_a, bytes_per_row=per_row, source="measured")


def default_cost(
    shapes: Iterable[Sequence[int]], *, vocab_tokens: int, number_bytes: int
) -> GraphCost:
    """The cost where nothing was measured: every matrix' outputs for a row, DEFAULT_ROW_SHARE times.

    Args:
        shapes: of the checkpoint tensors; a matrix is [output features, input features].
        vocab_tokens: matrices of so many outputs are the embedding and the head, which are not recorded.
        number_bytes: of an activation.
    """
    features = sum(shape[0] for shape in shapes if len(shape) == 2 and shape[0] != vocab_tokens)
    return GraphCost(
        bytes_per_bucket=DEFAULT_BUCKET_BYTES,
        bytes_per_row=DEFAULT_ROW_SHARE * features * number_bytes,
        source="default",
    )


class _Kept(msgspec.Struct, frozen=True):
    """A measured cost on disk."""

    bytes_per_bucket: int
    bytes_per_row: int


def cost_path(config: EngineConfig, model_config: Mapping[str, object]) -> Path:
    """Where a measured cost is kept: one file per model, arithmetic, geometry and version.

    Args:
        config: as settled, before a start shortened anything.
        model_config: the checkpoint's own config.
    """
    model, graphs = config.model, config.graphs
    key = {
        "model": model_config,
        "stored_dtype": model.facts.stored_dtype,
        "dtype": model.dtype,
        "kv_cache_dtype": config.cache.dtype,
        "exact": model.exact,
        "device": model.device,
        "kernels": config.kernels.prefer,
        "threads": config.kernels.threads,
        "backend": graphs.backend,
        "block_tokens": config.cache.block_tokens,
        "max_model_len": model.max_model_len,
        "tokamak": __version__,
        "torch": importlib.metadata.version("torch"),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "graph-costs" / f"{digest[:32]}.json"


def save_cost(path: Path, cost: GraphCost) -> None:
    """Keep a measured cost for the next start. A folder that cannot be written is logged, nothing more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(_Kept(cost.bytes_per_bucket, cost.bytes_per_row)))
        beside.replace(path)
    except OSError as error:
        logger.warning("the cost of graphs cannot be kept in %s: %s", path.parent, error)


def saved_cost(path: Path) -> GraphCost | None:
    """The cost an earlier start measured, or None if there is none that can be read."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("the cost of graphs in %s cannot be read: %s", path, error)
        return None
    return GraphCost(
        bytes_per_bucket=kept.bytes_per_bucket, bytes_per_row=kept.bytes_per_row, source="saved"
    )
