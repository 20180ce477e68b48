"""Outputs of held-out rows along a run, against models trained without those rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import heldin
from heldin import rules
from tests.support.folds_runs import separately
from tests.support.outcome_runs import CASES, CLASSES, N, batches, network, rows, sgd, trained


class Named(nn.Module):
    """A model with keywords and an output with `.logits`, as those of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.inner(x)
        return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)


class Items(Dataset[dict[str, Tensor]]):
    """Rows as mappings."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = rows()
        return {"x": x[index], "labels": y[index]}


def named_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def twin_outputs(folds: Tensor, rows_of: Tensor, steps: int, kind: str = "plain") -> Tensor:
    """Return outputs of freshly built models that were trained without the rows."""
    outputs = torch.empty(len(rows_of), CLASSES, dtype=torch.float64)
    label = torch.full((N,), -1)
    label[rows_of] = folds
    x, _ = rows()
    for fold in folds.unique().tolist():
        twin = network(kind)
        separately(twin, sgd(twin), F.cross_entropy, rows(), batches()[:steps], label != fold)
        with torch.no_grad():
            outputs[folds == fold] = twin(x[rows_of[folds == fold]])
    return outputs


@pytest.mark.parametrize("name", [*CASES])
def test_outputs_are_those_of_models_trained_without_the_rows(name: str) -> None:
    stopping, _ = trained(CASES[name], temperature=False)
    held = stopping.out_of_fold
    steps = stopping.best_step
    assert steps
    expected = twin_outputs(held.folds, held.rows, steps, CASES[name].get("kind", "plain"))
    torch.testing.assert_close(held.outputs, expected, rtol=1e-9, atol=1e-11)
    assert torch.equal(held.targets, rows()[1][held.rows])
    assert len(held) == (20 if name == "two of four" else N)
    losses = F.cross_entropy(expected, held.targets, reduction="none")
    torch.testing.assert_close(stopping.estimates["loss"].value, float(losses.mean()))
    stopping.close()
    assert torch.equal(stopping.out_of_fold.outputs, held.outputs)


def test_logits_and_labels_of_mappings() -> None:
    model = Named()
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Items(), batch_size=10, shuffle=True, generator=generator)
    stopping = heldin.EarlyStopping(
        model, optimizer, data=loader, batch_loss=named_loss, rule="folds", metrics="accuracy"
    )
    for _ in stopping.epochs(3):
        for batch in loader:
            optimizer.zero_grad()
            named_loss(model, batch).backward()
            optimizer.step()
    held = stopping.out_of_fold
    assert held.outputs.shape == (N, CLASSES)
    right = (held.outputs.argmax(1) == rows()[1]).double().mean()
    assert stopping.estimates["accuracy"].value == pytest.approx(float(right))


def test_leave_one_out_has_outputs_of_its_own() -> None:
    model, (x, y) = network(), rows()
    optimizer = sgd(model)
    stopping = heldin.EarlyStopping(
        model, optimizer, F.cross_entropy, (x, y), "leave-one-out", temperature=False
    )
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    held = stopping.out_of_fold
    losses = F.cross_entropy(held.outputs, held.targets)
    assert float(losses) == pytest.approx(stopping.estimates["loss"].value)
    with pytest.raises(heldin.HeldinError, match="leave-one-out has no shadows"):
        stopping.committee()
    stopping.close()


def test_training_is_the_same_with_and_without_outputs() -> None:
    plain = network()
    optimizer = sgd(plain)
    x, y = rows()
    for index in batches():
        optimizer.zero_grad()
        F.cross_entropy(plain(x[index]), y[index]).backward()
        optimizer.step()
    for name in ("dense", "replay", "batch_loss"):
        stopping, model = trained(CASES[name], metrics=["accuracy"])
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)
        stopping.close()


def test_outputs_are_thinned_to_the_memory() -> None:
    model, (x, y) = network(), rows()
    optimizer = sgd(model)
    room = 6 * N * CLASSES * 8  # half of it is for outputs
    stopping = heldin.EarlyStopping(
        model,
        optimizer,
        F.cross_entropy,
        (x, y),
        rules.Folds(folds=4, snapshot_memory=room),
        patience=None,
    )
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    outcome = stopping.following.outcome
    assert len(stopping.history) > 5
    assert len(outcome.state_dict()["outputs"]) == 3
    assert stopping.out_of_fold.outputs.shape == (N, CLASSES)
    stopping.close()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "room": (
        {"rule": rules.Folds(snapshot_memory=100), "metrics": "accuracy"},
        "100 are allowed; raise snapshot_memory",
    ),
    "not a function": ({"predict": 3}, "predict must be a function"),
    "evidence": (
        {"rule": "evidence", "loss_fn": None, "data": None, "metrics": "accuracy"},
        "metrics has no effect",
    ),
    "predict with leave-one-out": (
        {"rule": "leave-one-out", "predict": lambda model, batch: model(batch[0])},
        "leave-one-out linearises",
    ),
    "two calls": (
        {
            "loss_fn": None,
            "batch_loss": lambda model, batch: F.cross_entropy(
                model(batch[0]) + model(-batch[0]), batch[1]
            ),
            "metrics": "accuracy",
        },
        "calls the model 2 times",
    ),
    "one output for all rows": (
        {"predict": lambda model, batch: model(batch[0]).mean()},
        "one entry for each of",
    ),
    "metric of two classes": ({"metrics": "roc_auc"}, r"outputs \(40, 3\) and targets"),
    "targets": ({"targets": lambda batch: "none"}, "targets: expected a tensor, got str"),
}


@pytest.mark.parametrize("name", [*REFUSED])
def test_refused(name: str) -> None:
    change, message = REFUSED[name]
    model = network()
    arguments: dict[str, Any] = {
        "optimizer": sgd(model),
        "loss_fn": F.cross_entropy,
        "data": rows(),
    } | change
    with pytest.raises(heldin.HeldinError, match=message):
        heldin.EarlyStopping(model, **arguments)


def test_without_outputs_the_reason_is_told_when_they_are_asked_for() -> None:
    model = network()
    stopping = heldin.EarlyStopping(
        model, sgd(model), F.cross_entropy, rows(), rules.Folds(snapshot_memory=100)
    )
    with pytest.raises(heldin.HeldinError, match="raise snapshot_memory"):
        _ = stopping.out_of_fold
    assert stopping.temperature == 1.0
    stopping.close()
