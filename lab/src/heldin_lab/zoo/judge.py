"""Is what heldin sees of a model true, and is its training left alone?

Each batch goes through two copies of the model: one that nobody observes, in which each sample gets
a backward pass of its own, and one that is observed.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import heldin
from heldin._private_torch import BatchNorm
from heldin.errors import HeldinError, HeldinWarning, MixedSamplesWarning

from .entry import Batch, Entry, mapped

__all__ = ["SIZES", "STATUSES", "Outcome", "judge"]

SIZES = (4, 4, 3)  # samples in each batch
TOLERANCE = 1e-4  # of the sums; in double precision, errors of rounding are far below
# Squares of gradients that are this much smaller than the largest are noise, by precision: a bias
# that a mean takes away again, say.
FLOOR, SINGLE_FLOOR = 1e-8, 1e-4
STATUSES = {
    "exact": "the sums are those of one backward pass per sample",
    "refused": "an error that says why",
    "warned": "a warning that samples influence each other; nothing to compare with",
    "wrong": "other sums, or no word about samples that influence each other",
    "crashed": "an error that is not heldin's, which does not occur without it",
    "changed": "losses, gradients or random numbers are not those without heldin",
    "broken": "the model does not run here, with or without heldin",
}


@dataclass(frozen=True)
class Outcome:
    """What became of an entry.

    Attributes:
        library, name, version: of the model and its library.
        status: one of `STATUSES`.
        reason: why it was refused; what was wrong.
        error: the largest relative error of a parameter's sums.
        mixes: whether its samples influence each other.
        parameters: how many tensors were compared.
    """

    library: str
    name: str
    version: str
    status: str
    reason: str = ""
    error: float | None = None
    mixes: bool = False
    parameters: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Pass:
    """What one batch gives without heldin."""

    losses: Tensor
    sums: dict[str, tuple[Tensor, Tensor]]
    grads: dict[str, Tensor]
    random: Tensor


class _WrongError(Exception):
    """What is seen is not true."""


class _ChangedError(Exception):
    """Training is not what it would be."""


def judge(entry: Entry, version: str = "", started: Callable[[], None] = lambda: None) -> Outcome:
    """Run an entry. `started` is called when the model has run without heldin."""

    def outcome(status: str, reason: object = "", **more: Any) -> Outcome:
        text = " ".join(str(reason).split())
        return Outcome(entry.library, entry.name, version, status, text, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain, watched = (_made(entry) for _ in range(2))
            watched.load_state_dict(plain.state_dict())
            batches = [_drawn(entry, m, seed) for seed, m in enumerate(SIZES)]
            truths = [_unobserved(entry, plain, *each) for each in batches]
            mixes = entry.mixes if entry.mixes is not None else _mixes(entry, plain)
        except Exception as error:
            return outcome("broken", repr(error))
    started()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            worst = 0.0
            with heldin.observe(watched) as seen:
                for each, truth in zip(batches, truths, strict=True):
                    worst = max(worst, _compared(entry, seen, watched, each, truth, said))
        except HeldinError as error:
            return outcome("refused", error, mixes=mixes)
        except _WrongError as error:
            if not _told(said):
                return outcome("wrong", error, mixes=mixes)
        except _ChangedError as error:
            return outcome("changed", error, mixes=mixes)
        except Exception as error:
            return outcome("crashed", repr(error), mixes=mixes)
    told = _told(said)
    if told:
        return outcome("warned", told, mixes=mixes)
    if mixes:
        return outcome("wrong", "samples influence each other, and nothing is said", mixes=True)
    return outcome("exact", error=worst, parameters=len(truths[0].sums))


def _told(said: list[warnings.WarningMessage]) -> str:
    return next((str(w.message) for w in said if w.category is MixedSamplesWarning), "")


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    if find_spec("numpy") is not None:  # some models draw from it
        import numpy

        numpy.random.seed(number)


def _made(entry: Entry) -> nn.Module:
    """A new copy of the model, in training mode but for its batch statistics."""
    _seed(0)
    model = entry.make().train()
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.eval()
    return model.double() if entry.double else model


def _drawn(entry: Entry, m: int, seed: int) -> tuple[Batch, int, int]:
    _seed(100 + seed)
    batch = entry.batch(m)
    if entry.double:
        batch = mapped(lambda t: t.double() if t.is_floating_point() else t, batch)
    return batch, m, seed


def _unobserved(entry: Entry, model: nn.Module, batch: Batch, m: int, seed: int) -> _Pass:
    model.zero_grad()
    _seed(seed)
    losses = entry.losses(model, batch, m)
    if losses.shape != (m,) or not bool(losses.isfinite().all()):
        raise ValueError(f"losses of shape {tuple(losses.shape)}, not ({m},), or not finite")
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for loss in losses:
        grads = torch.autograd.grad(loss, [*params.values()], retain_graph=True, allow_unused=True)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                dense = grad.to_dense() if grad.is_sparse else grad
                dense = (
                    torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
                ).double()
                first, second = sums.get(name, (torch.zeros_like(dense), torch.zeros_like(dense)))
                sums[name] = (first + dense, second + dense.square())
    if not all(bool(second.isfinite().all()) for _, second in sums.values()):
        raise ValueError("gradients that are not finite")
    losses.sum().backward()
    return _Pass(losses.detach(), sums, _grads(model), torch.get_rng_state())


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _mixes(entry: Entry, model: nn.Module) -> bool:
    """Whether the loss of the first sample has a gradient with respect to others.

    Where tokens come in, it is looked at behind their embeddings. What has no row for each sample
    (graphs in one batch, say) is not looked at: then the entry has to say it.
    """
    m = SIZES[0]
    batch, *_ = _drawn(entry, m, 0)
    sources: list[Tensor] = []

    def source(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            tensor = tensor.clone().requires_grad_()
            sources.append(tensor)
        return tensor

    def embedded(_module: Any, _args: Any, out: Tensor) -> None:
        sources.append(out)

    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [table.register_forward_hook(embedded) for table in tables]
    try:
        loss = entry.losses(model, mapped(source, batch), m)[0]
    finally:
        for handle in handles:
            handle.remove()
    rows = [t for t in sources if t.requires_grad and t.dim() and t.shape[0] == m]
    if not rows:
        return False
    found = torch.autograd.grad(loss, rows, allow_unused=True)
    grads = [grad for grad in found if grad is not None]
    largest = max([float(grad.abs().max()) for grad in grads], default=0.0)
    return any(float(grad[1:].abs().max()) > 1e-10 * largest for grad in grads)


def _compared(
    entry: Entry,
    seen: heldin.Observation,
    model: nn.Module,
    drawn: tuple[Batch, int, int],
    truth: _Pass,
    said: list[warnings.WarningMessage],
) -> float:
    """Observe one pass; the largest error of a parameter's sums."""
    batch, m, seed = drawn
    seen.clear()
    model.zero_grad()
    _seed(seed)
    losses = entry.losses(model, batch, m)
    losses.sum().backward()
    _check_unchanged(model, losses, truth)
    unseen = [str(w.message) for w in said if w.category is HeldinWarning]
    if unseen:
        raise HeldinError(unseen[0])
    if seen.count != m:
        raise _WrongError(f"{seen.count} samples were counted in a batch of {m}")
    floor = FLOOR if entry.double else SINGLE_FLOOR
    floor *= max(float(second.norm()) for _, second in truth.sums.values())
    worst = 0.0
    for name, (first, second) in truth.sums.items():
        size = float(second.norm()) + floor + 1e-300
        if name not in seen:
            if float(second.norm()) > floor:
                raise _WrongError(f"{name!r} gets a gradient and was not seen")
            continue
        got = seen[name]
        error = max(
            float((got.total.double() - first).norm()) / (float(first.norm()) + size**0.5),
            float((got.squares.double() - second).norm()) / size,
        )
        if not error <= TOLERANCE:
            raise _WrongError(f"the sums of {name!r} are off by {error:.0%} in batch {seed + 1}")
        worst = max(worst, error)
    return worst


def _check_unchanged(model: nn.Module, losses: Tensor, truth: _Pass) -> None:
    if not torch.equal(losses.detach(), truth.losses):
        raise _ChangedError("the losses are not those without heldin")
    grads = _grads(model)
    if grads.keys() != truth.grads.keys():
        raise _ChangedError("other parameters have a gradient than without heldin")
    for name, grad in grads.items():
        same = truth.grads[name]
        if not torch.equal(grad.to_dense(), same.to_dense()):
            raise _ChangedError(f"the gradient of {name!r} is not that without heldin")
    if not torch.equal(torch.get_rng_state(), truth.random):
        raise _ChangedError("the random numbers that follow are not those without heldin")
