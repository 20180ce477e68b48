"""Prehooks on autograd nodes, for the length of one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import graph_task_id, is_batched_by_vmap, is_wrapped_by_transform

__all__ = ["Grads", "NodeHooks", "without_autocast"]

Grads = Sequence[Tensor | None]


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable autocast, so that statistics keep their precision."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class NodeHooks:
    """The prehooks of one backward pass.

    The hooks also fire in backward passes that heldin's responses or the user's hooks run through
    the same graph. Those are ignored: the engine gives them a higher task number.

    Args:
        restart: called when the gradients seen so far turn out to belong to another pass.
    """

    def __init__(self, restart: Callable[[], None]) -> None:
        self._restart = restart
        self._handles: list[Any] = []
        self._busy = False
        self._task: int | None = None  # the autograd engine's number for this pass
        self._autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")

    def add(self, node: Any, respond: Callable[[Grads], None]) -> None:
        """Call a function with the gradients that are about to enter a node."""

        def fired(grads: Grads) -> None:
            if not self._is_this_pass(grads):
                return
            self._busy = True
            try:
                if torch.is_grad_enabled() or self._autocast:
                    with torch.no_grad(), without_autocast():
                        respond(grads)
                else:
                    respond(grads)
            finally:
                self._busy = False

        self._handles.append(node.register_prehook(fired))

    def _is_this_pass(self, grads: Grads) -> bool:
        if self._busy:
            return False
        task = graph_task_id()
        if task == self._task:
            return True
        if self._task is not None and task > self._task:
            return False
        some = [grad for grad in grads if grad is not None]
        if any(is_batched_by_vmap(grad) or is_wrapped_by_transform(grad) for grad in some):
            return False  # the user runs several passes at once (is_grads_batched)
        if self._task is not None:
            self._restart()
        self._task = task
        return True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
