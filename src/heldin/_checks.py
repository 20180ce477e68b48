"""Arguments and saved state, checked with errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ._errors import HeldinError

__all__ = ["all_or_nothing", "same_settings", "share", "state_of", "whole"]


def whole(owner: str, name: str, value: Any, least: int) -> int:
    """An integer that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HeldinError(f"{owner}: {name} must be a whole number >= {least}, got {value!r}")
    return value


def share(owner: str, name: str, value: Any) -> float:
    """A number in [0, 1)."""
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise HeldinError(f"{owner}: {name} must lie in [0, 1), got {value!r}")
    return float(value)


def state_of(owner: str, state: Any, version: int) -> Mapping[str, Any]:
    """A saved state, if it is one that `owner` wrote and this version of heldin understands."""
    if not isinstance(state, Mapping) or "heldin" not in state:
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
    return state


def same_settings(owner: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a state whose values were formed in another way than they would be from now on."""
    for name, value in own.items():
        if name not in saved or saved[name] != value:
            raise HeldinError(
                f"{owner}.load_state_dict: saved with {name}={saved.get(name)!r}, but this one has "
                f"{name}={value!r}; construct it with the saved value, or start a new one"
            )


def all_or_nothing(
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
