"""Pooling of moments over the data-parallel ranks of torch.distributed.

Every data-parallel rank observes its samples. Sums, squares and counts are additive, so one
all-reduce of them gives every rank the moments of the concatenated batch, and with them the same
decision in the same step. Of a sampled parameter only the block is sent.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from heldin._private_torch import is_joining
from heldin.capture.collector import Collector
from heldin.capture.graph import Backward
from heldin.capture.moments import Moments, upcast
from heldin.capture.sampling import Block
from heldin.capture.sharding import fully_sharded
from heldin.distributed.agreement import compare
from heldin.distributed.weighting import MEAN, SUM, root_factor
from heldin.errors import HeldinError, HeldinWarning, more

__all__ = ["Joinable", "Pooled", "ProcessGroup", "Ranks", "groups_of", "ranks_of"]

ProcessGroup = Any  # torch.distributed.ProcessGroup, a DeviceMesh, None or "auto"


# --- which processes -------------------------------------------------------------------------


def groups_of(model: nn.Module, process_group: ProcessGroup) -> list[Any]:
    """Return the process groups to sum over, one after the other; empty for a single process."""
    if process_group is None:
        return []
    if isinstance(process_group, str) and process_group != "auto":
        raise HeldinError(
            "process_group: expected 'auto', None, a torch.distributed.ProcessGroup or a "
            f"DeviceMesh, got {process_group!r}"
        )
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        if process_group == "auto":
            return []
        raise HeldinError(
            "process_group: torch.distributed is not initialised; call init_process_group() "
            "first, or leave the argument out"
        )
    groups = _own_groups(model) if process_group == "auto" else [process_group]
    if hasattr(groups[0], "get_all_groups"):  # a DeviceMesh
        groups = groups[0].get_all_groups()
    return [group for group in groups if torch.distributed.get_world_size(group) > 1]


def _own_groups(model: nn.Module) -> list[Any]:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return [model.process_group]
    for module in fully_sharded(model):
        for name, p in module.named_parameters():
            mesh: Any = getattr(p, "device_mesh", None)
            placements: Any = getattr(p, "placements", ())
            if mesh is None:
                continue
            if mesh.ndim == 1 or (mesh.ndim == 2 and placements[0].is_replicate()):
                return [mesh]
            raise HeldinError(
                f"process_group: parameter {name!r} lies on a mesh of {mesh.ndim} dimensions, some "
                "of which may not be data-parallel; pass the data-parallel part of the mesh, for "
                "instance process_group=mesh['dp']"
            )
    return [torch.distributed.group.WORLD]


def ranks_of(
    model: nn.Module, process_group: ProcessGroup, seen: Collector, mean: bool
) -> Ranks | None:
    """Return the ranks that train a model; None for a single process."""
    groups = groups_of(model, process_group)
    return Ranks(model, groups, seen, mean) if groups else None


# --- pooling ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pooled:
    """The moments of the samples of all ranks, as a single process would observe them."""

    moments: dict[str, Moments]
    count: int
    scale: float


# Facts about each parameter that are summed over ranks.
COLUMNS = ("seen", "reads", "packed", "whole", "cut")
HEAD = 6  # samples, weight, weight times scale; ranks with a loss, its factor, the factor squared


class Ranks:
    """The data-parallel ranks, which pool their observations.

    In the first step, and whenever a parameter appears for the first time, the ranks first exchange
    which parameters they have and then the sums; in all other steps a single all-reduce does both.
    """

    def __init__(self, model: nn.Module, groups: list[Any], seen: Collector, mean: bool) -> None:
        self.groups, self._seen = groups, seen
        self.bytes = 0  # that this rank has put into all-reduces in the last step
        self._by_size = mean and seen.estimator != "microbatch"
        self._model = weakref.ref(model)
        self._comparisons = 0
        # the factor of the loss in the first backward pass of a step, and its reduction
        self._factor: tuple[float, int] | None = None
        seen.before_backward.append(self._note_factor)
        self._warned = False
        self._agreed: set[str] = set()  # parameters that all ranks send
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._device = torch.device("cpu")
        seen.weight_by_batch_size = self._by_size
        if seen.sampler is not None:
            seen.sampler.shared_by_ranks = True

    def _note_factor(self, backward: Backward) -> None:
        if not self._seen.passes:
            plain = len(backward.roots) == 1 and backward.seeds is None
            self._factor = root_factor(backward.roots[0]) if plain else None

    # -- agreeing

    def forget(self) -> None:
        """Compare the ranks again in the next step, because a state was loaded."""
        self._comparisons, self._agreed = 0, set()

    def should_compare_ranks(self, due: bool) -> bool:
        """Return whether the ranks have to be compared now: the first time, due or not."""
        return self._comparisons == 0 or (due and self._comparisons == 1)

    def check_agreement(self, facts: Mapping[str, Any]) -> None:
        """Raise an error unless all ranks train the same model in the same way.

        Settings are compared once, weights also in the next step: by then, models that started
        equal and are trained independently differ. `facts` must be the same on all ranks.
        """
        self._comparisons += 1
        named = self._seen.parameters()
        self._shapes = {name: tuple(p.shape) for name, p in named.items()}
        self._dtypes = {n: upcast(torch.empty(0, dtype=p.dtype)).dtype for n, p in named.items()}
        self._device = next(iter(named.values())).device
        own_facts: dict[str, Any] = {}
        if self._comparisons == 1:
            shapes = [f"{n} {shape}" for n, shape in self._shapes.items()]
            own_facts = {**facts, "parameters": shapes}
        for group in self.groups:
            compare(group, own_facts, named)

    # -- uneven inputs

    def notify(self, owner: Any) -> None:
        """Announce in a `Join` context that this rank still has data, before anything is sent."""
        if is_joining(owner):
            from torch.distributed.algorithms.join import Join

            work = Join.notify_join_context(owner)
            if work is not None:
                work.wait()
        elif is_joining(self._model()):
            kind = getattr(owner, "owner", type(owner).__name__)
            raise HeldinError(
                f"{kind}: ranks that run out of data would block the others. Use "
                "`with torch.distributed.algorithms.Join([ddp_model, stopping])` instead of "
                f"`ddp_model.join()`, where `stopping` is the {kind}"
            )

    def share(self, tensors: Iterable[Tensor], has_batch: bool) -> None:
        """Give ranks that have run out of data the values of those that have not."""
        values = list(tensors)
        for group in self.groups:
            for tensor in values:
                whole = tensor.dtype in (torch.bool, torch.uint8)
                value = tensor.to(torch.int64) if whole else tensor
                if not has_batch:
                    lowest = torch.finfo if value.is_floating_point() else torch.iinfo
                    value = torch.full_like(value, lowest(value.dtype).min)
                value = value.clone()
                torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=group)
                tensor.copy_(value)

    # -- pooling

    def pool(self, scale: float) -> Pooled:
        """Sum the observations of all ranks since the last clear; scale: of this rank's loss.

        Each rank's loss is a mean (or a sum) over its samples; the contributions are rescaled to
        those of the loss of the concatenated batch.
        """
        seen = self._seen
        moments = {name: seen.moments(name) for name in seen.sums}
        local = {name: (m.total, m.squares) for name, m in moments.items()}
        for name in local:
            if name not in self._shapes:
                raise HeldinError(
                    f"parameter {name!r} was added after the ranks were compared; create a new "
                    "EvidenceStopping after adding parameters to a model"
                )
        weight = float(seen.first_count if self._by_size else bool(seen.count))
        factor = 0.0
        if seen.count:
            factor, reduction = self._factor or (math.nan, MEAN)
            factor *= seen.first_count if reduction == SUM else 1
        scale_given = scale != 1.0 or not self._by_size
        factors = [bool(seen.count), math.nan if scale_given else factor, factor**2]
        head = [seen.count, weight, weight * scale, *factors, *self._table(local)]
        self.bytes = 0
        while True:
            spans = self._spans()
            flat, at = self._send(head, local, spans, weight / scale)
            pooled = flat[:at].tolist()
            if not self._learn(pooled[HEAD:]):
                break
        count, weights, scales, with_loss, factors_sum, factors_squared = pooled[:HEAD]
        self._warn_of_weights(with_loss, factors_sum, factors_squared, factor)
        if not count:
            return Pooled({}, 0, scale)
        scale = scales / weights
        unit = (weights if self._by_size else 1.0) / scale
        columns = len(COLUMNS)
        present = {n: pooled[HEAD + i * columns] > 0 for i, n in enumerate(self._shapes)}
        return Pooled(self._read(flat[at:], spans, present, int(count), unit), int(count), scale)

    def _warn_of_weights(
        self, number: float, total: float, squares: float, own_factor: float
    ) -> None:
        """Warn if the ranks' losses have different factors in front of their means."""
        spread = number * squares - total**2  # nan: unknown on some rank, or given by the user
        if self._warned or not spread > 1e-4 * total**2:
            return
        self._warned = True
        warnings.warn(
            "the losses of the ranks are weighted: that of this rank is its mean times "
            f"{own_factor:.4g}, the average over the ranks is {total / number:.4g}. heldin assumes "
            "that each rank's loss is a mean over its samples, so the criterion is wrong. Pass "
            "the factor, stopping.step(scale=factor); or reduction='sum' to the rule if every rank "
            "divides the sum over its samples by the same number " + more("weighted-ranks"),
            HeldinWarning,
            stacklevel=2,
        )

    def _table(self, local: Mapping[str, Any]) -> list[float]:
        """Return one row of COLUMNS for each parameter, flattened."""
        sampler = self._seen.sampler
        rows: list[float] = []
        for name, shape in self._shapes.items():
            stored = local.get(name)
            if stored is None:
                rows += [0.0] * len(COLUMNS)
                continue
            costs = {} if sampler is None else sampler.step_costs
            reads, spread = costs.get(name, (0, True))
            whole = sampler is not None and name in sampler.whole
            rows += [1.0, reads, not spread, whole, stored[0].shape != shape]
        return rows

    def _learn(self, table: list[float]) -> bool:
        """Read the summed facts; return True if parameters must be sent that were not."""
        sampler, columns, new = self._seen.sampler, len(COLUMNS), False
        for i, name in enumerate(self._shapes):
            is_used, reads, packed, whole, cut = table[i * columns : (i + 1) * columns]
            if not is_used:
                continue
            if whole and cut:
                raise HeldinError(
                    f"parameter {name!r} is used in different ways on different ranks (with a "
                    'penalty on some, for instance); use estimator="exact"'
                )
            if name not in self._agreed:
                self._agreed.add(name)
                new = True
            if sampler is not None:
                if whole:
                    sampler.whole.add(name)
                else:
                    sampler.step_costs[name] = costs = (int(reads), not packed)
                    sampler.costs.setdefault(name, costs)
        return new

    def _spans(self) -> list[tuple[str, Block | None, tuple[int, ...], float]]:
        """List name, block, shape of the block and weight of all parameters that are sent."""
        sampler, turn = self._seen.sampler, self._seen.turn()
        spans = []
        for name, shape in self._shapes.items():
            if name in self._agreed and (turn is None or name in turn):
                block, weight = (None, 1.0) if sampler is None else sampler.drawn(name, shape)
                if block is not None:
                    pieces = zip(block, shape, strict=False)
                    cut = [len(range(size)[piece]) for piece, size in pieces]
                    shape = (*cut, *shape[len(block) :])
                spans.append((name, block, shape, weight))
        return spans

    def _send(
        self, head: list[float], local: Mapping[str, Any], spans: list[Any], unit: float
    ) -> tuple[Tensor, int]:
        """Sum head, totals and squares over all ranks, in one tensor."""
        dtype = torch.float64 if torch.float64 in self._dtypes.values() else torch.float32
        firsts, seconds = [], []
        for name, block, shape, _ in spans:
            if name not in local:
                total = squares = torch.zeros(shape, dtype=dtype, device=self._device)
            else:
                total, squares = local[name]
                if block is not None and total.shape != shape:
                    total, squares = total[block], squares[block]
            firsts.append(total.reshape(-1))
            seconds.append(squares.reshape(-1))
        start = torch.tensor(head, dtype=dtype, device=self._device)
        flat = torch.cat([start, *[t.to(dtype) for t in (*firsts, *seconds)]])
        middle = len(head) + sum(t.numel() for t in firsts)
        flat[len(head) : middle] *= unit
        flat[middle:] *= unit**2
        for group in self.groups:
            self.bytes += flat.numel() * flat.element_size()
            torch.distributed.all_reduce(flat, group=group)
        return flat, len(head)

    def _read(
        self, flat: Tensor, spans: list[Any], present: dict[str, bool], count: int, unit: float
    ) -> dict[str, Moments]:
        sizes = [prod(shape) for _, _, shape, _ in spans]
        middle = sum(sizes)
        firsts = flat[:middle].div_(unit).split(sizes)
        seconds = flat[middle:].div_(unit**2).split(sizes)
        moments = {}
        for (name, _, shape, weight), first, second in zip(spans, firsts, seconds, strict=True):
            if present[name]:
                dtype = self._dtypes[name]
                total, squares = first.reshape(shape).to(dtype), second.reshape(shape).to(dtype)
                moments[name] = Moments(total, squares, count, weight)
        return moments


