"""What would serving a model take? `tokamak plan MODEL` settles the options and plans a start, without its weights.

Every number comes from the function a start gets it from, so what is printed here is what a start logs.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tokamak.cli.flags import Parser, add_options, read_options
from tokamak.cli.tables import show_rows, show_values
from tokamak.config.options import EngineOptions
from tokamak.config.reasons import size
from tokamak.config.settle_graphs import sizes_text
from tokamak.engine.configure import configure
from tokamak.telemetry.log import set_up_logging

if TYPE_CHECKING:
    from tokamak.runner.simulate import SimulatedStart


def run(arguments: list[str]) -> int:
    """Plan a start and print it; see `run --help`."""
    parser = Parser(
        prog="tokamak plan",
        usage="tokamak plan [MODEL] [--json] [options]",
        description="Show what serving a model would take: memory by purpose, cache blocks, recorded sizes.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    add_options(parser, EngineOptions)
    parsed = parser.parse(arguments)
    options = read_options(parsed, EngineOptions)
    set_up_logging("warning")
    config = configure(options, progress=sys.stderr.isatty())
    simulated = importlib.import_module("tokamak.runner.simulate").simulate_start(config)
    report = start_report(simulated)
    if parsed.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0


def start_report(simulated: SimulatedStart) -> dict[str, Any]:
    """A planned start as plain values: `config`, memory of the device and of the host, `graphs`, `cache`."""
    start = simulated.start
    config, memory = start.config, start.memory
    parts = {
        "weights": start.weight_bytes,
        "cache": memory.cache_bytes,
        "graphs": memory.graph_bytes,
        "inputs": memory.input_bytes,
        "logits": memory.logit_bytes,
        "between_stages": memory.tail_bytes,
    }
    return {
        "model": {
            "path": config.model.path,
            "architecture": config.model.facts.architecture,
            "stored_dtype": config.model.facts.stored_dtype,
        },
        "config": [
            {"field": line.field, "value": line.value, "why": line.why} for line in config.reasons
        ],
        "memory_bytes": {**parts, "all": sum(parts.values())},
        "host_memory_bytes": {"tables": config.model.host_bytes},
        "cache": {
            "block_tokens": config.cache.block_tokens,
            "block_bytes": memory.block_bytes,
            "total_blocks": memory.total_blocks,
            "max_model_len": config.model.max_model_len,
            "longest_requests": start.longest_requests,
        },
        "graphs": {
            "when": config.graphs.when,
            "backend": config.graphs.backend,
            "request_sizes": list(simulated.request_ladder.buckets),
            "token_sizes": list(simulated.token_ladder.buckets),
            "tail_sizes": list(simulated.late_ladder.buckets),
            "off": simulated.off,
            "pools": config.graphs.pools,
            "estimate_bytes": memory.graph_estimate_bytes,
            "reserve_bytes": memory.graph_bytes,
            "cost": start.cost.source,
            "bytes_per_bucket": start.cost.bytes_per_bucket,
            "bytes_per_row": start.cost.bytes_per_row,
        },
    }


_SOURCES = {
    "measured": "measured by this start",
    "saved": "measured by an earlier start of this model",
    "default": "a default from the model's shapes; a start that records everything measures it",
}


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    show_values(console, "model", report["model"])
    show_rows(console, "config", report["config"], ("field", "value", "why"))
    show_values(
        console, "memory", {name: size(count) for name, count in report["memory_bytes"].items()}
    )
    if tables := report["host_memory_bytes"]["tables"]:
        show_values(console, "memory of the host", {"tables": size(tables)})
    cache = dict(report["cache"])
    cache["block_bytes"] = size(cache["block_bytes"])
    show_values(console, "cache", cache)
    graphs = dict(report["graphs"])
    for name in ("request_sizes", "token_sizes", "tail_sizes"):
        graphs[name] = sizes_text(graphs[name])
    for name in ("estimate_bytes", "reserve_bytes", "bytes_per_bucket", "bytes_per_row"):
        graphs[name] = size(graphs[name])
    graphs["cost"] = _SOURCES[graphs["cost"]]
    graphs["off"] = [f"{name}: {why}" for name, why in graphs["off"].items()] or "none"
    show_values(console, "graphs", graphs)
