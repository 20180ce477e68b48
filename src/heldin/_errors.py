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
    """The per-sample contributions to some parameter cannot be established."""


class HeldinWarning(UserWarning):
    """Base class of all warnings that heldin gives."""


class MixedSamplesWarning(HeldinWarning):
    """Samples influence each other, so that per-sample gradients do not exist as such."""
