"""Arguments of callbacks: all in the signature, none unknown, none without effect."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from heldin.errors import HeldinError
from heldin.rules.callback_hints import PlainLoopOnly
from heldin.rules.elementwise import ElementwiseStopping
from heldin.rules.options import Evidence, Folds

__all__ = ["check_elementwise", "check_type", "needs_framework", "strict_kwargs"]

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def needs_framework(framework: str, extra: str, then: str = "") -> Iterator[None]:
    """Name the extra of an adapter whose framework cannot be imported, and what to do `then`."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"heldin.{extra} needs {framework} ({error}): pip install 'heldin[{extra}]'{then}",
            name=error.name,
        ) from error


def strict_kwargs(
    extends: Callable[..., Any] | None = None, without: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Return a decorator that names an unknown argument, and the one that is meant.

    Args:
        extends: a function whose keyword arguments, with their defaults, are the `**options` of the
            decorated one, in the signature too, which scikit-learn, LightningCLI and editors read.
        without: those that are left out.
    """

    def decorate(function: F) -> F:
        parameters = [*inspect.signature(function).parameters.values()]
        defaults: dict[str, Any] = {}
        if extends is not None:
            parameters = [p for p in parameters if p.kind != p.VAR_KEYWORD]
            skipped = {*without, "self", *(p.name for p in parameters)}
            inherited = inspect.signature(extends).parameters.values()
            added = [p for p in inherited if p.name not in skipped]
            parameters += [p.replace(kind=p.KEYWORD_ONLY) for p in added]
            defaults = {p.name: p.default for p in added}
        signature = inspect.Signature(parameters)
        is_method = parameters[0].name == "self"
        names = [p.name for p in parameters][is_method:]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            kind = type(args[0]) if is_method else function
            owner = getattr(kind, "name", kind.__name__)
            for name in kwargs:
                if name not in names:
                    raise HeldinError(f"{owner}: {_hint(name, names)}")
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise HeldinError(f"{owner}: {error}") from None
            return function(*args, **(defaults | kwargs))

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return cast(F, checked)

    return decorate


def _hint(name: str, names: list[str]) -> str:
    """Describe an unknown argument, and the one that is meant."""
    if name == "model":
        return "the model is the one that the framework trains"
    rules = [rule.__name__ for rule in (Evidence, Folds) if name in rule.__dataclass_fields__]
    similar = [n for n in names if name in n or n in name]
    similar = similar or difflib.get_close_matches(name, names, 1)
    if rules and "rule" in names:
        hint = f"it is an option of the rule: rule=heldin.rules.{rules[0]}({name}=...)"
    elif similar:
        hint = f"is it {similar[0]!r}?"
    else:
        hint = f"known are {', '.join(names)}"
    return f"unknown argument {name!r}; {hint}"


def check_elementwise(options: Mapping[str, Any]) -> None:
    """Refuse wrong arguments of ElementwiseStopping before there is a model."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ElementwiseStopping(optimizer, model, **{**options, "parameters": None}).close()


def check_type(owner: str, name: str, value: Any, kind: type, expected: str) -> None:
    """Refuse an object of another type."""
    if isinstance(value, kind):
        return
    received = f"an object of type {type(value).__name__}"
    if isinstance(value, PlainLoopOnly):
        received = "heldin.EarlyStopping, the class for plain loops, which is made here by itself"
    raise HeldinError(f"{owner}: {name} must be {expected}, got {received}")
