"""Shadows of a model on tensors (inputs ..., targets), trained in one stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin._private_torch import BatchNorm, Dropout
from heldin.crossval import OutOfFold
from heldin.errors import HeldinError
from heldin.loop.events import OptimizerStep
from heldin.loop.loaders import LoaderRecorder, is_followed
from heldin.loop.matching import WAY_OUT, RowMatcher
from heldin.loop.randomness import full_precision
from heldin.shadows.bare_model import copy_without_hooks
from heldin.shadows.engines import CannotStack, Engine
from heldin.shadows.held_out import EXAMPLE
from heldin.shadows.labels import LOOKED_AT, subsample_held_out, visible
from heldin.shadows.light import RowDraw, level_rows
from heldin.shadows.outputs import OutputRecipe
from heldin.shadows.plain_step import PlainStepCheck
from heldin.shadows.replayed import CHANGED, LIGHT_SUM, Announced, has_evaluation_mode, release
from heldin.shadows.stack import Stack
from heldin.shadows.tensors import CHUNK, TensorData
from heldin.state.schema import check_schema

__all__ = ["CannotStack", "StackedShadows"]

FEW = 4  # rows on which copies are compared with the model
TOGETHER = 16  # steps of a loop that the copies take one after the other
MOST_WAITING = 1 << 20  # numbers in the inputs of steps that wait
Settings = Sequence[Mapping[str, Any]]
SHOWN = 256  # rows of which the training loss is shown, no more than are held out


class StackedShadows:
    """K copies of the model; `label` says for each row which of them is tested on it (-1: none)."""

    same_loss, takes_batches = True, False  # see `ReplayedShadows`

    def __init__(
        self,
        owner: str,
        model: nn.Module,
        optimizer: Optimizer,
        data: TensorData,
        label: Tensor,
        engine: Engine,
        seed: int,
        clip: Any = None,
        rows: float = 1.0,
        in_time: bool = False,
        sees: Tensor | None = None,
    ) -> None:
        if clip is not None and not isinstance(clip, (int, float)):
            raise HeldinError(
                "clip: stacked shadows clip by the norm only, give the largest one; a function "
                "needs batch_loss, or engine='replay'"
            )
        self._owner, self._clip = owner, clip
        self.data, self.label, self.seed = data, label.to(data.rows.targets.device), seed
        self.copies = int(label.max()) + 1
        self._model, self._optimizer, self._engine = model, optimizer, engine
        self._targets = data.loss.prepare(data.rows.targets)
        self.inside = False  # whether the model itself is trained in the stack, as one more copy
        self._stack = Stack(model, optimizer, self.copies, data.rows.inputs, engine)
        self._waiting: list[tuple[Sequence[Tensor], Tensor, Settings]] = []  # steps not yet taken
        self._modes: Sequence[bool] = ()  # `training` of the modules in these steps
        self._layers = [m for m in model.modules() if isinstance(m, (BatchNorm, Dropout))]
        self._live: list[dict[str, Any]] = []  # their settings in these steps
        self._start = self.stack.state_of(0) if rows < 1.0 else None
        self.engine = self.stack.engine  # how the shadows are run
        self._plain = PlainStepCheck(owner, model, optimizer, clip)
        self.check = self._plain.steps
        if has_evaluation_mode(optimizer):
            raise CannotStack(
                "the optimiser keeps other weights for evaluation; use engine='replay'"
            )
        if data.loss.kind == "other":
            raise CannotStack(
                "loss_fn is neither the mean nor the sum of its rows' losses (class weights, "
                "ignored targets); use engine='replay'"
            )
        if rows < 1.0 and data.loss.kind == "sum":
            raise HeldinError(LIGHT_SUM)
        self.draw, self._in_time = RowDraw(rows, seed), in_time
        self._sees = None if sees is None else sees.to(self.label.device)
        self._level_rows = level_rows(label, in_time=in_time) if rows < 1.0 else []
        self.level_count = sum(len(each) for each in self._level_rows)
        with torch.no_grad(), self._perturbed():
            if not self._computes_as_model():
                raise CannotStack(
                    "copies of the model do not compute what the model computes (a function that "
                    "keeps a submodule, or a hook); use engine='replay'"
                )
        self._find = RowMatcher(data.rows)
        self.recorder: LoaderRecorder | None = None  # where the loader's rows can be recorded
        loader = data.rows.loader
        if loader is not None and loader.batch_sampler is not None and not is_followed(loader):
            if getattr(loader, "in_order", True):
                self.recorder = LoaderRecorder(loader, rows_only=True)
        self._recipe: OutputRecipe | None = None
        self._outputs: Tensor | None = None
        self._steps = 0
        self._place()

    def _place(self) -> None:
        """Where the held-out rows of every shadow lie: (K, r) row numbers, padded with row 0."""
        own = subsample_held_out(self.label, LOOKED_AT)
        own += [own[0][:0]] * (self.stack.copies - len(own))
        width = max(len(rows) for rows in own)
        self._held = torch.stack([torch.cat([r, r.new_zeros(width - len(r))]) for r in own])
        device = self.label.device
        self._real = torch.stack([torch.arange(width, device=device) < len(r) for r in own])
        self._numbers_of_copies = torch.arange(len(own), device=device).unsqueeze(1)
        self._looked_at = torch.cat(own).sort().values
        self.held = len(self._looked_at)
        self._shown = min(SHOWN, self.held)

    # -- training

    @property
    def stack(self) -> Stack:
        """The copies, after all steps so far.

        Steps of a loop wait until there are several: one after the other without the loop's own
        between them, they take half the time, as what they use stays in the processor's cache.
        """
        steps, self._waiting = self._waiting, []
        if steps:
            with (
                torch.inference_mode(False),
                full_precision(self.label.device.type),
                self._plain.exchange.modes(self._modes),
                _with_settings(self._layers, self._live),
            ):
                for inputs, index, settings in steps:
                    self.advance(inputs, index, settings)
        return self._stack

    def follow(self, step: OptimizerStep, announced: Announced) -> int:
        """Repeat an optimiser step for every shadow; return the number of its rows."""
        if self.inside:
            raise HeldinError("step: train() takes the steps itself; it is one or the other")
        self.data.check_loss()
        inputs = tuple(
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in zip(*(call.tensors for call in step.calls), strict=True)
        )
        numbers = [rows for _, rows in announced if rows is not None]
        if not numbers and not inputs:
            raise HeldinError(
                "step: the optimiser stepped, but the model was not called since the last step; "
                + WAY_OUT
            )
        index = torch.cat(numbers or [self._rows_of(call.tensors) for call in step.calls])
        if step.changed_storages():
            raise HeldinError(CHANGED)
        if not inputs:
            inputs = tuple(x[index] for x in self.data.rows.inputs)
        if len(inputs[0]) != len(index):
            raise HeldinError(
                f"step: the model was called with {len(inputs[0])} rows since the last step, but "
                f"{len(index)} row numbers are known for it; call step() after every optimiser step"
            )
        self._plain.follow(step, self.data.loss_of, index)
        modes = step.calls[-1].modes if step.calls else ()
        modes = modes or tuple([module.training for module in self._model.modules()])
        live = [_settings_of(layer) for layer in self._layers]
        if modes != self._modes or live != self._live:
            _ = self.stack
            self._modes, self._live = modes, live
        # the loop may use its tensors again
        self._waiting.append((tuple(x.clone() for x in inputs), index, step.settings))
        count = self._steps + len(self._waiting)
        size = sum(x.numel() for x in inputs) * len(self._waiting)
        if len(self._waiting) >= TOGETHER or size > MOST_WAITING:
            _ = self.stack
        if count & (count - 1) == 0 and not self._computes_as_model():
            raise HeldinError(
                f"{self._owner}: at step {step.number} the stacked copies of the model no longer "
                "compute what the model computes. Was a setting of a module changed, or a hook "
                "added? Use rule=heldin.rules.Folds(engine='replay'), which runs the model itself"
            )
        return len(index)

    def _rows_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the rows of a call: by the loader's batch, by contents, by the only batch."""
        recorder = self.recorder
        rows = None if recorder is None else recorder.rows_of_call(tensors)
        if rows is None:
            try:
                return self._find(tensors)
            except HeldinError:
                rows = None if recorder is None else recorder.rows_of_call(tensors, certain=False)
                if rows is None:
                    raise
        return rows.to(self.label.device)

    @contextmanager
    def _perturbed(self) -> Iterator[None]:
        """Move the weights of the first copy away from the model's."""
        first = self.stack.copy_of(0)
        before = {name: value.clone() for name, value in first.items()}
        generator = torch.Generator().manual_seed(0)
        for value in (value for value in first.values() if value.is_floating_point()):
            noise = torch.rand(value.shape, generator=generator).to(value)
            value.mul_(1 + 0.1 * noise).add_(0.01)
        try:
            yield
        finally:
            for name, value in first.items():
                value.copy_(before[name])

    def _computes_as_model(self) -> bool:
        """Return whether the model has the outputs of the first copy, with its weights."""
        some = [x[:FEW] for x in self.data.rows.inputs]
        stacked = self.stack.evaluate([x.expand(self.stack.copies, *x.shape) for x in some])[0]
        weights = self.weights_of(0)
        outputs = self._plain.evaluate(weights, some)
        close = 1e-9 if stacked.dtype == torch.float64 else 1e-3
        size = float(stacked.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
        return stacked.shape == outputs.shape and torch.allclose(
            stacked, outputs, rtol=close, atol=close * size + 1e-12, equal_nan=True
        )

    def advance(self, inputs: Sequence[Tensor], index: Tensor, settings: Settings) -> None:
        """One step of all copies on the rows of a minibatch."""
        if self.inside and len(index) < self._stack.forward.least_rows:
            raise HeldinError(
                "fit: a batch has a single row, on which a batch normalisation cannot be trained; "
                "choose another batch_size, or give a DataLoader with drop_last=True as data"
            )
        if self._sees is None:
            keep = visible(self.label[index], self._numbers_of_copies, self._in_time)
        else:
            keep = self._sees[:, index]
        self._steps += 1
        if self.draw.share < 1.0:
            for number in range(self.copies):
                keep[number] = self.draw(keep[number], self._steps, number)
        stack = self._stack
        weights = None if self.data.weights is None else self.data.weights[index]
        own_rows = self.draw.share < 1.0 and not self.inside
        with stack.forward.random_stream(self.label.device, self.seed, self._steps):
            stack.advance(
                inputs,
                self._targets[index],
                keep,
                self.data.loss,
                settings,
                weights,
                self._clip,
                own_rows,
            )

    # -- the model in the stack, for train()

    def epoch(
        self, size: int | None, shuffle: bool, generator: torch.Generator | None
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Row numbers and inputs of the batches of an epoch."""
        rows, device = self.data.rows, self.label.device
        if rows.loader is None:
            for index in rows.order(size, shuffle, generator):
                yield index, [x[index] for x in rows.inputs]
            return
        if size is not None or generator is not None:
            raise HeldinError(
                "fit: data is a DataLoader, which has its own batch size and order; leave "
                "batch_size and generator out"
            )
        if self.recorder is None:
            raise HeldinError(
                "fit: the DataLoader given as data has no batch_sampler, or another stopping "
                "object follows it; give it a batch_size, or close() that object first"
            )
        for batch in rows.loader:
            yield self.recorder.take_rows().to(device), [x.to(device) for x in batch[:-1]]

    def take_in(self) -> None:
        """Make the model one more copy, which misses no row."""
        self.inside = True
        if self._sees is not None:
            self._sees = torch.cat([self._sees, torch.ones_like(self._sees[:1])])
        inputs, shadows = self.data.rows.inputs, self.stack.tensors
        self._stack = Stack(self._model, self._optimizer, self.copies + 1, inputs, self._engine)
        for name, block in self.stack.tensors.items():
            block[: self.copies].copy_(shadows[name])
        self._place()

    def start_at(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Let each shadow start with some weights of its own, by name; before the first step."""
        for number, own in enumerate(weights):
            for name, value in own.items():
                self.stack.tensors[name][number].copy_(value)

    def weights_of_the_model(self) -> dict[str, Tensor]:
        return self.stack.copy_of(self.copies)

    def restart(self) -> None:
        assert self._start is not None
        for number in range(self.copies):
            self.stack.load_state_of(number, self._start)
        self.draw, self._start = RowDraw(1.0, self.seed), None

    # -- checks

    def held_out(self) -> Tensor:
        """(held,) losses of rows on the shadow that has not seen them, in the rows' order."""
        rows, device = self.data.rows, self.label.device
        losses = torch.empty(len(rows), dtype=torch.float64, device=device)
        chunk = max(1, CHUNK // self.copies)
        for start in range(0, self._held.shape[1], chunk):
            index = self._held[:, start : start + chunk]
            real = self._real[:, start : start + chunk]
            outputs = self.stack.evaluate([x[index] for x in rows.inputs])
            found = self.data.loss.rows(outputs, rows.targets[index])
            losses[index[real]] = found[real].double()
            if self._recipe is not None and self._recipe.predict is None:
                self._keep(outputs[real], index[real])
        if self._recipe is not None and self._recipe.predict is not None:
            self._predict(self._recipe.predict)
        if self.data.weights is not None:
            losses = losses * self.data.weights
        return losses[self._looked_at]

    def row_weights(self, rows: Tensor) -> Tensor | None:
        return self.data.weights_of(rows)

    def describe_rows(self) -> str:
        return f"{len(self.data)} rows, found by their contents"

    # -- outputs

    def keep_outputs(self, recipe: OutputRecipe | None) -> None:
        self._recipe, self._outputs = recipe, None

    def _keep(self, outputs: Tensor, rows: Tensor) -> None:
        assert self._recipe is not None
        if self._outputs is None or self._outputs.shape[1:] != outputs.shape[1:]:
            self._recipe.check_room(outputs, len(outputs), self.held)
            self._outputs = outputs.new_empty(self.held, *outputs.shape[1:])
        places = torch.searchsorted(self._looked_at, rows)
        self._outputs[places.to(outputs.device)] = outputs

    def _predict(self, predict: Callable[[nn.Module, Any], Any]) -> None:
        """Call the user's function on one shadow after the other."""
        assert self._recipe is not None
        shadow = copy_without_hooks(self._model, share=False).eval()
        for number in range(self.copies):
            state = dict(shadow.named_parameters()) | dict(shadow.named_buffers())
            with torch.no_grad():
                for name, value in self.stack.copy_of(number).items():
                    state[name].copy_(value)
                for rows in self._held[number][self._real[number]].split(CHUNK):
                    outputs = predict(shadow, self.data.batch(rows))
                    self._keep(self._recipe.outputs_of(outputs, len(rows)), rows)

    def held_out_outputs(self) -> OutOfFold:
        assert self._recipe is not None
        assert self._outputs is not None
        rows = self._looked_at
        targets = self._recipe.targets_of(self.data.batch(rows), len(rows))
        return OutOfFold(
            self._outputs.detach().to("cpu", copy=True), rows.cpu(), self.label[rows].cpu(), targets
        )

    def trial(self) -> AbstractContextManager[None]:
        return self._plain.trial()

    def example(self) -> tuple[Any, Callable[[nn.Module, Any], Tensor]]:
        assert self._recipe is not None
        recipe = self._recipe

        def predict(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
            if recipe.predict is not None:
                return recipe.outputs_of(recipe.predict(model, batch), len(batch[-1]))
            return torch.as_tensor(model(*batch[:-1]))

        return self.data.batch(self._looked_at[:EXAMPLE]), predict

    def evaluated_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def members(self) -> list[dict[str, Tensor]]:
        return [
            {name: value.detach().to("cpu", copy=True) for name, value in copy.items()}
            for copy in map(self.stack.copy_of, range(self.copies))
        ]

    def levels(self) -> tuple[float, float]:
        rows, inside = self.data.rows, [self._level_rows[0]] * (self.stack.copies - self.copies)
        index = torch.stack([*self._level_rows, *inside]).to(self.label.device)
        outputs = self.stack.evaluate([x[index] for x in rows.inputs])
        shadows = self.data.loss.rows(outputs, rows.targets[index])[: self.copies].double()
        index = index[:1] if self._level_rows[0] is self._level_rows[-1] else index[: self.copies]
        outputs = self.data.outputs([x[index.flatten()] for x in rows.inputs])
        model = self.data.loss.per_row(outputs, rows.targets[index.flatten()]).double()
        return float(shadows.mean()), float(model.mean())

    def training_loss(self) -> float:
        """Of the model itself."""
        return self.data.training_loss(self._shown)

    def weights_of(self, number: int) -> dict[str, Tensor]:
        return self.stack.copy_of(number)

    # -- saving and closing

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
        release(self)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimiser states, and where the look-up of rows is."""
        stack = self.stack  # which takes the steps that wait, before they are counted
        return {
            "label": self.label.clone(),
            "inside": self.inside,
            "row_share": self.draw.share,
            "steps": self._steps,
            "stack": stack.state_dict(),
            "turns": dict(self._find.turns),
            "start": self._start or {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        form: dict[str, Any] = {
            "inside": bool,
            "row_share": float,
            "steps": int,
            "stack": dict,
            "turns": {int: int},
        }
        if state.get("start") == {} or self._start is None:
            form["start"] = {}
        else:
            form["start"] = {"weights": self._start["weights"], "optimizer": {int: dict}}
        check_schema(state, {"label": self.label.cpu(), **form})
        if not torch.equal(state["label"].cpu(), self.label.cpu()):
            raise ValueError("the rows were divided in another way; use the same seed and groups")
        if self.inside and not state["inside"]:
            raise ValueError("the run that was saved did not go through train(), this one does")
        self.stack.check_state(state["stack"], self.copies + int(state["inside"]))
        if state["inside"] and not self.inside:
            self.take_in()
        self._place()
        self.stack.load_state_dict(state["stack"])
        self._find.turns = dict(state["turns"])
        self._steps, self._start = state["steps"], dict(state["start"]) or None
        self.check.resume()
        self.draw = RowDraw(state["row_share"], self.seed)


def _settings_of(layer: nn.Module) -> dict[str, Any]:
    return {name: vars(layer)[name] for name in ("p", "momentum", "eps") if name in vars(layer)}


@contextmanager
def _with_settings(
    layers: Sequence[nn.Module], settings: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Give layers settings that they had before; the loop may have changed them since."""
    now = [_settings_of(layer) for layer in layers]
    try:
        for layer, values in zip(layers, settings, strict=True):
            vars(layer).update(values)
        yield
    finally:
        for layer, values in zip(layers, now, strict=True):
            vars(layer).update(values)
