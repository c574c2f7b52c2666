"""Which form does a weight take for its matrix products? Chosen once, when it is loaded.

On a CPU with llvmlite, weights keep the checkpoint's number format and rows are float32 inside the
product. Where the CPU multiplies bfloat16 itself, a model in bfloat16 also keeps a prepacked matrix for
many rows if that was measured to pay. Without llvmlite, PyTorch's own forms remain. On a GPU a weight is
a plain matrix in the model's dtype: form `device`, or `dense` for PyTorch's products alone. Where the GPU multiplies
8-bit floating-point numbers and the checkpoint has them, it keeps them: form `fp8`, which a CPU takes when asked to,
to compute what a GPU does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from tokamak.core.weight import DenseWeight, GroupedWeight, PackedWeight, ScaledWeight, Weight
from tokamak.device.facts import DeviceFacts
from tokamak.errors import NoBackendError
from tokamak.ops.linear.device import DeviceLinear, ScaledLinear, scaled_to_device, to_device
from tokamak.ops.linear.forms import FORMS, ByRows, DenseLinear, Form, PackedLinear
from tokamak.ops.linear.measure import Choice, choose_forms


def pack_linear(
    weight: Weight,
    *,
    dtype: torch.dtype,
    exact: bool,
    facts: DeviceFacts,
    head: bool = False,
    prefer: str | None = None,
    device: torch.device | None = None,
) -> PackedLinear:
    """Pack a [out, in] weight for products with rows of `dtype`; see `pack_with_reason`."""
    packed, _ = pack_with_reason(
        weight, dtype=dtype, exact=exact, facts=facts, head=head, prefer=prefer, device=device
    )
    return packed


def pack_with_reason(
    weight: Weight,
    *,
    dtype: torch.dtype,
    exact: bool,
    facts: DeviceFacts,
    head: bool,
    prefer: str | None,
    device: torch.device | None = None,
) -> tuple[PackedLinear, str]:
    """Pack a [out, in] weight for products with rows of `dtype`, and say why it took its form.

    exact: only forms that round nothing on the way. head: the vocabulary head, whose weight is never
    rounded. prefer: a form by name. device: where a GPU's products run; where it is None, the weight
    stays where it is.

    Raises:
        NoBackendError: the preferred form does not exist or does not fit.
    """
    if prefer == ScaledLinear.form:
        if isinstance(weight, ScaledWeight) and ScaledLinear.can_take(weight):
            return ScaledLinear(scaled_to_device(weight, device), facts), "asked for"
        prefer = None  # Weights that are not stored so keep a form of their own.
    if facts.vendor != "cpu":
        return _pack_on_device(weight, dtype=dtype, facts=facts, prefer=prefer, device=device)
    if isinstance(weight, ScaledWeight | PackedWeight):
        # A CPU widens floating-point numbers of 8 and 4 bits once, unless it is to compute what a GPU does.
        weight = DenseWeight(weight.dense(dtype))
    forms = forms_for(weight, dtype=dtype, exact=exact, facts=facts, head=head)
    if prefer is not None:
        if prefer not in forms:
            raise _no_form(prefer, forms, dtype, facts)
        return forms[prefer].make(weight, dtype), "asked for"
    chosen = choose(weight, forms, dtype=dtype, exact=exact, facts=facts)
    few = forms[chosen.few].make(weight, dtype)
    if chosen.few == chosen.many:
        return few, chosen.why
    many = forms[chosen.many].make(weight, dtype)
    return ByRows(few, many, chosen.border_rows), chosen.why


def forms_for(
    weight: Weight, *, dtype: torch.dtype, exact: bool, facts: DeviceFacts, head: bool
) -> dict[str, Form]:
    """Every form a weight may take here, by name, the most trusted first."""
    refused = {"rows", "weights"} if exact else {"weights"} if head else set[str]()
    return {
        form.name: form
        for form in FORMS
        if form.rounds not in refused and form.accepts(weight, dtype, facts)
    }


def choose(
    weight: Weight,
    forms: Mapping[str, Form],
    *,
    dtype: torch.dtype,
    exact: bool,
    facts: DeviceFacts,
) -> Choice:
    """Which of its forms a weight gets: the first where arithmetic must not vary, else the fastest."""
    first = next(iter(forms))
    if exact or first == DenseLinear.form:
        return Choice(first, first, 0, "the first form that fits")
    kind = f"q{4 if weight.bits == 4 else 8}" if isinstance(weight, GroupedWeight) else "dense"
    passed_over = {DenseLinear.form, *(form.replaces for form in forms.values())}
    makers = {
        name: partial(_make, form, dtype) for name, form in forms.items() if name not in passed_over
    }
    return choose_forms(makers, kind, dtype=dtype, facts=facts)


def _pack_on_device(
    weight: Weight,
    *,
    dtype: torch.dtype,
    facts: DeviceFacts,
    prefer: str | None,
    device: torch.device | None,
) -> tuple[PackedLinear, str]:
    """8-bit numbers where the device multiplies them, else a matrix with kernels for few rows, or PyTorch's products alone."""
    if (
        prefer is None
        and isinstance(weight, ScaledWeight)
        and ScaledLinear.takes(weight, dtype, facts)
    ):
        return ScaledLinear(scaled_to_device(weight, device), facts), "8 bits as stored"
    names = (DeviceLinear.form, DenseLinear.form)
    if prefer is not None and prefer not in names:
        raise _no_form(prefer, names, dtype, facts)
    matrix = to_device(weight, dtype=dtype, device=device)
    if prefer == DenseLinear.form:
        return DenseLinear(matrix), "asked for"
    why = "a matrix on the device" if prefer is None else "asked for"
    return DeviceLinear(matrix, facts), why


def _no_form(
    prefer: str, names: Iterable[str], dtype: torch.dtype, facts: DeviceFacts
) -> NoBackendError:
    return NoBackendError(
        f"a linear layer has no form {prefer!r} for {dtype} on {facts.vendor} {facts.arch}",
        hint=f"it has {', '.join(names)}",
    )


def _make(form: Form, dtype: torch.dtype, weight: Weight) -> PackedLinear:
    return form.make(weight, dtype)
