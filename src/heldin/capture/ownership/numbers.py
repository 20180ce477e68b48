"""Values that leave tensors for Python: `item()`, `tolist()`, `numpy()`, an `if`.

What they decide (lengths of samples, boxes per image) is in no tensor and in no shape, so a pass in
which such a number comes from the data is followed every time. An answer to a question about the
whole batch (`if mask.all()`) is different: there are two of them, and they become part of what
distinguishes a pass from others.
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
# these are not seen by a dispatch mode
COPIES = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}


class Numbers(TorchFunctionMode):
    """Notes yes and no in the order in which Python asks; tells of copies.

    Args:
        asked: says of the tensors whether the answer counts; None: all of them.
        copied: is told of tensors whose values are copied out.

    Attributes:
        answers: each with whether it counts.
        asking: whether an answer is being given.
    """

    def __init__(
        self,
        asked: Callable[[list[Tensor]], bool] | None = None,
        copied: Callable[[list[Tensor]], None] | None = None,
    ) -> None:
        super().__init__()
        self.answers: list[tuple[bool, bool]] = []
        self.asking = False
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
