"""The averages of single weights inside the state of the optimiser that moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from heldin.capture.sharding import local_part, shard_of
from heldin.errors import HeldinError

__all__ = ["STATE_SCHEMA", "own_averages", "with_averages", "without_averages"]

STATE_SCHEMA = {"settings": dict, "step": int, "updates": int, "averages": {str: Tensor}}
STATE_KEY, GROUP_KEY = "heldin_average", "heldin"  # in the state of a parameter, of a group


def with_averages(
    state: Mapping[str, Any], own: Mapping[str, Any], averages: Sequence[Sequence[Tensor]]
) -> dict[str, Any]:
    """An optimiser's state with ours in it: whole, and once more by parameter and group.

    Args:
        state: of the optimiser.
        own: ours.
        averages: of every parameter, group by group.
    """
    entries = {i: dict(entry) for i, entry in state["state"].items()}
    rest = {key: value for key, value in own.items() if key != "averages"}
    groups = [{**group, GROUP_KEY: rest} for group in state["param_groups"]]
    for group, values in zip(groups, averages, strict=True):
        for i, average in zip(group["params"], values, strict=True):
            entries.setdefault(i, {})[STATE_KEY] = average
    return {**state, "state": entries, "param_groups": groups, "heldin": own}


def without_averages(state: Any, names: Sequence[Sequence[str]]) -> tuple[dict[str, Any], Any]:
    """The optimiser's part of a state, and ours (None: there is none).

    Args:
        state: what `with_averages` gave, or what torch.distributed.checkpoint has left of it.
        names: of every parameter, group by group.
    """
    if not isinstance(state, Mapping):
        return {}, None
    own, averages = state.get("heldin"), {}
    plain = {key: value for key, value in state.items() if key != "heldin"}
    entries, groups = dict(plain.get("state", {})), list(plain.get("param_groups", []))
    for group, known in zip(groups, names, strict=False):
        for i, name in zip(group["params"], known, strict=False):
            entry = dict(entries.get(i, {}))
            average = entry.pop(STATE_KEY, None)
            if average is not None:
                averages[name] = average
            entries[i] = entry
    rest = next((group[GROUP_KEY] for group in groups if GROUP_KEY in group), None)
    if own is None and rest is not None:
        own = {**rest, "averages": averages}
    plain["state"] = {i: entry for i, entry in entries.items() if entry}
    plain["param_groups"] = [
        {key: value for key, value in group.items() if key != GROUP_KEY} for group in groups
    ]
    return plain, own


def own_averages(saved: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of saved averages, of each the part that this rank holds of the parameter."""
    found = {}
    for name, average in saved.items():
        if name not in named or named[name].shape != average.shape:
            raise HeldinError(
                f"ElementwiseStopping.load_state_dict: the state holds parameter {name!r} of "
                f"shape {tuple(average.shape)}, which this optimiser has not; load the state of a "
                "run with the same model"
            )
        if not average.is_floating_point():
            raise ValueError(f"the averages of {name!r} are {average.dtype}")
        if hasattr(average, "to_local"):
            part = local_part(average)  # sharded as the parameter is
        else:
            part = shard_of(average, named[name])
        found[name] = part.to(part.device, copy=True).contiguous()
    return found
