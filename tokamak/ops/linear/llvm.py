"""Linear layers in LLVM: weights stay in the checkpoint's number format, arithmetic is float32.

Weights lie in panels of 4 vectors of output features, one row of the panel per input column, so that a
vector register holds neighbouring features and an input number is spread over it. Codes are widened to
float32 in registers, w = code * scale + minimum rounded once: the same numbers the checkpoint's format
defines. Every output is the sum over its columns in order, one fused multiply-add each, however many
rows are beside it: a row's result does not depend on the batch, bit for bit.

Few rows run straight from the codes (`few_rows`); more rows widen a block of a panel into the first
cache once and use it for all rows (`many_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tokamak.core.weight import GROUP_COLUMNS, DenseWeight, Weight
from tokamak.device.facts import DeviceFacts
from tokamak.ops.jit.available import fits
from tokamak.ops.jit.compiler import KernelSource, Library, host
from tokamak.ops.jit.language import Kernel, Num, Pointer
from tokamak.ops.linear.forms import FORMS, Form

PANEL_VECTORS = 4
FEW_ROWS = 4
TILE_ROWS = 6
BLOCK_COLUMNS = 256
"""Columns of a panel that are widened at a time: 16 KiB on an 8-lane machine."""

ARGUMENTS = (
    "x",
    "x_stride",
    "codes",
    "scales",
    "minimums",
    "out",
    "out_stride",
    "rows",
    "columns",
    "panels",
    "grain",
)
X, X_STRIDE, CODES, SCALES, MINIMUMS, OUT, OUT_STRIDE, ROWS, COLUMNS, PANELS, GRAIN = range(11)

CODE_BITS = {"q4": 4, "q8": 8}
PLAIN_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}

Use = Callable[[Num, list[Num]], None]
"""Gets a column number and the panel's weights of that column, a vector each."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Some neighbouring vectors of one panel, while a kernel is written."""

    kernel: Kernel
    index: Num
    first: int
    """The first vector of the panel that is wanted."""
    vectors: int
    columns: Num

    def place(self, row: Num, kind: str, argument: int) -> list[Pointer]:
        """Where the wanted vectors of a row of the panel lie; row counts from the matrix's start."""
        base = self.kernel.pointer(argument, kind)
        width = PANEL_VECTORS * self.kernel.lanes
        start = base[row * width]
        return [start[(self.first + at) * self.kernel.lanes] for at in range(self.vectors)]


def grouped_columns(
    bits: int, scale_kind: str, panel: Panel, begin: Num, end: Num, use: Use
) -> None:
    """Widen codes: 32 columns share a scale and a minimum; a 32-bit word holds 32 / bits columns."""
    kernel, lanes = panel.kernel, panel.kernel.lanes
    per_word = 32 // bits
    words = GROUP_COLUMNS // per_word
    groups = panel.columns / GROUP_COLUMNS
    with kernel.loop(begin / GROUP_COLUMNS, end / GROUP_COLUMNS) as group:
        row = panel.index * groups + group
        scales = [place.load(lanes) for place in panel.place(row, scale_kind, SCALES)]
        minimums = [place.load(lanes) for place in panel.place(row, scale_kind, MINIMUMS)]
        for word in range(words):
            raw = [place.load(lanes) for place in panel.place(row * words + word, "i32", CODES)]
            for at in range(per_word):
                weights = []
                for bits_of, scale, minimum in zip(raw, scales, minimums, strict=True):
                    code = bits_of >> (at * bits) if at else bits_of
                    code = code if at == per_word - 1 else code & ((1 << bits) - 1)
                    weights.append(kernel.fma(code.to_float(), scale, minimum))
                use(group * GROUP_COLUMNS + (word * per_word + at), weights)


def dense_columns(kind: str, panel: Panel, begin: Num, end: Num, use: Use) -> None:
    """Read plain numbers of one format."""
    with panel.kernel.loop(begin, end) as column:
        row = panel.index * panel.columns + column
        use(column, [place.load(panel.kernel.lanes) for place in panel.place(row, kind, CODES)])


@dataclass(frozen=True, slots=True)
class Format:
    """How a packed matrix stores its numbers."""

    kind: str
    """`q4` or `q8` for codes in groups; `bf16`, `f16` or `f32` for plain numbers."""
    scale_kind: str = ""
    """Format of scales and minimums of groups: f16 where that loses nothing, else f32."""

    @property
    def name(self) -> str:
        """Such as `q4_f16` or `bf16`."""
        return "_".join(part for part in (self.kind, self.scale_kind) if part)

    def columns(self, panel: Panel, begin: Num, end: Num, use: Use) -> None:
        """Write the loop over columns [begin, end) of a panel."""
        if self.scale_kind:
            grouped_columns(CODE_BITS[self.kind], self.scale_kind, panel, begin, end, use)
        else:
            dense_columns(self.kind, panel, begin, end, use)


