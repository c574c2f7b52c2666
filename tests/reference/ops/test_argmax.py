"""Does the search for the highest logit find NumPy's, the lowest id among equals and a NaN before all?"""

import numpy as np
import pytest
import torch

from tokamak.device.facts import cpu_facts
from tokamak.ops.load import load_backends
from tokamak.ops.sample import argmax_rows
from tokamak.ops.sample.cases import argmax_rows_cases

load_backends()
CALLS = [argmax_rows.reference, *(b.call for b in argmax_rows.backends if b.fits(cpu_facts()))]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", argmax_rows_cases, ids=str)
def test_token_ids_and_peaks_are_those_of_numpy(call, case):
    (logits,) = case.make()
    numbers = logits.float().numpy()
    expected = numbers.argmax(axis=1)

    token_ids, peaks = call(logits)

    assert token_ids.dtype == torch.int64
    assert np.array_equal(token_ids.numpy(), expected)
    np.testing.assert_array_equal(peaks.numpy(), numbers[np.arange(len(numbers)), expected])
