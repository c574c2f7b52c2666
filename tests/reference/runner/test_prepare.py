"""Is a step prepared in its fixed order, with one wait at most and nothing read from the step before?"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from tests.support.preparation import a_decode_plan, an_arena, shape_of
from tests.support.steps import a_model
from tests.support.tiny import llama_config, tiny_weights
from tokamak.core.context import StepContext, current, installed
from tokamak.core.plan import StepPlan
from tokamak.device.waits import HostWaits
from tokamak.errors import NoContext, StatusTooEarly
from tokamak.graphs.streams import SideStreams
from tokamak.layers.attention.prepare import AttnBuilder
from tokamak.layers.model import Model
from tokamak.runner.inputs import InputArena
from tokamak.runner.pads import PadWatch
from tokamak.runner.prepare import Preparation
from tokamak.runner.previous import Previous
from tokamak.runner.results import InFlightResult
from tokamak.runner.shape import RunningTable
from tokamak.runner.tails import Tails
from tokamak.sampling.sampler import Sampled
from tokamak.telemetry.spans import SPANS, Spans

CPU = torch.device("cpu")


class NotedArena(InputArena):
    """Notes its calls, and reads the status in one of them if it is told to."""

    calls: list[str]
    previous: Previous
    reads_status_in = ""

    def _note(self, name: str, plan: StepPlan) -> None:
        self.calls.append(name)
        if name == self.reads_status_in:
            self.previous.take(plan)

    def stage(self, plan, shape):
        self._plan = plan
        self._note("stage", plan)
        super().stage(plan, shape)

    def publish(self):
        self._note("publish", self._plan)
        super().publish()

    def fill(self, plan, shape):
        self._note("fill", plan)
        return super().fill(plan, shape)


class NotedPrevious(Previous):
    calls: list[str]

    def take(self, plan):
        self.calls.append("take")
        return super().take(plan)


class NotedBuilder(AttnBuilder):
    """Notes its calls and whose context it finds installed."""

    calls: list[str]
    found: list[StepContext | None]

    def prepare(self, plan, shape, inputs, rejected):
        self.calls.append("attn")
        try:
            self.found.append(current())
        except NoContext:
            self.found.append(None)
        return super().prepare(plan, shape, inputs, rejected)


@dataclass
class Rig:
    preparation: Preparation
    arena: NotedArena
    previous: NotedPrevious
    builder: NotedBuilder
    spans: Spans
    waits: HostWaits = field(default_factory=HostWaits)
    calls: list[str] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> InFlightResult:
        """A step of this plan, still running on a device."""
        token_ids = torch.full((plan.scheduled_requests,), 9, dtype=torch.int32)
        sampled = Sampled(
            token_ids=token_ids,
            logprobs=(None,) * len(token_ids),
            errors={},
            finished=frozenset(),
        )
        result = InFlightResult(
            plan, sampled, {}, token_ids=token_ids, arrival=lambda: None, waits=self.waits
        )
        self.previous.put(plan, result)
        return result


@pytest.fixture(scope="module")
def model() -> Model:
    return a_model(llama_config(), tiny_weights(llama_config()))


@pytest.fixture
def rig(model: Model) -> Rig:
    arena = an_arena(kind=NotedArena)
    previous = NotedPrevious(slots=9)
    builder = NotedBuilder(CPU, max_requests=8, max_model_len=256, widths=(1,))
    spans = Spans()
    preparation = Preparation(
        model,
        inputs=arena,
        attention=builder,
        previous=previous,
        table=RunningTable(1),
        late_table=RunningTable(1),
        tails=Tails(9, staged=False),
        tail_buffers=None,
        streams=SideStreams(CPU),
        pads=PadWatch([], poison=False),
        spans=spans,
    )
    rig = Rig(preparation, arena, previous, builder, spans)
    arena.calls = previous.calls = builder.calls = rig.calls
    arena.previous, builder.found = previous, []
    return rig


@pytest.mark.parametrize("needs_status", [False, True])
def test_inputs_are_launched_before_the_status_and_attention_comes_after(
    rig, model, monkeypatch, needs_status
):
    monkeypatch.setattr(type(model), "needs_status", needs_status)
    rig.launch(a_decode_plan([3]))
    plan = a_decode_plan([4], seq=1)

    rig.preparation.prepare(plan, shape_of(plan))

    between = ["take"] if needs_status else []
    assert rig.calls == ["stage", "publish", "fill", *between, "attn"]


@pytest.mark.parametrize("early", ["stage", "publish", "fill"])
def test_nothing_before_the_fill_can_read_the_status(rig, model, monkeypatch, early):
    monkeypatch.setattr(type(model), "needs_status", True)
    rig.launch(a_decode_plan([3]))
    rig.arena.reads_status_in = early
    plan = a_decode_plan([4], seq=1)

    with pytest.raises(StatusTooEarly, match="step 1"):
        rig.preparation.prepare(plan, shape_of(plan))

    assert rig.waits.host_waits == 0


def test_the_status_is_the_one_wait_and_brings_the_tokens_with_it(rig, model, monkeypatch):
    monkeypatch.setattr(type(model), "needs_status", True)
    waits = []

    for seq in range(5):
        plan = a_decode_plan([3 + seq, 5 + seq], seq=seq)
        before = rig.waits.host_waits
        rig.preparation.prepare(plan, shape_of(plan))
        waits.append(rig.waits.host_waits - before)
        result = rig.launch(plan)

    assert waits == [0, 1, 1, 1, 1]
    assert [row.token_ids for row in result.take().rows] == [(9,), (9,)]
    assert rig.waits.host_waits == 5


def test_without_a_reader_of_the_status_preparation_waits_for_nothing(rig):
    rig.launch(a_decode_plan([3]))
    plan = a_decode_plan([4], seq=1)

    rig.preparation.prepare(plan, shape_of(plan))

    assert rig.waits.host_waits == 0


def test_no_context_is_installed_while_attention_is_prepared(rig):
    """Sizes cannot come from the forward before: there is none to read them from."""
    for plan in (a_decode_plan([3]), a_decode_plan([4, 5])):
        context = rig.preparation.prepare(plan, shape_of(plan))
        with installed(context):
            assert current() is context

    assert rig.builder.found == [None, None]


def test_a_context_left_installed_would_be_seen(rig):
    first, second = a_decode_plan([3]), a_decode_plan([4, 5])
    before = rig.preparation.prepare(first, shape_of(first))

    with installed(before):
        rig.preparation.prepare(second, shape_of(second))

    assert rig.builder.found == [None, before]


def test_every_part_of_a_preparation_is_timed(rig, model, monkeypatch):
    monkeypatch.setattr(type(model), "needs_status", True)
    rig.launch(a_decode_plan([3]))
    plan = a_decode_plan([4], seq=1)

    rig.preparation.prepare(plan, shape_of(plan))
    rig.spans.end_step()

    timed = {name for name, ns in zip(SPANS, rig.spans.recent_ns()[0].tolist(), strict=True) if ns}
    assert timed == {"stage", "publish", "fill", "wait_status", "attn", "install"}
