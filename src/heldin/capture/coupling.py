"""A test of whether a loss couples the samples of a batch.

A loss that is a sum over samples is linear in every tensor that depends on several of them. So its
graph is walked from the loss down, through sums and other linear ops, until every element depends
on one sample only. A nonlinear op on the way couples samples: a root of a mean, a hinge of a
difference of two, a distance between them. This also detects couplings that no second derivative
shows. Opaque ops are tested through their second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from heldin._private_torch import outputs_of

from .graph import LEAF, Graph, reachable, shape_of
from .reference import Output

__all__ = ["couples"]

PROBES = 6  # elements of a tensor whose samples are determined one by one
LARGE = 1 << 22  # number of elements from which only two elements of a tensor are tested
ROUNDS = 3  # repetitions of the test of all elements at once
# Jointly linear in all inputs.
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
# Linear in each input, and jointly linear if only one input depends on samples.
_BILINEAR = {"Mul", "Div", "Mm", "Bmm", "Addmm", "Mv", "Dot", "Addmv", "Baddbmm", "Lerp", "Outer"}
# Sums of a function of each element, or of each row.
_SEPARABLE = {
    "MseLoss", "SmoothL1Loss", "HuberLoss", "L1Loss", "NllLoss", "NllLoss2D", "NllLossNd",
    "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "SoftMarginLoss", "MultiMarginLoss",
    "MultilabelMarginLoss", "CtcLoss", "KlDiv", "CrossEntropyLoss",
}  # fmt: skip


def couples(graph: Graph, roots: Sequence[Any], outputs: Sequence[Output]) -> str | None:
    """Return the op in which a loss couples samples; None if it does not.

    The outputs are the last tensors whose rows have owners.
    """
    op = _by_structure(graph, outputs) if outputs else None
    if op is None and outputs and _by_curvature(roots, outputs):
        op = "the loss"
    return op


def _by_structure(graph: Graph, outputs: Sequence[Output]) -> str | None:
    ends = {(graph.index[edge.node], edge.output_nr) for edge, _ in outputs}
    ended = {position for position, _ in ends}
    above = set(reachable(ended, graph.parents.__getitem__))
    stack = [i for i in above if not graph.parents[i] and i not in ended]
    seen = set(stack)
    while stack:
        at = stack.pop()
        name = graph.names[at].rstrip("0123456789").removesuffix("Backward").rsplit("::", 1)[-1]
        children = graph.children[at]
        below = [pair for pair in children if pair[0] in above]
        inside = [pair for pair in below if pair not in ends]
        is_divided = name == "Div" and len(children) > 1 and children[1][0] >= 0
        if name in _LINEAR or (name in _BILINEAR and len(below) < 2 and not is_divided):
            new_children = [child for child, _ in inside if child not in seen]
            seen.update(new_children)
            stack.extend(new_children)
            continue
        # The derivative of a hinge may be zero at this point, so its inputs are tested as well.
        to_test = inside if name in _SEPARABLE and len(set(below)) < 2 else [*inside, (at, 0)]
        if not callable(graph.nodes[at]):  # a custom function may or may not sum over samples
            to_test = inside
        if any(_is_mixed(graph, child, number, outputs) for child, number in to_test):
            return graph.names[at]
    return None


def _is_mixed(graph: Graph, at: int, number: int, outputs: Sequence[Output]) -> bool:
    """Return whether an element depends on several samples: probe a few, then test all at once."""
    if graph.names[at] == LEAF:
        return False
    shape = shape_of(graph.nodes[at], number)
    metadata = outputs_of(graph.nodes[at])[number]
    edge, size = GradientEdge(graph.nodes[at], number), prod(shape)
    if size == 0:
        return False
    few = PROBES if size < LARGE else 2
    places = torch.arange(size)
    if size > few:
        places = torch.randint(0, size, (few,), generator=torch.Generator().manual_seed(0))
    for place in places.tolist():
        probe = torch.zeros(size, dtype=metadata.dtype, device=metadata.device)
        probe[place] = 1
        try:
            grads = _grads([edge], outputs, [probe.reshape(shape)])
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
    return few < size < LARGE and _is_mixed_somewhere(edge, shape, metadata, outputs)


def _is_mixed_somewhere(
    edge: GradientEdge, shape: Sequence[int], metadata: Any, outputs: Sequence[Output]
) -> bool:
    """Return whether any element depends on several samples.

    Let a(d) be the change of an element when the outputs of sample s change by d[s]. An element
    that depends on a single sample has a(d d) a(1) = a(d)^2; with several samples, the two sides
    differ by their parts times the squared differences of their d. Changes are derivatives of the
    backward pass, which is linear. An element that cannot be differentiated twice counts as
    depending on one sample.
    """
    if metadata.dtype.is_complex:
        return False
    random = torch.Generator().manual_seed(0)
    seed = torch.ones(
        tuple(shape), dtype=metadata.dtype, device=metadata.device, requires_grad=True
    )
    try:
        backward = zip(_grads([edge], outputs, [seed], create_graph=True), outputs, strict=True)
        linear = [(g, layout) for g, (_, layout) in backward if g is not None and g.requires_grad]
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
        tolerance = torch.finfo(metadata.dtype).eps ** 0.4
        felt = plain.abs() > tolerance * plain.abs().amax()  # smaller changes may be rounding
        for _ in range(ROUNDS):
            digits = 2.0 ** torch.randint(0, 6, (m,), generator=random)
            once, twice = change(digits), change(digits.square()) * plain
            differs = (twice - once.square()).abs() > tolerance * (twice.abs() + once.square())
            if bool((differs & felt & once.isfinite() & twice.isfinite()).any()):
                return True
    except RuntimeError:
        pass
    return False


def _by_curvature(roots: Sequence[Any], outputs: Sequence[Output]) -> bool:
    """Return whether the Hessian of the loss couples the outputs of different samples.

    With respect to the outputs, a sum of per-sample losses has a block-diagonal Hessian H, so
    H (D v) is D (H v) for every diagonal D that is constant on each sample. A loss that cannot be
    differentiated twice counts as separable.
    """
    random = torch.Generator().manual_seed(0)
    try:
        first = zip(_grads(list(roots), outputs, None, create_graph=True), outputs, strict=True)
        curved = [(g, layout) for g, (_, layout) in first if g is not None and g.requires_grad]
        if not curved:
            return False
        digits = 2.0 ** torch.randint(0, 4, (outputs[0][1].m,), generator=random)
        probes, scaled_probes = [], []
        for grad, layout in curved:
            probe = torch.randn(grad.shape, generator=random, dtype=torch.float32)
            probes.append(probe.to(grad.device, grad.dtype))
            scale = digits[layout.owner].to(grad.device, grad.dtype)
            scaled_probes.append(probes[-1] * scale)
        grads = [grad for grad, _ in curved]
        plain = _grads(grads, outputs, probes)
        scaled = _grads(grads, outputs, scaled_probes)
    except RuntimeError:
        return False
    for one, other, (_, layout) in zip(plain, scaled, outputs, strict=True):
        if one is not None and other is not None:
            expected = one * digits[layout.owner].to(one.device, one.dtype)
            if bool(((other - expected).abs() > 0.05 * expected.abs().amax()).any()):
                return True
    return False


def _grads(
    tensors: Sequence[Any], outputs: Sequence[Output], seeds: Any, create_graph: bool = False
) -> Sequence[Tensor | None]:
    """Return the gradients of the outputs; the graph remains for the user's backward pass."""
    edges = [edge for edge, _ in outputs]
    return torch.autograd.grad(
        tensors, edges, seeds, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
