"""How do several threads share one kernel? A pool of helpers that joins the calling thread while work lasts.

A kernel deals out its work items by a counter, so whoever comes takes the next one. The caller opens a job,
works on it like the helpers, closes it and waits only for helpers that did join: a helper that the system
has not woken or scheduled in time costs nothing. Helpers spin for a moment after a job, since the next
kernel of a step follows within microseconds, and then sleep in the kernel's futex.

PyTorch's OpenMP pool would do the same work, but waits for every thread of it at every join, and wakes
them through the system as soon as a process has two pools: tens of microseconds each of 200 times a step.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tokamak.ops.jit.calls import JOB_WORDS, LISTENING, Integers, Job
from tokamak.ops.jit.objects import load_object

SPIN_S = 100e-6
"""How long an idle helper spins before it sleeps."""
PROBE_PAUSES = 4000

_PAUSE = {
    "x86_64": ("llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()"),
    "aarch64": ("llvm.aarch64.hint(i32 1)", "declare void @llvm.aarch64.hint(i32)"),
}
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129

# Places in the shared state, in 64-bit words; those that threads write often have a cache line each.
# The first word is the ticket of the newest job, on which helpers sleep.
_OPEN, _ACTIVE, _SLEEPERS, _BUSY, _STOP, _LIMIT, _WORK, _ARGUMENTS, _SPINS = (
    8, 16, 24, 32, 33, 40, 41, 42, 43,
)  # fmt: skip
_STATE_WORDS = 64

_ASSEMBLY = """
{declare_pause}
declare i64 @syscall(i64, ...)

; Run work(arguments, 0) here, and work(arguments, 1...) on helpers if there are several threads.
define void @pool_run(ptr %state, ptr %work, ptr %arguments, i32 %threads) {{
  %busy = getelementptr i64, ptr %state, i64 {busy}
  %several = icmp sgt i32 %threads, 1
  br i1 %several, label %claim, label %alone
claim:
  %claimed = cmpxchg ptr %busy, i64 0, i64 1 seq_cst seq_cst
  %free = extractvalue {{ i64, i1 }} %claimed, 1
  br i1 %free, label %share, label %alone
alone:
  call void %work(ptr %arguments, i64 0)
  ret void
share:
  %limit_at = getelementptr i64, ptr %state, i64 {limit}
  %limit = zext i32 %threads to i64
  store i64 %limit, ptr %limit_at
  %work_at = getelementptr i64, ptr %state, i64 {work}
  store ptr %work, ptr %work_at
  %arguments_at = getelementptr i64, ptr %state, i64 {arguments}
  store ptr %arguments, ptr %arguments_at
  %last = load i32, ptr %state
  %after = add i32 %last, 1
  %wrapped = icmp eq i32 %after, 0
  %ticket = select i1 %wrapped, i32 1, i32 %after
  %open = getelementptr i64, ptr %state, i64 {open}
  store atomic i32 %ticket, ptr %open seq_cst, align 4
  store atomic i32 %ticket, ptr %state seq_cst, align 4
  %sleepers_at = getelementptr i64, ptr %state, i64 {sleepers}
  %sleepers = load atomic i64, ptr %sleepers_at seq_cst, align 8
  %asleep = icmp sgt i64 %sleepers, 0
  br i1 %asleep, label %wake, label %run
wake:
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %state, i64 {wake}, i64 %limit, i64 0, i64 0, i64 0)
  br label %run
run:
  call void %work(ptr %arguments, i64 0)
  store atomic i32 0, ptr %open seq_cst, align 4
  %active_at = getelementptr i64, ptr %state, i64 {active}
  br label %join
join:
  %active = load atomic i64, ptr %active_at seq_cst, align 8
  %left = icmp eq i64 %active, 0
  br i1 %left, label %done, label %pause
pause:
  call void @{pause}
  br label %join
done:
  store atomic i64 0, ptr %busy release, align 8
  ret void
}}

