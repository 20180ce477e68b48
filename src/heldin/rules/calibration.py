"""A temperature in the weights of the user's model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from heldin.crossval.temperature import checked_temperature
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.loop.hooks import after_calls
from heldin.rules.base import evaluation
from heldin.state.schema import shown

__all__ = ["is_scalable", "scale_last_layer", "scale_outputs"]

MOST_BESIDE = 6  # parameters beside the last layer, whose subsets are tried
LINEAR = (
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)

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


def scale_last_layer(
    model: nn.Module, temperature: float, predict: Callable[[], Any]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Divide the model's outputs by a temperature through the weights of its last linear layer.

    The model is called on example inputs, in evaluation mode and without gradients. The weights are
    first multiplied by a power of two: unless this multiplies the outputs exactly, something else
    than the layer determines them. Otherwise the weights stay as they are: where the layer's
    weights are shared with another layer, parametrized or not floating-point numbers, too.

    A LoRA layer is scaled by its base layer and its B matrices; one of the user's own making by
    those of the parameters beside the base layer that the outputs are proportional to. A checkpoint
    of the adapter alone does not contain the base layer and loses the temperature.

    Args:
        model: with a linear or convolutional last layer.
        temperature: to divide the outputs by.
        predict: calls the model on example inputs; `.logits` of what it returns, if it has some.

    Returns:
        The parameters that were divided, with their values before; none if nothing was changed.
    """

    def call() -> Tensor:
        output = predict()
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise HeldinError(f"temperature: the model returned {shown(output)}, not logits")
        return logits

    divisor = checked_temperature(temperature)
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with evaluation(model), torch.random.fork_rng(devices=list(devices)):
        called: list[nn.Module] = []
        layers = (m for m in model.modules() if isinstance(m, LINEAR) or _is_lora(m))
        with after_calls(layers, lambda module, output: called.append(module)):
            before = call().clone()
        if bool(before.isfinite().all()):
            # where layers are no modules of PyTorch, the model lists their parameters itself
            others: Any = getattr(model, "linear_layers", list)
            for parameters in _scalable(model, called[-1]) if called else others():
                if scaled := _scale(parameters, divisor, before, call):
                    return scaled
    return []


def _scale(
    parameters: list[nn.Parameter], divisor: float, before: Tensor, call: Callable[[], Tensor]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Divide parameters by a number if that divides the outputs; else leave them as they are."""
    pairs = [(p, p.detach().clone()) for p in parameters]
    succeeded = False
    try:
        factor = 16.0 if before.dtype == torch.float16 else 1024.0
        for p in parameters:
            p.mul_(factor)
        if torch.equal(call(), before * factor):
            for p, old in pairs:
                p.copy_(old / divisor)
            values, expected = call(), before / divisor
            coarse = max(torch.finfo(tensor.dtype).eps for tensor in (values, *parameters))
            off = (values - expected).abs().max()  # by the rounding of weights and outputs
            succeeded = bool(off <= 100 * coarse * expected.abs().max())
    finally:
        if not succeeded:
            for p, old in pairs:
                p.copy_(old)
    return pairs if succeeded else []


def _is_lora(module: nn.Module) -> bool:
    """Return whether this is a layer that peft wraps around another one."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_B")


def _scalable(model: nn.Module, layer: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield parameters that the outputs may be proportional to, none of which is shared.

    Those of the layer; then the same with some of the few other parameters of the module around
    it, which may add to its outputs.
    """
    layers = [layer]
    if _is_lora(layer):
        b_matrices: Any = layer.lora_B
        layers = [layer.base_layer, *b_matrices.values()]  # type: ignore[list-item]
    parameters: list[nn.Parameter] = []
    for each in layers:
        for p in (getattr(each, "weight", None), getattr(each, "bias", None)):
            if p is None:
                continue
            # a parametrized weight is computed from other parameters
            if not isinstance(p, nn.Parameter) or not p.is_floating_point():
                return
            parameters.append(p)
    storages = [
        p.untyped_storage().data_ptr()
        for module in model.modules()
        for p in module.parameters(recurse=False)
    ]

    def is_own(p: nn.Parameter) -> bool:
        return storages.count(p.untyped_storage().data_ptr()) == 1

    if not parameters or not all(map(is_own, parameters)):
        return
    yield parameters
    layer_ids = {id(p) for p in parameters}
    around = [m for m in model.modules() if any(layer is child for child in m.children())]
    if not around or around[0] is model or isinstance(around[0], nn.Sequential):
        return
    others = [p for p in around[0].parameters() if id(p) not in layer_ids and is_own(p)]
    if len(others) <= MOST_BESIDE:
        for number in range(1, len(others) + 1):
            for some in combinations(others, number):
                yield [*parameters, *some]
