"""Which numbers does a server publish, and what are they called?

One table row per metric: names end in their unit, counters in `_total`. Engine numbers are read from its last
statistics when somebody scrapes; HTTP numbers are counted as requests pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from tokamak.telemetry.phases import PHASE_BOUNDS_S
from tokamak.telemetry.spans import BOUNDS_S
from tokamak.telemetry.spread import Spread

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

EngineNumbers = Mapping[str, float]
"""Fields of EngineStats by name."""

StepNumbers = Mapping[str, Any]
"""Fields of EngineReport by name, down to plain numbers."""


@dataclass(frozen=True, slots=True)
class StepMetric:
    """A number of the engine's steps, by one label; `numbers` are its values by the label's."""

    name: str
    kind: Literal["gauge", "counter"]
    label: str
    help: str
    numbers: Callable[[StepNumbers], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """A number of the engine's; `source` is its name there."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    source: str
    help: str


@dataclass(frozen=True, slots=True)
class HttpMetric:
    """A number counted at the front; `buckets` makes it a histogram."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


ENGINE_METRICS = (
    EngineMetric(
        "tokamak_running_requests", "gauge", "running_requests", "Requests in the running batch."
    ),
    EngineMetric("tokamak_waiting_requests", "gauge", "waiting_requests", "Requests in the queue."),
    EngineMetric(
        "tokamak_waiting_tokens",
        "gauge",
        "waiting_tokens",
        "Prompt tokens of requests in the queue.",
    ),
    EngineMetric(
        "tokamak_cache_free_blocks", "gauge", "free_blocks", "Cache blocks no request holds."
    ),
    EngineMetric("tokamak_cache_total_blocks", "gauge", "total_blocks", "Cache blocks there are."),
    EngineMetric("tokamak_steps_total", "counter", "steps", "Steps run."),
    EngineMetric(
        "tokamak_step_seconds_total", "counter", "step_seconds_sum", "Seconds spent in steps."
    ),
    EngineMetric(
        "tokamak_scheduled_tokens_total", "counter", "scheduled_tokens", "Tokens put in plans."
    ),
    EngineMetric(
        "tokamak_running_tokens_total", "counter", "running_tokens", "Tokens run, padding included."
    ),
    EngineMetric(
        "tokamak_prompt_tokens_total",
        "counter",
        "prompt_tokens",
        "Prompt tokens of admitted requests.",
    ),
    EngineMetric(
        "tokamak_generation_tokens_total", "counter", "generated_tokens", "Tokens generated."
    ),
    EngineMetric(
        "tokamak_prefix_cache_hit_tokens_total",
        "counter",
        "cached_prompt_tokens",
        "Prompt tokens found in the prefix cache.",
    ),
    EngineMetric(
        "tokamak_preemptions_total",
        "counter",
        "preemptions",
        "Requests that gave their blocks back.",
    ),
    EngineMetric(
        "tokamak_host_waits_total", "counter", "host_waits", "Times the host waited for the device."
    ),
    EngineMetric(
        "tokamak_finished_requests_total",
        "counter",
        "finished_requests",
        "Engine requests that ended.",
    ),
)

CACHE_USAGE = EngineMetric(
    "tokamak_cache_usage_ratio", "gauge", "", "Share of cache blocks that requests hold."
)

STEP_METRICS = (
    StepMetric(
        "tokamak_steps_by_mode_total",
        "counter",
        "mode",
        "Steps by how their forward ran.",
        lambda n: {mode: sums["steps"] for mode, sums in n["modes"].items()},
    ),
    StepMetric(
        "tokamak_steps_by_reason_total",
        "counter",
        "why",
        "Steps by why they ran so.",
        lambda n: n["reasons"],
    ),
    StepMetric(
        "tokamak_scheduled_tokens_by_mode_total",
        "counter",
        "mode",
        "Tokens put in plans.",
        lambda n: {mode: sums["scheduled_tokens"] for mode, sums in n["modes"].items()},
    ),
    StepMetric(
        "tokamak_padding_tokens_total",
        "counter",
        "mode",
        "Tokens run beside the scheduled ones, to fill buckets.",
        lambda n: {
            mode: sums["running_tokens"] - sums["scheduled_tokens"]
            for mode, sums in n["modes"].items()
        },
    ),
    StepMetric(
        "tokamak_late_tokens_total",
        "counter",
        "rows",
        "Token rows that late layers ran on their own, in steps with prefill rows: scheduled, and padding.",
        lambda n: {
            "scheduled": n["late"]["scheduled_tokens"],
            "padding": n["late"]["running_tokens"] - n["late"]["scheduled_tokens"],
        },
    ),
    StepMetric(
        "tokamak_graph_recordings_total",
        "counter",
        "graph",
        "Recordings made.",
        lambda n: {graph["name"]: graph["recordings"] for graph in n["graphs"]},
    ),
    StepMetric(
        "tokamak_graph_replays_total",
        "counter",
        "graph",
        "Steps replayed from recordings.",
        lambda n: {graph["name"]: graph["replays"] for graph in n["graphs"]},
    ),
    StepMetric(
        "tokamak_graph_pool_bytes",
        "gauge",
        "graph",
        "Memory that recordings hold.",
        lambda n: {graph["name"]: graph["pool_bytes"] for graph in n["graphs"]},
    ),
    StepMetric(
        "tokamak_graph_checks_total",
        "counter",
        "",
        "Replayed steps compared with the eager forward.",
        lambda n: {"": n["graph_checks"]},
    ),
    StepMetric(
        "tokamak_graph_check_failures_total",
        "counter",
        "",
        "Compared steps that differed.",
        lambda n: {"": n["graph_check_failures"]},
    ),
)
"""Published after ENGINE_METRICS; an empty label is none."""

STEP_SPANS = EngineMetric(
    "tokamak_step_span_seconds", "histogram", "", "Host time of each part of a step."
)
"""By the label `span`."""

REQUEST_PHASES = EngineMetric(
    "tokamak_request_phase_seconds",
    "histogram",
    "",
    "How long requests waited (queue), computed their prompt (prefill) and decoded.",
)
"""By the label `phase`."""

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)

HTTP_REQUESTS = HttpMetric(
    "tokamak_http_requests_total", "HTTP requests answered.", ("route", "method", "status")
)
HTTP_SECONDS = HttpMetric(
    "tokamak_http_request_duration_seconds", "Time to the last byte.", ("route",), _SECONDS
)
CHOICES = HttpMetric(
    "tokamak_generations_total",
    "Generations by how they ended; `gone` is a client that left, `error` a failure.",
    ("finish_reason",),
)
FIRST_TOKEN_SECONDS = HttpMetric(
    "tokamak_time_to_first_token_seconds",
    "From arrival to a generation's first token.",
    (),
    _SECONDS,
)
INTER_TOKEN_SECONDS = HttpMetric(
    "tokamak_inter_token_latency_seconds", "Between two tokens of a generation.", (), _SECONDS
)
OUTPUT_TOKEN_SECONDS = HttpMetric(
    "tokamak_time_per_output_token_seconds",
    "Mean time per token after the first, once per generation.",
    (),
    _SECONDS,
)
GENERATION_SECONDS = HttpMetric(
    "tokamak_e2e_request_latency_seconds",
    "From arrival to a generation's last token.",
    (),
    _SECONDS,
)
PROMPT_TOKENS = HttpMetric(
    "tokamak_request_prompt_tokens", "Prompt tokens of a generation.", (), _TOKENS
)
GENERATION_TOKENS = HttpMetric(
    "tokamak_request_generation_tokens", "Tokens generated by a generation.", (), _TOKENS
)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._http_requests = self._counter(HTTP_REQUESTS)
        self._http_seconds = self._histogram(HTTP_SECONDS)
        self._choices = self._counter(CHOICES)
        self._first_token_seconds = self._histogram(FIRST_TOKEN_SECONDS)
        self._inter_token_seconds = Spread(
            INTER_TOKEN_SECONDS.name, INTER_TOKEN_SECONDS.help, INTER_TOKEN_SECONDS.buckets
        )
        self.registry.register(self._inter_token_seconds)
        self._output_token_seconds = self._histogram(OUTPUT_TOKEN_SECONDS)
        self._generation_seconds = self._histogram(GENERATION_SECONDS)
        self._prompt_tokens = self._histogram(PROMPT_TOKENS)
        self._generation_tokens = self._histogram(GENERATION_TOKENS)

    def watch_engine(self, numbers: Callable[[], EngineNumbers | None]) -> None:
        """Publish the engine's numbers, asked for at each scrape; None while there are none."""
        self.registry.register(_EngineCollector(numbers))

    def watch_steps(self, numbers: Callable[[], StepNumbers | None]) -> None:
        """Publish where the engine's steps went, asked for at each scrape; None while there is no engine."""
        self.registry.register(_StepCollector(numbers))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def http_done(self, route: str, method: str, status: int, seconds: float) -> None:
        """One HTTP request was answered."""
        self._http_requests.labels(route, method, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def tokens_came(self, tokens: int, seconds: float) -> None:
        """A generation got `tokens` tokens, `seconds` after the ones before."""
        self._inter_token_seconds.add(seconds / tokens, tokens)

    def generation_ended(self, finish_reason: str) -> None:
        """A generation ended: with a finish reason, `gone` or `error`."""
        self._choices.labels(finish_reason).inc()

    def generation_done(
        self, *, prompt_tokens: int, tokens: int, first_s: float | None, last_s: float | None
    ) -> None:
        """A generation ran to its end; its first and last token came so long after its arrival."""
        self._prompt_tokens.observe(prompt_tokens)
        self._generation_tokens.observe(tokens)
        if first_s is None or last_s is None:
            return
        self._first_token_seconds.observe(first_s)
        self._generation_seconds.observe(last_s)
        if tokens > 1:
            self._output_token_seconds.observe((last_s - first_s) / (tokens - 1))

    def _counter(self, row: HttpMetric) -> Counter:
        return Counter(row.name, row.help, row.labels, registry=self.registry)

    def _histogram(self, row: HttpMetric) -> Histogram:
        return Histogram(
            row.name, row.help, row.labels, buckets=row.buckets, registry=self.registry
        )


class _EngineCollector(Collector):
    """Reads the engine's numbers when somebody scrapes."""

    def __init__(self, numbers: Callable[[], EngineNumbers | None]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterable[Metric]:
        numbers = self._numbers()
        if numbers is None:
            return
        for row in ENGINE_METRICS:
            value = float(numbers[row.source])
            if row.kind == "gauge":
                yield GaugeMetricFamily(row.name, row.help, value)
            else:
                yield CounterMetricFamily(row.name, row.help, value)
        total = numbers["total_blocks"]
        used = (total - numbers["free_blocks"]) / total if total else 0.0
        yield GaugeMetricFamily(CACHE_USAGE.name, CACHE_USAGE.help, used)


class _StepCollector(Collector):
    """Reads where steps went when somebody scrapes."""

    def __init__(self, numbers: Callable[[], StepNumbers | None]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterable[Metric]:
        numbers = self._numbers()
        if numbers is None:
            return
        for row in STEP_METRICS:
            family = GaugeMetricFamily if row.kind == "gauge" else CounterMetricFamily
            labels = [row.label] if row.label else []
            metric = family(row.name, row.help, labels=labels)
            for value, count in row.numbers(numbers).items():
                metric.add_metric([value] if labels else [], float(count))
            yield metric
        for row, label, key, bounds in (
            (STEP_SPANS, "span", "spans", BOUNDS_S),
            (REQUEST_PHASES, "phase", "phases", PHASE_BOUNDS_S),
        ):
            family = HistogramMetricFamily(row.name, row.help, labels=[label])
            ends = [*(str(bound) for bound in bounds), "+Inf"]
            for name, sums in numbers[key].items():
                counts = list(zip(ends, sums["counts"], strict=True))
                family.add_metric([name], counts, sums["sum_s"])
            yield family
