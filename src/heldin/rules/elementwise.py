"""Stopping single weights by evidence (Sec. 3.6 and Eq. 15 of the paper), around any optimiser."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin._private_torch import adopt_hooks
from heldin.capture.arguments import BatchDim
from heldin.capture.collector import Collector
from heldin.capture.moments import Moments, upcast
from heldin.capture.observation import Observation
from heldin.capture.sharding import as_parameter, local_part, shard_of, unwrapped
from heldin.criterion.evidence import Correction, Dead, evidence
from heldin.criterion.masking import keep, pieces, smoothed
from heldin.distributed.ranks import Joinable, ProcessGroup, ranks_of
from heldin.errors import HeldinError, docs
from heldin.pages import Section, Table
from heldin.state.schema import (
    check_int,
    check_settings,
    checked_state,
    load_or_roll_back,
    model_signature,
    shown,
)

from .callback_hints import PlainLoopOnly
from .reporting import Advice, Follower, RunFacts

__all__ = ["ElementwiseStopping"]

T = TypeVar("T")


CALLBACKS = {
    "lightning": "heldin.lightning.ElementwiseStopping",
    "skorch": "heldin.skorch.ElementwiseStopping",
    "transformers": "heldin.transformers.elementwise",
}
STATE_SCHEMA = {"settings": dict, "step": int, "updates": int, "averages": {str: Tensor}}
STATE_KEY, GROUP_KEY = "heldin_average", "heldin"  # keys in the state of a parameter, of a group


class ElementwiseStopping(Joinable, Follower, Optimizer, PlainLoopOnly):
    """An optimiser wrapper that does not move weights without evidence.

    It wraps any optimiser and is used in its place: learning-rate schedulers, gradient scalers,
    parameter groups, closures and hooks work as before. Each weight k has a smoothed f_k. Once f_k
    is below 1 the weight is stopped: it does not change by one bit, whatever momentum, weight decay
    or Adam's state do.

    Args:
        optimizer: the optimiser to wrap. It keeps updating its state for stopped weights.
        model: the model with the optimiser's parameters.
        greedy: True: a stopped weight stays stopped (Sec. 3.6). False: a weight moves again when
            its evidence returns (Eq. 15).
        smoothing: decay b of the averages, in [0, 1); 0.99 and 0.999 are usual.
        start: initial value of the averages. A high value is a warm-up: no average can fall below
            1 in the first ln(start) / ln(1/b) steps.
        every: observe every n-th step only; stopped weights stay unchanged in all steps.
        correction: None, "gaussian" or "symmetric": see `heldin.evidence`.
        dead: a weight to which no sample contributed keeps its average ("out"), or counts as
            f = 0 ("zero") and is eventually stopped.
        batch_dim, parameters: see `heldin.observe`. Parameters not observed are never stopped.
        reduction, process_group: see `heldin.rules.Evidence`.

    >>> import heldin, torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(10, 1)
    >>> x = torch.randn(50, 10)
    >>> y = 3 * x[:, :1] + torch.randn(50, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    >>> optimizer = heldin.ElementwiseStopping(optimizer, model, smoothing=0.5)
    >>> for _ in range(30):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.mse_loss(model(x), y).backward()
    ...     optimizer.step()
    >>> 0.5 < optimizer.stopped_fraction() <= 1
    True
    >>> optimizer.close()
    """

    _callbacks = CALLBACKS
    optimizer: Optimizer  # the wrapped one

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        greedy: bool = True,
        smoothing: float = 0.999,
        start: float = 10.0,
        every: int = 1,
        correction: Correction = None,
        dead: Dead = "out",
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        process_group: ProcessGroup = "auto",
    ) -> None:
        name = type(self).__name__
        if not isinstance(optimizer, Optimizer):
            raise HeldinError(
                f"{name}: expected a torch.optim.Optimizer to wrap, got {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        adopt_hooks(self, optimizer)  # in place of Optimizer.__init__
        if not isinstance(smoothing, (int, float)) or not 0 <= smoothing < 1:
            raise HeldinError(f"{name}: smoothing must lie in [0, 1), got {shown(smoothing)}")
        self.smoothing = float(smoothing)
        self.every = check_int(name, "every", every, 1)
        if not start >= 1:
            raise HeldinError(f"{name}: start must be a number >= 1, got {start!r}")
        evidence({}, correction=correction, dead=dead)  # refuses unknown options
        self.greedy, self.start, self.correction, self.dead = greedy, start, correction, dead

        self._collector = Collector(model, batch_dim, parameters, real=True)
        self._seen = Observation(self._collector)
        self._ranks = ranks_of(model, process_group, self._collector, reduction == "mean")
        self._model: nn.Module | None = unwrapped(model)
        self.run = RunFacts()
        self._signature = model_signature(self._model)
        self._averages: dict[str, Tensor] = {}  # smoothed f_k by parameter name
        self._named: dict[str, Tensor] = {}
        self._step = 0
        self._updates = 0
        self._find_names()
        self._seen.__enter__()
        self._release = weakref.finalize(self, self._seen.close)
        self._prepare()

    # -- the wrapped optimiser

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimiser's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimiser's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimiser's defaults."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        # Public names only: code that probes for private names would find abilities (such as
        # unscaling gradients) that bypass this wrapper.
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not hasattr(self.optimizer, name):
            return PlainLoopOnly.__getattr__(self, name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        name = type(self).__name__
        raise HeldinError(
            f"{name} cannot be pickled or copied, as it watches a model; save its state_dict()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimiser; its parameters must be the model's."""
        self.optimizer.add_param_group(param_group)
        try:
            self._find_names()
        except HeldinError:
            self.param_groups.pop()
            raise

    def _find_names(self) -> None:
        """Look up the optimiser's parameters in the model by name."""
        if self._model is None:
            return
        names = {id(p): name for name, p in self._model.named_parameters()}
        named = {}
        for i, group in enumerate(self.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise HeldinError(
                        f"ElementwiseStopping: parameter group {i} holds a parameter of shape "
                        f"{tuple(p.shape)} that is not in the model; pass the model that is trained"
                    )
                named[names[id(p)]] = p
        self._named = named

    # -- the step

    @overload
    def step(self, closure: None = None, **options: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], **options: Any) -> float: ...
    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> float | None:
        """Update the averages from all backward passes since the last step, and step.

        With a closure, the evidence comes from its first call.
        """
        if closure is None and self._is_trial():
            return self.optimizer.step(**options)  # type: ignore[no-any-return]
        self._notify_joined()
        if closure is None:
            self._weigh()
            held = self._hold()
            result: Any = self.optimizer.step(**options)
        else:
            held = {n: local_part(p.detach()).clone() for n, p in self._named.items()}
            first = True

            def watched() -> float:
                nonlocal first
                with torch.enable_grad():
                    loss = closure()
                if first:  # later calls of a line search may be at weights that are not kept
                    self._weigh()
                first = False
                return loss

            result = self.optimizer.step(watched, **options)
        self._put_back(held)
        self._step += 1
        self._seen.clear()
        self._prepare()
        return result  # type: ignore[no-any-return]

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function as if it were the model's forward pass, see `heldin.Observation.call`."""
        return self._collector.call(function, *args, **kwargs)

    def _prepare(self) -> None:
        """Attach the hooks if the next step is observed, else remove them."""
        if self.every > 1:
            if (self._step + 1) % self.every == 0:
                self._seen.resume()
            else:
                self._seen.pause()

    def _is_trial(self) -> bool:
        """Return whether a step only initialises the optimiser's state before a checkpoint loads.

        torch.distributed.checkpoint does so with a learning rate of 0 and zero gradients.
        """
        if self._collector.passes or any(group.get("lr", 1.0) != 0 for group in self.param_groups):
            return False
        return self._with_gradient() is None

    def _with_gradient(self) -> str | None:
        """Return the name of a parameter whose gradient is not zero."""
        grads = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        some = (n for n, g in grads.items() if bool((local_part(g).to_dense() != 0).any()))
        return next(some, None)

    @torch.no_grad()
    def _weigh(self) -> None:
        seen: Mapping[str, Moments] = self._seen
        count = self._seen.count
        due = (self._step + 1) % self.every == 0
        if self._ranks is not None and self._ranks.should_compare_ranks(due):
            self._ranks.check_agreement({**self._settings(), "step": self._step})
        if self._ranks is not None and due:
            pooled = self._ranks.pool(1.0)
            seen, count = pooled.moments, pooled.count
        if count == 0 and due and not self._updates and self._model is not None:
            name = self._with_gradient()
            if name is not None:
                raise HeldinError(
                    f"ElementwiseStopping.step: {name!r} has a gradient, but no backward pass "
                    "through the model was seen. Wrap the optimiser before the forward pass"
                )
        if count < (4 if self.correction == "gaussian" else 2):
            return
        options = (self.smoothing, self.greedy, self.dead, self.correction)
        for name, moments in seen.items():
            if name not in self._named or not moments.finite:
                continue
            p, m = self._named[name], moments.count
            total, squares = shard_of(moments.total, p), shard_of(moments.squares, p)
            average = self._averages.get(name)
            if average is None:
                average = torch.full(total.shape, self.start, dtype=total.dtype)
            self._averages[name] = average = average.to(total.device)
            for a, first, second in pieces(average, total, squares):
                a.copy_(smoothed(a, Moments(first, second, m), *options))
        self._updates += 1

    def _hold(self) -> dict[str, Tensor]:
        """Copy the parameters in which a weight may be stopped."""
        if self.start * self.smoothing**self._updates > 1.01:
            return {}  # no average can be below 1 yet, as f >= 0
        with_average = (n for n in self._named if n in self._averages)
        return {n: local_part(self._named[n].detach()).clone() for n in with_average}

    @torch.no_grad()
    def _put_back(self, held: Mapping[str, Tensor]) -> None:
        for name, old in held.items():
            if name in self._averages:
                p, average = local_part(self._named[name]), self._averages[name]
                if not p.is_contiguous():
                    p.copy_(torch.where(average < 1.0, old, p))
                    continue
                for now, before, a in pieces(p, old, average):
                    keep(now, before, a)

    # -- reports

    def masks(self) -> dict[str, Tensor]:
        """Return a boolean tensor per parameter that is true where a weight is stopped.

        For a sharded parameter, it covers this rank's shard.
        """
        return {
            name: self._averages[name] < 1.0
            if name in self._averages
            else torch.zeros_like(local_part(p), dtype=torch.bool)
            for name, p in self._named.items()
        }

    @overload
    def stopped_fraction(self, by: None = None) -> float: ...
    @overload
    def stopped_fraction(self, by: Literal["tensor"]) -> dict[str, float]: ...
    def stopped_fraction(self, by: Literal["tensor"] | None = None) -> float | dict[str, float]:
        """Return the share of stopped weights, of the whole model or by tensor.

        Only this rank's shards count. The share is that of c > 0 in Eq. 15. (Eq. 16 counts c <= 0,
        which by Eq. 15 are the active weights: a sign error.)
        """
        if by not in (None, "tensor"):
            raise HeldinError(
                f"ElementwiseStopping.stopped_fraction: by must be None or 'tensor', got {by!r}"
            )
        masks = self.masks()
        if by == "tensor":
            return {n: float(mask.sum()) / max(1, mask.numel()) for n, mask in masks.items()}
        stopped = sum(int(mask.sum()) for mask in masks.values())
        return stopped / max(1, sum(mask.numel() for mask in masks.values()))

    def metrics(self) -> dict[str, float]:
        """Return the stopped fractions as a flat mapping for a tracker."""
        parts = {f"heldin/stopped/{n}": v for n, v in self.stopped_fraction(by="tensor").items()}
        return {"heldin/stopped": self.stopped_fraction(), **parts}

    def _headline(self) -> tuple[str, str]:
        share = self.stopped_fraction()
        return f"{share:.1%} of the weights stopped", f"after {self._step:,} steps"

    def _sections(self) -> list[Section]:
        parts = self.stopped_fraction(by="tensor")
        rows = [[name, f"{share:.1%}"] for name, share in parts.items()]
        shades = [[0.0, share] for share in parts.values()]
        return [Section("", tables=[Table(["parameter", "stopped"], rows, shades)])]

    def _advice(self) -> list[Advice]:
        return [
            (
                "Weights stop when their smoothed f is below 1. If too many stop, raise start or "
                "smoothing; if none does, lower the learning rate.",
                docs("tutorials/single-weights.html"),
            )
        ]

    # -- saving and closing

    def _settings(self) -> dict[str, Any]:
        names = ("greedy", "smoothing", "start", "every", "correction", "dead")
        if self._model is not None:
            self._signature = model_signature(self._model)
        return {**{name: getattr(self, name) for name in names}, "model": self._signature}

    def _own_state(self) -> dict[str, Any]:
        return {
            "heldin": "ElementwiseStopping",
            "version": 1,
            "settings": self._settings(),
            "step": self._step,
            "updates": self._updates,
            "averages": {
                name: as_parameter(average.clone(), self._named[name])
                for name, average in self._averages.items()
            },
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's state, with the averages under "heldin".

        `torch.distributed.checkpoint.state_dict` keeps only entries of parameters and groups, so
        averages and settings are stored there as well, for every parameter: a checkpoint is read
        into the state of a new optimiser, which must have the same entries.
        """
        own_state, state = self._own_state(), self.optimizer.state_dict()
        averages, names = own_state["averages"], {id(p): n for n, p in self._named.items()}
        rest = {key: value for key, value in own_state.items() if key != "averages"}
        entries = {i: dict(entry) for i, entry in state["state"].items()}
        groups = [{**group, GROUP_KEY: rest} for group in state["param_groups"]]
        for group, own_group in zip(groups, self.param_groups, strict=True):
            for i, p in zip(group["params"], own_group["params"], strict=True):
                name = names.get(id(p))
                if name in averages:
                    average = averages[name]
                else:  # without any contribution so far
                    dtype = upcast(p.new_empty(0)).dtype
                    average = torch.full_like(local_part(p.detach()), self.start, dtype=dtype)
                    average = as_parameter(average, p)
                entries.setdefault(i, {})[STATE_KEY] = average
        return {**state, "state": entries, "param_groups": groups, "heldin": own_state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`, stopped weights included."""
        name = "ElementwiseStopping"
        plain, saved = self._without_averages(state_dict)
        if saved is None:
            raise HeldinError(
                f"{name}.load_state_dict: this is the state of a plain optimiser; load it into "
                f"the wrapped one, {name}.optimizer, to start without stopped weights. If a "
                "flattened checkpoint has lost the averages, save it with "
                "flatten_optimizer_state_dict=False"
            )
        own_state = checked_state(name, saved, 1, STATE_SCHEMA)
        before = self._own_state()

        def take(state: Mapping[str, Any]) -> None:
            self._take(state)
            if state is own_state:  # the optimiser validates the state before it changes anything
                self.optimizer.load_state_dict(plain)

        load_or_roll_back(name, take, own_state, before)

    def _take(self, state: Mapping[str, Any]) -> None:
        check_settings("ElementwiseStopping", state["settings"], self._settings())
        averages = self._local(state["averages"])
        self._step, self._updates, self._averages = state["step"], state["updates"], averages
        self._seen.clear()
        if self._ranks is not None:
            self._ranks.forget()
        self._prepare()

    def _without_averages(self, state: Any) -> tuple[dict[str, Any], Any]:
        """Split a state into the optimiser's part and heldin's (None if there is none)."""
        if not isinstance(state, Mapping):
            return {}, None
        own_state, averages = state.get("heldin"), {}
        plain = {key: value for key, value in state.items() if key != "heldin"}
        entries, groups = dict(plain.get("state", {})), list(plain.get("param_groups", []))
        names = {id(p): name for name, p in self._named.items()}
        for group, own_group in zip(groups, self.param_groups, strict=False):
            for i, p in zip(group["params"], own_group["params"], strict=False):
                entry = dict(entries.get(i, {}))
                average = entry.pop(STATE_KEY, None)
                if average is not None:
                    averages[names.get(id(p), "")] = average
                entries[i] = entry
        rest = next((group[GROUP_KEY] for group in groups if GROUP_KEY in group), None)
        if own_state is None and rest is not None:
            own_state = {**rest, "averages": averages}
        plain["state"] = {i: entry for i, entry in entries.items() if entry}
        plain["param_groups"] = [
            {key: value for key, value in group.items() if key != GROUP_KEY} for group in groups
        ]
        return plain, own_state

    def _local(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy saved averages, each restricted to this rank's shard of the parameter."""
        averages = {}
        for name, average in saved.items():
            p = self._named.get(name)
            if p is None or p.shape != average.shape:
                raise HeldinError(
                    f"ElementwiseStopping.load_state_dict: the state holds parameter {name!r} of "
                    f"shape {tuple(average.shape)}, which this optimiser does not have; load the "
                    "state of a run with the same model"
                )
            if not average.is_floating_point():
                raise ValueError(f"the averages of {name!r} are {average.dtype}")
            # a DTensor is sharded like the parameter
            part = local_part(average) if hasattr(average, "to_local") else shard_of(average, p)
            averages[name] = part.to(part.device, copy=True).contiguous()
        return averages

    def _advance(self) -> None:
        """Take part in a step of the other ranks after this one has run out of data."""
        self._weigh()
        self._step += 1
        self._seen.clear()
        self._prepare()

    def close(self) -> None:
        """Stop observing and release the model. Stopped weights stay stopped."""
        self._release()
        self._model = None
