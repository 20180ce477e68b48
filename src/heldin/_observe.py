"""Observing training steps: `observe`, and the backward pass it looks into."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ._calls import BatchDim, Call, Calls, Knowledge
from ._distributed import unwrapped, watch_unsharded
from ._errors import HeldinError, NotObservable
from ._graph import Plan, walk
from ._moments import Moments
from ._pass import Held, Pass, Reduced, Stored
from ._routine import Routine
from ._sampling import Sampler

__all__ = ["BUDGET", "BatchDim", "Estimator", "Observation", "observe"]

Estimator = Literal["exact", "sampled", "microbatch"]
BUDGET = 4096  # coordinates per parameter of the sampled estimator
T = TypeVar("T")

# --- the one hook into PyTorch ---------------------------------------------------------------

_live: list[Observation] = []
_lock = threading.Lock()
_plain_backward = torch.autograd.backward


def _observed_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """torch.autograd.backward while something is observed: look at the graph, then run it."""
    watching = list(_live)
    if not watching:
        return _plain_backward(tensors, *args, **kwargs)
    if len(watching) == 1:
        routine = watching[0].routine
        if routine is not None and routine.run(tensors, args, kwargs, _plain_backward):
            return None
    roots = list(tensors) if isinstance(tensors, Sequence) else [tensors]
    nodes = [t.grad_fn if isinstance(t, Tensor) else t.node for t in roots]
    seeds = args[0] if args else kwargs.get("grad_tensors")
    seeds = None if seeds is None else [seeds] if isinstance(seeds, Tensor) else list(seeds)
    graph = walk([node for node in nodes if node is not None])
    inputs = args[4] if len(args) > 4 else kwargs.get("inputs")
    passes = [Pass(observation, graph, roots, seeds, inputs) for observation in watching]
    try:
        for each in passes:
            each.prepare()
        for each in passes:  # only now: preparing may run other backward passes
            each.hook()
        _plain_backward(tensors, *args, **kwargs)
        for each in passes:
            each.finish()
    finally:
        for each in passes:
            each.close()


def _attach(observation: Observation) -> None:
    with _lock:
        _live.append(observation)
        torch.autograd.backward = _observed_backward


def _detach(observation: Observation) -> None:
    with _lock:
        if observation in _live:
            _live.remove(observation)
        if not _live and torch.autograd.backward is _observed_backward:
            torch.autograd.backward = _plain_backward


# --- observations ----------------------------------------------------------------------------


class Observation(Mapping[str, Moments]):
    """What `heldin.observe` yields: the moments of every parameter seen, by name.

    The moments of all backward passes in the block add up. Parameters that are frozen or were not
    used are absent.

    Attributes:
        count: number of samples seen (of micro-batches, if these are taken for samples).
        estimator: "exact", "sampled" or "microbatch".
        reducing: for steps of one backward pass, let the ratios be formed during the pass and
            keep nothing of the parameters' size; the mapping is empty then, and `heldin.evidence`
            takes what is in `reduced`.
        careful: while reducing, be prepared for a second pass in the same step.

    >>> import heldin, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> with heldin.observe(model) as seen:
    ...     model(torch.randn(8, 3)).sum().backward()
    >>> sorted(seen), seen.count
    (['bias', 'weight'], 8)
    >>> seen["bias"].total
    tensor([8.])
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        estimator: Estimator = "exact",
        budget: int = BUDGET,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise HeldinError(f"heldin.observe: expected a torch.nn.Module, got {type(model)}")
        model = unwrapped(model)
        if not any(p.requires_grad for p in model.parameters()):
            raise HeldinError(
                "heldin.observe: the model has no parameter that requires a gradient; unfreeze at "
                "least one"
            )
        if estimator not in ("exact", "sampled", "microbatch"):
            raise HeldinError(
                f"heldin.observe: estimator must be 'exact', 'sampled' or 'microbatch', got "
                f"{estimator!r}"
            )
        if budget < 1:
            raise HeldinError(f"heldin.observe: budget must be at least 1, got {budget}")
        self.count = 0
        self.passes = 0  # backward passes since the last clear
        self.first = 0  # samples of the first of them
        self.levelled = False  # let samples count alike, though the sizes of the passes differ
        self.reducing: bool | None = None  # keep no moments but their ratios (True: q, False: f)
        self.reduced: dict[str, Reduced] = {}  # what is kept then
        # criterion and live coordinates of every parameter, if that is all there is to it
        self.plain: tuple[dict[str, float], dict[str, int]] | None = None
        self.careful = False
        self.memory: Tensor | None = None  # see `_shortcuts.Blocks`
        self.aiming = False  # a pass under way is using it
        self.routine: Routine | None = None  # for passes like the last two
        self.latest: Plan | None = None  # the plan of the last one
        self.held: dict[str, Held] = {}  # if careful: what the moments can be formed from
        self.estimator = estimator
        self.sampler = Sampler(budget, seed) if estimator == "sampled" else None
        self.truth: dict[str, tuple[Tensor, Tensor]] | None = None  # filled in if it is a dict
        self.rows: dict[str, Tensor] | None = None  # if it is a dict: (m, ...) instead of moments
        self.knowledge = Knowledge()
        self.calls = Calls(model, batch_dim, self.knowledge)
        self._model: nn.Module | None = model
        self._chosen = parameters
        self.sums: dict[str, Stored] = {}  # what the mapping is made of
        self.names: dict[int, str] = {}  # by id of the parameter
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self._gathered: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # of sharded parameters
        self._watching: list[Any] = []
        self.sharded = False
        self._find_names()

    # -- the mapping; two observations are never the same

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Moments:
        total, squares, shared, weight = self.sums[name]
        if shared is not None and self.count:
            squares = squares + (2 * total + shared) * shared / self.count
            total = total + shared
        return Moments(total, squares, self.count, weight)

    def stored(self) -> list[tuple[str, Tensor, Tensor, int, float]]:
        """Name, total, squares, count and weight of all of them at once."""
        if any(shared is not None for _, _, shared, _ in self.sums.values()):
            each = ((name, self[name]) for name in self)
            return [(n, m.total, m.squares, m.count, m.weight) for n, m in each]
        count = self.count
        return [(n, a, b, count, weight) for n, (a, b, _, weight) in self.sums.items()]

    def parameters(self) -> dict[str, Tensor]:
        """The parameters that are observed, by name."""
        assert self._model is not None
        chosen = set(self.names.values())
        return {name: p for name, p in self._model.named_parameters() if name in chosen}

    def __iter__(self) -> Iterator[str]:
        return iter(self.sums)

    def __len__(self) -> int:
        return len(self.sums)

    def __repr__(self) -> str:
        return f"<heldin.Observation of {len(self)} parameters, {self.count} samples>"

    def add(
        self,
        sums: dict[str, Stored],
        ratios: dict[str, Reduced],
        held: dict[str, Held],
        m: int,
        calls: Sequence[Call],
    ) -> None:
        """Take in what a backward pass showed."""
        if self.passes:
            self.write_out()  # of a pass inside this one
        self.passes += 1
        self.first = self.first or m
        self.reduced.update(ratios)
        self.held.update(held)
        if not self.sums and m == self.first:
            self.sums = sums
        else:
            factor = m / self.first if self.levelled else 1.0
            with torch.no_grad():
                for name, (total, squares, shared, weight) in sums.items():
                    if factor != 1.0:
                        total, squares = total * factor, squares * factor**2
                        shared = None if shared is None else shared * factor
                    if name in self.sums:
                        first, second, third, _ = self.sums[name]
                        total, squares = first + total, second + squares
                        if third is not None:
                            shared = third if shared is None else third + shared
                    self.sums[name] = (total, squares, shared, weight)
        self.count += m
        self.calls.done(calls)

    def take(
        self,
        ratios: dict[str, Reduced],
        held: dict[str, Held],
        plain: tuple[dict[str, float], dict[str, int]],
        m: int,
    ) -> None:
        """Take in the first pass since `clear`, with nothing but ratios, of the only call."""
        self.passes, self.first, self.count = 1, m, m
        self.reduced, self.held, self.plain = ratios, held, plain
        self.calls.pending = []

    def write_out(self) -> None:
        """Another pass comes: what was reduced is needed as moments, which add up."""
        for name, (moments, weight) in self.held.items():
            self.sums[name] = (*moments(), None, weight)
            del self.reduced[name]
        self.held, self.plain = {}, None

    def clear(self, redraw: bool = True) -> None:
        """Forget the sums, and calls not followed by a backward pass; what was learnt is kept.

        Args:
            redraw: whether the sampled estimator looks at other coordinates from now on.
        """
        self.sums, self.reduced, self.held, self.plain = {}, {}, {}, None
        self.count = self.passes = self.first = 0
        if self.calls.pending:
            self.calls.drop()
        if self.sampler is not None:
            self.sampler.close_step(redraw)

    # -- opening and closing

    def __enter__(self) -> Observation:
        if self._model is None or self.calls.watching:
            raise HeldinError("heldin.observe: a block can be entered only once; call it again")
        self.resume()
        return self

    def resume(self) -> None:
        """Go on observing after `pause`."""
        if self._model is not None and not self.calls.watching:
            self._watching = watch_unsharded(self._model, self._found)
            self.sharded = bool(self._watching)
            self.calls.attach()
            _attach(self)

    def pause(self) -> None:
        """Observe nothing, at no cost, until `resume`; sums and what was learnt are kept."""
        _detach(self)
        self.calls.detach()
        for handle in self._watching:
            handle.remove()
        self._watching = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop observing and let go of the model."""
        self.pause()
        self.calls.close()
        self._model = None
        self.names, self._alive, self._gathered = {}, {}, {}
        self.routine = self.latest = None

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function as if it were the model's forward pass, and return its result.

        For training steps that do not go through the model's own `forward`: the tensors among the
        arguments count the samples.
        """
        return self.calls.run(function, args, kwargs)

    # -- names

    def names_of(self, leaves: Iterable[Tensor]) -> dict[int, str]:
        """Names of the observed parameters by id, looked up again if there are new ones."""
        for leaf in leaves:
            if not self.knows(leaf):
                self._find_names()
                break
        return self.names

    def knows(self, leaf: Tensor) -> bool:
        """Whether a leaf is one of the model's parameters."""
        return id(leaf) in self._alive and self._alive[id(leaf)]() is leaf

    def _find_names(self) -> None:
        if self._model is None:  # closed by another thread, in the middle of a pass
            return
        named = list(self._model.named_parameters())
        self.calls.parameters = [p for _, p in named]
        self._alive = {id(p): weakref.ref(p) for _, p in named}  # an id may be used again
        self.names = {id(p): n for n, p in named if self._chosen is None or self._chosen(n)}
        for name, p in named:
            if p.is_complex() and p.requires_grad and id(p) in self.names:
                raise NotObservable(
                    f"parameter {name!r} is complex, and evidence is defined for real numbers. "
                    "Keep it as a real one of shape (..., 2) and use torch.view_as_complex in "
                    "forward(), or leave it out with parameters=..."
                )
        for alive, name in self._gathered.values():
            parameter = alive()
            if parameter is not None:
                self._add_name(parameter, name)

    def _found(self, parameter: Tensor, name: str) -> None:
        """A sharded parameter was gathered."""
        known = self._gathered.get(id(parameter))
        if known is None or known[0]() is not parameter:
            self._gathered[id(parameter)] = (weakref.ref(parameter), name)
            self._add_name(parameter, name)

    def _add_name(self, parameter: Tensor, name: str) -> None:
        self._alive[id(parameter)] = weakref.ref(parameter)
        if self._chosen is None or self._chosen(name):
            self.names[id(parameter)] = name


