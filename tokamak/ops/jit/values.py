"""What does a CPU kernel compute with? Numbers, vectors, variables and pointers that build LLVM instructions.

A `Num` is a value of the running kernel: a 64-bit integer, a float, or a vector of one of them; Python numbers mixed
with it become constants of its type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()

MEMORY_TYPES = {
    "f32": (F32, 4),
    "f16": (F16, 2),
    "bf16": (I16, 2),
    "u8": (I8, 1),
    "i16": (I16, 2),
    "i32": (I32, 4),
    "i64": (I64, 8),
}
"""Number formats in memory: LLVM type and bytes. bf16 is widened to float32 by its bits."""

Number = int | float

Builder = Any
"""An `llvmlite.ir.IRBuilder`; its methods carry no types."""
Value = Any
"""An `llvmlite.ir.Value`."""


class Num:
    """A value of the running kernel, with operators."""

    __slots__ = ("builder", "value")

    def __init__(self, builder: Builder, value: Value) -> None:
        self.builder = builder
        self.value = value

    @property
    def is_float(self) -> bool:
        """Whether it is a float or a vector of floats."""
        return _element(self.value.type) in (F32, F16)

    def constant(self, number: Number) -> Num:
        """A constant of the same type, in every lane."""
        return Num(self.builder, constant(self.value.type, number))

    def _binary(
        self, other: Num | Number, floats: str, integers: str, *, swap: bool = False
    ) -> Num:
        right = other if isinstance(other, Num) else self.constant(other)
        left = self
        if swap:
            left, right = right, left
        build = getattr(self.builder, floats if self.is_float else integers)
        return Num(self.builder, build(left.value, right.value))

    def __add__(self, other: Num | Number) -> Num:
        return self._binary(other, "fadd", "add")

    __radd__ = __add__

    def __sub__(self, other: Num | Number) -> Num:
        return self._binary(other, "fsub", "sub")

    def __rsub__(self, other: Number) -> Num:
        return self._binary(other, "fsub", "sub", swap=True)

    def __mul__(self, other: Num | Number) -> Num:
        return self._binary(other, "fmul", "mul")

    __rmul__ = __mul__

    def __truediv__(self, other: Num | Number) -> Num:
        return self._binary(other, "fdiv", "sdiv")

    def __floordiv__(self, other: Num | Number) -> Num:
        return self._binary(other, "fdiv", "sdiv")

    def __mod__(self, other: Num | Number) -> Num:
        return self._binary(other, "frem", "srem")

    def __and__(self, other: Num | Number) -> Num:
        return self._binary(other, "and_", "and_")

    def __or__(self, other: Num | Number) -> Num:
        return self._binary(other, "or_", "or_")

    def __lshift__(self, other: Num | Number) -> Num:
        return self._binary(other, "shl", "shl")

    def __rshift__(self, other: Num | Number) -> Num:
        """Shift right, filling with zeros."""
        return self._binary(other, "lshr", "lshr")

    def _compare(self, operator: str, other: Num | Number) -> Num:
        right = other if isinstance(other, Num) else self.constant(other)
        build = self.builder.fcmp_ordered if self.is_float else self.builder.icmp_signed
        return Num(self.builder, build(operator, self.value, right.value))

    def __lt__(self, other: Num | Number) -> Num:
        return self._compare("<", other)

    def __le__(self, other: Num | Number) -> Num:
        return self._compare("<=", other)

    def __gt__(self, other: Num | Number) -> Num:
        return self._compare(">", other)

    def __ge__(self, other: Num | Number) -> Num:
        return self._compare(">=", other)

    def equals(self, other: Num | Number) -> Num:
        """Whether both are the same number, lane by lane."""
        return self._compare("==", other)

    def where(self, yes: Num, no: Num) -> Num:
        """Choose lane by lane; self is a comparison."""
        return Num(self.builder, self.builder.select(self.value, yes.value, no.value))

    def least(self, other: Num | Number) -> Num:
        """The smaller of both."""
        right = other if isinstance(other, Num) else self.constant(other)
        return (self < right).where(self, right)

    def most(self, other: Num | Number) -> Num:
        """The larger of both."""
        right = other if isinstance(other, Num) else self.constant(other)
        return (self > right).where(self, right)

    def to_float(self) -> Num:
        """The integer as float32."""
        return Num(self.builder, self.builder.sitofp(self.value, _like(self.value.type, F32)))

    def to_int(self, element: ir.IntType = I64) -> Num:
        """A float cut to an integer, or an integer widened or cut to another width."""
        target = _like(self.value.type, element)
        if self.is_float:
            return Num(self.builder, self.builder.fptosi(self.value, target))
        if _bits(self.value.type) < _bits(element):
            return Num(self.builder, self.builder.sext(self.value, target))
        return Num(self.builder, self.builder.trunc(self.value, target))

    def bits(self, element: ir.Type) -> Num:
        """The same bits read as another 32-bit type."""
        return Num(self.builder, self.builder.bitcast(self.value, _like(self.value.type, element)))


class Var:
    """A variable of the running kernel; the compiler keeps it in a register where it can."""

    __slots__ = ("builder", "place", "type")

    def __init__(self, builder: Builder, place: Value, kind: ir.Type) -> None:
        self.builder = builder
        self.place = place
        self.type = kind

    @property
    def now(self) -> Num:
        """Its value at this point."""
        return Num(self.builder, self.builder.load(self.place, typ=self.type))

    def set(self, value: Num | Number) -> None:
        """Give it a new value."""
        number = value.value if isinstance(value, Num) else constant(self.type, value)
        self.builder.store(number, self.place)


@dataclass(frozen=True, slots=True)
class Pointer:
    """A place in memory that holds numbers of one format; `p[i]` is i numbers further."""

    builder: Builder
    place: Value
    kind: str

    def __getitem__(self, index: Num | int) -> Pointer:
        at = index.value if isinstance(index, Num) else ir.Constant(I64, index)
        element = MEMORY_TYPES[self.kind][0]
        moved = self.builder.gep(self.place, [at], inbounds=True, source_etype=element)
        return Pointer(self.builder, moved, self.kind)

    def as_kind(self, kind: str) -> Pointer:
        """The same place, read as another format."""
        return Pointer(self.builder, self.place, kind)

    def load(self, lanes: int = 1) -> Num:
        """Read one number, or `lanes` in a row; formats below 32 bits arrive as float32 or int32."""
        element, size = MEMORY_TYPES[self.kind]
        kind = element if lanes == 1 else ir.VectorType(element, lanes)
        raw = self.builder.load(self.place, typ=kind, align=size)
        if self.kind == "f16":
            return Num(self.builder, self.builder.fpext(raw, _like(kind, F32)))
        if self.kind == "u8":
            return Num(self.builder, self.builder.zext(raw, _like(kind, I32)))
        if self.kind == "bf16":
            wide = Num(self.builder, self.builder.zext(raw, _like(kind, I32)))
            return (wide << 16).bits(F32)
        return Num(self.builder, raw)

    def store(self, value: Num) -> None:
        """Write a number or a vector; float32 is rounded to the format's nearest."""
        size = MEMORY_TYPES[self.kind][1]
        if self.kind == "bf16":
            value = (nearest_bf16(value) >> 16).to_int(I16)
        self.builder.store(value.value, self.place, align=size)


def constant(kind: ir.Type, number: Number) -> ir.Constant:
    """A constant of a scalar or vector type, the same in every lane."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [constant(kind.element, number)] * kind.count)
    return ir.Constant(kind, float(number) if kind in (F32, F16) else int(number))


def nearest_bf16(number: Num) -> Num:
    """The bits of a float32 rounded to the nearest bfloat16, ties to even, in the upper half."""
    bits = number.bits(I32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000


def _element(kind: ir.Type) -> ir.Type:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def _bits(kind: Any) -> int:
    """The width of an integer, or of the integers of a vector."""
    return getattr(kind, "element", kind).width


def _like(kind: ir.Type, element: ir.Type) -> ir.Type:
    """The type with the same lanes and another element."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element
