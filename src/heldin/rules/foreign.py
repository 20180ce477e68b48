"""A rule for plain loops, given to a framework in the place of a callback."""

from __future__ import annotations

from typing import Any, ClassVar

from heldin.errors import HeldinError

__all__ = ["NotACallback", "PlainLoopOnly", "callbacks_named"]

# What frameworks ask their callbacks for, and what a plain rule does not have.
ASKED_BY = {
    "state_key": "lightning",
    "on_init_end": "transformers",
    "set_params": "skorch",
    "set_model": "keras",
    "on_batch_end": "keras",
    "attach": "ignite",
    "name": "fastai",
}


def callbacks_named(rule: str) -> dict[str, str]:
    """The callback of every framework for a rule, by framework.

    >>> callbacks_named("EvidenceStopping")["skorch"]
    'heldin.skorch.EvidenceStopping'
    """
    found = {framework: f"heldin.{framework}.{rule}" for framework in ASKED_BY.values()}
    return {**found, "transformers": f"heldin.transformers.{rule}Callback"}


class NotACallback(HeldinError, AttributeError):
    """The rule for plain loops is no callback; the message names the class that is one.

    It is an AttributeError as well, so that `hasattr` answers as for any other object.
    """


class PlainLoopOnly:
    """Says which class to use to a framework that takes this object for a callback.

    Attributes of the class:
        _callbacks: the class to use, by framework.

    >>> class Rule(PlainLoopOnly):
    ...     _callbacks = {"lightning": "heldin.lightning.EvidenceStopping"}
    >>> try:
    ...     Rule().state_key
    ... except HeldinError as error:
    ...     print(error)
    Rule is the rule for plain loops, no callback: use heldin.lightning.EvidenceStopping
    >>> hasattr(Rule(), "state_key")
    False
    """

    _callbacks: ClassVar[dict[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        use = self._callbacks.get(ASKED_BY.get(name, ""))
        if use is None or (name == "name" and "learn" not in vars(self)):  # set by fastai's Learner
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        raise NotACallback(f"{kind} is the rule for plain loops, no callback: use {use}")