; The life of helper `index`: wait for a ticket, join the job if it is still open, again.
define void @pool_help(ptr %state, i64 %index) {{
  %open = getelementptr i64, ptr %state, i64 {open}
  %active = getelementptr i64, ptr %state, i64 {active}
  %sleepers = getelementptr i64, ptr %state, i64 {sleepers}
  %stop_at = getelementptr i64, ptr %state, i64 {stop}
  %limit_at = getelementptr i64, ptr %state, i64 {limit}
  %work_at = getelementptr i64, ptr %state, i64 {work}
  %arguments_at = getelementptr i64, ptr %state, i64 {arguments}
  %spins_at = getelementptr i64, ptr %state, i64 {spins}
  br label %idle
idle:
  %seen = phi i32 [ 0, %0 ], [ %ticket, %leave ]
  %spins = load i64, ptr %spins_at
  br label %spin
spin:
  %count = phi i64 [ 0, %idle ], [ %count1, %again ]
  %now = load atomic i32, ptr %state acquire, align 4
  %changed = icmp ne i32 %now, %seen
  br i1 %changed, label %look, label %tired
tired:
  %enough = icmp sge i64 %count, %spins
  br i1 %enough, label %sleep, label %again
again:
  call void @{pause}
  %count1 = add i64 %count, 1
  br label %spin
sleep:
  atomicrmw add ptr %sleepers, i64 1 seq_cst
  %expected = zext i32 %seen to i64
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %state, i64 {wait}, i64 %expected, i64 0, i64 0, i64 0)
  atomicrmw sub ptr %sleepers, i64 1 seq_cst
  %woken = load atomic i32, ptr %state acquire, align 4
  %same = icmp eq i32 %woken, %seen
  br i1 %same, label %sleep, label %look
look:
  %ticket = phi i32 [ %now, %spin ], [ %woken, %sleep ]
  %stop = load atomic i64, ptr %stop_at acquire, align 8
  %stopped = icmp ne i64 %stop, 0
  br i1 %stopped, label %end, label %enter
enter:
  atomicrmw add ptr %active, i64 1 seq_cst
  %opened = load atomic i32, ptr %open seq_cst, align 4
  %current = icmp eq i32 %opened, %ticket
  br i1 %current, label %wanted, label %leave
wanted:
  %limit = load i64, ptr %limit_at
  %in = icmp slt i64 %index, %limit
  br i1 %in, label %work, label %leave
work:
  %function = load ptr, ptr %work_at
  %arguments = load ptr, ptr %arguments_at
  call void %function(ptr %arguments, i64 %index)
  br label %leave
leave:
  atomicrmw sub ptr %active, i64 1 seq_cst
  br label %idle
end:
  ret void
}}

; Run jobs one after the other; a job is its work, arguments, threads and the place of its item counter.
define void @pool_replay(ptr %state, ptr %jobs, i64 %count) {{
  %some = icmp sgt i64 %count, 0
  br i1 %some, label %job, label %end
job:
  %at = phi i64 [ 0, %0 ], [ %next, %job ]
  %first = mul i64 %at, {job_words}
  %work_at = getelementptr i64, ptr %jobs, i64 %first
  %arguments_at = getelementptr i64, ptr %work_at, i64 1
  %threads_at = getelementptr i64, ptr %work_at, i64 2
  %counter_at = getelementptr i64, ptr %work_at, i64 3
  %work = load ptr, ptr %work_at
  %arguments = load ptr, ptr %arguments_at
  %threads64 = load i64, ptr %threads_at
  %threads = trunc i64 %threads64 to i32
  %counter = load i64, ptr %counter_at
  %items = getelementptr i64, ptr %arguments, i64 %counter
  store i64 0, ptr %items
  call void @pool_run(ptr %state, ptr %work, ptr %arguments, i32 %threads)
  %next = add i64 %at, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %job, label %end
end:
  ret void
}}

define void @pool_stop(ptr %state) {{
  %stop = getelementptr i64, ptr %state, i64 {stop}
  store atomic i64 1, ptr %stop seq_cst, align 8
  atomicrmw add ptr %state, i32 1 seq_cst
  call i64 (i64, ...) @syscall(i64 {futex}, ptr %state, i64 {wake}, i64 2147483647, i64 0, i64 0, i64 0)
  ret void
}}

