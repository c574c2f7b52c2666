"""Does a real model on a GPU give its recorded greedy tokens, in bfloat16 as far as no choice is close?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tokamak.core.request import SamplingParams
from tokamak.errors import ModelNotFoundError
from tokamak.llm import LLM

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]

DATA = Path(__file__).resolve().parents[1] / "e2e" / "data" / "smollm2_greedy.json"
CASES = json.loads(DATA.read_text("utf-8"))["cases"]
CLEAR = 0.25
"""Log-probabilities this far apart are not confused by bfloat16."""


@pytest.mark.parametrize("graphs", ["startup", "off"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_prompts_at_once_give_the_recorded_tokens(dtype, graphs):
    options = {"dtype": dtype, "graphs": graphs, "max_model_len": 720, "max_num_seqs": 8}
    try:
        llm = LLM("smollm2-135m", device="cuda", kv_cache_memory_bytes=1 << 30, **options)
    except ModelNotFoundError as error:
        pytest.skip(f"the model cannot be fetched: {error}")
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=2)
    with llm:
        outputs = llm.generate([case["prompt_ids"] for case in CASES], params)

    compared = 0
    for case, output in zip(CASES, outputs, strict=True):
        end = case["eos_index"]
        expected = case["output_ids"] if end is None else case["output_ids"][: end + 1]
        pairs = zip(output.token_ids, expected, strict=False)
        same = next((at for at, (found, wanted) in enumerate(pairs) if found != wanted), None)
        if same is not None:
            assert dtype == "bfloat16"
            first, second = sorted(
                (each.logprob for each in output.logprobs[same].top), reverse=True
            )[:2]
            assert first - second < CLEAR
        compared += len(expected) if same is None else same
    assert compared > 0.5 * sum(len(output.token_ids) for output in outputs)
