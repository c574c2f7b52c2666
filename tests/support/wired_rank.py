"""One rank around any model, without a checkpoint, and requests that are run on it by plans made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.configs import a_config
from tests.support.shapes import a_row
from tests.support.tiny import VOCAB_TOKENS
from tokamak.cache.groups import group_sub_caches
from tokamak.checkpoint.load import load_random
from tokamak.config.engine import EngineConfig, ModelFacts
from tokamak.core.plan import Admission, BlockGrant, Grants, StepPlan, StepResult
from tokamak.core.request import SamplingParams
from tokamak.device.facts import cpu_facts
from tokamak.graphs.request_graph import ReqGraph
from tokamak.graphs.token_graph import DecoderGraph, TokenGraph
from tokamak.layers.build import Build
from tokamak.layers.model import Model
from tokamak.ops.load import load_backends
from tokamak.runner.dummy import NULL_SLOT
from tokamak.runner.exchange import Exchange, LocalExchange, RankRow, Rows
from tokamak.runner.graph_cost import GraphCost
from tokamak.runner.memory import StartPlan, plan_start
from tokamak.runner.runner import ModelRunner
from tokamak.runner.wiring import Wired, wire
from tokamak.sampling.sampler import Sampler

BLOCK_TOKENS = 16
REQUESTS = 8
STEP_TOKENS = 24
MODEL_TOKENS = 64
BLOCKS = 1 + REQUESTS * MODEL_TOKENS // BLOCK_TOKENS

REQUEST_SIZES = (1, 2, 4)
TOKEN_SIZES = (4, 9, 16)

GREEDY = SamplingParams(temperature=0.0)
FACTS = ModelFacts(
    architecture="LlamaForCausalLM",
    vocab_tokens=VOCAB_TOKENS,
    max_position_tokens=512,
    stored_dtype="float32",
    weight_bytes=1_000_000,
    parameters=250_000,
    cache_token_numbers=256,
)
COST = GraphCost(bytes_per_bucket=1 << 20, bytes_per_row=1 << 16, source="default")


class Peer(LocalExchange):
    """One of two ranks; what the other tells is set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = 2
        self.other: RankRow = a_row()

    def gather_rows(self, row: RankRow) -> Rows:
        return np.array([row, self.other], dtype=np.int32)


def a_rank_config(**options: object) -> EngineConfig:
    """Everything is recorded at the start, at `REQUEST_SIZES` and `TOKEN_SIZES`, unless options say otherwise."""
    asked: dict[str, Any] = {
        "graphs": "startup",
        "dtype": "fp32",
        "max_num_seqs": REQUESTS,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_model_len": MODEL_TOKENS,
        "block_size": BLOCK_TOKENS,
        "num_blocks_override": BLOCKS,
        **options,
    }
    if asked["graphs"] != "off":
        asked = {"req_graph_sizes": REQUEST_SIZES, "token_graph_sizes": TOKEN_SIZES, **asked}
    return a_config(facts=cpu_facts(), model=FACTS, **asked)


@dataclass(slots=True, kw_only=True)
class WiredRank:
    """A runner with its model, and what tests look at beside it."""

    model: Model
    wired: Wired
    start: StartPlan
    views: Mapping[str, Sequence[Tensor]]
    """The caches, by sub-cache and layer."""

    @property
    def runner(self) -> ModelRunner:
        """Settles and runs steps."""
        return self.wired.runner

    @property
    def graphs(self) -> tuple[TokenGraph, ReqGraph]:
        """What records."""
        recorder = self.runner.recorder
        return recorder._tokens, recorder._requests

    @property
    def decoder(self) -> DecoderGraph:
        """What records late layers."""
        return self.runner.recorder._decoder

    def steps(self, mode: str) -> int:
        """Steps so far in a mode, such as `token_graph`."""
        return sum(t.steps for key, t in self.runner.tally.modes.items() if key == mode)


