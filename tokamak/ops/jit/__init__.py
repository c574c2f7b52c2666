"""A small kernel language over LLVM: how CPU kernels are written, compiled, cached and called."""
