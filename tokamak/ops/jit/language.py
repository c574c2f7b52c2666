"""How is a CPU kernel written? Arguments, storage, loops and arithmetic that build LLVM instructions.

A kernel is a Python function that runs once, at compile time, and leaves instructions behind: Python
loops unroll, `Kernel.loop` loops at run time. What it computes with is in `values.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llvmlite import ir

from tokamak.ops.jit.values import (
    F32,
    I16,
    I32,
    I64,
    MEMORY_TYPES,
    POINTER,
    Builder,
    Num,
    Pointer,
    Var,
    constant,
    nearest_bf16,
)


class Kernel:
    """A worker function under construction.

    Each thread runs it with its number and the same array of 64-bit integers (addresses and sizes).
    The last argument is a counter that starts at 0 and deals out work items (`items`).
    """

    def __init__(self, module: ir.Module, name: str, parameters: int, lanes: int) -> None:
        kind = ir.FunctionType(ir.VoidType(), [POINTER, I64])
        self.function = ir.Function(module, kind, name)
        self.function.attributes.add("nounwind")
        self.module = module
        self.lanes = lanes
        self._parameters = parameters
        self._entry = self.function.append_basic_block("entry")
        body = self.function.append_basic_block("body")
        self.builder: Builder = ir.IRBuilder(body)

    def finish(self) -> None:
        """Close the function."""
        self.builder.ret_void()
        ir.IRBuilder(self._entry).branch(self.function.blocks[1])

    # -- arguments and constants

    def integer(self, at: int) -> Num:
        """Argument `at` as an integer."""
        place = self.builder.gep(
            self.function.args[0], [ir.Constant(I64, at)], inbounds=True, source_etype=I64
        )
        return Num(self.builder, self.builder.load(place, typ=I64))

    def pointer(self, at: int, kind: str) -> Pointer:
        """Argument `at` as an address of numbers of a format."""
        return Pointer(self.builder, self.builder.inttoptr(self.integer(at).value, POINTER), kind)

    def real(self, at: int) -> Num:
        """Argument `at` as a float32 whose bits the caller put in the integer's low half."""
        return self.integer(at).to_int(I32).bits(F32)

    def int(self, number: int) -> Num:
        """A 64-bit integer constant."""
        return Num(self.builder, ir.Constant(I64, number))

    def float(self, number: float) -> Num:
        """A float32 constant."""
        return Num(self.builder, constant(F32, number))

    def zeros(self, lanes: int | None = None) -> Num:
        """A vector of float32 zeros."""
        return Num(self.builder, constant(ir.VectorType(F32, lanes or self.lanes), 0.0))

    def whole_zeros(self) -> Num:
        """A vector of int32 zeros."""
        return Num(self.builder, constant(ir.VectorType(I32, self.lanes), 0))

    def spread(self, number: Num, lanes: int | None = None) -> Num:
        """A vector with the same number in every lane."""
        kind = ir.VectorType(number.value.type, lanes or self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, number.value, ir.Constant(I32, 0))
        mask = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
        return Num(self.builder, self.builder.shuffle_vector(first, undefined, mask))

    def lane_numbers(self) -> Num:
        """The int32 vector 0, 1, 2, ..."""
        kind = ir.VectorType(I32, self.lanes)
        return Num(self.builder, ir.Constant(kind, list(range(self.lanes))))

    # -- storage

    def var(self, initial: Num) -> Var:
        """A variable with a first value."""
        with self.builder.goto_block(self._entry):
            place = self.builder.alloca(initial.value.type)
        place.type = POINTER
        made = Var(self.builder, place, initial.value.type)
        made.set(initial)
        return made

    def scratch(self, numbers: int, kind: str = "f32") -> Pointer:
        """Memory of this thread for as long as the kernel runs, 64-byte aligned."""
        with self.builder.goto_block(self._entry):
            place = self.builder.alloca(ir.ArrayType(MEMORY_TYPES[kind][0], numbers))
            place.align = 64
        place.type = POINTER
        return Pointer(self.builder, place, kind)

    # -- control

    @contextmanager
    def loop(self, begin: Num | int, end: Num | int, step: Num | int = 1) -> Iterator[Num]:
        """Count from begin up to, not including, end."""
        first, last, stride = (n if isinstance(n, Num) else self.int(n) for n in (begin, end, step))
        at = self.var(first)
        head = self.builder.append_basic_block("loop")
        body = self.builder.append_basic_block("body")
        after = self.builder.append_basic_block("after")
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch((at.now < last).value, body, after)
        self.builder.position_at_end(body)
        yield at.now
        at.set(at.now + stride)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def items(self, total: Num, grain: Num | int = 1) -> Iterator[Num]:
        """Take work items [0, total) one after the other until all threads together did them all.

        Yields the first of up to `grain` items that belong to this thread now.
        """
        counter = self.builder.gep(
            self.function.args[0],
            [ir.Constant(I64, self._parameters)],
            inbounds=True,
            source_etype=I64,
        )
        stride = grain if isinstance(grain, Num) else self.int(grain)
        head = self.builder.append_basic_block("take")
        body = self.builder.append_basic_block("item")
        after = self.builder.append_basic_block("done")
        self.builder.branch(head)
        self.builder.position_at_end(head)
        taken = Num(
            self.builder, self.builder.atomic_rmw("add", counter, stride.value, "monotonic")
        )
        self.builder.cbranch((taken < total).value, body, after)
        self.builder.position_at_end(body)
        yield taken
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Num) -> Iterator[None]:
        """Run the block only if the condition holds."""
        with self.builder.if_then(condition.value):
            yield

    def sweep(self, count: Num, use: Callable[[Num, int], None]) -> None:
        """Call `use(at, lanes)` for whole vectors of [0, count), then for the numbers left over."""
        whole = count / self.lanes * self.lanes
        with self.loop(0, whole, self.lanes) as at:
            use(at, self.lanes)
        with self.loop(whole, count) as at:
            use(at, 1)

    def thread(self) -> Num:
        """The number of this thread among those that run the kernel, from 0."""
        return Num(self.builder, self.function.args[1])

    # -- arithmetic

    def as_kind(self, number: Num, kind: str) -> Num:
        """A float32 rounded to what a memory format can hold, still as float32."""
        return nearest_bf16(number).bits(F32) if kind == "bf16" else number

    def fma(self, a: Num, b: Num, c: Num) -> Num:
        """A * b + c, rounded once."""
        return self.call("llvm.fma", a, b, c)

    def pair_dot(self, total: Num, a: Num, b: Num) -> Num:
        """Add a.low * b.low + a.high * b.high to every int32 lane; halves are signed 16-bit numbers.

        One or two instructions on x86 with AVX2; there is no such form elsewhere.
        """
        lanes = total.value.type.count
        name = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd"}.get(
            lanes, "llvm.x86.avx512.pmaddw.d.512"
        )
        halves, words = ir.VectorType(I16, 2 * lanes), ir.VectorType(I32, lanes)
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(words, [halves, halves]), name
        )
        split = [self.builder.bitcast(each.value, halves) for each in (a, b)]
        return total + Num(self.builder, self.builder.call(function, split))

    def call(self, intrinsic: str, *arguments: Num) -> Num:
        """A float intrinsic of LLVM that keeps the type, such as `llvm.sqrt`."""
        kind = arguments[0].value.type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        name = f"{intrinsic}.{suffix}"
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(kind, [kind] * len(arguments)), name
        )
        return Num(self.builder, self.builder.call(function, [a.value for a in arguments]))

    def sum_lanes(self, vector: Num) -> Num:
        """The sum of a vector's lanes, halving it again and again."""
        return self._fold(vector, lambda a, b: a + b)

    def sum_each(self, vectors: list[Num]) -> Num:
        """The sums of as many vectors as a vector has lanes: lane i is the sum of vector i.

        Pairs of vectors are added at shrinking distances, so that every step works on whole vectors.
        """
        lanes = len(vectors)
        seats = [[at] * lanes for at in range(lanes)]
        steps = _fold_steps(lanes)
        for low, _ in steps:
            seats = [
                [(a + b)[at] for at in low] for a, b in zip(seats[::2], seats[1::2], strict=True)
            ]
        parts = list(vectors)
        for lane, slot in enumerate(seats[0]):
            parts[slot] = vectors[lane]
        for low, high in steps:
            parts = [
                self._choose(a, b, low) + self._choose(a, b, high)
                for a, b in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]

    def _choose(self, a: Num, b: Num, lanes: list[int]) -> Num:
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return Num(self.builder, self.builder.shuffle_vector(a.value, b.value, mask))

    def most_lane(self, vector: Num) -> Num:
        """The largest of a vector's lanes."""
        return self._fold(vector, lambda a, b: a.most(b))

    def _fold(self, vector: Num, combine: Callable[[Num, Num], Num]) -> Num:
        lanes = vector.value.type.count
        while lanes > 1:
            half = lanes // 2
            low, high = (self._pick(vector, range(start, start + half)) for start in (0, half))
            vector, lanes = combine(low, high), half
        return Num(self.builder, self.builder.extract_element(vector.value, ir.Constant(I32, 0)))

    def _pick(self, vector: Num, lanes: range) -> Num:
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        undefined = ir.Constant(vector.value.type, ir.Undefined)
        return Num(self.builder, self.builder.shuffle_vector(vector.value, undefined, mask))

    def lane(self, vector: Num, at: int) -> Num:
        """One lane of a vector."""
        return Num(self.builder, self.builder.extract_element(vector.value, ir.Constant(I32, at)))

    def exp(self, x: Num) -> Num:
        """The exponential of x for float32 lanes, to about one part in ten million; 0 below -87."""
        low = x.most(-87.0).least(88.0)
        whole = self.call("llvm.rint", low * 1.4426950408889634)
        rest = self.fma(whole, x.constant(-0.693359375), low)
        rest = self.fma(whole, x.constant(2.12194440e-4), rest)
        series = x.constant(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
            series = self.fma(series, rest, x.constant(factor))
        power = self.fma(series, rest * rest, rest) + 1.0
        exponent = (whole.to_int(I32) + 127) << 23
        return (x < -87.0).where(x.constant(0.0), power * exponent.bits(F32))


def _fold_steps(lanes: int) -> list[tuple[list[int], list[int]]]:
    """Which lanes of two vectors, one after the other, are added to which, for `Kernel.sum_each`.

    Far lanes first; the last two steps stay inside groups of four lanes, which shuffle in one instruction.
    """
    steps = []
    distance = lanes // 2
    while distance >= 4:
        low = [at if not at & distance else lanes + at - distance for at in range(lanes)]
        steps.append((low, [at + distance for at in low]))
        distance //= 2
    for offsets, other in (((0, 1), 2), ((0, 2), 1)):
        low = [
            side + group + offset
            for group in range(0, lanes, 4)
            for side in (0, lanes)
            for offset in offsets
        ]
        steps.append((low, [at + other for at in low]))
    return steps
