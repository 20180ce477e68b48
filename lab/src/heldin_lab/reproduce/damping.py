"""How strongly RMSprop and Adam damp single learning rates (Eq. 12 and 13 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.errors import HeldinError

__all__ = ["fraction_below", "rmsprop_factors"]

KNOWN = (torch.optim.RMSprop, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)


def rmsprop_factors(optimizer: Optimizer, model: nn.Module | None = None) -> dict[str, Tensor]:
    r"""\(f^{RMS} = z / z^{max}\) of Eq. 12: each learning rate relative to the largest.

    The optimiser multiplies gradients by \(z = 1 / (\sqrt v + \epsilon)\), with v its running
    average of squared gradients as it uses it: centred for a centred RMSprop, bias-corrected and
    perhaps a running maximum for Adam. The largest z is taken over all parameters; the learning
    rates of parameter groups do not enter. Weights that never had a gradient (v = 0) have no z to
    speak of, only 1 / epsilon: they are nan and leave the largest to others.

    Args:
        optimizer: a torch.optim.RMSprop, Adam, AdamW or NAdam that has made a step, or an
            ElementwiseStopping around one.
        model: gives the parameters their names; without it, and without an optimiser that was made
            from `model.named_parameters()`, they are named by group and position ("0.3").

    Returns:
        The factors by parameter, each of the parameter's shape.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.RMSprop(model.parameters())
    >>> model(torch.tensor([[1.0, 100.0]])).sum().backward()
    >>> optimizer.step()
    >>> rmsprop_factors(optimizer, model)
    {'weight': tensor([[1.0000, 0.0100]])}
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, KNOWN):
        raise HeldinError(
            "rmsprop_factors: expected RMSprop, Adam, AdamW or NAdam, got "
            f"{type(inner).__name__}, which keeps no average of squared gradients known here"
        )
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    roots: dict[str, Tensor] = {}
    for i, group in enumerate(inner.param_groups):
        given = group.get("param_names")
        for j, p in enumerate(group["params"]):
            if inner.state.get(p):
                name = given[j] if given else f"{i}.{j}"
                roots[names.get(id(p), name)] = _denominator(inner.state[p], group)
    if not roots:
        raise HeldinError("rmsprop_factors: the optimiser has made no step yet; call it after one")
    smallest = min(float(r.nan_to_num(torch.inf).min()) for r in roots.values())
    return {name: torch.full_like(root, smallest).div_(root) for name, root in roots.items()}


def _denominator(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """1 / z; nan where there was never a gradient."""
    if "square_avg" in state:  # RMSprop
        v = state["square_avg"]
        used = v - state["grad_avg"].square() if group["centered"] else v
        root = used.clamp(min=0).sqrt()
    else:
        v = used = state["exp_avg_sq"]
        if group.get("amsgrad"):
            used = state["max_exp_avg_sq"]
        root = (used / (1 - group["betas"][1] ** float(state["step"]))).sqrt()
    denominator: Tensor = (root + group["eps"]).masked_fill(v == 0, torch.nan)
    return denominator


@overload
def fraction_below(factors: Mapping[str, Tensor], threshold: float, by: None = None) -> float: ...
@overload
def fraction_below(
    factors: Mapping[str, Tensor], threshold: float, by: Literal["tensor"]
) -> dict[str, float]: ...
def fraction_below(
    factors: Mapping[str, Tensor], threshold: float, by: Literal["tensor"] | None = None
) -> float | dict[str, float]:
    """The share of factors below a threshold T (Eq. 13), of all or by tensor.

    Args:
        factors: what `rmsprop_factors` gives; nan (no gradient yet) is not counted.
        threshold: T in (0, 1).
        by: None for one number, "tensor" for one per parameter.

    >>> factors = {"a": torch.tensor([1.0, 0.05]), "b": torch.tensor([0.001, torch.nan])}
    >>> round(fraction_below(factors, 0.1), 3)
    0.667
    >>> fraction_below(factors, 0.1, by="tensor")
    {'a': 0.5, 'b': 1.0}
    """
    if not 0 < threshold < 1:
        raise HeldinError(f"fraction_below: threshold must lie in (0, 1), got {threshold!r}")
    if by not in (None, "tensor"):
        raise HeldinError(f"fraction_below: by must be None or 'tensor', got {by!r}")
    below = {name: int((f < threshold).sum()) for name, f in factors.items()}
    known = {name: int((~f.isnan()).sum()) for name, f in factors.items()}
    if by == "tensor":
        return {name: below[name] / max(1, known[name]) for name in factors}
    return sum(below.values()) / max(1, sum(known.values()))
