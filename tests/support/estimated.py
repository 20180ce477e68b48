"""The plain loop that every framework's `EarlyStopping` is compared with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin.rules.path import PathStopping
from heldin.shadows.held_out import FrameworkLoss
from tests.support import plain, runs

CASES = [
    plain.Case("plain"),
    plain.Case("clipping", clip=0.8),
    plain.Case("accumulation", accumulate=3, epochs=60),
    plain.Case("bf16", bf16=True),
]
PATIENCE = heldin.Patience(factor=1.5, slack=12, checks=1)
OPTIONS: dict[str, Any] = {"rule": "auto", "budget": 4.7, "patience": PATIENCE}  # two shadows
_KNOWN: dict[str, tuple[PathStopping, nn.Module]] = {}


NAMES = {"average": "average", "grid": "check_spacing"}  # of options in a rule


def settings(**changes: Any) -> dict[str, Any]:
    """Return `OPTIONS` with changes; a budget is for rule="auto" alone."""
    options = {**OPTIONS, **changes}
    if options["rule"] != "auto" and "budget" not in changes:
        del options["budget"]
    return options


def arguments(**changes: Any) -> dict[str, Any]:
    """Return the same for the `EarlyStopping` of a framework, without a temperature."""
    changes = {"temperature": False, **changes}
    options = {NAMES[k]: changes.pop(k) for k in [*changes] if k in NAMES}
    if options:
        name = changes.pop("rule", "folds")
        changes["rule"] = heldin.rules.Folds(shadows=1 if name == "shadow" else None, **options)
    return settings(**changes)


def last_shadows(state: Any) -> list[dict[str, dict[str, Tensor]]]:
    """Return weights and buffers of the shadows, from the state of a run that is over."""
    saved: list[dict[str, dict[str, Tensor]]] = state["rule"]["rule"]["shadows"]
    return saved


def followed(stopping: Any) -> Any:
    """Return what follows the run, for the class for plain loops or that of a framework."""
    if isinstance(stopping, heldin.EarlyStopping):
        return stopping.following
    return stopping.stopping_ if hasattr(stopping, "stopping_") else stopping.stopping


cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def batch_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Divided(FrameworkLoss):
    """The loss in a loop that divides by the batches of a full step, also where fewer are left.

    None: it divides by those that are left.
    """

    def __init__(self, accumulate: int | None) -> None:
        self.accumulate = accumulate

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return batch_loss(model, batch)

    def shares(self, batches: list[Any]) -> list[float]:
        return [1 / (self.accumulate or len(batches))] * len(batches)


def loader(case: plain.Case, shuffle: bool = True, dataset: Any = None) -> DataLoader[Any]:
    """In an order that depends on nothing but the number of the epoch."""
    data = dataset if dataset is not None else TensorDataset(*plain.data(case.dtype))
    return DataLoader(
        data, batch_size=case.batch, shuffle=shuffle, generator=torch.Generator().manual_seed(3)
    )


def train(
    case: plain.Case,
    shuffle: bool = True,
    flush: bool = True,
    true_mean: bool = False,
    epochs: int | None = None,
    added: bool = False,
    **options: Any,
) -> tuple[PathStopping, nn.Module]:
    """Train until the rule stops, and restore.

    Args:
        case: how.
        shuffle: whether the rows come in another order in every epoch.
        flush: an accumulated step ends with its epoch, complete or not.
        true_mean: the losses of an incomplete step are divided by their own number.
        epochs: in place of those of the case.
        added: accumulated losses are not divided by anything.
        options: of `runs.stopping`.
    """
    model = plain.net(case.dtype)
    optimizer = plain.sgd(model)
    batches = loader(case, shuffle)
    options = settings(**options)
    shadow_loss: Any = batch_loss
    if flush:
        shadow_loss = Divided(1 if added else None if true_mean else case.accumulate)
    with case.autocast():  # also for the check before the first step
        stopping = runs.stopping(
            options.pop("rule"),
            model,
            optimizer,
            data=batches,
            batch_loss=shadow_loss,
            clip=case.clip,
            **options,
        )
    with stopping:
        waiting = 0
        for _ in range(epochs or case.epochs):
            for number, batch in enumerate(batches):
                end = number == len(batches) - 1
                with case.autocast():
                    loss = batch_loss(model, batch)
                alone = true_mean and end  # one batch is left over
                (loss / (1 if alone or added else case.accumulate)).backward()
                stopping.add_batch(batch)  # type: ignore[attr-defined]
                waiting += 1
                if waiting < case.accumulate and not (flush and end):
                    continue
                waiting = 0
                if case.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
                if stopping.step():
                    return stopping, model
    return stopping, model


def expect_same(
    case: plain.Case,
    found: PathStopping | None,
    model: nn.Module,
    rtol: float | None = None,
    same_loss: bool = True,
    divided: bool = False,
    **how: Any,
) -> None:
    """The run has the same estimates, stops at the same step and ends with the same weights.

    So are standard errors, unless the loss that is estimated is not the one that is trained, and
    training losses, unless the loop divides them by itself by the batches of a full step.
    """
    key = f"{case.name} {sorted(how.items())}"
    if key not in _KNOWN:
        _KNOWN[key] = train(case, **how)
    stopping, trained = _KNOWN[key]
    near = rtol or case.rtol
    assert found is not None
    assert stopping.stopped_step is not None
    assert stopping.stopped_step > 16
    assert 0 < stopping.best_step < stopping.stopped_step
    assert [r.step for r in found.history] == [r.step for r in stopping.history]
    names = ["estimate"] if divided else ["estimate", "training_loss"]
    if same_loss and not divided:
        names.append("standard_error")
    for name in names:
        a, b = (rule.history.columns()[name] for rule in (found, stopping))
        assert a == pytest.approx(b, rel=near, nan_ok=True), name
    assert found.stopped_step == stopping.stopped_step
    assert found.best_step == stopping.best_step
    for p, q in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=near, atol=near)


def expect_no_trace(model: nn.Module, batches: Any = None) -> None:
    """Nothing is left of the run in PyTorch, in the model or in the loader."""
    plain.expect_no_trace(model)
    if batches is not None:
        assert "_get_iterator" not in vars(getattr(batches, "base_dataloader", batches))
