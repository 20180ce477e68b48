"""K copies of a model trained at once, each on its own rows of the same minibatches.

The copies' weights lie in one flat vector per parameter group, tensor after tensor, each tensor as
a contiguous (K, ...) block. An optimiser that works element by element then takes one step for all
of them with the numbers that K separate ones would give.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.errors import HeldinError
from heldin.shadows.engines import CannotStack, Engine, engine_for
from heldin.shadows.exchange import group_settings
from heldin.shadows.losses import PerRowLoss
from heldin.state.schema import check_schema

__all__ = ["ELEMENTWISE", "Stack", "like_optimizer", "take_step"]

# Their update of a weight depends on that weight's own gradient, state and step count only. Others
# (norms over a tensor, factored moments, line searches) get one instance for each copy.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)

# They can take a step in one call on a processor, for which PyTorch does not do so by default.
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)

# Product of weights and rows of a batch above which a single copy is run on its own rows only.
WORTHWHILE = 1 << 20


class Stack:
    """K copies of a model with their optimiser."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        copies: int,
        inputs: Sequence[Tensor],
        engine: Engine = "auto",
    ) -> None:
        self.copies = copies
        self.blocks: dict[str, Tensor] = {}  # (K, ...) leaves that share the flat vectors' memory
        self.grads: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}  # (K, ...) statistics, where copies have their own
        # of each group, by flat vector: the tensors in it
        self._spans: list[dict[nn.Parameter, list[tuple[str, slice]]]] = []
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._gather(optimizer, {id(p): n for n, p in parameters.items()})
        if not self.blocks:
            raise HeldinError(
                "optimizer: none of its parameters is a trainable parameter of the model; give the "
                "optimiser that trains this model"
            )
        self.size = sum(block[0].numel() for block in self.blocks.values())
        settings = group_settings(optimizer)
        if type(optimizer) in ELEMENTWISE:
            groups = [
                {"params": [*spans], **setting}
                for spans, setting in zip(self._spans, settings, strict=True)
            ]
            self.optimizers = [like_optimizer(optimizer, groups)]
            if any(optimizer.state.values()):
                self._copy_joint_state(optimizer, parameters)
        else:
            self.optimizers = []
            for number in range(copies):
                single, places = self._single(optimizer, settings, number)
                for weight, name, _, _ in places:
                    if state := optimizer.state.get(parameters[name]):
                        single.state[weight] = copy.deepcopy(state)
                self.optimizers.append(single)
        self.engine, self.forward = engine_for(model, self, inputs, engine)
        if self.buffers and isinstance(optimizer, torch.optim.LBFGS):
            raise CannotStack("each line search would change the statistics of all copies")

    def _gather(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Put copies of all trained parameters into flat vectors."""
        for group in optimizer.param_groups:
            self._spans.append({})
            alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for p in group["params"]:
                if id(p) in names:
                    alike.setdefault((p.dtype, p.device), []).append(p)
            for params in alike.values():
                flat = nn.Parameter(
                    torch.cat([p.detach().expand(self.copies, *p.shape).flatten() for p in params])
                )
                flat.grad = torch.zeros_like(flat)
                spans, start = self._spans[-1].setdefault(flat, []), 0
                for p in params:
                    span = slice(start, start + self.copies * p.numel())
                    name, shape, start = names[id(p)], (self.copies, *p.shape), span.stop
                    self.blocks[name] = flat.detach()[span].view(shape).requires_grad_()
                    self.grads[name] = flat.grad[span].view(shape)
                    spans.append((name, span))

    def _single(
        self, optimizer: Optimizer, settings: Sequence[Mapping[str, Any]], number: int
    ) -> tuple[Optimizer, list[tuple[nn.Parameter, str, nn.Parameter, slice]]]:
        """Return an optimiser of one copy, and for each of its weights the name and the span."""
        groups, places = [], []
        for flats, setting in zip(self._spans, settings, strict=True):
            params = []
            for flat, spans in flats.items():
                for name, span in spans:
                    weight = nn.Parameter(self.blocks[name].detach()[number])
                    weight.grad = self.grads[name][number]
                    params.append(weight)
                    places.append((weight, name, flat, span))
            groups.append({"params": params, **setting})
        return like_optimizer(optimizer, groups), places

    def _copy_joint_state(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """Copy the state of an optimiser that has already stepped."""
        for flat, spans in (
            (flat, spans) for group in self._spans for flat, spans in group.items()
        ):
            params = [parameters[name] for name, _ in spans]
            states = [(p, optimizer.state.get(p, {})) for p in params]
            for key in {key for _, state in states for key in state}:
                values = [(p, state[key]) for p, state in states if key in state]
                one_each = isinstance(values[0][1], Tensor) and all(
                    value.shape == p.shape for p, value in values
                )
                state = self.optimizers[0].state[flat]
                if one_each and key not in ("step", "eta", "mu", "mu_product"):
                    parts = [state.get(key, torch.zeros_like(p)) for p, state in states]
                    state[key] = torch.cat(
                        [v.expand(self.copies, *v.shape).flatten() for v in parts]
                    )
                else:
                    state[key] = copy.deepcopy(values[0][1])

    def advance(
        self,
        inputs: Sequence[Tensor],
        targets: Tensor,
        keep: Tensor,
        loss: PerRowLoss,
        settings: Sequence[Mapping[str, Any]],
        weights: Tensor | None = None,
        clip: float | None = None,
        own_rows: bool = False,
    ) -> None:
        """One optimiser step of every copy on the rows of the minibatch that it keeps.

        keep: (K, b), the rows that a copy keeps; weights: (b,) of the rows; clip: largest norm of
        the gradient of a copy; own_rows: whether to run every copy on the rows that it keeps only,
        which is worth it for few.
        """
        searches = isinstance(self.optimizers[0], torch.optim.LBFGS)
        own_rows |= self.copies == 1 and self.size * keep.numel() > WORTHWHILE
        most = int(keep.sum(1).max()) if own_rows else 0
        own_rows = most > 0 and not searches
        if own_rows:
            places = keep.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
            inputs, targets = [x[places] for x in inputs], targets[places]
            weights = None if weights is None else weights[places]
            keep = keep.gather(1, places)

        def gradient() -> Tensor:
            outputs = self.forward(inputs, keep, shared=not own_rows, train=True)
            by_output = loss.gradient(outputs, targets, keep, weights, own_rows)
            self.forward.backward(by_output)
            if clip is not None:
                self._clip(clip)
            return outputs

        stepping = self._stepping(keep)
        for made in self.optimizers:
            for group, setting in zip(made.param_groups, settings, strict=True):
                group.update(setting)
        if searches:
            self._searched(gradient, targets, keep, loss)
            return
        gradient()
        for number, made in enumerate(self.optimizers):
            if stepping is None or stepping[number]:
                take_step(made)

    def _stepping(self, keep: Tensor) -> list[bool] | None:
        """Which copies take a step: those that keep a row; None if all do.

        A copy without a row takes none: its weights, moments and step count stay as they are. One
        optimiser for all copies has one step count, so each gets its own from then on. A batch
        normalisation in training needs two rows.
        """
        stepping = (keep.sum(1) >= self.forward.least_rows).tolist()
        if len(stepping) == 1 and self.copies > 1:
            stepping = stepping * self.copies
        if all(stepping):
            return None
        self._split()
        return stepping

    def _split(self) -> None:
        """Give every copy a separate optimiser, with its part of the state, if it has none."""
        if len(self.optimizers) == self.copies:
            return
        (joint,) = self.optimizers
        settings = group_settings(joint)
        self.optimizers = []
        for number in range(self.copies):
            single, places = self._single(joint, settings, number)
            for weight, _, flat, span in places:
                for key, value in joint.state.get(flat, {}).items():
                    whole = isinstance(value, Tensor) and value.shape == flat.shape
                    if whole and flat.dim():
                        part = value[span].view(self.copies, *weight.shape)[number].clone()
                    else:
                        part = copy.deepcopy(value)
                    single.state[weight][key] = part
            self.optimizers.append(single)

    def state_of(self, number: int) -> dict[str, Any]:
        """Return copies of the weights and of the optimiser's state of one copy."""
        before = self.optimizers
        self._split()
        single, self.optimizers = self.optimizers[number], before
        return {
            "weights": {n: value.clone() for n, value in self.copy_of(number).items()},
            "optimizer": copy.deepcopy(single.state_dict()["state"]),
        }

    def load_state_of(self, number: int, state: Mapping[str, Any]) -> None:
        """Set one copy to a state; the others stay as they are."""
        self._split()
        for name, place in self.copy_of(number).items():
            place.copy_(state["weights"][name])
        made = self.optimizers[number]
        made.load_state_dict({**made.state_dict(), "state": copy.deepcopy(state["optimizer"])})

    def _clip(self, largest: float) -> None:
        """Clip the gradients of each copy as `clip_grad_norm_` does."""
        squares = [grad.flatten(1).square().sum(1) for grad in self.grads.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        factor = (largest / (norms + 1e-6)).clamp(max=1.0)
        for grad in self.grads.values():
            grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))

    def _searched(
        self, gradient: Callable[[], Tensor], targets: Tensor, keep: Tensor, loss: PerRowLoss
    ) -> None:
        """Line searches evaluate the loss themselves, each copy on its own."""
        for number, made in enumerate(self.optimizers):
            kept = keep[number]
            if not bool(kept.any()):
                continue

            def closure(number: int = number, kept: Tensor = kept) -> Tensor:
                outputs = gradient()[number]
                return loss.loss_fn(outputs[kept], targets[kept]).detach()

            made.step(closure)  # type: ignore[arg-type]

    def evaluate(self, inputs: Sequence[Tensor]) -> Tensor:
        """(K, b, ...) outputs in evaluation mode, of each copy on its own rows (K, b, ...)."""
        with torch.no_grad():
            return self.forward(inputs)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """(K, ...) weights and statistics of all copies, by name."""
        return {name: block.detach() for name, block in (self.blocks | self.buffers).items()}

    def copy_of(self, number: int) -> dict[str, Tensor]:
        return {name: block[number] for name, block in self.tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": {name: block.clone() for name, block in self.tensors.items()},
            "optimizers": [copy.deepcopy(o.state_dict()) for o in self.optimizers],
        }

    def check_state(self, state: Mapping[str, Any], copies: int) -> None:
        """Refuse, before anything is changed, the state of another number of copies."""
        weights = {n: b.new_empty(copies, *b.shape[1:]) for n, b in self.tensors.items()}
        check_schema(state, {"weights": weights, "optimizers": [dict]}, "['stack']")
        kinds = (Tensor, float, bool, list, None)
        for saved in state["optimizers"]:
            check_schema(
                saved, {"state": {int: {str: kinds}}, "param_groups": [dict]}, "['optimizers']"
            )
        if copies != self.copies or len(state["optimizers"]) != len(self.optimizers):
            return
        for made, saved in zip(self.optimizers, state["optimizers"], strict=True):
            params = [p for group in made.param_groups for p in group["params"]]
            for number, values in saved["state"].items():
                for name, value in values.items():
                    if (
                        isinstance(value, Tensor)
                        and value.dim()
                        and value.shape != params[number].shape
                    ):
                        raise ValueError(f"{name!r} of an optimiser is {tuple(value.shape)}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, block in self.tensors.items():
                block.copy_(state["weights"][name])
        if len(state["optimizers"]) > len(self.optimizers):
            self._split()
        for made, saved in zip(self.optimizers, state["optimizers"], strict=True):
            made.load_state_dict(saved)


def like_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Make a new optimiser of the same kind over other parameters."""
    kind = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    options = {k: v for k, v in optimizer.defaults.items() if k in known}
    try:
        made = kind(groups, **options)
    except Exception as error:
        raise HeldinError(
            f"optimizer: another {kind.__name__} for the shadow models could not be made from its "
            f"defaults ({error}). Optimisers whose constructor takes the parameters and the "
            "options in `defaults` work, all of torch.optim among them; "
            "rule='leave-one-out' needs no second optimiser"
        ) from error
    return made


def take_step(optimizer: Optimizer) -> None:
    """Take a step of a shadow's optimiser, in one call where the user left that open."""
    for group in optimizer.param_groups if type(optimizer) in FUSED else ():
        chosen = group["fused"] is not None or group["foreach"] is not None
        if not chosen and not group["differentiable"] and not group.get("capturable"):
            group["fused"] = all(_fusable(p) for p in group["params"] if p.grad is not None)
    optimizer.step()


def _fusable(p: Tensor) -> bool:
    assert p.grad is not None
    return p.is_floating_point() and p.is_cpu and p.grad.layout == torch.strided
