"""A Keras model as shadows need it: its variables by number, and its loss, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from torch import Tensor, nn

from heldin._private_torch import own_buffers, own_parameters

__all__ = ["Variables"]


class Variables(nn.Module):
    """The variables of a Keras model by number, in which those of a shadow can be put."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        vars(self)["_keras"] = model  # no part of it, or its own modules would be, too
        trained = {id(v) for v in model.trainable_variables}
        self._places: list[tuple[Any, dict[str, Any], str]] = []
        for number, variable in enumerate(model.variables):
            if id(variable) in trained:
                self.register_parameter(f"v{number}", variable._value)
                self._places.append((variable, own_parameters(self), f"v{number}"))
            else:
                self.register_buffer(f"v{number}", variable._value.detach())
                self._places.append((variable, own_buffers(self), f"v{number}"))

    @property
    def trained(self) -> list[Any]:
        """The Keras variables that are parameters here."""
        return [v for v, table, _ in self._places if table is own_parameters(self)]

    def loss(self, view: nn.Module, batch: Any) -> Tensor:
        """That of `train_step`, with the variables that are in place now."""
        return self._losses(view, batch)[0]

    @property
    def has_row_losses(self) -> bool:
        """Whether the loss of a batch is the mean of one compiled loss over its rows."""
        chosen = vars(self)["_keras"].loss
        if isinstance(chosen, keras.losses.Loss):
            return chosen.reduction in ("sum_over_batch_size", "mean")
        return isinstance(chosen, str)

    def row_losses(self, view: nn.Module, batch: Any) -> Tensor:
        """The loss of each row, with its share of what is added to their mean (penalties)."""
        whole, outputs, y, weight = self._losses(view, batch)
        if weight is not None or not isinstance(outputs, Tensor):
            return whole
        chosen = keras.losses.get(vars(self)["_keras"].loss)
        if not isinstance(chosen, keras.losses.Loss):
            chosen = LossFunctionWrapper(chosen)
        each: Tensor = chosen.call(y, outputs).reshape(len(outputs), -1).mean(1)
        return each + (whole - each.mean())

    def _losses(self, view: nn.Module, batch: Any) -> tuple[Tensor, Any, Any, Any]:
        model = vars(self)["_keras"]
        x, y, weight = unpack_x_y_sample_weight(batch)
        training = view.training
        with self._bound(training):
            outputs = model(x, training=training) if model._call_has_training_arg else model(x)
            loss: Tensor = model._compute_loss(
                x=x, y=y, y_pred=outputs, sample_weight=weight, training=training
            )
        return loss, outputs, y, weight

    @contextmanager
    def _bound(self, training: bool) -> Iterator[None]:
        model = vars(self)["_keras"]
        before, mode = [v._value for v, _, _ in self._places], model.training
        try:
            for variable, table, name in self._places:
                variable._value = table[name]
            model.train(training)
            yield
        finally:
            for (variable, _, _), value in zip(self._places, before, strict=True):
                variable._value = value
            model.train(mode)
