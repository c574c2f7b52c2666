"""Do prefill and decode rows of one step get the tokens each would get alone, however the step runs?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.graph_families import FAMILIES
from tests.support.preparation import a_decode_plan, an_arena, prepared, shape_of
from tests.support.steps import a_build
from tests.support.tiny import VOCAB_TOKENS
from tests.support.wired_rank import BLOCK_TOKENS, MODEL_TOKENS, Driver, WiredRank, a_prompt, a_rank
from tokamak.cache.arena import Arena
from tokamak.cache.groups import group_sub_caches
from tokamak.cache.layout import lay_out
from tokamak.core.context import StepContext, installed
from tokamak.core.plan import BlockGrant, Grants, Mode, StepPlan, StepShape
from tokamak.graphs.region import begin_forward
from tokamak.graphs.streams import SideStreams
from tokamak.layers.attention.gqa import GroupedQueryAttention
from tokamak.layers.attention.prepare import AttnBuilder
from tokamak.layers.model import Model
from tokamak.runner.inputs import InputArena

TOKENS = 3
"""Tokens every request gets."""
MODES: dict[str, dict[str, object]] = {
    "eager": {"graphs": "off"},
    "eager_pad": {"token_graph_eager_pad": True},
    "replay": {},
}
TOKEN_SIZES = (6, 13, 24)
PREFILL_AND_FINAL = [(rows, final) for rows in (1, 2, 3) for final in range(rows + 1)]
CASES = [(rows, final, decode) for (rows, final), decode in product(PREFILL_AND_FINAL, range(5))]


@cache
def the_rank(mode: str) -> WiredRank:
    """The one rank of a mode: llama, in as many token sizes as mixed steps of these tests need."""
    options = MODES[mode]
    if mode != "eager":
        options = {**options, "token_graph_sizes": TOKEN_SIZES}
    return a_rank(FAMILIES["llama"], **options)


def a_case(rows: int, decode: int) -> dict[str, list[int]]:
    """Prompts by name, of any length: `p0` and on will be prefill rows of the mixed step, `d0` and on decode rows."""
    seed = 100 * rows + 10 * decode
    prompts = {f"p{at}": a_prompt(3 + (seed + 5 * at) % 4, seed + at) for at in range(rows)}
    return prompts | {f"d{at}": a_prompt(2 + 7 * at, seed + 50 + at) for at in range(decode)}


@cache
def expected(prompt: tuple[int, ...]) -> list[int]:
    """What a prompt gets alone, in steps that are not recorded."""
    return Driver(the_rank("eager").runner).alone(prompt, TOKENS)


def finish(driver: Driver, name: str) -> list[int]:
    """Run a request to its end and give back what it holds; returns its tokens."""
    request = driver.requests[name]
    if not request.is_prefilled:
        driver.step({name: len(request.prompt) - request.computed})
    while len(request.output) < TOKENS:
        driver.step(decode=[name])
    return driver.end(name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "final", "decode"), CASES)
def test_a_mixed_step_gives_every_request_the_tokens_it_gets_alone(mode, rows, final, decode):
    """MIX-9, without drafts."""
    rank = the_rank(mode)
    driver, prompts = Driver(rank.runner), a_case(rows, decode)
    for name, prompt in prompts.items():
        driver.add(name, prompt)
        if name.startswith("d"):
            driver.step({name: len(prompt)})
    # Every other prefill row has run before; the last `final` rows end in this step.
    lengths = {}
    for at in range(rows):
        name, prompt = f"p{at}", prompts[f"p{at}"]
        if at % 2 and len(prompt) > 2:
            driver.step({name: 1})
        left = len(prompt) - driver.requests[name].computed
        lengths[name] = left if at >= rows - final else left - 1
    before = rank.steps(Mode.TOKEN_GRAPH)

    result = driver.step(lengths, [f"d{at}" for at in range(decode)])
    token_graph_steps = rank.steps(Mode.TOKEN_GRAPH) - before
    found = {name: finish(driver, name) for name in prompts}

    assert found == {name: expected(tuple(prompt)) for name, prompt in prompts.items()}
    got = [row.request_id for row in result.rows if row.token_ids]
    finals = [f"p{at}" for at in range(rows - final, rows)]
    assert got == [*finals, *(f"d{at}" for at in range(decode))]
    assert token_graph_steps == int(mode != "eager")


@pytest.mark.parametrize("mode", ["eager_pad", "replay"])
def test_a_mixed_step_runs_at_the_bucket_that_holds_it(mode, monkeypatch):
    """MIX-4."""
    rank, shapes = the_rank(mode), []
    settle, driver = rank.runner._settle, Driver(rank.runner)

    def note(plan: StepPlan) -> StepShape:
        shape = settle(plan)
        shapes.append((shape.scheduled_tokens, shape.running_tokens))
        return shape

    monkeypatch.setattr(rank.runner, "_settle", note)
    for name, length in (("a", 12), ("b", 6), ("c", 5), ("d", 2)):
        driver.add(name, a_prompt(length, 1))

    driver.step({"a": 12})
    driver.step({"b": 6})
    driver.step({"c": 5}, ["a"])
    driver.step({"d": 2}, ["a", "b", "c"])

    assert shapes == [(12, 13), (6, 6), (5 + 1, 6), (2 + 3, 6)]


class SwappedHalves(AttnBuilder):
    """Lets decode rows attend over the first requests of the step: the fault of a half that begins at 0."""

    def prepare_decode(self, **sizes):
        return super().prepare_decode(**{**sizes, "first_request": 0})


def test_a_half_over_the_other_half_s_requests_changes_tokens(monkeypatch):
    prompt = a_prompt(40, 3)
    rank = the_rank("eager")

    def tokens() -> list[int]:
        driver = Driver(rank.runner)
        driver.add("long", prompt)
        driver.step({"long": 20})
        driver.step({"long": 20})
        driver.add("short", a_prompt(2, 4))
        driver.step({"short": 2}, ["long"])
        driver.end("short")
        return finish(driver, "long")

    healthy = tokens()
    monkeypatch.setattr(
        rank.runner._preparation,
        "_attention",
        SwappedHalves(torch.device("cpu"), max_requests=8, max_model_len=MODEL_TOKENS, widths=(1,)),
    )
    faulty = tokens()

    assert len(healthy) == TOKENS
    assert faulty != healthy


def mixed_plan(finals: Sequence[bool], decode: int) -> StepPlan:
    """Prefill rows of 3, 4, … tokens, final or not, and decode rows."""
    rows = len(finals) + decode
    return StepPlan(
        seq=1,
        request_ids=tuple(f"r{row}" for row in range(rows)),
        slots=np.arange(1, rows + 1, dtype=np.int32),
        query_lens=np.array([3 + at for at in range(len(finals))] + [1] * decode, dtype=np.int32),
        computed_before=np.array([0] * len(finals) + [9] * decode, dtype=np.int32),
        prefill_rows=len(finals),
        final_chunk=np.array([*finals, *[False] * decode]),
        admissions=(),
        grants=Grants.none(),
    )


@pytest.mark.parametrize("finals", list(product((False, True), repeat=3)))
@pytest.mark.parametrize("decode", [0, 1, 3])
@pytest.mark.parametrize("padding", [0, 4])
def test_scores_are_wanted_of_final_chunks_then_of_decode_rows(finals, decode, padding):
    """MIX-5: of the last row of every final chunk, and of all rows of decode requests."""
    plan = mixed_plan(finals, decode)
    last = np.cumsum(plan.query_lens)[:3] - 1

    inputs = prepared(an_arena(), plan, shape_of(plan, token_padding=padding))

    of_finals = [int(row) for row, is_final in zip(last, finals, strict=True) if is_final]
    assert inputs.logit_rows.tolist() == of_finals + [12 + at for at in range(decode)]
    assert plan.sampled_rows.tolist() == [
        *np.flatnonzero(finals).tolist(),
        *range(3, 3 + decode),
    ]


@pytest.mark.parametrize("finals", list(product((False, True), repeat=2)))
def test_prefill_rows_have_rejected_nothing(finals):
    """MIX-6: a step's status has a row of zeros for them, and a token where the chunk was final."""
    rank = the_rank("replay")
    driver = Driver(rank.runner)
    driver.add("d", a_prompt(5, 1))
    driver.step({"d": 5})
    for at, is_final in enumerate(finals):
        driver.add(f"p{at}", a_prompt(3 if is_final else 4, at))
    plan = driver.plan({"p0": 3, "p1": 3}, ["d"])

    in_flight = rank.runner.step(plan)
    assert in_flight is not None
    status = in_flight.status()

    assert status.rejected.tolist() == status.accepted.tolist() == [0, 0, 0]
    assert (status.next_token >= 0).tolist() == [*finals, True]
    for name in ("d", "p0", "p1"):
        driver.end(name)


