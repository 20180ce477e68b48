"""Shadows: resumed runs, refusals, warnings, and models that cannot be copied."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    default_collate,
)

import heldin
from tests.support import runs
from tests.support.shadow_runs import D, N, Numbers, mse


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    def parts() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        stopping = runs.FoldStopping(
            model, optimizer, data=Numbers(), batch_loss=mse, shadows=2, folds=3
        )
        return model, optimizer, stopping

    order = [torch.randperm(N)[:8].tolist() for _ in range(40)]

    def go(model: Any, optimizer: Any, stopping: Any, some: list[list[int]]) -> None:
        for index in some:
            torch.manual_seed(sum(index))
            batch = default_collate([Numbers()[i] for i in index])
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            stopping.step(index, batch=batch)

    whole, first, second = parts(), parts(), parts()
    go(*whole, order)
    go(*first, order[:17])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*second, order[17:])
    a, b = whole[2].history.columns(), second[2].history.columns()
    assert str(a) == str(b)
    assert torch.equal(whole[2]._held_out(), second[2]._held_out())
    for stopping in (whole[2], second[2]):
        stopping.restore()
    for p, q in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(p, q)
    state = first[2].state_dict()
    state["rule"]["shadows"][1]["weights"].pop("0.weight")
    with pytest.raises(heldin.HeldinError, match="incomplete or damaged"):
        second[2].load_state_dict(state)
    seeded = runs.FoldStopping(
        *whole[:2], data=Numbers(), batch_loss=mse, shadows=2, folds=3, seed=1
    )
    with pytest.raises(heldin.HeldinError, match="divided in another way"):
        seeded.load_state_dict(first[2].state_dict())


def test_arguments_that_would_be_ignored_are_refused() -> None:
    model = nn.Linear(D, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.ones(6, D), torch.ones(6, 1)
    for options, message in (
        ({}, "either loss_fn"),
        ({"loss_fn": F.mse_loss, "batch_loss": mse}, "either loss_fn"),
        ({"loss_fn": F.mse_loss, "eval_data": rows}, "eval_loss and eval_data need"),
        ({"batch_loss": mse, "sample_weight": torch.ones(6)}, "let the batch carry"),
        ({"batch_loss": mse, "engine": "dense"}, "'auto' or 'replay'"),
        ({"batch_loss": 3}, "must be a function of"),
        ({"batch_loss": mse, "groups": [1, 2]}, "one for each of the 6 rows"),
        ({"batch_loss": mse, "groups": "aabbcc"}, "3 groups for 5 folds"),
        ({"batch_loss": mse, "shadows": 6}, "6 shadows for 5 folds"),
        ({"batch_loss": mse, "groups": "abcdef", "stratify": "aabbcc"}, "cannot both"),
        ({"batch_loss": lambda m, b: m(b[0])}, "must return the loss of a batch"),
        ({"loss_fn": F.mse_loss, "clip": print}, "by the norm only"),
    ):
        with pytest.raises(heldin.HeldinError, match=message):
            runs.FoldStopping(model, optimizer, data=rows, **options)  # type: ignore[arg-type]
    with pytest.raises(heldin.HeldinError, match="data is missing"):
        runs.FoldStopping(model, optimizer, batch_loss=mse)
    extra = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(heldin.HeldinError, match="also trains a tensor"):
        runs.FoldStopping(model, extra, data=rows, batch_loss=mse)
    stopping = runs.FoldStopping(model, optimizer, data=rows, batch_loss=mse)
    with pytest.raises(heldin.HeldinError, match="it is for tensors and loss_fn"):
        stopping.train()
    stacked = runs.FoldStopping(model, optimizer, F.mse_loss, rows)
    with pytest.raises(heldin.HeldinError, match="stacked"):
        stacked.add_batch(rows)


def test_a_step_that_shadows_do_not_repeat_is_refused() -> None:
    x = torch.randn(N, D)
    for factor, clip, silent in ((2.0, None, False), (1.0, None, True), (1.0, 0.01, True)):
        torch.manual_seed(0)
        model = nn.Linear(D, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stopping = runs.FoldStopping(
            model, optimizer, data=[x, x[:, :1]], batch_loss=mse, clip=clip
        )
        (factor * mse(model, [x, x[:, :1]])).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if silent:
            stopping.step()
        else:
            with pytest.raises(heldin.HeldinError, match=r"another gradient .* 2 times that"):
                stopping.step()


def test_stacked_shadows_clip_each_by_itself() -> None:
    torch.manual_seed(0)
    x = torch.randn(N, D, dtype=torch.float64)
    y = 5 * x[:, :1]
    start = nn.Sequential(nn.Linear(D, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    for engine in ("dense", "vmap", "replay"):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stopping = runs.FoldStopping(
            model,
            optimizer,
            F.mse_loss,
            (x, y),
            2,
            clip=0.3,
            engine=engine,  # type: ignore[arg-type]
        )
        twin = copy.deepcopy(start)
        own = torch.optim.SGD(twin.parameters(), lr=0.1)
        for _ in range(4):
            for m, o, rows in ((model, optimizer, slice(None)), (twin, own, stopping._label != 1)):
                o.zero_grad()
                F.mse_loss(m(x[rows]), y[rows]).backward()
                nn.utils.clip_grad_norm_(m.parameters(), 0.3)
                o.step()
            stopping.step()
        expected = torch.stack([(twin(x[i : i + 1]) - y[i]).square().sum() for i in range(N)])
        found = stopping._held_out()
        mine = stopping._label == 1
        torch.testing.assert_close(found[mine], expected.detach()[mine])


def test_models_that_cannot_be_copied() -> None:
    model = nn.Linear(D, 1)
    model.stuck = (i for i in range(3))  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(N, D)
    stopping = runs.FoldStopping(model, optimizer, data=[x, x[:, :1]], batch_loss=mse)
    mse(model, [x, x[:, :1]]).backward()
    optimizer.step()
    stopping.step()
    assert len(stopping.history) == 2


def test_lbfgs() -> None:
    torch.manual_seed(0)
    x = torch.randn(N, D, dtype=torch.float64)
    y = x[:, :1] + torch.randn(N, 1, dtype=torch.float64)
    model = nn.Linear(D, 1).double()
    twin = copy.deepcopy(model)
    optimizer, own = (torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=4) for m in (model, twin))
    stopping = runs.FoldStopping(model, optimizer, data=[x, y], batch_loss=mse, folds=2)

    def closure(m: nn.Module, o: Any, keep: Any) -> Any:
        def evaluate() -> Tensor:
            o.zero_grad()
            loss = F.mse_loss(m(x[keep]), y[keep])
            loss.backward()
            return loss

        return evaluate

    for _ in range(3):
        optimizer.step(closure(model, optimizer, slice(None)))
        stopping.step(indices=torch.arange(N))
        own.step(closure(twin, own, stopping._label != 0))
    found = stopping._backend.weights_of(0)["weight"]  # type: ignore[union-attr]
    torch.testing.assert_close(found.detach(), twin.weight.detach())
