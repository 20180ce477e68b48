"""Every name of PyTorch that heldin uses and that PyTorch does not promise to keep.

A new version of PyTorch may rename or remove them. The rest of heldin uses the names below, and
`tests/test_private_torch.py` has one test for each, which says what broke.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
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

__all__ = [
    "ITERATOR_METHOD",
    "BatchNorm",
    "DisableTorchFunction",
    "Dropout",
    "TorchDispatchMode",
    "adopt_hooks",
    "all_raw_saved",
    "any_autocast",
    "compiled_parts",
    "compiled_whole",
    "current_mode",
    "decompositions",
    "dispatch_depth",
    "forward_hooks",
    "gradient_hooks",
    "graph_task_id",
    "is_batched_by_vmap",
    "is_called_by_ddp",
    "is_joining",
    "is_wrapped_by_transform",
    "norms",
    "outputs_of",
    "overload_of",
    "own_buffers",
    "own_parameters",
    "pop_mode",
    "push_mode",
    "raw_saved",
    "saved",
    "saved_names",
    "schema_of",
    "sequence_number",
    "set_compiled_whole",
    "storage_number",
    "tracing_state",
    "transform_stack",
    "version_of",
    "viewed_by",
    "without_modes",
]

# Whether autocast is on for any kind of device.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


# --- nodes of the autograd graph -------------------------------------------------------------


def saved(node: Any, name: str, *default: Any) -> Any:
    """What an op saved for its backward pass, by the name of its argument."""
    return getattr(node, f"_saved_{name}", *default)


def raw_saved(node: Any, name: str) -> Any:
    """The handle of a saved tensor, which can be given hooks; None if there is no such tensor."""
    return getattr(node, f"_raw_saved_{name}", None)


def all_raw_saved(node: Any) -> list[Any]:
    """The handles of all tensors that an op, or a function of the user's, saved."""
    return [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]


def saved_names(node: Any) -> list[str]:
    """The names of all that an op saved for its backward pass."""
    start = "_saved_"
    return [name.removeprefix(start) for name in dir(node) if name.startswith(start)]


def outputs_of(node: Any) -> Any:
    """Shape, type and device of every output of an op."""
    return node._input_metadata


def sequence_number(node: Any) -> int:
    """A number that no two nodes of a thread share."""
    number: int = node._sequence_nr()
    return number


# --- tensors and modules ---------------------------------------------------------------------


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written into; 0 where that is not counted (inference mode)."""
    return 0 if tensor.is_inference() else tensor._version


def gradient_hooks(leaf: Tensor) -> dict[int, Any] | None:
    """The hooks of a tensor that may change its gradient."""
    found: dict[int, Any] | None = leaf._backward_hooks
    return found


def storage_number(tensor: Tensor) -> int:
    """A number that tensors share which lie in the same memory."""
    number: int = tensor.untyped_storage()._cdata
    return number


def viewed_by(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of."""
    return tensor._base


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module itself, to be replaced in place."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, to be replaced in place."""
    return module._buffers


def forward_hooks(module: nn.Module) -> list[Any]:
    """All hooks around the forward pass of a module."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def compiled_whole(module: nn.Module) -> Any:
    """What `module.compile()` made, which calls go to; None if it is not compiled."""
    return module._compiled_call_impl


def set_compiled_whole(module: nn.Module, call: Any) -> None:
    """Let calls of a module go somewhere else, or (None) the usual way."""
    module._compiled_call_impl = call


def compiled_parts(module: nn.Module) -> bool:
    """Whether a module, or one in it, holds or is something that `torch.compile` made."""
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
    """Whether DistributedDataParallel is calling a model at this moment."""
    return nn.parallel.DistributedDataParallel._active_ddp_module is not None


def is_joining(model: Any) -> bool:
    """Whether a model is in a `Join` context, in which ranks may run out of data."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))


# --- ops, optimisers and loaders -------------------------------------------------------------


def schema_of(op: Any) -> Any:
    """The arguments and results of an overload of an ATen op."""
    return op._schema


def overload_of(op: Any) -> str:
    """The name of an overload among those of its op."""
    name: str = op._overloadname
    return name


def adopt_hooks(wrapper: Optimizer, optimizer: Optimizer) -> None:
    """What Optimizer.__init__ does, but for parameters and state.

    Hooks around `step` are the wrapper's own, those around states the wrapped optimiser's.
    """
    wrapper._optimizer_step_pre_hooks = OrderedDict()
    wrapper._optimizer_step_post_hooks = OrderedDict()
    for kind in ("state_dict_pre", "state_dict_post", "load_state_dict_pre"):
        name = f"_optimizer_{kind}_hooks"
        setattr(wrapper, name, getattr(optimizer, name))
    wrapper._optimizer_load_state_dict_post_hooks = optimizer._optimizer_load_state_dict_post_hooks
    wrapper._patch_step_function()


# The method by which a DataLoader makes its iterators.
ITERATOR_METHOD = "_get_iterator"


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """PyTorch's own ways to write an op in terms of others."""
    from torch._decomp import decomposition_table  # which takes its time to import

    return decomposition_table
