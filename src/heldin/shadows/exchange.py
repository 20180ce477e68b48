"""Put the state of a shadow into the user's own objects, and the user's state back.

A shadow's step runs on the user's own modules and optimiser. So everything that a training step
reads or changes is exchanged: the data of parameters and buffers, attributes of modules that a
step changes, random generators that modules keep, the optimiser's state, and objects that the user
names (an average of weights, a gradient scaler, a second optimiser).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from heldin._private_torch import own_buffers, version_of
from heldin.capture.sharding import fully_sharded
from heldin.errors import HeldinError, more, way_out
from heldin.loop.batches import equal
from heldin.loop.generators import (
    generator_state,
    is_generator,
    is_object_of_user,
    set_generator,
)
from heldin.loop.randomness import RandomState
from heldin.pause import paused
from heldin.state.schema import check_schema

from .parameters import parameters_in
from .variables import MODULE_FIELDS, Values, Variables, is_constant

__all__ = [
    "Exchange",
    "Session",
    "ShadowState",
    "group_settings",
    "has_evaluation_mode",
    "local",
    "places_of",
]

OPTIMIZER_FIELDS = {*vars(torch.optim.SGD([nn.Parameter(torch.zeros(()))], 0.0))}

ENTRY = (Tensor, float, int, bool, list, None)  # values in an optimiser's state that are loaded


@dataclass(eq=False)
class ShadowState:
    """Everything that the training of one shadow changes."""

    weights: list[Tensor]  # data of the exchanged parameters (local shards of sharded ones)
    buffers: list[Tensor]
    optimizer: dict[Any, Any]  # state of the optimiser, by parameter and whatever else it uses
    group_state: list[dict[str, Any]]  # settings of parameter groups that a step changes, by group
    variables: Values = field(default_factory=dict)  # attributes and others that a step changed
    grads: list[Tensor | None] = field(default_factory=list)  # left by the user's function
    objects: list[Any] = field(default_factory=list)  # state dictionaries of those in `state`
    reached: set[int] = field(default_factory=set)  # numbers (`id`) of parameters with a gradient

    def copy(self) -> ShadowState:
        """Return a state that a step may change in place."""
        copied = copy.copy(self)
        for name in ("weights", "buffers", "grads", "objects"):
            setattr(copied, name, copy.deepcopy(getattr(self, name)))
        copied.optimizer = _copy_of_state(self.optimizer)
        copied.variables, copied.reached = dict(self.variables), set(self.reached)
        return copied


def _trained_parameters(
    model: nn.Module, optimizer: Optimizer, others: Sequence[nn.Module], owner: str
) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimiser trains, by name; refuse those of other modules."""
    names = {
        id(p): f"state.{number}.{name}"
        for number, module in enumerate(others)
        for name, p in module.named_parameters()
    }
    names |= {id(p): name for name, p in model.named_parameters()}
    trained: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad:
                continue
            if id(p) not in names:
                raise HeldinError(
                    f"{owner}: the optimiser also trains a tensor of shape {tuple(p.shape)} that "
                    "is not a parameter of the model, so that shadows would share it; make it one "
                    "(a loss with parameters can be a module inside the model), or "
                    + way_out(owner, "pass its module: state=[module]")
                )
            trained[names[id(p)]] = p
    if not trained:
        raise HeldinError(
            "optimizer: none of its parameters is a trainable parameter of the model; give the "
            "optimiser that trains this model"
        )
    return trained


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of every parameter group, with copies of tensors."""
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def has_evaluation_mode(optimizer: Optimizer) -> bool:
    """Return whether an optimiser keeps other weights for evaluation (schedule-free ones do)."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


