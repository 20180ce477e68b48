"""The names of a model's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from heldin.errors import NotObservable

__all__ = ["Names"]


class Names:
    """The names of a model's parameters, read again when the model has new parameters.

    Args:
        model: the model.
        selects: which parameters are observed, by name (None: all).
        real: refuse complex parameters.
    """

    def __init__(
        self, model: nn.Module, selects: Callable[[str], bool] | None, real: bool = False
    ) -> None:
        self.by_id: dict[int, str] = {}  # of the observed parameters
        self.parameters: list[Tensor] = []  # all of the model
        self.order: dict[str, int] = {}  # position in the model, by name, of the observed ones
        self._model: nn.Module | None = model
        self._selects, self._real = selects, real
        self._observed: list[tuple[str, Tensor]] = []
        self._alive: dict[int, weakref.ref[Tensor]] = {}  # because Python reuses ids
        self._gathered: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # unsharded parameters
        self._find()

    def for_leaves(self, leaves: Iterable[Tensor]) -> dict[int, str]:
        """Return the names by id, updated if a leaf is not known yet."""
        alive = self._alive
        for leaf in leaves:
            reference = alive.get(id(leaf))
            if reference is None or reference() is not leaf:
                self._find()
                break
        return self.by_id

    def trained(self) -> list[str]:
        """List the observed parameters that require a gradient, in the model's order."""
        return [name for name, p in self._observed if p.requires_grad]

    def _find(self) -> None:
        """Read the names from the model. Tables are replaced whole, as other threads read them."""
        if self._model is None:  # closed by another thread during a pass
            return
        named: list[tuple[str, Tensor]] = list(self._model.named_parameters())
        observed = [(n, p) for n, p in named if self._selects is None or self._selects(n)]
        for name, p in observed:
            if self._real and p.is_complex() and p.requires_grad:
                raise NotObservable(
                    f"parameter {name!r} is complex, so its contributions do not have its shape. "
                    "Store it as a real parameter of shape (..., 2) and use torch.view_as_complex "
                    "in forward(), or exclude it with parameters=..."
                )
        alive = [(name, reference()) for reference, name in self._gathered.values()]
        gathered = [(name, p) for name, p in alive if p is not None]
        self.parameters = [p for _, p in named]
        self.order = order = {name: i for i, (name, _) in enumerate(observed)}
        self._observed = observed
        self._alive = {id(p): weakref.ref(p) for _, p in [*named, *gathered]}
        self.by_id = {id(p): name for name, p in [*observed, *gathered] if name in order}

    def gathered(self, parameter: Tensor, name: str) -> None:
        """Record the name of a sharded parameter that was gathered for a forward pass."""
        key = id(parameter)
        if key not in self._gathered or self._gathered[key][0]() is not parameter:
            self._gathered[key] = (weakref.ref(parameter), name)
            self._alive[key] = weakref.ref(parameter)
            if name in self.order:
                self.by_id[key] = name

    def forget(self) -> None:
        self._model = None
        self.by_id, self._alive, self._gathered = {}, {}, {}
        self.parameters, self._observed = [], []
