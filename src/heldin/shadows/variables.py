"""Exchange the variables around a user's function: counters, lists, averages, generators.

A function that takes a training step may count its calls in a variable of the function around it,
in a global one or in an attribute of an object, append to lists and draw from its own random
generator. Called for shadows, too, it would count them in, and train otherwise from then on. So
each shadow has its own values of whatever its calls change.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from heldin._private_torch import version_of
from heldin.errors import HeldinError
from heldin.loop.batches import equal
from heldin.loop.generators import (
    cell_contents,
    generator_state,
    is_generator,
    is_object_of_user,
    is_of_user,
    names_in,
    set_generator,
)

__all__ = ["MODULE_FIELDS", "PLAIN", "Variables", "is_equal", "refill"]

DEPTH = 12  # nested containers, objects and functions
MOST = 20_000  # values that are read
LONG = 4096  # entries of a list or a mapping of which only the end is restored
SHORT = 64  # entries of a container that are read even if it grows; last ones of a long one
SMALL = 4096  # elements of tensors that are always copied
LARGE = 2**22  # elements of those that are copied before the first step, to see if they change
CONTAINERS = (list, dict, set, deque)
SAVED = (bool, int, float, str, type(None))
PLAIN = (bool, int, float, complex, str, bytes, type(None))
FIXED = (Optimizer, DataLoader, Dataset)
MODULE_FIELDS = {*vars(nn.Module())} | {"training"}

_MISSING = object()


class _Entries(dict[Any, Any]):
    """Some variables of an owner: a cell (named ""), globals, a class, an object with slots."""


@dataclass(frozen=True, eq=False)
class _State:
    """The state of a random generator."""

    value: Any


@dataclass(frozen=True, eq=False)
class _Tail:
    """The length of a long list or mapping, and its last entries."""

    length: int
    entries: Any

    @classmethod
    def of(cls, owner: list[Any] | dict[Any, Any]) -> _Tail:
        if isinstance(owner, list):
            return cls(len(owner), owner[-SHORT:])
        keys = [*itertools.islice(reversed(owner), SHORT)]
        return cls(len(owner), {key: owner[key] for key in reversed(keys)})

    def restore(self, owner: list[Any] | dict[Any, Any]) -> None:
        if isinstance(owner, list):
            owner[self.length - len(self.entries) :] = self.entries
            return
        while len(owner) > self.length:
            owner.popitem()
        owner.update(self.entries)


@dataclass(frozen=True, eq=False)
class _Kept:
    """An object that can be changed, and a copy of its contents, or of the end of a long one."""

    owner: Any
    contents: Any

    def restore(self) -> None:
        owner, contents = self.owner, self.contents
        if isinstance(contents, _Entries):
            for key, value in contents.items():
                _set(owner, key, value)
        elif isinstance(contents, _State):
            if not equal(generator_state(owner), contents.value):
                set_generator(owner, contents.value)
        elif isinstance(contents, _Tail):
            contents.restore(owner)
        else:
            refill(owner, contents)

    def is_same(self, other: Any) -> bool:
        if not isinstance(other, _Kept) or self.owner is not other.owner:
            return False
        one, two = self.contents, other.contents
        if type(one) is not type(two):
            return False
        if isinstance(one, _State):
            return equal(one.value, two.value)
        if isinstance(one, _Tail):
            return one.length == two.length and _same_contents(one.entries, two.entries)
        return _same_contents(one, two)


Values = dict[str, _Kept]


class Variables:
    """The variables that functions and objects can reach, by name.

    roots: returns names and values where to begin; exchanged: numbers (`id`) of objects that are
    exchanged in another way; largest: number of elements of a tensor that is copied.
    """

    def __init__(
        self, roots: Callable[[], Iterable[tuple[str, Any]]], exchanged: set[int], largest: int
    ) -> None:
        self._roots, self._largest = roots, largest
        self._exchanged = exchanged | {id(torch.default_generator)}
        # as of the latest `read`: names of iterators, which cannot be put back; modules, large
        # arrays and objects with `state_dict`, which are not exchanged; and tensors
        self.iterators: list[str] = []
        self.watched: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._values: Values = {}  # while they are read
        self._seen: set[int] = set()
        self._changing: set[str] | None = None  # names of large tensors that a step changes
        self._names: set[str] = set()  # in the functions that were read
        self._lengths: dict[str, int] = {}  # of containers when they were read first

    # -- reading

    def read(self) -> Values:
        """Return copies of all values."""
        self._values, self._seen = {}, set(self._exchanged)
        self._tensors, self.iterators, self.watched = {}, [], {}
        for name, value in self._roots():
            self._read(name, value, DEPTH)
        self._versions = {name: version_of(t) for name, t in self._tensors.items()}
        values, self._values, self._seen = self._values, {}, set()
        return values

    def _keep(self, name: str, owner: Any, contents: Any) -> None:
        self._values[name] = _Kept(owner, contents)

    def _read(self, name: str, value: Any, depth: int) -> None:
        """Add what can be changed in place."""
        if type(value) in PLAIN or id(value) in self._seen or not depth or len(self._seen) > MOST:
            return
        if type(value).__module__.split(".")[0] == "heldin":
            return  # the stopping object itself
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter) or value.grad_fn is not None:
                return
            self._tensors[name] = value
            if self._is_copied(name, value):
                self._keep(name, value, value.detach().clone())
        elif isinstance(value, CONTAINERS):
            if len(value) <= LONG:
                self._keep(name, value, value.copy())
                for key, part in self.parts(name, value):
                    self._read(f"{name}[{key!r}]", part, depth - 1)
            elif isinstance(value, (list, dict)):
                self._keep(name, value, _Tail.of(value))
                self.watched[name] = value
            else:
                self._keep(name, value, value.copy())
        elif isinstance(value, tuple):
            for key, part in enumerate(value):
                self._read(f"{name}[{key}]", part, depth - 1)
        elif isinstance(value, FunctionType):
            if depth == DEPTH or is_of_user(value.__module__):
                self._read_function(name, value, depth - 1)
        elif isinstance(value, MethodType):
            self._read(name, value.__func__, depth)
            self._read(name or "self", value.__self__, depth - 1)
        elif isinstance(value, functools.partial):
            for part in filter(callable, (value.func, *value.args, *value.keywords.values())):
                self._read(name, part, depth - 1)
            self._read(f"{name}.args", value.args, depth - 1)
            self._read(f"{name}.keywords", value.keywords, depth - 1)
        elif is_generator(value):
            self._keep(name, value, _State(generator_state(value)))
        elif _is_array(value):
            if value.size > self._largest + SMALL:
                self.watched[name] = value
            elif value.dtype != object and value.flags.writeable:
                self._keep(name, value, value.copy())
        elif isinstance(value, type):
            self._read_class(value, depth - 1)
        elif isinstance(value, nn.Module):
            self.watched[name] = value
            if is_of_user(type(value).__module__):
                self._read_object(name, value, MODULE_FIELDS, depth - 1)
            for key, child in value.named_children():
                self._read(f"{name}.{key}", child, depth - 1)
        elif callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
            self.watched[name] = value
        elif hasattr(type(value), "__next__"):
            if not isinstance(value, io.IOBase):
                self.iterators.append(name)
        elif not isinstance(value, (*FIXED, ModuleType)) and is_object_of_user(value):
            self._read_object(name, value, set(), depth - 1)

    def parts(self, name: str, value: Any) -> list[tuple[Any, Any]]:
        """Return what is in a container and may change in place; nothing if it is a growing log."""
        if len(value) > SHORT and self._lengths.setdefault(name, len(value)) != len(value):
            return []
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return [(key, part) for key, part in parts if type(part) not in PLAIN]

    def _read_object(self, name: str, owner: Any, fields: set[str], depth: int) -> None:
        """Add attributes and slots of an object, and those of its class."""
        table = getattr(owner, "__dict__", {})
        if table:
            self._keep(f"{name}.__dict__", table, dict(table))
        slots = [key for kind in type(owner).__mro__ for key in _slots_of(kind)]
        entries = _Entries((key, getattr(owner, key)) for key in slots if hasattr(owner, key))
        if entries:
            self._keep(f"{name}.__slots__", owner, entries)
        for key, part in [*table.items(), *entries.items()]:
            if type(part) in PLAIN or key in fields:
                continue
            if key in self._names or not hasattr(type(part), "__next__"):  # else it is the loop's
                self._read(f"{name}.{key}", part, depth)
        self._read(type(owner).__qualname__, type(owner), depth)

    def _read_class(self, kind: type, depth: int) -> None:
        """Add attributes of a class of the user, and variables of its methods that are named."""
        for base in kind.__mro__:
            if not is_of_user(base.__module__):
                continue
            entries = _Entries()
            for key, part in list(vars(base).items()):
                inner = getattr(part, "__func__", getattr(part, "fget", part))
                if isinstance(inner, FunctionType):
                    if key in self._names or (key.startswith("__") and key != "__init__"):
                        self._read(f"{base.__qualname__}.{key}: ", inner, depth)
                elif not key.startswith("__") and not hasattr(part, "__get__"):
                    entries[key] = part
                    self._read(f"{base.__qualname__}.{key}", part, depth)
            if entries:
                self._keep(f"class {base.__qualname__}", base, entries)

    def _read_function(self, prefix: str, function: FunctionType, depth: int) -> None:
        """Add the variables of a function, and of the functions that it names."""
        names = names_in(function)
        self._names.update(names)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        places: list[tuple[str, Any, str]] = [(prefix + name, cell, "") for name, cell in cells]
        table = function.__globals__
        places += [(f"globals()[{name!r}]", table, name) for name in names if name in table]
        for _, owner, key in list(places):
            module = _get(owner, key)
            if isinstance(module, ModuleType) and is_of_user(module.__name__):
                inside = [name for name in names if name in vars(module)]
                places += [(f"{module.__name__}.{name}", vars(module), name) for name in inside]
        nested: list[tuple[str, Any]] = []
        for name, owner, key in places:
            value = _get(owner, key)
            if not isinstance(value, (type, ModuleType, FunctionType)):
                self._keep(f"variable {name}", owner, _Entries({key: value}))
            nested.append((name, value))
        if vars(function):
            nested.append((f"{prefix}{function.__name__}.__dict__", vars(function)))
        nested.append((f"{prefix}defaults", function.__defaults__))
        nested.append((f"{prefix}defaults", function.__kwdefaults__))
        for name, value in nested:
            self._read(f"{name}: " if isinstance(value, FunctionType) else name, value, depth)

    def _is_copied(self, name: str, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided:
            return False
        if self._changing is not None and tensor.numel() > SMALL:
            return name in self._changing
        return tensor.numel() <= max(self._largest, LARGE)

    def note_changes(self) -> None:
        """Find the tensors that the user's call has changed in place since `read`."""
        changed = {
            name for name, t in self._tensors.items() if version_of(t) != self._versions[name]
        }
        late = {name for name in changed if not self._is_copied(name, self._tensors[name])}
        if self._changing is None:
            self._changing = changed - late
        if late:
            raise HeldinError(
                f"train_step: it changes the tensor {min(late)!r} in place, which all shadows "
                "share with the model, so that both would be wrong; keep it in an object with "
                "state_dict and load_state_dict, and pass that: state=[...]"
            )

    def fingerprints(self) -> dict[str, Any]:
        """Return summaries of what is watched."""
        return {name: _fingerprint(value) for name, value in self.watched.items()}

    def refuse_changed(self, before: Mapping[str, Any]) -> None:
        """Raise HeldinError if what is watched is no longer as `fingerprints` has returned it."""
        for name, value in self.watched.items():
            if name in before and _fingerprint(value) != before[name]:
                short = name.split(".")[-1].split(": ")[-1]
                raise HeldinError(
                    f"train_step: it changes {short!r} (a {type(value).__name__}), which all "
                    "shadows share with the model, so that both would be wrong; pass it: "
                    f"state=[{short}], or leave it out of train_step"
                )

    # -- writing

    @staticmethod
    def write(values: Mapping[str, _Kept]) -> None:
        """Set variables to values that `read` returned."""
        for value in values.values():
            value.restore()

    @staticmethod
    def changes(before: Mapping[str, _Kept], after: Mapping[str, _Kept]) -> Values:
        """Return the values that are not the same as before."""
        return {name: v for name, v in after.items() if not v.is_same(before.get(name))}

    @staticmethod
    def take_over(
        values: Values, before: Mapping[str, _Kept] | None, after: Mapping[str, _Kept]
    ) -> None:
        """Put what the loop changed between two calls (a hidden state that it reset) into values.

        values: of a shadow; before: of the user after the former call, if there was one; after: of
        the user now.
        """
        if before is None:
            return
        for name, value in Variables.changes(before, after).items():
            mine, former = values.pop(name, None), before.get(name)
            if mine is None or former is None:
                continue
            own, old, new = mine.contents, former.contents, value.contents
            if isinstance(own, dict) and isinstance(old, dict) and isinstance(new, dict):
                own = type(own)(own)
                for key in {*old, *new}:
                    if not is_equal(new.get(key, _MISSING), old.get(key, _MISSING)):
                        own.pop(key, None)
                        own |= {key: new[key]} if key in new else {}
                values[name] = _Kept(value.owner, own)

    @staticmethod
    def own_values(before: Mapping[str, _Kept], after: Mapping[str, _Kept]) -> Values:
        """Return values before a call of the user that changed them: shadows keep these."""
        return {n: before[n] for n in Variables.changes(before, after) if n in before}

    @staticmethod
    def new_values(
        before: Mapping[str, _Kept], after: Mapping[str, _Kept]
    ) -> Iterator[tuple[str, Any]]:
        """Yield values that were assigned, to variables and inside of dictionaries and objects."""
        for name, value in Variables.changes(before, after).items():
            if isinstance(value.contents, dict):
                old = before.get(name)
                former = old.contents if old is not None else {}
                for key, part in value.contents.items():
                    if part is not former.get(key, _MISSING):
                        owner = name.removesuffix(".__dict__").removesuffix(".__slots__")
                        if isinstance(value.contents, _Entries) and owner == name:
                            yield name.removeprefix("variable "), part
                        else:
                            yield f"{name}[{key!r}]" if owner == name else f"{owner}.{key}", part

    # -- saving

    def saved(self, values: Mapping[str, _Kept]) -> dict[str, dict[str, Any]]:
        """Return those of a shadow's values that are numbers, texts, lists of them, or tensors."""
        now = self.read()
        assigned: dict[str, Any] = {}
        in_place: dict[str, Any] = {}
        for name, value in values.items():
            here, contents = now.get(name), value.contents
            if isinstance(contents, _State):
                if isinstance(contents.value, Tensor) or _is_plain_tree(contents.value):
                    in_place[name] = copy.deepcopy(contents.value)
            elif isinstance(contents, Tensor):
                in_place[name] = contents.clone()
            elif isinstance(contents, dict):
                others = here.contents if here is not None and type(here.contents) is dict else {}
                assigned[name] = {
                    k: copy.deepcopy(v)
                    for k, v in contents.items()
                    if isinstance(k, str) and _is_saved(v) and v is not others.get(k, _MISSING)
                }
            elif type(contents) is list and _is_saved(contents):
                assigned[name] = copy.deepcopy(contents)
        return {"assigned": assigned, "in_place": in_place}

    def loaded(self, state: Mapping[str, Mapping[str, Any]], partly: bool = False) -> Values:
        """Return values as `read` does, from what was saved.

        partly: leave out what is not there any more.
        """
        now = self.read()
        state = {**state["assigned"], **state["in_place"]}
        unknown = state.keys() - now.keys()
        if unknown and not partly:
            raise ValueError(f"train_step has no variable {min(unknown)!r}")
        values: Values = {}
        for name in (name for name in state if name not in unknown):
            here = now[name]
            value: Any = copy.deepcopy(state[name])
            if isinstance(here.contents, dict):
                value = type(here.contents)({**here.contents, **value})
            elif isinstance(here.contents, _State):
                value = _State(value)
            values[name] = _Kept(here.owner, value)
        return values


