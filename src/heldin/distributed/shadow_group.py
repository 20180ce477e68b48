"""Processes that train one model, each on its own batches.

Every process has all shadows. Their gradients are summed over the processes, so that they take the
steps of one process on the joined batches, and stay the same everywhere. Held-out rows are
divided among the processes, and their losses joined.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heldin._private_torch import is_called_by_ddp, is_joining
from heldin.capture.sharding import fully_sharded, is_parallel
from heldin.distributed.agreement import compare
from heldin.distributed.ranks import ProcessGroup, groups_of
from heldin.errors import HeldinError

__all__ = ["ShadowProcessGroup", "refuse_unpooled_ddp", "shadow_group_for"]


def shadow_group_for(
    owner: str, model: nn.Module, process_group: ProcessGroup
) -> ShadowProcessGroup | None:
    """Return the processes that train a model jointly; None if there is only one."""
    _refuse_pieces(owner, model)
    groups = groups_of(model, process_group)
    if len(groups) > 1:
        raise HeldinError(
            f"{owner}: process_group is a mesh of several dimensions; pass the one along which the "
            "rows differ, mesh['dp'] for instance"
        )
    if groups:
        return ShadowProcessGroup(owner, groups[0], model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        refuse_unpooled_ddp(owner, dist.get_world_size(model.process_group))
    return None


def _refuse_pieces(owner: str, model: nn.Module) -> None:
    """Refuse models whose weights are divided in another way than by `fully_shard`."""
    odd = None
    if "FullyShardedDataParallel" in {type(m).__name__ for m in model.modules()}:
        odd = "FullyShardedDataParallel"
    elif not fully_sharded(model):
        odd = next(
            (f"parameter {n!r}" for n, p in model.named_parameters() if is_parallel(p)), None
        )
    if odd is not None:
        raise HeldinError(
            f"{owner}: the weights are divided among the processes ({odd}), and shadows know "
            "DistributedDataParallel and fully_shard only; use one of these, or rule='evidence'"
        )


def refuse_unpooled_ddp(owner: str, size: int | None = None) -> None:
    """Refuse a model that DistributedDataParallel trains while its processes do not pool."""
    if size is None:
        size = dist.get_world_size() if is_called_by_ddp() else 1
    if size > 1:
        raise HeldinError(
            f"{owner}: several processes train the model, and each of them would decide by its own "
            "rows. Leave process_group out, and make the rule after init_process_group()"
        )


class ShadowProcessGroup:
    """Sums over the processes of a group."""

    def __init__(self, owner: str, group: Any, model: nn.Module) -> None:
        self._owner, self._group = owner, group
        self._model = weakref.ref(model)
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._meetings = 0
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise HeldinError(
                    f"{owner}: {name!r} is a SyncBatchNorm, in which all processes must take part "
                    "in every call, and a process without rows for a shadow calls none; use "
                    "BatchNorm, or a norm that does not look at the batch"
                )

    # -- agreeing

    def forget(self) -> None:
        """Compare the processes again, after a state was loaded."""
        self._meetings = 0

    def meet(self, facts: Callable[[], Mapping[str, Any]], model: nn.Module) -> None:
        """Make sure that all processes train the same model in the same way.

        Settings are compared once, weights also after the next step: models that began alike
        and are trained separately differ by then.
        """
        if is_joining(self._model()):
            raise HeldinError(
                f"{self._owner}: ranks that run out of data cannot follow the shadows of the "
                "others, so that Join is not possible; give all ranks as many batches "
                "(DistributedSampler does)"
            )
        if self._meetings < 2:
            told = {} if self._meetings else facts()
            compare(self._group, told, dict(model.named_parameters()))
            self._meetings += 1

    # -- sums

    def add(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Numbers, summed over the processes."""
        flat = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(flat, group=self._group)
        return list(flat.tolist())

    def add_gradients(self, weights: Iterable[nn.Parameter], loss: Tensor) -> Tensor:
        """Sum the gradients of weights in place, and a loss, in one all-reduce.

        A weight that has a gradient in no process has none afterwards.
        """
        weights = list(weights)
        if any(w.grad is not None and w.grad.layout != torch.strided for w in weights):
            raise HeldinError(
                f"{self._owner}: sparse gradients cannot be summed over processes; make the "
                "embedding with sparse=False"
            )
        dtype = functools.reduce(torch.promote_types, (w.dtype for w in weights), torch.float32)
        has = torch.tensor([w.grad is not None for w in weights], device=loss.device)
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        flat = torch.cat([t.detach().reshape(-1).to(dtype) for t in (loss, has, *grads)])
        dist.all_reduce(flat, group=self._group)
        total, some, *found = flat.split([1, len(weights), *(w.numel() for w in weights)])
        for weight, known, part in zip(weights, torch.real(some).tolist(), found, strict=True):
            weight.grad = part.view_as(weight).to(weight.dtype) if known else None
        return torch.real(total).reshape(()).to(loss.dtype)

    def largest(self, number: float, device: torch.device) -> float:
        """Return the largest of the processes' numbers."""
        flat = torch.tensor(number, dtype=torch.float64, device=device)
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=self._group)
        return float(flat)

    def join(self, losses: Tensor, device: torch.device) -> Tensor:
        """Sum losses, of which each process may know some; the others are zero."""
        flat = losses.to(device)
        dist.all_reduce(flat, group=self._group)
        return flat.to(losses.device)

    def gather(self, part: Any) -> list[Any]:
        """Return the objects of all processes, by their ranks."""
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part, group=self._group)
        return parts

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of the first process, as DistributedDataParallel does."""
        tensors = list(tensors)
        if not tensors:
            return
        parts = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        flat = torch.cat(parts)
        dist.broadcast(flat, group=self._group, group_src=0)
        if self.rank:
            with torch.no_grad():
                for tensor, part in zip(tensors, flat.split([len(p) for p in parts]), strict=True):
                    tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))
