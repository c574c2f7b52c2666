"""What do measured times amount to? Raw seconds become the figures of a report, named as vLLM names them.

TTFT: send to first text. TPOT: the rest of the time over the rest of the tokens. ITL: gaps between pieces of
text. E2EL: send to last text. Milliseconds in the report, seconds in raw lists.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tokamak.cli.bench_serve import Reply

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent lie, between neighbours linearly; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """mean_, median_, std_ and pNN_ of a list of seconds, as `<what>_<name>_ms`."""
    values = [second * 1000 for second in seconds]
    figures = {
        f"mean_{name}_ms": statistics.fmean(values) if values else 0.0,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": statistics.pstdev(values) if values else 0.0,
    }
    for share in PERCENTILES:
        figures[f"p{share}_{name}_ms"] = percentile(values, share)
    return figures


def latency_report(seconds: Sequence[float]) -> dict[str, Any]:
    """Seconds of whole batches."""
    return {
        "avg_latency": statistics.fmean(seconds),
        "latencies": list(seconds),
        "percentiles": {
            str(share): percentile(seconds, share) for share in (10, 25, 50, 75, 90, 99)
        },
    }


def throughput_report(
    elapsed_s: float, prompt_tokens: Sequence[int], output_tokens: Sequence[int]
) -> dict[str, Any]:
    """Tokens and requests a second of a batch that ran in one go."""
    total = sum(prompt_tokens) + sum(output_tokens)
    return {
        "elapsed_time": elapsed_s,
        "num_requests": len(prompt_tokens),
        "total_num_tokens": total,
        "requests_per_second": len(prompt_tokens) / elapsed_s,
        "tokens_per_second": total / elapsed_s,
        "output_tokens_per_second": sum(output_tokens) / elapsed_s,
    }


def serve_report(
    replies: Sequence[Reply], duration_s: float, *, detailed: bool = False
) -> dict[str, Any]:
    """Figures of a run against a server; failed requests count in `failed` alone."""
    good = [reply for reply in replies if reply.error is None]
    ttfts = [reply.text_at_s[0] - reply.sent_s for reply in good]
    latencies = [reply.ended_s - reply.sent_s for reply in good]
    itls = [
        [
            later - earlier
            for earlier, later in zip(reply.text_at_s, reply.text_at_s[1:], strict=False)
        ]
        for reply in good
    ]
    tpots = [
        (latency - ttft) / (reply.output_tokens - 1)
        for reply, ttft, latency in zip(good, ttfts, latencies, strict=True)
        if reply.output_tokens > 1
    ]
    prompt_tokens = sum(reply.prompt_tokens for reply in good)
    output_tokens = sum(reply.output_tokens for reply in good)
    report: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(replies) - len(good),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration_s,
        **spread("ttft", ttfts),
        **spread("tpot", tpots),
        **spread("itl", [gap for gaps in itls for gap in gaps]),
        **spread("e2el", latencies),
    }
    if detailed:
        report |= {
            "input_lens": [reply.prompt_tokens for reply in replies],
            "output_lens": [reply.output_tokens for reply in replies],
            "ttfts": ttfts,
            "itls": itls,
            "errors": [reply.error or "" for reply in replies],
        }
    return report