def refill(owner: Any, contents: Any) -> None:
    """Give a container, a tensor or an array the contents of another one."""
    if _same_contents(owner, contents):
        return
    if isinstance(owner, Tensor):
        with torch.no_grad():
            owner.detach().copy_(contents)
    elif _is_array(owner):
        owner[...] = contents
    else:
        owner.clear()
        if isinstance(owner, (dict, set)):
            owner.update(contents)
        else:
            owner.extend(contents)


def _fingerprint(value: Any) -> Any:
    """Return a summary of the contents of an object that training may change."""
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        return [float(t.detach().double().abs().sum()) for t in tensors if not t.is_complex()]
    if _is_array(value):
        return crc32(value.tobytes())
    if isinstance(value, (list, dict)):  # a long one, whose last entries are exchanged
        entries = value if isinstance(value, list) else [*value.values()]
        return [*map(id, entries[:-SHORT])]
    try:
        return repr(value.state_dict())
    except Exception:  # an object that has no state at this moment
        return None


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ()) if is_of_user(kind.__module__) else ()
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _is_saved(value: Any) -> bool:
    if type(value) is Tensor:
        return not value.requires_grad
    entries = value if type(value) is list else [value]
    return all(isinstance(entry, SAVED) for entry in entries)


def _get(table: Any, key: Any) -> Any:
    if isinstance(table, CellType):
        return cell_contents(table, _MISSING)
    if isinstance(table, type):
        return vars(table).get(key, _MISSING)
    return table.get(key, _MISSING) if isinstance(table, dict) else getattr(table, key, _MISSING)


def _set(table: Any, key: Any, value: Any) -> None:
    if _get(table, key) is value:
        return
    if isinstance(table, CellType):
        if value is _MISSING:
            del table.cell_contents
        else:
            table.cell_contents = value
    elif not isinstance(table, dict):
        setattr(table, key, value)
    elif value is _MISSING:
        table.pop(key, None)
    else:
        table[key] = value


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are one, or equal numbers or texts."""
    return one is other or (type(one) in PLAIN and type(one) is type(other) and one == other)


def _is_plain_tree(value: Any) -> bool:
    """Return whether a value is a number or a text, or consists of dictionaries of them."""
    if isinstance(value, dict):
        return all(map(_is_plain_tree, value.values()))
    return isinstance(value, (bool, int, float, str))


def _same_contents(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if _is_array(one):
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, set):
        return bool(one == other)
    return all(map(is_equal, one, other))
