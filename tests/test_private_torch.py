"""The names of PyTorch that it does not promise to keep: one test each, which says what broke."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed.algorithms.join
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from heldin import _private_torch as private


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
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.saved_tensors[0]

    out = Square.apply(torch.ones(2, requires_grad=True))
    assert private.all_raw_saved(out.grad_fn)  # 2.10: only while the graph is alive


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


def test_versions_of() -> None:
    tensors = [torch.zeros(2), torch.ones(3).mul_(2)]
    assert private.versions_of(tensors) == [private.version_of(tensor) for tensor in tensors]
    with torch.inference_mode():
        assert private.versions_of([torch.zeros(2).add_(1)]) == [0]


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


def test_tree_map() -> None:
    tree = {"a": [torch.ones(2), 3], "b": (torch.zeros(1),)}
    doubled = private.tree_map(lambda t: 2 * t, tree)
    assert doubled["a"][0].tolist() == [2.0, 2.0]
    assert doubled["a"][1] == 3
    assert doubled["b"][0].tolist() == [0.0]


def test_any_autocast() -> None:
    assert not private.any_autocast()
    with torch.autocast("cpu"):
        assert private.any_autocast()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace`")  # FutureWarning from 2.15 on
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


class Counting(private.TorchDispatchMode):
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


def test_compiled_parts() -> None:
    class Net(nn.Module):
        def __init__(self, whole: bool = False) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.middle = torch.compile(torch.relu, backend="eager") if whole else torch.relu

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.middle(self.inner(x)))

    class Decorated(Net):
        forward = torch.compile(Net.forward, backend="eager")

    compiled = torch.compile(Net(), backend="eager")
    assert not private.compiled_parts(Net())
    for model in (Net(True), nn.Sequential(Net(True)), Decorated(), compiled):
        assert private.compiled_parts(model)  # type: ignore[arg-type]
    inside = nn.Sequential(Net())
    inside[0].inner.compile(backend="eager")
    assert private.compiled_parts(inside)


def test_compiled_whole() -> None:
    model, calls = nn.Linear(2, 2), []
    assert private.compiled_whole(model) is None
    model.compile(backend="eager")
    whole = private.compiled_whole(model)
    assert whole is not None
    private.set_compiled_whole(model, lambda x: calls.append(x))
    model(torch.ones(1, 2))
    assert len(calls) == 1
    private.set_compiled_whole(model, None)
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_batch_norm() -> None:
    assert isinstance(nn.BatchNorm1d(2), private.BatchNorm)
    assert isinstance(nn.SyncBatchNorm(2), private.BatchNorm)


def test_norms() -> None:
    parts = torch.tensor([1.0, -2.0, 3.0, float("nan")]).split([2, 1, 1])
    assert [float(each) for each in private.norms(parts, 1)[:2]] == [3.0, 3.0]
    largest = private.norms(parts, float("inf"))
    assert float(largest[0]) == 2.0
    assert bool(largest[2].isnan())


def test_dropout() -> None:
    assert isinstance(nn.Dropout(), private.Dropout)
    assert isinstance(nn.AlphaDropout(), private.Dropout)


def test_storage_number() -> None:
    first, second = torch.zeros(4), torch.zeros(4)
    assert private.storage_number(first) == private.storage_number(first[2:])
    assert private.storage_number(first) != private.storage_number(second)


def test_viewed_by() -> None:
    whole = torch.zeros(4)
    assert private.viewed_by(whole[1:][1:]) is whole
    assert private.viewed_by(whole) is None


def test_own_buffers() -> None:
    layer = nn.BatchNorm1d(2)
    private.own_buffers(layer)["running_mean"] = torch.ones(2)
    assert layer.running_mean is not None
    assert layer.running_mean.tolist() == [1, 1]


def test_is_joining() -> None:
    """As `Join` leaves it on what it was given, with and without `enable`."""
    config = torch.distributed.algorithms.join._JoinConfig
    model = nn.Linear(2, 2)
    assert not private.is_joining(model)
    for enable in (True, False):
        vars(model)["_join_config"] = config(enable, False, True)
        assert private.is_joining(model) is enable
    source = inspect.getsource(torch.distributed.algorithms.join.Join)
    assert "joinable._join_config = " in source


def test_schema_of() -> None:
    schema = private.schema_of(torch.ops.aten.add_.Tensor)
    assert [a.name for a in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[0].alias_info.is_write
    assert schema.returns[0].alias_info is not None


def test_overload_of() -> None:
    assert private.overload_of(torch.ops.aten.add.Tensor) == "Tensor"
    assert private.overload_of(torch.ops.aten.relu.default) == "default"


def test_adopt_hooks() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.defaults = inner, inner.defaults
            self.param_groups, self.state = inner.param_groups, inner.state
            private.adopt_hooks(self, inner)

        def step(self, closure: Any = None) -> Any:
            self.inner.step()

    weight = torch.ones(1, requires_grad=True)
    inner, seen = torch.optim.SGD([weight], lr=0.1), []
    wrapper = Wrapper(inner)
    inner.register_state_dict_pre_hook(lambda *_: seen.append("saved"))
    inner.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    wrapper.register_step_pre_hook(lambda *_: seen.append("before"))
    wrapper.register_step_post_hook(lambda *_: seen.append("after"))
    wrapper.step()
    inner.step()  # no hooks of its own
    wrapper.load_state_dict(wrapper.state_dict())
    assert seen == ["before", "after", "saved", "loaded"]


def test_iterator_method() -> None:
    loader = DataLoader(TensorDataset(torch.ones(4)))
    plain = getattr(type(loader), private.ITERATOR_METHOD)
    assert len(list(plain(loader))) == 4
    vars(loader)[private.ITERATOR_METHOD] = lambda: iter([1])
    assert list(loader) == [1]


def test_is_inner_step() -> None:
    seen = []

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    optimizer = Outer([torch.zeros(1, requires_grad=True)], 0.1)
    optimizer.register_step_post_hook(lambda opt, _, __: seen.append(private.is_inner_step(opt)))
    optimizer.step()
    assert seen == [True, False]


def test_pin_memory() -> None:
    class Batch:
        pinned = False

        def pin_memory(self) -> Batch:
            self.pinned = True
            return self

    assert private.pin_memory([Batch()])[0].pinned


def test_after_backward() -> None:
    ended: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda _: private.after_backward(lambda: ended.append(x.grad is not None)))
    y.sum().backward()
    assert ended == [True]
