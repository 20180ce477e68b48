"""The names of PyTorch that it does not promise to keep: one test each, which says what broke."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heldin import _private_torch as private

SOURCE = Path(private.__file__).parent
# torch._x, torch.x._y, from torch._x, from torch.x import _y, and what stands on nodes and tensors
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!dynamo|_)\w+|^from torch\S* import .*\b_[a-zA-Z]\w*"
    r"|\._(raw_)?saved_|\._input_metadata|\._sequence_nr|\._backward_hooks|\._version\b"
    r"|\b(?!self)\w+\._parameters\b|\._forward_(pre_)?hooks",
    re.MULTILINE,
)


def test_private_names_stand_in_one_module() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {match[0]}"
        for path in SOURCE.rglob("*.py")
        if path.name != "_private_torch.py" and "lab" not in path.parts
        for match in PRIVATE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def linear_node() -> tuple[Any, Tensor, Tensor]:
    weight, x = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3)
    return F.linear(x, weight).grad_fn, weight, x


def test_saved() -> None:
    node = torch.randn(3, requires_grad=True).exp().grad_fn
    assert private.saved(node, "result").shape == (3,)
    assert private.saved(node, "none_such", 7) == 7


def test_raw_saved() -> None:
    node = torch.randn(3, requires_grad=True).exp().grad_fn
    private.raw_saved(node, "result").register_hooks(lambda t: t, lambda t: t + 1)
    assert private.raw_saved(node, "none_such") is None


def test_all_raw_saved() -> None:
    node, _, _ = linear_node()
    assert private.all_raw_saved(node)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * grad * ctx.saved_tensors[0]

    node = Square.apply(torch.ones(2, requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]
    assert private.all_raw_saved(node)


def test_saved_names() -> None:
    node = torch.randn(3, 4, requires_grad=True).sum(1).grad_fn
    assert "dim" in private.saved_names(node)


def test_outputs_of() -> None:
    node, _, _ = linear_node()
    (output,) = private.outputs_of(node)
    assert (tuple(output.shape), output.dtype, output.device.type) == ((4, 2), torch.float32, "cpu")


def test_sequence_number() -> None:
    (first, *_), (second, *_) = linear_node(), linear_node()
    assert private.sequence_number(first) < private.sequence_number(second)


def test_version_of() -> None:
    tensor = torch.zeros(2)
    before = private.version_of(tensor)
    tensor.add_(1)
    assert private.version_of(tensor) == before + 1


def test_gradient_hooks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not private.gradient_hooks(leaf)
    leaf.register_hook(lambda grad: 2 * grad)
    assert len(private.gradient_hooks(leaf) or {}) == 1


def test_own_parameters() -> None:
    layer = nn.Linear(2, 2)
    private.own_parameters(layer)["weight"] = nn.Parameter(torch.zeros(2, 2))
    assert not layer.weight.any()


def test_forward_hooks() -> None:
    layer = nn.Linear(2, 2)
    assert private.forward_hooks(layer) == []
    layer.register_forward_hook(lambda *_: None)
    layer.register_forward_pre_hook(lambda *_: None)
    assert len(private.forward_hooks(layer)) == 2


def test_is_called_by_ddp() -> None:
    assert not private.is_called_by_ddp()


def test_decompositions() -> None:
    assert torch.ops.aten.addcmul.default in private.decompositions()


def test_any_autocast() -> None:
    assert not private.any_autocast()
    with torch.autocast("cpu"):
        assert private.any_autocast()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace`:DeprecationWarning")
def test_tracing_state() -> None:
    assert private.tracing_state() is None
    seen = []

    def noting(x: Tensor) -> Tensor:
        seen.append(private.tracing_state())
        return x + 1

    torch.jit.trace(noting, torch.ones(2), check_trace=False)
    assert seen[0] is not None


def test_transform_stack_and_wrapped_tensors() -> None:
    seen = []

    def noting(x: Tensor) -> Tensor:
        seen.append((private.transform_stack(), private.is_wrapped_by_transform(x)))
        return x.sum()

    torch.func.vmap(noting)(torch.ones(2, 3))
    assert seen[0][0] is not None
    assert seen[0][1]
    assert private.transform_stack() is None


def test_is_batched_by_vmap() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(
        lambda grad: seen.append(
            private.is_batched_by_vmap(grad) or private.is_wrapped_by_transform(grad)
        )
    )
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert seen == [True]
    assert not private.is_batched_by_vmap(x)


class Counting(private.TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.depths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.depths.append(private.dispatch_depth())
        return func(*args, **(kwargs or {}))


def test_modes() -> None:
    assert private.current_mode() is None
    with Counting() as outer, Counting() as inner:
        torch.ones(2)
        assert private.current_mode() is inner
        with private.without_modes():
            torch.ones(2)
        assert private.pop_mode() is inner
        torch.ones(2)
        private.push_mode(inner)
    assert inner.depths == [1]  # its own mode is off inside, the outer one is not
    assert len(outer.depths) == 2


def test_graph_task_id() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda grad: seen.append(private.graph_task_id()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen[0] < seen[1]
    assert private.graph_task_id() < 0


def test_disable_torch_function() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError("called")

    loud = torch.ones(2).as_subclass(Loud)
    with private.DisableTorchFunction():
        assert torch.add(loud, 1).shape == (2,)


def test_batch_norm() -> None:
    assert isinstance(nn.BatchNorm1d(2), private.BatchNorm)
    assert isinstance(nn.SyncBatchNorm(2), private.BatchNorm)


def test_norms() -> None:
    parts = torch.tensor([1.0, -2.0, 3.0, float("nan")]).split([2, 1, 1])
    assert [float(each) for each in private.norms(parts, 1)[:2]] == [3.0, 3.0]
    largest = private.norms(parts, float("inf"))
    assert float(largest[0]) == 2.0
    assert bool(largest[2].isnan())