def few_rows(form: Format, rows: int) -> Callable[[Kernel], None]:
    """The kernel for exactly `rows` rows: weights go from registers into the sums."""
    many_registers = host().registers > 16
    vectors = PANEL_VECTORS if rows <= 2 or many_registers else PANEL_VECTORS // 2
    parts = PANEL_VECTORS // vectors

    def write(kernel: Kernel) -> None:
        lanes = kernel.lanes
        columns, panels = kernel.integer(COLUMNS), kernel.integer(PANELS)
        x, stride = kernel.pointer(X, "f32"), kernel.integer(X_STRIDE)
        inputs = [x[stride * row] for row in range(rows)]
        out, out_stride = kernel.pointer(OUT, "f32"), kernel.integer(OUT_STRIDE)
        grain = kernel.integer(GRAIN)
        with (
            kernel.items(panels, grain) as first,
            kernel.loop(first, (first + grain).least(panels)) as index,
        ):
            for part in range(parts):
                panel = Panel(kernel, index, part * vectors, vectors, columns)
                sums = [[kernel.var(kernel.zeros()) for _ in range(vectors)] for _ in range(rows)]

                def add(column: Num, weights: list[Num], sums: list = sums) -> None:
                    for row in range(rows):
                        number = kernel.spread(inputs[row][column].load())
                        for total, weight in zip(sums[row], weights, strict=True):
                            total.set(kernel.fma(number, weight, total.now))

                form.columns(panel, kernel.int(0), columns, add)
                feature = index * (PANEL_VECTORS * lanes) + part * vectors * lanes
                for row in range(rows):
                    for at in range(vectors):
                        out[out_stride * row + feature + at * lanes].store(sums[row][at].now)

    return write


