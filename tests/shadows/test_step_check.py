"""What the loop does is compared with the plain step: when, and with which random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin import HeldinError
from tests.support.reading import curves, step_of


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(28, 4, generator=generator, dtype=torch.float64)
    return x, x[:, :1] + torch.randn(28, 1, generator=generator, dtype=torch.float64)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Run:
    """A loop over batches of 10, 10 and 8 rows."""

    def __init__(
        self,
        loss: Callable[[nn.Module, Any], Tensor] = mse,
        make: Callable[[Iterable[Any]], Optimizer] = lambda p: torch.optim.SGD(p, 0.05),
        **arguments: Any,
    ) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 1).double()
        self.optimizer, self.loss = make(self.model.parameters()), loss
        self.loader = DataLoader(TensorDataset(*rows()), batch_size=10)
        given: dict[str, Any] = {
            "batch_loss": loss,
            "rule": heldin.rules.Folds(folds=4),
        } | arguments
        self.stopping = heldin.EarlyStopping(
            self.model, self.optimizer, data=self.loader, patience=None, **given
        )

    def train(self, epochs: int = 2, begin: Callable[[], Any] = lambda: None) -> None:
        for _ in self.stopping.epochs(epochs):
            begin()
            for batch in self.loader:
                self.optimizer.zero_grad()
                self.loss(self.model, batch).backward()
                self.optimizer.step()


def test_the_first_batch_of_another_size_is_checked() -> None:
    def by_ten(model: nn.Module, batch: Any) -> Tensor:  # a mean over batches of ten rows only
        return (model(batch[0]) - batch[1]).square().sum() / 10

    with pytest.raises(HeldinError, match=r"at step 3 .* it is 0\.8 times that"):
        Run(by_ten, batch_loss=mse).train()


def test_random_numbers_before_the_call_of_the_model() -> None:
    def denoise(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.randn_like(batch[0])
        return F.mse_loss(model(batch[0] + noise), noise[:, :1])

    Run(denoise, verify=True).train()


def test_weights_loaded_before_the_first_step_are_refused() -> None:
    run = Run()
    run.model.load_state_dict(nn.Linear(4, 1).double().state_dict())
    with pytest.raises(HeldinError, match="before the first step"):
        run.train()


class Swapping(torch.optim.SGD):
    """SGD that shows other weights in evaluation."""

    training = True

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(False, 0.5)

    @torch.no_grad()
    def train(self) -> None:
        self._swap(True, 2.0)

    def _swap(self, training: bool, factor: float) -> None:
        if self.training != training:
            self.training = training
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(factor)


def test_an_optimiser_with_an_evaluation_mode_is_followed() -> None:
    run = Run(make=lambda p: Swapping(p, 0.05))
    curve = curves(run.stopping)[0]
    with torch.no_grad():
        x, y = rows()
        halved = F.mse_loss(0.5 * run.model(x), y)
    assert float(curve.mean()) == pytest.approx(float(halved), rel=1e-12)
    optimizer = run.optimizer
    assert isinstance(optimizer, Swapping)

    def begin() -> None:
        optimizer.eval()
        optimizer.train()

    run.train(begin=begin)


def test_a_function_that_starts_late_is_refused() -> None:
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(*rows()), batch_size=10)

    def train_step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    train_step(rows())
    optimizer.zero_grad()
    stopping = heldin.EarlyStopping(
        model, optimizer, data=loader, batch_loss=mse, train_step=train_step
    )
    with pytest.raises(HeldinError, match="already taken steps"):
        stopping.train(next(iter(loader)))


@pytest.mark.parametrize("usual", [None, 1e9])
def test_clipping_at_one_step_is_noticed(usual: float | None) -> None:
    run = Run()
    for _ in run.stopping.epochs(2):
        for batch in run.loader:
            run.optimizer.zero_grad()
            mse(run.model, batch).backward()
            step = step_of(run.stopping) + 1
            if step == 5 or usual is not None:
                norm = 0.01 if step == 5 else usual
                nn.utils.clip_grad_norm_(run.model.parameters(), norm or 0.0)
            if step == 5:
                with pytest.raises(HeldinError, match=r"at step 5 .* clip=1\.0"):
                    run.optimizer.step()
                return
            run.optimizer.step()


def test_weights_changed_through_data_are_noticed_at_any_step() -> None:
    run = Run()
    for _ in run.stopping.epochs(2):
        for batch in run.loader:
            run.optimizer.zero_grad()
            mse(run.model, batch).backward()
            if step_of(run.stopping) == 5:
                run.model.weight.data.mul_(0.5)
                with pytest.raises(HeldinError, match="after step 5"):
                    run.optimizer.step()
                return
            run.optimizer.step()


def test_an_incomplete_step_may_have_its_own_factor() -> None:
    """The loop divides by the number of batches in a step, which is smaller in the last one."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 3).double(), torch.randn(20, 1).double()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stopping = heldin.EarlyStopping(
        model,
        optimizer,
        data=loader,
        batch_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        rule="folds",
        patience=None,
        verify=True,
    )
    for _ in range(3):
        batches = list(loader)
        for part in (batches[:2], batches[2:4], batches[4:]):
            optimizer.zero_grad()
            for a, b in part:
                (nn.functional.mse_loss(model(a), b) / len(part)).backward()
            optimizer.step()
    assert stopping.following.backend.check.factors == {2: 0.5, 1: 1.0}
