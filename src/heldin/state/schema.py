"""Validation of arguments and saved states, with errors that name the way out."""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from heldin.errors import HeldinError

__all__ = [
    "Saved",
    "check_int",
    "check_schema",
    "check_settings",
    "checked_state",
    "load_or_roll_back",
    "model_signature",
    "schema_error",
    "shown",
]

Schema = Any  # see `schema_error`


def shown(value: Any) -> str:
    """Return a value for a message: its repr if that is short, else its type."""
    text = repr(value)
    short = len(text) <= 60 and "\n" not in text
    return text if short else f"an object of type {type(value).__name__}"


def check_int(owner: str, name: str, value: Any, least: int) -> int:
    """Return an integer; refuse anything else, and integers below `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HeldinError(f"{owner}: {name} must be a whole number >= {least}, got {shown(value)}")
    return value


def schema_error(value: Any, form: Schema, place: str = "") -> str | None:
    """Return where and why a saved value does not match its schema; None if it does.

    A schema is a type or a tuple of types, None, a tensor (for one of its shape and type), a list
    of one schema (for any number of such entries), a dict of schemas by name, or {type: schema}
    (for any names of that type).
    """
    if isinstance(form, Tensor):
        if not isinstance(value, Tensor):
            return f"{place} is a {type(value).__name__}, not a tensor"
        if (value.shape, value.dtype) == (form.shape, form.dtype):
            return None
        actual, wanted = (f"{tuple(t.shape)}, {t.dtype}" for t in (value, form))
        return f"{place} is a tensor of {actual}, not of {wanted}"
    if isinstance(form, dict):
        if not isinstance(value, Mapping):
            return f"{place} is a {type(value).__name__}, not a dict"
        ((first, inner), *_) = form.items() or [(str, None)]
        if isinstance(first, type):
            pairs = [(name, inner) for name in value]
            unexpected = [name for name in value if type(name) is not first]
        else:
            pairs, unexpected = list(form.items()), [name for name in form if name not in value]
        if unexpected:
            return (
                f"{place} has no {unexpected[0]!r}"
                if unexpected[0] in form
                else f"{place} has {unexpected[0]!r}"
            )
        inside = ((value[name], part, f"{place}[{name!r}]") for name, part in pairs)
    elif isinstance(form, list):
        if not isinstance(value, (list, tuple)):
            return f"{place} is a {type(value).__name__}, not a list"
        inside = ((part, form[0], f"{place}[{i}]") for i, part in enumerate(value))
    else:
        kinds = form if isinstance(form, tuple) else (form,)
        if type(value) in kinds or (type(value) is int and float in kinds):
            return None
        if (isinstance(value, Tensor) and Tensor in kinds) or (value is None and None in kinds):
            return None
        names = " or ".join("None" if kind is None else kind.__name__ for kind in kinds)
        return f"{place} is a {type(value).__name__}, not {names}"
    return next((why for entry in inside if (why := schema_error(*entry)) is not None), None)


def check_schema(value: Any, form: Schema, place: str = "") -> None:
    """Refuse a part of a state that does not match its schema; see `schema_error`."""
    why = schema_error(value, form, place)
    if why is not None:
        raise ValueError(why)


class Saved:
    """A mixin for objects whose state consists of some of their attributes.

    Attributes of the class:
        _saved: a schema for each of these attributes. In a state they have their names without a
            leading underscore; those with a state of their own are saved by that.
    """

    _saved: ClassVar[Mapping[str, Schema]] = {}

    @classmethod
    def attribute_schemas(cls) -> dict[str, Schema]:
        """Return the schemas of all attributes, those of base classes among them."""
        kinds = reversed(cls.__mro__)
        return {name: form for kind in kinds for name, form in vars(kind).get("_saved", {}).items()}

    @classmethod
    def saved_schema(cls) -> dict[str, Schema]:
        """Return the schema of a state."""
        return {name.lstrip("_"): form for name, form in cls.attribute_schemas().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, texts, and lists and dicts of them."""
        values = {name.lstrip("_"): getattr(self, name) for name in self.attribute_schemas()}
        return {
            name: value.state_dict() if hasattr(value, "state_dict") else copy.copy(value)
            for name, value in values.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        for name in self.attribute_schemas():
            value = state[name.lstrip("_")]
            if hasattr(getattr(self, name), "load_state_dict"):
                getattr(self, name).load_state_dict(value)
            else:
                setattr(self, name, copy.copy(value))


def model_signature(model: nn.Module) -> str:
    """Return a digest of the names and shapes of a model's parameters, without wrappers."""
    wrappers = {"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module"}
    names = []
    for name, p in model.named_parameters():
        plain = ".".join(part for part in name.split(".") if part not in wrappers)
        plain = re.sub(r"_\d+(?=[./]|$)", "", plain)  # Keras numbers all layers of a session
        names.append(f"{plain}:{tuple(p.shape)}")
    code = zlib.crc32("\n".join(sorted(names)).encode())
    size = sum(p.numel() for p in model.parameters())
    return f"{len(names)} parameters with {size} numbers ({code:08x})"


def checked_state(
    owner: str, state: Any, version: int, form: Schema, kind: str | None = None
) -> Mapping[str, Any]:
    """Return a saved state; refuse one that another class or version of heldin wrote.

    kind: the name by which the state is marked (default: the owner's).
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("heldin"), str):
        raise HeldinError(
            f"{owner}.load_state_dict: this is not a state that heldin saved; pass what "
            f"{owner}.state_dict() returned"
        )
    if state["heldin"] != (kind or owner):
        raise HeldinError(
            f"{owner}.load_state_dict: this is the state of a {state['heldin']}; load it there"
        )
    if state.get("version") != version:
        raise HeldinError(
            f"{owner}.load_state_dict: the state has version {state.get('version')!r}, this "
            f"heldin reads version {version}; load it with the heldin that wrote it"
        )
    why = schema_error(state, form)
    if why is not None:
        raise HeldinError(
            f"{owner}.load_state_dict: the state is incomplete or damaged ({why}); load an older "
            "checkpoint"
        )
    return state


def check_settings(owner: str, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse a state that was saved with other settings."""
    for name, value in settings.items():
        if name not in saved or saved[name] != value:
            raise HeldinError(
                f"{owner}.load_state_dict: saved with {name}={saved.get(name)!r}, but this one has "
                f"{name}={value!r}; construct it with the saved value, or start a new one"
            )


def load_or_roll_back(
    owner: str,
    take: Callable[[Mapping[str, Any]], None],
    state: Mapping[str, Any],
    before: Mapping[str, Any],
) -> None:
    """Load a state; if it is damaged, restore the previous one and raise an error."""
    try:
        take(state)
    except HeldinError:
        take(before)
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        take(before)
        raise HeldinError(
            f"{owner}.load_state_dict: the state is incomplete or damaged ({error!r}); load an "
            "older checkpoint"
        ) from error
