"""How fast does a DeepSeek V4.1 of real layer sizes decode and prefill, and what does the host do meanwhile?

    python -m benchmarks.engine.v41_decode [--record h200-v41]
    python -m benchmarks.engine.v41_decode --tiny --record v41-tiny-cpu

Random weights of `mini96` (`published_v4_1.py`): 64k tokens in, 512 out, four requests at once, greedy, no prefix cache.
Turns of the engine's loop in which all four decode are timed one by one; the floor is the time that reading what such
a step must read takes at the rate measured with a copy. Then prompts of several lengths are prefilled alone, in steps
of 8k tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.profiled import PREPARATION, ProfiledCore
from benchmarks.engine.published_v4_1 import mini, tiny
from benchmarks.engine.v41_bytes import experts_form, loaded_bytes, step_bytes
from benchmarks.record import write_record
from tokamak.config.engine import EngineConfig
from tokamak.config.options import EngineOptions
from tokamak.core.request import SamplingParams
from tokamak.device.facts import device_facts
from tokamak.engine.configure import configure
from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest
from tokamak.models.deepseek_v4.v4_1 import DeepseekV41
from tokamak.runner.simulate import simulate_start
from tokamak.telemetry.spans import SPANS

SKIPPED_TURNS = 8
"""Of those in which all requests decode: recordings are made and caches of the allocator filled in them."""
COPIED_BYTES = {"cuda": 1 << 31, "cpu": 1 << 27}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a model and lengths for a CPU")
    parser.add_argument("--experts", type=int, default=96, help="routed experts of a layer")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt; 65536, tiny 256")
    parser.add_argument("--new", type=int, help="tokens of an answer; 512, tiny 64")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--contexts", type=int, nargs="*", help="8192 65536 262144; tiny 256 1024")
    parser.add_argument("--chunk", type=int, help="tokens of a step; 8192, tiny 256")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", default="auto", help="of a CPU")
    parser.add_argument("--graphs", help="startup on a GPU, auto on a CPU")
    parser.add_argument("--kernels", default="", help="backends, as op=backend,op=backend")
    parser.add_argument("--record", help="write benchmarks/records/NAME.json")
    asked = parser.parse_args(given)
    usual = (256, 64, [256, 1024], 256) if asked.tiny else (65536, 512, [8192, 65536, 262144], 8192)  # fmt: skip
    for name, value in zip(("prompt", "new", "contexts", "chunk"), usual, strict=True):
        if getattr(asked, name) is None:
            setattr(asked, name, value)
    return asked


def main() -> None:
    """Measure, show a table, and write a record if one is named."""
    asked = arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny() if asked.tiny else mini(asked.experts)
        (Path(folder) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        config = configure(_options(folder, asked), progress=False)
        memory = simulate_start(config).start.memory
        core = ProfiledCore(EngineCore(config))
    figures = {
        "model": "tiny" if asked.tiny else f"mini{asked.experts}",
        "dtype": config.model.dtype,
        "prompt_tokens": asked.prompt,
        "new_tokens": asked.new,
        "requests": asked.requests,
        "chunk_tokens": asked.chunk,
        "memory_bytes_a_token": memory.block_bytes // config.cache.block_tokens,
        **_model_facts(core),
        "decode": decode(core, config, asked),
        "prefill": [prefill(core, tokens, asked.chunk) for tokens in asked.contexts],
    }
    core.close()
    print(table(figures))
    if asked.record:
        print(write_record(asked.record, figures, device_facts(config.model.device)))


def _options(folder: str, asked: argparse.Namespace) -> EngineOptions:
    longest = max(asked.prompt + asked.new, *asked.contexts, 0) + 16
    on_gpu = asked.device != "cpu" and torch.cuda.is_available()
    graphs = asked.graphs or ("startup" if on_gpu else "auto")
    sizes = {"req_graph_sizes": (asked.requests,)} if graphs != "off" else {}
    return EngineOptions(
        model=folder,
        load_format="random",
        device=asked.device,
        graphs=graphs,
        kernels=asked.kernels,
        threads=asked.threads,
        dtype="float32" if asked.tiny else "auto",
        enable_prefix_caching=False,
        max_num_seqs=asked.requests,
        max_num_batched_tokens=asked.chunk,
        max_model_len=longest,
        num_blocks_override=asked.requests * (longest // 16 + 2) if asked.tiny else None,
        **sizes,
    )


def _model(core: ProfiledCore) -> DeepseekV41:
    model = core.core._executor.rank.runner._model
    assert isinstance(model, DeepseekV41), f"{model!r} is no V4.1"
    return model


def _model_facts(core: ProfiledCore) -> dict[str, Any]:
    """Which layers there are, and in what form."""
    model = _model(core)
    c = model.config
    kinds = {
        "window alone": sum(not ratio for ratio in c.ratios),
        "make entries and choose": sum(layer in c.entry_sources for layer in c.index_sources),
        "choose": sum(layer not in c.entry_sources for layer in c.index_sources),
    }
    kinds["read entries chosen before"] = c.shared.layers - sum(kinds.values())
    return {
        "layers": kinds,
        "ratios": list(c.ratios),
        "experts": experts_form(model),
        "loaded_bytes": loaded_bytes(model),
    }


def _add(core: ProfiledCore, name: str, prompt: int, new: int) -> None:
    chance = random.Random(name)
    vocab = _model(core).config.shared.vocab_tokens
    core.add(
        AddRequest(
            request_id=name,
            prompt_ids=[chance.randrange(3, vocab - 1) for _ in range(prompt)],
            params=SamplingParams(temperature=0.0, ignore_eos=True),
            max_tokens=new,
            stop_ids=[],
            sibling=0,
            priority=0,
            cache_salt="",
        )
    )


def decode(core: ProfiledCore, config: EngineConfig, asked: argparse.Namespace) -> dict[str, Any]:
    """Times of the turns in which all requests decode."""
    for at in range(asked.requests):
        _add(core, f"decode-{at}", asked.prompt, asked.new)
    cuda = config.model.device.startswith("cuda")
    runner = core.core._executor.rank.runner
    turns: list[float] = []
    rows: list[np.ndarray[Any, Any]] = []
    # The second half is left to the profiler, which slows the host.
    wanted = SKIPPED_TURNS + (asked.new // 2 if cuda else asked.new)
    while core.has_work:
        before, began = core.stats(), time.perf_counter()
        core.step()
        elapsed = time.perf_counter() - began
        fresh = core.stats().scheduled_tokens - before.scheduled_tokens
        if fresh != asked.requests or core.stats().running_requests != asked.requests:
            continue
        turns.append(elapsed)
        rows.append(runner.spans.recent_ns()[-1] / 1e3)
        if cuda and len(turns) == wanted:
            core.watch()
    kept = slice(SKIPPED_TURNS, wanted)
    spans = np.median(np.stack(rows[kept]), axis=0)
    host = {name: round(float(us), 1) for name, us in zip(SPANS, spans, strict=True) if us}
    median_s = statistics.median(turns[kept])
    model = _model(core)
    read = step_bytes(
        model.config,
        loaded_bytes(model),
        requests=asked.requests,
        context=asked.prompt + asked.new // 2,
        itemsize=torch.empty(0, dtype=getattr(torch, config.model.dtype)).element_size(),
    )
    rate = copy_rate(config.model.device)
    floor_s = sum(read.values()) / rate
    return {
        "turns": len(turns[kept]),
        "step_us": round(median_s * 1e6, 1),
        "tokens_a_second": round(asked.requests / median_s, 2),
        "floor_us": round(floor_s * 1e6, 1),
        "times_the_floor": round(median_s / floor_s, 2),
        "bytes_read": read,
        "copy_bytes_a_second": round(rate),
        "host_us": host,
        "preparation_us": round(sum(host.get(name, 0.0) for name in PREPARATION), 1),
        "gpu_idle_us": None if core.profile is None else round(core.profile.idle_us, 1),
    }


def copy_rate(device: str) -> float:
    """Bytes a second that a copy in the device's memory reads and writes: the best of ten."""
    source = torch.empty(COPIED_BYTES[device.split(":")[0]], dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(10):
        began = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize(source.device)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - began))
    return best