class Exchange:
    """Exchanges the states of shadows with that of the user's model and optimiser.

    state: further objects that a step changes: modules, or anything with `state_dict` and
    `load_state_dict`; function: of the user, which takes the step, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        state: Sequence[Any] = (),
        owner: str = "optimizer",
        has_shadows: bool = False,
        function: Any = None,
    ) -> None:
        self.owner, self.optimizer, self._has_shadows = owner, optimizer, has_shadows
        others = [each for each in state if isinstance(each, nn.Module)]
        self.objects = [each for each in state if not isinstance(each, nn.Module)]
        self.trained = _trained_parameters(model, optimizer, others, owner)  # by name
        exchanged = {id(p): p for p in (*self.trained.values(), *parameters_in(state))}
        self.tensors = [*exchanged.values()]  # all exchanged parameters, the trained ones first
        extra = range(len(self.tensors) - len(self.trained))
        self.names = [*self.trained, *(f"state.{number}" for number in extra)]
        self.frozen = [p for p in model.parameters() if id(p) not in exchanged]
        names: dict[nn.Module, str] = {}
        for root, name in [(model, "model"), *((m, f"state[{i}]") for i, m in enumerate(others))]:
            for path, module in root.named_modules(prefix=name):
                names.setdefault(module, path)
        self.modules = [*names]
        buffers: dict[int, tuple[dict[str, Any], str]] = {}  # a buffer in two places is one
        for module in self.modules:
            for name, buffer in own_buffers(module).items():
                if buffer is not None:
                    buffers.setdefault(id(buffer), (own_buffers(module), name))
        self.buffer_places = [*buffers.values()]
        # Group settings that a step changes are state, of which every shadow has its own. All
        # others follow the user's optimiser.
        self.group_state_keys: set[str] = set()
        self._shared = _shared_storages(self.tensors)
        self._sharded = fully_sharded(model)
        owners = (*self.modules, *self.tensors, *self.frozen, *self.objects, optimizer)
        self._numbers = {id(owner) for owner in owners}
        self._largest = sum(p.numel() for p in self.tensors)
        # where attributes are: the owner's name, its table, and the names that every owner has
        self.tables = [(name, vars(module), MODULE_FIELDS) for module, name in names.items()]
        self.tables.append(("optimizer", vars(optimizer), OPTIMIZER_FIELDS))
        self._attribute_counts: list[int] = []
        self.variables = self.surroundings(function)
        self.before: Values | None = None  # variables before the user's step
        self._after: Values | None = None  # variables after it
        self._former: Values | None = None  # variables after the step before
        self._find_attributes()
        self._buffer_marks: list[tuple[int, int]] | None = self._marks_of_buffers()
        self._moved_buffers: set[int] = set()  # by the loop, since its last step
        self._new_buffers: dict[int, Tensor] = {}

    def surroundings(self, function: Any) -> Variables:
        """Return the variables around a function of the user, beyond what is exchanged."""
        buffers = {id(table[name]) for table, name in self.buffer_places}
        roots = [] if function is None else [("", function)]
        return Variables(roots, self._numbers | buffers, self._largest)

    def note_start(self) -> None:
        """Remember variables and buffers before a step of the user changes them."""
        self.before, self._former = self.read_variables(), self._after
        for number in self.find_moved_buffers():
            table, name = self.buffer_places[number]
            self._new_buffers[number] = table[name].detach().clone()

    # -- buffers that the loop changes between two steps

    def _marks_of_buffers(self) -> list[tuple[int, int]]:
        """Return numbers that change if a buffer is replaced or changed in place."""
        buffers = (table[name] for table, name in self.buffer_places)
        return [(id(buffer), version_of(buffer)) for buffer in buffers]

    def find_moved_buffers(self) -> set[int]:
        """Return numbers of the buffers that changed outside of steps, since the last one."""
        marks = self._marks_of_buffers()
        if self._buffer_marks is None:
            return self._moved_buffers
        pairs = enumerate(zip(self._buffer_marks, marks, strict=True))
        moved = {number for number, (old, new) in pairs if old != new}
        # PyTorch does not count the writes of a normalisation into its running mean.
        places = [self.buffer_places[number] for number in moved]
        counted = {id(table) for table, name in places if name == "num_batches_tracked"}
        moved |= {n for n, (table, _) in enumerate(self.buffer_places) if id(table) in counted}
        self._moved_buffers |= moved
        self._buffer_marks = marks
        return self._moved_buffers

    def accept_buffers(self) -> None:
        """Accept the present buffers: a step of the user has changed them."""
        self._buffer_marks = self._marks_of_buffers()
        self._moved_buffers.clear()

    def note_step(self) -> None:
        """Take notice of what a step of the user has changed."""
        self.accept_buffers()
        self.variables.note_changes()
        if self._has_shadows:
            self._after = self.read_variables()

    def resume(self) -> None:
        """Accept whatever buffers and variables the next step finds: they were loaded."""
        self._buffer_marks = self._after = None
        self._moved_buffers.clear()

    def follow_the_loop(self, shadows: Sequence[ShadowState]) -> None:
        """Let shadows have what the loop has put into buffers and variables between steps."""
        buffers, self._new_buffers = self._new_buffers, {}
        for number, value in buffers.items():
            name = self.buffer_places[number][1]
            if not is_constant(value):
                raise HeldinError(
                    f"{self.owner}: the loop changed the buffer {name!r} of the model between two "
                    "steps, to values that may depend on the rows (statistics computed anew, a "
                    "mask from weights, a call in training mode under no_grad?), and shadows would "
                    "keep theirs; do so inside of train_step, or in evaluation mode or on a copy "
                    "of the model " + more("another-training-step")
                )
            for shadow in shadows:
                shadow.buffers[number] = value.clone()
        if self.before is not None and self._former is not None:
            for shadow in shadows:
                Variables.take_over(shadow.variables, self._former, self.before)

    def keep_own(self, shadows: Sequence[ShadowState], certain: bool) -> None:
        """Let shadows keep what the user's step has changed, and theirs has not.

        certain: whether the loop changes nothing in its step beside what shadows repeat; else only
        what the step of a shadow has changed is theirs.
        """
        if self.before is None or self._after is None:
            return
        for name, value in Variables.former_values(self.before, self._after).items():
            if certain or any(name in shadow.variables for shadow in shadows):
                for shadow in shadows:
                    shadow.variables.setdefault(name, value)

    def new_values(self) -> Iterator[tuple[str, Any]]:
        """Yield what the user's step has assigned, with names of the variables."""
        if self.before is not None and self._after is not None:
            yield from Variables.new_values(self.before, self._after)

    def read_variables(self) -> Values:
        """Return copies of all variables."""
        self._find_attributes()
        return self.variables.read()

    def _find_attributes(self) -> None:
        """Find the attributes that not every module has; again where modules got new ones."""
        counts = [len(table) for _, table, _ in self.tables]
        if counts == self._attribute_counts:
            return
        self._attribute_counts = counts
        for owner, table, standard in self.tables:
            for name, value in table.items():
                if name not in standard and "hook" not in name and _is_variable(value):
                    absent = self.variables.add_attribute(owner, table, name)
                    if self.before is not None:  # the user's step, or the loop, has made it since
                        self.before |= absent

    def present_state(self) -> ShadowState:
        """Return the user's present state without copies, and without variables."""
        optimizer = self.optimizer
        return ShadowState(
            [_read(p) for p in self.tensors],
            [table[name].data for table, name in self.buffer_places],
            dict(optimizer.state),
            [
                {key: group[key] for key in self.group_state_keys if key in group}
                for group in optimizer.param_groups
            ],
            grads=[p.grad for p in self.tensors],
            objects=[copy.deepcopy(each.state_dict()) for each in self.objects],
        )

    def new_state(self, variables: Values | None = None) -> ShadowState:
        """Return a copy of the user's present state; without variables, these follow the user."""
        state = self.present_state()
        state.weights, state.grads = self._clone_weights(), []
        state.buffers = [buffer.clone() for buffer in state.buffers]
        state.optimizer = _copy_of_state(state.optimizer)
        state.group_state = [{} for _ in state.group_state]
        state.variables = dict(variables or {})
        return state

    def _clone_weights(self) -> list[Tensor]:
        """Return copies of the parameters' data; parameters with one storage keep sharing it."""
        clones: dict[int, Tensor] = {}
        weights = []
        for p in self.tensors:
            address = self._shared.get(id(p))
            if address is None:
                weights.append(local(p).detach().clone())
                continue
            if address not in clones:
                flat = torch.empty(0, dtype=p.dtype, device=p.device)
                clones[address] = flat.set_(p.untyped_storage().clone())
            view = clones[address].as_strided(p.shape, p.stride(), p.storage_offset())
            weights.append(view)
        return weights

    # -- saving

    def saved(self, state: ShadowState) -> dict[str, Any]:
        """Return what a resumed run needs of a state."""
        entries = {i: state.optimizer.get(p) for i, p in enumerate(self.tensors)}
        return {
            "weights": {n: w.clone() for n, w in zip(self.names, state.weights, strict=True)},
            "buffers": {str(i): buffer.clone() for i, buffer in enumerate(state.buffers)},
            "optimizer": {"state": {i: copy.deepcopy(each) for i, each in entries.items() if each}},
            "group_state": copy.deepcopy(state.group_state),
            "objects": copy.deepcopy(state.objects),
            "variables": self.variables.saved(state.variables),
        }

    def loaded(self, saved: Any, before: ShadowState, place: str) -> ShadowState:
        """Return a state that was saved, in place of another one; refuse that of other shadows."""
        state = before.copy()
        weights = dict(zip(self.names, state.weights, strict=True))
        buffers = {str(i): buffer for i, buffer in enumerate(state.buffers)}
        form = {
            "weights": weights,
            "buffers": buffers,
            "optimizer": {"state": {int: {str: ENTRY}}},
            "group_state": [dict],
            "objects": list,
            "variables": {"assigned": dict, "in_place": dict},
        }
        check_schema(saved, form, place)
        for kind, tensors in (("weights", weights), ("buffers", buffers)):
            for name, tensor in tensors.items():
                tensor.copy_(saved[kind][name])
        total = sum(weight.numel() for weight in state.weights)
        for number, entries in saved["optimizer"]["state"].items():
            if not 0 <= number < len(state.weights):
                raise ValueError(f"{place}: the optimiser has no parameter {number}")
            weight, own = state.weights[number], copy.deepcopy(entries)
            for name, value in own.items():
                if not isinstance(value, Tensor):
                    continue
                too_large = value.dim() > weight.dim() or value.numel() > max(1, weight.numel())
                if too_large and value.numel() != total:  # else all are in one vector
                    raise ValueError(f"{name!r} of an optimiser is {tuple(value.shape)}")
                own[name] = value.to(weight.device) if value.dim() else value
            state.optimizer[self.tensors[number]] = own
        for p in (p for i, p in enumerate(self.tensors) if i not in saved["optimizer"]["state"]):
            state.optimizer.pop(p, None)
        state.group_state = copy.deepcopy(saved["group_state"])
        state.objects = copy.deepcopy(saved["objects"])
        state.variables = self.variables.loaded(saved["variables"])
        return state

    def note_group_state(
        self, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
    ) -> None:
        """Find the group settings that the user's step changed: they are state of the optimiser."""
        for old, new in zip(before, after, strict=True):
            for key, value in new.items():
                if key not in old or not equal(old[key], value, objects=True):
                    self.group_state_keys.add(key)

    def reshard(self) -> None:
        """Make `fully_shard` free gathered weights: a forward pass must gather those of now."""
        for module in self._sharded:
            module.reshard()  # type: ignore[operator]

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Keep the user's state aside while shadows use the objects; restore it at the end."""
        self.find_moved_buffers()
        session = Session(self)
        with paused():
            try:
                yield session
            finally:
                session.restore()
                if self._buffer_marks is not None:
                    self._buffer_marks = self._marks_of_buffers()

    @contextmanager
    def modes(self, training: Sequence[bool] | None) -> Iterator[None]:
        """Set `training` of all modules; None: evaluation."""
        before = [module.training for module in self.modules]
        wanted = [False] * len(before) if training is None else training
        try:
            for module, mode in zip(self.modules, wanted, strict=False):
                if module.training != mode:
                    module.training = mode
            yield
        finally:
            for module, mode in zip(self.modules, before, strict=True):
                if module.training != mode:
                    module.training = mode

    def random_state(
        self, device: torch.device, torch_only: bool = False
    ) -> tuple[RandomState, list[Any]]:
        """Return the states of the global generators and of those that modules keep."""
        own = [generator_state(generator) for generator in self.variables.generators()]
        return RandomState.current(device, torch_only), own

    def restore_random_state(self, state: tuple[RandomState, list[Any]]) -> None:
        """Set the generators to the states that `random_state` returned."""
        state[0].restore()
        for generator, own in zip(self.variables.generators(), state[1], strict=False):
            set_generator(generator, own)


