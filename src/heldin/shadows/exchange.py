"""Put the state of a shadow into the user's own objects, and the user's state back.

A shadow's step runs on the user's own modules and optimiser. So everything that a training step
reads or changes is exchanged: the data of parameters and buffers, attributes of modules that a
step changes, random generators that modules keep, the optimiser's state, and objects that the user
names (an average of weights, a gradient scaler, a second optimiser).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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

from .variables import MODULE_FIELDS, PLAIN, Variables, is_equal, refill

__all__ = ["Exchange", "Session", "ShadowState", "group_settings", "has_evaluation_mode", "local"]

OPTIMIZER_FIELDS = {*vars(torch.optim.SGD([nn.Parameter(torch.zeros(()))], 0.0))}

FLAT = (*PLAIN, Tensor, nn.Module)

COLLECTED = (
    "grads", "weights", "buffers", "optimizer", "group_state", "generators", "objects", "others"
)  # fmt: skip

Mark = tuple[Any, Any]  # a value, and its version, or its contents
Place = tuple[dict[str, Any], str]  # attributes of an object, and the name of one
_MISSING = object()


@dataclass(eq=False)
class ShadowState:
    """Everything that the training of one shadow changes."""

    weights: list[Tensor]  # data of the exchanged parameters (local shards of sharded ones)
    buffers: list[Tensor]
    optimizer: list[dict[str, Any]]  # state of the optimiser, by exchanged parameter
    group_state: list[dict[str, Any]]  # settings of parameter groups that a step changes, by group
    attributes: dict[int, Any] = field(default_factory=dict)  # that a step changed, by place
    generators: list[Any] = field(default_factory=list)  # states of those that modules keep
    grads: list[Tensor | None] = field(default_factory=list)  # left by the user's function
    objects: list[Any] = field(default_factory=list)  # state dictionaries of those in `state`
    variables: dict[str, Any] = field(default_factory=dict)  # around the user's function
    nested: dict[str, Any] = field(default_factory=dict)  # inside of attributes
    others: dict[Any, Any] = field(default_factory=dict)  # the rest of the optimiser's state
    reached: set[int] = field(default_factory=set)  # numbers (`id`) of parameters with a gradient

    def copy(self) -> ShadowState:
        """Return a state that a step may change in place."""
        copied = copy.copy(self)
        for name in ("weights", "buffers", "optimizer", "grads", "objects", "others"):
            setattr(copied, name, copy.deepcopy(getattr(self, name)))
        copied.attributes = {n: _copy_of(value) for n, value in self.attributes.items()}
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

    `state` are further objects that a step changes: modules, or anything with `state_dict` and
    `load_state_dict`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        state: Sequence[Any] = (),
        owner: str = "optimizer",
        has_shadows: bool = False,
    ) -> None:
        self.owner, self.optimizer, self._has_shadows = owner, optimizer, has_shadows
        others = [each for each in state if isinstance(each, nn.Module)]
        self.objects = [each for each in state if not isinstance(each, nn.Module)]
        self.trained = _trained_parameters(model, optimizer, others, owner)  # by name
        exchanged = {id(p): p for p in self.trained.values()}
        for other in others:
            exchanged |= {id(p): p for p in other.parameters()}
        for each in self.objects:
            if isinstance(each, Optimizer):
                exchanged |= {id(p): p for group in each.param_groups for p in group["params"]}
        self.tensors = [*exchanged.values()]  # all exchanged parameters, the trained ones first
        extra = range(len(self.tensors) - len(self.trained))
        self.names = [*self.trained, *(f"state.{number}" for number in extra)]
        self.frozen = [p for p in model.parameters() if id(p) not in exchanged]
        roots = (model, *others)
        self.modules = list(dict.fromkeys(m for root in roots for m in root.modules()))
        buffers: dict[int, Place] = {}  # a buffer in two places is one
        for module in self.modules:
            for name, buffer in own_buffers(module).items():
                if buffer is not None:
                    buffers.setdefault(id(buffer), (own_buffers(module), name))
        self.buffer_places = [*buffers.values()]
        self.attribute_places: list[Place] = []
        self._callable_places: list[Place] = []
        self._attribute_counts: list[int] = []
        self.find_attributes()
        # Group settings that a step changes are state, of which every shadow has its own. All
        # others follow the user's optimiser.
        self.group_state_keys: set[str] = set()
        self._shared = _shared_storages(self.tensors)
        self._sharded = fully_sharded(model)
        self.values_before: dict[int, Any] = {}  # of attributes, before the user's step
        self._marks_before: list[Mark] = []  # of attributes, before and after it
        self._marks_after: list[Mark] | None = None
        self._moved_attributes: list[int] = []  # by the loop, since its last step
        owners = (*self.modules, *self.tensors, *self.frozen, *self.objects, optimizer)
        self._numbers = {id(owner) for owner in owners}
        self._largest = sum(p.numel() for p in self.tensors)
        self.nested = Variables(self._nested_values, self._numbers, self._largest)
        self.nested_before: dict[str, Any] | None = None  # the user's step
        self._nested_after: dict[str, Any] | None = None
        self._nested_former: dict[str, Any] | None = None  # after the step before
        self._buffer_marks: list[tuple[int, int]] | None = self._marks_of_buffers()
        self._moved_buffers: set[int] = set()  # by the loop, since its last step
        self._new_buffers: dict[int, Tensor] = {}

    def surroundings(self, function: Any) -> Variables:
        """Return the variables around a function of the user, beyond what is exchanged."""
        buffers = {id(table[name]) for table, name in self.buffer_places}
        return Variables(lambda: [("", function)], self._numbers | buffers, self._largest)

    def note_attributes(self) -> None:
        """Remember attributes and buffers before a step of the user changes them."""
        self._marks_before = self._marks_of_attributes()
        self.values_before = self._copies_of_attributes(self._marks_before)
        if self._marks_after is not None:
            self._moved_attributes = _changed(self._marks_after, self._marks_before)
        self.nested_before, self._nested_former = self.nested.read(), self._nested_after
        for number in self.find_moved_buffers():
            table, name = self.buffer_places[number]
            self._new_buffers[number] = table[name].detach().clone()

    def _marks_of_attributes(self) -> list[Mark]:
        self.find_attributes()
        return [_mark(table.get(name, _MISSING)) for table, name in self.attribute_places]

    @staticmethod
    def _copies_of_attributes(marks: Sequence[Mark]) -> dict[int, Any]:
        return {number: _copy_of(*mark) for number, mark in enumerate(marks)}

    def _nested_values(self) -> Iterator[tuple[str, Any]]:
        """Yield what attributes contain beyond the containers that are exchanged themselves."""
        for number, (table, name) in enumerate(self.attribute_places):
            value = table.get(name)
            if type(value) in PLAIN or isinstance(value, FLAT) or is_generator(value):
                continue
            if _contents(value) is None:
                yield f"{number}.{name}", value
            elif not isinstance(value, set):
                for key, part in self.nested.parts(f"{number}.{name}", value):
                    yield f"{number}.{name}[{key!r}]", part
        for table, name in self._callable_places:
            yield name, table.get(name)

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
        """Take notice of what a step of the user has changed inside of attributes."""
        self.accept_buffers()
        self.nested.note_changes()
        self._nested_after = self.nested.read()
        if self._has_shadows:
            self._marks_after = self._marks_of_attributes()

    def forget_buffers(self) -> None:
        """Accept whatever buffers the next step finds: they are loaded on purpose."""
        self._buffer_marks = self._nested_after = self._marks_after = None
        self._moved_buffers.clear()

    def follow_the_loop(self, shadows: Sequence[ShadowState]) -> None:
        """Let shadows have what the loop has put into buffers and attributes between steps."""
        buffers, self._new_buffers = self._new_buffers, {}
        for number, value in buffers.items():
            name = self.buffer_places[number][1]
            if not _is_constant(value):
                raise HeldinError(
                    f"{self.owner}: the loop changed the buffer {name!r} of the model between two "
                    "steps, to values that may depend on the rows (statistics computed anew, a "
                    "mask from weights, a call in training mode under no_grad?), and shadows would "
                    "keep theirs; do so inside of train_step, or in evaluation mode or on a copy "
                    "of the model " + more("another-training-step")
                )
            for shadow in shadows:
                shadow.buffers[number] = value.clone()
        for number in self._moved_attributes:
            value = self._marks_before[number][0]
            owners = [shadow for shadow in shadows if number in shadow.attributes]
            if owners and (not isinstance(value, Tensor) or _is_constant(value)):
                for shadow in owners:
                    del shadow.attributes[number]
        if self.nested_before:
            for shadow in shadows:
                Variables.take_over(shadow.nested, self._nested_former, self.nested_before)

    def keep_own(self, shadows: Sequence[ShadowState], certain: bool) -> None:
        """Let shadows keep what the user's step has changed, and theirs has not.

        certain: whether the loop changes nothing in its step beside what shadows repeat; else only
        what the step of a shadow has changed is theirs.
        """
        for number in _changed(self._marks_before, self._marks_after or []):
            value = self.values_before.get(number, _MISSING)
            if value is not _MISSING and not _is_exchanged(value):
                continue
            if certain or any(number in shadow.attributes for shadow in shadows):
                for shadow in shadows:
                    shadow.attributes.setdefault(number, _copy_of(value))
        nested = Variables.own_values(self.nested_before or {}, self._nested_after or {})
        for name, kept in nested.items():
            if certain or any(name in shadow.nested for shadow in shadows):
                for shadow in shadows:
                    shadow.nested.setdefault(name, kept)

    def find_attributes(self) -> None:
        """Find the attributes that not every module has; again where modules got new ones."""
        counts = [len(vars(owner)) for owner in (*self.modules, self.optimizer)]
        if counts == self._attribute_counts:
            return
        places = (*self.attribute_places, *self._callable_places)
        known = {(id(table), name) for table, name in places}
        tables = [(vars(module), MODULE_FIELDS) for module in self.modules]
        tables.append((vars(self.optimizer), OPTIMIZER_FIELDS))
        for table, standard in tables:
            for name, value in table.items():
                if name in standard or (id(table), name) in known or "hook" in name:
                    continue
                if isinstance(value, nn.Module):
                    continue
                if not callable(value) or is_generator(value):
                    self.attribute_places.append((table, name))
                elif is_object_of_user(value) and not isinstance(value, (type, FunctionType)):
                    self._callable_places.append((table, name))
        self._attribute_counts = counts

    def generators(self) -> list[Any]:
        """Return the random generators among the modules' attributes."""
        values = (table.get(name) for table, name in self.attribute_places)
        values = (v for v in values if type(v) not in PLAIN and not isinstance(v, FLAT))
        return [value for value in values if is_generator(value)]

    def present_state(self) -> ShadowState:
        """Return the user's present state without copies, and without attributes."""
        optimizer = self.optimizer
        return ShadowState(
            [_read(p) for p in self.tensors],
            [table[name].data for table, name in self.buffer_places],
            [dict(optimizer.state.get(p, {})) for p in self.tensors],
            [
                {key: group[key] for key in self.group_state_keys if key in group}
                for group in optimizer.param_groups
            ],
            generators=[generator_state(generator) for generator in self.generators()],
            grads=[p.grad for p in self.tensors],
            objects=[copy.deepcopy(each.state_dict()) for each in self.objects],
            others=self._other_state(),
        )

    def new_state(self, with_attributes: bool = False) -> ShadowState:
        """Return a copy of the user's present state; without attributes, these follow the user."""
        state = self.present_state()
        state.weights, state.grads = self._clone_weights(), []
        state.buffers = [buffer.clone() for buffer in state.buffers]
        state.optimizer = [_copy_of_entry(entry) for entry in state.optimizer]
        state.group_state = [{} for _ in state.group_state]
        state.others = copy.deepcopy(state.others)
        if with_attributes:
            copies = self._copies_of_attributes(self._marks_of_attributes())
            state.attributes = {n: value for n, value in copies.items() if _is_exchanged(value)}
            state.nested = self.nested.read()
        return state

    def state_before(self, buffers: list[Tensor]) -> ShadowState:
        """Return the state before a step whose forward passes are over, but not the step itself.

        buffers: copies from before the first forward pass.
        """
        state = self.new_state()
        state.buffers, state.nested = buffers, dict(self.nested_before or {})
        before = self.values_before.items()
        state.attributes = {n: _copy_of(value) for n, value in before if _is_exchanged(value)}
        return state

    def _other_state(self) -> dict[Any, Any]:
        """Return the optimiser's state that belongs to no exchanged parameter."""
        state = self.optimizer.state
        if len(state) <= len(self.tensors) and all(isinstance(key, Tensor) for key in state):
            return {}
        exchanged = {id(p) for p in self.tensors}
        return {key: value for key, value in state.items() if id(key) not in exchanged}

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
        self.find_attributes()
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
        own = [generator_state(generator) for generator in self.generators()]
        return RandomState.current(device, torch_only), own

    def restore_random_state(self, state: tuple[RandomState, list[Any]]) -> None:
        """Set the generators to the states that `random_state` returned."""
        state[0].restore()
        for generator, own in zip(self.generators(), state[1], strict=False):
            set_generator(generator, own)


