"""What the tests of leave one out share."""

from __future__ import annotations

import torch
from torch import Tensor

SGD, ADAM = torch.optim.SGD, torch.optim.Adam


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
