"""The `seed` option makes a run repeatable whose requests bring no seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import write_checkpoint
from tokamak.core.request import SamplingParams
from tokamak.llm import LLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def drawn(model: Path, seed: int) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True)
    with LLM(str(model), seed=seed, dtype="fp32", max_num_seqs=4) as llm:
        return [output.token_ids for output in llm.generate([[5, 6, 7], [5, 6, 7]], params)]


def test_the_same_seed_gives_the_same_run_and_another_gives_another(model: Path) -> None:
    first, again, other = drawn(model, 1), drawn(model, 1), drawn(model, 2)

    assert first == again
    assert first != other


def test_requests_of_one_run_do_not_repeat_each_other(model: Path) -> None:
    one, two = drawn(model, 1)

    assert one != two
