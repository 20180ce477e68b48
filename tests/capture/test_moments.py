"""Sums of ratios: in rows, in pieces and one by one they are what `snr` says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import heldin
from heldin.capture import moments
from heldin.capture.moments import ratio_sums, smallest_square, snr


def expected(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> list[float]:
    live = squares >= smallest_square(squares.dtype)
    values = total.square() / squares if symmetric else snr(total, squares, count)
    return [float(values[live].sum()), float(live.sum()), float(squares.max())]


def some(shape: list[int], count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    each = torch.randn(count, *shape, generator=random, dtype=torch.float64)
    each *= torch.rand(shape, generator=random, dtype=torch.float64) > 0.3  # some are dead
    return each.sum(0), each.square().sum(0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(2, 9),
    st.booleans(),
    st.integers(0, 999),
    st.sampled_from([4, 40, 1 << 13]),
)
def test_sums_of_ratios(
    shapes: list[list[int]], count: int, symmetric: bool, seed: int, small: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    pairs = [some(shape, count, random) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "SMALL", small)
        patch.setattr(moments, "PIECE", 16)
        found = ratio_sums(pairs, count, symmetric)
    for row, (total, squares) in zip(found.tolist(), pairs, strict=True):
        truth = expected(total, squares, count, symmetric)
        rounding = max(1e-9, 1e-15 * truth[0])  # a large ratio is what a difference leaves
        assert row == pytest.approx(truth, rel=rounding)


@pytest.mark.parametrize("size", [3, 1 << 18])
def test_a_variance_lost_in_rounding_gives_a_large_ratio(size: int) -> None:
    total, squares = torch.full((size,), 8.0), torch.full((size,), 8.0)  # eight times one
    ((summed, live, _),) = ratio_sums([(total, squares)], 8).tolist()
    assert live == size
    assert summed / size > 1e6


@pytest.mark.parametrize("size", [3, 1 << 18])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_seen_also_where_it_cancels(size: int, bad: float) -> None:
    total, squares = torch.zeros(size), torch.ones(size)
    squares[-1] = bad
    fine = heldin.Moments(torch.ones(2), torch.ones(2), 4)
    found = heldin.evidence({"fine": fine, "bad": heldin.Moments(total, squares, 4)})
    assert found.nonfinite == ("bad",)
    assert found.groups.keys() == {"fine"}


def test_parameters_of_several_precisions_and_none_at_all() -> None:
    single = heldin.Moments(torch.ones(2), torch.full((2,), 2.0), 4)
    double = heldin.Moments(torch.ones(2).double(), torch.full((2,), 2.0).double(), 4)
    empty = heldin.Moments(torch.ones(0), torch.ones(0), 4)
    found = heldin.evidence({"single": single, "double": double, "empty": empty})
    assert found.groups["single"] == pytest.approx(found.groups["double"])
    assert "empty" not in found.groups
    assert math.isnan(heldin.evidence({"empty": empty}).criterion)


def test_sums_that_are_handed_out_are_not_written_again() -> None:
    """A rule may use the memory of its sums again; an observation of the user's never does."""
    model, x = nn.Linear(40, 30), torch.randn(8, 40)
    with heldin.observe(model) as seen:
        model(x).square().sum().backward()
        kept: Any = seen["weight"]
        before = kept.total.clone(), kept.squares.clone()
        seen.clear()
        model(-2 * x).square().sum().backward()
    assert torch.equal(kept.total, before[0])
    assert torch.equal(kept.squares, before[1])