def observe(
    model: nn.Module,
    *,
    batch_dim: BatchDim = 0,
    parameters: Callable[[str], bool] | None = None,
    estimator: Estimator = "exact",
    budget: int = BUDGET,
    seed: int = 0,
) -> Observation:
    """Observe the per-sample gradient contributions of a model's parameters in a `with` block.

    Args:
        model: any eager PyTorch model. It is neither wrapped nor changed.
        batch_dim: the dimension of the model's inputs that counts samples; or, for inputs that
            differ, a mapping from argument names or positions to it (None: not a batch; the others
            have 0).
        parameters: which parameters to observe, by name (default: all).
        estimator: "exact" gives every coordinate of every parameter. "sampled" looks at a random
            block of coordinates of each, new after every `clear`, at a fraction of the cost; what
            it gives has the shape of the block. "microbatch" takes the gradient of each backward
            pass for one sample, for models that cannot be looked into (compiled, for instance).
        budget: coordinates per parameter of the sampled estimator; smaller parameters are exact.
        seed: of the sampled blocks; the global random stream is never used.

    >>> import heldin, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
    >>> with heldin.observe(model) as seen:
    ...     torch.nn.functional.mse_loss(model(x), y).backward()
    >>> seen
    <heldin.Observation of 2 parameters, 8 samples>
    >>> torch.allclose(seen["weight"].total, model.weight.grad)
    True
    """
    return Observation(model, batch_dim, parameters, estimator, budget, seed)
