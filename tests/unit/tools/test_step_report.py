"""Are step times, spans and the GPU's idle time what a trace says?"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.preparation import a_decode_plan, shape_of
from tokamak.runner.label import profiled_spans, step_range

TOOL = Path(__file__).resolve().parents[3] / "tools" / "step_report.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_report", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["step_report"] = module
    spec.loader.exec_module(module)
    return module


def an_event(category: str, name: str, begin: float, end: float, **args: object) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "args": args}


def a_step(at: float, kind: str, number: int, *, stage: float, kernels: tuple[float, float]):
    """A step of 50 µs on the host with one launch; its kernel runs at these times after it began."""
    first, last = kernels
    return [
        an_event("user_annotation", f"{kind}[bs=1/1 tok=1/1 p=0 d=1]", at, at + 50),
        an_event("user_annotation", "tokamak::stage", at + 1, at + 1 + stage),
        an_event("cuda_runtime", "cudaGraphLaunch", at + 20, at + 22, correlation=number),
        an_event("kernel", "gemm", at + first, at + last - 10, correlation=number),
        an_event("gpu_memcpy", "Memcpy DtoH", at + last - 5, at + last, correlation=number),
    ]


TRACE = [
    # Kernels of a step run while the host is in the next one already.
    *a_step(0, "decode", 1, stage=4, kernels=(30, 95)),
    *a_step(100, "decode", 2, stage=6, kernels=(30, 95)),
    *a_step(200, "mixed", 3, stage=9, kernels=(25, 190)),
    an_event("user_annotation", "tokamak::deliver", 270, 277),
    *a_step(400, "decode", 4, stage=8, kernels=(10, 60)),
    an_event("user_annotation", "dummy_decode[bs=1/1 tok=1/1 p=0 d=1]", 500, 550),
    an_event("kernel", "of nobody", 520, 530, correlation=99),
    {"ph": "M", "name": "process_name"},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": TRACE}))
    return path


def rows_of(tool: ModuleType, trace: Path) -> dict:
    return {row["kind"]: row for row in tool.report(tool.find_steps(tool.read_events(trace)))}


def test_step_times_are_from_beginning_to_beginning(tool, trace):
    rows = rows_of(tool, trace)

    assert {kind: row["steps"] for kind, row in rows.items()} == {"all": 4, "decode": 3, "mixed": 1}
    assert rows["all"]["step_us"] == {"median": 100, "mean": pytest.approx(133.33), "p99": 200}
    assert rows["decode"]["step_us"]["p99"] == 100
    assert rows["mixed"]["step_us"]["median"] == 200
    assert rows["all"]["host_us"]["median"] == 50


def test_gpu_idle_is_between_a_steps_last_kernel_and_the_next_steps_first(tool, trace):
    rows = rows_of(tool, trace)

    # 95 → 130, 195 → 225, 390 → 410
    assert rows["all"]["gpu_idle_us"] == {"median": 30, "mean": pytest.approx(28.33), "p99": 35}
    assert rows["mixed"]["gpu_idle_us"]["median"] == 30
    assert rows["decode"]["gpu_idle_us"]["mean"] == pytest.approx(27.5)


def test_spans_are_counted_by_step(tool, trace):
    rows = rows_of(tool, trace)

    assert rows["decode"]["span_us"]["stage"] == {"median": 6, "mean": 6, "p99": 8}
    assert rows["mixed"]["span_us"]["deliver"]["median"] == 7
    assert "deliver" not in rows["decode"]["span_us"]


def test_dummy_steps_are_left_out(tool, trace):
    steps = tool.find_steps(tool.read_events(trace))

    assert [step.kind for step in steps] == ["decode", "decode", "mixed", "decode"]


def test_a_table_and_json_are_printed_and_first_steps_discarded(tool, trace, capsys):
    assert tool.main([str(trace)]) == 0
    text = capsys.readouterr().out
    assert tool.main([str(trace), "--json", "--discard", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)

    assert "decode: 3 steps" in text
    assert "GPU idle" in text
    assert rows[0]["steps"] == 2
    assert rows[0]["gpu_idle_us"]["median"] == 20


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trace.json", b"not json", "not a Chrome trace"),
        ("trace.json.gz", b"not gzip", "not a Chrome trace"),
        ("trace.json", b'{"traceEvents": []}', "no step"),
    ],
)
def test_what_is_no_trace_of_steps_is_refused(tool, tmp_path, capsys, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)

    code = tool.main([str(path)])

    assert code == 1
    assert message in capsys.readouterr().err


def test_a_real_trace_of_a_profiled_run_is_read(tool, tmp_path):
    spans, plan = profiled_spans(), a_decode_plan([3, 4])
    with torch.profiler.profile() as profile:
        for _ in range(3):
            with step_range(plan, shape_of(plan)):
                with spans.span("stage"):
                    torch.ones(4)
                with spans.span("launch"):
                    torch.randn(64, 64) @ torch.randn(64, 64)
    plain, zipped = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    profile.export_chrome_trace(str(plain))
    zipped.write_bytes(gzip.compress(plain.read_bytes()))

    found = [rows_of(tool, path) for path in (plain, zipped)]

    assert found[0] == found[1]
    row = found[0]["eager_decode"]
    assert row["steps"] == 3
    assert row["gpu_idle_us"] is None
    spent = row["span_us"]["stage"]["mean"] + row["span_us"]["launch"]["mean"]
    assert 0 < spent <= row["host_us"]["mean"]
