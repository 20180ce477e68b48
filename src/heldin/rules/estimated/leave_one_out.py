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

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.errors import HeldinError
from heldin.rules.ranks import ProcessGroup
from heldin.state.schema import check_int, check_schema

from .base import Average, PathStopping
from .curves import Patience
from .displacements import directions, solve
from .jacobians import chosen
from .losses import LossFunction
from .optimizers import KNOWN, Travelled, pulse, second_moment
from .tensors import TensorData
from .watch import Taken

__all__ = ["LeaveOneOutStopping"]

MEMORY = 256 * 2**20
PATIENCE = Patience(factor=2.0, slack=200, checks=5)
FLOOR = 0.1  # of a second moment, as a share of what the noise of a minibatch alone would give
MOST = 1024  # samples that carry a state, unless told otherwise
FOLLOWED = 1000  # samples x directions of their outputs that are followed, see `directions`
WIDE = 256  # outputs beyond which only one direction is


class LeaveOneOutStopping(PathStopping):
    """Stops by approximate leave-one-out, without any second model.

    At log-spaced checks, per-sample Jacobians of the outputs tell how far the weights would be had
    one sample been left out so far, and from that the loss that the sample would then have. Their
    mean estimates the test loss. Training itself is not touched and the minibatches need not be
    known.

    Call `step()` after `optimizer.step()`. The rule knows SGD (momentum, Nesterov, weight decay),
    RMSprop, Adam and AdamW, with any schedule of their rates. It is a linearisation: it agrees with
    retraining without the sample for wide models and single outputs, less so for deep ones on few
    rows, where `heldin.FoldStopping` is better.

    Args:
        model: the model that is trained. Jacobians are taken in evaluation mode.
        optimizer: the optimiser that trains it.
        loss_fn: (outputs, targets) -> the mean or the sum of the rows' losses, twice
            differentiable by the outputs.
        data: all training rows: tensors (x, y) or (x1, x2, ..., y), a map-style Dataset, or a
            DataLoader over one.
        probes: how many rows carry a state (default: all, at most 1024). The cost of a check grows
            with probes^2 x parameters + probes^3.
        grid: ratio of the steps of successive checks.
        average: "bagged" averages the weights of the checks, "best" keeps those of the lowest
            estimate, see `heldin.FoldStopping`.
        patience: when to stop, see `heldin.Patience`; None: never (`restore()` still chooses).
        sample_weight: (n,) if the loop's loss is the mean of weight x loss over a minibatch.
        memory: bytes for Jacobians and displacements, and again for the weights of the checks.
            Where probes x parameters do not fit, only Gram matrices are formed and the state is
            kept in the outputs (`stopping.lazy`).
        resamples: how often rows are drawn for average="bagged".
        seed: of the probes and the draws.
        process_group: "auto" refuses a model that several processes train together; None if they
            have nothing to do with each other.

    >>> import heldin, torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(60, 20)
    >>> y = x[:, :1] + torch.randn(60, 1)
    >>> model = torch.nn.Linear(20, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    >>> loss_fn = torch.nn.MSELoss()
    >>> with heldin.LeaveOneOutStopping(model, optimizer, loss_fn, (x, y)) as stopping:
    ...     for step in range(2000):
    ...         loss_fn(model(x), y).backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         if stopping.step():
    ...             break
    >>> stopping.best_step < stopping.stopped_step < 1000
    True
    >>> 0.8 < stopping.estimate < 1.8                  # the noise alone is 1
    True
    """

    name = "leave-one-out"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction,
        data: Any,
        probes: int | None = None,
        *,
        grid: float = 1.25,
        average: Average = "bagged",
        patience: Patience | None = PATIENCE,
        sample_weight: Tensor | None = None,
        memory: int = MEMORY,
        resamples: int = 100,
        seed: int = 0,
        process_group: ProcessGroup = "auto",
    ) -> None:
        super().__init__(
            model,
            optimizer,
            grid=grid,
            average=average,
            patience=patience,
            memory=memory,
            resamples=resamples,
            seed=seed,
            process_group=process_group,
        )
        name = type(self).__name__
        if self._together is not None:
            raise HeldinError(
                "LeaveOneOutStopping: several processes train the model, and each of them would "
                "decide by its own rows; use heldin.FoldStopping or heldin.ShadowStopping, or pass "
                "process_group=None if the processes have nothing to do with each other"
            )
        self._data = TensorData(name, model, loss_fn, data, sample_weight, self._device)
        self._rows, self._weights, self._loss = self._data.rows, self._data.weights, self._data.loss
        self._count = len(self._rows)
        if type(optimizer) not in KNOWN:
            names = ", ".join(kind.__name__ for kind in KNOWN)
            raise HeldinError(
                f"LeaveOneOutStopping: it is not known how {type(optimizer).__name__} moves the "
                f"weights; it knows {names}. heldin.FoldStopping works with any optimiser"
            )
        groups = {id(p): g for g, o in enumerate(optimizer.param_groups) for p in o["params"]}
        self._places = {
            name: (groups[id(p)], p)
            for name, p in model.named_parameters()
            if p.requires_grad and id(p) in groups
        }
        if not self._places:
            raise HeldinError(
                "optimizer: none of its parameters is a trainable parameter of the model; give the "
                "optimiser that trains this model"
            )
        self._derive = chosen(model, list(self._places), self._rows.inputs)
        self._optimizer = optimizer
        self._groups = [Travelled() for _ in optimizer.param_groups]
        self._batch = float(len(self._rows))
        self._probes = self._choose(probes)
        self._shape()
        self._start(optimizer)

    def _choose(self, probes: int | None) -> Tensor:
        n = len(self._rows)
        wanted = MOST if probes is None else check_int("LeaveOneOutStopping", "probes", probes, 2)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))
        chosen = torch.arange(n) if wanted >= n else order[:wanted].sort().values
        return chosen.to(self._rows.targets.device)

    def _shape(self) -> None:
        """How the state is kept: (q, weights) displacements, or (q, b, q) shifts of outputs."""
        params = [p for _, p in self._places.values()]
        q, width = len(self._probes), sum(p.numel() for p in params)
        outputs = self._data.outputs([x[self._probes[:1]] for x in self._rows.inputs]).numel()
        self.outputs = max(1, min(outputs, FOLLOWED // q)) if outputs <= WIDE else 1
        each = params[0].element_size()
        self.lazy = (1 + self.outputs) * q * width * each > self.memory
        shape = (q, self.outputs, q) if self.lazy else (q, width)
        dtype = torch.float64 if self.lazy else params[0].dtype
        self._moved = torch.zeros(shape, dtype=dtype, device=self._probes.device)

    # -- following the optimiser

    def _follow(self, taken: Taken, index: Tensor | None, now: bool) -> None:
        if len(taken.settings) != len(self._groups):
            raise HeldinError(
                "step: the optimiser has got another parameter group; make a new stopping object "
                "when the parameters change"
            )
        kind = type(self._optimizer)
        for group, setting in zip(self._groups, taken.settings, strict=True):
            group.velocity, far = pulse(kind, setting, group.velocity)
            group.time += far
            group.decay += float(setting["lr"]) * float(setting["weight_decay"])
        rows = (
            len(index) if index is not None else sum(len(call[0]) for call in taken.calls if call)
        )
        if rows:
            self._batch = float(rows)

    def _reach(self, name: str, squares: Tensor) -> tuple[Tensor, Tensor]:
        """How far a unit of gradient has carried a parameter, and what is left of its D.

        Args:
            name: of the parameter.
            squares: mean square of the samples' gradients by it.
        """
        number, p = self._places[name]
        group, setting = self._groups[number], self._optimizer.param_groups[number]
        times = torch.full_like(squares, group.time)
        if not isinstance(self._optimizer, torch.optim.SGD):
            v = torch.maximum(
                second_moment(self._optimizer, p, setting), FLOOR * squares / self._batch
            )
            times = times / (v.sqrt() + float(setting["eps"]))
        apart = isinstance(self._optimizer, torch.optim.AdamW)
        if apart or setting.get("decoupled_weight_decay", False):
            left = torch.full_like(times, 1 / (1 + group.decay))
        else:
            left = 1 / (1 + float(setting["weight_decay"]) * times)
        return times * left, left

    # -- the estimate

    def _held_per_trained(self) -> float:
        return len(self._probes) / max(1, self._count - 1)

    def _missing(self) -> float:
        return 1 / self._count

    def _held_out(self) -> Tensor:
        rows, probes = self._rows, self._probes
        inputs, targets = [x[probes] for x in rows.inputs], rows.targets[probes]
        weights = None if self._weights is None else self._weights[probes]
        outputs = self._data.outputs(inputs).detach()
        base = self._loss.per_row(outputs, targets).double()
        basis, residual, curvature = self._slopes(outputs, targets, weights)
        if self._step == 0:
            self._basis = basis
        if any(group.time for group in self._groups):
            shifts = self._advance(inputs, basis, residual, curvature)
            each = torch.arange(len(probes), device=probes.device)
            own = torch.einsum("qb,qb...->q...", shifts[each, :, each], basis.double())
            outputs = outputs + own.view_as(outputs).to(outputs.dtype)
            self._groups = [Travelled(group.velocity) for group in self._groups]
        losses = self._loss.per_row(outputs, targets).double()
        if weights is not None:
            losses, base = losses * weights, base * weights
        if len(probes) == len(rows):
            return losses
        return self._data.training_loss() + losses - base

    def _slopes(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Directions (q, b, ...) in the outputs, and the loss's two derivatives along them."""
        q = len(outputs)
        with torch.enable_grad():
            free = outputs.requires_grad_()
            losses = self._loss.per_row(free, targets)
            (slope,) = torch.autograd.grad(losses.sum(), free, create_graph=True)

            def bend(along: Tensor) -> Tensor:
                """The loss's second derivative, times vectors (q, outputs)."""
                if not slope.requires_grad:
                    return torch.zeros_like(along)
                along = along.reshape(slope.shape)
                (found,) = torch.autograd.grad((slope * along).sum(), free, retain_graph=True)
                return found.flatten(1)

            flat = slope.detach().flatten(1)
            basis = directions(flat, bend, self.outputs)
            bends = torch.stack([bend(basis[:, b]) for b in range(self.outputs)], dim=1)
        scale = torch.full((q,), self._scale(), dtype=torch.float64, device=flat.device)
        if weights is not None:
            scale = scale * weights
        residual = torch.einsum("qbc,qc->qb", basis, flat).double() * scale[:, None]
        curvature = (basis @ bends.transpose(1, 2)).double() * scale[:, None, None]
        values, vectors = torch.linalg.eigh(curvature + curvature.transpose(1, 2))
        curvature = vectors @ (values.clamp(min=0) / 2).diag_embed() @ vectors.transpose(1, 2)
        free.requires_grad_(False)
        return basis.reshape(q, self.outputs, *outputs.shape[1:]), residual, curvature

    def _scale(self) -> float:
        """What a sample's gradient is multiplied by, beyond 1 / M."""
        return self._batch if self._loss.kind == "sum" else 1.0

    def _advance(
        self, inputs: Sequence[Tensor], basis: Tensor, residual: Tensor, curvature: Tensor
    ) -> Tensor:
        """Carry the state to this check; (q, b, q) shifts of the outputs."""
        q, b = residual.shape
        gram = torch.zeros(q * b, q * b, dtype=torch.float64, device=residual.device)
        shift = torch.zeros(q * b, q, dtype=torch.float64, device=residual.device)
        parts: list[tuple[slice, Tensor, Tensor]] = []
        start = 0
        for jacobian, name in self._jacobians(inputs, basis):
            gradients = torch.einsum("qbw,qb->qw", jacobian, residual.to(jacobian.dtype))
            squares = gradients.square().mean(0).view_as(self._places[name][1])
            times, left = (t.flatten() for t in self._reach(name, squares))
            flat = jacobian.reshape(q * b, -1)
            gram += (flat * times) @ flat.T
            place = slice(start, start + flat.shape[1])
            start = place.stop
            if not self.lazy:
                self._moved[:, place] *= left
                shift += flat @ self._moved[:, place].T
                parts.append((place, flat, times))
        if self.lazy:  # from the directions of the last check into those of this one
            turned = torch.einsum("qb...,qd...->qbd", basis, self._basis).double()
            shift = (turned @ self._moved).reshape(q * b, q)
            self._basis = basis
        shifts, moves = solve(
            gram.view(q, b, q, b),
            shift.view(q, b, q),
            residual,
            curvature,
            source=1 / len(self._rows),
            share=1 / q,
        )
        if self.lazy:
            self._moved = shifts
        for place, flat, times in parts:
            step = moves.reshape(q * b, q).T.to(flat.dtype)
            self._moved[:, place] += (step @ flat) * times
        return shifts

    def _jacobians(self, inputs: Sequence[Tensor], basis: Tensor) -> Iterator[tuple[Tensor, str]]:
        """(q, b, size) of every parameter; one after the other where memory is scarce."""
        assert self._model is not None
        every = list(self._places)
        for names in [[name] for name in every] if self.lazy else [every]:
            found = self._derive(self._model, names, inputs, basis)
            for name in names:
                yield found[name].flatten(2), name

    def _training_loss(self) -> float:
        return self._data.training_loss()

    # -- saving and closing

    def close(self) -> None:
        """Remove all hooks and release the model. Results remain available."""
        super().close()
        self._data.release()
        self._places = {}
        vars(self).pop("_optimizer", None)
        vars(self).pop("_derive", None)

    def _own_settings(self) -> dict[str, Any]:
        return {"probes": len(self._probes), "outputs": self.outputs, "lazy": self.lazy}

    def _rule_state(self) -> dict[str, Any]:
        return {
            "probes": self._probes.clone(),
            "moved": self._moved.clone(),
            "basis": self._basis.clone(),
            "groups": [[g.velocity, g.time, g.decay] for g in self._groups],
            "batch": self._batch,
        }

    def _load_rule_state(self, state: Mapping[str, Any]) -> None:
        own = {"probes": self._probes, "moved": self._moved, "basis": self._basis}
        kinds = {name: value.cpu() for name, value in own.items()}
        check_schema(state, {**kinds, "groups": [[float]], "batch": float}, "['rule']")
        if [len(group) for group in state["groups"]] != [3] * len(self._groups):
            raise ValueError(f"{len(state['groups'])} parameter groups, not {len(self._groups)}")
        self._probes = state["probes"].to(self._probes.device)
        self._moved = state["moved"].to(self._moved)
        self._basis = state["basis"].to(self._basis)
        self._groups = [Travelled(*values) for values in state["groups"]]
        self._batch = state["batch"]
