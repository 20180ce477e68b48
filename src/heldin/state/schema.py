"""Arguments and saved state, checked with errors that say what to do."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from heldin.errors import HeldinError

__all__ = [
    "check_fraction",
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
    """A wrong value as a message shows it: itself if it is short, else its kind."""
    text = repr(value)
    short = len(text) <= 60 and "\n" not in text
    return text if short else f"an object of type {type(value).__name__}"


def check_int(owner: str, name: str, value: Any, least: int) -> int:
    """An integer that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HeldinError(f"{owner}: {name} must be a whole number >= {least}, got {shown(value)}")
    return value


def check_fraction(owner: str, name: str, value: Any) -> float:
    """A number in [0, 1)."""
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise HeldinError(f"{owner}: {name} must lie in [0, 1), got {shown(value)}")
    return float(value)


def schema_error(value: Any, form: Schema, place: str = "") -> str | None:
    """Where a saved value does not have the form it should have, and why; None if it has.

    A form is a type or a tuple of types, None, a tensor (for one of its shape and type), a list of
    one form (for any number of such entries), a dict of forms by name, or {type: form} (for any
    names of that type).

    >>> schema_error({"step": 3, "names": ["a", "b"]}, {"step": int, "names": [str]})
    >>> schema_error({"step": 3, "names": ["a", None]}, {"step": int, "names": [str]})
    "['names'][1] is a NoneType, not str"
    """
    if isinstance(form, Tensor):
        if not isinstance(value, Tensor):
            return f"{place} is a {type(value).__name__}, not a tensor"
        if (value.shape, value.dtype) == (form.shape, form.dtype):
            return None
        found, wanted = (f"{tuple(t.shape)}, {t.dtype}" for t in (value, form))
        return f"{place} is a tensor of {found}, not of {wanted}"
    if isinstance(form, dict):
        if not isinstance(value, Mapping):
            return f"{place} is a {type(value).__name__}, not a dict"
        ((first, inner), *_) = form.items() or [(str, None)]
        if isinstance(first, type):
            pairs = [(name, inner) for name in value]
            odd = [name for name in value if type(name) is not first]
        else:
            pairs, odd = list(form.items()), [name for name in form if name not in value]
        if odd:
            return f"{place} has no {odd[0]!r}" if odd[0] in form else f"{place} has {odd[0]!r}"
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
    return next((why for each in inside if (why := schema_error(*each)) is not None), None)


def check_schema(value: Any, form: Schema, place: str = "") -> None:
    """Refuse a part of a state that does not have its form; see `schema_error`."""
    why = schema_error(value, form, place)
    if why is not None:
        raise ValueError(why)


def model_signature(model: nn.Module) -> str:
    """Names and shapes of a model's parameters, in short; wrappers around it do not matter."""
    wrappers = {"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module"}
    names = []
    for name, p in model.named_parameters():
        plain = ".".join(part for part in name.split(".") if part not in wrappers)
        plain = re.sub(r"_\d+(?=[./]|$)", "", plain)  # Keras counts all layers of a session
        names.append(f"{plain}:{tuple(p.shape)}")
    code = zlib.crc32("\n".join(sorted(names)).encode())
    size = sum(p.numel() for p in model.parameters())
    return f"{len(names)} parameters with {size} numbers ({code:08x})"


def checked_state(owner: str, state: Any, version: int, form: Schema) -> Mapping[str, Any]:
    """A saved state, if it is one that `owner` wrote and this version of heldin understands."""
    if not isinstance(state, Mapping) or not isinstance(state.get("heldin"), str):
        raise HeldinError(
            f"{owner}.load_state_dict: this is not a state that heldin saved; pass what "
            f"{owner}.state_dict() returned"
        )
    if state["heldin"] != owner:
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


def check_settings(owner: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a state whose values were formed in another way than they would be from now on."""
    for name, value in own.items():
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
    """Take over a state; if it is damaged, go back to the one before and say so."""
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
