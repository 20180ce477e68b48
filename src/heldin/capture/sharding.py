"""Models that are wrapped or sharded for several processes: names, gathered and local parts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from heldin._private_torch import own_parameters
from heldin.errors import HeldinError, NotObservable

__all__ = [
    "as_parameter",
    "fully_sharded",
    "is_parallel",
    "local_part",
    "refuse_parallel",
    "runs_once",
    "shard_of",
    "unwrapped",
    "watch_unsharded",
]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel; any other model as it is."""
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise HeldinError(
                "FullyShardedDataParallel keeps parameters in flat pieces that have no names or "
                "shapes of their own; use its successor, torch.distributed.fsdp.fully_shard"
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def runs_once(nodes: Iterable[Any]) -> bool:
    """Whether a graph must not be gone through twice, nor in part.

    In its first backward pass with a static graph, DistributedDataParallel takes the first pass
    that comes by for the one in which gradients are made.
    """
    for node in nodes:
        owner = getattr(node, "ddp_weakref", None)  # of its node below the outputs
        if owner is not None and getattr(owner(), "static_graph", False):
            return True
    return False


def fully_sharded(model: nn.Module) -> list[nn.Module]:
    """The modules that `fully_shard` was applied to."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def watch_unsharded(model: nn.Module, found: Callable[[Tensor, str], None]) -> list[Any]:
    """Tell of the parameters that `fully_shard` gathers for a forward pass, with their names.

    In the graph these stand for the sharded ones that the model has otherwise. Nothing is gathered
    for this: the hooks run after those of `fully_shard`.
    """
    modules = fully_sharded(model)
    owners = {id(module) for module in modules}
    names = {id(module): name for name, module in model.named_modules()}
    first = {name for name, _ in model.named_parameters()} if modules else set()  # of tied ones

    def hook(places: list[tuple[nn.Module, str, str]]) -> Callable[[Any, Any], None]:
        def gathered(module: Any, args: Any) -> None:
            for holder, own, name in places:
                parameter = own_parameters(holder).get(own)
                if parameter is not None:
                    found(parameter, name)

        return gathered

    handles = []
    for module in modules:
        places, stack = [], [module]
        while stack:
            each = stack.pop()
            start = names[id(each)] + "." if names[id(each)] else ""
            places += [
                (each, own, start + own) for own in own_parameters(each) if start + own in first
            ]
            stack += [child for child in each.children() if id(child) not in owners]
        handles.append(module.register_forward_pre_hook(hook(places)))
    return handles


def is_parallel(tensor: Tensor) -> bool:
    """Whether a tensor is spread over several devices (a DTensor)."""
    return hasattr(tensor, "device_mesh")


def refuse_parallel(leaves: Iterable[Tensor], names: Mapping[int, str]) -> None:
    """Refuse parameters that no rank has as a whole, not even during the pass."""
    for leaf in leaves:
        if is_parallel(leaf):
            name = names.get(id(leaf), "of a frozen or unobserved layer")
            raise NotObservable(
                f"parameter {name!r} is a DTensor during the forward pass (tensor parallel): "
                "samples cannot be followed through it, nor can its gradient be summed here. "
                "Use data-parallel ranks, or fully_shard, for the layers that are observed"
            )


def local_part(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank holds (a view), or all of it if it is not sharded."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def shard_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """The part of a tensor that this rank holds of the parameter; nothing is sent."""
    if not hasattr(parameter, "to_local"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def as_parameter(part: Tensor, parameter: Tensor) -> Tensor:
    """A rank's part as a tensor that is sharded as the parameter is."""
    if not hasattr(parameter, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, placements, shape=shape, stride=stride, run_check=False)
