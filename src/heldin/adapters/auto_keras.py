"""`heldin.keras.AutoStopping`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Literal

import keras
import numpy as np
import torch
from keras.src.saving.keras_saveable import KerasSaveable
from torch.utils.data import DataLoader, Dataset

from heldin.errors import HeldinError
from heldin.rules.estimated.base import Average, PathStopping
from heldin.rules.estimated.curves import Patience
from heldin.rules.estimated.shadows import PATIENCE

from .bridge import Bridge
from .estimating import EstimatingSession, own_loader, warn_of_seen_rows
from .keras_variables import Variables
from .session import Guard, MethodWrapper
from .settings import spelled_out

__all__ = ["AutoStopping", "Watched"]

SHOWN = ("heldin/estimate", "heldin/standard_error")  # the rest would crowd the progress bar


class AutoStopping(keras.callbacks.Callback):
    """Stops `fit` by an estimated test loss, and puts the best weights into the model.

    The model trains on all rows. Shadows of it train beside it by the compiled loss and optimiser,
    each without some of the rows, and their loss on these is the estimate: no validation data. The
    estimate and its standard error are in the logs of batches and epochs, as `heldin/estimate` and
    `heldin/standard_error`. Weights that are saved during training, by BackupAndRestore or
    ModelCheckpoint, hold the state as well.

    Data are arrays, or a PyTorch DataLoader over a map-style dataset. Clipping, schedules, weight
    decay, EMA and accumulated gradients of the optimiser are followed.

    Args:
        rule: "auto", "folds" or "shadow", see `heldin.stopping`.
        budget: for "auto": how many times the time of a plain run training may take (6).
        groups: (n,) names or numbers of the rows; equal ones are held out together.
        restore: put the weights of the best estimate into the model at the end.
        verbose: 1: tell what was chosen, and of the stop.
        memory: for "auto": bytes that the shadows may take (1 GiB).
        stratify: (n,) classes; each fold gets its share of every class.
        average, grid, patience, seed: see `heldin.FoldStopping`; average=None is the rule's own.

    Attributes:
        stopping: the rule of the last fit, with its history and estimate.
        stopped_epoch: the epoch in which training was stopped, 0 if it was not.

    >>> from heldin.keras import AutoStopping
    >>> callback = AutoStopping(budget=4)
    """

    @spelled_out
    def __init__(
        self,
        rule: Literal["auto", "folds", "shadow"] = "auto",
        budget: float | None = None,
        groups: Any = None,
        restore: bool = True,
        verbose: int = 0,
        *,
        memory: int | None = None,
        stratify: Any = None,
        average: Average | None = None,
        grid: float = 1.2,
        patience: Patience | None = PATIENCE,
        seed: int = 0,
    ) -> None:
        options = dict(locals())
        super().__init__()
        self._run = EstimatingSession("AutoStopping", options)
        self.verbose = verbose
        self.stopped_epoch = 0
        self._epoch = 0
        self._detours: list[MethodWrapper] = []
        self._guard = Guard(self._end)
        self._bridge: Any = None
        self._data: Any = None

    @property
    def stopping(self) -> PathStopping | None:
        """The rule of the last fit, with its history and estimate."""
        return self._run.stopping

    # -- the fit

    def set_model(self, model: Any) -> None:
        """Join the model, so that its weights are saved and restored with the state."""
        super().set_model(model)
        left = getattr(model, "_heldin_shadows", None)
        if left is not None:
            left.callback._end()  # that of a fit that ended in an error
        model._heldin_shadows = SavedWithWeights(self)

    def on_train_begin(self, logs: Any = None) -> None:
        """Follow the loaders of this fit, and look out for errors."""
        model, optimizer = self.model, self.model.optimizer
        if model._heldin_shadows.callback is not self:
            raise HeldinError("AutoStopping: there are two in this fit, but one state is saved")
        if model.jit_compile:
            raise HeldinError(
                "AutoStopping: steps of a compiled model cannot be followed; call model.compile "
                "with jit_compile=False"
            )
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise HeldinError(
                "AutoStopping: shadows do not scale their loss, as mixed_float16 needs; use "
                "mixed_bfloat16"
            )
        self.stopped_epoch = 0
        self._data = self._watch_fit().data_adapter
        self._guard.over(model, "train_function", "evaluate", "reset_metrics")
        self._detours += [
            MethodWrapper(self._data, "get_torch_dataloader", self._load),
            MethodWrapper(model, "train_step", self._train),
            MethodWrapper(optimizer, "apply", self._apply),
        ]

    def _watch_fit(self) -> Any:
        """Watch all that `fit` consists of, as nobody tells of an error in it; its iterator."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # fit and the list of callbacks are known to the stack only
            owner = frame.f_locals.get("self")
            if isinstance(owner, keras.callbacks.CallbackList):
                self._guard.over(owner, *(name for name in dir(owner) if name.startswith("on_")))
            batches = frame.f_locals.get("epoch_iterator") if owner is self.model else None
            if hasattr(batches, "_enumerate_iterator"):
                self._detours.append(MethodWrapper(batches, "_enumerate_iterator", self._batches))
                return batches
            frame = frame.f_back
        raise HeldinError("AutoStopping: it follows model.fit, and nothing else")

    def _batches(self, steps: Callable[[], Any]) -> Any:
        watched = self._guard.watched
        for first, last, data in Watched(steps(), watched):
            yield first, last, Watched(data, watched)

    def _load(self, load: Callable[[], Any]) -> Any:
        """The loader of an epoch."""
        return self._guard.watched(self._loaded, load)

    def _loaded(self, load: Callable[[], Any]) -> Any:
        loader = own_loader("AutoStopping", load())
        self._run.follow(loader)
        if not self._run.running:
            self._begin(loader)
        return loader

    def _begin(self, loader: DataLoader[Any]) -> None:
        model = self.model
        view = Variables(model)
        self._bridge = bridge_to(model.optimizer, view)
        trained = int(model.optimizer.iterations) > 0
        if trained and self._epoch == 0 and not self._run.state_waits:
            warn_of_seen_rows(
                "heldin.keras.AutoStopping", "or compile the model anew if those were other rows"
            )
        rule = self._run.begin(
            view,
            self._bridge,
            view.loss,
            in_rows(loader, getattr(self._data, "_num_samples", None)),
            eval_loss=view.row_losses if view.has_row_losses else None,
            engine="swap",  # variables are looked up in the model itself
            resumed=trained and self._epoch > 0,
            in_grad=False,  # Keras sums them up in variables of its own
        )
        if self.verbose:
            print(f"AutoStopping: {rule.reason_chosen}")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def _apply(self, apply: Callable[..., Any], gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """A step of the optimiser, unless gradients are accumulated."""
        optimizer = self.model.optimizer
        together = optimizer.gradient_accumulation_steps or 1
        due = (int(optimizer._iterations) + 1) % together == 0
        if self._bridge is not None:
            self._bridge.param_groups[0]["lr"] = float(optimizer.learning_rate)
        result = apply(gradients, *args, **kwargs)
        if due and self._bridge is not None:
            self._bridge.step()
        return result

    def _train(self, step: Callable[..., Any], data: Any) -> Any:
        """A batch, and what it says about the test loss."""
        logs = step(data)
        if self._run.running:
            self._run.add(data)
            if self._run.step():
                self.model.stop_training = True
                self.stopped_epoch = self._epoch
        return logs

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log."""
        self._log(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log."""
        self._log(logs)

    def _log(self, logs: Any) -> None:
        if logs is not None:
            logs.update({k: v for k, v in self._run.metrics().items() if k in SHOWN})

    def on_train_end(self, logs: Any = None) -> None:
        """Put the best weights into the model."""
        self._run.finish()
        self._end()
        if self.verbose and self.stopping is not None and self.stopping.should_stop:
            print(f"Epoch {self.stopped_epoch + 1}: early stopping ({self.stopping.reason})")

    def _end(self) -> None:
        self._run.end()
        self._guard.close()
        for detour in self._detours:
            detour.close()
        self._detours, self._bridge, self._data = [], None, None
        if getattr(self.model, "_heldin_shadows", None) is not None:
            del self.model._heldin_shadows

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """The state, to be kept by other means than the model's weights."""
        return self._run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the next fit."""
        self._run.load_state_dict(state)


def bridge_to(optimizer: Any, view: Variables) -> Bridge:
    """A Keras optimiser for the rule, and others of its kind for the shadows."""
    constraints = [v.constraint for v in view.trained]

    def make(groups: Sequence[dict[str, Any]], state: Any) -> Callable[[], None]:
        (group,) = groups
        weights = group["params"]
        config = optimizer.get_config()
        config |= {"learning_rate": 0.0, "gradient_accumulation_steps": None}
        inner = type(optimizer).from_config(config)
        variables = [keras.Variable(w, trainable=True, dtype=str(w.dtype)[6:]) for w in weights]
        for variable, constraint in zip(variables, constraints, strict=True):
            variable.constraint = constraint
        inner.build(variables)
        known = state.get(weights[0]) or {}
        for number, slot in enumerate(_slots(inner)):
            if str(number) in known:
                slot._value.data.copy_(known[str(number)])
        # they are changed in place, so that the state is always that of the last step
        state[weights[0]] = {str(n): v._value.detach() for n, v in enumerate(_slots(inner))}

        def step() -> None:
            inner.learning_rate.assign(group["lr"])
            with torch.no_grad():
                inner.apply([w.grad for w in weights], variables)

        return step

    weights = [v._value for v in view.trained]
    bridge = Bridge.to(make)([{"params": weights, "lr": float(optimizer.learning_rate)}])
    bridge.idle = True
    if optimizer.gradient_accumulation_steps is None:  # the same variables in the same order
        slots = {str(n): v._value.detach().clone() for n, v in enumerate(_slots(optimizer))}
        bridge.state[weights[0]] = slots
    return bridge


def _slots(optimizer: Any) -> list[Any]:
    """The variables of an optimiser; its rate is one only where there is no schedule."""
    return [v for v in optimizer.variables if v is not optimizer._learning_rate]


class _Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> int:
        return i


def in_rows(loader: DataLoader[Any], count: int | None) -> DataLoader[Any]:
    """A loader whose dataset has rows: that of Keras' arrays has only batches."""
    dataset: Any = loader.dataset
    if not hasattr(dataset, "__getitems__") or type(dataset).__getitem__ is not Dataset.__getitem__:
        return loader
    return DataLoader(
        _Numbers(count if count is not None else len(dataset)),
        batch_size=2,
        collate_fn=lambda numbers: loader.collate_fn(dataset.__getitems__(numbers)),
    )


class Watched:
    """An iterator whose errors are seen; its end is none."""

    def __init__(self, inner: Any, watched: Callable[..., Any]) -> None:
        self._inner, self._watched = iter(inner), watched

    def __iter__(self) -> Watched:
        return self

    def __next__(self) -> Any:
        nothing = object()
        found = self._watched(next, self._inner, nothing)
        if found is nothing:
            raise StopIteration
        return found


class SavedWithWeights(KerasSaveable):
    """Lies on a model while it is trained, and is saved and loaded with its weights."""

    def __init__(self, callback: AutoStopping) -> None:
        self.callback = callback

    def _obj_type(self) -> str:
        return "Loss"  # one of the kinds that Keras knows; it asks in order to skip attributes

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras."""
        file = io.BytesIO()
        torch.save(self.callback.state_dict(), file)
        store["state"] = np.frombuffer(file.getvalue(), dtype=np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras."""
        if "state" in store.keys():  # noqa: SIM118  (a store is no mapping)
            raw = bytes(np.asarray(store["state"], dtype=np.uint8))
            self.callback.load_state_dict(torch.load(io.BytesIO(raw), weights_only=True))