def test_steps_of_one_kind_have_exactly_one_half_in_a_runner_that_can_mix(monkeypatch):
    """MIX-8."""
    rank = the_rank("eager")
    preparation, noted = rank.runner._preparation, []
    prepare = preparation.prepare

    def prepare_and_note(plan: StepPlan, shape: StepShape) -> StepContext:
        context = prepare(plan, shape)
        noted.append(context.attn)
        return context

    monkeypatch.setattr(preparation, "prepare", prepare_and_note)
    driver = Driver(rank.runner)
    driver.add("a", a_prompt(5, 1))
    driver.add("b", a_prompt(4, 2))

    driver.step({"a": 5})
    driver.step(decode=["a"])
    driver.step({"b": 4}, ["a"])

    assert [(step.prefill is not None, step.decode is not None) for step in noted] == [
        (True, False),
        (False, True),
        (True, True),
    ]


WIDTH = 4
"""Token rows of a decode request that verifies three drafts."""


class Bench:
    """A model over caches and inputs of its own, one forward at a time; rows of any width."""

    def __init__(self, model: Model, history: Tensor) -> None:
        groups = group_sub_caches(model.sub_caches())
        blocks = 1 + 8 * MODEL_TOKENS // BLOCK_TOKENS
        layout = lay_out(groups, block_tokens=BLOCK_TOKENS, blocks=[blocks] * len(groups))
        model.bind_caches(Arena(layout, torch.device("cpu")).views())
        self.model = model
        self.arena: InputArena = an_arena(
            groups=groups, max_model_len=MODEL_TOKENS, block_tokens=BLOCK_TOKENS
        )
        self.arena.history.copy_(history)
        self.builder = AttnBuilder(
            torch.device("cpu"), max_requests=8, max_model_len=MODEL_TOKENS, widths=(1, WIDTH)
        )

    def hidden(self, plan: StepPlan, *, requests: int | None = None) -> Tensor:
        """Hidden states of a step's real rows [tokens, width]."""
        shape = shape_of(plan, running_requests=requests)
        inputs = prepared(self.arena, plan, shape)
        context = StepContext(
            shape=shape,
            inputs=inputs,
            attn=self.builder.prepare(plan, shape, inputs, None),
            running_table=np.array([shape.running_tokens], dtype=np.int32),
            layers=self.model.layers,
            streams=SideStreams(torch.device("cpu")),
            pad_value=0.0,
            late=None,
        )
        with torch.inference_mode(), installed(context):
            begin_forward(context)
            return self.model(inputs)[: plan.scheduled_tokens].clone()


