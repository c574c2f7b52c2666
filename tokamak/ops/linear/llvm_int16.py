"""Linear layers in LLVM with 16-bit integer arithmetic: codes as stored, rows rounded to 16 bits.

Each group of 32 numbers of a row becomes integers with one scale, so that the largest is 32767; an
instruction multiplies and adds pairs of them with pairs of codes. Sums of a group are exact; groups are
added in order in float32, however many rows are beside: a row's result does not depend on the batch, bit
for bit. What is lost is at most 2^-16 of a group's largest number, a hundredth of what bfloat16 rounds away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tokamak.core.weight import GROUP_COLUMNS, GroupedWeight, Weight
from tokamak.device.facts import DeviceFacts
from tokamak.ops.jit.available import fits
from tokamak.ops.jit.compiler import KernelSource, Library, threads_for
from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.torch_kinds import fresh, rows_of
from tokamak.ops.jit.values import I16, I32, Num, Pointer
from tokamak.ops.linear import panels
from tokamak.ops.linear.forms import FORMS, Form
from tokamak.ops.linear.llvm import Kernels
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
    SCRATCH,
    SCRATCH_STRIDE,
    X_STRIDE,
    Format,
    Panel,
    X,
    each_tile,
    few_vectors,
    pack_panels,
    tile_vectors,
)  # fmt: skip

LARGEST = 32767
BLOCK_ROWS = 64
"""Rows that a work item multiplies: with 16-bit numbers they stay in the second cache."""
TILE_ROWS = 4
"""Rows of a tile: their sums, the codes and a product fit in 16 registers without spilling."""
PAIRS = GROUP_COLUMNS // 2
BLOCK_GROUPS = 16
"""Groups of a panel whose codes are unpacked at a time: 16 KiB on an 8-lane machine."""
GRAIN_NUMBERS = 16384


class Rounded:
    """Rows as 16-bit integers, while a kernel is written: [rows, columns] and two floats per group."""

    def __init__(self, kernel: Kernel, start: Pointer, rows: Num | int, columns: Num) -> None:
        self.kernel = kernel
        self.columns = columns
        self.groups = columns / GROUP_COLUMNS
        count = rows if isinstance(rows, Num) else kernel.int(rows)
        floats = start[count * columns].as_kind("f32")
        self._numbers = start
        self._scales = floats
        self._sums = floats[count * self.groups]

    def pairs(self, row: Num | int, group: Num) -> Pointer:
        """Where the pairs of neighbouring numbers of a row's group begin."""
        return self._numbers[self.columns * row + group * GROUP_COLUMNS].as_kind("i32")

    def scale(self, row: Num | int, group: Num) -> Num:
        """What one unit of a group's integers is worth, in every lane."""
        return self.kernel.spread(self._scales[self.groups * row + group].load())

    def total(self, row: Num | int, group: Num) -> Num:
        """The sum of a group's numbers, in every lane."""
        return self.kernel.spread(self._sums[self.groups * row + group].load())

    def round_row(self, x: Pointer, row: Num | int) -> None:
        """Write the instructions that fill a row from float32 numbers."""
        kernel, lanes = self.kernel, self.kernel.lanes
        with kernel.loop(0, self.groups) as group:
            start = group * GROUP_COLUMNS
            vectors = [x[start + at].load(lanes) for at in range(0, GROUP_COLUMNS, lanes)]
            top = kernel.call("llvm.fabs", vectors[0])
            for vector in vectors[1:]:
                top = top.most(kernel.call("llvm.fabs", vector))
            largest = kernel.most_lane(top)
            some = largest > 0.0
            inverse = some.where(largest.constant(LARGEST) / largest, largest)
            scale = largest * (1.0 / LARGEST)
            total = kernel.zeros()
            for at, vector in enumerate(vectors):
                whole = kernel.call("llvm.rint", vector * kernel.spread(inverse))
                total = total + whole
                place = self._numbers[self.columns * row + start + at * lanes]
                place.store(whole.to_int(I32).to_int(I16))
            self._scales[self.groups * row + group].store(scale)
            self._sums[self.groups * row + group].store(kernel.sum_lanes(total) * scale)


def round_rows(kernel: Kernel) -> None:
    """The kernel that rounds all rows into the scratch memory."""
    rows = kernel.integer(ROWS)
    x, stride = kernel.pointer(X, "f32"), kernel.integer(X_STRIDE)
    rounded = Rounded(kernel, kernel.pointer(SCRATCH, "i16"), rows, kernel.integer(COLUMNS))
    with kernel.items(rows) as row:
        rounded.round_row(x[stride * row], row)


def each_pair(
    form: Format, panel: Panel, group: Num, use: Callable[[int, list[Num]], None]
) -> None:
    """Unpack a group: `use(pair of the group, a vector of code pairs each)`."""
    bits = CODE_BITS[form.kind]
    words = bits
    per_word = PAIRS // words
    mask = ((1 << bits) - 1) * 0x10001
    row = panel.index * (panel.columns / GROUP_COLUMNS) + group
    for word in range(words):
        raw = panel.numbers(row * words + word, "i32", CODES)
        for pair in range(per_word):
            shifted = [packed >> (pair * bits) if pair else packed for packed in raw]
            use(word * per_word + pair, [codes & mask for codes in shifted])


