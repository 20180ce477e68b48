"""The errors and warnings of heldin."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from inspect import signature
from typing import Any, TypeVar

__all__ = ["HeldinError", "HeldinWarning", "MixedSamplesWarning", "NotObservable"]

T = TypeVar("T")

SITE = "https://heldin.github.io/heldin/"


def docs(page: str) -> str:
    """Return the address of a page of the documentation."""
    return SITE + page


def more(anchor: str) -> str:
    """Return the end of a message: a link to its section of the page on errors and warnings."""
    return f"({docs('when-it-goes-wrong.html')}#{anchor})"


class FrameworkName(str):
    """The name of a framework's class, which messages begin with in runs that it leads."""


def way_out(owner: str, otherwise: str) -> str:
    """Return what to do about a loop that is not followed: in a framework's run, or otherwise."""
    if not isinstance(owner, FrameworkName):
        return otherwise
    return (
        "leave out the callback, hook or option that does so, or use rule='evidence'; or train in "
        "a loop of your own, where heldin.EarlyStopping takes train_step="
    )


def refusal(owner: str, cause: str, otherwise: str, anchor: str = "") -> HeldinError:
    """Return an error with the name of a rule, a cause, `way_out`, and a link if there is one."""
    end = f" {more(anchor)}" if anchor else ""
    return HeldinError(f"{owner}: {cause} {way_out(owner, otherwise)}{end}")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return the end of a message that asks for the nearest word; empty if none is near."""
    by_small = {each.casefold(): each for each in words}
    close = get_close_matches(word.casefold(), by_small, 1)
    return f"did you mean {by_small[close[0]]!r}?" if close else ""


class HeldinError(Exception):
    """Base class of all errors that heldin raises on purpose.

    >>> import heldin, torch
    >>> try:
    ...     heldin.observe(torch.nn.ReLU())
    ... except heldin.HeldinError as error:
    ...     print(error)
    heldin.observe: the model has no parameter that requires a gradient; unfreeze at least one
    """


class NotObservable(HeldinError):
    """Raised if the per-sample contributions to a parameter cannot be determined.

    >>> import heldin, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> with heldin.observe(model):
    ...     try:
    ...         model.weight.sum().backward()              # no batch went through the model
    ...     except heldin.NotObservable as error:
    ...         print(error)
    backward() reached parameter 'weight', but no call of the model is pending ...
    """

    def __str__(self) -> str:
        return f"{super().__str__()} {more('not-observable')}"


class HeldinWarning(UserWarning):
    """Base class of all warnings that heldin gives.

    >>> import warnings, heldin
    >>> warnings.simplefilter("error", heldin.HeldinWarning)     # turn them into errors
    >>> warnings.simplefilter("default", heldin.HeldinWarning)
    """


class MixedSamplesWarning(HeldinWarning):
    """Warns that samples influence each other, so that per-sample gradients do not exist.

    >>> import warnings, heldin, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    >>> with warnings.catch_warnings(record=True) as caught, heldin.observe(model):
    ...     warnings.simplefilter("always")
    ...     model(torch.randn(4, 3)).square().mean().backward()
    >>> caught[0].category.__name__
    'MixedSamplesWarning'
    """


class NamedArguments:
    """A mixin whose error names the argument that is meant if an unknown one is passed."""

    def __new__(cls: type[T], *args: Any, **options: Any) -> T:
        parameters = signature(cls.__init__).parameters
        names = [name for name in parameters if name != "self"]
        takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
        for name in (name for name in options if not takes_all and name not in names):
            hint = did_you_mean(name, names) or f"known are {', '.join(names)}"
            raise HeldinError(f"heldin.{cls.__name__}: unknown argument {name!r}; {hint}")
        made: T = super().__new__(cls)  # type: ignore[misc]
        return made
