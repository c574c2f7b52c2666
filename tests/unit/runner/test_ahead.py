"""When are kernels compiled in a process of their own, and what if that goes wrong?"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest

from tests.support.configs import CPU, GPU, a_config
from tests.support.tiny import llama_config, write_checkpoint
from tokamak.runner import ahead
from tokamak.runner.ahead import CompileAhead, finished, is_needed, mark_path


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config for a GPU, whose kernels nobody has compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(ahead, "device_facts", lambda device: GPU)
    monkeypatch.setattr(ahead, "_triton_version", lambda: "3.6.0")
    folder = write_checkpoint(tmp_path / "model", llama_config())
    return a_config(facts=GPU, path=str(folder))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module that stands for the compiling process."""

    def make(source: str) -> str:
        (tmp_path / "stand_in.py").write_text(source)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        return "stand_in"

    return make


def test_a_gpu_without_compiled_kernels_needs_them(config):
    assert is_needed(config)


def test_a_cpu_needs_none(config, monkeypatch):
    monkeypatch.setattr(ahead, "device_facts", lambda device: CPU)

    assert not is_needed(a_config())


def test_a_gpu_without_triton_needs_none(config, monkeypatch):
    monkeypatch.setattr(ahead, "device_facts", lambda device: replace(GPU, libraries=frozenset()))

    assert not is_needed(config)


def test_kernels_that_were_compiled_start_no_process(config):
    finished(config, 3)

    with CompileAhead(config) as compiling:
        assert not compiling.running
        compiling.order(132)
        compiling.wait()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 3},
        {"dtype": "float32"},
        {"kv_cache_dtype": "fp8"},
        {"graphs": "off"},
    ],
)
def test_another_config_has_other_kernels(config, changes):
    other = a_config(facts=GPU, path=config.model.path, **changes)

    assert mark_path(other) != mark_path(config)


def test_a_changed_kernel_is_compiled_anew(config, monkeypatch):
    finished(config, 3)
    monkeypatch.setattr(ahead, "_source_digest", lambda: "changed")

    assert is_needed(config)


def test_the_process_gets_the_order_and_is_waited_for(config, module, tmp_path):
    source = (
        "import sys, msgspec, pathlib\nfrom tokamak.runner.ahead import Order, finished\n"
        "order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)\n"
        f"pathlib.Path({str(tmp_path / 'told')!r}).write_text(f'{{order.multiprocessors}} {{order.config.model.path}}')\n"
    )

    with CompileAhead(config, module=module(source)) as compiling:
        assert compiling.running
        compiling.order(132)
        compiling.wait()

    assert (tmp_path / "told").read_text() == f"132 {config.model.path}"
    assert not compiling.running


def test_a_process_that_fails_is_told_of_and_the_start_goes_on(config, module, caplog):
    with CompileAhead(config, module=module("raise SystemExit(7)")) as compiling:
        compiling.order(132)
        compiling.wait()

    assert "ended with 7" in caplog.text
    assert is_needed(config)


def test_a_process_that_takes_too_long_is_ended(config, module, caplog):
    caplog.set_level(logging.WARNING)
    with CompileAhead(config, module=module("import time; time.sleep(60)")) as compiling:
        process = compiling._process
        compiling.order(132)
        compiling.wait(timeout_s=0.2)

    assert "not compiled after 0 s" in caplog.text
    assert process.poll() == -9


def test_a_start_that_fails_leaves_no_process_behind(config, module):
    def start():
        with CompileAhead(config, module=module("import time; time.sleep(60)")) as compiling:
            processes.append(compiling._process)
            raise RuntimeError("no such model")

    processes = []
    with pytest.raises(RuntimeError, match="no such model"):
        start()

    assert processes[0].poll() == -9
