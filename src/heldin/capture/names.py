"""The names of a model's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from heldin.errors import NotObservable

__all__ = ["Names"]


class Names:
    """The names of a model's parameters, by id; looked up again when there are new parameters.

    Attributes:
        by_id: of those that are observed.
        parameters: all of the model's.
        order: the names of those that are observed, with their place in the model.

    Args:
        model: whose parameters they are.
        selects: which are observed, by name (None: all).
        real: refuse complex ones.
    """

    def __init__(
        self, model: nn.Module, selects: Callable[[str], bool] | None, real: bool = False
    ) -> None:
        self.by_id: dict[int, str] = {}
        self.parameters: list[Tensor] = []
        self.order: dict[str, int] = {}
        self._model: nn.Module | None = model
        self._named: list[tuple[str, Tensor]] = []
        self._selects, self._real = selects, real
        self._alive: dict[int, weakref.ref[Tensor]] = {}  # an id may be used again
        self._gathered: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # of sharded parameters
        self._find()

    def of(self, leaves: Iterable[Tensor]) -> dict[int, str]:
        """The names by id, with those of all these leaves that are parameters."""
        alive = self._alive
        for leaf in leaves:
            known = alive.get(id(leaf))
            if known is None or known() is not leaf:
                self._find()
                break
        return self.by_id

    def trained(self) -> list[str]:
        """Those that are observed and require a gradient, in the model's order."""
        return [name for name, p in self._named if p.requires_grad]

    def _find(self) -> None:
        """Read the names again; other threads read them, so that tables are put in place whole."""
        if self._model is None:  # closed by another thread, in the middle of a pass
            return
        named = list(self._model.named_parameters())
        self.parameters = [p for _, p in named]
        chosen = [n for n, _ in named if self._selects is None or self._selects(n)]
        self.order = {name: i for i, name in enumerate(chosen)}
        self._named = [(n, p) for n, p in named if n in self.order]
        gathered = [
            (parameter, name)
            for ref, name in self._gathered.values()
            if (parameter := ref()) is not None
        ]
        by_id = {id(p): name for name, p in named if name in self.order}
        by_id |= {
            id(p): name for p, name in gathered if self._selects is None or self._selects(name)
        }
        for name, p in named:
            if self._real and p.is_complex() and p.requires_grad and id(p) in by_id:
                raise NotObservable(
                    f"parameter {name!r} is complex, and single entries of it cannot be looked at. "
                    "Keep it as a real one of shape (..., 2) and use torch.view_as_complex in "
                    "forward(), or leave it out with parameters=..."
                )
        everyone = [p for _, p in named] + [p for p, _ in gathered]
        self._alive, self.by_id = {id(p): weakref.ref(p) for p in everyone}, by_id

    def gathered(self, parameter: Tensor, name: str) -> None:
        """A sharded parameter was gathered for a forward pass."""
        known = self._gathered.get(id(parameter))
        if known is None or known[0]() is not parameter:
            self._gathered[id(parameter)] = (weakref.ref(parameter), name)
            self._add(parameter, name)

    def _add(self, parameter: Tensor, name: str) -> None:
        self._alive[id(parameter)] = weakref.ref(parameter)
        if self._selects is None or self._selects(name):
            self.by_id[id(parameter)] = name

    def forget(self) -> None:
        """Let go of the model."""
        self._model = None
        self.by_id, self._alive, self._gathered = {}, {}, {}
        self.parameters, self._named = [], []
