"""The averages of `ElementwiseStopping` inside the state of the wrapped optimiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from heldin.capture.sharding import local_part, shard_of
from heldin.errors import HeldinError

__all__ = ["STATE_SCHEMA", "local_averages", "with_averages", "without_averages"]

STATE_SCHEMA = {"settings": dict, "step": int, "updates": int, "averages": {str: Tensor}}
STATE_KEY, GROUP_KEY = "heldin_average", "heldin"  # keys in the state of a parameter, of a group


def with_averages(
    state: Mapping[str, Any], own_state: Mapping[str, Any], averages: Sequence[Sequence[Tensor]]
) -> dict[str, Any]:
    """Add heldin's state to an optimiser's: whole, and again by parameter and group.

    Args:
        state: state of the optimiser.
        own_state: state of heldin.
        averages: averages of every parameter, group by group.
    """
    entries = {i: dict(entry) for i, entry in state["state"].items()}
    rest = {key: value for key, value in own_state.items() if key != "averages"}
    groups = [{**group, GROUP_KEY: rest} for group in state["param_groups"]]
    for group, values in zip(groups, averages, strict=True):
        for i, average in zip(group["params"], values, strict=True):
            entries.setdefault(i, {})[STATE_KEY] = average
    return {**state, "state": entries, "param_groups": groups, "heldin": own_state}


def without_averages(state: Any, names: Sequence[Sequence[str]]) -> tuple[dict[str, Any], Any]:
    """Split a state into the optimiser's part and heldin's (None if there is none).

    Args:
        state: the result of `with_averages`, or the entries that torch.distributed.checkpoint kept.
        names: names of the parameters, group by group.
    """
    if not isinstance(state, Mapping):
        return {}, None
    own_state, averages = state.get("heldin"), {}
    plain = {key: value for key, value in state.items() if key != "heldin"}
    entries, groups = dict(plain.get("state", {})), list(plain.get("param_groups", []))
    for group, group_names in zip(groups, names, strict=False):
        for i, name in zip(group["params"], group_names, strict=False):
            entry = dict(entries.get(i, {}))
            average = entry.pop(STATE_KEY, None)
            if average is not None:
                averages[name] = average
            entries[i] = entry
    rest = next((group[GROUP_KEY] for group in groups if GROUP_KEY in group), None)
    if own_state is None and rest is not None:
        own_state = {**rest, "averages": averages}
    plain["state"] = {i: entry for i, entry in entries.items() if entry}
    plain["param_groups"] = [
        {key: value for key, value in group.items() if key != GROUP_KEY} for group in groups
    ]
    return plain, own_state


def local_averages(saved: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy saved averages, each restricted to this rank's shard of the parameter."""
    averages = {}
    for name, average in saved.items():
        if name not in named or named[name].shape != average.shape:
            raise HeldinError(
                f"ElementwiseStopping.load_state_dict: the state holds parameter {name!r} of "
                f"shape {tuple(average.shape)}, which this optimiser does not have; load the state "
                "of a run with the same model"
            )
        if not average.is_floating_point():
            raise ValueError(f"the averages of {name!r} are {average.dtype}")
        if hasattr(average, "to_local"):
            part = local_part(average)  # sharded like the parameter
        else:
            part = shard_of(average, named[name])
        averages[name] = part.to(part.device, copy=True).contiguous()
    return averages
