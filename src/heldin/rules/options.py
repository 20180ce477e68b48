"""Stopping rules as data: one frozen dataclass per rule, validated when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from heldin.errors import HeldinError, NamedArguments, did_you_mean
from heldin.state.schema import check_int, shown

__all__ = ["Auto", "Evidence", "Folds", "LeaveOneOut", "Rule", "Validation", "resolve"]


# Arguments of `heldin.EarlyStopping` that not every rule uses.
NOT_ALWAYS_USED = (
    "finish", "batch_loss", "metrics", "predict", "targets", "monitor", "mode", "temperature",
    "on_check", "eval_loss", "eval_data", "clip", "groups", "stratify", "time", "sample_weight",
    "train_step", "state", "averaged_model", "loss_fn", "data", "patience", "seed",
    "process_group",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rule(NamedArguments):
    """Base class of all rules.

    Attributes of the class:
        takes: which of `NOT_ALWAYS_USED` the rule uses; None: all.
        instead: what to do in place of giving an argument that it does not use.
    """

    takes: ClassVar[frozenset[str] | None] = frozenset()
    instead: ClassVar[Mapping[str, str]] = {}

    @property
    def name(self) -> str:
        """By which messages name the rule."""
        return next(
            (name for name, rule in RULES.items() if rule is type(self)), type(self).__name__
        )

    def follow(self, model: nn.Module, optimizer: Optimizer) -> Any:
        """Return the object that follows a run: a `StoppingRule` with `best_step` and `restore`.

        `heldin.EarlyStopping` calls its `step` after every step of the optimiser. The rules of this
        module need more than a model and an optimiser, and are made by `EarlyStopping` itself.
        """
        raise NotImplementedError

    def refuse_unused(
        self, owner: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> None:
        """Refuse arguments that the rule would ignore.

        Args:
            owner: the class that is used.
            arguments: of `heldin.EarlyStopping`, by name.
            defaults: of the same.
        """
        takes = NOT_ALWAYS_USED if self.takes is None else self.takes
        for name in NOT_ALWAYS_USED:
            value, default = arguments.get(name), defaults.get(name)
            value = tuple(value) if isinstance(value, list) else value  # state=[] says nothing
            plain = isinstance(value, (str, int, tuple)) and value == default
            if name not in takes and value is not default and not plain:
                instead = self.instead.get(name, "leave it out, or use rule='folds'")
                raise HeldinError(
                    f"{owner}: {name} has no effect with rule {self.name!r}; {instead}"
                )

    def _check(self, condition: bool, name: str, wanted: str) -> None:
        if not condition:
            value = getattr(self, name)
            raise HeldinError(
                f"rules.{type(self).__name__}: {name} must be {wanted}, got {shown(value)}"
            )

    def _whole(self, name: str, least: int) -> None:
        check_int(f"rules.{type(self).__name__}", name, getattr(self, name), least)

    def _positive(self, name: str) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        self._check(number and 0 < value < math.inf, name, "a number above 0")


@dataclass(frozen=True, kw_only=True)
class Auto(Rule):
    """Choose a rule that estimates the test loss, within a budget.

    Of one to five folds and three light shadows (`Folds(shadows=3, rows=0.25)`), those that the
    budget and the memory allow, the one with the lowest test loss in a measured table; of those
    that the table cannot tell apart, the one with the most shadows, whose estimate is the surest.
    From 1,000 rows on at most two shadows, from 10,000 on one; leave-one-out where fewer than three
    shadows fit and it is cheap. Where nothing fits the budget, the cheapest, with a warning.
    `reason_chosen` says what a larger budget buys.

    Attributes:
        budget: how many times the time of a plain run training may take. None: 6 for networks whose
            shadows are trained in one stack; for other models, whose shadows cost as much as the
            model, 2, or what the cheapest rule costs.
        memory: bytes that the shadows may take, and, up to 256 MB, the weights and outputs that
            are kept of the checks.

    >>> Auto(budget=2)
    Auto(budget=2, memory=1073741824)
    """

    takes = None
    budget: float | None = None
    memory: int = 2**30

    def __post_init__(self) -> None:
        if self.budget is not None:
            self._positive("budget")
        self._whole("memory", 1)


@dataclass(frozen=True, kw_only=True)
class Folds(Rule):
    """Train K shadows beside the model, each without one fold of the rows.

    The mean loss of the rows on the shadows that have not seen them estimates the test loss.

    Attributes:
        folds: number of folds, the fold number of each row, or a list of pairs (train, test) of row
            numbers, as scikit-learn's splitters yield them; with time=, number of blocks of rows
            that are tested, after a first one that is not.
        shadows: how many of the folds have a shadow; None: all of them.
        rows: "all", or a share of the rows of each batch: in every step a light shadow is trained
            on that share of the rows that it may see, at least two, drawn at random. Three light
            shadows on a quarter cost as many rows as one run. They choose the step nearly as well
            as full ones; their estimate is rougher.
        average: "bagged" averages the weights of the checks by how often each would have been
            chosen had the rows been drawn again; "best" keeps those of the lowest estimate.
        check_spacing: ratio of the steps of successive checks.
        snapshot_memory: bytes for the weights and outputs of the checks; if too small, fewer are
            kept.
        resamples: number of draws for average="bagged".
        engine: how shadows are run: in one stack ("dense", "vmap", with loss_fn), by replaying the
            user's own step ("replay"), or "auto", the first that works.

    >>> Folds(shadows=1).shadows
    1
    """

    takes = None
    folds: Any = 5
    shadows: int | None = None
    rows: float | Literal["all"] = "all"
    average: Literal["bagged", "best"] = "bagged"
    check_spacing: float = 1.2
    snapshot_memory: int = 2**28
    resamples: int = 100
    engine: Literal["auto", "dense", "vmap", "replay"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.folds, (int, float, str, type(None))):
            self._whole("folds", 2)
        if self.shadows is not None:
            self._whole("shadows", 1)
            fits = not isinstance(self.folds, int) or self.shadows <= self.folds
            self._check(fits, "shadows", f"at most the number of folds, {self.folds!r}")
        light = isinstance(self.rows, float) and 0 < self.rows < 1
        self._check(light or self.rows == "all", "rows", "'all' or a share between 0 and 1")
        _check_path(self)
        engines = ("auto", "dense", "vmap", "replay")
        self._check(self.engine in engines, "engine", f"one of {', '.join(map(repr, engines))}")


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(Rule):
    """Estimate the loss that each row would have had it been left out, without a second model.

    Attributes:
        probes: number of rows that carry a state; None: all of them, at most 1,024.
        average, check_spacing, snapshot_memory, resamples: see `Folds`.

    >>> LeaveOneOut(probes=64).probes
    64
    """

    takes = frozenset(
        {"loss_fn", "data", "sample_weight", "patience", "finish", "monitor", "mode", "predict"}
        | {"metrics", "targets", "temperature", "on_check", "seed", "process_group"}
    )
    instead: ClassVar[Mapping[str, str]] = {"batch_loss": "it needs loss_fn and tensors"}
    probes: int | None = None
    average: Literal["bagged", "best"] = "bagged"
    check_spacing: float = 1.25
    snapshot_memory: int = 2**28
    resamples: int = 100

    def __post_init__(self) -> None:
        if self.probes is not None:
            self._whole("probes", 2)
        _check_path(self)


def _check_path(rule: Any) -> None:
    """Check the options that both rules with an estimated test loss have."""
    rule._check(rule.average in ("bagged", "best"), "average", "'bagged' or 'best'")
    rule._positive("check_spacing")
    rule._check(rule.check_spacing > 1, "check_spacing", "a number above 1")
    rule._whole("snapshot_memory", 0)
    rule._whole("resamples", 1)


@dataclass(frozen=True, kw_only=True)
class Evidence(Rule):
    """Stop when the gradient is as small as its own error: the paper's criterion.

    Attributes:
        parameter_groups: "tensor" (one group per tensor), "all", or names of parameters to names of
            groups.
        smoothing: decay of the exponential average, in [0, 1).
        window: number of steps whose sums add up before a value is formed, or "epoch".
        checks: number of consecutive checks above zero before training stops.
        warmup: number of first steps at which training is never stopped.
        check_every: number of steps from one observed step to the next.
        arm_threshold: how far from zero the criterion must have been once before the rule may stop;
            None: it may from the start.
        group_reduction: "median" or "mean" of the groups' values.
        weight_by_batch_size: weight values in the average by the size of their batch.
        initial_average: None for a bias-corrected average, or the number at which it starts.
        correction: None, "gaussian" or "symmetric", see `heldin.evidence`.
        dead_coordinates: "exclude" or "zero", see `heldin.evidence`.
        loss_reduction: whether the loss is a "mean" or a "sum" over the samples of a step.
        estimator: "sampled", "exact" or "microbatch", see `heldin.observe`.
        coordinates: number of coordinates that "sampled" uses; None: the default.
        batch_dim, parameters: see `heldin.observe`.

    >>> Evidence.paper(smoothing=0.99).group_reduction
    'mean'
    """

    takes = frozenset({"data", "seed", "process_group"})
    instead: ClassVar[Mapping[str, str]] = {
        "patience": "it is an option of the rule: rule=heldin.rules.Evidence(checks=3)"
    }
    parameter_groups: Any = "tensor"
    smoothing: float = 0.9
    window: int | Literal["epoch"] = 1
    checks: int = 1
    warmup: int = 0
    check_every: int = 1
    arm_threshold: float | None = 0.5
    group_reduction: Literal["median", "mean"] = "median"
    weight_by_batch_size: bool = True
    initial_average: float | None = None
    correction: Literal["gaussian", "symmetric"] | None = None
    dead_coordinates: Literal["exclude", "zero"] = "exclude"
    loss_reduction: Literal["mean", "sum"] = "mean"
    estimator: Literal["sampled", "exact", "microbatch"] = "sampled"
    coordinates: int | None = None
    batch_dim: Any = 0
    parameters: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.smoothing, (int, float)) and 0 <= self.smoothing < 1
        self._check(number, "smoothing", "a number in [0, 1)")
        if self.window != "epoch":
            self._whole("window", 1)
        self._whole("checks", 1)
        self._whole("warmup", 0)
        self._whole("check_every", 1)
        if self.arm_threshold != 0 and self.arm_threshold is not None:
            self._positive("arm_threshold")
        if self.initial_average is not None:
            number = isinstance(self.initial_average, (int, float))
            self._check(number, "initial_average", "a number or None")
        groups = self.parameter_groups
        is_known = groups in ("tensor", "all") if isinstance(groups, str) else False
        is_known = is_known or callable(groups) or isinstance(groups, Mapping)
        self._check(
            is_known, "parameter_groups", "'tensor', 'all', a mapping or a function of names"
        )
        chosen = self.parameters is None or callable(self.parameters)
        self._check(chosen, "parameters", "a function of names or None")
        for name, allowed in (
            ("group_reduction", ("median", "mean")),
            ("correction", (None, "gaussian", "symmetric")),
            ("dead_coordinates", ("exclude", "zero")),
            ("loss_reduction", ("mean", "sum")),
            ("estimator", ("sampled", "exact", "microbatch")),
        ):
            self._check(getattr(self, name) in allowed, name, f"one of {allowed}")
        if self.coordinates is not None:
            self._whole("coordinates", 1)
            sampled = self.estimator == "sampled"
            self._check(sampled, "coordinates", f"None with estimator={self.estimator!r}")

    def in_steps(self, owner: str, epoch_steps: float | None, otherwise: str) -> Evidence:
        """Return the rule with its window as a number of steps.

        Args:
            owner: the class that is used, for the error.
            epoch_steps: number of optimiser steps in an epoch; None: not known.
            otherwise: what to do where it is not known.
        """
        if self.window != "epoch":
            return self
        if epoch_steps is None or not math.isfinite(epoch_steps):
            raise HeldinError(
                f"{owner}: window='epoch' needs the number of steps in an epoch; {otherwise}, or "
                "pass their number, window=100 for instance"
            )
        return replace(self, window=max(1, math.ceil(epoch_steps) // self.check_every))

    @classmethod
    def paper(cls, **options: Any) -> Evidence:
        """Return the paper's rule: stop at the first step with a smoothed criterion above zero.

        Every coordinate, the mean over groups, no arming, no weights, the plain recursion from
        zero. Options that are given take precedence.
        """
        settings: dict[str, Any] = {
            "arm_threshold": None,
            "group_reduction": "mean",
            "weight_by_batch_size": False,
            "initial_average": 0.0,
            "estimator": "exact",
        }
        return cls(**{**settings, **options})


@dataclass(frozen=True, kw_only=True)
class Validation(Rule):
    """Stop by the loss on a held-out set, for those who have one.

    Attributes:
        data: a DataLoader, or tensors (x, y).
        improvement: by how much a loss must be below the best one to count as better.
        check_every: number of steps between checks; None: at the end of every epoch.

    >>> Validation(data=[1.0]).check_every is None
    True
    """

    takes = frozenset({"loss_fn", "batch_loss", "data", "patience"})
    data: Any
    improvement: float = 0.0
    check_every: int | None = None

    def __post_init__(self) -> None:
        iterable = isinstance(self.data, Iterable) and not isinstance(self.data, str)
        self._check(iterable, "data", "a DataLoader or tensors (x, y)")
        number = isinstance(self.improvement, (int, float)) and self.improvement >= 0
        self._check(number, "improvement", "a number >= 0")
        if self.check_every is not None:
            self._whole("check_every", 1)


GROUP = "heldin.rules"  # entry points of rules in other packages: a name, and what makes the rule
RULES: Mapping[str, Callable[[], Rule]] = {
    "auto": Auto,
    "folds": Folds,
    "shadow": lambda: Folds(shadows=1),
    "leave-one-out": LeaveOneOut,
    "evidence": Evidence,
}


def resolve(rule: str | Rule, budget: float | None = None, memory: int | None = None) -> Rule:
    """Return the rule of a name, here or in another package, with the shorthands of `Auto`."""
    shorthand = {"budget": budget, "memory": memory}
    options: dict[str, Any] = {
        name: value for name, value in shorthand.items() if value is not None
    }
    if options and rule != "auto":
        name = next(iter(options))
        raise HeldinError(
            f"{name}: it is an option of rule='auto' (heldin.rules.Auto({name}=...)), and the rule "
            f"is {rule!r}"
        )
    if isinstance(rule, Rule):
        return rule
    if rule == "validation":
        raise HeldinError(
            "rule='validation' needs the held-out set: rule=heldin.rules.Validation(data=...)"
        )
    if isinstance(rule, str) and rule in RULES:
        return Auto(**options) if rule == "auto" else RULES[rule]()
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not isinstance(rule, str) or rule not in others:
        names = [*RULES, *others]
        hint = did_you_mean(str(rule), names) or f"rules are {', '.join(map(repr, names))}"
        raise HeldinError(f"rule: there is no rule {rule!r}; {hint}")
    resolved = others[rule].load()()
    if not isinstance(resolved, Rule):
        raise HeldinError(
            f"rule: {others[rule].value}, which the entry point {rule!r} of {GROUP} names, makes a "
            f"{type(resolved).__name__}; it must make a heldin.rules.Rule"
        )
    return resolved
