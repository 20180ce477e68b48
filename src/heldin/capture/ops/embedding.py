"""Embeddings: tables whose rows are selected by an index."""

from __future__ import annotations

import torch

from heldin.capture.contributions import Contributions, Scattered

from .registry import register_op_rule
from .use import OpUse


@register_op_rule("EmbeddingBackward0")
def _embedding(use: OpUse) -> Contributions | None:
    index = use.saved("indices")
    if use.option("scale_grad_by_freq") or use.layout.dim == use.grad.dim() - 1:
        return None
    size = use.shape[0]
    padding = use.option("padding_idx")  # -1 (none) may read as 2^64 - 1
    if 0 <= padding < size:
        index = torch.where(index == padding, size, index)
    return Scattered(
        use.layout.split(index).flatten(1),
        use.layout.split(use.grad).flatten(1, -2),
        size,
    )
