"""All private names of PyTorch that heldin uses.

A new version of PyTorch may rename or remove them. The rest of heldin uses the names below, and
`tests/test_private_torch.py` has one test for each.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch import _foreach_norm as norms
from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._C import _current_graph_task_id as graph_task_id
from torch._C import _get_tracing_state as tracing_state
from torch._C import _len_torch_dispatch_stack as dispatch_depth
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped_by_transform
from torch._C._functorch import is_legacy_batchedtensor as is_batched_by_vmap
from torch._C._functorch import peek_interpreter_stack as transform_stack
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_mode
from torch.utils._python_dispatch import _pop_mode as pop_mode
from torch.utils._python_dispatch import _push_mode as push_mode
from torch.utils._pytree import tree_map_only
from torch.utils.data._utils.pin_memory import pin_memory as pin_memory

__all__ = [
    "ITERATOR_METHOD", "BatchNorm", "DisableTorchFunction", "Dropout", "TorchDispatchMode",
    "adopt_hooks", "after_backward", "all_raw_saved", "any_autocast", "compiled_parts",
    "compiled_whole", "current_mode", "decompositions", "dispatch_depth", "forward_hooks",
    "gradient_hooks", "graph_task_id", "is_batched_by_vmap", "is_called_by_ddp", "is_inner_step",
    "is_joining", "is_wrapped_by_transform", "norms", "outputs_of", "overload_of", "own_buffers",
    "own_parameters", "pin_memory", "pop_mode", "push_mode", "raw_saved", "saved", "saved_names",
    "schema_of", "sequence_number", "set_compiled_whole", "storage_number", "tracing_state",
    "transform_stack", "tree_map", "version_of", "versions_of", "viewed_by", "without_modes",
]  # fmt: skip

# Whether autocast is on for any kind of device.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


# --- nodes of the autograd graph -------------------------------------------------------------


def saved(node: Any, name: str, *default: Any) -> Any:
    """Return a value that an op saved for its backward pass, by the name of its argument."""
    return getattr(node, f"_saved_{name}", *default)


def raw_saved(node: Any, name: str) -> Any:
    """Return the handle of a saved tensor, which accepts hooks; None if there is none."""
    return getattr(node, f"_raw_saved_{name}", None)


def all_raw_saved(node: Any) -> list[Any]:
    """List the handles of all tensors that an op or a custom function saved."""
    return [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]


def saved_names(node: Any) -> list[str]:
    """List the names of all values that an op saved for its backward pass."""
    start = "_saved_"
    return [name.removeprefix(start) for name in dir(node) if name.startswith(start)]


# Shape, type and device of every output of an op.
outputs_of = attrgetter("_input_metadata")
# A number that is unique among the nodes of a thread.
sequence_number = methodcaller("_sequence_nr")


def after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# --- tensors and modules ---------------------------------------------------------------------


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written; 0 where PyTorch does not count (inference mode)."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return `version_of` each of some tensors, without a call for each."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


# The hooks of a tensor that may change its gradient.
gradient_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
# The tensor that another one is a view of; None if it is not a view.
viewed_by: Callable[[Tensor], Tensor | None] = attrgetter("_base")
# A module's dicts of direct parameters and buffers, which may be modified in place.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
# The callable that `module.compile()` made; None if the module is not compiled.
compiled_whole = attrgetter("_compiled_call_impl")


def storage_number(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage."""
    number: int = tensor.untyped_storage()._cdata
    return number


def forward_hooks(module: nn.Module) -> list[Any]:
    """List all hooks around the forward pass of a module."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def set_compiled_whole(module: nn.Module, call: Any) -> None:
    """Set the callable that replaces calls of a module; None restores the default."""
    module._compiled_call_impl = call


def compiled_parts(module: nn.Module) -> bool:
    """Return whether a module or a submodule holds a callable made by `torch.compile`."""
    for part in module.modules():
        kinds = [kind for kind in type(part).__mro__ if issubclass(kind, nn.Module)]
        for owner in (part, *kinds[: kinds.index(nn.Module)]):
            if any(
                callable(value) and hasattr(value, "_torchdynamo_orig_callable")
                for value in vars(owner).values()
            ):
                return True
    return False


def is_called_by_ddp() -> bool:
    """Return whether DistributedDataParallel is calling a model at this moment."""
    return nn.parallel.DistributedDataParallel._active_ddp_module is not None


def is_joining(model: Any) -> bool:
    """Return whether a model is in a `Join` context, in which ranks may run out of data."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))


# --- ops, optimisers and loaders -------------------------------------------------------------


# The schema (arguments and results) and the name of an overload of an ATen op.
schema_of, overload_of = attrgetter("_schema"), attrgetter("_overloadname")


def adopt_hooks(wrapper: Optimizer, optimizer: Optimizer) -> None:
    """Set up the hooks of an optimiser wrapper, as Optimizer.__init__ would.

    The wrapper gets new hooks around `step`, and shares the hooks around states with the wrapped
    optimiser.
    """
    wrapper._optimizer_step_pre_hooks = OrderedDict()
    wrapper._optimizer_step_post_hooks = OrderedDict()
    for when in ("pre", "post"):
        for kind in ("state_dict", "load_state_dict"):
            name = f"_optimizer_{kind}_{when}_hooks"
            setattr(wrapper, name, getattr(optimizer, name))
    wrapper._patch_step_function()


# The function around `step` of every optimiser class, which calls the hooks.
_STEP = Optimizer.profile_hook_step(lambda self: None).__code__


def is_inner_step(optimizer: Optimizer) -> bool:
    """Return whether a hook is called inside of another step of the same optimiser.

    A subclass whose `step` calls `super().step()` has hooks around both of them.
    """
    frame: FrameType | None = sys._getframe(1)
    around = 0
    while frame is not None:
        if frame.f_code is _STEP and frame.f_locals.get("self") is optimizer:
            around += 1
            if around > 1:
                return True
        frame = frame.f_back
    return False


# The method with which a DataLoader makes its iterators.
ITERATOR_METHOD = "_get_iterator"


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return PyTorch's table of decompositions of ops into other ops."""
    from torch._decomp import decomposition_table  # slow to import

    return decomposition_table


def tree_map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a tree of lists, tuples, dictionaries and outputs of models with other tensors."""
    return tree_map_only(Tensor, function, tree)
