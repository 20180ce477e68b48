"""The place of `heldin.errors` for modules that have not moved yet."""

from .errors import HeldinError, HeldinWarning, MixedSamplesWarning, NotObservable

__all__ = ["HeldinError", "HeldinWarning", "MixedSamplesWarning", "NotObservable"]
