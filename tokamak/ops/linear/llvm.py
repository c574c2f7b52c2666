"""Linear layers in LLVM with float32 arithmetic: the numbers the checkpoint's format defines, exactly.

Codes are widened in registers, w = code * scale + minimum rounded once. Every output is the sum over its
columns in order, one fused multiply-add each, however many rows are beside it: a row's result does not
depend on the batch, bit for bit. Few rows run straight from the codes (`few_rows`); more rows widen a
block of a panel into the first cache once and use it for all rows (`many_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tokamak.core.weight import GROUP_COLUMNS, Weight
from tokamak.device.facts import DeviceFacts
from tokamak.ops.jit.available import fits
from tokamak.ops.jit.compiler import KernelSource, Library
from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.torch_kinds import fresh, rows_of
from tokamak.ops.jit.values import Num
from tokamak.ops.linear import panels
from tokamak.ops.linear.forms import FORMS, Form
from tokamak.ops.linear.panels import (
    CODE_BITS,
    CODES,
    COLUMNS,
    FEW_ROWS,
    GRAIN,
    MINIMUMS,
    OUT,
    OUT_STRIDE,
    PANEL_VECTORS,
    PANELS,
    PARAMETERS,
    ROWS,
    SCALES,
    X_STRIDE,
    Format,
    Panel,
    X,
    column_in_word,
    each_part,
    each_tile,
    few_vectors,
    pack_panels,
    tile_vectors,
)  # fmt: skip

TILE_ROWS = 6
"""Rows of a tile whose sums stay in registers."""
BLOCK_COLUMNS = 256
"""Columns of a panel that are widened at a time: 16 KiB on an 8-lane machine."""

Use = Callable[[Num, list[Num]], None]
"""Gets a column number and the panel's weights of that column, a vector each."""


def each_column(form: Format, panel: Panel, begin: Num, end: Num, use: Use) -> None:
    """Write the loop over columns [begin, end) of a panel, in order."""
    if form.scale_kind:
        _grouped_columns(form, panel, begin, end, use)
        return
    with panel.kernel.loop(begin, end) as column:
        use(column, panel.numbers(panel.index * panel.columns + column, form.kind, CODES))


def _grouped_columns(form: Format, panel: Panel, begin: Num, end: Num, use: Use) -> None:
    """Widen codes: 32 columns share a scale and a minimum."""
    kernel, bits = panel.kernel, CODE_BITS[form.kind]
    per_word = 32 // bits
    words = GROUP_COLUMNS // per_word
    positions = sorted(range(per_word), key=lambda position: column_in_word(position, per_word))
    groups = panel.columns / GROUP_COLUMNS
    with kernel.loop(begin / GROUP_COLUMNS, end / GROUP_COLUMNS) as group:
        row = panel.index * groups + group
        scales = panel.numbers(row, form.scale_kind, SCALES)
        minimums = panel.numbers(row, form.scale_kind, MINIMUMS)
        for word in range(words):
            raw = panel.numbers(row * words + word, "i32", CODES)
            for column, position in enumerate(positions):
                weights = []
                for packed, scale, minimum in zip(raw, scales, minimums, strict=True):
                    code = packed >> (position * bits) if position else packed
                    if position != per_word - 1:
                        code = code & ((1 << bits) - 1)
                    weights.append(kernel.fma(code.to_float(), scale, minimum))
                use(group * GROUP_COLUMNS + (word * per_word + column), weights)


def few_rows(form: Format, rows: int) -> Callable[[Kernel], None]:
    """The kernel for exactly `rows` rows: weights go from registers into the sums."""
    vectors = few_vectors(rows)

    def write(kernel: Kernel) -> None:
        lanes = kernel.lanes
        columns, count, grain = (kernel.integer(at) for at in (COLUMNS, PANELS, GRAIN))
        x, stride = kernel.pointer(X, "f32"), kernel.integer(X_STRIDE)
        inputs = [x[stride * row] for row in range(rows)]
        out, out_stride = kernel.pointer(OUT, "f32"), kernel.integer(OUT_STRIDE)

        def write_part(index: Num, first: int) -> None:
            sums = [[kernel.var(kernel.zeros()) for _ in range(vectors)] for _ in range(rows)]

            def add(column: Num, weights: list[Num]) -> None:
                for row in range(rows):
                    number = kernel.spread(inputs[row][column].load())
                    for total, weight in zip(sums[row], weights, strict=True):
                        total.set(kernel.fma(number, weight, total.now))

            panel = Panel(kernel, index, first, vectors, columns)
            each_column(form, panel, kernel.int(0), columns, add)
            feature = (index * PANEL_VECTORS + first) * lanes
            for row in range(rows):
                for at in range(vectors):
                    out[out_stride * row + feature + at * lanes].store(sums[row][at].now)

        with (
            kernel.items(count, grain) as begin,
            kernel.loop(begin, (begin + grain).least(count)) as index,
        ):
            for first in range(0, PANEL_VECTORS, vectors):
                write_part(index, first)

    return write


