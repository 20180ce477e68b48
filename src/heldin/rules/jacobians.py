"""Derivatives of a model's outputs by its parameters, sample by sample, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from heldin.capture.collector import Collector
from heldin.capture.observation import Observation
from heldin.errors import HeldinError, NotObservable
from heldin.shadows.bare_model import copy_without_hooks

__all__ = ["Jacobians", "jacobian_method", "jacobians_by_capture", "jacobians_by_vmap"]

Jacobians = Callable[[nn.Module, Collection[str], Sequence[Tensor], Tensor], dict[str, Tensor]]


def jacobians_by_vmap(
    model: nn.Module, names: Collection[str], inputs: Sequence[Tensor], directions: Tensor
) -> dict[str, Tensor]:
    """Compute Jacobians through `torch.func`: the faster way, for models that it can map.

    Args:
        model: what gives the outputs. It is not touched.
        names: of the parameters to differentiate by.
        inputs: (q, ...) each.
        directions: (q, b, ...), shaped like the outputs.

    Returns:
        (q, b, ...) for each of the names.
    """
    bare = copy_without_hooks(model).eval()
    rest = {name: p.detach() for name, p in model.named_parameters()}
    weights = {name: rest.pop(name) for name in names}

    def one(direction: Tensor, *row: Tensor) -> dict[str, Tensor]:
        def outputs(some: dict[str, Tensor]) -> Tensor:
            samples = tuple(x.unsqueeze(0) for x in row)
            result: Tensor = functional_call(bare, {**rest, **some}, samples)
            return result[0]

        pull: Any = torch.func.vjp(outputs, weights)[1]
        found: dict[str, Tensor] = torch.func.vmap(pull)(direction)[0]
        return found

    result: dict[str, Tensor] = torch.func.vmap(one)(directions, *inputs)
    return result


def jacobians_by_capture(
    model: nn.Module, names: Collection[str], inputs: Sequence[Tensor], directions: Tensor
) -> dict[str, Tensor]:
    """Compute Jacobians through heldin's own capture, for any model that can be observed.

    A sample is repeated for each of its directions; then all derivatives are the per-sample
    gradients of one backward pass. Arguments and result are those of `jacobians_by_vmap`.
    """
    q, b = directions.shape[:2]
    twin = copy_without_hooks(model, share=False).eval()
    params = dict(twin.named_parameters())
    for name, p in params.items():
        p.requires_grad_(name in names)
    collector = Collector(twin, per_sample=True)
    with torch.enable_grad(), Observation(collector):
        outputs = twin(*(x.repeat_interleave(b, 0) for x in inputs))
        (outputs * directions.flatten(0, 1)).sum().backward()
    per_sample = collector.per_sample
    shapes = {name: (q * b, *params[name].shape) for name in names}
    return {  # a parameter that was not reached has no part in the outputs
        name: per_sample.get(name, params[name].new_zeros(shape)).view(q, b, *shape[1:])
        for name, shape in shapes.items()
    }


def jacobian_method(
    model: nn.Module, names: Collection[str], inputs: Sequence[Tensor]
) -> Jacobians:
    """Return the method that works for this model, tried on two rows."""
    first_rows = [x[:2] for x in inputs]
    bare = copy_without_hooks(model).eval()
    with torch.no_grad(), torch.random.fork_rng():
        outputs = bare(*first_rows)
        directions = torch.ones_like(outputs).unsqueeze(1)
        try:
            jacobians_by_vmap(model, names, first_rows, directions)
        except Exception as error:
            reason = error
        else:
            return jacobians_by_vmap
        try:
            jacobians_by_capture(model, names, first_rows, directions)
        except NotObservable as error:
            raise HeldinError(
                "heldin.EarlyStopping: the derivatives of the outputs by single samples can be had "
                f"neither through torch.func ({reason}) nor by observing the model ({error}); "
                "rule='folds' works with any model"
            ) from error
    return jacobians_by_capture
