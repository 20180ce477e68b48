"""The plain training loop that every framework is compared with."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import heldin
from heldin._private_torch import forward_hooks
from heldin.adapters.patches import MethodWrapper
from tests.support import runs

ROWS, INPUTS, CLASSES = 58, 20, 3
EPOCH_STEPS = 4  # batches of 16


@dataclass(frozen=True)
class Case:
    """One way to train. Batches of 16 leave an incomplete last one of 10 in each epoch."""

    name: str
    clip: float | None = None
    accumulate: int = 1
    bf16: bool = False
    batch: int = 16
    epochs: int = 40
    special: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        chosen = {"smoothing": 0.7, "arming": None, "warmup": 13, "across": "mean"}
        return {**chosen, **self.special}

    @property
    def rule(self) -> heldin.rules.Evidence:
        """The same for a callback, which is told of the window by its name."""
        named = {"window": "epoch"} if self.options.get("window") == EPOCH_STEPS else {}
        options = {**self.options, **named}
        return heldin.rules.Evidence(**{NAMES.get(k, k): v for k, v in options.items()})

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.bf16 else torch.float64

    @property
    def rtol(self) -> float:
        return 1e-4 if self.bf16 else 1e-8

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext()


CASES = [
    Case("plain"),
    Case("clipping", clip=0.3),
    Case("accumulation", accumulate=3),
    Case("bf16", bf16=True),
    Case("window", special={"window": EPOCH_STEPS, "smoothing": 0.0, "across": "median"}),
    Case("everything", clip=0.3, accumulate=3, bf16=True),
    Case("patience", special={"patience": 3, "parameter_groups": "all", "estimator": "exact"}),
]
NAMES = {  # of options in a rule
    "arming": "arm_threshold",
    "across": "group_reduction",
    "patience": "checks",
    "every": "check_every",
}
EXACT = 1e-300  # a tolerance for nothing but the same bits
RATE, MOMENTUM = 0.125, 0.5  # numbers that single precision holds exactly

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# what frameworks warn of themselves is not ours to judge
foreign = pytest.mark.filterwarnings("ignore", "error::heldin.HeldinWarning")


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A few rows with much noise: training has nothing more to learn after a few epochs."""
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, INPUTS, generator=stream, dtype=torch.float64)
    noise = torch.randn(ROWS, generator=stream, dtype=torch.float64)
    y = 2 * x[:, 0] + x[:, 1] + x[:, 2] + 4 * noise
    return x.to(dtype), 1 + (y > 1).long() - (y < -1).long()


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(INPUTS, 12), nn.Tanh(), nn.Linear(12, CLASSES))
    return model.to(dtype)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def train(
    case: Case, flush: bool = True, true_mean: bool = False, rows: int | None = None
) -> tuple[runs.EvidenceStopping, nn.Module]:
    """Train until the rule stops.

    Args:
        case: how.
        flush: an accumulated step ends with its epoch, complete or not.
        true_mean: the losses of an incomplete step are divided by their own number.
        rows: a step is complete when it has so many rows, and the loss is a sum divided by that.
    """
    model, (x, y) = net(case.dtype), data(case.dtype)
    optimizer = sgd(model)
    stopping = runs.EvidenceStopping(model, **case.options)
    waiting = 0
    with stopping:
        for _ in range(case.epochs):
            for start in range(0, ROWS, case.batch):
                a, b = x[start : start + case.batch], y[start : start + case.batch]
                with case.autocast():
                    loss = F.cross_entropy(model(a), b)
                end = start + case.batch >= ROWS
                if rows is not None:
                    (loss * len(a) / rows).backward()
                    waiting += len(a)
                else:
                    alone = true_mean and end  # one batch is left over
                    (loss / (1 if alone else case.accumulate)).backward()
                    waiting += 1
                if waiting < (rows or case.accumulate) and not (flush and end):
                    continue
                waiting = 0
                if stopping.step():
                    return stopping, model
                if case.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
    return stopping, model


def train_elementwise(case: Case, epochs: int) -> tuple[heldin.ElementwiseStopping, nn.Module]:
    model, (x, y) = net(case.dtype), data(case.dtype)
    optimizer = heldin.ElementwiseStopping(sgd(model), model, smoothing=0.9)
    for _ in range(epochs):
        for start in range(0, ROWS, case.batch):
            a, b = x[start : start + case.batch], y[start : start + case.batch]
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return optimizer, model


class Fuse:
    """Raises an error when it is called for the sixth time: in the middle of the second epoch."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls = error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == 6:
            raise self.error("broken")


class Rows(torch.utils.data.Dataset[Any]):
    """The data, with a fuse that burns when a row of the second epoch is asked for."""

    def __init__(self, fuse: Fuse, dtype: torch.dtype = torch.float64) -> None:
        self.fuse, (self.x, self.y) = fuse, data(dtype)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i % 16 == 0:
            self.fuse()
        return self.x[i], self.y[i]


broken = pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])


def expect_no_trace(model: nn.Module) -> None:
    """Nothing is left of the run, in PyTorch or in the model."""
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    for module in model.modules():
        assert not forward_hooks(module)
        assert not [
            name for name, value in vars(module).items() if isinstance(value, MethodWrapper)
        ]


def expect_same(
    case: Case,
    found: runs.EvidenceStopping | None,
    model: nn.Module | None,
    rtol: float | None = None,
    **how: Any,
) -> None:
    """The run has the same values, stops at the same step and keeps the same weights."""
    stopping, plain = train(case, **how)
    near = rtol or case.rtol
    assert found is not None
    assert found._model is None
    assert stopping.stopped_step is not None
    assert stopping.stopped_step > 16
    assert [r.step for r in found.history] == [r.step for r in stopping.history]
    assert [r.count for r in found.history] == [r.count for r in stopping.history]
    for a, b in zip(found.history, stopping.history, strict=True):
        assert a.raw == pytest.approx(b.raw, rel=near, abs=near, nan_ok=True)
        assert a.criterion == pytest.approx(b.criterion, rel=near, abs=near)
        assert sorted(a.groups.values()) == pytest.approx(
            sorted(b.groups.values()), rel=10 * near, abs=near
        )
    assert not math.isnan(found.criterion)
    assert found.stopped_step == stopping.stopped_step
    if model is not None:
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        for p, q in pairs:
            torch.testing.assert_close(p, q, rtol=near, atol=near)


def imported_again(name: str) -> None:
    """Run the file of an adapter once more, as if it were imported for the first time."""
    (folder,) = heldin.__path__
    spec = spec_from_file_location("heldin.again", Path(folder, f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))
