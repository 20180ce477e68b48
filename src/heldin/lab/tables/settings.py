"""The settings among which the defaults of heldin's networks were chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .rivals import Method, ours

__all__ = ["SETTINGS"]

_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "rate 0.001": {"learning_rate_init": 0.001},
    "no decay": {"weight_decay": 0.0},
    "decay 1": {"weight_decay": 1.0},
    "300 units": {"hidden_layer_sizes": (300,)},
    "two layers of 100": {"hidden_layer_sizes": (100, 100)},
    "batches of 32": {"batch_size": 32},
    "11 members": {"committee": 11},
    "one network": {"committee": 1},
}

SETTINGS: Mapping[str, Method] = {
    name: Method(ours(**options), "network") for name, options in _OPTIONS.items()
}
