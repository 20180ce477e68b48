"""Hooks: those that belong to a model, and copies of a model without the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["copy_without_hooks", "is_parametrization_hook", "unfused_attention"]


def copy_without_hooks(model: nn.Module, share: bool = True) -> nn.Module:
    """Copy a model without its hooks; for `functional_call`, the copy shares the parameters.

    Hooks that belong to the model itself (weight or spectral normalisation) are kept.
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()} if share else {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                own = {k: h for k, h in value.items() if is_parametrization_hook(h)}
                memo[id(value)] = type(value)(own)
    return copy.deepcopy(model, memo)


def is_parametrization_hook(hook: object) -> bool:
    """Whether a hook is a part of the model (weight or spectral normalisation)."""
    return type(hook).__module__.startswith("torch.nn.utils")


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Let PyTorch compute attention and transformer layers op by op.

    Its fused ops can neither be mapped over copies nor be counted.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
