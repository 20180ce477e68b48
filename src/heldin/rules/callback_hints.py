"""Hints for users who pass an object for their own loops as a framework's callback."""

from __future__ import annotations

from typing import Any, ClassVar

from heldin.errors import HeldinError

__all__ = ["CALLBACKS", "NotACallback", "PlainLoopOnly"]

# Attributes that frameworks read from their callbacks and that a plain rule does not have.
ASKED_BY = {
    "state_key": "lightning",
    "on_init_end": "transformers",
    "set_params": "skorch",
    "set_model": "keras",
    "on_batch_end": "keras",
    "attach": "ignite",
    "name": "fastai",
}


CALLBACKS = {framework: f"heldin.{framework}.EarlyStopping" for framework in ASKED_BY.values()}
CALLBACKS["transformers"] += "Callback"


class NotACallback(HeldinError, AttributeError):
    """Raised if an object for the user's own loops is used as a callback; names the class to use.

    It is an AttributeError as well, so that `hasattr` works as for any other object.
    """


class PlainLoopOnly:
    """A mixin whose error names the right class if a framework uses the object as a callback.

    Attributes of the class:
        _callbacks: the class to use, by framework.
    """

    _callbacks: ClassVar[dict[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        use = self._callbacks.get(ASKED_BY.get(name, ""))
        if use is None or (name == "name" and "learn" not in vars(self)):  # set by fastai's Learner
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        raise NotACallback(f"{kind} follows loops of your own and is no callback: use {use}")
