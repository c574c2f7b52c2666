"""How fast is it? `tokamak bench latency`, `throughput` (this process) and `serve` (a running server).

Prints a table, and with `--output-json` writes the figures under the names vLLM's benchmarks use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

import tokamak
from tokamak.cli.bench_report import latency_report, serve_report, throughput_report
from tokamak.cli.bench_serve import Server, Work, random_ids, run_open_loop, text_prompts
from tokamak.cli.flags import Parser, add_options, asked_options, read_options
from tokamak.config.options import EngineOptions
from tokamak.core.request import SamplingParams
from tokamak.errors import EngineError, OptionError
from tokamak.telemetry.log import set_up_logging

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def run(arguments: list[str]) -> int:
    """Measure; see `run --help`."""
    parser = Parser(prog="tokamak bench", description="Measure an engine or a running server.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_latency(
        commands.add_parser("latency", help="seconds of one batch, alone, in this process")
    )
    _add_throughput(
        commands.add_parser("throughput", help="tokens a second of many prompts in this process")
    )
    _add_serve(
        commands.add_parser("serve", help="open-loop load on a running server: TTFT, TPOT, ITL")
    )
    parsed = parser.parse(arguments)
    set_up_logging("warning")
    measure: Callable[[argparse.Namespace], dict[str, Any]] = parsed.measure
    report = measure(parsed)
    _show(report)
    if parsed.output_json is not None:
        Path(parsed.output_json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _add_latency(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=_count, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--num-iters-warmup", type=_count, default=2, metavar="N")
    parser.add_argument("--num-iters", type=_count, default=10, metavar="N")
    _add_lengths(parser)
    add_options(parser, EngineOptions)
    parser.set_defaults(measure=measure_latency)


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=_count, default=64, metavar="N", help="(default: 64)")
    _add_lengths(parser)
    add_options(parser, EngineOptions)
    parser.set_defaults(measure=measure_throughput)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--uds", metavar="PATH", help="a unix socket in place of the URL's address")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument("--model", metavar="NAME", help="(default: the server's first model)")
    parser.add_argument(
        "--endpoint", choices=(COMPLETIONS, CHAT), default=COMPLETIONS, help="where requests go"
    )
    parser.add_argument("--num-prompts", type=_count, default=100, metavar="N")
    parser.add_argument(
        "--request-rate",
        type=_rate,
        default=float("inf"),
        metavar="X",
        help="requests a second, Poisson arrivals; inf sends all at once (default: inf)",
    )
    parser.add_argument(
        "--burstiness", type=_rate, default=1.0, metavar="X", help="gamma shape; 1 is Poisson"
    )
    parser.add_argument(
        "--max-concurrency", type=_count, metavar="N", help="most in flight at once"
    )
    parser.add_argument(
        "--dataset-path", metavar="FILE", help="a prompt a line in place of random token ids"
    )
    parser.add_argument(
        "--vocab-tokens", type=_count, default=30000, metavar="N", help="random ids lie below it"
    )
    parser.add_argument(
        "--save-detailed", action="store_true", help="every request's times in the JSON too"
    )
    _add_lengths(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.set_defaults(measure=measure_serve)


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=_count, default=128, metavar="N", help="prompt tokens")
    parser.add_argument("--output-len", type=_count, default=128, metavar="N", help="output tokens")
    parser.add_argument(
        "--range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="lengths vary by this share, up and down",
    )
    parser.add_argument("--output-json", metavar="FILE", help="write the figures there")


def measure_latency(parsed: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one batch from start to end, several times."""
    options = read_options(parsed, EngineOptions)
    seconds: list[float] = []
    with tokamak.LLM(options.model, **asked_options(options)) as llm:
        generator = random.Random(options.seed)
        vocab = llm.info.vocab_tokens
        for turn in range(parsed.num_iters_warmup + parsed.num_iters):
            # New ids every time: the prefix cache must not answer for the model.
            prompts = [
                random_ids(generator, parsed.input_len, vocab) for _ in range(parsed.batch_size)
            ]
            began_s = time.perf_counter()
            llm.generate(prompts, _exactly(parsed.output_len))
            if turn >= parsed.num_iters_warmup:
                seconds.append(time.perf_counter() - began_s)
    return latency_report(seconds)


