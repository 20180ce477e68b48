"""Exchange the variables around a user's function: counters, lists, averages.

A function that takes a training step may count its calls in a variable of the function around it,
in a global one or in an attribute of its object, and append to lists. Called for shadows, too, it
would count them in, and train otherwise from then on. So each shadow has its own values of whatever
its calls change.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from heldin._private_torch import version_of
from heldin.errors import HeldinError

__all__ = ["Variables"]

DEPTH = 3  # nested containers and objects
LONG = 4096  # entries of a list that is restored by its length only; longer mappings are left alone
CONTAINERS = (list, dict, set, deque)
SAVED = (bool, int, float, str, type(None))
PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))
FIXED = (nn.Module, Optimizer, DataLoader, Dataset, torch.Generator)

_MISSING = object()


@dataclass(frozen=True, eq=False)
class _Kept:
    """A value that can be changed in place, and a copy of its contents.

    The contents of a long list are its length; None: they are not kept.
    """

    value: Any
    contents: Any = None

    def restore(self) -> None:
        """Fill the value with the contents."""
        value, contents = self.value, self.contents
        if contents is None:
            return
        if isinstance(value, Tensor):
            with torch.no_grad():
                value.detach().copy_(contents)
        elif isinstance(contents, int):
            while len(value) > contents:
                value.pop()
        elif not _same_contents(value, contents):
            value.clear()
            if isinstance(value, (dict, set)):
                value.update(contents)
            else:
                value.extend(contents)

    def is_same(self, other: Any) -> bool:
        """Return whether another one has the same value and contents."""
        if not isinstance(other, _Kept) or self.value is not other.value:
            return False
        one, two = self.contents, other.contents
        if type(one) is not type(two):
            return False
        if one is None or isinstance(one, int):
            return bool(one == two)
        return bool(torch.equal(one, two) if isinstance(one, Tensor) else _same_contents(one, two))


Values = dict[str, Any]


class Variables:
    """The variables that a function can reach, by name.

    Args:
        function: of the user.
        exchanged: numbers (`id`) of objects that are exchanged in another way.
        largest: number of elements of a tensor that is copied.

    >>> def make():
    ...     count = 0
    ...     def step(batch):
    ...         nonlocal count
    ...         count += 1
    ...         return count
    ...     return step
    >>> step = make()
    >>> variables = Variables(step, set(), 100)
    >>> before = variables.read()
    >>> step(None), step(None)
    (1, 2)
    >>> variables.write(before)
    >>> step(None)
    1
    """

    def __init__(self, function: Callable[[Any], Any], exchanged: set[int], largest: int) -> None:
        self._function, self._exchanged, self._largest = function, exchanged, largest
        self._tensors: dict[str, Tensor] = {}  # as of the latest `read`
        self._versions: dict[str, int] = {}
        self._changing: set[str] | None = None  # names of tensors that a step changes in place

    # -- reading

    def read(self) -> Values:
        """Return copies of all values."""
        values: Values = {}
        self._tensors, seen = {}, set(self._exchanged)
        for name, owner in self._objects():
            seen.add(id(owner))
            self._read_object(name, owner, values, seen, DEPTH)
        for name, table, key in self._places():
            value = _get(table, key)
            if isinstance(value, PLAIN) or value is _MISSING:
                values[name] = value
            elif not isinstance(value, (type, ModuleType, FunctionType)):
                values[name] = _Kept(value)
                self._read(name, value, values, seen, DEPTH)
        self._versions = {name: version_of(t) for name, t in self._tensors.items()}
        return values

    def _read(self, name: str, value: Any, values: Values, seen: set[int], depth: int) -> None:
        """Add what can be changed in place."""
        if id(value) in seen or depth == 0 or isinstance(value, (*PLAIN, *FIXED)):
            return
        if isinstance(value, Tensor):
            seen.add(id(value))
            if isinstance(value, nn.Parameter) or value.grad_fn is not None:
                return
            self._tensors[name] = value
            if self._is_copied(name, value):
                values[name] = _Kept(value, value.detach().clone())
        elif type(value) in CONTAINERS:
            seen.add(id(value))
            if len(value) <= LONG:
                values[name] = _Kept(value, value.copy())
                parts = value.items() if isinstance(value, dict) else enumerate(value)
                for key, part in parts:
                    self._read(f"{name}[{key!r}]", part, values, seen, depth - 1)
            elif isinstance(value, list):
                values[name] = _Kept(value, len(value))
        elif self._is_users(value):
            seen.add(id(value))
            self._read_object(name, value, values, seen, depth)

    def _read_object(
        self, name: str, owner: Any, values: Values, seen: set[int], depth: int
    ) -> None:
        table = vars(owner)
        values[f"{name}.__dict__"] = _Kept(table, table.copy())
        for key, part in list(table.items()):
            self._read(f"{name}.{key}", part, values, seen, depth - 1)

    def _is_copied(self, name: str, tensor: Tensor) -> bool:
        if self._changing is not None:
            return name in self._changing
        return tensor.numel() <= self._largest and tensor.layout == torch.strided

    def _is_users(self, value: Any) -> bool:
        """Return whether an object is of a class of the user's own code."""
        if isinstance(value, (*FIXED, type)) or callable(value) or not hasattr(value, "__dict__"):
            return False
        if hasattr(value, "state_dict"):
            return False  # to be given as state
        function = getattr(self._function, "__func__", self._function)
        home = getattr(function, "__module__", None) or type(function).__module__
        return type(value).__module__.split(".")[0] in (home.split(".")[0], "__main__")

    def note_changes(self) -> None:
        """Find the tensors that the user's call has changed in place since `read`."""
        changed = {
            name for name, t in self._tensors.items() if version_of(t) != self._versions[name]
        }
        if self._changing is None:
            late = {name for name in changed if not self._is_copied(name, self._tensors[name])}
            self._changing = changed - late
        else:
            late = changed - self._changing
        for name in sorted(late):
            raise HeldinError(
                f"train_step: it changes the tensor {name!r} in place, which all shadows share "
                "with the model, so that both would be wrong; keep it in an object with "
                "state_dict and load_state_dict, and pass that: state=[...]"
            )

    # -- writing

    def write(self, values: Mapping[str, Any]) -> None:
        """Set variables to values that `read` returned."""
        for value in values.values():
            if isinstance(value, _Kept):
                value.restore()
        for name, table, key in self._places():
            if name in values:
                value = values[name]
                _set(table, key, value.value if isinstance(value, _Kept) else value)

    @staticmethod
    def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Values:
        """Return the values that are not the same as before."""
        return {name: value for name, value in after.items() if not _same(before.get(name), value)}

    @staticmethod
    def take_over(
        values: Values, before: Mapping[str, Any] | None, after: Mapping[str, Any]
    ) -> None:
        """Put what the loop changed between two calls (a hidden state that it reset) into values.

        Args:
            values: of a shadow.
            before: values of the user after the former call; None: there was none.
            after: values of the user now.
        """
        for name, value in Variables.changes(before or after, after).items():
            mine, former = values.pop(name, None), (before or after).get(name)
            tables = [v.contents if isinstance(v, _Kept) else None for v in (mine, former, value)]
            if all(isinstance(table, dict) for table in tables):
                own, old, new = (dict(table) for table in tables)  # type: ignore[arg-type]
                for key in {*old, *new}:
                    if new.get(key, _MISSING) is not old.get(key, _MISSING):
                        own.pop(key, None)
                        own |= {key: new[key]} if key in new else {}
                values[name] = _Kept(value.value, own)

    @staticmethod
    def new_values(
        before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield values that were assigned, to variables and inside of dictionaries and objects."""
        for name, value in Variables.changes(before, after).items():
            if not isinstance(value, _Kept) or value.contents is None:
                yield name, value.value if isinstance(value, _Kept) else value
            elif isinstance(value.contents, dict):
                old = before.get(name)
                former = old.contents if isinstance(old, _Kept) else {}
                for key, part in value.contents.items():
                    if part is not (former or {}).get(key, _MISSING):
                        owner = name.removesuffix(".__dict__")
                        yield f"{name}[{key!r}]" if owner == name else f"{owner}.{key}", part

    # -- saving

    def saved(self, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return those of a shadow's values that are numbers, texts, lists of them, or tensors."""
        now, assigned, in_place = self.read(), {}, {}
        for name, value in values.items():
            here = now.get(name)
            live = here.value if isinstance(here, _Kept) else None
            if isinstance(value, _Kept) and isinstance(value.contents, Tensor):
                in_place[name] = value.contents.clone()
            elif isinstance(value, _Kept) and isinstance(value.contents, dict):
                others = live if isinstance(live, dict) else {}
                assigned[name] = {
                    k: copy.deepcopy(v)
                    for k, v in value.contents.items()
                    if isinstance(k, str) and _is_saved(v) and v is not others.get(k, _MISSING)
                }
            else:
                plain = value
                if isinstance(value, _Kept):
                    plain = value.value if value.contents is None else value.contents
                if _is_saved(plain) and plain is not live:
                    assigned[name] = copy.deepcopy(plain)
        return {"assigned": assigned, "in_place": in_place}

    def loaded(self, state: Mapping[str, Mapping[str, Any]]) -> Values:
        """Return values as `read` does, from what was saved."""
        now = self.read()
        values: Values = {}
        for name in (*state["assigned"], *state["in_place"]):
            if name not in now:
                raise ValueError(f"train_step has no variable {name!r}")
        for name, saved in state["assigned"].items():
            here, value = now[name], copy.deepcopy(saved)
            if isinstance(here, _Kept) and isinstance(here.contents, dict):
                values[name] = _Kept(here.value, {**here.contents, **value})
            elif isinstance(here, _Kept) and isinstance(here.contents, list):
                values[name] = _Kept(here.value, value)
            else:
                values[name] = _Kept(value) if isinstance(value, Tensor) else value
        for name, tensor in state["in_place"].items():
            values[name] = _Kept(now[name].value, tensor.clone())
        return values

    # -- places

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """Yield the object that the function is a method of."""
        owner: Any = self._function
        if isinstance(owner, MethodType):
            owner = owner.__self__
        if not isinstance(owner, (FunctionType, type, *FIXED)) and hasattr(owner, "__dict__"):
            yield "self", owner

    def _places(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, table and key of every variable that the function names."""
        function: Any = getattr(self._function, "__func__", self._function)
        if not isinstance(function, FunctionType):
            function = type(function).__call__
        if isinstance(function, FunctionType):
            yield from _variables_of(function, "", set())


def _variables_of(
    function: FunctionType, prefix: str, seen: set[int]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the variables of a function and of the functions of the same module that it names."""
    if id(function) in seen:
        return
    seen.add(id(function))
    nested: list[tuple[str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield prefix + name, cell, None
        nested.append((name, _get(cell, None)))
    table = function.__globals__
    for name in function.__code__.co_names:
        if name in table:
            yield f"globals()[{name!r}]", table, name
            nested.append((name, table[name]))
    for name, value in nested:
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _variables_of(value, f"{prefix}{name}: ", seen)


def _is_saved(value: Any) -> bool:
    if type(value) is Tensor:
        return not value.requires_grad
    entries = value if type(value) is list else [value]
    return all(isinstance(entry, SAVED) for entry in entries)


def _get(table: Any, key: Any) -> Any:
    if isinstance(table, CellType):
        try:
            return table.cell_contents
        except ValueError:  # not yet set
            return _MISSING
    return table.get(key, _MISSING)


def _set(table: Any, key: Any, value: Any) -> None:
    if _get(table, key) is value:
        return
    if isinstance(table, CellType):
        if value is _MISSING:
            del table.cell_contents
        else:
            table.cell_contents = value
    elif value is _MISSING:
        table.pop(key, None)
    else:
        table[key] = value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _Kept):
        return one.is_same(other)
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, ValueError):  # tuples of tensors or arrays
        return False


def _same_contents(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    if isinstance(one, set):
        return bool(one == other)
    return all(a is b for a, b in zip(one, other, strict=True))
