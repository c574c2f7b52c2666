"""How do tests compile Triton kernels for a GPU that is not there?"""

from types import SimpleNamespace

import pytest
import torch

from tokamak.ops.registry import OPS
from tokamak.ops.triton_launches import _NoDevice

TARGETS = {"nvidia": ("cuda", 90, 32), "amd": ("hip", "gfx942", 64)}


@pytest.fixture
def compile_for(monkeypatch):
    """Calls an op with launches replaced; returns the kernels, by name and what they are compiled for."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from tokamak.ops.triton_order import asking_on, order_on

    def forget():
        for choose in (order_on, asking_on):
            choose.cache_clear()

    def run(vendor, op_name, every_arguments):
        target, kernels = GPUTarget(*TARGETS[vendor]), {}
        backend = make_backend(target)
        monkeypatch.setattr(driver, "_active", _NoDevice(target))
        gpu = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        forget()

        def compile_instead(self, *args, grid, warmup, **kwargs):
            bind = create_function_from_signature(self.signature, self.params, backend)
            bound, specialization, options = bind(*args, **kwargs)
            key = (self.fn.__name__, str(specialization), str(options))
            options, signature, constants, attributes = self._pack_args(
                backend, kwargs, bound, specialization, options
            )
            if key not in kernels:
                source = ASTSource(self, signature, constants, attributes)
                kernels[key] = compile(source, target=target, options=options.__dict__)

        monkeypatch.setattr(JITFunction, "run", compile_instead)
        call = next(each.call for each in OPS[op_name].backends if each.name == "triton")
        for arguments in every_arguments:
            call(*arguments)
        return kernels

    yield run
    forget()
