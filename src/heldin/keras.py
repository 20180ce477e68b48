"""heldin in Keras 3 on PyTorch: `model.fit(x, y, callbacks=[EarlyStopping()])`."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ._private_torch import own_parameters
from .adapters.arguments import needs_framework, strict_kwargs
from .adapters.patches import OptimizerBridge, callers, local_variable, replaced
from .adapters.session import BATCH_SIZE, unwrap_loader
from .adapters.stopping import FrameworkStopping
from .errors import HeldinError
from .rules.options import Rule

THEN = " and set KERAS_BACKEND=torch in the environment"
with needs_framework("Keras 3 on PyTorch", "keras", THEN):
    import keras
    import numpy as np
    from keras.src.losses.losses import LossFunctionWrapper
    from keras.src.saving.keras_saveable import KerasSaveable
    from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
if keras.backend.backend() != "torch":
    raise ImportError(
        f"heldin.keras needs Keras 3 on PyTorch, but it runs on {keras.backend.backend()}: set "
        "KERAS_BACKEND=torch in the environment, before keras is imported"
    )

__all__ = ["EarlyStopping"]

# losses of logits, or of probabilities, whose logits Keras notes
CROSS_ENTROPIES = (
    keras.losses.binary_crossentropy,
    keras.losses.categorical_crossentropy,
    keras.losses.sparse_categorical_crossentropy,
)
TORCH_PREFIX = re.compile(r"/[\w.]*_torch_params\.")  # of the variables of a Keras model


class EarlyStopping(FrameworkStopping, keras.callbacks.Callback):
    """Stops `fit` without validation data, in the middle of an epoch if need be.

    Rules by an estimated test loss: the model trains on all rows. Shadows of it train beside it by
    the compiled loss and optimiser, each without some of the rows, and their loss on these is the
    estimate, in the logs of batches and epochs as `heldin/estimate` and `heldin/standard_error`.
    The best weights are put into the model at the end. Data are arrays, or a PyTorch DataLoader
    over a map-style dataset. Clipping, schedules, weight decay and accumulated gradients of the
    optimiser are followed.

    Evidence: the step that asks for the stop leaves the weights as they are, and the criterion is
    in the logs as `heldin/criterion`.

    Weights that are saved during training, by BackupAndRestore or ModelCheckpoint, hold the state
    as well.

    Args:
        rule: "auto", "folds", "shadow", "evidence", or one of `heldin.rules`.
        verbose: print at the end what was chosen, why it stopped and what to expect, unless fit is
            told to be silent.
        start_from_epoch: number of first epochs in which evidence never stops training.
        restore: put the weights of the best estimate into the model at the end.
        log_groups: also log the value of each group of parameters, for evidence.
        others: see `heldin.EarlyStopping`; predict is a function of the Keras model and a batch.
            There are no eval_data and eval_loss. Where the loss is a cross-entropy after a softmax
            or a sigmoid, outputs are the logits before that.

    Attributes:
        stopping: the rule of the last fit, with its history and estimate.
        estimates, out_of_fold, temperature: results, see `heldin.EarlyStopping`.
        stopped_epoch: the epoch in which training was stopped, 0 if it was not.

    >>> from heldin.keras import EarlyStopping
    >>> callback = EarlyStopping(budget=4)
    """

    _has_copies = False

    @strict_kwargs(extends=FrameworkStopping.__init__)
    def __init__(
        self, rule: str | Rule = "auto", *, start_from_epoch: int = 0, **options: Any
    ) -> None:
        super().__init__(rule, **options)
        self.start_from_epoch = start_from_epoch
        for name in (n for n in ("eval_data", "eval_loss") if getattr(self, n) is not None):
            raise HeldinError(
                f"{self.name}: {name} has no effect in Keras, where the compiled loss is estimated "
                "on the rows that fit was given; leave it out"
            )
        if start_from_epoch and not self.by_evidence:
            raise HeldinError(
                f"{self.name}: start_from_epoch is for rule='evidence'; other rules put the best "
                "weights into the model, whenever they stop"
            )
        self.stopped_epoch = self._epoch = 0
        self._starts = False  # whether the run begins with the next epoch
        self._bridge: OptimizerBridge | None = None
        self._data: Any = None  # Keras' data adapter
        self._in_batches = False  # whether the dataset makes whole batches, and no rows

    @property
    def _place(self) -> str:
        """The attribute of a model that holds the state."""
        return "_heldin_state" if self.by_evidence else "_heldin_shadows"

    def set_model(self, model: Any) -> None:
        """Join the model, so that its weights are saved and restored with the state."""
        super().set_model(model)
        leftover = getattr(model, self._place, None)
        if leftover is not None:
            leftover.callback._end()  # of a fit that ended in an error
        setattr(model, self._place, SavedWithWeights(self))

    # -- the run

    def on_train_begin(self, logs: Any = None) -> None:
        """Follow the data of this fit, and watch for errors."""
        model, optimizer = self.model, self.model.optimizer
        if getattr(model, self._place).callback is not self:
            raise HeldinError(f"{self.name}: there are two in this fit, but one state is saved")
        if model.jit_compile:
            raise HeldinError(
                f"{self.name}: steps of a compiled model cannot be followed; call model.compile "
                "with jit_compile=False"
            )
        if not self.by_evidence:
            self._check_optimizer(optimizer)
        self.stopped_epoch, self._starts = 0, True
        batches = local_variable("epoch_iterator", "fit")
        if not hasattr(batches, "_enumerate_iterator"):
            raise HeldinError(f"{self.name}: it follows model.fit, and nothing else")
        for owner in callers((keras.callbacks.CallbackList,)):  # for errors, which are no events
            events = (name for name in dir(owner) if name.startswith("on_"))
            self._patches.watch_methods(owner, *events)
        self._patches.wrap(batches, "_enumerate_iterator", self._batches)
        self._data = batches.data_adapter

    def _check_optimizer(self, optimizer: Any) -> None:
        """Refuse losses and averages that shadows do not follow."""
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise HeldinError(
                f"{self.name}: shadows do not scale their loss, as mixed_float16 needs; use "
                "mixed_bfloat16"
            )
        again = _accumulated(optimizer) > 1 or self._run.next_state.get("last")
        if optimizer.use_ema and again:
            raise HeldinError(
                f"{self.name}: averages of weights (use_ema=True) are followed in one fit without "
                "gradient_accumulation_steps; leave one of them out, or use rule='evidence'"
            )

    def _batches(self, steps: Callable[[], Any]) -> Any:
        for first, last, data in self._patches.items(steps()):
            yield first, last, self._patches.items(data)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Follow batches and steps: not before all callbacks have begun, which may fail."""
        self._epoch = epoch
        if not self._starts:
            return
        self._starts = False  # Keras does not call the hooks of PyTorch
        self._patches.watch_methods(self.model, "train_function", "evaluate", "reset_metrics")
        self._patches.wrap(self.model, "train_step", self._train)
        self._patches.wrap(self.model.optimizer, "apply", self._apply)
        if not self.by_evidence:
            follow = partial(self._patches.call, self._follow)
            self._patches.wrap(self._data, "get_torch_dataloader", follow)
            return
        stopping = self._run.begin(self.model, in_grad=False, epoch_steps=self._epoch_steps())
        self._patches.wrap(self.model, "call", stopping.call)
        for layer in self.model._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization):
                self._patches.wrap(layer, "call", partial(fused_batch_norm, layer))

    def _follow(self, load: Callable[[], Any]) -> Any:
        """Follow the loader of an epoch, and begin the run if it is the first."""
        loader = unwrap_loader(self.name, load())
        self._run.follow(loader)
        if self._run.running:
            return loader
        model, outputs = self.model, self._run.inputs.outputs
        view, predict = Variables(model), outputs.predict
        predict = None if predict is None else partial(view.predict, predict)
        self._bridge = bridge_to(model.optimizer, view)
        count, size = (getattr(self._data, name, None) for name in ("_num_samples", "batch_size"))
        rows = in_rows(loader, count, size)
        self._in_batches = rows is not loader
        self._run.begin(
            view,
            self._bridge,
            view.loss,
            rows,
            eval_loss=view.row_losses if view.has_row_losses else None,
            outputs=replace(outputs, predict=predict, targets=outputs.targets or view.targets),
            resumed=int(model.optimizer.iterations) > 0,
            in_grad=False,  # Keras sums them up in variables
            epoch_steps=self._epoch_steps(),
            schedule=_fixed_schedule(model.optimizer),
        )
        return loader

    def _epoch_steps(self) -> float | None:
        """Return the number of optimiser steps in an epoch, if it is known."""
        steps = (self.params or {}).get("steps")
        return steps / _accumulated(self.model.optimizer) if steps else None

    def _train(self, step: Callable[..., Any], data: Any) -> Any:
        """Train on a batch, and follow the step."""
        self._run.begin_batch()
        logs = step(data)
        self._run.add(data, in_batches=self._in_batches)
        if not self.by_evidence and self._run.step():
            self._stop()
        return logs

    def _stop(self) -> None:
        self.model.stop_training = True
        self.stopped_epoch = self._epoch

    def _apply(self, apply: Callable[..., Any], gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Step, unless gradients are accumulated or evidence asks for the stop."""
        optimizer, bridge = self.model.optimizer, self._bridge
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of one that scales the loss
        # `iterations` counts the updates
        due = (int(inner._iterations) + 1) % _accumulated(optimizer) == 0
        if due and self._run.before_step() and self._epoch >= self.start_from_epoch:
            self._stop()
            return None
        if bridge is not None:
            bridge.param_groups[0]["lr"] = float(optimizer.learning_rate)
        if not due or bridge is None:
            return apply(gradients, *args, **kwargs)
        weights = bridge.param_groups[0]["params"]
        before = [w.grad for w in weights]
        for weight, gradient in zip(weights, _step_gradients(optimizer, gradients), strict=True):
            weight.grad = gradient
        try:
            return bridge.run(lambda: apply(gradients, *args, **kwargs))
        finally:
            for weight, gradient in zip(weights, before, strict=True):
                weight.grad = gradient

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add the values to the logs."""
        self._add_to_logs(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the values to the logs, and warn of an epoch in which nothing was observed."""
        self._run.end_epoch()
        self._add_to_logs(logs)

    def _add_to_logs(self, logs: Any) -> None:
        if logs is not None:
            values = self._run.shown()  # others would crowd the progress bar
            logs.update({TORCH_PREFIX.sub("/", name): value for name, value in values.items()})

    def on_train_end(self, logs: Any = None) -> None:
        """Put the best weights into the model, and the results into the logs."""
        values = self._conclude()
        self._end()
        if logs is not None:
            logs.update(values)

    def _show(self, message: str) -> None:
        if (self.params or {}).get("verbose", 1):
            print(message)

    def _end(self) -> None:
        super()._end()
        self._bridge = self._data = None
        if getattr(self.model, self._place, None) is not None:
            delattr(self.model, self._place)


class SavedWithWeights(KerasSaveable):
    """The state of a callback, saved and loaded with the weights of the model that it lies on."""

    def __init__(self, callback: EarlyStopping) -> None:
        self.callback = callback

    def _obj_type(self) -> str:
        return "Loss"  # one of Keras' types; it asks in order to skip attributes

    def save_own_variables(self, store: Any) -> None:
        """Save the state; called by Keras."""
        file = io.BytesIO()
        torch.save(self.callback.state_dict(), file)
        store["state"] = np.frombuffer(file.getvalue(), dtype=np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Load the state; called by Keras."""
        if "state" in store.keys():  # noqa: SIM118  (a store is no mapping)
            raw = bytes(np.asarray(store["state"], dtype=np.uint8))
            self.callback.load_state_dict(torch.load(io.BytesIO(raw), weights_only=True))


# -- the model, its data and its optimiser as shadows need them


class Variables(nn.Module):
    """The variables of a Keras model by number, in place of which those of a shadow can be put."""

    _keras: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        vars(self)["_keras"] = model  # not a child, or its modules would be, too
        trained = {id(v) for v in model.trainable_variables}
        self._names = [(variable, f"v{number}") for number, variable in enumerate(model.variables)]
        for variable, name in self._names:
            if id(variable) in trained:
                self.register_parameter(name, variable._value)
            else:
                self.register_buffer(name, variable._value.detach())

    @property
    def trained(self) -> list[Any]:
        """The Keras variables that are parameters here."""
        return [variable for variable, name in self._names if name in own_parameters(self)]

    def loss(self, view: nn.Module, batch: Any) -> Tensor:
        """Return the loss of `train_step`, with the variables that are in place now."""
        return self._losses(view, batch)[0]

    @property
    def has_row_losses(self) -> bool:
        """Whether the loss of a batch is the mean of one compiled loss over its rows."""
        loss = self._keras.loss
        if isinstance(loss, keras.losses.Loss):
            return loss.reduction in ("sum_over_batch_size", "mean")
        return isinstance(loss, str) or self._cross_entropy is not None

    def row_losses(self, view: nn.Module, batch: Any) -> Tensor:
        """Return the loss of each row, with its share of penalties, which are added to the mean."""
        total, outputs, y, weight = self._losses(view, batch)
        if weight is not None or not isinstance(outputs, Tensor):
            return total
        loss = keras.losses.get(self._keras.loss)
        if not isinstance(loss, keras.losses.Loss):
            loss = LossFunctionWrapper(loss)
        losses: Tensor = loss.call(y, outputs).reshape(len(outputs), -1).mean(1)  # (rows,)
        return losses + (total - losses.mean())

    @property
    def _cross_entropy(self) -> Any:
        """The compiled loss, if it is a cross-entropy of one tensor; else None."""
        loss = self._keras.loss
        loss = keras.losses.get(loss) if isinstance(loss, (str, keras.losses.Loss)) else loss
        return loss if getattr(loss, "fn", loss) in CROSS_ENTROPIES else None

    def linear_layers(self) -> list[list[nn.Parameter]]:
        """Return the weights of trained Dense and convolutional layers, the last one first."""
        places = {id(variable): getattr(self, name) for variable, name in self._names}
        layers = reversed(list(self._keras._flatten_layers()))
        weights = [layer.weights for layer in layers]
        linear = [w for w in weights if [v.name for v in w] in (["kernel"], ["kernel", "bias"])]
        values = [[places[id(v)] for v in variables] for variables in linear]
        return [each for each in values if all(isinstance(p, nn.Parameter) for p in each)]

    def targets(self, batch: Any) -> Any:
        """Return the targets of a batch; numbers of classes in one dimension, as in PyTorch."""
        y, loss = unpack_x_y_sample_weight(batch)[1], self._cross_entropy
        sparse = getattr(loss, "fn", loss) is keras.losses.sparse_categorical_crossentropy
        return y.long().reshape(-1) if sparse and y.numel() == len(y) else y

    def _losses(self, view: nn.Module, batch: Any) -> tuple[Tensor, Any, Any, Any]:
        model = self._keras
        x, y, weight = unpack_x_y_sample_weight(batch)
        training = view.training
        with self._bound(training):
            outputs = view(x)
            loss: Tensor = model._compute_loss(
                x=x, y=y, y_pred=outputs, sample_weight=weight, training=training
            )
        return loss, outputs, y, weight

    def forward(self, x: Any) -> Any:
        """Return the outputs of the Keras model, whose variables are in place.

        Probabilities have the logits that Keras has made them of as an attribute.
        """
        model, loss = self._keras, self._cross_entropy
        options = {"training": self.training} if model._call_has_training_arg else {}
        outputs = model(x, **options)
        of_logits = isinstance(loss, keras.losses.Loss) and loss.get_config()["from_logits"]
        if loss is not None and not of_logits and hasattr(outputs, "_keras_logits"):
            outputs.logits = outputs._keras_logits
        return outputs

    def predict(self, function: Any, view: nn.Module, batch: Any) -> Any:
        """Return the prediction of a function of Keras model and batch."""
        with self._bound(training=False):
            return function(self._keras, batch)

    @contextmanager
    def _bound(self, training: bool) -> Iterator[None]:
        model = self._keras
        mode = model.training
        with replaced((variable, "_value", getattr(self, name)) for variable, name in self._names):
            try:
                model.train(training)
                yield
            finally:
                model.train(mode)


def bridge_to(optimizer: Any, view: Variables) -> OptimizerBridge:
    """Return a Keras optimiser in the shape of PyTorch's.

    Shadows step by another one with the same settings, whose variables are exchanged: that of the
    model may follow a schedule by its own number of steps, and adds gradients up.
    """
    config = optimizer.get_config()
    config |= {"learning_rate": 0.0, "gradient_accumulation_steps": None, "loss_scale_factor": None}
    inner = type(optimizer).from_config(config)
    weights = [v._value for v in view.trained]
    variables = [keras.Variable(w, trainable=True, dtype=str(w.dtype)[6:]) for w in weights]
    for variable, trained in zip(variables, view.trained, strict=True):
        variable.constraint = trained.constraint
    inner.build(variables)
    slots = _slots(inner)

    def replay() -> None:
        for slot, value in zip(slots, bridge.state[weights[0]].values(), strict=True):
            slot._value.data = value  # changed in place by the step
        inner.learning_rate.assign(bridge.param_groups[0]["lr"])
        with torch.no_grad():
            inner.apply([w.grad for w in weights], variables)

    names = ["step", *map(str, range(1, len(slots)))]
    values = [v._value.detach().clone() for v in _slots(optimizer)]
    group = {"params": weights, "lr": float(optimizer.learning_rate)}
    bridge = OptimizerBridge([group], replay)
    if optimizer.use_ema:  # averages of weights, which are evaluated
        averages = optimizer._model_variables_moving_average
        order = [id(slot) for slot in _slots(optimizer)]
        places = [order.index(id(average)) for average in averages]
        for place, average, weight in zip(places, averages, weights, strict=True):
            if not int(optimizer.iterations):
                average.assign(weight)  # as the first step does, too
            values[place] = average._value.detach()

        @torch.no_grad()
        def put_averages() -> None:
            for place, weight in zip(places, weights, strict=True):
                weight.copy_(bridge.state[weights[0]][names[place]])

        # the weights come back with the state
        vars(bridge).update(eval=put_averages, train=lambda: None)
    bridge.state[weights[0]] = dict(zip(names, values, strict=True))
    return bridge


def _slots(optimizer: Any) -> list[Any]:
    """Return the variables of an optimiser, the number of its steps first.

    The learning rate is a variable only where there is no schedule, and a shadow does not
    accumulate gradients.
    """
    others = [optimizer._learning_rate, *(getattr(optimizer, "_accumulated_gradients", None) or [])]
    return [v for v in optimizer.variables if not any(v is other for other in others)]


def _fixed_schedule(optimizer: Any) -> str | None:
    """Return the schedule of an optimiser that has a fixed end, in words."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of one that scales the loss
    rate, kinds = optimizer._learning_rate, keras.optimizers.schedules
    ends = isinstance(rate, (kinds.CosineDecay, kinds.PolynomialDecay))
    if not ends or getattr(rate, "cycle", False):
        return None
    return f"{type(rate).__name__}(decay_steps={rate.decay_steps})"


def _accumulated(optimizer: Any) -> int:
    """Return the number of batches in a step of an optimiser."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of one that scales the loss
    return inner.gradient_accumulation_steps or 1


def _step_gradients(optimizer: Any, gradients: Any) -> list[Any]:
    """Return the gradients by which an optimiser is about to step."""
    scale, number = optimizer.loss_scale_factor or 1.0, optimizer.gradient_accumulation_steps
    unscaled = [None if g is None else g / scale for g in gradients]
    if not number:
        return unscaled
    earlier = [v._value.detach() for v in optimizer._accumulated_gradients]
    return [None if g is None else (g + e) / number for g, e in zip(unscaled, earlier, strict=True)]


def in_rows(loader: DataLoader[Any], count: int | None, size: int | None) -> DataLoader[Any]:
    """Return a loader whose dataset has rows: that of Keras' arrays has only batches."""
    dataset: Any = loader.dataset
    if not hasattr(dataset, "__getitems__") or type(dataset).__getitem__ is not Dataset.__getitem__:
        return loader
    return DataLoader(
        range(count if count is not None else len(dataset)),  # type: ignore[arg-type]
        batch_size=size or BATCH_SIZE,
        collate_fn=lambda numbers: loader.collate_fn(dataset.__getitems__(numbers)),
    )


def fused_batch_norm(
    layer: Any, call: Callable[..., Any], inputs: Tensor, training: Any = None, mask: Any = None
) -> Any:
    """Return batch normalisation as one operation of PyTorch, in which samples can be separated.

    Keras computes it from means and products, after which every row depends on all others.
    """
    common = training and layer.trainable and mask is None and not getattr(layer, "renorm", False)
    if not common or len(inputs) == 1:
        return call(inputs, training=training, mask=mask)
    with torch.no_grad():
        dtype = call(inputs, training=True).dtype  # Keras updates its moving averages
    scale = layer.gamma.value if layer.scale else None
    shift = layer.beta.value if layer.center else None
    x = inputs.float().movedim(layer.axis, 1)
    out = F.batch_norm(x, None, None, scale, shift, training=True, eps=layer.epsilon)
    return out.movedim(1, layer.axis).to(dtype)
