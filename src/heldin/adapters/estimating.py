"""What the adapters' `AutoStopping` share: the rule of a run, its rows, its state and its end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from heldin.errors import HeldinError, HeldinWarning, more
from heldin.rules.estimated.base import PathStopping
from heldin.rules.estimated.choose import stopping as choose
from heldin.rules.estimated.folds import FoldStopping
from heldin.rules.estimated.order import RowOrder
from heldin.rules.estimated.separate import BatchLoss, Clip
from heldin.rules.estimated.shadows import ShadowModels
from heldin.rules.estimated.source import same_rows

__all__ = [
    "OPTIONS",
    "EstimatingSession",
    "only_optimizer",
    "own_loader",
    "refuse_processes",
    "warn_of_seen_rows",
]

# What every AutoStopping takes; the rest of its arguments is the framework's.
OPTIONS = (
    "rule", "budget", "groups", "restore", "memory", "stratify", "eval_data", "eval_loss",
    "average", "grid", "patience", "engine", "seed",
)  # fmt: skip
RULES = ("auto", "folds", "shadow")
OURS = (
    "rule",
    "budget",
    "memory",
    "restore",
    "eval_data",
    "eval_loss",
)  # the others are the rule's

Prepare = Callable[[Any], Any]


class EstimatingSession:
    """The estimating rule of a training run that a framework begins, feeds and ends.

    Args:
        owner: the framework's class, for messages.
        options: its arguments, of which those in `OPTIONS` are taken.

    Attributes:
        stopping: the rule of the last run, with its history.

    >>> session = EstimatingSession("AutoStopping", {"rule": "folds", "restore": True})
    >>> try:
    ...     EstimatingSession("AutoStopping", {"rule": "leave-one-out"})
    ... except HeldinError as error:
    ...     print(error)
    AutoStopping: rule must be 'auto', 'folds' or 'shadow' in a framework, got 'leave-one-out'
    """

    def __init__(self, owner: str, options: Mapping[str, Any]) -> None:
        self.owner = owner
        self.options = {name: options[name] for name in OPTIONS if name in options}
        self.stopping: PathStopping | None = None
        self._model: nn.Module | None = None
        self._order: RowOrder | None = None
        self._first: DataLoader[Any] | None = None  # the loader that was followed first
        self._state: Mapping[str, Any] = {}
        self._last: dict[str, Tensor] = {}
        self._final: dict[str, Any] = {}  # state of the rule when its run ended
        self._check()

    def _check(self) -> None:
        """Refuse at once what the rule would refuse later, lengths of `groups` aside."""
        owner, rule = self.owner, self.options.get("rule", "auto")
        if rule not in RULES:
            raise HeldinError(
                f"{owner}: rule must be 'auto', 'folds' or 'shadow' in a framework, got {rule!r}"
            )
        for name in ("budget", "memory"):
            value = self.options.get(name)
            if value is None:
                continue
            if rule != "auto":
                raise HeldinError(
                    f"{owner}: {name} is for rule='auto', which chooses by it, and would be "
                    f"ignored with {rule!r}; leave it out"
                )
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise HeldinError(f"{owner}: {name} must be a number above 0, got {value!r}")
        if not isinstance(self.options.get("restore", True), bool):
            raise HeldinError(
                f"{owner}: restore must be True or False, got {self.options['restore']!r}"
            )
        eval_loss = self.options.get("eval_loss")
        if eval_loss is not None and not callable(eval_loss):
            raise HeldinError(
                f"{owner}: eval_loss must be a function of model and batch, got {eval_loss!r}"
            )
        if rule == "shadow" and self.options.get("stratify") is not None:
            raise HeldinError(f"{owner}: stratify is for rule='folds' or 'auto'")
        known = ("average", "grid", "patience", "engine", "seed")
        given = {name: self.options[name] for name in known if name in self.options}
        model = nn.utils.skip_init(nn.Linear, 1, 1)  # draws no random number
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        try:
            FoldStopping(
                model,
                torch.optim.SGD(model.parameters(), lr=0.0),
                data=[torch.zeros(5, 1), torch.zeros(5, 1)],
                batch_loss=lambda model, batch: model(batch[0]).mean(),
                process_group=None,
                **{k: v for k, v in given.items() if not (k == "average" and v is None)},
            ).close()
        except HeldinError as error:
            raise HeldinError(str(error).replace("FoldStopping", owner)) from None

    # -- the run

    def follow(self, loader: Any) -> None:
        """Write down the row numbers that a loader hands out from now on."""
        inner = own_loader(self.owner, loader)
        if self._first is not None and not same_rows(self._first, inner):
            raise HeldinError(
                f"{self.owner}: the loader was replaced by one over other rows, and shadows hold "
                "out those of the first. Keep one dataset in a run (a sampler may choose among its "
                "rows), or use EvidenceStopping"
            )
        if self._order is None:
            self._order, self._first = RowOrder(inner), inner
        else:
            self._order.follow(inner)

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: BatchLoss,
        rows: DataLoader[Any],
        *,
        prepare: Prepare | None = None,
        eval_loss: BatchLoss | None = None,
        clip: Clip | None = None,
        resumed: bool = False,
        engine: str | None = None,
        together: bool = False,
        in_grad: bool = True,
    ) -> PathStopping:
        """Make the rule, from the state that was loaded last.

        Args:
            model: that is trained.
            optimizer: that trains it.
            loss: of a batch that was prepared.
            rows: knows dataset and collate function. It is not iterated over.
            prepare: what the framework does with a batch before the model sees it.
            eval_loss: in place of loss, for rows that are held out.
            clip: how the framework clips gradients.
            resumed: whether the model was trained before, in the same run.
            engine: in place of engine="auto".
            together: whether the framework may train the model in several processes.
            in_grad: whether the framework accumulates gradients in `.grad`.
        """
        self.close()
        if not together:
            refuse_processes(self.owner)
        if resumed and not self._state:
            self.end()
            raise HeldinError(
                f"{self.owner}: the run goes on, but the state of its shadows is not there. New "
                "ones would start from a model that has seen the rows they hold out, and estimate "
                f"too low a loss. Resume from a checkpoint of a run with {self.owner}, train from "
                "the beginning, or use EvidenceStopping"
            )
        options = {k: v for k, v in self.options.items() if k not in OURS}
        for name in ("average", "stratify", "groups"):
            if options.get(name) is None:
                options.pop(name, None)  # the rule's own
        if engine is not None and options.get("engine", "auto") == "auto":
            options["engine"] = engine
        view = self.options.get("eval_data")
        if view is not None:
            options["eval_data"] = _unseen(view, rows, prepare)
        if self.options.get("rule", "auto") == "auto":
            options["budget"] = self.options.get("budget") or 6.0
            options["memory"] = self.options.get("memory") or 2**30
        try:
            made = choose(
                self.options.get("rule", "auto"),
                model,
                optimizer,
                data=_unseen(rows, rows, prepare),
                batch_loss=loss,
                eval_loss=eval_loss or self.options.get("eval_loss"),
                clip=clip,
                **options,
            )
        except HeldinError:
            self.end()
            raise
        if isinstance(made, ShadowModels):
            made.count_passes(in_grad)
        self.stopping, self._model = made, model
        state, self._state, self._last = self._state, {}, {}
        if state:
            try:
                made.load_state_dict(state["rule"])
                self._put_back(state["last"])
            except BaseException:
                self.end()
                raise
        return made

    def add(self, batch: Any, given: Any = None, rows: Sequence[int] | None = None) -> None:
        """A batch was trained on, whether or not the optimiser has stepped.

        Args:
            batch: as the model saw it.
            given: the same as the followed loader handed it out (default: batch).
            rows: its row numbers, where no loader is followed.
        """
        if not isinstance(self.stopping, ShadowModels) or not self.running:
            return
        if not self.stopping.trained_on():  # the step has passed over it, because of a nan say
            return
        index: Any = rows
        if rows is None:
            assert self._order is not None
            index = self._order.rows_of(batch if given is None else given)
        self.stopping.add_batch(batch, index)

    def step(self) -> bool:
        """Follow the optimiser's step, if it has taken one; True if training should stop."""
        if self.stopping is None or not self.running:
            return False
        return self.stopping.step() if self.stopping.pending else self.stopping.should_stop

    @property
    def running(self) -> bool:
        """Whether a run is under way."""
        return self._model is not None

    @property
    def state_waits(self) -> bool:
        """Whether a state was loaded for the next run."""
        return bool(self._state)

    def metrics(self) -> dict[str, float]:
        """What to log."""
        return {} if self.stopping is None else self.stopping.metrics()

    def finish(self) -> None:
        """The run is over: put the chosen weights into the model, if so asked, and let go."""
        stopping, model = self.stopping, self._model
        if stopping is not None and model is not None:
            if self.options.get("restore", True) and len(stopping.history):
                self._last = {name: value.detach().clone() for name, value in _weights(model)}
                stopping.restore()
        self.end()

    def end(self) -> None:
        """Follow no more, whichever way the run ended. What was found stays readable."""
        self.close()
        if self._order is not None:
            self._order.close()
        self._order = self._first = None

    def close(self) -> None:
        """Let go of model and optimiser; loaders are still followed."""
        if self.stopping is not None:
            if self._model is not None:
                self._final = self.stopping.state_dict()  # a later fit may go on from here
            self.stopping.close()
        self._model = None

    def _put_back(self, last: Mapping[str, Tensor]) -> None:
        """The weights at which training ended, in place of those that were restored then."""
        assert self._model is not None
        with torch.no_grad():
            for name, value in _weights(self._model):
                if name in last:
                    value.copy_(last[name])

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, or the one that the next begins with."""
        if self.stopping is not None and not self._state:
            rule = self.stopping.state_dict() if self.running else self._final
            return {"rule": rule, "last": self._last}
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: now if a run is under way, else when the next one begins."""
        if state and {*state} != {"rule", "last"}:
            raise HeldinError(
                f"{self.owner}.load_state_dict: this is not a state of {self.owner}; pass what its "
                "state_dict() returned"
            )
        if self.stopping is not None and self.running and state:
            self.stopping.load_state_dict(state["rule"])
            self._put_back(state["last"])
        else:
            self._state = dict(state)


