"""heldin in Keras 3 on PyTorch: `model.fit(x, y, callbacks=[AutoStopping()])`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from heldin.capture.arguments import BatchDim
from heldin.capture.collector import BUDGET, Estimator
from heldin.criterion.evidence import Across, Correction, Dead, Groups
from heldin.rules.evidence import EvidenceStopping as Stopping

from .adapters.epochs import Epochs
from .adapters.session import Guard, MethodWrapper, StoppingSession, flat_metrics
from .adapters.settings import chosen, spelled_out
from .errors import HeldinError
from .rules.ranks import ProcessGroup
from .state.packed import packed, unpacked

try:
    import keras
    import numpy as np
    from keras.src.saving.keras_saveable import KerasSaveable
except ImportError as error:
    raise ImportError(
        f"heldin.keras needs Keras 3 on PyTorch ({error}): pip install 'heldin[keras]' and set "
        "KERAS_BACKEND=torch in the environment",
        name=error.name,
    ) from error
if keras.backend.backend() != "torch":
    raise ImportError(
        f"heldin.keras needs Keras 3 on PyTorch, but it runs on {keras.backend.backend()}: set "
        "KERAS_BACKEND=torch in the environment, before keras is imported"
    )

from .adapters.auto_keras import AutoStopping, Watched

__all__ = ["AutoStopping", "EvidenceStopping"]

IN_TORCH = re.compile(r"/[\w.]*_torch_params\.")  # where PyTorch has the variables of a Keras model


class EvidenceStopping(keras.callbacks.Callback):
    """Stops `fit` by evidence, in the middle of an epoch if need be; no validation data.

    The step that asks for the stop leaves the weights as they are. The criterion is in the logs of
    batches and epochs, as `heldin/criterion`, for Keras' History and the callbacks that come later
    in the list. Weights that are saved during training, by BackupAndRestore or ModelCheckpoint,
    hold the state as well.

    Args:
        patience: number of consecutive checks that must ask for a stop.
        verbose: 1: tell of the stop.
        start_from_epoch: number of first epochs in which training is never stopped.
        log_groups: also log the value of each group of parameters.
        window: number of steps whose sums add up before a value is formed; "epoch": those of an
            epoch, by the number of its batches, which is better on few data.
        groups, smoothing and the others: see `heldin.EvidenceStopping`.

    Attributes:
        stopping: the `heldin.EvidenceStopping` of the last fit, with its history.
        stopped_epoch: the epoch in which training was stopped, 0 if it was not.

    >>> from heldin.keras import EvidenceStopping
    >>> callback = EvidenceStopping(patience=3, start_from_epoch=2)
    """

    @spelled_out
    def __init__(
        self,
        patience: int = 1,
        verbose: int = 0,
        start_from_epoch: int = 0,
        log_groups: bool = False,
        *,
        groups: Groups = "tensor",
        smoothing: float = 0.9,
        window: int | Literal["epoch"] = 1,
        warmup: int = 0,
        every: int = 1,
        arming: float | None = 0.5,
        across: Across = "median",
        weighted: bool = True,
        start: float | None = None,
        correction: Correction = None,
        dead: Dead = "out",
        reduction: Literal["mean", "sum"] = "mean",
        estimator: Estimator = "sampled",
        budget: int = BUDGET,
        seed: int = 0,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        process_group: ProcessGroup = "auto",
        history: int = 4096,
    ) -> None:
        options = chosen(locals())
        super().__init__()
        self._run = StoppingSession("EvidenceStopping", options)
        self.verbose, self.start_from_epoch, self.log_groups = verbose, start_from_epoch, log_groups
        self.stopped_epoch = 0
        self._epoch = 0
        self._detours: list[MethodWrapper] = []
        self._epochs = Epochs("heldin.keras.EvidenceStopping")
        self._guard = Guard(self._end)
        self._due = False  # the fit that begins with the next epoch

    @property
    def stopping(self) -> Stopping | None:
        """The `heldin.EvidenceStopping` of the last fit, with its history."""
        return self._run.stopping

    # -- the fit

    def set_model(self, model: Any) -> None:
        """Join the model, so that its weights are saved and restored with the state."""
        super().set_model(model)
        left = getattr(model, "_heldin_state", None)
        if left is not None:
            left.callback._end()  # that of a fit that ended in an error
        model._heldin_state = SavedWithWeights(self)

    def on_train_begin(self, logs: Any = None) -> None:
        """Look out for errors."""
        if self.model._heldin_state.callback is not self:
            raise HeldinError("EvidenceStopping: there are two in this fit, but one state is saved")
        if self.model.jit_compile:
            raise HeldinError(
                "EvidenceStopping: gradients of single samples cannot be seen in a compiled model; "
                "call model.compile with jit_compile=False"
            )
        self.stopped_epoch = 0
        self._due = True
        self._watch_fit()

    def _begin(self) -> None:
        self._due = False
        self._epochs.reset()
        self._guard.over(self.model, "train_function", "evaluate", "reset_metrics")
        steps = (self.params or {}).get("steps")
        inner = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        together = inner.gradient_accumulation_steps or 1
        stopping = self._run.begin(self.model, steps / together if steps else None)
        stopping._collector.keeps_all_passes = True  # the optimiser adds gradients up by itself
        # Keras calls its layers past the hooks of PyTorch, and makes whole steps of its own
        self._detours += [
            MethodWrapper(self.model, "call", stopping.call),
            MethodWrapper(self.model.optimizer, "apply", self._apply),
        ]
        for layer in self.model._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization):
                self._detours.append(MethodWrapper(layer, "call", partial(in_one_piece, layer)))

    def _watch_fit(self) -> None:
        """Watch all that `fit` consists of, as nobody tells of an error in it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # fit and the list of callbacks are known to the stack only
            owner = frame.f_locals.get("self")
            if isinstance(owner, keras.callbacks.CallbackList):
                self._guard.over(owner, *(name for name in dir(owner) if name.startswith("on_")))
            batches = frame.f_locals.get("epoch_iterator") if owner is self.model else None
            if hasattr(batches, "_enumerate_iterator"):
                self._detours.append(MethodWrapper(batches, "_enumerate_iterator", self._batches))
                break
            frame = frame.f_back

    def _batches(self, steps: Callable[[], Any]) -> Any:
        watched = self._guard.watched
        for first, last, data in Watched(steps(), watched):
            yield first, last, Watched(data, watched)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Watch the model: not before all callbacks have begun, which may fail."""
        self._epoch = epoch
        if self._due:
            self._begin()
        self._epochs.begin(self.stopping)

    def _apply(self, apply: Callable[..., Any], gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Weigh the evidence before gradients are applied, if they are and not accumulated."""
        stopping, optimizer = self.stopping, self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of one that scales the loss
        together = inner.gradient_accumulation_steps or 1
        due = (int(inner._iterations) + 1) % together == 0  # `iterations` counts the updates
        if due and stopping is not None and stopping.watching:
            stop = stopping.step()
            if stop and self._epoch >= self.start_from_epoch:
                self.stopped_epoch = self._epoch
                self.model.stop_training = True
                return None
        return apply(gradients, *args, **kwargs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log."""
        self._epochs.batch()
        self._log(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log, and say so if nothing was seen."""
        self._epochs.end(self.stopping)
        self._log(logs)

    def _log(self, logs: Any) -> None:
        if logs is not None and self.stopping is not None:
            few = ("heldin/criterion", "heldin/group/")  # the rest would crowd the progress bar
            for name, value in flat_metrics(self.stopping, self.log_groups).items():
                if name.startswith(few):
                    logs[IN_TORCH.sub("/", name)] = value

    def on_train_end(self, logs: Any = None) -> None:
        """Watch no more."""
        self._end()
        if self.verbose and self.stopping is not None and self.stopping.should_stop:
            print(f"Epoch {self.stopped_epoch + 1}: early stopping ({self.stopping.reason})")

    def _end(self) -> None:
        self._run.end()
        self._guard.close()
        for detour in self._detours:
            detour.close()
        self._detours = []
        if getattr(self.model, "_heldin_state", None) is not None:
            del self.model._heldin_state

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """The state, to be kept by other means than the model's weights."""
        return self._run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the next fit."""
        self._run.load_state_dict(state)


def in_one_piece(
    layer: Any, call: Callable[..., Any], inputs: Tensor, training: Any = None, mask: Any = None
) -> Any:
    """Batch normalisation as one operation of PyTorch, in which samples can be told apart.

    Keras puts it together from means and products, after which every row depends on all others.
    """
    common = training and layer.trainable and mask is None and not getattr(layer, "renorm", False)
    if not common or len(inputs) == 1:
        return call(inputs, training=training, mask=mask)
    with torch.no_grad():
        dtype = call(inputs, training=True).dtype  # the moving averages are Keras' affair
    scale = layer.gamma.value if layer.scale else None
    shift = layer.beta.value if layer.center else None
    x = inputs.float().movedim(layer.axis, 1)
    out = F.batch_norm(x, None, None, scale, shift, training=True, eps=layer.epsilon)
    return out.movedim(1, layer.axis).to(dtype)


class SavedWithWeights(KerasSaveable):
    """Lies on a model while it is trained, and is saved and loaded with its weights."""

    def __init__(self, callback: EvidenceStopping) -> None:
        self.callback = callback

    def _obj_type(self) -> str:
        return "Loss"  # one of the kinds that Keras knows; it asks in order to skip attributes

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras."""
        text = json.dumps(packed(self.callback.state_dict()))
        store["state"] = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras."""
        if "state" in store.keys():  # noqa: SIM118  (a store is no mapping)
            text = bytes(np.asarray(store["state"], dtype=np.uint8)).decode("utf-8")
            self.callback.load_state_dict(unpacked(json.loads(text)))