def a_rank(
    family: Callable[[Build], Model],
    *,
    exchange: Exchange | None = None,
    record: bool = True,
    **options: object,
) -> WiredRank:
    """Build, fill, wire, warm up and record a model, in the order of a real start.

    family: makes the model; one whose class was made for tests gets random weights.
    record: whether everything is recorded where graphs are made at the start.
    """
    load_backends()
    config = a_rank_config(**options)
    build = Build(
        facts=cpu_facts(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        exact=config.model.exact,
        max_model_len=config.model.max_model_len,
    )
    model = family(build).eval()
    if model.architectures[0].endswith("ForTests"):
        load_random(model, 0)
    views: dict[str, Sequence[Tensor]] = {}
    bind = model.bind_caches

    def bind_and_keep(given: Mapping[str, Sequence[Tensor]]) -> None:
        views.update(given)
        bind(given)

    # On the instance: the class stays as it is.
    vars(model)["bind_caches"] = bind_and_keep
    groups = group_sub_caches(model.sub_caches())
    start = plan_start(config, groups, COST, stages=model.stages())
    wired = wire(
        start,
        build,
        model,
        sampler=_a_sampler(config),
        exchange=exchange or LocalExchange(),
        blocks=start.memory.group_blocks,
        pools=config.graphs.pools,
    )
    wired.warm_up(config)
    if record and config.graphs.when == "startup":
        wired.runner.recorder.record_all()
    return WiredRank(model=model, wired=wired, start=start, views=views)


def _a_sampler(config: EngineConfig) -> Sampler:
    sampler = Sampler(
        vocab_tokens=VOCAB_TOKENS,
        slots=config.scheduler.max_num_seqs + 1,
        device=torch.device("cpu"),
        grammar=None,
        entropy=b"tests",
    )
    sampler.admit(
        NULL_SLOT,
        request_id="dummy",
        params=GREEDY,
        sibling=0,
        max_tokens=1,
        stop_ids=frozenset(),
        prompt_tokens=0,
        output_ids=(),
    )
    return sampler


@dataclass(slots=True, kw_only=True)
class Running:
    """A request on its way."""

    name: str
    slot: int
    prompt: list[int]
    first_late: int = 0
    """Where its prompt's tail begins; 0 where late layers run for all of it."""
    computed: int = 0
    blocks: list[int] = field(default_factory=list[int])
    output: list[int] = field(default_factory=list[int])

    @property
    def is_prefilled(self) -> bool:
        """Whether its whole prompt is computed."""
        return self.computed >= len(self.prompt)


class Driver:
    """Runs named requests on a runner. Slots and blocks are handed out from the highest down, so in no order."""

    def __init__(
        self, runner: ModelRunner, *, blocks: int = BLOCKS, requests: int = REQUESTS
    ) -> None:
        self.runner = runner
        self._groups = len(group_sub_caches(runner._model.sub_caches()))
        self.requests: dict[str, Running] = {}
        self._slots = list(range(1, requests + 1))
        self._blocks = list(range(1, blocks))
        self._seq = 0

    def add(self, name: str, prompt: Sequence[int], *, first_late: int = 0) -> None:
        """A request that has not run yet."""
        self.requests[name] = Running(
            name=name, slot=self._slots.pop(), prompt=list(prompt), first_late=first_late
        )

    def end(self, name: str) -> list[int]:
        """Give back what a request holds; returns its tokens."""
        request = self.requests.pop(name)
        self._slots.append(request.slot)
        self._blocks.extend(request.blocks)
        return request.output

    def plan(self, prefill: Mapping[str, int] = {}, decode: Sequence[str] = ()) -> StepPlan:
        """So many prompt tokens of some requests, then a token of others.

        The plan may be run once, by `run`.
        """
        rows = [(self.requests[name], tokens) for name, tokens in prefill.items()]
        rows += [(self.requests[name], 1) for name in decode]
        grants: list[BlockGrant] = []
        admissions: list[Admission] = []
        for request, tokens in rows:
            if not request.computed:
                admissions.append(_admission(request))
            have = len(request.blocks)
            need = -(-(request.computed + tokens) // BLOCK_TOKENS) - have
            if need > 0:
                new = tuple(self._blocks.pop() for _ in range(need))
                request.blocks.extend(new)
                grants += [
                    BlockGrant(slot=request.slot, group=group, start=have, block_ids=new)
                    for group in range(self._groups)
                ]
        final = [
            row < len(prefill) and request.computed + tokens == len(request.prompt)
            for row, (request, tokens) in enumerate(rows)
        ]
        self._seq += 1
        return StepPlan(
            seq=self._seq,
            request_ids=tuple(request.name for request, _ in rows),
            slots=np.array([request.slot for request, _ in rows], dtype=np.int32),
            query_lens=np.array([tokens for _, tokens in rows], dtype=np.int32),
            computed_before=np.array([request.computed for request, _ in rows], dtype=np.int32),
            prefill_rows=len(prefill),
            final_chunk=np.array(final, dtype=np.bool_),
            admissions=tuple(admissions),
            grants=Grants.of(grants),
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan and keep its tokens."""
        in_flight = self.runner.step(plan)
        assert in_flight is not None, f"step {plan.seq} of {plan.request_ids} ran nothing"
        result = in_flight.take()
        for row, tokens in zip(result.rows, plan.query_lens.tolist(), strict=True):
            assert not row.error, f"{row.request_id}: {row.error}"
            request = self.requests[row.request_id]
            request.computed += tokens
            request.output.extend(row.token_ids)
        return result

    def step(self, prefill: Mapping[str, int] = {}, decode: Sequence[str] = ()) -> StepResult:
        """Plan and run."""
        return self.run(self.plan(prefill, decode))

    def alone(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The greedy tokens of a request that nobody runs beside: its prompt at once, then one by one."""
        self.add("alone", prompt)
        self.step({"alone": len(prompt)})
        for _ in range(tokens - 1):
            self.step(decode=["alone"])
        return self.end("alone")


def _admission(request: Running) -> Admission:
    return Admission(
        request_id=request.name,
        slot=request.slot,
        token_ids=np.array(request.prompt, dtype=np.int32),
        prompt_tokens=len(request.prompt),
        params=GREEDY,
        sibling=0,
        max_tokens=MODEL_TOKENS,
        stop_ids=frozenset(),
        scored_tokens=0,
        first_late=request.first_late,
    )


def a_prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_TOKENS, (length,), generator=generator).tolist()
