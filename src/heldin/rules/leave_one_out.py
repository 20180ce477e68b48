"""Approximate leave-one-out along the path of training.

Let D_i be the weights of the same run without sample i, minus the weights. Linearised,

    D_i' = -P H_(-i) D_i + P g_i / M,        D_i = 0 at the start,

with P what the optimiser multiplies a gradient by (learning rate included), H_(-i) the generalised
Gauss-Newton matrix of the other samples and g_i the sample's gradient. The loss of sample i at its
output shifted by J_i D_i is then the loss it would have had it not been trained on. One implicit
Euler step from check to check solves this for all samples at once, through M x M systems.

IACV (Luo, Ren and Barber, 2023) has the recursion for regularised logistic regression; Patil, Wu
and Tibshirani (2024) prove leave-one-out consistent along the path of gradient descent for least
squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from heldin.crossval import OutOfFold
from heldin.errors import HeldinError
from heldin.loop.events import OptimizerStep
from heldin.loop.matching import RowMatcher
from heldin.rules.displacements import (
    KNOWN,
    UnitGradientPath,
    directions,
    second_moment,
    solve,
    unit_gradient_step,
)
from heldin.rules.inputs import RunInputs
from heldin.rules.jacobians import jacobian_method
from heldin.rules.options import LeaveOneOut
from heldin.rules.path import PathStopping
from heldin.shadows.held_out import EXAMPLE
from heldin.shadows.outputs import OutputRecipe
from heldin.shadows.plain_step import PlainStepCheck
from heldin.shadows.tensors import TensorData
from heldin.state.schema import check_schema

__all__ = ["LeaveOneOutStopping"]

FLOOR = 0.1  # lower bound of a second moment, in units of the gradient noise of a minibatch
MOST = 1024  # default number of probes: the samples whose loss is estimated
FOLLOWED = 1000  # largest number of probes x directions in their outputs, see `directions`
WIDE = 256  # outputs of a model: above, only one direction of each probe is followed


class LeaveOneOutStopping(PathStopping):
    """Estimates the loss of rows as if each had been left out, without a second model.

    At the checks, per-sample Jacobians of the outputs (in evaluation mode) show how far the weights
    would be had one row been left out so far, and so the loss that the row would have. The rule
    knows SGD, RMSprop, Adam and AdamW, with any schedule. It is a linearisation: it agrees with
    retraining for wide models with single outputs, less so for deep ones on few rows.
    """

    name = "leave-one-out"

    def __init__(self, inputs: RunInputs, rule: LeaveOneOut) -> None:
        super().__init__(inputs, rule)
        if self._process_group is not None:
            raise HeldinError(
                "heldin.EarlyStopping: several processes train the model, and each of them would "
                "decide by its own rows; use rule='folds' or rule='shadow', or pass "
                "process_group=None if the processes have nothing to do with each other"
            )
        self._backend: Displacements = Displacements(
            self.owner, inputs, rule, self._device, self.seed
        )
        self._count, self.step_check = self._backend.count, self._backend.check
        self._start()

    def _follow(self, taken: OptimizerStep, index: Tensor | None) -> None:
        self._backend.follow(taken, index)

    def _steps_of_an_epoch(self) -> float:
        return self._count / self._backend.batch

    def _held_per_trained(self) -> float:
        return self._backend.held / max(1, self._count - 1)

    def _missing(self) -> float:
        return 1 / self._count

    def _own_settings(self) -> dict[str, Any]:
        backend = self._backend
        settings = {"outputs": backend.outputs, "outputs_only": backend.outputs_only}
        return {"probes": backend.held, **settings}


class Displacements:
    """The displacements of the weights by leaving out each of some rows, the probes.

    Where probes x parameters do not fit into the memory for snapshots, only Gram matrices are
    formed and the state is kept in the outputs (`outputs_only`).
    """

    copies = 0  # of the model

    def __init__(
        self, owner: str, inputs: RunInputs, rule: LeaveOneOut, device: torch.device, seed: int
    ) -> None:
        model, optimizer = inputs.model, inputs.optimizer
        data = TensorData(owner, model, inputs.loss_fn, inputs.data, inputs.sample_weight, device)
        self._model, self._optimizer, self._data = model, optimizer, data
        self._rows, self._weights, self._loss = data.rows, data.weights, data.loss
        self.count = len(self._rows)
        bad = data.bad_rows()
        if bad:
            raise HeldinError(
                f"heldin.EarlyStopping: the loss of row {', '.join(map(str, bad[:5]))} is nan or "
                "infinite before training; look at the inputs and targets of that row, and leave "
                "it out of the data"
            )
        if self._loss.kind == "other":
            raise HeldinError(
                "heldin.EarlyStopping: loss_fn is neither the mean nor the sum of its rows' losses "
                "(class weights, ignored targets), so that one row cannot be left out; use "
                "rule='folds'"
            )
        if type(optimizer) not in KNOWN:
            names = ", ".join(kind.__name__ for kind in KNOWN)
            raise HeldinError(
                f"heldin.EarlyStopping: it is not known how {type(optimizer).__name__} moves the "
                f"weights; it knows {names}. rule='folds' works with any optimiser"
            )
        groups = {id(p): g for g, o in enumerate(optimizer.param_groups) for p in o["params"]}
        self._trained_params = {
            name: (groups[id(p)], p)
            for name, p in model.named_parameters()
            if p.requires_grad and id(p) in groups
        }
        if not self._trained_params:
            raise HeldinError(
                "optimizer: none of its parameters is a trainable parameter of the model; give the "
                "optimiser that trains this model"
            )
        self._jacobian_fn = jacobian_method(model, list(self._trained_params), self._rows.inputs)
        self._groups = [UnitGradientPath() for _ in optimizer.param_groups]
        self.batch = float(self.count)  # rows of the latest minibatch
        wanted = MOST if rule.probes is None else rule.probes
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(seed))
        probes = torch.arange(self.count) if wanted >= self.count else order[:wanted].sort().values
        self._probes = probes.to(self._rows.targets.device)
        self.held = len(probes)  # rows whose loss is estimated
        self._allocate(rule.snapshot_memory)
        self._followed = False  # whether there was a step
        self._recipe: OutputRecipe | None = None
        self._outputs: Tensor | None = None
        self._plain = PlainStepCheck(owner, model, optimizer)
        self.check = self._plain.steps
        self._find = RowMatcher(self._rows)

    def _allocate(self, memory: int) -> None:
        """Choose the state: (q, weights) displacements, or (q, b, q) shifts of outputs."""
        params = [p for _, p in self._trained_params.values()]
        q, width = self.held, sum(p.numel() for p in params)
        outputs = self._data.outputs([x[self._probes[:1]] for x in self._rows.inputs]).numel()
        # directions in the outputs of a probe that are followed
        self.outputs = max(1, min(outputs, FOLLOWED // q)) if outputs <= WIDE else 1
        item_bytes = params[0].element_size()
        self.outputs_only = (1 + self.outputs) * q * width * item_bytes > memory
        shape = (q, self.outputs, q) if self.outputs_only else (q, width)
        dtype = torch.float64 if self.outputs_only else params[0].dtype
        self._displacements = torch.zeros(shape, dtype=dtype, device=self._probes.device)

    # -- following the optimiser

    def follow(self, taken: OptimizerStep, index: Tensor | None) -> None:
        """Follow a step on rows; index: their numbers, where they are known."""
        self._followed = True
        if len(taken.settings) != len(self._groups):
            raise HeldinError(
                "step: the optimiser has got another parameter group; make a new stopping object "
                "when the parameters change"
            )
        self._data.check_loss()
        if index is None and taken.calls:
            index = torch.cat([self._find(call.tensors) for call in taken.calls])
        if index is not None:
            self._plain.follow(taken, self._data.loss_of, index)
        kind = type(self._optimizer)
        for group, setting in zip(self._groups, taken.settings, strict=True):
            group.velocity, far = unit_gradient_step(kind, setting, group.velocity)
            group.time += far
            group.decay += float(setting["lr"]) * float(setting["weight_decay"])
        if index is not None and len(index):
            self.batch = float(len(index))

    def _preconditioner(self, name: str, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far a unit of gradient has carried a parameter, and what is left of its D.

        squares: the mean square of the samples' gradients by it.
        """
        number, p = self._trained_params[name]
        group, setting = self._groups[number], self._optimizer.param_groups[number]
        times = torch.full_like(squares, group.time)
        if not isinstance(self._optimizer, torch.optim.SGD):
            v = torch.maximum(
                second_moment(self._optimizer, p, setting), FLOOR * squares / self.batch
            )
            times = times / (v.sqrt() + float(setting["eps"]))
        decoupled = isinstance(self._optimizer, torch.optim.AdamW)
        if decoupled or setting.get("decoupled_weight_decay", False):
            left = torch.full_like(times, 1 / (1 + group.decay))
        else:
            left = 1 / (1 + float(setting["weight_decay"]) * times)
        return times * left, left

    # -- the estimate

    def held_out(self) -> Tensor:
        """Return the losses that the probes would have had they been left out."""
        rows, probes = self._rows, self._probes
        inputs, targets = [x[probes] for x in rows.inputs], rows.targets[probes]
        weights = None if self._weights is None else self._weights[probes]
        outputs = self._data.outputs(inputs).detach()
        base = self._loss.per_row(outputs, targets).double()
        basis, residual, curvature = self._slopes(outputs, targets, weights)
        if not self._followed:
            self._basis = basis
        if any(group.time for group in self._groups):
            shifts = self._advance(inputs, basis, residual, curvature)
            index = torch.arange(len(probes), device=probes.device)
            own_shifts = torch.einsum("qb,qb...->q...", shifts[index, :, index], basis.double())
            outputs = outputs + own_shifts.view_as(outputs).to(outputs.dtype)
            self._groups = [UnitGradientPath(group.velocity) for group in self._groups]
        if self._recipe is not None:
            self._recipe.check_room(outputs, len(outputs), len(outputs))
            self._outputs = outputs.detach().to("cpu", copy=True)
        losses = self._loss.per_row(outputs, targets).double()
        if weights is not None:
            losses, base = losses * weights, base * weights
        if len(probes) == len(rows):
            return losses
        return self.training_loss() + losses - base

    def keep_outputs(self, recipe: OutputRecipe | None) -> None:
        """Keep the outputs at every later check; None: no longer."""
        if recipe is not None and recipe.predict is not None:
            raise HeldinError(
                "predict: leave-one-out linearises the outputs that the model returns; leave "
                "predict out, or use rule='folds'"
            )
        self._recipe, self._outputs = recipe, None

    def held_out_outputs(self) -> OutOfFold:
        """Return the outputs at the last `held_out()`."""
        assert self._recipe is not None
        assert self._outputs is not None
        rows = self._probes
        targets = self._recipe.targets_of(self._data.batch(rows), len(rows))
        return OutOfFold(self._outputs, rows.cpu(), rows.cpu(), targets)

    def trial(self) -> AbstractContextManager[None]:
        """Return a context in which calls of the model leave nothing behind."""
        return self._plain.trial()

    def example(self) -> tuple[Any, Callable[[nn.Module, Any], Tensor]]:
        """Return the inputs of a few probes, and the function that predicts them."""
        inputs = tuple(x[self._probes[:EXAMPLE]] for x in self._rows.inputs)
        return inputs, lambda model, batch: torch.as_tensor(model(*batch))

    def row_weights(self, rows: Tensor) -> Tensor | None:
        """Return the weights of rows in the loss; None: all are equal."""
        return self._data.weights_of(rows)

    def _slopes(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return directions (q, b, ...) in the outputs, and the loss's derivatives along them."""
        q = len(outputs)
        with torch.enable_grad():
            free = outputs.requires_grad_()
            losses = self._loss.per_row(free, targets)
            (slope,) = torch.autograd.grad(losses.sum(), free, create_graph=True)

            def bend(along: Tensor) -> Tensor:
                """Multiply the loss's second derivative by vectors (q, outputs)."""
                if not slope.requires_grad:
                    return torch.zeros_like(along)
                along = along.reshape(slope.shape)
                (product,) = torch.autograd.grad((slope * along).sum(), free, retain_graph=True)
                return product.flatten(1)

            flat = slope.detach().flatten(1)
            basis = directions(flat, bend, self.outputs)
            bends = torch.stack([bend(basis[:, b]) for b in range(self.outputs)], dim=1)
        factor = self.batch if self._loss.kind == "sum" else 1.0  # beyond 1 / M
        scale = torch.full((q,), factor, dtype=torch.float64, device=flat.device)
        if weights is not None:
            scale = scale * weights
        residual = torch.einsum("qbc,qc->qb", basis, flat).double() * scale[:, None]
        curvature = (basis @ bends.transpose(1, 2)).double() * scale[:, None, None]
        values, vectors = torch.linalg.eigh(curvature + curvature.transpose(1, 2))
        curvature = vectors @ (values.clamp(min=0) / 2).diag_embed() @ vectors.transpose(1, 2)
        free.requires_grad_(False)
        return basis.reshape(q, self.outputs, *outputs.shape[1:]), residual, curvature

    def _advance(
        self, inputs: Sequence[Tensor], basis: Tensor, residual: Tensor, curvature: Tensor
    ) -> Tensor:
        """Carry the state to this check; return (q, b, q) shifts of the outputs."""
        q, b = residual.shape
        gram = torch.zeros(q * b, q * b, dtype=torch.float64, device=residual.device)
        shift = torch.zeros(q * b, q, dtype=torch.float64, device=residual.device)
        parts: list[tuple[slice, Tensor, Tensor]] = []
        start = 0
        for jacobian, name in self._jacobians(inputs, basis):
            gradients = torch.einsum("qbw,qb->qw", jacobian, residual.to(jacobian.dtype))
            squares = gradients.square().mean(0).view_as(self._trained_params[name][1])
            times, left = (t.flatten() for t in self._preconditioner(name, squares))
            flat = jacobian.reshape(q * b, -1)
            gram += (flat * times) @ flat.T
            place = slice(start, start + flat.shape[1])
            start = place.stop
            if not self.outputs_only:
                self._displacements[:, place] *= left
                shift += flat @ self._displacements[:, place].T
                parts.append((place, flat, times))
        if self.outputs_only:  # from the directions of the last check into those of this one
            turned = torch.einsum("qb...,qd...->qbd", basis, self._basis).double()
            shift = (turned @ self._displacements).reshape(q * b, q)
            self._basis = basis
        shifts, moves = solve(
            gram.view(q, b, q, b),
            shift.view(q, b, q),
            residual,
            curvature,
            source=1 / len(self._rows),
            share=1 / q,
        )
        if self.outputs_only:
            self._displacements = shifts
        for place, flat, times in parts:
            step = moves.reshape(q * b, q).T.to(flat.dtype)
            self._displacements[:, place] += (step @ flat) * times
        return shifts

    def _jacobians(self, inputs: Sequence[Tensor], basis: Tensor) -> Iterator[tuple[Tensor, str]]:
        """Yield (q, b, size) of every parameter, one by one where memory is scarce."""
        every = list(self._trained_params)
        for names in [[name] for name in every] if self.outputs_only else [every]:
            jacobians = self._jacobian_fn(self._model, names, inputs, basis)
            for name in names:
                yield jacobians[name].flatten(2), name

    def training_loss(self) -> float:
        """Return the loss of the model on the rows it is trained on."""
        return self._data.training_loss()

    def members(self) -> list[dict[str, Tensor]]:
        """Return the weights of the shadows; there are none."""
        return []

    # -- saving and closing

    def close(self) -> None:
        """Release the model."""
        for name in vars(self).keys() - {"count", "held", "batch", "outputs", "outputs_only"}:
            delattr(self, name)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs."""
        return {
            "probes": self._probes.clone(),
            "moved": self._displacements.clone(),
            "basis": self._basis.clone(),
            "groups": [[g.velocity, g.time, g.decay] for g in self._groups],
            "batch": self.batch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        tensors = {"probes": self._probes, "moved": self._displacements, "basis": self._basis}
        kinds = {name: value.cpu() for name, value in tensors.items()}
        check_schema(state, {**kinds, "groups": [[float]], "batch": float}, "['rule']")
        if [len(group) for group in state["groups"]] != [3] * len(self._groups):
            raise ValueError(f"{len(state['groups'])} parameter groups, not {len(self._groups)}")
        if not torch.equal(state["probes"].cpu(), self._probes.cpu()):
            raise ValueError("other rows carry a displacement; use the same seed and probes")
        self._displacements = state["moved"].to(self._displacements)
        self._basis = state["basis"].to(self._basis)
        self._groups = [UnitGradientPath(*values) for values in state["groups"]]
        self.batch, self._followed = state["batch"], True
        self.check.resume()