class Session:
    """The user's own state, kept aside while the states of shadows are in its place."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, optimizer = exchange, exchange.optimizer
        exchange.reshard()
        self._user = exchange.present_state()
        self._buffers = [table[name] for table, name in exchange.buffer_places]
        self._optimizer_state = dict(optimizer.state)
        self._groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._attributes = [table.get(name, _MISSING) for table, name in exchange.attribute_places]
        # the user's step has made what is new
        self._before = exchange.values_before or dict(enumerate(self._attributes))
        self._contents = [_contents(value) for value in self._attributes]
        self.nested = exchange.nested.read()
        self._nested_before = exchange.nested_before or self.nested
        self._nested_inserted = self._nested_before
        self._owners = [*exchange.modules, optimizer]
        self._counts = [len(vars(owner)) for owner in self._owners]
        self._frozen = [(p.data_ptr(), version_of(p)) for p in exchange.frozen]
        self._clones: dict[int, tuple[Tensor, int]] = {}  # of tensors among the attributes

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
        exchange = self._exchange
        self._remove_new_attributes()
        entries = zip(exchange.tensors, state.optimizer, strict=True)
        grads = state.grads if with_gradients and state.grads else [None] * len(exchange.tensors)
        self._put(state, grads, {p: entry for p, entry in entries if entry} | state.others)
        if settings is not None:
            groups = exchange.optimizer.param_groups
            for group, setting, own in zip(groups, settings, state.group_state, strict=True):
                for key in group.keys() - setting.keys() - own.keys() - {"params"}:
                    del group[key]  # made by the user's own step
                group.update(setting)
                group.update(own)
        self._insert_attributes(state)
        if self.nested or state.nested:
            self._nested_inserted = self._nested_before | state.nested
            exchange.nested.write(self._nested_inserted)
        self._put_generators(state)

    def _put(
        self,
        state: ShadowState,
        grads: Sequence[Tensor | None],
        optimizer_state: Mapping[Any, dict[str, Any]],
    ) -> None:
        """Write weights, gradients, buffers and the optimiser's state."""
        exchange = self._exchange
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
        exchange.optimizer.state.update(optimizer_state)

    def _put_generators(self, state: ShadowState) -> None:
        """Write the states of generators and of further objects, once attributes are in place."""
        for generator, own in zip(self._exchange.generators(), state.generators, strict=False):
            set_generator(generator, own)
        for each, own in zip(self._exchange.objects, state.objects, strict=True):
            each.load_state_dict(own)

    def protect_buffers(self) -> None:
        """Give the user's model copies of its buffers until the end of the session."""
        for buffer, data in zip(self._buffers, self._user.buffers, strict=True):
            buffer.data = data.clone()

    def _insert_attributes(self, state: ShadowState) -> None:
        """Set attributes to the user's values, except for those that the shadow has changed."""
        for number, (table, name) in enumerate(self._exchange.attribute_places):
            value, contents = self._attributes[number], self._contents[number]
            is_own = number in state.attributes
            start = state.attributes[number] if is_own else self._before.get(number, _MISSING)
            if start is _MISSING:
                table.pop(name, None)
            elif contents is not None and type(start) is type(value):
                table[name] = value
                refill(value, start)  # the user's container, with other contents
            elif isinstance(start, Tensor) and (is_own or start.grad_fn is None):
                table[name] = start if is_own else _copy_of(start)
                self._clones[number] = table[name], -1 if is_own else version_of(table[name])
            elif table.get(name, _MISSING) is not start:
                table[name] = start

    def collect(self, state: ShadowState, with_gradients: bool = False) -> None:
        """Read the state of a shadow back after its step."""
        exchange = self._exchange
        exchange.reshard()
        self._collect_attributes(state)
        if self.nested:
            state.nested |= exchange.nested.changes(self._nested_inserted, exchange.nested.read())
        present = exchange.present_state()
        for name in COLLECTED if with_gradients else COLLECTED[1:]:
            setattr(state, name, getattr(present, name))
        for p, (pointer, version) in zip(exchange.frozen, self._frozen, strict=True):
            if p.data_ptr() != pointer or version_of(p) != version:
                raise HeldinError(
                    f"step: a parameter of shape {tuple(p.shape)} that the optimiser does not "
                    "train was changed in a shadow's step, and all shadows share it (is it an "
                    "average of weights, or a teacher?); "
                    + way_out(exchange.owner, "pass its module: state=[module]")
                )

    def _collect_attributes(self, state: ShadowState) -> None:
        for number, (table, name) in enumerate(self._exchange.attribute_places):
            before, value = self._before.get(number, _MISSING), table.get(name, _MISSING)
            if number in self._clones:
                clone, version = self._clones.pop(number)
                if value is not clone or version_of(clone) != version:
                    state.attributes[number] = value
            elif self._contents[number] is not None and value is self._attributes[number]:
                contents = _contents(value)
                inserted = before if before is not value else self._contents[number]
                if not _same_contents(contents, state.attributes.get(number, inserted)):
                    state.attributes[number] = contents
            elif value is not state.attributes.get(number, before) and not is_generator(value):
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    continue  # computed in every forward pass (weight normalisation)
                state.attributes[number] = value

    def restore(self) -> None:
        exchange, optimizer = self._exchange, self._exchange.optimizer
        self._put(self._user, self._user.grads, self._optimizer_state)
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            for key in [key for key in group if key != "params" and key not in values]:
                del group[key]
            group.update(values)
        places = zip(exchange.attribute_places, self._attributes, self._contents, strict=True)
        for (table, name), value, contents in places:
            if value is _MISSING:
                table.pop(name, None)
                continue
            table[name] = value
            if contents is not None:
                refill(value, contents)
        self._remove_new_attributes()
        if self.nested:
            exchange.nested.write(self.nested)
            exchange.nested.read()  # the versions of its tensors
        self._put_generators(self._user)

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
        for p, theirs in zip(exchange.tensors, user.optimizer, strict=True):
            mine = exchange.optimizer.state.get(p) or {}
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
        for owner, count in zip(self._owners, self._counts, strict=True):
            table = vars(owner)
            if len(table) == count:
                continue
            known = {name for other, name in self._exchange.attribute_places if other is table}
            known |= MODULE_FIELDS if isinstance(owner, nn.Module) else OPTIMIZER_FIELDS
            for name in [name for name in table if name not in known]:
                if not isinstance(table[name], nn.Module) and not callable(table[name]):
                    del table[name]


