"""Everything heldin raises or warns about on purpose."""

__all__ = ["HeldinError", "HeldinWarning", "MixedSamplesWarning", "NotObservable"]

SITE = "https://heldin.github.io/heldin/"  # the one place


def docs(page: str) -> str:
    """The address of a page of the documentation.

    >>> docs("errors.html#not-observable")
    'https://heldin.github.io/heldin/errors.html#not-observable'
    """
    return SITE + page


def more(anchor: str) -> str:
    """The end of a message: where the page on errors and warnings says more of it.

    >>> more("not-observable")
    '(https://heldin.github.io/heldin/errors.html#not-observable)'
    """
    return f"({docs('errors.html')}#{anchor})"


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
    """The per-sample contributions to some parameter cannot be established.

    >>> import heldin, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> with heldin.observe(model):
    ...     try:
    ...         model.weight.sum().backward()              # no batch went through the model
    ...     except heldin.NotObservable as error:
    ...         print(error)
    a backward pass reached parameter 'weight', but not through a call of the model ...
    """

    def __str__(self) -> str:
        return f"{super().__str__()} {more('not-observable')}"


class HeldinWarning(UserWarning):
    """Base class of all warnings that heldin gives.

    >>> import warnings, heldin
    >>> warnings.simplefilter("error", heldin.HeldinWarning)     # to be stopped by them
    >>> warnings.simplefilter("default", heldin.HeldinWarning)
    """


class MixedSamplesWarning(HeldinWarning):
    """Samples influence each other, so that per-sample gradients do not exist as such.

    >>> import warnings, heldin, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    >>> with warnings.catch_warnings(record=True) as caught, heldin.observe(model):
    ...     warnings.simplefilter("always")
    ...     model(torch.randn(4, 3)).square().mean().backward()
    >>> caught[0].category.__name__
    'MixedSamplesWarning'
    """