class Session:
    """The user's own state, kept aside while the states of shadows are in its place."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, optimizer = exchange, exchange.optimizer
        exchange.reshard()
        self._user = exchange.present_state()
        self._buffers = [table[name] for table, name in exchange.buffer_places]
        self._groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._user.variables = exchange.read_variables()
        before = exchange.before
        self._before = self._user.variables if before is None else before
        self._inserted = self._before
        self._counts = [len(table) for _, table, _ in exchange.tables]
        self._frozen = places_of(exchange.frozen)

    def insert(
        self,
        state: ShadowState,
        settings: Sequence[Mapping[str, Any]] | None = None,
        with_gradients: bool = False,
    ) -> None:
        """Put the state of a shadow into the user's objects.

        settings: of the optimiser's groups during the user's step (rates, for instance);
        with_gradients: whether the shadow has gradients of an earlier call.
        """
        grads = state.grads if with_gradients and state.grads else None
        self._inserted = self._before | state.variables
        self._put(state, grads or [None] * len(state.weights), self._inserted)
        if settings is not None:
            groups = self._exchange.optimizer.param_groups
            for group, setting, own in zip(groups, settings, state.group_state, strict=True):
                group.update(setting)
                group.update(own)

    def _put(self, state: ShadowState, grads: Sequence[Tensor | None], variables: Values) -> None:
        """Write a state, but not the settings of parameter groups."""
        exchange = self._exchange
        self._remove_new_attributes()
        exchange.reshard()
        for p, data, grad in zip(exchange.tensors, state.weights, grads, strict=True):
            p.grad = None
            _write(p, data)
            p.grad = grad
        places = zip(exchange.buffer_places, self._buffers, state.buffers, strict=True)
        for (table, name), buffer, data in places:
            table[name] = buffer
            buffer.data = data
        exchange.optimizer.state.clear()
        exchange.optimizer.state.update(state.optimizer)
        Variables.write(variables)
        for each, own in zip(exchange.objects, state.objects, strict=True):
            each.load_state_dict(own)

    def protect_buffers(self) -> None:
        """Give the user's model copies of its buffers until the end of the session."""
        for buffer, data in zip(self._buffers, self._user.buffers, strict=True):
            buffer.data = data.clone()

    def collect(self, state: ShadowState, with_gradients: bool = False) -> None:
        """Read the state of a shadow back after its step."""
        exchange = self._exchange
        exchange.reshard()
        present = exchange.present_state()
        present.variables = state.variables | Variables.changes(
            self._inserted, exchange.variables.read()
        )
        present.grads = present.grads if with_gradients else state.grads
        present.reached = state.reached
        vars(state).update(vars(present))
        places = zip(exchange.frozen, self._frozen, places_of(exchange.frozen), strict=True)
        for p, before, after in places:
            if before != after:
                raise HeldinError(
                    f"step: a parameter of shape {tuple(p.shape)} that the optimiser does not "
                    "train was changed in a shadow's step, and all shadows share it (is it an "
                    "average of weights, or a teacher?); "
                    + way_out(exchange.owner, "pass its module: state=[module]")
                )

    def restore(self) -> None:
        exchange, optimizer = self._exchange, self._exchange.optimizer
        self._put(self._user, self._user.grads, self._user.variables)
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            for key in [key for key in group if key != "params" and key not in values]:
                del group[key]
            group.update(values)
        exchange.variables.renew_versions()

    def difference(self, before: ShadowState) -> float:
        """Return how far the present state is from that which the user's step has left.

        Weights are compared relative to what the step changed, gradients and the optimiser's state
        relative to themselves. Differences of a few units in the last place do not count.
        """
        exchange, user = self._exchange, self._user
        moved = _norm([a - b for a, b in zip(user.weights, before.weights, strict=True)])
        pairs: list[tuple[list[Tensor], list[Tensor], float | None]]
        pairs = [([_read(p) for p in exchange.tensors], user.weights, moved)]
        grads = [(p.grad, g) for p, g in zip(exchange.tensors, user.grads, strict=True)]
        both = [(a, b) for a, b in grads if a is not None and b is not None]
        pairs.append(([a for a, _ in both], [b for _, b in both], None))
        for p in exchange.tensors:
            mine, theirs = (
                each.get(p) or {} for each in (exchange.optimizer.state, user.optimizer)
            )
            names = [n for n, v in mine.items() if _is_number(v) and _is_number(theirs.get(n))]
            pairs.append(([mine[n] for n in names], [theirs[n] for n in names], None))
        worst = 0.0
        for one, other, size in pairs:
            alike = [(a.shape == b.shape) for a, b in zip(one, other, strict=True)]
            if not all(alike):
                return float("inf")
            off, norm = _norm([a - b for a, b in zip(one, other, strict=True)]), _norm(other)
            eps = max((torch.finfo(t.dtype).eps for t in other), default=0.0)
            if off > 4 * eps * norm:
                worst = max(worst, off / max(norm if size is None else size, 1e-300))
        return worst

    def _remove_new_attributes(self) -> None:
        """Remove attributes that a shadow's step has added to modules or to the optimiser."""
        exchange = self._exchange
        for (owner, table, standard), count in zip(exchange.tables, self._counts, strict=True):
            if len(table) == count:
                continue
            for name, value in [*table.items()]:
                known = name in standard or exchange.variables.has_attribute(owner, name)
                if not known and not isinstance(value, nn.Module) and not callable(value):
                    del table[name]


