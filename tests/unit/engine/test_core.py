"""Does the loop keep one step ahead, refuse what cannot run, and outlive a failed step?"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.configs import no_graphs
from tests.support.factory import END_ID, a_result, cache_groups
from tokamak.config.engine import (
    CacheConfig,
    EngineConfig,
    KernelConfig,
    ModelConfig,
    ModelFacts,
    SchedulerConfig,
)
from tokamak.core.request import FinishReason, SamplingParams, StructuredOutput
from tokamak.device.waits import HostWaits
from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest
from tokamak.telemetry.phases import PHASES
from tokamak.telemetry.spans import Spans


class ScriptedExecutor:
    """Answers every sampled row with the same token, and records what was launched and taken."""

    def __init__(self, *, blocks: int = 65, fails_at: int | None = None) -> None:
        self._blocks = blocks
        self.token_id = 7
        self.error = ""
        self.log: list[tuple[str, int]] = []
        self._fails_at = fails_at
        self.waits = HostWaits()

    def loads(self, config: EngineConfig) -> None:
        memory = SimpleNamespace(group_blocks=(self._blocks,))
        self.rank = SimpleNamespace(
            start=SimpleNamespace(config=config, groups=cache_groups(), memory=memory),
            build=SimpleNamespace(choices={}),
            runner=SimpleNamespace(waits=self.waits, spans=Spans()),
            load_s={"weights": 1.0},
        )

    def launch(self, plan):
        self.log.append(("launch", plan.seq))
        return SimpleNamespace(plan=plan, take=lambda: self.waits.wait(lambda: self._take(plan)))

    def _take(self, plan):
        self.log.append(("take", plan.seq))
        if plan.seq == self._fails_at:
            raise ArithmeticError("the device said no")
        result = a_result(plan, self.token_id)
        rows = tuple(msgspec.structs.replace(row, error=self.error) for row in result.rows)
        return replace(result, rows=rows)

    def close(self) -> None:
        self.log.append(("close", -1))


def a_core(executor: ScriptedExecutor, **limits: int) -> EngineCore:
    facts = ModelFacts(
        architecture="LlamaForCausalLM",
        vocab_tokens=100,
        max_position_tokens=1000,
        stored_dtype="float32",
        weight_bytes=1,
        parameters=1,
    )
    executor.loads(
        EngineConfig(
            model=ModelConfig(
                path="",
                served_names=("m",),
                load_format="auto",
                seed=0,
                dtype="float32",
                exact=True,
                device="cpu",
                max_model_len=1000,
                shortens=False,
                bounded_replay=False,
                chat_template=None,
                weight_bytes=1,
                tables="device",
                host_bytes=0,
                facts=facts,
            ),
            cache=CacheConfig(
                block_tokens=4,
                dtype="float32",
                arena_bytes=1,
                blocks=None,
                room_bytes=None,
                prefix_caching=True,
            ),
            scheduler=SchedulerConfig(
                **{
                    "max_num_seqs": 4,
                    "max_num_batched_tokens": 32,
                    "policy": "fcfs",
                    "max_waiting_requests": 100,
                    "max_waiting_tokens": 1000,
                    **limits,
                }
            ),
            kernels=KernelConfig(threads=1, prefer=()),
            graphs=no_graphs(),
            reasons=(),
        )
    )
    return EngineCore(executor.rank.start.config, executor)


def an_add(name: str = "r", *, prompt: int = 4, max_tokens: int = 3) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_ids=list(range(10, 10 + prompt)),
        params=SamplingParams(temperature=0),
        max_tokens=max_tokens,
        stop_ids=[END_ID],
        sibling=0,
        priority=0,
        cache_salt="",
    )


def run_out(core: EngineCore) -> list:
    updates = []
    for _ in range(1000):
        if not core.has_work:
            return updates
        updates += core.step()
    raise AssertionError("the engine does not come to rest")


def test_a_step_is_launched_before_the_one_before_it_is_taken():
    executor = ScriptedExecutor()
    core = a_core(executor)
    core.add(an_add())

    run_out(core)

    assert executor.log[:4] == [("launch", 0), ("launch", 1), ("take", 0), ("launch", 2)]


def test_updates_carry_tokens_and_the_last_one_a_reason():
    core = a_core(ScriptedExecutor())
    core.add(an_add(max_tokens=3))

    updates = run_out(core)

    assert [update.token_ids for update in updates] == [[7], [7], [7]]
    assert [update.finish_reason for update in updates] == [None, None, FinishReason.LENGTH]


def test_a_stop_token_ends_a_request_and_is_named():
    executor = ScriptedExecutor()
    executor.token_id = END_ID
    core = a_core(executor)
    core.add(an_add())

    (update,) = run_out(core)

    assert update.finish_reason is FinishReason.STOP
    assert update.stop_id == END_ID


def test_a_failed_step_ends_its_requests_and_names_them_and_the_engine_goes_on(caplog):
    core = a_core(ScriptedExecutor(fails_at=0))
    core.add(an_add("doomed"))

    (failure,) = run_out(core)
    core.add(an_add("next", max_tokens=1))
    (success,) = run_out(core)

    assert failure.finish_reason is FinishReason.ERROR
    assert failure.error_kind == "engine"
    assert "the device said no" in failure.error
    assert "step 0 failed" in caplog.text
    assert "requests doomed" in caplog.text
    assert success.finish_reason is FinishReason.LENGTH
    stats = core.stats()
    assert stats.free_blocks == stats.total_blocks


def test_a_full_queue_says_when_to_come_back():
    core = a_core(ScriptedExecutor(), max_waiting_requests=2)
    for at in range(3):
        core.add(an_add(f"r{at}"))

    refusal = core.step()[0]

    assert refusal.request_id == "r2"
    assert refusal.error_kind == "overloaded"
    assert refusal.retry_after_s >= 1
    assert "max_waiting_requests" in refusal.error


def test_too_many_waiting_tokens_are_refused_but_a_lone_long_prompt_is_not():
    core = a_core(ScriptedExecutor(), max_waiting_tokens=10)
    core.add(an_add("long", prompt=30))
    core.add(an_add("more", prompt=1))

    refusal = core.step()[0]

    assert refusal.request_id == "more"
    assert "max_waiting_tokens 10" in refusal.error


def test_what_can_never_fit_is_refused_with_both_numbers():
    core = a_core(ScriptedExecutor(blocks=6))
    core.add(an_add("big", prompt=15, max_tokens=10))

    (refusal,) = core.step()

    assert refusal.error_kind == "request"
    assert "25" in refusal.error
    assert "20" in refusal.error


def test_an_id_in_use_is_refused():
    core = a_core(ScriptedExecutor())
    core.add(an_add("same"))
    core.add(an_add("same"))

    refusal = core.step()[0]

    assert "already in use" in refusal.error


def test_aborting_mid_flight_leaves_nothing_behind():
    core = a_core(ScriptedExecutor())
    core.add(an_add("r", max_tokens=50))
    core.step()
    core.step()

    core.abort(["r", "unknown"])
    updates = run_out(core)

    assert updates == []
    stats = core.stats()
    assert (stats.running_requests, stats.waiting_requests) == (0, 0)
    assert stats.free_blocks == stats.total_blocks


def test_the_host_waits_once_for_every_step():
    core = a_core(ScriptedExecutor())
    for at in range(6):
        core.add(an_add(f"r{at}", prompt=9, max_tokens=5))

    run_out(core)

    stats = core.stats()
    assert stats.host_waits == stats.steps
    assert stats.generated_tokens == 30
    assert stats.finished_requests == 6


def test_ready_tells_what_requests_can_hold():
    ready = a_core(ScriptedExecutor(blocks=33)).ready()

    assert ready.total_blocks == 32
    assert ready.load_s == {"weights": 1.0}


@pytest.mark.parametrize("prompt", [1, 4, 31, 32, 33, 100])
def test_cached_tokens_are_told_with_the_first_update(prompt: int):
    core = a_core(ScriptedExecutor(), max_num_batched_tokens=16)
    core.add(an_add("first", prompt=prompt, max_tokens=1))
    run_out(core)
    core.add(an_add("second", prompt=prompt, max_tokens=1))

    (update,) = run_out(core)

    assert update.cached_tokens == (prompt - 1) // 4 * 4


@pytest.mark.parametrize(
    ("structured", "kind", "field"),
    [
        (StructuredOutput(kind="regex", value="a"), "request", "response_format"),
        (None, "engine", ""),
    ],
)
def test_a_failed_row_is_the_clients_fault_only_with_a_grammar(structured, kind, field):
    executor = ScriptedExecutor()
    executor.error = "no"
    core = a_core(executor)
    core.add(msgspec.structs.replace(an_add(), params=SamplingParams(structured=structured)))

    (update,) = run_out(core)

    assert (update.error, update.error_kind, update.error_field) == ("no", kind, field)


def test_a_prefill_span_ends_with_the_final_chunk_wherever_its_row_is():
    """MIX-7 and F5: after each step exactly the prompts whose final chunk it had are past their prefill."""
    executor = ScriptedExecutor(blocks=200)
    core = a_core(executor, max_num_batched_tokens=24, max_num_seqs=4)
    taken, phase_of = [], core._phases._open
    take = executor._take
    executor._take = lambda plan: (taken.append(plan), take(plan))[1]
    for at, prompt in enumerate([2, 60, 5, 3, 40, 7, 2, 30, 1]):
        core.add(an_add(f"r{at}", prompt=prompt, max_tokens=4))
    places = set()

    while core.has_work:
        seen = len(taken)
        core.step()
        for plan in taken[seen:]:
            for row, name in enumerate(plan.request_ids[: plan.prefill_rows]):
                is_final = bool(plan.final_chunk[row])
                places |= {row} if is_final else set()
                phase = PHASES[phase_of[name][0]] if name in phase_of else "over"
                assert (phase in ("decode", "over")) == is_final, (name, row, phase)

    assert len(places) > 1
    assert core._phases.open_spans == 0
    assert [totals.counts[-1] for totals in core._phases.totals().values()] == [9, 9, 9]
