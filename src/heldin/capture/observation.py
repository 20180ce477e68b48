"""Observing training steps: `observe`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from heldin.errors import HeldinError

from .arguments import BatchDim
from .backward import attach, detach
from .collector import COORDINATES, Collector, Estimator
from .moments import Moments

__all__ = ["COORDINATES", "BatchDim", "Estimator", "Observation", "observe"]

T = TypeVar("T")


class Observation(Mapping[str, Moments]):
    """The moments of every observed parameter, by name, as `heldin.observe` yields them.

    The moments of all backward passes in the block add up, except those of passes whose gradients
    were set to None or zero before an optimiser has used them. Frozen and unused parameters are
    absent.

    >>> import heldin, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> with heldin.observe(model) as seen:
    ...     model(torch.randn(8, 3)).sum().backward()
    >>> sorted(seen), seen.count
    (['bias', 'weight'], 8)
    >>> seen["bias"].total
    tensor([8.])
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._forgotten: weakref.finalize[..., Any] | None = None

    # -- the mapping; two observations are never equal

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Moments:
        return self._collector.moments(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._collector.sums)

    def __len__(self) -> int:
        return len(self._collector.sums)

    def __repr__(self) -> str:
        return f"<heldin.Observation of {len(self)} parameters, {self.count} samples>"

    @property
    def count(self) -> int:
        """Number of samples (of micro-batches for the "microbatch" estimator)."""
        return self._collector.count

    @property
    def estimator(self) -> Estimator:
        """The estimator: "exact", "sampled" or "microbatch"."""
        return self._collector.estimator

    def clear(self, redraw: bool = True) -> None:
        """Reset the sums and drop calls without a backward pass; cached plans are kept.

        Args:
            redraw: whether the sampled estimator draws other coordinates for the next step.
        """
        self._collector.clear(redraw)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function as if it were the model's forward pass, and return its result.

        For training steps that do not go through the model's `forward`. The number of samples is
        read from the tensors among the arguments.
        """
        return self._collector.call(function, *args, **kwargs)

    # -- opening and closing

    def __enter__(self) -> Observation:
        if self._collector.closed or self._collector.watching:
            raise HeldinError("heldin.observe: a block can be entered only once; call it again")
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def resume(self) -> None:
        """Resume observing after `pause`."""
        if not self._collector.closed:
            attach(self._collector)
            if self._forgotten is None:  # close the collector when this object is garbage-collected
                self._forgotten = weakref.finalize(self, _close, self._collector)

    def pause(self) -> None:
        """Remove all hooks until `resume`; sums and cached plans are kept."""
        detach(self._collector)

    def close(self) -> None:
        """Stop observing and release the model. The moments remain available."""
        _close(self._collector)


def _close(collector: Collector) -> None:
    detach(collector)
    collector.close()


def observe(
    model: nn.Module,
    *,
    batch_dim: BatchDim = 0,
    parameters: Callable[[str], bool] | None = None,
    estimator: Estimator = "exact",
    coordinates: int = COORDINATES,
    seed: int = 0,
) -> Observation:
    """Observe the per-sample gradient contributions of a model's parameters in a `with` block.

    Args:
        model: any eager PyTorch model. It is neither wrapped nor changed.
        batch_dim: the batch dimension of the model's inputs. If inputs differ, a mapping from
            argument names or positions to their batch dimension (default 0). None marks an
            argument that is not a batch, "owner" a vector with the sample number of each row, as
            in batches of graphs.
        parameters: which parameters to observe, by name (default: all).
        estimator: "exact" observes every coordinate of every parameter. "sampled" observes a
            random block of coordinates of each parameter, drawn again after every `clear`, at a
            fraction of the cost; its moments have the shape of the block. After the first `clear`
            it observes 32 parameters per draw, in turn. "microbatch" treats the gradient of each
            backward pass as one sample, for models that cannot be traced (compiled ones, for
            instance).
        coordinates: number of coordinates of each parameter that the sampled estimator observes;
            smaller parameters are exact.
        seed: seed of the sampled blocks; the global random state is never used.

    >>> import heldin, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
    >>> with heldin.observe(model) as seen:
    ...     torch.nn.functional.mse_loss(model(x), y).backward()
    >>> seen
    <heldin.Observation of 2 parameters, 8 samples>
    >>> torch.allclose(seen["weight"].total, model.weight.grad)
    True
    """
    return Observation(Collector(model, batch_dim, parameters, estimator, coordinates, seed))
