"""The one patch of PyTorch: `torch.autograd.backward` is replaced while a model is observed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .collector import Collector
from .graph import Backward, walk

__all__ = ["attach", "detach"]

_live: list[Collector] = []
_lock = threading.RLock()  # an observation may be collected, and closed, while another opens
_plain_backward = torch.autograd.backward


def _observed_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *others: Any,
    **options: Any,
) -> None:
    """Run `torch.autograd.backward` with the hooks of all attached collectors."""
    arguments = (tensors, grad_tensors, retain_graph, create_graph, *others)
    collectors = list(_live)
    if not collectors:
        return _plain_backward(*arguments, **options)
    roots = list(tensors) if isinstance(tensors, Sequence) else [tensors]
    nodes = [t.grad_fn if isinstance(t, Tensor) else t.node for t in roots]
    seeds = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
    seeds = None if seeds is None else list(seeds)
    inputs = others[1] if len(others) > 1 else options.get("inputs")
    retained = create_graph if retain_graph is None else retain_graph
    graph = walk([n for n in nodes if n is not None])
    backward = Backward(graph, roots, seeds, inputs, bool(retained))
    passes = []
    try:
        for collector in collectors:
            observed = collector.prepare(backward)
            if observed is not None:
                passes.append(observed)
        for observed_pass in passes:  # after prepare(), which may run other backward passes
            observed_pass.attach()
        _plain_backward(*arguments, **options)
        for observed_pass in passes:
            observed_pass.finish()
    finally:
        for observed_pass in passes:
            observed_pass.close()


def attach(collector: Collector) -> None:
    """Let a collector observe all backward passes until `detach`."""
    with _lock:
        collector.open()
        if collector not in _live:
            _live.append(collector)
        torch.autograd.backward = _observed_backward


def detach(collector: Collector) -> None:
    """Stop a collector from observing; the last one restores `torch.autograd.backward`."""
    with _lock:
        if collector in _live:
            _live.remove(collector)
        if not _live and torch.autograd.backward is _observed_backward:
            torch.autograd.backward = _plain_backward
    collector.pause()
