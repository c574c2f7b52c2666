"""OPEN-13: limits that can never be met end `tokamak serve` within seconds, with one line that says what works."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.tiny import llama_config, write_checkpoint

SECONDS = 30
"""Generous for a busy machine; alone, the slowest case takes two."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def serve(model: Path, *arguments: str) -> str:
    """Run the command; returns its only line on stderr."""
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tokamak", "serve", str(model), "--port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode != 0
    assert time.monotonic() - began_s < SECONDS
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return errors[0]


def test_a_context_ten_times_what_the_pool_holds(model: Path) -> None:
    line = serve(model, "--max-model-len", "500", "--num-blocks-override", "4")

    assert "max_model_len is 500, but num_blocks_override 4 holds 48 tokens" in line
    assert "use max_model_len=48 or less, or num_blocks_override=33" in line


def test_a_context_ten_times_what_the_cache_memory_holds(model: Path) -> None:
    line = serve(model, "--max-model-len", "500", "--kv-cache-memory-bytes", "32KiB")

    assert "max_model_len is 500, but kv_cache_memory_bytes 32 KiB holds" in line
    assert "or kv_cache_memory_bytes=" in line


def test_a_chunk_smaller_than_a_block(model: Path) -> None:
    line = serve(model, "--max-num-batched-tokens", "8")

    assert "max_num_batched_tokens is 8, less than block_size 16" in line
    assert "use max_num_batched_tokens=16 or more" in line


def test_a_memory_share_that_holds_nothing(model: Path) -> None:
    line = serve(model, "--memory-fraction", "0.00001")

    assert "memory_fraction is 1e-05" in line
    assert "use memory_fraction=0.01 or more" in line


def test_a_port_in_use(model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        line = serve(model, "--port", str(port))

    assert f"port is {port}, where something listens already" in line
    assert "use port=" in line


def test_an_unknown_quantization(tmp_path: Path) -> None:
    config = llama_config(quantization_config={"quant_method": "no_such_method", "bits": 4})
    folder = write_checkpoint(tmp_path / "quantized")
    (folder / "config.json").write_text(json.dumps(config))

    line = serve(folder)

    assert "no_such_method" in line
    assert "quantization_config" in line or "quant_method" in line


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    line = serve(tmp_path / "nothing")

    assert "nothing" in line


def test_an_option_nobody_knows(model: Path) -> None:
    line = serve(model, "--num-speculative-tokens", "4")

    assert "takes no argument '--num-speculative-tokens'" in line
