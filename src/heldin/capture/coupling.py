"""Whether a loss couples the samples of a batch.

A loss that adds up over samples is linear in what depends on several of them. So its graph is
walked from the loss down, through sums and other linear ops, until every element depends on one
sample again. An op on the way that is not linear has coupled samples: a root of a mean, a hinge of
a difference of two, a distance between them. That also finds what no second derivative shows. Ops
that hide their inside are looked at through their second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from heldin._private_torch import outputs_of

from .graph import LEAF, Graph, shape_of
from .reference import Output

__all__ = ["couples"]

PROBES = 6  # elements of a tensor that are tested one by one: on which samples do they depend?
LARGE = 1 << 22  # of a tensor with so many elements only two are tested, not all
ROUNDS = 3  # of the test that all elements take at once
# Linear in all inputs together.
_LINEAR = {
    "Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Nansum", "View", "Squeeze", "Unsqueeze", "Expand",
    "Select", "Slice", "Index", "IndexSelect", "Gather", "Cat", "Stack", "ToCopy", "Clone", "Alias",
    "Permute", "T", "Transpose", "Split", "SplitWithSizes", "UnsafeSplit", "Unbind", "Repeat",
    "Diagonal", "DiagonalBackward", "Tril", "Triu", "Trace", "Cumsum", "IndexAdd", "ScatterAdd",
    "Scatter", "IndexPut", "IndexPutImpl", "MaskedFill", "MaskedSelect", "MaskedScatter", "Where",
    "Flip", "Roll", "ConstantPadNd", "CopySlices", "CopyBackwards", "AsStrided", "Copy", "Take",
    "Movedim", "RepeatInterleave", "Unfold", "IndexCopy", "IndexFill", "Lift", "Detach", "Fill",
    "NanToNum", "Real", "Imag", "ViewAsReal", "ViewAsComplex", "Conj", "SelectScatter",
    "SliceScatter", "DiagEmbed", "ConvertElementType", "Contiguous", "Reshape",
}  # fmt: skip
# Linear in each input: in all together if only one of them depends on samples.
_BILINEAR = {"Mul", "Div", "Mm", "Bmm", "Addmm", "Mv", "Dot", "Addmv", "Baddbmm", "Lerp", "Outer"}
# Sums over the elements of a function of each, or over rows of one of each row.
_SEPARABLE = {
    "MseLoss", "SmoothL1Loss", "HuberLoss", "L1Loss", "NllLoss", "NllLoss2D", "NllLossNd",
    "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "SoftMarginLoss", "MultiMarginLoss",
    "MultilabelMarginLoss", "CtcLoss", "KlDiv", "CrossEntropyLoss",
}  # fmt: skip


def couples(graph: Graph, roots: Sequence[Any], outputs: Sequence[Output]) -> str | None:
    """The op in which a loss couples samples; None if it does not.

    Args:
        graph: of the backward pass.
        roots: the loss, or several.
        outputs: the last tensors whose rows have owners.
    """
    found = _by_structure(graph, outputs) if outputs else None
    if found is None and outputs and _by_curvature(roots, outputs):
        found = "the loss"
    return found


def _by_structure(graph: Graph, outputs: Sequence[Output]) -> str | None:
    ends = {(graph.index[edge.node], edge.output_nr) for edge, _ in outputs}
    above = _above(graph, {position for position, _ in ends})
    parents = graph.parents
    stack = [i for i in above if not parents[i] and i not in {p for p, _ in ends}]
    seen = set(stack)
    while stack:
        at = stack.pop()
        name = _plain(graph.names[at])
        below = [pair for pair in graph.children[at] if pair[0] in above]
        inside = [pair for pair in below if pair not in ends]
        if name in _LINEAR or (
            name in _BILINEAR and len(below) < 2 and _divisor_is_free_of_samples(graph, at)
        ):
            fresh = [child for child, _ in inside if child not in seen]
            seen.update(fresh)
            stack.extend(fresh)
            continue
        # the derivative of a hinge may be zero at this point, so its inputs are tested, too
        asked = inside if name in _SEPARABLE and len(set(below)) < 2 else [*inside, (at, 0)]
        if _is_opaque(graph.nodes[at]):
            asked = inside
        if any(_is_mixed(graph, child, number, outputs) for child, number in asked):
            return graph.names[at]
    return None


def _plain(name: str) -> str:
    return name.rstrip("0123456789").removesuffix("Backward").rsplit("::", 1)[-1]


def _divisor_is_free_of_samples(graph: Graph, at: int) -> bool:
    """True unless this is a division whose divisor depends on samples."""
    return (
        _plain(graph.names[at]) != "Div"
        or len(graph.children[at]) < 2
        or (graph.children[at][1][0] < 0)
    )


def _is_opaque(node: Any) -> bool:
    """Whether it is a function of the user's, which may sum over samples or not."""
    return not callable(node)


def _above(graph: Graph, starts: set[int]) -> set[int]:
    """The nodes that depend on some of these, and these."""
    above, stack = set(starts), list(starts)
    while stack:
        for parent in graph.parents[stack.pop()]:
            if parent not in above:
                above.add(parent)
                stack.append(parent)
    return above