def whole_prompts(lengths: Sequence[int]) -> StepPlan:
    """Every request's first tokens, and blocks for the longest."""
    plan = a_decode_plan([0] * len(lengths))
    blocks = MODEL_TOKENS // BLOCK_TOKENS
    grants = Grants.of(
        BlockGrant(
            slot=slot,
            group=0,
            start=0,
            block_ids=tuple(range(1 + (slot - 1) * blocks, 1 + slot * blocks)),
        )
        for slot in range(1, len(lengths) + 1)
    )
    return replace(
        plan,
        query_lens=np.array(lengths, dtype=np.int32),
        prefill_rows=len(lengths),
        grants=grants,
    )


def a_bench(history: Tensor) -> Bench:
    model = FAMILIES["llama"](a_build(max_model_len=MODEL_TOKENS)).eval()
    assert all(isinstance(layer, GroupedQueryAttention) for layer in model.layers)
    return Bench(model, history)


@pytest.mark.parametrize("padded_to", [3, 5])
def test_wide_decode_rows_are_as_many_single_steps(padded_to):
    """MIX-9 with k = 3, as far as attention goes: row i of a wide request is its i-th single step."""
    lengths = [9, 14, 30]
    history = torch.from_numpy(
        np.random.default_rng(0).integers(0, VOCAB_TOKENS, (9, MODEL_TOKENS + 1)).astype(np.int32)
    )
    wide, single = a_bench(history), a_bench(history)
    for bench in (wide, single):
        bench.hidden(whole_prompts(lengths))

    found = wide.hidden(a_decode_plan(lengths, q_width=WIDTH), requests=padded_to)
    each = [
        single.hidden(a_decode_plan([length + at for length in lengths])) for at in range(WIDTH)
    ]

    torch.testing.assert_close(
        found.view(3, WIDTH, -1), torch.stack(each, dim=1), rtol=1e-4, atol=1e-4
    )


def test_wide_decode_rows_behind_prefill_rows_are_as_many_single_steps():
    """The same in a mixed step, whose prefill rows are what they are alone."""
    lengths = [9, 14, 30]
    history = torch.from_numpy(
        np.random.default_rng(1).integers(0, VOCAB_TOKENS, (9, MODEL_TOKENS + 1)).astype(np.int32)
    )
    mixed, apart = a_bench(history), a_bench(history)
    for bench in (mixed, apart):
        bench.hidden(whole_prompts(lengths))
    chunk, decode = 5, lengths[1:]
    plan = replace(
        a_decode_plan([lengths[0], *decode]),
        query_lens=np.array([chunk, WIDTH, WIDTH], dtype=np.int32),
        prefill_rows=1,
    )

    found = mixed.hidden(plan)
    prefill = apart.hidden(
        replace(
            a_decode_plan(lengths[:1]),
            query_lens=np.array([chunk], dtype=np.int32),
            prefill_rows=1,
        )
    )
    each = [
        apart.hidden(a_decode_plan([length + at for length in decode], slots=(2, 3)))
        for at in range(WIDTH)
    ]

    assert torch.equal(found[:chunk], prefill)
    torch.testing.assert_close(
        found[chunk:].view(2, WIDTH, -1), torch.stack(each, dim=1), rtol=1e-4, atol=1e-4
    )
