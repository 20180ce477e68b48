"""Tensors of batches of any kind: which there are, and their values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from heldin.loop.batches import equal, fingerprint, tensors_in


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
