"""What the callbacks for skorch have in common."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["in_optimizer", "stop_epoch", "taken_up"]


class HasRun(Protocol):
    """A callback with a state of its run."""

    def run_state(self) -> dict[str, Any]:
        """What the optimiser's state is to hold."""


def in_optimizer(net: Any, key: str, callback: HasRun) -> Any:
    """Let the optimiser's state, which skorch's checkpoints hold, hold that of a callback as well.

    Returns:
        The handle of the hook.
    """
    alive = weakref.ref(callback)

    def add(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        there = alive()
        found = there.run_state() if there is not None else {}
        if not found:
            return state
        first, *others = state["param_groups"]
        return {**state, "param_groups": [{**first, key: found}, *others]}

    return net.optimizer_.register_state_dict_post_hook(add)


def taken_up(net: Any, key: str) -> dict[str, Any] | None:
    """The state that a checkpoint has brought with the optimiser's, which is taken out of it."""
    saved = [group.pop(key, None) for group in net.optimizer_.param_groups]
    return next((each for each in saved if each), None)


def stop_epoch(net: Any, datasets: Mapping[str, Any]) -> None:
    """End the epoch, so that the other callbacks see it, and the training."""
    net.history.record("train_batch_count", len(net.history[-1, "batches"]))
    net.notify("on_epoch_end", **datasets)
    raise KeyboardInterrupt
