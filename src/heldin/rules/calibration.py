"""A temperature in the weights of the user's model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heldin.crossval import scale_last_layer
from heldin.errors import HeldinError, HeldinWarning, more

__all__ = ["is_scalable", "scale_outputs"]

Predict = Callable[[nn.Module, Any], Tensor]


def is_scalable(model: nn.Module, batch: Any, predict: Predict) -> bool:
    """Return whether a temperature can be put into the last layer of a model, exactly.

    Parameters that are all zero, as the second matrix of a low-rank adapter is before training,
    hide what they add to the outputs: they have other values during the test.
    """
    zeros = [p for p in model.parameters() if p.requires_grad and not bool(p.any())]
    backup = [p.detach().clone() for p in zeros]
    try:
        with torch.no_grad():
            for p in zeros:
                p.fill_(0.5)
        return bool(scale_last_layer(model, 1.0, lambda: predict(model, batch)))
    except (HeldinError, RuntimeError):  # outputs or weights of a kind that cannot be scaled
        return False
    finally:
        with torch.no_grad():
            for p, old in zip(zeros, backup, strict=True):
                p.copy_(old)


def scale_outputs(
    model: nn.Module, temperature: float, batch: Any, predict: Predict
) -> tuple[list[str], list[tuple[nn.Parameter, Tensor]]]:
    """Divide the outputs of a model by a temperature, through its last layer.

    Returns:
        The names of the parameters that were divided (none if the user has to divide the outputs),
        and those among them that are not trained, so that no snapshot has them, with their values.
    """
    scaled = scale_last_layer(model, temperature, lambda: predict(model, batch))
    if not scaled:
        warnings.warn(
            f"temperature: the last layer of {type(model).__name__} cannot be scaled exactly, "
            f"so divide its outputs by stopping.temperature ({temperature:.4g}) yourself; the "
            "estimates are those of the divided outputs " + more("a-temperature-to-divide-by"),
            HeldinWarning,
            stacklevel=5,
        )
    changed = {id(p) for p, _ in scaled}
    names = [name for name, p in model.named_parameters() if id(p) in changed]
    return names, [(p, old) for p, old in scaled if not p.requires_grad]
