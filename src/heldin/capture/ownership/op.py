"""Properties of ATen ops, read from their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from heldin._private_torch import overload_of, schema_of

__all__ = ["Op", "op_of"]

_TURNS = {"t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "as_strided"}


class Op:
    """Properties of an ATen overload, read once from its schema."""

    def __init__(self, func: Any) -> None:
        schema = schema_of(func)
        arguments = schema.arguments
        self.names = [a.name for a in arguments]
        self.defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        self.written = [
            a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        self.is_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        self.name = func.overloadpacket.__name__
        self.base = self.name.removesuffix("_") if self.written else self.name
        self.turns = bool(self.written) and self.base in _TURNS
        self.pointwise = torch.Tag.pointwise in func.tags
        if self.written and not self.pointwise:  # only the out-of-place op may have the tag
            twin = getattr(torch.ops.aten, self.base, None)
            other = getattr(twin, overload_of(func), None)
            self.pointwise = other is not None and torch.Tag.pointwise in other.tags
        self.random = torch.Tag.nondeterministic_seeded in func.tags

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}


op_of = lru_cache(maxsize=None)(Op)
