"""Ways into the Hugging Face Trainer that its callbacks do not have."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

__all__ = ["LOOP", "add_to_logs", "callers", "local", "put_before_loggers"]

# the methods of Trainer and CallbackHandler of which a run consists once it has begun
LOOP = (
    "_run_epoch", "_evaluate", "_finalize_training", "call_event",
    "get_batch_samples", "training_step", "_maybe_log_save_evaluate",
)  # fmt: skip


def callers(kinds: tuple[type, ...]) -> list[Any]:
    """The objects of some kinds whose methods are being called: callbacks do not get to know them.

    If that should change, an observer lives on after an error until the next run begins.
    """
    found: dict[int, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(owner, kinds):
            found[id(owner)] = owner
        frame = frame.f_back
    return list(found.values())


def put_before_loggers(callback: TrainerCallback) -> None:
    """Let a callback's `on_log` come first, so that what it adds is logged.

    The Trainer calls its integrations first, and those that its users gave it have no way to it:
    the list of callbacks is known only to the handler that is calling us. If that should change,
    the values are still printed and in the log history.
    """
    handler = sys._getframe(2).f_locals.get("self")
    if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
        handler.callbacks.remove(callback)
        handler.callbacks.insert(0, callback)


def add_to_logs(state: Any, logs: dict[str, Any], values: Mapping[str, float]) -> None:
    """Add values to the logs and to the entry of the log history that was made from them."""
    logs.update(values)
    if state.log_history and state.log_history[-1].get("step") == state.global_step:
        state.log_history[-1].update(values)


def local(name: str, function: str) -> Any:
    """A variable of a function that is being called; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None
