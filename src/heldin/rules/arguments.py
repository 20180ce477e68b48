"""Arguments of `EvidenceStopping`, from the rule that users give."""

from __future__ import annotations

from typing import Any

from .options import Evidence

__all__ = ["evidence_arguments"]


def evidence_arguments(rule: Evidence, window: int) -> dict[str, Any]:
    """Return the arguments of `EvidenceStopping`, the model aside.

    Args:
        rule: as users give it.
        window: number of steps, also where that of the rule is "epoch".

    >>> evidence_arguments(Evidence(checks=3), 1)["patience"]
    3
    """
    arguments = {
        "parameter_groups": rule.parameter_groups,
        "smoothing": rule.smoothing,
        "window": window,
        "patience": rule.checks,
        "warmup": rule.warmup,
        "every": rule.check_every,
        "arming": rule.arm_threshold,
        "across": rule.group_reduction,
        "weighted": rule.weight_by_batch_size,
        "start": rule.initial_average,
        "correction": rule.correction,
        "dead": "out" if rule.dead_coordinates == "exclude" else "zero",
        "reduction": rule.loss_reduction,
        "estimator": rule.estimator,
        "batch_dim": rule.batch_dim,
        "parameters": rule.parameters,
    }
    return arguments if rule.coordinates is None else {**arguments, "coordinates": rule.coordinates}
