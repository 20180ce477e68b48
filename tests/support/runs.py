"""The objects that follow a run, made from plain arguments.

`heldin.EarlyStopping` makes them from `RunInputs` and a rule of `heldin.rules`. Here the fields of
both are arguments of one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from heldin.rules import Auto, Evidence, Folds, LeaveOneOut
from heldin.rules.auto import follow
from heldin.rules.evidence import EvidenceStopping as EvidenceFollower
from heldin.rules.folds import FoldStopping as FoldFollower
from heldin.rules.inputs import RunInputs
from heldin.rules.leave_one_out import LeaveOneOutStopping as LeaveOneOutFollower
from heldin.rules.path import PathStopping
from heldin.rules.validation import ValidationStopping as ValidationStopping

OF_RULES = {"grid": "check_spacing", "memory": "snapshot_memory"}  # names of the followers
__all__ = [
    "EvidenceFollower",
    "EvidenceStopping",
    "FoldFollower",
    "FoldStopping",
    "LeaveOneOutFollower",
    "LeaveOneOutStopping",
    "ShadowStopping",
    "ValidationStopping",
    "stopping",
]

# short names of options of `rules.Evidence`
SHORT = {
    "across": "group_reduction",
    "arming": "arm_threshold",
    "dead": "dead_coordinates",
    "every": "check_every",
    "patience": "checks",
    "reduction": "loss_reduction",
    "start": "initial_average",
    "weighted": "weight_by_batch_size",
}

INPUTS = {field.name for field in fields(RunInputs)}


class EvidenceStopping(EvidenceFollower):
    """What follows a run by `rules.Evidence`, from its options by short names."""

    def __init__(
        self,
        model: Any,
        parameter_groups: Any = "tensor",
        *,
        make: Callable[..., Evidence] = Evidence,
        **options: Any,
    ) -> None:
        of_run = {"seed", "process_group", "history"} & options.keys()
        own = {name: options.pop(name) for name in of_run}
        if options.get("estimator", "sampled") != "sampled":
            options.pop("coordinates", None)  # without effect
        if "dead" in options:
            options["dead"] = {"out": "exclude"}.get(options["dead"], options["dead"])
        of_rule = {SHORT.get(name, name): value for name, value in options.items()}
        super().__init__(model, make(parameter_groups=parameter_groups, **of_rule), **own)

    @classmethod
    def paper(cls, model: Any, parameter_groups: Any = "tensor", **options: Any) -> Any:
        return cls(model, parameter_groups, make=Evidence.paper, **options)


def _inputs(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[RunInputs, Any]:
    own = {name: options.pop(name) for name in INPUTS & options.keys()}
    return RunInputs(*arguments, **own), {OF_RULES.get(k, k): v for k, v in options.items()}


def FoldStopping(
    model: Any,
    optimizer: Any,
    loss_fn: Any = None,
    data: Any = None,
    folds: Any = 5,
    **options: Any,
) -> FoldFollower:
    """Return what follows a run by `rules.Folds`."""
    inputs, of_rule = _inputs((model, optimizer, loss_fn, data), options)
    return FoldFollower(inputs, Folds(folds=folds, **of_rule))


def ShadowStopping(
    model: Any,
    optimizer: Any,
    loss_fn: Any = None,
    data: Any = None,
    hidden: Any = None,
    **options: Any,
) -> FoldFollower:
    """Return what follows a run by one shadow; `hidden` says which rows it does not see."""
    folds = 5 if hidden is None else (~hidden).long()
    return FoldStopping(model, optimizer, loss_fn, data, folds, shadows=1, **options)


def LeaveOneOutStopping(
    model: Any, optimizer: Any, loss_fn: Any, data: Any, probes: Any = None, **options: Any
) -> LeaveOneOutFollower:
    """Return what follows a run by `rules.LeaveOneOut`."""
    inputs, of_rule = _inputs((model, optimizer, loss_fn, data), options)
    return LeaveOneOutFollower(inputs, LeaveOneOut(probes=probes, **of_rule))


def stopping(rule: str, *arguments: Any, **options: Any) -> PathStopping:
    """Return what follows a run by a rule of this name."""
    if rule != "auto":
        kinds: dict[str, Callable[..., PathStopping]] = {
            "folds": FoldStopping,
            "shadow": ShadowStopping,
            "leave-one-out": LeaveOneOutStopping,
        }
        return kinds[rule](*arguments, **options)
    inputs, of_rule = _inputs(arguments, options)
    return follow(inputs, Auto(**of_rule))
