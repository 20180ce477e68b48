"""heldin in Lightning: `Trainer(callbacks=[EarlyStopping()])`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .adapters.arguments import check_elementwise, needs_framework, strict_kwargs
from .adapters.patches import Patches, replaced
from .adapters.session import flat_metrics
from .adapters.stopping import FrameworkStopping
from .errors import HeldinError
from .loop.hooks import after_every_step
from .pause import is_paused
from .rules.elementwise import ElementwiseStopping as Elementwise
from .shadows.held_out import FrameworkLoss
from .shadows.replayed import Clip

with needs_framework("Lightning", "lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = ["EarlyStopping", "ElementwiseStopping"]

NO_LOSS = (
    "EarlyStopping: training_step gave no loss to self.manual_backward, from which shadows get it; "
    "call that instead of loss.backward()"
)


class EarlyStopping(FrameworkStopping, Callback):
    """Stops a `Trainer` without a validation loop, in the middle of an epoch if need be.

    Rules by an estimated test loss: the module trains on all rows. Shadows of it train beside it by
    its own `training_step`, each without some of the rows, and their loss on these is the estimate,
    logged as `heldin/estimate` and `heldin/standard_error` and shown in the progress bar. The best
    weights are put into the module at the end. For automatic or manual optimisation, one
    optimiser, a DataLoader over a map-style dataset, in one process or in several
    (strategy="ddp"). In manual optimisation, losses are given to `self.manual_backward`, one batch
    has at most one step, and the loss that the step returns, if any, is the one that is estimated.
    An average of the weights by Lightning's `WeightAveraging` is what is estimated and restored, if
    it is updated after steps.

    Evidence: the step that asks for the stop leaves the weights as they are; values are logged as
    `heldin/criterion` and others. `min_epochs` and `min_steps` of the Trainer are respected.

    State is in the Trainer's checkpoints.

    Args:
        rule: "auto", "folds", "shadow", "evidence", or one of `heldin.rules`.
        restore: put the weights of the best estimate into the module at the end.
        verbose: print at the end what was chosen, why it stopped and what to expect.
        log_groups: also log the value of each group of parameters, for evidence.
        others: see `heldin.EarlyStopping`; eval_loss and predict are functions of module and batch.
            Outputs are what the module, or a single child of it, returned in `training_step`, else
            what `predict_step` returns.

    Attributes:
        stopping: the rule of the last run, with its history and estimate.
        estimates, out_of_fold, temperature: results, see `heldin.EarlyStopping`.
        stopped_epoch: the epoch in which training was stopped, 0 if it was not.
        stopping_reason_message: why.

    >>> import lightning
    >>> from heldin.lightning import EarlyStopping
    >>> trainer = lightning.Trainer(
    ...     callbacks=[EarlyStopping(budget=4)], barebones=True, max_epochs=100
    ... )
    """

    stopped_epoch = 0
    stopping_reason_message: str | None = None
    _loss: ShadowTrainingStep | None = None
    _delivered: Any = None  # the coming batch, as the loader returned it
    _average: Any = None  # Lightning's callback that averages weights

    # -- the run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Follow the loaders from their beginning.

        `trainer.estimated_stepping_batches` reads them in `configure_optimizers`, before
        `on_fit_start`.
        """
        if stage != "fit":
            return
        self._end()
        if trainer.global_step:  # fit() continues the last run
            self._run.carry_over()
        if self.by_evidence:
            return
        averages = (c for c in trainer.callbacks if isinstance(c, callbacks.WeightAveraging))
        self._average = next(averages, None)
        _check_trainer(trainer)

        def process(processed: Callable[[Any], Any], loader: Any) -> Any:
            loader = processed(loader)
            if trainer.training:
                self._run.follow(loader)
            return loader

        def convert(converted: Callable[[Any], Any], batch: Any) -> Any:
            self._delivered = batch
            return converted(batch)

        self._patches.wrap(trainer.strategy, "training_step", self._train)
        self._patches.wrap(trainer.strategy, "process_dataloader", process)
        self._patches.wrap(trainer.precision_plugin, "convert_input", convert)

    def _train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._run.begin_batch()
        return step(*args, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the run, once module and optimiser are as the checkpoint has them."""
        epoch_steps = trainer.num_training_batches / trainer.accumulate_grad_batches
        if self.by_evidence:
            stopping = self._run.begin(pl_module, epoch_steps=epoch_steps)
            watch_step(self._patches, pl_module, stopping.call)
            return
        if len(trainer.optimizers) != 1:
            raise HeldinError(
                f"EarlyStopping: the model is trained by {len(trainer.optimizers)} optimisers, and "
                "shadows follow one. Put the parameters into groups of one optimiser, or use "
                "rule='evidence'"
            )
        loss = self._loss = ShadowTrainingStep(trainer, pl_module)
        plugin, strategy = trainer.precision_plugin, trainer.strategy

        def prepare(batch: Any) -> Any:
            batch = type(plugin).convert_input(plugin, batch)
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
            return strategy.batch_to_device(batch, dataloader_idx=0)

        def predict_step(model: Any, batch: Any) -> Any:
            return model.predict_step(batch, 0)

        inputs, predicts = self._run.inputs, is_overridden("predict_step", pl_module)
        if self._average is not None:
            if trainer.world_size > 1 or self._run.next_state.get("last"):
                raise HeldinError(
                    f"EarlyStopping: {type(self._average).__name__} is followed in one process and "
                    "in one fit; leave it out, or use rule='evidence'"
                )
            follow_average(self._patches, self._average, trainer, pl_module)
        self._run.begin(
            pl_module,
            trainer.optimizers[0],
            loss,
            trainer.train_dataloader,
            prepare=prepare,
            eval_loss=loss.evaluated(inputs.eval_loss),
            outputs=replace(
                inputs.outputs,
                predict=loss.evaluated(inputs.outputs.predict),
                fallback=loss.evaluated(predict_step if predicts else None),
            ),
            clip=_clip(trainer, pl_module, loss),
            averaged_model=getattr(self._average, "_average_model", None),
            resumed=trainer.global_step > 0,
            pools_ranks=True,
            epoch_steps=epoch_steps,
        )

    def on_train_batch_start(self, *_: Any) -> None:
        """Prepare for the next batch."""
        if self.by_evidence:
            self._run.begin_batch()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Form the evidence since the last step, once for all optimisers of a batch."""
        run = self._run
        if not self.by_evidence or not run.running:
            return
        formed, stop = run.evidence_formed, run.before_step()
        if not formed:
            stop = trainer.strategy.reduce_boolean_decision(stop, all=False)
            pl_module.log_dict(run.metrics(), on_step=True, on_epoch=False)
            if stop:
                self._stop(trainer)
        epoch, step = trainer.current_epoch, trainer.global_step + 1
        may_stop = epoch >= (trainer.min_epochs or 0) and step >= (trainer.min_steps or 0)
        scales = getattr(trainer.precision_plugin, "scaler", None) is not None
        if stop and may_stop and not scales:  # a scaler needs gradients to step
            run.keep_weights()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Follow the step of the optimiser, log, and ask for the stop."""
        if self.by_evidence:
            if pl_module.automatic_optimization:
                self._run.drop_passes()
        elif self._loss is not None:
            self._loss.batch_idx = batch_idx
            self._run.add(batch, self._delivered)
            stop = self._run.step()
            values, shown = self._run.metrics(), self._run.shown()
            others = {name: value for name, value in values.items() if name not in shown}
            pl_module.log_dict(shown, on_step=True, on_epoch=False, prog_bar=True)
            pl_module.log_dict(others, on_step=True, on_epoch=False)
            if stop:
                self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        """Ask for the stop, and report it once."""
        trainer.should_stop = True
        if self._run.just_stopped:
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = f"{self.stopping.reason}. Signaling Trainer to stop."

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Warn of an epoch in which nothing was observed."""
        self._run.end_epoch()
        average, epoch = self._average, trainer.current_epoch
        if average is not None and average.should_update(epoch_idx=epoch):
            raise HeldinError(
                f"EarlyStopping: {type(average).__name__} averages weights at the end of an "
                "epoch, and shadows do so after steps alone; let it update by steps, or use "
                "rule='evidence'"
            )

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Put the best weights into the module, and log the results."""
        values = self._conclude()
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, trainer.global_step)
        self._end()

    def on_fit_end(self, *_: Any) -> None:
        """Release the module."""
        self._end()

    on_exception = on_fit_end

    def _end(self) -> None:
        super()._end()
        self._loss = self._delivered = self._average = None

    # -- checkpoints

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint."""
        return "heldin.lightning.EarlyStopping" + (".evidence" if self.by_evidence else "")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {
            "run": self._run.state_dict(),
            "stopped_epoch": self.stopped_epoch,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the checkpoint was made."""
        self._run.load_state_dict(state_dict["run"])
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.stopping_reason_message = state_dict["stopping_reason_message"]


class ElementwiseStopping(Callback):
    """Stops single weights by evidence: wraps the optimisers that the module configures.

    The averages are kept with the optimiser's state in the Trainer's checkpoints, the fraction of
    stopped weights is logged as `heldin/stopped`.

    Args:
        log_groups: also log the stopped fraction of each parameter.
        greedy, smoothing and the others: see `heldin.ElementwiseStopping`.

    Attributes:
        optimizers: the `heldin.ElementwiseStopping` around each optimiser of the last run.

    >>> import lightning
    >>> from heldin.lightning import ElementwiseStopping
    >>> callback = ElementwiseStopping(smoothing=0.99)
    >>> trainer = lightning.Trainer(callbacks=[callback], barebones=True, max_epochs=100)
    """

    @strict_kwargs(extends=Elementwise.__init__, without=("optimizer", "model"))
    def __init__(self, log_groups: bool = False, **options: Any) -> None:
        check_elementwise(options)
        self._options, self.log_groups = options, log_groups
        self.optimizers: list[Elementwise] = []
        self._patches = Patches()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the optimisers; their state is restored after this."""
        self.optimizers = [Elementwise(o, pl_module, **self._options) for o in trainer.optimizers]
        trainer.strategy.optimizers = list(self.optimizers)
        for optimizer in self.optimizers:
            watch_step(self._patches, pl_module, optimizer.call)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the stopped fractions; of several optimisers, that of the first."""
        due = trainer.global_step % max(1, trainer.log_every_n_steps) == 0
        if due or trainer.should_stop:  # counting them takes time
            values = flat_metrics(self.optimizers[0], self.log_groups)
            pl_module.log_dict(values, on_step=True, on_epoch=False)

    def on_fit_end(self, *_: Any) -> None:
        """Release the module."""
        for optimizer in self.optimizers:
            optimizer.close()
        self._patches.close()

    on_exception = on_fit_end


def watch_step(patches: Patches, module: LightningModule, call: Callable[..., Any]) -> None:
    """Let a module's `training_step`, which need not call its `forward`, count the samples.

    With manual optimisation the backward pass lies inside of it, so `forward` has to be called.
    """

    def around(step: Callable[..., Any], batch: Any, *rest: Any, **named: Any) -> Any:
        return call(lambda batch: step(batch, *rest, **named), batch)  # no numbers of batches

    if module.automatic_optimization:
        patches.wrap(module, "training_step", around)


def follow_average(patches: Patches, averaging: Any, trainer: Any, module: nn.Module) -> None:
    """Update an average of weights right after the optimiser's step, and after those of shadows."""
    due = False

    def update() -> None:
        nonlocal due
        if not is_paused():  # the step of the module; Lightning will not ask again
            due = averaging.should_update(step_idx=trainer.global_step)
            averaging._latest_update_step = trainer.global_step + 1
        if due:
            averaging._average_model.update_parameters(module)

    patches.callback(after_every_step(trainer.optimizers[0], update))


def _check_trainer(trainer: Trainer) -> None:
    """Refuse weights and losses that shadows do not follow."""
    if any(isinstance(c, callbacks.StochasticWeightAveraging) for c in trainer.callbacks):
        raise HeldinError(
            "EarlyStopping: StochasticWeightAveraging averages weights at the end of epochs, and "
            "shadows do so after steps alone; use Lightning's EMAWeightAveraging, rule='evidence', "
            "or heldin.EarlyStopping(averaged_model=) in a loop of your own"
        )
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise HeldinError(
            f"EarlyStopping: {type(trainer.strategy).__name__} divides the weights among the "
            "processes, and shadows have them whole; use strategy='ddp', or rule='evidence'"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise HeldinError(
            "EarlyStopping: shadows do not scale their loss, as precision='16-mixed' needs; use "
            "'bf16-mixed'"
        )


def _clip(trainer: Trainer, module: LightningModule, loss: ShadowTrainingStep) -> Clip | None:
    """Return how gradients are clipped in this run."""
    if not module.automatic_optimization:
        return loss.clip
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if is_overridden("configure_gradient_clipping", module):
        return lambda parameters: module.configure_gradient_clipping(
            torch.optim.SGD(parameters, lr=0.0), value, algorithm
        )
    return clip_by(value, algorithm) if value else None


def clip_by(value: float, algorithm: str | None) -> Callable[[list[nn.Parameter]], Any]:
    """Return a function that clips gradients as Lightning does."""
    by_norm = algorithm in (None, "norm")
    clip = nn.utils.clip_grad_norm_ if by_norm else nn.utils.clip_grad_value_
    return lambda parameters: clip(parameters, value)


class ShadowTrainingStep(FrameworkLoss):
    """The loss of a batch by a module's `training_step`, without its logs and steps.

    With manual optimisation the loss is the sum of what is given to `manual_backward` (of held-out
    rows: what the step returns, if it does), and `clip_gradients` is noted for `clip`.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        logger = DummyLogger()
        self._trainer = _Proxy(trainer, logger=logger, loggers=[logger])
        self._module = module
        self._manual = self.divided = not module.automatic_optimization
        self.batch_idx = 0  # of the coming step
        names = inspect.signature(module.training_step).parameters
        if "dataloader_iter" in names:
            raise HeldinError(
                "EarlyStopping: a training_step that takes dataloader_iter draws its batches "
                "itself; let it take batch, or use rule='evidence'"
            )
        self._takes_index = len(names) > 1
        self._clipping: tuple[Any, Any] | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss."""
        losses: list[Tensor] = []
        arguments = (batch, self.batch_idx) if self._takes_index else (batch,)
        context = self._trainer.precision_plugin.train_step_context()
        with self._muted(model, losses), context:
            try:
                out = model.training_step(*arguments)  # type: ignore[operator]
            except RuntimeError as error:
                if self._manual and "does not require grad" in str(error):
                    raise HeldinError(NO_LOSS) from error  # a backward pass in an evaluation
                raise
        loss = out.get("loss") if isinstance(out, Mapping) else out
        if self._manual:
            if not losses:
                raise HeldinError(NO_LOSS)
            if isinstance(loss, Tensor) and not torch.is_grad_enabled():
                return loss  # an evaluation: not divided by a number of accumulated batches
            return sum(losses[1:], losses[0])
        if not isinstance(loss, Tensor):
            raise HeldinError(
                "EarlyStopping: training_step returned None, as it does to skip a batch, and "
                "held-out rows need a loss; let it return one for every batch, leave those rows "
                "out of the dataset, or use rule='evidence'"
            )
        return loss

    def evaluated(self, function: Callable[[Any, Any], Any] | None) -> Any:
        """Return another loss or prediction of held-out rows, under the same conditions."""

        def evaluate(model: nn.Module, batch: Any) -> Any:
            assert function is not None
            with self._muted(model, []), self._trainer.precision_plugin.val_step_context():
                return function(model, batch)

        return None if function is None else evaluate

    def clip(self, parameters: list[nn.Parameter]) -> None:
        """Clip gradients as the manual step has done, if it has."""
        if self._clipping is not None:
            clip_by(*self._clipping)(parameters)

    def shares(self, batches: list[Any]) -> list[float]:
        """Return the factors of the losses of accumulated batches.

        Lightning divides by the batches of a full step, also where an epoch ends before; a module
        with manual optimisation divides its losses itself.
        """
        number = 1 if self._manual else self._trainer.accumulate_grad_batches
        return [1.0 / number] * len(batches)

    def _muted(self, model: nn.Module, losses: list[Tensor]) -> AbstractContextManager[None]:
        """Replace what logs, steps and clips; collect the losses given to `manual_backward`."""
        module, kind = self._module, type(self._module)
        quiet: dict[str, Any] = {"log": _nothing, "log_dict": _nothing}
        if self._manual:
            quiet |= {
                "manual_backward": lambda loss, *_, **__: losses.append(loss),
                "optimizers": lambda *args, **kw: _passive(kind.optimizers(module, *args, **kw)),
                "lr_schedulers": lambda: _passive(kind.lr_schedulers(module)),
                "clip_gradients": self._note_clipping,
                "toggle_optimizer": _nothing,
                "untoggle_optimizer": _nothing,
            }
        places = [(model, name, value) for name, value in quiet.items()]
        places += [(m, "_trainer", self._trainer) for m in model.modules() if "_trainer" in vars(m)]
        return replaced(places)

    def _note_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if gradient_clip_val is not None:
            self._clipping = gradient_clip_val, gradient_clip_algorithm


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Proxy:
    """An object in which some attributes are replaced; what is set stays here."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        vars(self).update(replaced, _heldin_inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_heldin_inner"], name)


def _passive(inner: Any) -> Any:
    """Return optimisers or schedulers that do not step; the shadow resets the gradients."""
    if isinstance(inner, list):
        return [_passive(item) for item in inner]
    quiet = {
        "step": _evaluate,
        "zero_grad": _nothing,
        "toggle_model": lambda *_, **__: nullcontext(),
    }
    return None if inner is None else _Proxy(inner, **quiet)


def _evaluate(*args: Any, **kwargs: Any) -> Any:
    """Evaluate the closure of a step, if there is one."""
    closure = next((a for a in (*args, kwargs.get("closure")) if callable(a)), None)
    return closure() if closure is not None else None
