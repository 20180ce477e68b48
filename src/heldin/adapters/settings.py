"""The arguments of callbacks: all spelled out, none unknown, none without effect."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn

from heldin.errors import HeldinError
from heldin.rules.elementwise import ElementwiseStopping
from heldin.rules.evidence import EvidenceStopping

__all__ = ["DEFAULTS", "check_elementwise", "chosen", "refuse_stranger", "spelled_out"]

F = TypeVar("F", bound=Callable[..., Any])

# what EvidenceStopping takes besides a model
DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(EvidenceStopping).parameters.items()
    if name != "model"
}
ELEMENTWISE = {*inspect.signature(ElementwiseStopping).parameters} - {"optimizer", "model"}


def chosen(arguments: Mapping[str, Any], of: type = EvidenceStopping) -> dict[str, Any]:
    """Those of a callback's arguments, its `locals()`, that belong to the rule.

    >>> chosen({"patience": 3, "smoothing": 0.8, "verbose": True})
    {'patience': 3, 'smoothing': 0.8}
    """
    known = DEFAULTS if of is EvidenceStopping else ELEMENTWISE
    return {name: arguments[name] for name in arguments if name in known}


def check_elementwise(owner: str, options: Mapping[str, Any]) -> None:
    """Refuse what ElementwiseStopping would refuse, though the model comes later."""
    anything = nn.ParameterList([nn.Parameter(torch.zeros(1))])
    optimizer = torch.optim.SGD(anything.parameters(), lr=0.0)
    try:
        ElementwiseStopping(optimizer, anything, **{**options, "parameters": None}).close()
    except TypeError as error:
        raise HeldinError(f"{owner}: {error}; see heldin.ElementwiseStopping") from None


def spelled_out(init: F) -> F:
    """Name an unknown argument, and the one that is meant.

    >>> class Callback:
    ...     @spelled_out
    ...     def __init__(self, early_stopping_patience=1, smoothing=0.9): ...
    >>> try:
    ...     Callback(patience=5)
    ... except HeldinError as error:
    ...     print(error)
    Callback: unknown argument 'patience'; is it 'early_stopping_patience'?
    """
    signature = inspect.signature(init)
    method = next(iter(signature.parameters)) == "self"
    known = [*signature.parameters][method:]

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> Any:
        owner = type(args[0]).__name__ if method else init.__name__
        for name in kwargs:
            if name == "model" != known[0] and name not in known:
                raise HeldinError(f"{owner}: the model is the one that the framework trains")
            if name not in known:
                near = [n for n in known if name in n] or difflib.get_close_matches(name, known, 1)
                hint = f"is it {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise HeldinError(f"{owner}: unknown argument {name!r}; {hint}")
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise HeldinError(f"{owner}: {error}") from None
        return init(*args, **kwargs)

    return cast(F, checked)


def refuse_stranger(owner: str, name: str, value: Any, kind: type, wanted: str) -> None:
    """Refuse an object of another kind, and say where it belongs.

    >>> try:
    ...     refuse_stranger("EvidenceStopping", "model", 3, nn.Module, "the model that is trained")
    ... except HeldinError as error:
    ...     print(error)
    EvidenceStopping: model must be the model that is trained, got an object of type int
    """
    if isinstance(value, kind):
        return
    got = f"an object of type {type(value).__name__}"
    if isinstance(value, EvidenceStopping):
        got = "heldin.EvidenceStopping, the rule for plain loops, which is made here by itself"
    raise HeldinError(f"{owner}: {name} must be {wanted}, got {got}")
