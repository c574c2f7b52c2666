"""Does a start find every kernel compiled that it was to compile ahead?"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support.tiny import llama_config, qwen3_moe_config, write_checkpoint

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]

START = """
import json, sys
import triton

compiled = []

def listen(*, src, metadata, metadata_group, times, cache_hit):
    if not cache_hit:
        compiled.append(metadata["name"])

triton.knobs.compilation.listener = listen

from tokamak.config.options import EngineOptions
from tokamak.core.request import SamplingParams
from tokamak.engine.configure import configure
from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest

core = EngineCore(configure(EngineOptions(**json.loads(sys.argv[1])), progress=False))
while_starting = len(compiled)
for at in range(5):
    core.add(AddRequest(
        request_id=str(at), prompt_ids=list(range(30, 50 + at)),
        params=SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=8,
        stop_ids=[], sibling=0, priority=0, cache_salt="",
    ))
while core.has_work:
    core.step()
core.close()
print(json.dumps({"starting": compiled[:while_starting], "serving": compiled[while_starting:]}))
"""


@pytest.mark.parametrize(
    "config", [llama_config(), qwen3_moe_config()], ids=["dense", "with experts"]
)
def test_neither_a_first_start_nor_its_first_requests_compile_a_kernel_themselves(tmp_path, config):
    options = {
        "model": str(write_checkpoint(tmp_path / "model", config)),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "kv_cache_memory_bytes": 64 * 1024**2,
    }
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "TRITON_CACHE_DIR": str(tmp_path / "kernels"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TOKAMAK_CACHE": str(tmp_path / "tokamak"),
    }

    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert not done.returncode, done.stderr
    compiled = json.loads(done.stdout.splitlines()[-1])
    # What the process that compiles ahead says of a failure goes there.
    assert compiled == {"starting": [], "serving": []}, done.stderr
    assert len(list((tmp_path / "kernels").glob("tokamak-*"))) == 1
