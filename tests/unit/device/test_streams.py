"""Do jobs run where and in the order they should, with their outcome in a future?"""

from __future__ import annotations

import threading

import pytest

from tokamak.device.streams import CallerStream, CpuStream


def nothing() -> None:
    """Prepares a thread that needs nothing."""


def test_a_cpu_stream_runs_jobs_in_order_in_one_other_thread():
    stream, seen = CpuStream("rank", nothing), []

    for at in range(5):
        stream.submit(lambda at=at: seen.append((at, threading.get_ident())))
    stream.close()

    assert [at for at, _ in seen] == list(range(5))
    assert {thread for _, thread in seen}.isdisjoint({threading.get_ident()})


def test_the_callers_stream_runs_a_job_before_it_returns_in_the_callers_thread():
    stream = CallerStream()

    future = stream.submit(threading.get_ident)

    assert future.done()
    assert future.result() == threading.get_ident()


@pytest.mark.parametrize("stream", [CpuStream("rank", nothing), CallerStream()], ids=["cpu", "caller"])  # fmt: skip
def test_what_a_job_raises_is_in_its_future_and_the_next_job_runs(stream):
    failed = stream.submit(lambda: 1 // 0)
    after = stream.submit(lambda: 7)

    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert after.result() == 7
    stream.close()
