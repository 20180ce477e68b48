"""The ways to take a training step: plain, observed, and as others would get the same statistics.

A method is a function of (model, x, y) that prepares whatever it needs and returns a `Way`: a step,
and where there is one a function that gives the sum of squares per parameter, to check it by.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heldin.capture.observation import Estimator, observe
from heldin_lab.rules import Evidence, EvidenceStopping

from .workloads import loss_of

__all__ = ["METHODS", "Skip", "Way", "run"]

RATE = 1e-4


class Skip(Exception):
    """This method cannot do this workload, or is not installed."""


@dataclass
class Way:
    """A way to take a training step."""

    step: Callable[[], Any]
    squares: Callable[[], dict[str, Tensor]] | None = None
    active: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    """Forward, backward, SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Way(step)


def _heldin(estimator: Estimator, every: int = 1) -> Callable[[nn.Module, Tensor, Tensor], Way]:
    def method(model: nn.Module, x: Tensor, y: Tensor) -> Way:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        window = 16 if estimator == "microbatch" else 1
        rule = Evidence(estimator=estimator, window=window, check_every=every)
        stopping = EvidenceStopping(model, rule)
        stopping._seen.pause()

        def step() -> None:
            loss_of(model, x, y).backward()
            stopping.step()
            optimizer.step()
            optimizer.zero_grad()

        def squares() -> dict[str, Tensor]:
            with observe(model, estimator=estimator) as seen:
                loss_of(model, x, y).backward()
            optimizer.zero_grad()
            return {name: moments.squares for name, moments in seen.items()}

        class Active:
            def __enter__(self) -> None:
                stopping._prepare()

            def __exit__(self, *_: object) -> None:
                stopping._seen.pause()

        return Way(step, squares if estimator == "exact" else None, Active)

    return method


def run(method: str, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """A whole run over the batches, from a new rule to its end."""
    estimators: dict[str, Estimator] = {"heldin sampled": "sampled", "heldin exact": "exact"}
    if method != "plain" and method not in estimators:
        raise Skip("only single steps are timed")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    rule = None
    if method != "plain":
        rule = EvidenceStopping(model, Evidence(estimator=estimators[method]))
    for x, y in batches:
        loss_of(model, x, y).backward()
        if rule is not None:
            rule.step()
        optimizer.step()
        optimizer.zero_grad()
    if rule is not None:
        rule.close()


def backpack(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    """BackPACK's SumGradSquared extension."""
    return _backpack(model, x, y, criterion=False)


def cockpit(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    """Cockpit's early-stopping quantity, on BackPACK's second moment."""
    return _backpack(model, x, y, criterion=True)


def _backpack(model: nn.Module, x: Tensor, y: Tensor, criterion: bool) -> Way:
    try:
        import backpack as library
        from backpack.extensions import SumGradSquared
    except ImportError:
        raise Skip("backpack-for-pytorch is not installed") from None
    layers = {type(sub) for sub in model.modules()}
    known = (nn.Linear, nn.ReLU, nn.Conv2d, nn.MaxPool2d, nn.Flatten, nn.Sequential)
    if any(not issubclass(kind, known) for kind in layers):
        raise Skip("no second moment for these layers")
    twin = library.extend(copy.deepcopy(model))
    loss_fn = library.extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(twin.parameters(), lr=RATE)
    m = len(x)

    def backward() -> None:
        with library.backpack(SumGradSquared()):
            loss_fn(twin(x), y).backward()

    def step() -> None:
        backward()
        if criterion:
            grad = torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
            second = torch.cat([p.sum_grad_squared.reshape(-1) for p in twin.parameters()])
            variance = (m * second - grad.square()).div_(m - 1).mul_(m)
            float(1 - (m * grad.square() / (variance + 1e-5)).mean())
        optimizer.step()
        optimizer.zero_grad()

    def squares() -> dict[str, Tensor]:
        backward()
        found = {n: p.sum_grad_squared.clone() for n, p in twin.named_parameters()}
        optimizer.zero_grad()
        return found

    return Way(step, squares)


def opacus(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    """Opacus's per-sample gradients, squared and summed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from opacus import GradSampleModule
    except ImportError:
        raise Skip("opacus is not installed") from None
    if any(isinstance(sub, nn.MultiheadAttention) for sub in model.modules()):
        raise Skip("no per-sample gradients of nn.MultiheadAttention")
    twin = GradSampleModule(copy.deepcopy(model), loss_reduction="mean")
    m = len(x)
    if sum(p.numel() for p in model.parameters()) * m * 4 > 8e9:
        raise Skip("per-sample gradients do not fit in 8 GB")
    optimizer = torch.optim.SGD(twin.parameters(), lr=RATE)

    def backward() -> dict[str, Tensor]:
        loss_of(twin, x, y).backward()
        return {
            name.removeprefix("_module."): p.grad_sample.square().sum(0) / m**2
            for name, p in twin.named_parameters()
        }

    def clear() -> None:
        for p in twin.parameters():
            p.grad_sample = None
        optimizer.zero_grad()

    def step() -> None:
        backward()
        optimizer.step()
        clear()

    def squares() -> dict[str, Tensor]:
        found = backward()
        clear()
        return found

    return Way(step, squares)


def vmap(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    """torch.func: vmap of grad over the samples, in chunks, squared and summed."""
    from torch.func import functional_call, grad
    from torch.func import vmap as batched

    twin = copy.deepcopy(model)
    params = {n: p.detach() for n, p in twin.named_parameters()}
    buffers = dict(twin.named_buffers())
    m = len(x)
    size = sum(p.numel() for p in params.values())
    chunk = max(1, min(m, int(2e8 // size)))

    def loss(weights: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        scores = functional_call(twin, {**weights, **buffers}, (one[None],))
        return nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), target.reshape(-1))

    each = batched(grad(loss), in_dims=(None, 0, 0))

    def backward() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        first = {n: torch.zeros_like(p) for n, p in params.items()}
        second = {n: torch.zeros_like(p) for n, p in params.items()}
        for lo in range(0, m, chunk):
            grads = each(params, x[lo : lo + chunk], y[lo : lo + chunk])
            for name, g in grads.items():
                first[name] += g.sum(0) / m
                second[name] += g.square().sum(0) / m**2
        return first, second

    def step() -> None:
        first, _ = backward()
        for name, p in params.items():
            p.sub_(first[name], alpha=RATE)

    return Way(step, lambda: backward()[1])


def validation(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    """What people do instead: a pass over 20 % of the data each epoch, shared by its steps."""
    base = plain(model, x, y)
    rows = max(1, len(x) // 4)  # 20 % held out of 100 %: a quarter of what is trained on

    def step() -> None:
        base.step()
        model.eval()
        with torch.no_grad():
            float(loss_of(model, x[:rows], y[:rows]))
        model.train()

    return Way(step)


METHODS: dict[str, Callable[[nn.Module, Tensor, Tensor], Way]] = {
    "plain": plain,
    "heldin sampled": _heldin("sampled"),
    "heldin every=10": _heldin("sampled", every=10),
    "heldin exact": _heldin("exact"),
    "heldin micro-batches": _heldin("microbatch"),
    "BackPACK": backpack,
    "Cockpit's formula": cockpit,
    "Opacus": opacus,
    "torch.func": vmap,
    "20 % validation": validation,
}
