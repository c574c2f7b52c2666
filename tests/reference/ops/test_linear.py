"""Do packed weights multiply like the weight as stored, whatever their form and the rows beside?"""

import pytest
import torch

from tests.reference.ops import formulas
from tokamak.device.facts import cpu_facts
from tokamak.errors import NoBackendError
from tokamak.ops.case import tolerance_of
from tokamak.ops.linear import pack_linear
from tokamak.ops.linear.cases import ROWS, weight_cases
from tokamak.ops.linear.forms import FORMS, ByRows
from tokamak.ops.load import load_backends

load_backends()

DTYPES = (torch.float32, torch.bfloat16)


def forms_of(weight, dtype):
    return [form for form in FORMS if form.accepts(weight, dtype, cpu_facts())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", weight_cases, ids=str)
def test_every_form_multiplies_like_float64(case, dtype):
    weight = case.weight()

    for form in forms_of(weight, dtype):
        packed = form.make(weight, dtype)
        for count in (0, *ROWS):
            x = case.rows(count, dtype)
            expected = torch.from_numpy(formulas.linear(x, weight))
            found = packed(x)
            assert found.shape == (count, case.features)
            assert found.dtype == dtype
            gap = (found.double() - expected).abs().max().item() if count else 0.0
            # Rounding rows to 16 bits, or weights to bfloat16, costs more than rounding the result.
            limit = max(tolerance_of(dtype), {"rows": 3e-4, "weights": 0.06}.get(form.rounds, 0))
            assert gap <= limit, f"{form.name}, {count} rows"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", weight_cases, ids=str)
def test_compiled_kernels_give_a_row_the_same_bits_alone_and_in_any_batch(case, threads):
    weight, rows = case.weight(), case.rows(40, torch.float32)
    forms = [form for form in forms_of(weight, torch.float32) if form.name.startswith("llvm")]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    packed = [form.make(weight, torch.float32) for form in forms]
    together = [each(rows) for each in packed]
    alone = [torch.cat([each(rows[at : at + 1]) for at in range(40)]) for each in packed]
    pieces = [torch.cat([each(part) for part in rows.split([7, 3, 30])]) for each in packed]

    torch.set_num_threads(before)
    for all_rows, single, cut in zip(together, alone, pieces, strict=True):
        assert torch.equal(all_rows, single)
        assert torch.equal(all_rows, cut)


def test_codes_in_groups_become_the_numbers_of_the_file_exactly():
    for case in weight_cases:
        if case.kind.endswith("-wide"):
            continue  # code * scale is not exact in float32 there, and rounded at another point
        weight = case.weight()
        packed = pack_linear(weight, dtype=torch.float32, exact=True, facts=cpu_facts())

        unit = torch.eye(case.columns)

        assert torch.equal(packed(unit).T, weight.dense(torch.float32)), str(case)


def test_rows_with_gaps_between_them_are_read_where_they_lie():
    case = weight_cases[0]
    packed = pack_linear(case.weight(), dtype=torch.float32, exact=True, facts=cpu_facts())
    rows = case.rows(20, torch.float32)

    assert torch.equal(packed(rows[::2]), packed(rows[::2].contiguous()))
    assert torch.equal(packed(rows.T.contiguous().T), packed(rows))


def test_a_form_can_be_asked_for_by_name():
    weight = weight_cases[0].weight()

    packed = pack_linear(
        weight, dtype=torch.float32, exact=False, facts=cpu_facts(), prefer="dense"
    )

    assert packed.form == "dense"


def test_an_unknown_form_is_refused_with_the_names_there_are():
    weight = weight_cases[0].weight()

    with pytest.raises(NoBackendError, match="no form 'marlin'") as error:
        pack_linear(weight, dtype=torch.float32, exact=False, facts=cpu_facts(), prefer="marlin")

    assert "dense" in str(error.value.hint)


def test_exact_arithmetic_gets_no_form_that_rounds_and_heads_none_that_rounds_the_weight():
    weight = weight_cases[0].weight()
    refused = {
        (True, False): [form.name for form in FORMS if form.rounds != "nothing"],
        (False, True): [form.name for form in FORMS if form.rounds == "weights"],
    }

    for (exact, head), names in refused.items():
        assert names
        for name in names:
            with pytest.raises(NoBackendError):
                pack_linear(
                    weight,
                    dtype=torch.bfloat16,
                    exact=exact,
                    facts=cpu_facts(),
                    head=head,
                    prefer=name,
                )


def test_two_forms_share_the_work_by_rows():
    few, many = (lambda x: x + 1), (lambda x: x + 2)
    few.form, many.form = "few", "many"

    both = ByRows(few, many, border_rows=8)

    assert both(torch.zeros(8, 1))[0, 0] == 1
    assert both(torch.zeros(9, 1))[0, 0] == 2
    assert both.form == "few to 8 rows, many above"
