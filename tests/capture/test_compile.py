"""Compiled models: exact where hooks open the graph, else an error that says what works."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heldin
from tests.support import runs


class Net(nn.Module):
    def __init__(self, inner: str | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.middle = torch.compile(self.scaled, backend=inner) if inner else self.scaled

    def scaled(self, h: Tensor) -> Tensor:
        return torch.relu(h).mul(self.scale).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    monkeypatch.setattr(logging.getLogger("torch._dynamo"), "level", logging.ERROR)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        yield
    torch.compiler.reset()


def truth(model: Net, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    twin = Net().to(x.dtype)
    twin.load_state_dict(model.state_dict())
    found: dict[str, Tensor] = {}
    for i in range(len(x)):
        twin.zero_grad()
        (nn.functional.cross_entropy(twin(x[i : i + 1]), y[i : i + 1]) / len(x)).backward()
        for name, p in twin.named_parameters():
            assert p.grad is not None
            found[name] = found.get(name, torch.zeros_like(p)) + p.grad**2
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["fresh", "warm", "in place"])
def test_compiled_model_is_exact_over_several_steps(backend: str, how: str) -> None:
    model = Net().double()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(0, 3, (6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "in place":
        model.compile(backend=backend)
        compiled: nn.Module = model
    else:
        compiled = torch.compile(model, backend=backend)  # type: ignore[assignment]
    if how == "warm":
        for _ in range(3):
            nn.functional.cross_entropy(compiled(x), y).backward()
        optimizer.zero_grad()
    with heldin.observe(compiled) as seen:
        for _ in range(3):
            seen.clear()
            nn.functional.cross_entropy(compiled(x), y).backward()
            for name, squares in truth(model, x, y).items():
                key = name if how == "in place" else f"_orig_mod.{name}"
                torch.testing.assert_close(seen[key].squares, squares, rtol=1e-10, atol=1e-14)
            optimizer.step()
            optimizer.zero_grad()


def test_compiled_region_in_a_model_is_exact() -> None:
    model = Net("aot_eager").double()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(0, 3, (6,))
    nn.functional.cross_entropy(model(x), y).backward()  # compiled by now
    with heldin.observe(model) as seen:
        for _ in range(3):
            seen.clear()
            nn.functional.cross_entropy(model(x), y).backward()
            for name, squares in truth(model, x, y).items():
                torch.testing.assert_close(seen[name].squares, squares, rtol=1e-10, atol=1e-14)


def test_it_is_compiled_again_afterwards() -> None:
    """After errors, too; and what needs no gradient stays compiled in the meantime."""
    ran = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(len(args))
            return graph(*args)

        return run

    model, x = nn.Sequential(Net()), torch.randn(6, 5)
    model[0].compile(backend=backend)
    model(x).sum().backward()
    assert len(ran) == 1
    with heldin.observe(model):
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(6, 4))
        assert len(ran) == 1
        with torch.no_grad():
            model(x)
        assert len(ran) == 2
        del ran[:]
    model(x).sum().backward()
    assert len(ran) == 1
    whole = Net()
    whole.compile(backend=backend)
    with heldin.observe(whole), heldin.observe(whole):
        whole(x).sum().backward()
    assert len(ran) == 1
    whole(x).sum().backward()
    assert len(ran) == 2


def whole(scores: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores * scale, y)


def test_compiled_loss_is_refused() -> None:
    """What is compiled outside the model stays so, and cannot be looked into."""
    model = Net()
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    loss = torch.compile(whole, backend="aot_eager")
    with (
        heldin.observe(model),
        pytest.raises(heldin.HeldinError, match=r"the loss, say.*estimator=\"microbatch\""),
    ):
        loss(model(x), y, torch.ones(3)).backward()


def test_micro_batches_of_a_compiled_model() -> None:
    model = Net("aot_eager")
    x, y = torch.randn(24, 5), torch.randint(0, 3, (24,))
    with runs.EvidenceStopping(model, estimator="microbatch") as stopping:
        for part in range(4):
            rows = slice(6 * part, 6 * part + 6)
            (nn.functional.cross_entropy(model(x[rows]), y[rows]) / 4).backward()
        stopping.step()
    assert stopping.evidence.approximate
    assert set(stopping.evidence.groups) == {n for n, _ in model.named_parameters()}
