"""How does a kernel become machine code? Compiled once per machine, kept on disk, called with addresses.

Compiled objects lie in the cache folder under a name made of the sources of the kernels, the compiler's
version and the processor, so that a changed kernel or another machine never meets an old object.
Threads are those of the OpenMP pool that PyTorch already has in this process: kernels and PyTorch's own
ops take turns on the same threads instead of fighting over the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import llvmlite
import torch
from llvmlite import binding, ir

from tokamak.ops.cache_folder import cache_folder
from tokamak.ops.jit.language import I32, POINTER, Kernel

logger = logging.getLogger(__name__)

Body = Callable[[Kernel], None]
"""A function that writes a kernel's instructions."""

OPTIMISATION_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Host:
    """The processor kernels are compiled for."""

    triple: str
    name: str
    features: str
    lanes: int
    """float32 numbers in a vector register."""
    registers: int
    """Vector registers."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel: its name, how many arguments it takes, and the function that writes it."""

    name: str
    parameters: int
    body: Body


@lru_cache(maxsize=1)
def host() -> Host:
    """The processor of this process."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features()
    triple = binding.get_process_triple()
    wide = bool(features.get("avx512f"))
    arm = triple.startswith(("aarch64", "arm64"))
    return Host(
        triple=triple,
        name=binding.get_host_cpu_name(),
        features=features.flatten(),
        lanes=16 if wide else 4 if arm else 8,
        registers=32 if wide or arm else 16,
    )


@lru_cache(maxsize=1)
def has_openmp() -> bool:
    """Whether PyTorch's OpenMP runtime is in this process and speaks the interface kernels use."""
    try:
        process = ctypes.CDLL(None)
        return all(hasattr(process, name) for name in ("GOMP_parallel", "omp_get_thread_num"))
    except (OSError, TypeError):
        return False


class Library:
    """Some kernels compiled together; `function(name)` is a call that runs one on several threads."""

    def __init__(self, name: str, sources: Sequence[Path], kernels: Sequence[KernelSource]) -> None:
        self.name = name
        self._parameters = {kernel.name: kernel.parameters for kernel in kernels}
        machine = host()
        digest = hashlib.sha256(
            b"\0".join(
                [
                    *(path.read_bytes() for path in sorted({*sources, *_language_sources()})),
                    f"{name} {llvmlite.__version__} {machine}".encode(),
                    f"{has_openmp()}".encode(),
                ]
            )
        ).hexdigest()[:24]
        path = cache_folder() / f"{name}-{digest}.o"
        if path.is_file():
            code = path.read_bytes()
        else:
            code = _compile(kernels, machine)
            _keep(path, code)
        self._engine = binding.create_mcjit_compiler(
            binding.parse_assembly(""), _target_machine(machine)
        )
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def function(self, name: str) -> Callable[..., None]:
        """The kernel as a call: `call(threads, *integers)`; floats are passed through `float_bits`."""
        address = self._engine.get_function_address(f"{name}_run")
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)
        arguments = ctypes.c_int64 * (self._parameters[name] + 1)
        keep = self._engine

        def call(threads: int, *integers: int) -> None:
            """Run on `threads` threads and wait for all of them."""
            run(arguments(*integers), threads)

        call.engine = keep  # pyright: ignore[reportFunctionMemberAccess]
        return call


def float_bits(number: float) -> int:
    """A float32 as the integer argument that `Kernel.real` reads."""
    return struct.unpack("<I", struct.pack("<f", number))[0]


def threads_for(work: int, grain: int) -> int:
    """Threads worth waking for an amount of work when `grain` of it outweighs the waking."""
    return 1 if work < 2 * grain else min(torch.get_num_threads(), work // grain)


def _language_sources() -> list[Path]:
    folder = Path(__file__).parent
    return [folder / "language.py", folder / "compiler.py"]


def _target_machine(machine: Host) -> binding.TargetMachine:
    return binding.Target.from_triple(machine.triple).create_target_machine(
        cpu=machine.name, features=machine.features, opt=OPTIMISATION_LEVEL, jit=True
    )


def _compile(kernels: Sequence[KernelSource], machine: Host) -> bytes:
    """Write the kernels, optimise, and return the object file."""
    module = ir.Module("kernels")
    module.triple = machine.triple
    for kernel in kernels:
        worker = Kernel(
            module, f"{kernel.name}_work", kernel.parameters, machine.lanes, threaded=has_openmp()
        )
        kernel.body(worker)
        worker.finish()
        _write_entry(module, kernel.name, worker.function)
    parsed = binding.parse_assembly(str(module))
    target = _target_machine(machine)
    parsed.data_layout = str(target.target_data)
    options = binding.create_pipeline_tuning_options(speed_level=OPTIMISATION_LEVEL)
    passes = binding.create_pass_builder(target, options)
    passes.getModulePassManager().run(parsed, passes)
    parsed.verify()
    return target.emit_object(parsed)


def _write_entry(module: ir.Module, name: str, worker: ir.Function) -> None:
    """Write `<name>_run(arguments, threads)`: the worker on this thread, or on several."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, I32]), f"{name}_run")
    arguments, threads = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    if has_openmp():
        parallel = module.globals.get("GOMP_parallel") or ir.Function(
            module,
            ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I32, I32]),
            "GOMP_parallel",
        )
        several = builder.icmp_signed(">", threads, ir.Constant(I32, 1))
        with builder.if_else(several) as (many, alone):
            with many:
                builder.call(parallel, [worker, arguments, threads, ir.Constant(I32, 0)])
            with alone:
                builder.call(worker, [arguments])
    else:
        builder.call(worker, [arguments])
    builder.ret_void()


def _keep(path: Path, code: bytes) -> None:
    """Write an object for the next start; a folder that cannot be written costs only time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("compiled kernels could not be kept in %s: %s", path.parent, error)
