"""One rank, one step: a StepPlan in, tokens out.

The step reads as five verbs; warm-up runs the same step with a plan made for the purpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.core.inputs import StepInputs
from tokamak.core.plan import StepPlan, StepShape
from tokamak.layers.model import Model
from tokamak.runner.exchange import LocalExchange
from tokamak.runner.forward import Forward
from tokamak.runner.inputs import InputArena
from tokamak.runner.results import PendingResult
from tokamak.runner.scoring import PromptScorer
from tokamak.runner.shape import ForwardMode, NoGraph, RunningTable
from tokamak.sampling.sampler import Sampled, Sampler
from tokamak.speculative.drafter import NoDrafter


class ModelRunner:
    """Settles, fills, runs and samples steps on one device."""

    def __init__(self, model: Model, inputs: InputArena, sampler: Sampler) -> None:
        self._model = model
        self._inputs = inputs
        self._sampler = sampler
        self._forward = Forward(model)
        self._drafter = NoDrafter()
        self._scorer = PromptScorer(model, sampler, inputs.history)
        self._exchange = LocalExchange()
        self._table = RunningTable(self._exchange.ranks)
        self._graphs = NoGraph()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> PendingResult:
        """Run one step: settle its size, fill its inputs, forward, sample, propose."""
        shape = self._settle(plan)
        inputs = self._fill(plan, shape)
        hidden = self._forward.run(inputs, shape)
        scores = self._scorer.score(plan, hidden)
        sampled = self._sample(plan, inputs, hidden)
        self._drafter.propose(hidden, sampled.token_ids)
        return PendingResult(plan=plan, sampled=sampled, prompt_logprobs=scores)

    def _settle(self, plan: StepPlan) -> StepShape:
        return ForwardMode.decide(
            plan,
            exchange=self._exchange,
            table=self._table,
            req_graph=self._graphs,
            token_graph=self._graphs,
        )

    def _fill(self, plan: StepPlan, shape: StepShape) -> StepInputs:
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
        return self._inputs.fill(plan, shape)

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor) -> Sampled:
        rows = plan.sampled_rows
        slots = plan.slots[rows]
        positions = (plan.computed_before + plan.query_lens)[rows]
        logits = self._model.logits(hidden.index_select(0, inputs.logit_rows))
        sampled = self._sampler.sample(logits, slots, positions, self._inputs.history)
        device = self._inputs.history.device
        self._inputs.remember(
            torch.from_numpy(slots).to(device),
            torch.from_numpy(positions).to(device),
            sampled.token_ids,
        )
        return sampled
