"""Numbers that show a change of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heldin.loop.changes import checksums, marks_of


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_see_what_versions_do_not(dtype: torch.dtype) -> None:
    tensors = [torch.rand(3, 4).to(dtype), torch.rand(5).to(dtype)]
    sums, marks = checksums(tensors), marks_of(tensors)
    tensors[1].data.mul_(1.5)
    assert marks_of(tensors) == marks
    assert not same(checksums(tensors), sums)
    tensors[1].data.div_(1.5)
    assert same(checksums(tensors), sums) or dtype == torch.bfloat16


def test_sums_depend_on_places_and_signs() -> None:
    tensor = torch.tensor([1.0, 2.0, -3.0])
    for other in (tensor.flip(0), -tensor):
        assert not same(checksums([tensor]), checksums([other]))


def test_nan_is_the_same_as_nan() -> None:
    tensor = torch.tensor([1.0, float("nan")])
    assert same(checksums([tensor]), checksums([tensor.clone()]))


def test_marks_see_writes_and_other_objects() -> None:
    tensor, step = torch.zeros(2), 3
    marks = marks_of([tensor, step, None])
    assert marks_of([tensor, step, None]) == marks
    assert marks_of([tensor.clone(), step, None]) != marks
    assert marks_of([tensor, 4, None]) != marks
    assert marks_of([tensor.add_(1), step, None]) != marks
