"""What a model must be for a rule to follow it."""

from __future__ import annotations

import warnings
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from heldin._private_torch import version_of
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.loop.changes import checksums

__all__ = ["check_trainable", "module_of", "note_trained", "warn_of_training"]

WRITES = 20  # to a parameter, beyond which more than its initialisation was written
# Models that were trained under heldin: sums of their weights, and how often these were written.
_TRAINED: WeakKeyDictionary[nn.Module, tuple[Tensor, int]] = WeakKeyDictionary()

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


def note_trained(model: nn.Module) -> None:
    _TRAINED[model] = _sums(model), _writes(model)


def warn_of_training(owner: str, model: nn.Module) -> None:
    """Warn of a model that was trained before; optimisers without a state do not show it."""
    sums, writes = _TRAINED.get(model, (None, 0))
    if sums is not None and torch.equal(sums, _sums(model)):
        sign = "the model was trained with another stopping object"
    elif any(p.grad is not None and bool((p.grad != 0).any()) for p in model.parameters()):
        sign = "the parameters have gradients"
    elif _writes(model) - writes > WRITES:
        sign = "the parameters were written to many times"
    else:
        return
    warnings.warn(
        f"{owner}: {sign}. Was the model trained on these rows before? Then it knows the rows that "
        "shadows hold out, and the estimate is too low; make a new model, or make the stopping "
        "object before training begins. If the model was trained on other rows, all is well "
        + more("a-trained-model"),
        HeldinWarning,
        stacklevel=7,
    )


def _sums(model: nn.Module) -> Tensor:
    local = (getattr(p, "to_local", p.detach)() for p in model.parameters() if p.requires_grad)
    return checksums([p.detach() for p in local])  # of this process


def _writes(model: nn.Module) -> int:
    return max(version_of(p) for p in model.parameters() if p.requires_grad)
