"""Random generators that the user's code keeps, and which code is the user's."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "cell_contents",
    "generator_state",
    "generators_in",
    "is_generator",
    "is_object_of_user",
    "is_of_user",
    "left_alone",
    "names_in",
    "set_generator",
]

DEPTH = 12  # nested objects that are searched for generators
MOST = 5000  # objects that are searched
PLAIN = (str, int, float, type(None))
LONG = 256  # entries of a container that are searched
NAMESPACES = {"types.SimpleNamespace", "argparse.Namespace"}  # plain data of the user


# --- generators ------------------------------------------------------------------------------


def is_generator(value: Any) -> bool:
    """Return whether an object draws random numbers: torch's, NumPy's or Python's."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    return type(value).__module__.startswith("numpy.random") and (
        hasattr(value, "bit_generator") or hasattr(value, "set_state")
    )


def generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state()


def set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator) or not hasattr(generator, "bit_generator"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = copy.deepcopy(state)


@functools.cache
def _global_generators() -> set[int]:
    """Return addresses of the generators that every random stream of heldin restores anyway."""
    return {id(torch.default_generator), id(getattr(random, "_inst", None))}


def generators_in(*owners: Any) -> list[Any]:
    """Return the generators that objects can reach, also through functions and their globals."""
    return list(_generators_in(owners, DEPTH, set(_global_generators())))


@contextmanager
def left_alone(generators: Sequence[Any]) -> Iterator[None]:
    """Restore generators afterwards."""
    before = [generator_state(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            set_generator(generator, state)


def _generators_in(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if depth == 0 or id(value) in seen or len(seen) > MOST or isinstance(value, PLAIN):
        return
    seen.add(id(value))
    if is_generator(value):
        yield value
        return
    for part in _parts(value):
        yield from _generators_in(part, depth - 1, seen)


def _parts(value: Any) -> Iterable[Any]:
    """Return what an object refers to, as far as generators may be there."""
    if isinstance(value, (Tensor, nn.Module, ModuleType, bytes)) or hasattr(value, "__array__"):
        return ()
    if isinstance(value, Mapping):
        return list(islice(value.values(), LONG))
    if isinstance(value, (list, tuple, set)):
        return list(islice(value, LONG))
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, FunctionType):
        return _parts_of_function(value) if is_of_user(value.__module__) else ()
    if isinstance(value, type):
        if not is_of_user(value.__module__):
            return ()
        parts = [getattr(part, "__func__", part) for part in vars(value).values()]
        return [*value.__bases__, *parts]
    return [type(value), *getattr(value, "__dict__", {}).values()]


def _parts_of_function(function: FunctionType) -> list[Any]:
    cells = [cell_contents(cell) for cell in function.__closure__ or ()]
    defaults = [function.__defaults__, function.__kwdefaults__, vars(function)]
    table = function.__globals__
    return [*cells, *defaults, *(table[name] for name in names_in(function) if name in table)]


# --- the user's code -------------------------------------------------------------------------


def names_in(function: FunctionType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function and in functions inside of it."""
    return _names_in_code(function.__code__)


@functools.lru_cache(maxsize=4096)
def _names_in_code(code: CodeType) -> tuple[str, ...]:
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_names_in_code(constant))
    return tuple(names)


def cell_contents(cell: Any, default: Any = None) -> Any:
    """Return what is in a cell of a closure; the default if it is not yet set."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


@functools.lru_cache(maxsize=4096)
def is_of_user(module: str | None) -> bool:
    """Return whether a module, by its name, is the user's own: not a library's."""
    if module is None:
        return True
    root = module.split(".")[0]
    if root == "__main__":
        return True
    if root in sys.stdlib_module_names or root in ("heldin", "torch", "numpy"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def is_object_of_user(value: Any) -> bool:
    """Return whether an object is of a class of the user's own code, or a plain namespace."""
    kind = type(value)
    return is_of_user(kind.__module__) or f"{kind.__module__}.{kind.__name__}" in NAMESPACES
