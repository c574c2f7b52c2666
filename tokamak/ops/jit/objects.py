"""Where does compiled code come from? From disk where it was compiled before, else from LLVM.

Objects lie in the cache folder under a name made of the sources that wrote them, the compiler's version
and the processor, so that a changed kernel or another machine never meets an old object.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import llvmlite
from llvmlite import binding

from tokamak.ops.cache_folder import cache_folder

logger = logging.getLogger(__name__)

OPTIMISATION_LEVEL = 2

SOURCES = {path: path.read_bytes() for path in Path(__file__).parents[1].rglob("*.py")}
"""Every file of `ops` as it was when kernels were imported: an edit under a running engine must not give
the new file's name to what the old one wrote."""


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


def load_object(
    name: str, sources: Sequence[Path], write: Callable[[], str]
) -> binding.ExecutionEngine:
    """Code ready to be called: `write` gives its LLVM assembly if it was not compiled here before."""
    machine = host()
    files = sorted({*sources, *(path for path in SOURCES if path.parent == Path(__file__).parent)})
    parts = [SOURCES.get(path) or path.read_bytes() for path in files]
    parts.append(f"{name} {llvmlite.__version__} {machine}".encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    path = cache_folder() / f"{name}-{digest}.o"
    if path.is_file():
        code = path.read_bytes()
    else:
        code = _compile(write(), machine)
        _keep(path, code)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine(machine))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _target_machine(machine: Host) -> binding.TargetMachine:
    return binding.Target.from_triple(machine.triple).create_target_machine(
        cpu=machine.name, features=machine.features, opt=OPTIMISATION_LEVEL, jit=True
    )


def _compile(assembly: str, machine: Host) -> bytes:
    """Optimise LLVM assembly for a processor and return the object file."""
    target = _target_machine(machine)
    module = binding.parse_assembly(assembly)
    module.verify()
    module.triple = machine.triple
    module.data_layout = str(target.target_data)
    options = binding.create_pipeline_tuning_options(speed_level=OPTIMISATION_LEVEL)
    passes = binding.create_pass_builder(target, options)
    passes.getModulePassManager().run(module, passes)
    return target.emit_object(module)


def _keep(path: Path, code: bytes) -> None:
    """Write an object for the next start; a folder that cannot be written costs only time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("compiled kernels could not be kept in %s: %s", path.parent, error)