def _is_mixed(graph: Graph, at: int, number: int, outputs: Sequence[Output]) -> bool:
    """Whether an element depends on several samples: a few are asked one by one, all at once."""
    node = graph.nodes[at]
    if graph.names[at] == LEAF:
        return False
    shape, given = shape_of(node, number), outputs_of(node)[number]
    size = 1
    for each in shape:
        size *= each
    if size == 0:
        return False
    random = torch.Generator().manual_seed(0)
    few = PROBES if size < LARGE else 2
    places = torch.randint(0, size, (few,), generator=random) if size > few else torch.arange(size)
    edges = [edge for edge, _ in outputs]
    for place in places.tolist():
        probe = torch.zeros(size, dtype=given.dtype, device=given.device)
        probe[place] = 1
        try:
            grads: Sequence[Tensor | None] = torch.autograd.grad(
                [GradientEdge(node, number)], edges, [probe.reshape(shape)],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
        except RuntimeError:
            return False
        owners: set[int] = set()
        for grad, (_, layout) in zip(grads, outputs, strict=True):
            if grad is not None:
                touched = (grad != 0) & grad.isfinite()
                owner = layout.owner_on(grad.device).expand(grad.shape)
                owners.update(owner[touched].unique().tolist())
        if len(owners) > 1:
            return True
    if few < size < LARGE:
        return _is_mixed_somewhere(GradientEdge(node, number), shape, given, outputs)
    return False


def _is_mixed_somewhere(
    edge: GradientEdge, shape: Sequence[int], given: Any, outputs: Sequence[Output]
) -> bool:
    """Whether any element depends on several samples.

    With a(d) for the change of an element when the outputs of sample s change by d[s], one that
    depends on a single sample has a(d d) a(1) = a(d)^2; two or more differ by their parts times the
    squared differences of their d. Changes are derivatives of the backward pass, which is linear.
    What cannot be differentiated twice is given the benefit of the doubt.
    """
    if given.dtype.is_complex:
        return False
    random = torch.Generator().manual_seed(0)
    seed = torch.ones(tuple(shape), dtype=given.dtype, device=given.device, requires_grad=True)
    try:
        backward = torch.autograd.grad(
            [edge], [e for e, _ in outputs], [seed], create_graph=True, allow_unused=True
        )
        pairs = zip(backward, outputs, strict=True)
        linear = [(g, o) for g, (_, o) in pairs if g is not None and g.requires_grad]
        if not linear or any(grad.is_complex() for grad, _ in linear):
            return False
        probes = [1 + torch.rand(g.shape, generator=random, dtype=torch.float32) for g, _ in linear]

        def change(factors: Tensor) -> Tensor:
            sizes = [
                (p * factors[layout.owner]).to(grad.device, grad.dtype)
                for p, (grad, layout) in zip(probes, linear, strict=True)
            ]
            grads = [grad for grad, _ in linear]
            return torch.autograd.grad(grads, [seed], sizes, retain_graph=True)[0].detach()

        m = outputs[0][1].m
        plain = change(torch.ones(m)).nan_to_num(0.0, 0.0, 0.0)
        tolerance = torch.finfo(given.dtype).eps ** 0.4
        felt = plain.abs() > tolerance * plain.abs().amax()  # others may be rounding noise
        for _ in range(ROUNDS):
            digits = 2.0 ** torch.randint(0, 6, (m,), generator=random)
            once, twice = change(digits), change(digits.square()) * plain
            apart = (twice - once.square()).abs() > tolerance * (twice.abs() + once.square())
            if bool((apart & felt & once.isfinite() & twice.isfinite()).any()):
                return True
    except RuntimeError:
        pass
    return False


def _by_curvature(roots: Sequence[Any], outputs: Sequence[Output]) -> bool:
    """Whether the loss depends on several samples jointly: its Hessian couples their outputs.

    Seen from the outputs, a sum of per-sample losses has a block-diagonal Hessian H, so H (D v) is
    D (H v) for every diagonal D that is constant on each sample. A loss that cannot be
    differentiated twice is given the benefit of the doubt.
    """
    random = torch.Generator().manual_seed(0)
    edges = [edge for edge, _ in outputs]
    try:
        first = torch.autograd.grad(list(roots), edges, create_graph=True, allow_unused=True)
        curved = [k for k, g in enumerate(first) if g is not None and g.requires_grad]
        if not curved:
            return False
        m = outputs[0][1].m
        digits = 2.0 ** torch.randint(0, 4, (m,), generator=random)
        scales, probes = [], []
        for k in curved:
            grad = first[k]
            assert grad is not None
            owner = outputs[k][1].owner
            scales.append(digits[owner].to(grad.device, grad.dtype))
            probe = torch.randn(grad.shape, generator=random, dtype=torch.float32)
            probes.append(probe.to(grad.device, grad.dtype))
        grads = [first[k] for k in curved]
        plain: Sequence[Tensor | None] = torch.autograd.grad(
            grads, edges, probes, retain_graph=True, allow_unused=True
        )
        scaled: Sequence[Tensor | None] = torch.autograd.grad(
            grads,
            edges,
            [p * s for p, s in zip(probes, scales, strict=True)],
            retain_graph=True,  # the loss's own backward pass is still to come
            allow_unused=True,
        )
    except RuntimeError:
        return False
    for k, (one, other) in enumerate(zip(plain, scaled, strict=True)):
        if one is None or other is None:
            continue
        expected = one * digits[outputs[k][1].owner].to(one.device, one.dtype)
        if bool(((other - expected).abs() > 0.05 * expected.abs().amax()).any()):
            return True
    return False
