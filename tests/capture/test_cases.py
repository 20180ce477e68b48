"""Every case, on two batches in a row, against one backward pass per sample."""

from __future__ import annotations

import pytest
import torch

import heldin
from tests.support.cases import CASES, Case
from tests.support.machine import supported
from tests.support.truth import observe_once

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
]


def compare(case: Case, dtype: torch.dtype, tolerance: float, floor: float) -> None:
    torch.manual_seed(len(case.name))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = case.make()
        with (
            supported(lambda: case.losses(model, *case.batch()).sum().backward()),
            heldin.observe(model, **case.options) as seen,
        ):
            for step in range(3):
                worst = observe_once(seen, model, case.losses, case.batch(), floor)
                assert max(worst.values()) < tolerance, (step, worst)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("case", [c for c in CASES if c.exact], ids=repr)
def test_exact_in_float64(case: Case) -> None:
    compare(case, torch.float64, 1e-9, 1e-12)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_close_in_float32(case: Case) -> None:
    compare(case, torch.float32, 2e-4, 1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.autocast], ids=repr)
def test_close_under_autocast(case: Case) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        compare(case, torch.float32, 1e-1, 1e-2)