def measure_throughput(parsed: argparse.Namespace) -> dict[str, Any]:
    """Many prompts at once, of varied lengths."""
    options = read_options(parsed, EngineOptions)
    generator = random.Random(options.seed)
    with tokamak.LLM(options.model, **asked_options(options)) as llm:
        vocab = llm.info.vocab_tokens
        prompts = [
            random_ids(generator, _varied(generator, parsed.input_len, parsed.range_ratio), vocab)
            for _ in range(parsed.num_prompts)
        ]
        params = [
            _exactly(_varied(generator, parsed.output_len, parsed.range_ratio)) for _ in prompts
        ]
        began_s = time.perf_counter()
        llm.generate(prompts, params)
        elapsed_s = time.perf_counter() - began_s
    return throughput_report(
        elapsed_s, [len(ids) for ids in prompts], [each.max_tokens or 0 for each in params]
    )


def measure_serve(parsed: argparse.Namespace) -> dict[str, Any]:
    """Load a running server at a chosen rate."""
    url = urlsplit(parsed.base_url)
    if url.scheme not in ("http", "https") or url.hostname is None:
        raise OptionError(f"--base-url is {parsed.base_url!r}; it must be http://HOST:PORT")
    server = Server(
        host=url.hostname,
        port=url.port or (443 if url.scheme == "https" else 80),
        tls=url.scheme == "https",
        uds=parsed.uds,
        api_key=parsed.api_key,
    )
    generator = random.Random(parsed.seed)
    lengths = [
        _varied(generator, parsed.output_len, parsed.range_ratio) for _ in range(parsed.num_prompts)
    ]
    prompts: list[str] | list[list[int]]
    if parsed.dataset_path is not None:
        prompts = text_prompts(Path(parsed.dataset_path), parsed.num_prompts, generator)
    elif parsed.endpoint == CHAT:
        raise OptionError(
            f"--endpoint {CHAT} takes text, and no --dataset-path is given",
            hint=f"give a file of prompts, or use --endpoint {COMPLETIONS}",
        )
    else:
        prompts = [
            random_ids(
                generator,
                _varied(generator, parsed.input_len, parsed.range_ratio),
                parsed.vocab_tokens,
            )
            for _ in range(parsed.num_prompts)
        ]
    work = [
        Work(prompt=prompt, output_tokens=output)
        for prompt, output in zip(prompts, lengths, strict=True)
    ]
    model, replies, duration_s = asyncio.run(
        run_open_loop(
            server,
            parsed.endpoint,
            work,
            model=parsed.model,
            request_rate=parsed.request_rate,
            burstiness=parsed.burstiness,
            max_concurrency=parsed.max_concurrency,
            generator=generator,
        )
    )
    if not any(reply.error is None for reply in replies):
        raise EngineError(
            f"none of {len(replies)} requests succeeded; the first: {replies[0].error}"
        )
    report = serve_report(replies, duration_s, detailed=parsed.save_detailed)
    return {
        "model_id": model,
        "num_prompts": parsed.num_prompts,
        "request_rate": str(parsed.request_rate)
        if parsed.request_rate == float("inf")
        else parsed.request_rate,
        "burstiness": parsed.burstiness,
        "max_concurrency": parsed.max_concurrency,
        "seed": parsed.seed,
        **report,
    }


def _exactly(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def _varied(generator: random.Random, length: int, ratio: float) -> int:
    return max(1, generator.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _show(report: dict[str, Any]) -> None:
    """The figures as a table; lists stay in the JSON."""
    table = Table(show_header=False, box=None)
    for name, value in report.items():
        if isinstance(value, list):
            continue
        if isinstance(value, dict):
            for part, figure in value.items():
                table.add_row(f"{name} {part}", f"{figure:.4g}")
            continue
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    Console().print(table)
