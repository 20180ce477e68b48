"""What a model must be for a rule to follow it."""

from __future__ import annotations

from torch import nn

from heldin.errors import HeldinError

__all__ = ["check_trainable", "module_of"]

# Moving averages of weights, by the names that torch, timm and other packages give them.
AVERAGES = {"AveragedModel", "ModelEma", "ModelEmaV2", "ModelEmaV3", "EMA", "EMAModel"}


def check_trainable(owner: str, model: nn.Module) -> nn.Parameter:
    """Return a parameter that requires a gradient; refuse models without one, and averages."""
    for module in model.modules():
        if any(kind.__name__ in AVERAGES for kind in type(module).__mro__):
            raise HeldinError(
                f"{owner}: {type(module).__name__} is a moving average of weights; give the model "
                "that the optimiser trains, and the average as averaged_model="
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


def module_of(owner: str, average: nn.Module, model: nn.Module) -> nn.Module:
    """Return the module of an average that has the parameters of the model, by name."""
    names = [name for name, _ in model.named_parameters()]
    for module in average.modules():
        if [name for name, _ in module.named_parameters()] == names and type(module) is type(model):
            return module
    raise HeldinError(
        f"{owner}: averaged_model has no {type(model).__name__} with the parameters of the model; "
        "make it from the model, as torch.optim.swa_utils.AveragedModel(model) does"
    )
