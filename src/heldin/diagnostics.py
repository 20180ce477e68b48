"""A check of observed moments against one backward pass per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heldin.capture.arguments import BatchDim
from heldin.capture.collector import Collector
from heldin.capture.moments import as_statistic, upcast
from heldin.capture.observation import Observation
from heldin.capture.ownership.planes import tensors_in
from heldin.capture.reference import summed
from heldin.errors import HeldinError

__all__ = ["Verification", "verify"]


@dataclass(frozen=True)
class Verification:
    """The result of `heldin.verify`.

    Attributes:
        errors: the larger of the relative errors of `total` and `squares`, per parameter.
        tolerance: largest relative error that passes.
        count: number of samples compared.

    >>> import heldin
    >>> differences = {"weight": 1e-7, "bias": 0.5}
    >>> found = heldin.diagnostics.Verification(differences, tolerance=1e-3, count=8)
    >>> print(found)
    some parameters do NOT agree with 8 single-sample gradients (to 1e-03)
    weight   1.00e-07  ok
    bias     5.00e-01  WRONG
    >>> found.ok
    False
    """

    errors: dict[str, float]
    tolerance: float
    count: int

    @property
    def ok(self) -> bool:
        """Whether every parameter agrees."""
        return all(error <= self.tolerance for error in self.errors.values())

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        width = max((len(name) for name in self.errors), default=0)
        lines = [
            f"{name:<{width}}  {error:9.2e}  {'ok' if error <= self.tolerance else 'WRONG'}"
            for name, error in self.errors.items()
        ]
        verdict = "all parameters agree" if self.ok else "some parameters do NOT agree"
        head = f"{verdict} with {self.count} single-sample gradients (to {self.tolerance:.0e})"
        return "\n".join([head, *lines])


def verify(
    model: nn.Module,
    step: Callable[..., Tensor | None],
    *batch: Any,
    batch_dim: BatchDim = 0,
    tolerance: float | None = None,
) -> Verification:
    """Compare observed moments with one backward pass per sample.

    Args:
        model: the model to check. Its `.grad`s are restored afterwards.
        step: runs one training step up to the loss and returns it (or calls backward itself and
            returns None). It must call the model.
        batch: arguments of `step`. If given, the reference is `step` on one sample at a time, which
            is independent of everything in heldin but needs a model without dropout and batch
            statistics. Without it, the reference is one backward pass per sample through the graph
            of a single `step()`, from the rows of the model's outputs, which is correct for those
            models as well.
        batch_dim: as for `heldin.observe`; also used to split the batch into samples.
        tolerance: largest relative error that passes (default: by the parameters' precision).

    >>> import heldin, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
    >>> def step(x, y):
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> heldin.verify(model, step, x, y).ok
    True
    """
    saved_grads = {p: p.grad for p in model.parameters()}
    try:
        for p in saved_grads:
            p.grad = None
        collector = Collector(model, batch_dim, with_reference=not batch)
        with Observation(collector) as seen:
            _run(step, batch)
        truth = collector.reference
        if batch:
            truth = summed(_one_by_one(model, step, batch, batch_dim, seen.count))
    finally:
        for p, grad in saved_grads.items():
            p.grad = grad
    if not truth:
        raise HeldinError(
            "heldin.verify: the model returns no tensor with a row for each sample, which a "
            "backward pass per sample needs; pass the batch: verify(model, step, x, y)"
        )
    precise = all(upcast(total).dtype == torch.float64 for total, _ in truth.values())
    errors = {}
    floor = max(float(squares.max()) for _, squares in truth.values())
    floor *= 1e-24 if precise else 1e-10  # rounding noise in entries that should be zero
    for name, (total, squares) in truth.items():
        observed = seen.get(name)
        if observed is None:
            errors[name] = float("inf") if float(squares.max()) > floor else 0.0
            continue
        scale = _scale(observed.total, total) if batch else 1.0
        size = float(squares.max()) * scale**2 + floor
        errors[name] = max(
            float((observed.total - scale * total).abs().max()) / size**0.5 / seen.count**0.5,
            float((observed.squares - scale**2 * squares).abs().max()) / size,
        )
    limit = tolerance if tolerance is not None else (1e-8 if precise else 1e-3)
    return Verification(errors, limit, seen.count)


def _run(step: Callable[..., Tensor | None], batch: tuple[Any, ...]) -> None:
    loss = step(*batch)
    if loss is not None:
        loss.backward()


def _one_by_one(
    model: nn.Module,
    step: Callable[..., Tensor | None],
    batch: tuple[Any, ...],
    batch_dim: BatchDim,
    m: int,
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients of each sample, from a training step with this sample only."""
    for i in range(m):
        for p in model.parameters():
            p.grad = None
        _run(step, _sample(batch, i, m, batch_dim))
        named = model.named_parameters()
        yield {name: as_statistic(p.grad) for name, p in named if p.grad is not None}


def _sample(value: Any, i: int, m: int, batch_dim: BatchDim) -> Any:
    """Select sample i of nested tuples, lists and dicts of batches; copy everything else."""
    if isinstance(value, Tensor):
        dim = batch_dim if isinstance(batch_dim, int) else 0
        if -value.dim() <= dim < value.dim() and value.shape[dim] == m:
            return value.narrow(dim, i, 1)
        # Targets have the batch dimension first even if inputs do not.
        return value.narrow(0, i, 1) if value.dim() and value.shape[0] == m else value
    if isinstance(value, (tuple, list)):
        return type(value)(_sample(v, i, m, batch_dim) for v in value)
    if isinstance(value, Mapping):
        return {k: _sample(v, i, m, batch_dim) for k, v in value.items()}
    if tensors_in(value):
        raise HeldinError(
            f"heldin.verify: cannot cut a {type(value).__name__} into samples; pass tensors, or "
            "tuples, lists and dicts of them"
        )
    return value


def _scale(observed: Tensor, single: Tensor) -> float:
    """Return the factor between a loss averaged over the batch and that of a single sample."""
    size = float(single.square().sum())
    return float((observed * single).sum()) / size if size > 0 else 1.0