def many_rows(form: Format) -> Callable[[Kernel], None]:
    """The kernel for any number of rows: widen a block of columns, then multiply tiles of rows."""

    def write(kernel: Kernel) -> None:
        lanes = kernel.lanes
        block = kernel.scratch(BLOCK_COLUMNS * tile_vectors() * lanes)
        rows, columns = kernel.integer(ROWS), kernel.integer(COLUMNS)
        x, stride = kernel.pointer(X, "f32"), kernel.integer(X_STRIDE)
        out, out_stride = kernel.pointer(OUT, "f32"), kernel.integer(OUT_STRIDE)

        def write_part(index: Num, first: int, vectors: int) -> None:
            width = vectors * lanes
            feature = (index * PANEL_VECTORS + first) * lanes
            panel = Panel(kernel, index, first, vectors, columns)
            with kernel.loop(0, columns, BLOCK_COLUMNS) as begin:
                end = (begin + BLOCK_COLUMNS).least(columns)

                def widen(column: Num, weights: list[Num]) -> None:
                    for at, weight in enumerate(weights):
                        block[(column - begin) * width + at * lanes].store(weight)

                def tile(count: int, row: Num) -> None:
                    inputs = [x[stride * (row + at) + begin] for at in range(count)]
                    places = [
                        [out[out_stride * (row + at) + feature + v * lanes] for v in range(vectors)]
                        for at in range(count)
                    ]
                    sums = [[kernel.var(kernel.zeros()) for _ in of] for of in places]
                    with kernel.when(begin > 0):
                        for of_row, of_places in zip(sums, places, strict=True):
                            for total, place in zip(of_row, of_places, strict=True):
                                total.set(place.load(lanes))
                    with kernel.loop(0, end - begin) as column:
                        weights = [
                            block[column * width + v * lanes].load(lanes) for v in range(vectors)
                        ]
                        for numbers, of_row in zip(inputs, sums, strict=True):
                            number = kernel.spread(numbers[column].load())
                            for total, weight in zip(of_row, weights, strict=True):
                                total.set(kernel.fma(number, weight, total.now))
                    for of_row, of_places in zip(sums, places, strict=True):
                        for total, place in zip(of_row, of_places, strict=True):
                            place.store(total.now)

                each_column(form, panel, begin, end, widen)
                each_tile(kernel, rows, TILE_ROWS, tile)

        with kernel.items(kernel.integer(PANELS) * (PANEL_VECTORS // tile_vectors())) as item:
            each_part(kernel, item, write_part)

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
    sources = [
        *(KernelSource(f"few_{n}", PARAMETERS, few_rows(form, n)) for n in range(1, FEW_ROWS + 1)),
        KernelSource("many", PARAMETERS, many_rows(form)),
    ]
    files = [Path(__file__), Path(panels.__file__)]
    library = Library(f"linear-{form.name}", files, sources)
    few = tuple(library.function(f"few_{rows}") for rows in range(1, FEW_ROWS + 1))
    return Kernels(few, library.function("many"))


class PanelLinear:
    """A packed matrix and the calls that multiply rows with it."""

    def __init__(self, weight: Weight) -> None:
        self._packed = pack_panels(weight)
        self.features, self.columns = weight.shape
        self.form = f"llvm {self._packed.format.name}"
        self._kernels = kernels(self._packed.format)
        self._addresses = self._packed.addresses
        self._sizes = (self.columns, self._packed.panels, max(1, self._packed.panels // 16), 0, 0)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: x [rows, columns] to [rows, features], in the dtype of x."""
        if x.dtype != torch.float32:
            return self(x.float()).to(x.dtype)
        rows = x.shape[0]
        x = rows_of(x)
        padded = self._packed.padded_features
        out = fresh((rows, padded))
        if rows:
            call = self._kernels.few[rows - 1] if rows <= FEW_ROWS else self._kernels.many
            call(
                torch.get_num_threads(),
                x.data_ptr(), x.stride(0), *self._addresses, out.data_ptr(), padded, rows, *self._sizes,
            )  # fmt: skip
        return out if padded == self.features else out[:, : self.features].contiguous()


def _accepts(weight: Weight, dtype: torch.dtype, facts: DeviceFacts) -> bool:
    """Whether kernels run here and compute in this dtype."""
    return fits(facts) and dtype in (torch.float32, torch.bfloat16) and len(weight.shape) == 2


FORMS.insert(0, Form("llvm", lambda weight, dtype: PanelLinear(weight), _accepts))