class JoinHook:
    """The hook of a rank without data in a `Join` context, called once per step of the others."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.main_hook = step

    def post_hook(self, is_last_joiner: bool) -> None:
        """Do nothing: the state is the same on all ranks."""


class Joinable:
    """A rule whose ranks may run out of data, see torch.distributed.algorithms.Join."""

    _ranks: Ranks | None
    _model: nn.Module | None
    joined_as: Callable[[], Any] | None = None  # returns what was given to Join in its place

    def _advance(self) -> Any:
        """Finish a step of all ranks."""
        raise NotImplementedError

    def _notify_joined(self) -> None:
        """Notify ranks that have run out of data that this one has not."""
        if self._ranks is not None:
            self._ranks.notify(self if self.joined_as is None else self.joined_as())

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank put into all-reduces in the last step; 0 for a single process."""
        return 0 if self._ranks is None else self._ranks.bytes

    def join_hook(self, **options: Any) -> JoinHook:
        """Return the hook with which a rank without data follows the steps of the others."""
        return JoinHook(self.follow_joined)

    def follow_joined(self) -> Any:
        """Finish a step of the other ranks, on a rank without data."""
        return self._advance()

    def share_weights(self, weights: Mapping[str, Tensor], has_batch: bool) -> None:
        """Let all ranks have the weights of those with a batch, in a `Join` context."""
        owner = self if self.joined_as is None else self.joined_as()
        if self._ranks is not None and is_joining(owner):
            self._ranks.share(weights.values(), has_batch)

    @property
    def join_device(self) -> torch.device:
        """The device of the model."""
        assert self._model is not None
        return next(self._model.parameters()).device

    @property
    def join_process_group(self) -> Any:
        """The data-parallel processes."""
        return None if self._ranks is None else self._ranks.groups[0]
