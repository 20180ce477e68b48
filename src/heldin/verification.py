"""`heldin.verify`: what the automatic checks of a run have seen, on demand and in a table."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from heldin._private_torch import version_of
from heldin.diagnostics import Verification
from heldin.diagnostics import verify as verify_moments
from heldin.errors import HeldinError
from heldin.loop.randomness import RandomState
from heldin.rules.folds import FoldStopping

__all__ = ["RunVerification", "verify"]


@dataclass(frozen=True)
class RunVerification:
    """The checks of a run.

    Attributes:
        checks: (what was checked, whether it holds or None if it was not checked, details).

    >>> RunVerification((("rows", True, "20 of 20 recognised"),)).ok
    True
    """

    checks: tuple[tuple[str, bool | None, str], ...]

    @property
    def ok(self) -> bool:
        """Whether no check has failed."""
        return all(result is not False for _, result, _ in self.checks)

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.checks)
        words = {True: "ok", False: "FAILED", None: "not checked"}
        return "\n".join(
            f"{name:<{width}}  {words[result]:<11}  {details}"
            for name, result, details in self.checks
        )

    __repr__ = __str__


def verify(subject: Any, *args: Any, **options: Any) -> RunVerification | Verification:
    """Check a run that `heldin.EarlyStopping` follows, or the moments that heldin observes.

    Call `verify(stopping)` during a run, after a few steps: it checks that shadows and the user's
    training do not disturb each other, and a bug report can carry its table. `verify(model, step,
    *batch)` compares observed moments with one backward pass per sample, see
    `heldin.diagnostics.verify`.

    Args:
        subject: a `heldin.EarlyStopping`, or a model.
        args: with a model: `step`, a function that returns the loss, and its arguments.
        options: with a model: `batch_dim` and `tolerance`.

    >>> import heldin, torch
    >>> x, y = torch.randn(40, 3), torch.randn(40, 1)
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> stopping = heldin.EarlyStopping(model, optimizer, torch.nn.MSELoss(), (x, y))
    >>> torch.nn.functional.mse_loss(model(x), y).backward()
    >>> optimizer.step()
    >>> print(heldin.verify(stopping))
    versions     ok           heldin ..., torch ..., engine dense
    gradients    ok           1 step checked, largest relative difference ...
    your state   ok           weights, buffers, gradients, optimiser and random numbers ...
    rows         ok           40 rows, found by their contents
    """
    if isinstance(subject, nn.Module):
        return verify_moments(subject, *args, **options)
    if args or options:
        raise HeldinError("heldin.verify: a stopping object is verified without further arguments")
    inner = getattr(subject, "_inner", subject)
    if not isinstance(inner, FoldStopping):
        raise HeldinError(
            "heldin.verify: only rules with shadows (auto, folds, shadow) have something to verify"
        )
    inner._opened("verify")
    team, versions = inner._backend, f"heldin {version('heldin')}, torch {torch.__version__}"
    return RunVerification(
        (
            ("versions", True, f"{versions}, engine {team.engine}"),
            ("gradients", *_gradients(inner)),
            ("your state", *_user_state(inner)),
            ("rows", True, team.describe_rows()),
        )
    )


def _gradients(inner: FoldStopping) -> tuple[bool | None, str]:
    if inner.step_check is None:
        return True, "train_step is replayed as it is"
    differences = inner._backend.check.differences
    if not differences:
        return None, "no step has been checked yet"
    largest, count = max(differences.values()), len(differences)
    steps = "1 step" if count == 1 else f"{count} steps"
    return True, f"{steps} checked, largest relative difference {largest:.2g}"


def _user_state(inner: FoldStopping) -> tuple[bool, str]:
    """Evaluate all shadows, and compare the user's state before and after."""
    before = _summary(inner)
    inner._backend.held_out()
    same = before == _summary(inner)
    what = "weights, buffers, gradients, optimiser and random numbers are"
    return same, f"{what} {'the same' if same else 'CHANGED'} after an evaluation of the shadows"


def _summary(inner: FoldStopping) -> list[Any]:
    model = inner._opened("verify")
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for entries in inner._optimizer.state.values():
        tensors += [value for value in entries.values() if isinstance(value, Tensor)]
    state = RandomState.current(inner._device)
    numbers = [_checksum(t) for t in tensors] + [_checksum(state.torch_state)]
    return [*numbers, crc32(repr(state.python_state).encode()), *(version_of(t) for t in tensors)]


def _checksum(tensor: Tensor) -> int:
    data = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return crc32(data.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