def few_rows(form: Format, rows: int) -> Callable[[Kernel], None]:
    """The kernel for exactly `rows` rows; each thread rounds them for itself."""
    vectors = few_vectors(rows)

    def write(kernel: Kernel) -> None:
        lanes = kernel.lanes
        columns, count, grain = (kernel.integer(at) for at in (COLUMNS, PANELS, GRAIN))
        out, out_stride = kernel.pointer(OUT, "f32"), kernel.integer(OUT_STRIDE)
        x, stride = kernel.pointer(X, "f32"), kernel.integer(X_STRIDE)
        own = kernel.pointer(SCRATCH, "u8")[kernel.thread() * kernel.integer(SCRATCH_STRIDE)]
        rounded = Rounded(kernel, own.as_kind("i16"), rows, columns)
        for row in range(rows):
            rounded.round_row(x[stride * row], row)

        def write_part(index: Num, first: int) -> None:
            panel = Panel(kernel, index, first, vectors, columns)
            sums = [[kernel.var(kernel.zeros()) for _ in range(vectors)] for _ in range(rows)]
            with kernel.loop(0, rounded.groups) as group:
                whole = [[kernel.whole_zeros() for _ in range(vectors)] for _ in range(rows)]

                pairs = [rounded.pairs(row, group) for row in range(rows)]

                def add(pair: int, codes: list[Num]) -> None:
                    for row in range(rows):
                        numbers = kernel.spread(pairs[row][pair].load())
                        for v, code in enumerate(codes):
                            whole[row][v] = kernel.pair_dot(whole[row][v], code, numbers)

                each_pair(form, panel, group, add)
                at = index * rounded.groups + group
                scales = panel.numbers(at, form.scale_kind, SCALES)
                minimums = panel.numbers(at, form.scale_kind, MINIMUMS)
                for row in range(rows):
                    scale, total = rounded.scale(row, group), rounded.total(row, group)
                    for v, of in enumerate(sums[row]):
                        of.set(
                            _add_group(
                                kernel, of.now, whole[row][v], scales[v] * scale, minimums[v], total
                            )
                        )
            feature = (index * PANEL_VECTORS + first) * lanes
            for row in range(rows):
                for v in range(vectors):
                    out[out_stride * row + feature + v * lanes].store(sums[row][v].now)

        with (
            kernel.items(count, grain) as begin,
            kernel.loop(begin, (begin + grain).least(count)) as index,
        ):
            for first in range(0, PANEL_VECTORS, vectors):
                write_part(index, first)

    return write


def many_rows(form: Format) -> Callable[[Kernel], None]:
    """The kernel for any number of rounded rows: unpack some groups, then multiply tiles of rows.

    A work item is a block of rows, which stay in the second cache, and some neighbouring panels.
    """

    def write(kernel: Kernel) -> None:
        lanes = kernel.lanes
        width = tile_vectors() * lanes
        codes_block = kernel.scratch(BLOCK_GROUPS * PAIRS * width, "i32")
        factors = kernel.scratch(BLOCK_GROUPS * 2 * width)
        rows, columns = kernel.integer(ROWS), kernel.integer(COLUMNS)
        count, grain = kernel.integer(PANELS), kernel.integer(GRAIN)
        out, out_stride = kernel.pointer(OUT, "f32"), kernel.integer(OUT_STRIDE)
        rounded = Rounded(kernel, kernel.pointer(SCRATCH, "i16"), rows, columns)

        def unpack(panel: Panel, begin: Num, end: Num) -> None:
            with kernel.loop(begin, end) as group:
                place = codes_block[(group - begin) * (PAIRS * width)]

                def keep(pair: int, codes: list[Num]) -> None:
                    for v, code in enumerate(codes):
                        place[pair * width + v * lanes].store(code)

                each_pair(form, panel, group, keep)
                at = panel.index * rounded.groups + group
                for which, argument in enumerate((SCALES, MINIMUMS)):
                    for v, numbers in enumerate(panel.numbers(at, form.scale_kind, argument)):
                        offset = ((group - begin) * 2 + which) * width + v * lanes
                        factors[offset].store(numbers)

        def write_part(index: Num, first: int, first_row: Num, row_count: Num) -> None:
            vectors = tile_vectors()
            feature = (index * PANEL_VECTORS + first) * lanes
            panel = Panel(kernel, index, first, vectors, columns)
            with kernel.loop(0, rounded.groups, BLOCK_GROUPS) as begin:
                end = (begin + BLOCK_GROUPS).least(rounded.groups)
                unpack(panel, begin, end)

                def tile(size: int, row: Num) -> None:
                    row = row + first_row
                    places = [
                        [out[out_stride * (row + at) + feature + v * lanes] for v in range(vectors)]
                        for at in range(size)
                    ]
                    with kernel.when(begin.equals(0)):
                        for of in places:
                            for to in of:
                                to.store(kernel.zeros())
                    with kernel.loop(begin, end) as group:
                        sums = [[kernel.var(kernel.whole_zeros()) for _ in of] for of in places]
                        codes_at = codes_block[(group - begin) * (PAIRS * width)]
                        pairs = [rounded.pairs(row + at, group) for at in range(size)]
                        with kernel.loop(0, PAIRS) as pair:
                            codes = [
                                codes_at[pair * width + v * lanes].load(lanes)
                                for v in range(vectors)
                            ]
                            for at, of in enumerate(sums):
                                numbers = kernel.spread(pairs[at][pair].load())
                                for total, code in zip(of, codes, strict=True):
                                    total.set(kernel.pair_dot(total.now, code, numbers))
                        here = factors[(group - begin) * (2 * width)]
                        for at, (of, to) in enumerate(zip(sums, places, strict=True)):
                            scale = rounded.scale(row + at, group)
                            total = rounded.total(row + at, group)
                            for v in range(vectors):
                                of_weight = here[v * lanes].load(lanes) * scale
                                minimum = here[width + v * lanes].load(lanes)
                                so_far = to[v].load(lanes)
                                to[v].store(
                                    _add_group(kernel, so_far, of[v].now, of_weight, minimum, total)
                                )

                each_tile(kernel, row_count, TILE_ROWS, tile)

        chunks = (count + grain - 1) / grain
        row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS
        with kernel.items(chunks * row_blocks) as item:
            first_panel, first_row = item % chunks * grain, item / chunks * BLOCK_ROWS
            row_count = (rows - first_row).least(BLOCK_ROWS)
            last_panel = (first_panel + grain).least(count)
            with kernel.loop(first_panel, last_panel) as index:
                for first in range(0, PANEL_VECTORS, tile_vectors()):
                    write_part(index, first, first_row, row_count)

    return write


