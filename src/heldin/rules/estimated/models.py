"""What a model must be for a rule to follow it."""

from __future__ import annotations

from torch import nn

from heldin.errors import HeldinError

__all__ = ["first_trained"]

# Moving averages of weights, by the names that torch, timm and other packages give them.
AVERAGES = {"AveragedModel", "ModelEma", "ModelEmaV2", "ModelEmaV3", "EMA", "EMAModel"}


def first_trained(owner: str, model: nn.Module) -> nn.Parameter:
    """A parameter that requires a gradient; refused are models without one, and averages."""
    for module in model.modules():
        if any(kind.__name__ in AVERAGES for kind in type(module).__mro__):
            raise HeldinError(
                f"{owner}: {type(module).__name__} is a moving average of weights, which shadows "
                "do not follow; give the model that the optimiser trains. The estimate and the "
                "restored weights are those of that model, not of its average"
            )
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise HeldinError(
            f"{owner}: the model has lazy layers whose shapes are not known yet; call it once on a "
            "batch before"
        )
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        raise HeldinError(
            f"{owner}: the model has no parameter that requires a gradient; unfreeze at least one"
        )
    return parameter
