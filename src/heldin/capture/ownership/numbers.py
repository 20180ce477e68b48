"""Values that Python reads out of tensors: `item()`, `tolist()`, `numpy()`, an `if`.

They may decide things that appear in no tensor and no shape (lengths of samples, boxes per image),
so a call that reads such a number out of its data is traced every time. A yes-or-no question about
the whole batch (`if mask.all()`) is different: its answer becomes part of the key of the cached
plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .planes import tensors_in

__all__ = ["ANSWERS", "COPIES", "Numbers"]

ANSWERS = {
    Tensor.__bool__, Tensor.item, Tensor.is_nonzero, Tensor.equal, Tensor.allclose,
    Tensor.__contains__, torch.is_nonzero, torch.equal, torch.allclose,
}  # fmt: skip
# Functions that bypass dispatch modes.
COPIES = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}


class Numbers(TorchFunctionMode):
    """A recorder of the yes-or-no answers that Python reads out of tensors.

    Args:
        asked: returns whether the answer for these tensors counts; None: every answer does.
        copied: called with tensors whose values are copied to Python.
    """

    def __init__(
        self,
        asked: Callable[[list[Tensor]], bool] | None = None,
        copied: Callable[[list[Tensor]], None] | None = None,
    ) -> None:
        super().__init__()
        self.answers: list[tuple[bool, bool]] = []  # in order, each with whether it counts
        self.asking = False  # whether an answer that counts is being computed
        self._asked, self._copied = asked, copied

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in ANSWERS:
            if self._copied is not None and func in COPIES:
                self._copied(tensors_in(args))
            return func(*args, **kwargs)
        counts = self._asked is None or self._asked(tensors_in(args))
        self.asking = counts
        try:
            out = func(*args, **kwargs)
        finally:
            self.asking = False
        if isinstance(out, bool):
            self.answers.append((out, counts))
        return out
