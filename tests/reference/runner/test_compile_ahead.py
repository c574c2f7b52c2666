"""Are the kernels of a model found without its GPU, and compiled to where a launch looks for them?"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.support.configs import GPU
from tests.support.deepseek_files import deepseek_config
from tests.support.tiny import llama_config, qwen3_moe_config, write_checkpoint, write_json
from tests.support.tiny_v4 import SMALL, v4_1_config
from tokamak.checkpoint.source import open_checkpoint
from tokamak.config.options import EngineOptions
from tokamak.config.settle import settle_engine
from tokamak.runner import ahead
from tokamak.runner.ahead import CompileAhead, Order

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]

SIZES = {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 128}


def config_of(folder: Path, **options: object):
    return settle_engine(
        EngineOptions(model=str(folder), device="cuda", dtype="bfloat16", **SIZES, **options),
        GPU,
        open_checkpoint(folder).facts(),
        folder,
    )


def kernels(config) -> Counter[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compiling", "list"],
        input=msgspec.msgpack.encode(Order(config=config, multiprocessors=132)),
        capture_output=True,
        check=False,
    )
    assert not done.returncode, done.stderr.decode()
    return Counter(done.stdout.decode().split())


def test_noting_kernels_does_not_import_pytorchs_compiler(tmp_path):
    config = config_of(write_checkpoint(tmp_path / "dense", llama_config()))

    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tests.support.compiling", "list"],
        input=msgspec.msgpack.encode(Order(config=config, multiprocessors=132)),
        capture_output=True,
        check=True,
    )

    imported = {line.split("|")[-1].strip() for line in done.stderr.decode().splitlines()}
    assert "torch._C" in imported
    assert "torch._dynamo.convert_frame" not in imported


def test_every_part_of_a_dense_model_is_found(tmp_path):
    folder = write_checkpoint(tmp_path / "dense", llama_config())

    found = kernels(config_of(folder))

    assert {
        "_embed_kernel", "_rms_norm_kernel", "_rotate_and_cache_kernel", "_paged_decode_kernel",
        "_paged_prefill_kernel", "_fill_step_kernel", "_argmax_kernel", "_token_weights_kernel",
        "_draw_parts_kernel", "_draw_rows_kernel",
    } <= {*found}  # fmt: skip
    assert any(name.startswith(("_lanes", "_cores")) for name in found)


def test_graphs_that_are_off_change_no_kernel(tmp_path):
    folder = write_checkpoint(tmp_path / "dense", llama_config())

    found, eager = kernels(config_of(folder)), kernels(config_of(folder, graphs="off"))

    assert {*eager} == {*found}


def test_kernels_over_caches_in_fp8_are_as_many(tmp_path):
    folder = write_checkpoint(tmp_path / "dense", llama_config())

    found, fp8 = kernels(config_of(folder)), kernels(config_of(folder, kv_cache_dtype="fp8"))

    assert fp8 == found


def test_the_experts_of_a_model_are_found(tmp_path):
    folder = write_checkpoint(tmp_path / "experts", qwen3_moe_config())

    found = kernels(config_of(folder))

    assert "_moe_route_kernel" in found
    assert any("gate_up" in name for name in found)


def test_streams_memories_and_packed_experts_of_a_model_are_found(tmp_path):
    said = deepseek_config((32, 32))["quantization_config"]
    config = v4_1_config(**SMALL) | {"dtype": "bfloat16", "quantization_config": said}
    (tmp_path / "v4_1").mkdir()
    write_json(tmp_path / "v4_1" / "config.json", config)

    found = kernels(config_of(tmp_path / "v4_1", load_format="random"))

    assert {"_project_kernel", "_mix_kernel", "_collapse_kernel", "_expand_kernel"} <= set(found)
    assert {"_rows_kernel", "_values_kernel", "_gate_kernel"} <= set(found)
    assert {
        "_route_rooted_kernel", "_grouped_gate_up_kernel", "_grouped_down_kernel"
    } <= set(found)  # fmt: skip


def test_kernels_lie_compiled_in_the_cache_when_the_wait_is_over(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "dense", llama_config(num_hidden_layers=1))
    config = config_of(folder)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(ahead, "device_facts", lambda device: GPU)

    with CompileAhead(config, module="tests.support.compiling") as compiling:
        compiling.order(132)
        compiling.wait()

    found = kernels(config)
    names = {path.stem for path in (tmp_path / "kernels").glob("*/*.cubin")}
    assert {*found} <= names
    assert not ahead.is_needed(config)
    assert int(ahead.mark_path(config).read_text()) == found.total()


KEYS = """
import sys
from tokamak.ops.load import load_backends
load_backends()
from tokamak.ops.moe_experts import triton_few, triton_grouped
from tokamak.ops.rotate_cache_attend import triton_kernel
kernels = [
    triton_few._few_down_kernel, triton_few._few_gate_up_kernel, triton_grouped._grouped_down_kernel,
    triton_kernel._rotate_cache_attend_kernel,
]
found = {kernel.fn.__name__: kernel.cache_key for kernel in kernels[:: int(sys.argv[1])]}
print(sorted(found.items()))
"""


def test_keys_of_compiled_kernels_are_the_same_whichever_is_launched_first():
    forwards, backwards = (
        subprocess.run(
            [sys.executable, "-c", KEYS, step], capture_output=True, text=True, check=True
        ).stdout
        for step in ("1", "-1")
    )

    assert "_few_down_kernel" in forwards
    assert forwards == backwards