def _copy_of_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a deep copy of an optimiser's state; tensors are cloned, for speed."""

    def copied(value: Any) -> Any:
        return value.clone() if type(value) is Tensor and value.is_leaf else copy.deepcopy(value)

    return {
        key: {k: copied(v) for k, v in entry.items()}
        if isinstance(entry, Mapping)
        else copied(entry)
        for key, entry in state.items()
    }


def places_of(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return numbers that change if the data of parameters is replaced or changed in place."""
    return [(p.data_ptr(), version_of(p)) for p in parameters]


def local(p: Tensor) -> Tensor:
    """Return the shard of a sharded parameter that this rank has; any other as it is."""
    return p._local_tensor if isinstance(p, DTensor) else p


def _read(p: Tensor) -> Tensor:
    """Return what `_write` puts back: the data, or a copy of a shard's contents."""
    return local(p).detach().clone() if isinstance(p, DTensor) else p.data


def _write(p: Tensor, data: Tensor) -> None:
    """Give a parameter other data.

    `fully_shard` reads the storage of the shards, so their contents are copied.
    """
    if isinstance(p, DTensor):
        with torch.no_grad():
            local(p).copy_(data)
    else:
        p.data = data


def _shared_storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return the address of the storage of each parameter that shares it with another."""
    owners: dict[int, list[Tensor]] = {}
    for p in tensors:
        if not isinstance(p, DTensor) and p.layout == torch.strided:
            owners.setdefault(p.untyped_storage().data_ptr(), []).append(p)
    return {id(p): address for address, group in owners.items() if len(group) > 1 for p in group}


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the norm of tensors jointly; nan counts as nothing."""
    dense = (t.to_dense() if t.is_sparse else local(t).detach() for t in tensors)
    total = sum(float(t.abs().double().nan_to_num().square().sum()) for t in dense)
    return float(total**0.5)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not value.is_sparse


def _is_variable(value: Any) -> bool:
    """Return whether the value of an attribute may be the state of a model or an optimiser."""
    if isinstance(value, nn.Module):
        return False
    if not callable(value) or is_generator(value):
        return True
    return is_object_of_user(value) and not isinstance(value, (type, FunctionType))