define void @pool_pause(i64 %times) {{
  br label %loop
loop:
  %left = phi i64 [ %times, %0 ], [ %less, %loop ]
  call void @{pause}
  %less = sub i64 %left, 1
  %more = icmp sgt i64 %less, 0
  br i1 %more, label %loop, label %end
end:
  ret void
}}
"""


class Pool:
    """Helper threads of this process, and the call that shares a kernel with them."""

    def __init__(self) -> None:
        engine = load_object("threads", [Path(__file__)], _assembly)
        self._engine = engine
        self._memory = (ctypes.c_int64 * (_STATE_WORDS + 8))()
        self._state = -(-ctypes.addressof(self._memory) // 64) * 64
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        address = engine.get_function_address
        self._run = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, ctypes.c_int)(
            address("pool_run")
        )
        self._help = ctypes.CFUNCTYPE(None, pointer, number)(address("pool_help"))
        self._replay = ctypes.CFUNCTYPE(None, pointer, pointer, number)(address("pool_replay"))
        self._stop = ctypes.CFUNCTYPE(None, pointer)(address("pool_stop"))
        self._pause = ctypes.CFUNCTYPE(None, number)(address("pool_pause"))
        self._helpers: list[threading.Thread] = []
        self._growing = threading.Lock()
        ctypes.c_int64.from_address(self._state + 8 * _SPINS).value = self._spins()
        atexit.register(self.stop)

    def call(self, work: int, parameters: int, owner: object) -> Callable[..., None]:
        """A kernel's worker function as `call(threads, *integers)`; `owner` keeps its code alive."""
        arguments = ctypes.c_int64 * (parameters + 1)
        run, state, helpers = self._run, self._state, self._helpers

        def call(threads: int, *integers: int) -> None:
            """Run on `threads` threads and wait for all that joined."""
            if threads - 1 > len(helpers):
                self._grow(threads - 1)
            made = arguments(*integers)
            run(state, work, made, threads)
            if LISTENING.calls is not None:
                LISTENING.calls.jobs.append(Job(work, made, threads, self))

        call.owner = owner  # pyright: ignore[reportFunctionMemberAccess]
        return call

    def replay(self, jobs: Integers) -> None:
        """Run jobs in order: JOB_WORDS integers each, as `pool_replay` reads them."""
        self._replay(self._state, jobs, len(jobs) // JOB_WORDS)

    def stop(self) -> None:
        """End the helpers; kernels run on the calling thread from then on."""
        self._stop(self._state)
        for helper in self._helpers:
            helper.join()

    def _grow(self, count: int) -> None:
        with self._growing:
            for index in range(len(self._helpers) + 1, count + 1):
                helper = threading.Thread(
                    target=self._help,
                    args=(self._state, index),
                    name=f"tokamak-kernels-{index}",
                    daemon=True,
                )
                helper.start()
                self._helpers.append(helper)

    def _spins(self) -> int:
        begun = time.perf_counter()
        self._pause(PROBE_PAUSES)
        return max(1, int(SPIN_S / (time.perf_counter() - begun) * PROBE_PAUSES))


@lru_cache(maxsize=1)
def pool() -> Pool:
    """The pool of this process."""
    return Pool()


os.register_at_fork(after_in_child=pool.cache_clear)


def _assembly() -> str:
    machine = platform.machine()
    pause, declaration = _PAUSE[machine]
    return _ASSEMBLY.format(
        pause=pause, declare_pause=declaration, futex=_FUTEX_CALL[machine], wait=_WAIT_PRIVATE,
        wake=_WAKE_PRIVATE, open=_OPEN, active=_ACTIVE, sleepers=_SLEEPERS, busy=_BUSY, stop=_STOP,
        limit=_LIMIT, work=_WORK, arguments=_ARGUMENTS, spins=_SPINS,
        job_words=JOB_WORDS,
    )  # fmt: skip
