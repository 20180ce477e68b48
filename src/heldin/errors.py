"""Everything heldin raises or warns about on purpose."""

__all__ = ["HeldinError", "HeldinWarning", "MixedSamplesWarning", "NotObservable"]


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
