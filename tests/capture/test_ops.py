"""Every fast rule against the generic path, on random shapes and layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import heldin
from heldin._private_torch import outputs_of
from heldin.capture.contributions import moments
from heldin.capture.layout import Layout
from heldin.capture.ops import OP_RULES, OpUse, contributions, generic
from heldin.capture.ops.conv import Filters

sizes = st.integers(1, 4)


@st.composite
def layouts(draw: Any, dims: int, dim: int, regular: bool = False) -> tuple[Layout, list[int]]:
    """A layout along one dimension, and the shape of the tensor that has it."""
    m = draw(st.integers(2, 4))
    shape = [draw(sizes) for _ in range(dims)]
    if regular or draw(st.booleans()):
        outer, inner = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        line = torch.arange(outer * m * inner) // inner % m
    else:
        length = draw(st.integers(m, 9))
        rest = draw(st.lists(st.integers(0, m - 1), min_size=length - m, max_size=length - m))
        line = torch.tensor(draw(st.permutations([*range(m), *rest])))
    shape[dim] = len(line)
    owner = line.reshape([-1 if d == dim else 1 for d in range(dims)])
    return Layout.from_owners(owner, shape, m), shape


def compare(out: Tensor, layout: Layout, argument: int, shape: Any, fast: bool = True) -> None:
    """The node of `out`, seen from one argument: rule against generic path."""
    node = out.grad_fn
    assert node is not None
    grads: list[Tensor | None] = [None] * len(outputs_of(node))
    places: list[Layout | None] = [None] * len(grads)
    grads[0], places[0] = torch.randn(out.shape), layout
    use = OpUse(node, grads, places, argument, tuple(shape))
    assert not fast or OP_RULES[node.name()](use) is not None, "the rule did not take the case"
    part, slow = contributions(use), generic(use)
    expected = slow.samples(0, layout.m)
    assert torch.allclose(part.samples(0, layout.m), expected, atol=1e-10)
    first, second = moments([part])
    assert torch.allclose(first, expected.sum(0), atol=1e-10)
    assert torch.allclose(second, expected.square().sum(0), atol=1e-10)
    twice = moments([part, contributions(use)])  # used twice: summed before squaring
    assert torch.allclose(twice[1], (2 * expected).square().sum(0), atol=1e-10)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.fixture(autouse=True, scope="module")
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


many = settings(max_examples=40, deadline=None)


@many
@given(layouts(2, 0), sizes, st.sampled_from([0, 1, 2]))
def test_addmm(case: Any, width: int, argument: int) -> None:
    layout, (n, out) = case
    x, w, b = torch.randn(n, width), leaf(width, out), leaf(out)
    shape: tuple[Any, ...]
    if argument == 1:  # the parameter is on the left: samples are columns
        layout = Layout.from_owners(layout.owner.reshape(1, -1), (out, n), layout.m)
        y, shape = torch.addmm(leaf(out, 1), leaf(out, width), x.t(), alpha=0.5), (out, width)
    else:
        y = torch.addmm(b, x, w, beta=2.0, alpha=0.5)
        shape = (width, out) if argument == 2 else (out,)
    compare(y, layout, argument, shape)


@many
@given(layouts(2, 0), sizes, st.sampled_from([0, 2]))
def test_sparse_addmm(case: Any, width: int, argument: int) -> None:
    layout, (n, out) = case
    x, w, b = torch.randn(n, width).relu().to_sparse(), leaf(width, out), leaf(n, out)
    y = torch.sparse.addmm(b, x, w, beta=2.0, alpha=0.5)
    compare(y, layout, argument, (width, out) if argument == 2 else (n, out))


@many
@given(layouts(2, 0), sizes, st.booleans())
def test_mm(case: Any, width: int, left: bool) -> None:
    layout, (n, out) = case
    x = torch.randn(n, width)
    if left:
        layout = Layout.from_owners(layout.owner.reshape(1, -1), (out, n), layout.m)
        compare(leaf(out, width) @ x.t(), layout, 0, (out, width))
    else:
        compare(x @ leaf(width, out), layout, 1, (width, out))


@many
@given(layouts(3, 1), sizes)
def test_bmm_over_rows(case: Any, width: int) -> None:
    layout, (b, n, out) = case
    compare(torch.bmm(torch.randn(b, n, width), leaf(b, width, out)), layout, 1, (b, width, out))


@many
@given(layouts(3, 2), sizes)
def test_bmm_over_columns(case: Any, width: int) -> None:
    layout, (b, out, n) = case
    compare(torch.bmm(leaf(b, out, width), torch.randn(b, width, n)), layout, 0, (b, out, width))


@many
@given(layouts(3, 0), sizes, st.sampled_from([0, 1]))
def test_bmm_over_products(case: Any, width: int, argument: int) -> None:
    layout, (b, n, out) = case
    x, w = torch.randn(b, n, width), torch.randn(b, width, out)
    parameter = (x if argument == 0 else w).requires_grad_()
    compare(torch.bmm(x, w), layout, argument, parameter.shape)


ELEMENTWISE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "add": (lambda p, x: torch.add(x, p, alpha=3), 1),
    "add, first": (lambda p, x: p + x, 0),
    "sub": (lambda p, x: torch.sub(x, p, alpha=3), 1),
    "sub, first": (lambda p, x: p - x, 0),
    "mul": (lambda p, x: x * p, 1),
    "mul, first": (lambda p, x: p * x, 0),
    "div": (lambda p, x: p / x, 0),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@many
@given(st.data())
def test_elementwise(name: str, data: Any) -> None:
    op, argument = ELEMENTWISE[name]
    dims = data.draw(st.integers(1, 3))
    layout, shape = data.draw(layouts(dims, data.draw(st.integers(0, dims - 1))))
    kept = data.draw(st.integers(0, dims))
    small = [s if data.draw(st.booleans()) else 1 for s in shape[kept:]]
    parameter = leaf(*small) if small else torch.randn((), requires_grad=True)
    compare(op(parameter, torch.randn(shape)), layout, argument, tuple(small))


@many
@given(st.data())
def test_expand(data: Any) -> None:
    dims = data.draw(st.integers(1, 3))
    dim = data.draw(st.integers(0, dims - 1))
    layout, shape = data.draw(layouts(dims, dim))
    small = [1 if d == dim or data.draw(st.booleans()) else s for d, s in enumerate(shape)]
    compare(leaf(*small).expand(shape), layout, 0, tuple(small))


@many
@given(layouts(3, 0), st.booleans(), st.sampled_from([1, 2]))
def test_layer_norm(case: Any, middle: bool, argument: int) -> None:
    layout, shape = case
    if middle:  # samples in the middle dimension
        shape = [shape[1], shape[0], shape[2]]
        layout = Layout.from_owners(layout.owner.transpose(0, 1), shape, layout.m)
    w, b = leaf(shape[2]), leaf(shape[2])
    compare(F.layer_norm(torch.randn(shape), (shape[2],), w, b), layout, argument, (shape[2],))


@many
@given(layouts(4, 0), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_group_norm(case: Any, groups: int, argument: int) -> None:
    layout, shape = case
    shape[1] *= groups
    layout = Layout.from_owners(layout.owner, shape, layout.m)
    w, b = leaf(shape[1]), leaf(shape[1])
    compare(F.group_norm(torch.randn(shape), groups, w, b), layout, argument, (shape[1],))


@many
@given(layouts(3, 0), st.booleans(), st.sampled_from([1, 2]))
def test_batch_norm(case: Any, training: bool, argument: int) -> None:
    layout, shape = case
    c = shape[1]
    mean, var, w, b = torch.randn(c), torch.rand(c) + 0.5, leaf(c), leaf(c)
    out = F.batch_norm(torch.randn(shape), mean, var, w, b, training)
    compare(out, layout, argument, (c,))


@many
@given(layouts(3, 0))
def test_prelu(case: Any) -> None:
    layout, shape = case
    weight = leaf(shape[1])
    out = F.prelu(torch.randn(shape), weight)
    compare(out, layout, 1, (1, shape[1], 1))


@many
@given(st.data(), st.booleans(), st.integers(1, 3), st.sampled_from([1, 2]))
def test_convolution(data: Any, transposed: bool, dims: int, argument: int) -> None:
    layout, shape = data.draw(layouts(2 + dims, 0))
    groups, a, b = (data.draw(st.integers(1, 2)) for _ in range(3))
    kernel, stride, dilation = (data.draw(st.integers(1, 2)) for _ in range(3))
    padding = data.draw(st.integers(0, 1))
    x = torch.randn(shape[0], groups * a, *[4] * dims)
    first, second = (groups * a, b) if transposed else (groups * b, a)
    weight, bias = leaf(first, second, *[kernel] * dims), leaf(groups * b)
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    out = getattr(F, name)(
        x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    layout = Layout.from_owners(layout.owner, out.shape, layout.m)
    compare(out, layout, argument, weight.shape if argument == 1 else bias.shape)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.integers(3, 7)
)
def test_one_place_of_a_kernel(
    kernel: int, stride: int, padding: int, dilation: int, size: int
) -> None:
    """Looking at one place of the filters gives what looking at all of them gives there."""
    if size + 2 * padding < dilation * (kernel - 1) + 1:
        return
    x = torch.randn(3, 2, 2, size, size + 1)
    named = {"stride": stride, "padding": padding, "dilation": dilation}
    out = F.conv2d(x.flatten(0, 1), torch.randn(4, 2, kernel, kernel), **named)  # type: ignore[call-overload]
    grad = torch.randn(out.shape).unflatten(0, (3, 2))
    whole = Filters(grad, x, (kernel, kernel), {k: [v, v] for k, v in named.items()})
    expected = whole.samples(0, 3)
    for u in range(kernel):
        for v in range(kernel):
            block = (slice(1, 3), slice(0, 1), slice(u, u + 1), slice(v, v + 1))
            assert torch.allclose(
                whole.restrict(block).samples(0, 3), expected[(slice(None), *block)]
            )


@many
@given(st.data(), st.integers(1, 3), st.sampled_from([None, 0, 2]))
def test_embedding(data: Any, dims: int, padding: int | None) -> None:
    layout, shape = data.draw(layouts(dims + 1, data.draw(st.integers(0, dims - 1))))
    table = leaf(5, shape[-1])
    out = F.embedding(torch.randint(0, 5, shape[:-1]), table, padding_idx=padding)
    compare(out, layout, 0, table.shape)


def test_every_rule_is_compared() -> None:
    names = {
        "AddmmBackward0", "MmBackward0", "BmmBackward0", "AddBackward0", "SubBackward0",
        "MulBackward0", "DivBackward0", "ExpandBackward0", "NativeLayerNormBackward0",
        "NativeGroupNormBackward0", "NativeBatchNormBackward0", "PreluKernelBackward0",
        "ConvolutionBackward0", "EmbeddingBackward0", "SparseAddmmBackward0",
    }  # fmt: skip
    ours = {
        name for name, rule in OP_RULES.items() if rule.__module__.startswith("heldin.capture.ops.")
    }
    assert ours == names, "a new rule needs a comparison with the generic path in this file"


def test_a_rule_of_the_user() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.atan2(self.w, x)

    model, x = Model(), torch.randn(4, 3, dtype=torch.float64)
    calls = []

    @heldin.ops.register_op_rule("Atan2Backward0")
    def atan2(use: heldin.ops.OpUse) -> Any:
        calls.append(use.argument)
        w, x = use.saved("self"), use.saved("other")
        return use.per_sample_sum(use.grad * x / (w * w + x * x))

    try:
        assert heldin.verify(model, lambda: model(x).sin().sum()).ok
    finally:
        del OP_RULES["Atan2Backward0"]
    assert calls == [0]
    assert heldin.verify(model, lambda: model(x).sin().sum()).ok  # the generic path