# --- parameters ------------------------------------------------------------------------------


def _copy_of_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of an optimiser's state of a parameter; tensors are cloned, for speed."""
    return {
        key: value.clone() if type(value) is Tensor and value.is_leaf else copy.deepcopy(value)
        for key, value in entry.items()
    }


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


# --- attributes ------------------------------------------------------------------------------


def _contents(value: Any) -> Any:
    """Return a shallow copy of a container that can be changed in place; None for other values."""
    return copy.copy(value) if type(value) in (list, dict, set, deque) else None


def _mark(value: Any) -> Mark:
    if type(value) in PLAIN:
        return value, None
    return value, version_of(value) if isinstance(value, Tensor) else _contents(value)


def _copy_of(value: Any, contents: Any = None) -> Any:
    """Return a copy of a tensor without a graph, the contents of a container, or the value."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        if value.grad_fn is None:
            return value.detach().clone().requires_grad_(value.requires_grad)
        return value
    contents = _contents(value) if contents is None else contents
    return value if contents is None else contents


def _same_contents(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    if isinstance(one, set):
        return bool(one == other)
    return all(a is b for a, b in zip(one, other, strict=True))


def _is_exchanged(value: Any) -> bool:
    """Return whether the value of an attribute is there, and no other part of a state holds it."""
    if isinstance(value, Tensor):
        return value.grad_fn is None
    return value is not _MISSING and not is_generator(value)


def _changed(before: Sequence[Mark], after: Sequence[Mark]) -> list[int]:
    """Return the numbers of the attributes whose value, version or contents changed."""
    changed = []
    for number, (value, mark) in enumerate(after):
        former, former_mark = before[number] if number < len(before) else (_MISSING, None)
        if mark is None and value is former:
            continue
        if mark is None or former_mark is None:
            same = is_equal(value, former)
        elif isinstance(mark, int):
            same = value is former and mark == former_mark
        else:
            same = type(value) is type(former) and _same_contents(mark, former_mark)
        if not same:
            changed.append(number)
    return changed


def _is_constant(value: Tensor) -> bool:
    """Return whether a tensor has one value, as one that the loop has reset."""
    return not value.numel() or bool((value == value.flatten()[0]).all())
