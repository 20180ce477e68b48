"""One shadow of any model: weights, buffers and an optimiser of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin._private_torch import own_buffers, own_parameters
from heldin.errors import HeldinError
from heldin.state.schema import check_schema

from .hooks import skeleton
from .stack import again, hyperparameters

__all__ = ["Shadow", "Stage", "trained_parameters"]


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimiser trains, by name; refused if it trains others too."""
    names = {id(p): name for name, p in model.named_parameters()}
    known: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad:
                continue
            if id(p) not in names:
                raise HeldinError(
                    f"optimizer: it also trains a tensor of shape {tuple(p.shape)} that is not a "
                    "parameter of the model, so that shadows would share it; make it one (a loss "
                    "with parameters can be a module inside the model)"
                )
            known[names[id(p)]] = p
    if not known:
        raise HeldinError(
            "optimizer: none of its parameters is a trainable parameter of the model; give the "
            "optimiser that trains this model"
        )
    return known


class Stage:
    """A model in which the weights of any shadow can be put.

    It is a copy of the model's modules that shares its parameters and has none of its hooks, or,
    where the model cannot be copied (or engine="swap"), the model itself.

    Attributes:
        module: the model to call.
        apart: whether it is a copy.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], engine: str) -> None:
        self.apart = engine != "swap"
        self.module = model
        if self.apart:
            try:
                self.module = skeleton(model)
            except Exception as error:
                if engine == "copies":
                    raise HeldinError(
                        f"engine='copies': the model cannot be copied ({error}); use engine='swap'"
                    ) from error
                self.apart = False
        self._pairs = list(zip(model.modules(), self.module.modules(), strict=True))
        values = [v for _, mine in self._pairs for k, v in vars(mine).items() if k[0] != "_"]
        self._lists = [v for v in values if type(v) is list] if self.apart else []
        parameters = dict(self.module.named_parameters())
        wanted = {id(parameters[name]): name for name in names}
        self._weights: list[tuple[dict[str, Any], str, str]] = []
        self._buffers: list[tuple[dict[str, Any], str, str]] = []
        numbers: dict[int, str] = {}  # a buffer in two places is one
        for module in self.module.modules():
            for name, p in own_parameters(module).items():
                if id(p) in wanted:
                    self._weights.append((own_parameters(module), name, wanted[id(p)]))
            for name, b in own_buffers(module).items():
                if b is not None:
                    key = numbers.setdefault(id(b), str(len(numbers)))
                    self._buffers.append((own_buffers(module), name, key))

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers, as they are in the stage."""
        return {key: table[name].detach().clone() for table, name, key in self._buffers}

    def follow(self) -> None:
        """Give a copy the numbers and texts that the model's modules have just now.

        A loop may set them along the run: a temperature, the weight of a penalty.
        """
        for theirs, mine in self._pairs if self.apart else ():
            own = vars(mine)
            for name in vars(theirs).keys() - _OF_ALL_MODULES:
                value = vars(theirs)[name]
                if value is None or isinstance(value, (bool, int, float, str)):
                    own[name] = value

    @contextmanager
    def with_weights(self, shadow: Shadow, train: bool) -> Iterator[nn.Module]:
        """The model as it is with a shadow's weights and buffers, in its mode or in evaluation."""
        places = () if self.apart else (*self._weights, *self._buffers)  # a copy is ours
        before = [(table, name, table[name]) for table, name, _ in places]
        modes = [(mine, mine.training) for _, mine in self._pairs]
        lengths = [len(each) for each in self._lists]
        try:
            for table, name, key in self._weights:
                table[name] = shadow.weights[key]
            for table, name, key in self._buffers:
                table[name] = shadow.buffers[key]
            for theirs, mine in self._pairs:
                mode = train and theirs.training
                if mine.training != mode:
                    mine.training = mode
            yield self.module
            for table, name, key in self._buffers:  # those that were replaced, not written into
                shadow.buffers[key] = table[name]
        finally:
            for table, name, value in before:
                table[name] = value
            for each, length in zip(self._lists, lengths, strict=True):
                del each[length:]  # losses that a step collects would pile up
            if not self.apart:
                for mine, mode in modes:
                    mine.training = mode


_OF_ALL_MODULES = {*vars(nn.Module())}


class Shadow:
    """The weights that one shadow trains; all others are the model's own.

    Attributes:
        weights: copies of the parameters that the optimiser trains, by name.
        buffers: of its own.
        optimizer: of the same kind and with the same settings as the user's.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        buffers: dict[str, Tensor],
    ) -> None:
        self.weights = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        self.buffers = buffers
        names = {id(p): name for name, p in parameters.items()}
        groups = [
            {"params": [self.weights[names[id(p)]] for p in group["params"] if id(p) in names]}
            | setting
            for group, setting in zip(
                optimizer.param_groups, hyperparameters(optimizer), strict=True
            )
        ]
        self.optimizer = again(optimizer, groups)
        for name, p in parameters.items():
            if optimizer.state.get(p):
                self.optimizer.state[self.weights[name]] = copy.deepcopy(optimizer.state[p])

    def set(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Follow the user's optimiser in its rates and other settings."""
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)

    def forget_gradients(self) -> None:
        """As the optimiser's zero_grad does, without its detours."""
        for weight in self.weights.values():
            weight.grad = None

    def add_gradients(self, loss: Tensor) -> None:
        """Backpropagate to the shadow's weights and to nothing else."""
        weights = list(self.weights.values())
        try:
            found = torch.autograd.grad(loss, weights, allow_unused=True)
        except RuntimeError as error:
            if "Checkpointing is not compatible" not in str(error):
                raise
            raise HeldinError(
                "shadows cannot be trained through torch.utils.checkpoint with use_reentrant=True; "
                "use use_reentrant=False (gradient_checkpointing_kwargs in transformers)"
            ) from error
        if all(gradient is None for gradient in found):
            raise HeldinError(
                "batch_loss: it does not depend on the weights of the model that it is given. Does "
                "it call another model, one from outside of the function? Call its first argument, "
                "def batch_loss(model, batch). A forward that was replaced by a function (a "
                "patched model) needs engine='swap'"
            )
        for weight, gradient in zip(weights, found, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def state_dict(self) -> dict[str, Any]:
        """Weights, buffers and the optimiser's state."""
        return {
            "weights": {name: w.detach().clone() for name, w in self.weights.items()},
            "buffers": {key: b.clone() for key, b in self.buffers.items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    def check_state(self, state: Any, place: str) -> None:
        """Refuse, before anything is changed, what is not the state of such a shadow."""
        form = {
            "weights": {name: w.detach() for name, w in self.weights.items()},
            "buffers": dict(self.buffers),
            "optimizer": {"state": {int: dict}, "param_groups": [dict]},
        }
        check_schema(state, form, place)
        most = sum(weight.numel() for weight in self.weights.values())
        for values in state["optimizer"]["state"].values():
            for name, value in values.items():
                if isinstance(value, Tensor) and value.numel() > max(1, most):
                    raise ValueError(f"{name!r} of an optimiser is {tuple(value.shape)}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        for key, buffer in self.buffers.items():
            self.buffers[key] = state["buffers"][key].to(buffer.device).clone()
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