def several_processes() -> bool:
    """Whether this is one of several processes."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return together and torch.distributed.get_world_size() > 1


def refuse_processes(owner: str) -> None:
    """Refuse a run of several processes."""
    if several_processes():
        raise HeldinError(
            f"{owner}: several processes train this model, and each would estimate by its own "
            "rows. Train in one process, or use EvidenceStopping, whose processes decide together"
        )


def warn_of_seen_rows(owner: str, instead: str) -> None:
    """A fit begins anew with a model that was trained on the same rows before."""
    warnings.warn(
        f"{owner}: the shadows of this fit start from a model that an earlier one has trained, "
        "perhaps on the rows they hold out; their estimate would then be too low. Train in one "
        f"fit, {instead} " + more("a-second-fit"),
        HeldinWarning,
        stacklevel=3,
    )


def only_optimizer(owner: str, optimizers: Sequence[Any]) -> Any:
    """The one optimiser of a run; several are refused."""
    if len(optimizers) != 1:
        raise HeldinError(
            f"{owner}: the model is trained by {len(optimizers)} optimisers, and shadows follow "
            "one. Put the parameters into groups of one optimiser, or use EvidenceStopping"
        )
    return optimizers[0]


def own_loader(owner: str, loader: Any) -> DataLoader[Any]:
    """The DataLoader itself, if its rows have numbers."""
    inner = getattr(loader, "base_dataloader", loader)  # accelerate wraps the real one
    if type(loader).__name__ == "DataLoaderDispatcher" and several_processes():
        raise HeldinError(
            f"{owner}: with dispatch_batches=True one process draws the rows of all, which do not "
            "get to know their numbers; use dispatch_batches=False"
        )
    if not isinstance(inner, DataLoader):
        raise HeldinError(
            f"{owner}: the training data must be a torch.utils.data.DataLoader, whose sampler "
            f"tells the numbers of the rows, got {type(inner).__name__}; or use EvidenceStopping, "
            "which needs none"
        )
    if isinstance(inner.dataset, IterableDataset):
        raise HeldinError(
            f"{owner}: an IterableDataset has no row numbers, so that no rows can be held out; use "
            "a map-style Dataset (__getitem__ and __len__), or EvidenceStopping, which needs none"
        )
    if inner.batch_sampler is None:
        raise HeldinError(
            f"{owner}: a DataLoader with batch_size=None hands out what the dataset has batched "
            "itself; give it a batch_size, or a batch_sampler and a collate_fn"
        )
    return inner


class _Prepared:
    """A collate function, and what the framework does with the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any], prepare: Prepare) -> None:
        self.collate, self.prepare = collate, prepare

    def __call__(self, samples: list[Any]) -> Any:
        return self.prepare(self.collate(samples))


def _unseen(data: Any, rows: DataLoader[Any], prepare: Prepare | None) -> DataLoader[Any]:
    """A loader that nobody iterates over, for the dataset and the collate function it knows."""
    inner = getattr(data, "base_dataloader", data)
    loader = inner if isinstance(inner, DataLoader) else rows
    dataset = loader.dataset if loader is inner else data
    collate = loader.collate_fn
    return DataLoader(
        dataset,
        batch_size=2,
        collate_fn=collate if prepare is None else _Prepared(collate, prepare),
    )


def _weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What training changes."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [*trained, *model.named_buffers()]
