"""One rank, one step: a StepPlan in, tokens out.

The step reads as five verbs: settle, prepare, forward, sample, propose. Warm-up, recording and an idle rank run
the same step with a plan made for the purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tokamak.core.context import StepContext
from tokamak.core.plan import Mode, StepPlan, StepShape
from tokamak.device.waits import HostWaits
from tokamak.layers.model import Model
from tokamak.runner.check import ReplayCheck
from tokamak.runner.choice import PlainChoice
from tokamak.runner.dummy import idle_plan
from tokamak.runner.exchange import Demand, Exchange
from tokamak.runner.forward import Forward
from tokamak.runner.inputs import InputArena
from tokamak.runner.label import step_range
from tokamak.runner.prepare import Preparation
from tokamak.runner.previous import Previous
from tokamak.runner.record import Recorder
from tokamak.runner.results import InFlightResult
from tokamak.runner.scoring import PromptScorer
from tokamak.runner.shape import ForwardMode, Policy, RunningTable
from tokamak.runner.tails import Tails
from tokamak.runner.tally import StepTally
from tokamak.sampling.sampler import Sampled, Sampler
from tokamak.speculative.drafter import NoDrafter
from tokamak.telemetry.spans import Spans


class ModelRunner:
    """Settles, prepares, runs and samples steps on one device."""

    def __init__(
        self,
        model: Model,
        *,
        inputs: InputArena,
        preparation: Preparation,
        forward: Forward,
        recorder: Recorder,
        check: ReplayCheck,
        sampler: Sampler,
        choice: PlainChoice,
        exchange: Exchange,
        table: RunningTable,
        late_table: RunningTable,
        tails: Tails,
        previous: Previous,
        waits: HostWaits,
        spans: Spans,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._preparation = preparation
        self._forward = forward
        self._sampler = sampler
        self._choice = choice
        # Steps that need numbers on the host are counted with the others.
        sampler.waits = waits
        self._exchange = exchange
        self._table = table
        self._late_table = late_table
        self._tails = tails
        self._previous = previous
        self._policy = Policy(drafts=False)
        self._drafter = NoDrafter()
        self._scorer = PromptScorer(model, sampler, inputs.history)
        self.recorder = recorder
        self.check = check
        self.waits = waits
        self.spans = spans
        self.tally = StepTally()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> InFlightResult | None:
        """Run one step: settle its size, prepare its inputs, forward, sample, propose.

        A plan without rows is an idle rank's: it runs what its peers run, or nothing where none has work (None).
        """
        self.recorder.record_wanted()
        shape = self._settle(plan)
        if not shape.running_tokens:
            return None
        if shape.dummy:
            plan = idle_plan(shape, plan.seq)
        with step_range(plan, shape), _shape_in_errors(shape):
            self._admit(plan)
            context = self._preparation.prepare(plan, shape)
            with self.spans.span("launch"):
                replayed = self._forward.run(context)
                hidden = self.check.passed(replayed, plan.seq, context)
            with self.spans.span("sample"):
                # Without a result there is no row of a prompt whose end or scores are wanted.
                scores = {} if hidden is None else self._scorer.score(plan, hidden)
                sampled = self._sample(plan, context, hidden, is_replayed=hidden is replayed)
            result = InFlightResult.launch(plan, sampled, scores, self.waits)
            self._previous.put(plan, result)
            if shape.draft_requests and hidden is not None:
                with self.spans.span("draft"):
                    self._drafter.propose(hidden, sampled.token_ids)
        self.spans.end_step()
        return result

    def _settle(self, plan: StepPlan) -> StepShape:
        for admission in plan.admissions:
            self._tails.admit(admission)
        shape = ForwardMode.decide(
            plan,
            exchange=self._exchange,
            table=self._table,
            late_table=self._late_table,
            req_graph=self.recorder.request_buckets,
            token_graph=self.recorder.token_buckets,
            late_graph=self.recorder.late_buckets,
            policy=self._policy,
            eager_demand=Demand(self._model.step_demands_eager(plan)),
            tail_rows=self._tails.count(plan),
        )
        self.recorder.note(shape)
        self.tally.count(shape, self._exchange.last_s)
        return shape

    def _admit(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._inputs.admit(admission)
            self._scorer.admit(admission)
            self._sampler.admit(
                admission.slot,
                request_id=admission.request_id,
                params=admission.params,
                sibling=admission.sibling,
                max_tokens=admission.max_tokens,
                stop_ids=admission.stop_ids,
                prompt_tokens=admission.prompt_tokens,
                output_ids=admission.token_ids[admission.prompt_tokens :].tolist(),
            )

    def _sample(
        self, plan: StepPlan, context: StepContext, hidden: Tensor | None, *, is_replayed: bool
    ) -> Sampled:
        rows = plan.sampled_rows
        if hidden is None:
            assert not len(rows), f"late layers ran for none of {len(rows)} rows that are sampled"
            return Sampled.nothing(context.inputs.token_ids.device)
        slots = plan.slots[rows]
        if (
            context.shape.mode is Mode.REQUEST_GRAPH
            and is_replayed
            and self._sampler.wants_likeliest(slots)
        ):
            packed = self._choice.replay(context)
            if packed is not None:
                return Sampled.of_packed(packed)
        positions = plan.lengths[rows]
        logits = self._model.logits(hidden.index_select(0, context.inputs.logit_rows))
        where = self._inputs.sampled
        sampled = self._sampler.sample(logits, slots, positions, self._inputs.history, where)
        self._inputs.remember(*where, sampled.token_ids)
        return sampled


@contextmanager
def _shape_in_errors(shape: StepShape) -> Iterator[None]:
    """What a step raises says how large it was and how it ran."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"it ran {shape.running_requests} request rows and {shape.running_tokens} token rows as "
            f"{shape.mode} ({shape.why})"
        )
        raise