def _add_group(
    kernel: Kernel, so_far: Num, whole: Num, scale: Num, minimum: Num, total: Num
) -> Num:
    """Add a group's integer sum, worth `scale` a unit, and its minimum times the row's sum."""
    return kernel.fma(whole.to_float(), scale, kernel.fma(minimum, total, so_far))


@lru_cache(maxsize=4)
def kernels(form: Format) -> tuple[Kernels, Callable[..., None]]:
    """Compile (or read from disk) the kernels of a format, and the one that rounds rows."""
    sources = [
        *(KernelSource(f"few_{n}", PARAMETERS, few_rows(form, n)) for n in range(1, FEW_ROWS + 1)),
        KernelSource("many", PARAMETERS, many_rows(form)),
        KernelSource("round_rows", PARAMETERS, round_rows),
    ]
    files = [Path(__file__), Path(panels.__file__)]
    library = Library(f"linear16-{form.name}", files, sources)
    few = tuple(library.function(f"few_{rows}") for rows in range(1, FEW_ROWS + 1))
    return Kernels(few, library.function("many")), library.function("round_rows")


class RoundedLinear:
    """A packed matrix of codes and the calls that multiply rounded rows with it."""

    def __init__(self, weight: Weight) -> None:
        self._packed = pack_panels(weight)
        self.features, self.columns = weight.shape
        self.form = f"llvm16 {self._packed.format.name}"
        self._kernels, self._round_rows = kernels(self._packed.format)
        self._addresses = self._packed.addresses
        self._sizes = (self.columns, self._packed.panels, max(1, self._packed.panels // 16))
        self._row_bytes = 2 * self.columns + 8 * (self.columns // GROUP_COLUMNS)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: x [rows, columns] to [rows, features], in the dtype of x."""
        if x.dtype != torch.float32:
            return self(x.float()).to(x.dtype)
        rows = x.shape[0]
        x = rows_of(x)
        padded = self._packed.padded_features
        out = fresh((rows, padded))
        threads = torch.get_num_threads()
        stride = -(-rows * self._row_bytes // 64) * 64
        few = rows <= FEW_ROWS
        scratch = fresh((threads * stride if few else stride,), torch.uint8)
        arguments = (
            x.data_ptr(), x.stride(0), *self._addresses, out.data_ptr(), padded, rows, *self._sizes,
            scratch.data_ptr(), stride,
        )  # fmt: skip
        if few and rows:
            self._kernels.few[rows - 1](threads, *arguments)
        elif rows:
            self._round_rows(threads_for(rows * self.columns, GRAIN_NUMBERS), *arguments)
            self._kernels.many(threads, *arguments)
        return out if padded == self.features else out[:, : self.features].contiguous()


def _accepts(weight: Weight, dtype: torch.dtype, facts: DeviceFacts) -> bool:
    """Codes on an x86 CPU whose vectors multiply pairs of 16-bit integers."""
    return (
        fits(facts)
        and isinstance(weight, GroupedWeight)
        and dtype in (torch.float32, torch.bfloat16)
        and bool({"avx2", "avx512f"} & facts.features)
    )


FORMS.insert(
    0,
    Form(
        "llvm16",
        lambda weight, dtype: RoundedLinear(weight),
        _accepts,
        rounds="rows",
        replaces="llvm",
    ),
)
