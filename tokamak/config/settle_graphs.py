"""What is recorded, when and by what? The graph options become a GraphConfig, or one line that says why not.

`auto` answers only what was left open. Two settings that contradict each other are refused here, before anything
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokamak.config.engine import GraphConfig, SchedulerConfig
from tokamak.config.options import EngineOptions
from tokamak.config.reasons import AUTO, Reasons
from tokamak.device.facts import DeviceFacts
from tokamak.errors import OptionError

When = Literal["startup", "serving", "on-demand", "off"]
Backend = Literal["cuda", "sim", "none"]
Sizes = tuple[int, ...] | None

VECTOR_FEATURES = frozenset({"avx2", "avx512f", "asimd"})
"""The CPUs compiled kernels are written for, as in `ops/jit/available.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCase:
    """What was asked of graphs, and what it comes to: a row of REFUSED_GRAPHS looks at it."""

    options: EngineOptions
    facts: DeviceFacts
    scheduler: SchedulerConfig
    when: When
    why: str
    request_sizes: Sizes
    token_sizes: Sizes
    token_why: str

    @property
    def off(self) -> bool:
        """Whether nothing is recorded."""
        return self.when == "off"

    @property
    def asked_size(self) -> str:
        """The first option that lists sizes, with its value; empty if none does."""
        asked = (
            ("req_graph_sizes", self.options.req_graph_sizes),
            ("token_graph_sizes", self.options.token_graph_sizes),
        )
        for name, sizes in asked:
            if not isinstance(sizes, str) and sizes:
                return f"{name} is {sizes_text(sizes)}"
        return ""

    @property
    def bad_size(self) -> str:
        """The first size no step can have, its option and the limit; empty if every size is one of a step."""
        limits = self.scheduler
        for name, sizes, limit_name, limit in (
            ("req_graph_sizes", self.request_sizes, "max_num_seqs", limits.max_num_seqs),
            (
                "token_graph_sizes",
                self.token_sizes,
                "max_num_batched_tokens",
                limits.max_num_batched_tokens,
            ),
        ):
            for size in sizes or ():
                if not 1 <= size <= limit:
                    return (
                        f"{name} has {size}, but {limit_name} is {limit}: a step has 1 to {limit}"
                    )
        return ""


@dataclass(frozen=True, slots=True)
class GraphRefusal:
    """Graph options that contradict each other: when, what to say, and what works."""

    options: tuple[str, ...]
    holds: Callable[[GraphCase], bool]
    message: Callable[[GraphCase], str]
    hint: Callable[[GraphCase], str]


REFUSED_GRAPHS: tuple[GraphRefusal, ...] = (
    GraphRefusal(
        ("graphs", "graph_backend"),
        lambda c: c.options.graphs == "off" and c.options.graph_backend in ("cuda", "sim"),
        lambda c: f"graphs is off, but graph_backend is {c.options.graph_backend}",
        lambda c: "leave graph_backend out, or use graphs=startup",
    ),
    GraphRefusal(
        ("graphs", "graph_backend"),
        lambda c: (
            c.options.graphs in ("startup", "serving", "on-demand")
            and c.options.graph_backend == "none"
        ),
        lambda c: f"graphs is {c.options.graphs}, but graph_backend is none",
        lambda c: "leave graph_backend out, or use graphs=off",
    ),
    GraphRefusal(
        ("graph_backend", "device"),
        lambda c: c.options.graph_backend == "cuda" and c.facts.vendor == "cpu",
        lambda c: f"graph_backend is cuda, but the device is a CPU ({c.facts.name})",
        lambda c: "use graph_backend=sim, or leave it out",
    ),
    GraphRefusal(
        ("graph_backend", "device"),
        lambda c: c.options.graph_backend == "sim" and c.facts.vendor != "cpu",
        lambda c: f"graph_backend is sim, which records on a CPU; the device is {c.facts.name}",
        lambda c: "use graph_backend=cuda, or leave it out",
    ),
    GraphRefusal(
        ("verify_graphs", "graphs"),
        lambda c: c.off and c.options.verify_graphs,
        lambda c: f"verify_graphs is true, but graphs is off ({c.why})",
        lambda c: "leave verify_graphs out, or use graphs=startup",
    ),
    GraphRefusal(
        ("verify_graphs_rate", "graphs"),
        lambda c: c.off and c.options.verify_graphs_rate > 0,
        lambda c: (
            f"verify_graphs_rate is {c.options.verify_graphs_rate}, but graphs is off ({c.why})"
        ),
        lambda c: "leave verify_graphs_rate out, or use graphs=startup",
    ),
    GraphRefusal(
        ("graphs", "req_graph_sizes", "token_graph_sizes"),
        lambda c: c.off and bool(c.asked_size),
        lambda c: f"{c.asked_size}, but graphs is off ({c.why})",
        lambda c: "leave the sizes out, or use graphs=startup and no graph_backend",
    ),
    GraphRefusal(
        ("token_graph_eager_pad", "graphs"),
        lambda c: c.off and c.options.token_graph_eager_pad,
        lambda c: f"token_graph_eager_pad is true, but graphs is off ({c.why})",
        lambda c: "leave token_graph_eager_pad out, or use graphs=startup and token_graph_sizes",
    ),
    GraphRefusal(
        ("token_graph_eager_pad", "token_graph_sizes"),
        lambda c: c.options.token_graph_eager_pad and c.token_sizes == (),
        lambda c: f"token_graph_eager_pad is true, but token_graph_sizes is empty ({c.token_why})",
        lambda c: f"use token_graph_sizes={c.scheduler.max_num_batched_tokens}",
    ),
    GraphRefusal(
        ("token_graph_max", "token_graph_sizes"),
        lambda c: (
            "token_graph_max" in c.options.model_fields_set and c.options.token_graph_sizes != AUTO
        ),
        lambda c: (
            f"token_graph_max is {c.options.token_graph_max} and token_graph_sizes is "
            f"{sizes_text(c.token_sizes)}; each sets the token sizes"
        ),
        lambda c: "leave one of them out",
    ),
    GraphRefusal(
        ("req_graph_sizes", "max_num_seqs"),
        lambda c: bool(c.bad_size),
        lambda c: c.bad_size,
        lambda c: "leave the size out or raise the limit",
    ),
    GraphRefusal(
        ("graphs", "req_graph_sizes", "token_graph_sizes"),
        lambda c: not c.off and c.request_sizes == () and c.token_sizes == (),
        lambda c: f"graphs is {c.when}, but no size is left to record: {c.token_why}",
        lambda c: "give req_graph_sizes or token_graph_sizes a size, or use graphs=off",
    ),
)
"""Every combination of graph options that is refused, in the order they are looked at."""


def settle_graphs(
    options: EngineOptions,
    facts: DeviceFacts,
    scheduler: SchedulerConfig,
    reasons: Reasons,
) -> GraphConfig:
    """Decide what is recorded, when, and how it is checked.

    Raises:
        OptionError: a size no step can have, or two settings that contradict each other.
    """
    when, why = _when(options, facts)
    request_sizes, request_why = _request_sizes(options, facts, when, scheduler)
    token_sizes, token_why = _token_sizes(options, facts, when)
    if options.graphs == AUTO and when != "off" and request_sizes == token_sizes == ():
        when, why = "off", f"no size is left to record: {token_why}"
    case = GraphCase(
        options=options,
        facts=facts,
        scheduler=scheduler,
        when=when,
        why=why,
        request_sizes=request_sizes,
        token_sizes=token_sizes,
        token_why=token_why,
    )
    for refusal in REFUSED_GRAPHS:
        if refusal.holds(case):
            raise OptionError(refusal.message(case), hint=refusal.hint(case))
    backend, backend_why = _backend(options, facts, when)
    reasons.note("graphs", when, why)
    reasons.note("graph_backend", backend, backend_why)
    reasons.note("req_graph_sizes", sizes_text(request_sizes), request_why)
    reasons.note("token_graph_sizes", sizes_text(token_sizes), token_why)
    return GraphConfig(
        when=when,
        backend=backend,
        request_sizes=request_sizes,
        token_sizes=token_sizes,
        token_max=options.token_graph_max,
        eager_pad=options.token_graph_eager_pad,
        pools=options.graph_pools,
        allow_missing_bucket=options.graphs_allow_missing_bucket,
        verify=options.verify_graphs,
        verify_rate=options.verify_graphs_rate,
        poison_pads=options.poison_pad_rows,
    )


def compiled_kernels(facts: DeviceFacts) -> bool:
    """Whether a CPU's ops are compiled kernels, which a recording replays without Python between them."""
    return (
        facts.vendor == "cpu" and facts.has("llvmlite") and bool(VECTOR_FEATURES & facts.features)
    )


def sizes_text(sizes: Sequence[int] | None) -> str:
    """Sizes for a person: `1 to 32`, `64, 128`, `none` or `default rule`."""
    if sizes is None:
        return "default rule"
    if not sizes:
        return "none"
    if len(sizes) > 2 and tuple(sizes) == tuple(range(sizes[0], sizes[-1] + 1)):
        return f"{sizes[0]} to {sizes[-1]}"
    return ", ".join(str(size) for size in sizes)


def _when(options: EngineOptions, facts: DeviceFacts) -> tuple[When, str]:
    if options.graphs != AUTO:
        return options.graphs, "asked for"
    if options.graph_backend == "none":
        return "off", "graph_backend is none"
    if facts.vendor != "cpu":
        return (
            "serving",
            "all sizes are recorded between the first steps and while idle: no first token waits",
        )
    if options.graph_backend != AUTO:
        return "on-demand", f"graph_backend {options.graph_backend} was asked for"
    for name in ("req_graph_sizes", "token_graph_sizes", "token_graph_max"):
        if name in options.model_fields_set and getattr(options, name) not in (AUTO, ()):
            return "on-demand", f"{name} was asked for"
    if not compiled_kernels(facts):
        return "off", "this CPU has no compiled kernels (llvmlite), and others gain nothing"
    return "on-demand", "sizes are recorded when steps want them, and kept if they replay faster"


def _backend(options: EngineOptions, facts: DeviceFacts, when: When) -> tuple[Backend, str]:
    if options.graph_backend != AUTO:
        return options.graph_backend, "asked for"
    if when == "off":
        return "none", "graphs are off"
    if facts.vendor == "cpu":
        return "sim", "records calls of ops, on a CPU"
    return "cuda", "records launches, on a GPU"


def _request_sizes(
    options: EngineOptions, facts: DeviceFacts, when: When, scheduler: SchedulerConfig
) -> tuple[Sizes, str]:
    if options.req_graph_sizes != AUTO:
        return _sorted(options.req_graph_sizes), "asked for"
    if when == "off":
        return (), "graphs are off"
    if facts.vendor == "cpu":
        return tuple(range(1, scheduler.max_num_seqs + 1)), "every size: no padding on a CPU"
    return None, "dense below 64 requests, by 32 above 256"


def _token_sizes(options: EngineOptions, facts: DeviceFacts, when: When) -> tuple[Sizes, str]:
    if options.token_graph_sizes != AUTO:
        return _sorted(options.token_graph_sizes), "asked for"
    if when == "off":
        return (), "graphs are off"
    if "token_graph_max" in options.model_fields_set:
        return None, f"from 64 to token_graph_max {options.token_graph_max}"
    if facts.vendor == "cpu":
        return (), "prefill is bound by arithmetic on a CPU"
    return None, f"from 64 to token_graph_max {options.token_graph_max}"


def _sorted(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))
