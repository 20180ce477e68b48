"""Tensors of batches of any kind: which there are, and their values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from heldin.loop.batches import (
    Along,
    Listed,
    Shared,
    equal,
    find_layout,
    fingerprint,
    is_sliceable,
    layout_of_tensors,
    rows_in,
    select,
    strided,
    tensors_in,
)


class Graph:
    """A batch of graphs that can be called, as those of torch_geometric can."""

    def __init__(self, **tensors: Any) -> None:
        self.tensors = tensors

    def __call__(self, name: str) -> Any:
        return self.tensors[name]


def test_objects_that_can_be_called_have_tensors() -> None:
    nodes, edges = torch.ones(5, 2), torch.zeros(2, 7)
    batch = [Graph(nodes=nodes), {"more": Graph(edges=edges)}]
    assert [id(t) for t in tensors_in(batch)] == [id(nodes), id(edges)]


def test_functions_and_modules_are_not_searched() -> None:
    scale = torch.ones(3)
    functions = [nn.Linear(2, 2), partial(torch.mul, scale), torch.mul, scale.mul, Graph]
    assert not list(tensors_in(functions))


class Named(torch.Tensor):
    """A tensor that refuses to be sliced, as those of MONAI do if their names differ."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            raise ValueError("inconsistent names")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensors_of_another_kind_are_compared_by_their_values() -> None:
    values = torch.arange(40.0).reshape(4, 10)
    one, other = values.as_subclass(Named), values.clone().as_subclass(Named)
    assert fingerprint(one) == fingerprint(values)
    assert equal(one, other)
    assert not equal(one, (values + 1).as_subclass(Named))


def test_where_samples_lie() -> None:
    sample = {"x": torch.ones(4), "name": "a", "y": 1.0}
    layout: Any = find_layout(default_collate, sample)
    assert layout == {"x": Along(0), "name": Listed(), "y": Along(0)}
    assert find_layout(torch.cat, torch.ones(4)) is None  # samples of four numbers in one row
    assert find_layout(lambda items: torch.stack(items, 1), torch.ones(4)) == Along(1)
    assert layout_of_tensors((torch.ones(3, 2), torch.ones(5, 5)), 3) == {0: Along(0), 1: Shared()}
    assert rows_in((torch.ones(7, 4),), {0: Along(1)}) == 4
    assert rows_in(default_collate([sample] * 3), layout) == 3
    batch = {"ids": torch.arange(6).view(3, 2), "mask": torch.ones(2, 2)}
    part = select(batch, {"ids": Along(0), "mask": Shared()}, torch.tensor([2]))
    assert part["ids"].tolist() == [[4, 5]]
    assert part["mask"] is batch["mask"]


def test_a_collate_function_that_sorts_is_not_sliceable() -> None:
    def sort(items: Any) -> Any:
        return default_collate(sorted(items, key=lambda item: -item[1]))

    items = [(torch.ones(2) * i, i) for i in range(4)]
    layout = find_layout(default_collate, items[0])
    assert is_sliceable(default_collate, items, default_collate(items), layout)
    assert not is_sliceable(sort, items, sort(items), layout)


def test_structure_and_values_are_compared() -> None:
    assert equal({"x": torch.ones(2), "n": 3}, {"x": torch.ones(2), "n": 3})
    assert equal(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not equal([torch.ones(2)], [torch.ones(3)])
    assert equal(float("nan"), float("nan"))
    assert not equal(float("nan"), 1.0)
    other = object()
    assert not equal([other], [other])
    assert equal([other], [other], objects=True)
    parts = strided(torch.tensor([0.0, 2.0]).to_sparse())
    assert [part.tolist() for part in parts] == [[[1]], [2.0]]
