"""The implicit step of displaced weights, and the directions that are followed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heldin.rules.displacements import directions, solve
from tests.support.leave_one_out_runs import normal


@given(seed=st.integers(0, 10_000), q=st.integers(1, 6), b=st.integers(1, 3), d=st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_the_step_is_that_of_each_sample_in_weight_space(seed: int, q: int, b: int, d: int) -> None:
    """(I + P H_(-i)) D_i(new) = D_i + P g_i / M, solved for every sample on its own."""
    jacobian, moved = normal(q, b, d, seed=seed), normal(q, d, seed=seed + 1)
    root = normal(q, b, b, seed=seed + 2)
    curvature, residual = root @ root.transpose(1, 2), normal(q, b, seed=seed + 3)
    times = normal(d, seed=seed + 4).square()
    source, share = 0.3, 0.7
    gram = torch.einsum("jad,d,ibd->jaib", jacobian, times, jacobian)
    shift = torch.einsum("jad,id->jai", jacobian, moved)
    shifts, moves = solve(gram, shift, residual, curvature, source, share)
    for i in range(q):
        hessian = sum(
            (share * jacobian[j].T @ curvature[j] @ jacobian[j] for j in range(q) if j != i),
            torch.zeros(d, d, dtype=torch.float64),
        )
        system = torch.eye(d, dtype=torch.float64) + times[:, None] * hessian
        rhs = moved[i] + times * source * (jacobian[i].T @ residual[i])
        new = torch.linalg.solve(system, rhs)
        torch.testing.assert_close(shifts[:, :, i], jacobian @ new, rtol=1e-6, atol=1e-8)
        step = times * torch.einsum("jad,ja->d", jacobian, moves[:, :, i])
        torch.testing.assert_close(moved[i] + step, new, rtol=1e-6, atol=1e-8)


@given(seed=st.integers(0, 1000), c=st.integers(1, 6), count=st.integers(1, 6))
@settings(deadline=None, max_examples=30)
def test_directions_hold_the_slope_and_the_largest_bends(seed: int, c: int, count: int) -> None:
    root = normal(4, c, c, seed=seed)
    hessian, slope = root @ root.transpose(1, 2), normal(4, c, seed=seed + 1)
    basis = directions(slope, lambda v: torch.einsum("qab,qb->qa", hessian, v), count)
    b = min(c, count)
    assert basis.shape == (4, b, c)
    eye = torch.eye(b, dtype=torch.float64).expand(4, b, b)
    torch.testing.assert_close(basis @ basis.transpose(1, 2), eye, rtol=1e-6, atol=1e-8)
    inside = torch.einsum("qbc,qb->qc", basis, torch.einsum("qbc,qc->qb", basis, slope))
    torch.testing.assert_close(inside, slope)
    if 1 < b < c:  # the first leading eigenvectors lie within
        lead = torch.linalg.eigh(hessian).eigenvectors[:, :, 1 - b :]
        torch.testing.assert_close(
            basis.transpose(1, 2) @ (basis @ lead), lead, rtol=1e-6, atol=1e-8
        )