def many_rows(form: Format) -> Callable[[Kernel], None]:
    """The kernel for any number of rows: widen a block of columns, then multiply tiles of 6 rows."""
    vectors = PANEL_VECTORS if host().registers > 16 else PANEL_VECTORS // 2
    parts = PANEL_VECTORS // vectors

    def write(kernel: Kernel) -> None:
        lanes = kernel.lanes
        width = vectors * lanes
        block = kernel.scratch(BLOCK_COLUMNS * width)
        rows, columns = kernel.integer(ROWS), kernel.integer(COLUMNS)
        x, stride = kernel.pointer(X, "f32"), kernel.integer(X_STRIDE)
        out, out_stride = kernel.pointer(OUT, "f32"), kernel.integer(OUT_STRIDE)

        def tile(count: int, row: Num, begin: Num, depth: Num, feature: Num) -> None:
            inputs = [x[stride * (row + at) + begin] for at in range(count)]
            places = [
                [out[out_stride * (row + at) + feature + v * lanes] for v in range(vectors)]
                for at in range(count)
            ]
            sums = [[kernel.var(kernel.zeros()) for _ in range(vectors)] for _ in range(count)]
            with kernel.when(begin > 0):
                for at in range(count):
                    for v in range(vectors):
                        sums[at][v].set(places[at][v].load(lanes))
            with kernel.loop(0, depth) as column:
                weights = [block[column * width + v * lanes].load(lanes) for v in range(vectors)]
                for at in range(count):
                    number = kernel.spread(inputs[at][column].load())
                    for v in range(vectors):
                        sums[at][v].set(kernel.fma(number, weights[v], sums[at][v].now))
            for at in range(count):
                for v in range(vectors):
                    places[at][v].store(sums[at][v].now)

        with kernel.items(kernel.integer(PANELS) * parts) as item:
            index, part = item / parts, item % parts
            feature = index * (PANEL_VECTORS * lanes) + part * width
            with kernel.loop(0, columns, BLOCK_COLUMNS) as begin:
                end = (begin + BLOCK_COLUMNS).least(columns)

                def widen(column: Num, weights: list[Num]) -> None:
                    for v, weight in enumerate(weights):
                        block[(column - begin) * width + v * lanes].store(weight)

                for choice in range(parts):
                    with kernel.when(part.equals(choice)):
                        form.columns(
                            Panel(kernel, index, choice * vectors, vectors, columns),
                            begin,
                            end,
                            widen,
                        )
                depth = end - begin
                full = rows / TILE_ROWS * TILE_ROWS
                with kernel.loop(0, full, TILE_ROWS) as row:
                    tile(TILE_ROWS, row, begin, depth, feature)
                for left in range(1, TILE_ROWS):
                    with kernel.when((rows - full).equals(left)):
                        tile(left, full, begin, depth, feature)

    return write


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled calls of one format."""

    few: tuple[Callable[..., None], ...]
    """By row count, from 1 row on."""
    many: Callable[..., None]


@lru_cache(maxsize=8)
def kernels(form: Format) -> Kernels:
    """Compile (or read from disk) the kernels of a format."""
    parameters = len(ARGUMENTS)
    sources = [
        *(
            KernelSource(f"few_{rows}", parameters, few_rows(form, rows))
            for rows in range(1, FEW_ROWS + 1)
        ),
        KernelSource("many", parameters, many_rows(form)),
    ]
    library = Library(f"linear-{form.name}", [Path(__file__)], sources)
    few = tuple(library.function(f"few_{rows}") for rows in range(1, FEW_ROWS + 1))
    return Kernels(few, library.function("many"))


class PanelLinear:
    """A packed matrix and the calls that multiply rows with it."""

    def __init__(self, weight: Weight) -> None:
        self.features, self.columns = weight.shape
        self.format, self._codes, self._scales, self._minimums = _pack(weight)
        self.panels = self._codes.shape[0]
        self.form = f"llvm {self.format.name}"
        self._kernels = kernels(self.format)
        self._padded = self.panels * PANEL_VECTORS * host().lanes
        self._addresses = (
            self._codes.data_ptr(),
            self._scales.data_ptr(),
            self._minimums.data_ptr(),
        )
        self._few_grain = max(1, self.panels // 16)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: x [rows, columns] to [rows, features], in the dtype of x."""
        if x.dtype != torch.float32:
            return self(x.float()).to(x.dtype)
        rows = x.shape[0]
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((rows, self._padded), dtype=torch.float32)
        if rows:
            call = self._kernels.few[rows - 1] if rows <= FEW_ROWS else self._kernels.many
            call(
                torch.get_num_threads(),
                x.data_ptr(),
                x.stride(0),
                *self._addresses,
                out.data_ptr(),
                self._padded,
                rows,
                self.columns,
                self.panels,
                self._few_grain,
            )
        return out if self._padded == self.features else out[:, : self.features].contiguous()


def _pack(weight: Weight) -> tuple[Format, Tensor, Tensor, Tensor]:
    """Lay a weight out in panels: format, codes, scales and minimums, each [panels, ...]."""
    width = PANEL_VECTORS * host().lanes
    if isinstance(weight, DenseWeight):
        values = weight.values if weight.values.dtype in PLAIN_KINDS else weight.values.float()
        nothing = torch.empty(0)
        return Format(PLAIN_KINDS[values.dtype]), _panels(values, width), nothing, nothing
    kind = "q4" if weight.bits == 4 else "q8"
    bits = CODE_BITS[kind]
    per_word = 32 // bits
    codes = _panels(weight.codes, width)
    panels, columns, _ = codes.shape
    split = codes.view(panels, columns // per_word, per_word, width)
    words = torch.zeros((panels, columns // per_word, width), dtype=torch.int32)
    for at in range(per_word):
        words |= split[:, :, at].int() << (bits * at)
    tables = (weight.scales, weight.minimums)
    half = all(torch.equal(table.half().float(), table) for table in tables)
    dtype = torch.float16 if half else torch.float32
    scales, minimums = (_panels(table.to(dtype), width) for table in tables)
    return Format(kind, PLAIN_KINDS[dtype]), words, scales, minimums


def _panels(matrix: Tensor, width: int) -> Tensor:
    """[features, columns] to [panels, columns, width], padded with zero features."""
    features, columns = matrix.shape
    panels = -(-features // width)
    if panels * width != features:
        padded = matrix.new_zeros((panels * width, columns))
        padded[:features] = matrix
        matrix = padded
    return matrix.view(panels, width, columns).transpose(1, 2).contiguous()


def _accepts(weight: Weight, dtype: torch.dtype, facts: DeviceFacts) -> bool:
    """Whether kernels run here and compute in this dtype."""
    return fits(facts) and dtype in (torch.float32, torch.bfloat16) and len(weight.shape) == 2


FORMS.insert(0, Form("llvm", lambda weight, dtype: PanelLinear(weight), _accepts, exact=True))