def prefill(core: ProfiledCore, tokens: int, chunk: int) -> dict[str, Any]:
    """One prompt alone, after another of one step: tokens a second on the whole."""
    for name, count in (("warm", min(chunk, tokens)), ("timed", tokens)):
        _add(core, f"prefill-{name}-{tokens}", count, 1)
        began = time.perf_counter()
        while core.has_work:
            core.step()
        elapsed = time.perf_counter() - began
    return {
        "context": tokens,
        "seconds": round(elapsed, 3),
        "tokens_a_second": round(tokens / elapsed, 1),
    }


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a person."""
    decoded = figures["decode"]
    idle = decoded["gpu_idle_us"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in figures["layers"].items())
    lines = [
        f"{figures['model']} in {figures['dtype']}, experts {figures['experts']}; layers: {kinds}",
        f"memory of a token: {figures['memory_bytes_a_token']} bytes",
        f"decode, {figures['requests']} requests of {figures['prompt_tokens']} tokens: step "
        f"{decoded['step_us']:.0f} us, floor {decoded['floor_us']:.0f} us ({decoded['times_the_floor']:.2f} times), "
        f"{decoded['tokens_a_second']:.1f} tokens/s",
        f"host: {decoded['preparation_us']:.0f} us to prepare; "
        + " ".join(f"{name} {us:.0f}" for name, us in decoded["host_us"].items())
        + ("" if idle is None else f"; GPU idle {idle:.0f} us a step"),
        f"{'context':>9} {'prefill tok/s':>14}",
    ]
    return "\n".join(
        [*lines]
        + [f"{row['context']:9} {row['tokens_a_second']:14.1f}" for row in figures["prefill"]]
    )


if __name__ == "__main__":
    main()
