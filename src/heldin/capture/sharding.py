"""Models that are wrapped or sharded for several processes: names, gathered and local parts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from heldin._private_torch import own_parameters
from heldin.errors import HeldinError, NotObservable

__all__ = [
    "as_parameter", "fully_sharded", "is_parallel", "local_part", "refuse_parallel", "runs_once",
    "shard_of", "unwrapped", "watch_unsharded",
]  # fmt: skip


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel; any other model unchanged."""
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise HeldinError(
                "FullyShardedDataParallel flattens parameters, so that their names and shapes are "
                "lost; use its successor, torch.distributed.fsdp.fully_shard"
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def runs_once(nodes: Iterable[Any]) -> bool:
    """Return whether a graph allows exactly one complete backward pass.

    With a static graph, DistributedDataParallel assumes that the first backward pass of any kind
    is the one that computes the gradients.
    """
    for node in nodes:
        owner = getattr(node, "ddp_weakref", None)  # set on DDP's node below the outputs
        if owner is not None and getattr(owner(), "static_graph", False):
            return True
    return False


def fully_sharded(model: nn.Module) -> list[nn.Module]:
    """List the modules that `fully_shard` was applied to."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def watch_unsharded(model: nn.Module, on_gathered: Callable[[Tensor, str], None]) -> list[Any]:
    """Report the parameters that `fully_shard` gathers for a forward pass, with their names.

    In the graph they stand for the sharded parameters of the model. This gathers nothing: the hooks
    run after those of `fully_shard`. Their handles are returned.
    """
    modules = fully_sharded(model)
    owners = {id(module) for module in modules}
    names = {id(module): name for name, module in model.named_modules()}
    first = {name for name, _ in model.named_parameters()} if modules else set()  # of tied ones

    def report(places: list[tuple[nn.Module, str, str]], *_: Any) -> None:
        for holder, own_name, name in places:
            parameter = own_parameters(holder).get(own_name)
            if parameter is not None:
                on_gathered(parameter, name)

    handles = []
    for module in modules:
        places, stack = [], [module]
        while stack:
            submodule = stack.pop()
            start = names[id(submodule)] + "." if names[id(submodule)] else ""
            places += [
                (submodule, own_name, start + own_name)
                for own_name in own_parameters(submodule)
                if start + own_name in first
            ]
            stack += [child for child in submodule.children() if id(child) not in owners]
        handles.append(module.register_forward_pre_hook(partial(report, places)))
    return handles


def is_parallel(tensor: Tensor) -> bool:
    """Return whether a tensor is distributed over several devices (a DTensor)."""
    return hasattr(tensor, "device_mesh")


def refuse_parallel(leaves: Iterable[Tensor], names: Mapping[int, str]) -> None:
    """Refuse parameters that no rank holds whole during the pass (tensor parallel)."""
    for leaf in leaves:
        if is_parallel(leaf):
            name = names.get(id(leaf), "of a frozen or unobserved layer")
            raise NotObservable(
                f"parameter {name!r} is a DTensor during the forward pass (tensor parallel), "
                "through which samples cannot be traced. Use data-parallel ranks, or fully_shard, "
                "for the layers that are observed"
            )


def local_part(parameter: Tensor) -> Tensor:
    """Return a view of this rank's shard of a parameter, or all of it if it is not sharded."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def shard_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a whole tensor that matches this rank's shard, without communication."""
    if not hasattr(parameter, "to_local"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def as_parameter(part: Tensor, parameter: Tensor) -> Tensor:
    """Wrap this rank's part in a tensor that is sharded like the parameter."""
    if not hasattr(parameter, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, placements, shape=shape, stride=stride, run_check=False)
