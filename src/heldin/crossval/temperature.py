"""A temperature for logits: fitted, cross-fitted, and moved into a model's last layer.

"Refine, then calibrate" (Berta, Holzmueller, Jordan, Bach 2025): a network is best at a step where
it is over-confident already, if its logits are divided by one temperature afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heldin.errors import HeldinError
from heldin.loop.hooks import after_calls
from heldin.state.schema import shown

__all__ = [
    "Calibrated",
    "calibrate",
    "cross_fitted",
    "fit_temperature",
    "scale_last_layer",
    "temperature_losses",
]

HOTTEST = 100.0  # largest temperature that is fitted
IGNORED = -100  # target of positions that do not count, as in torch.nn.CrossEntropyLoss
STEPS = 60  # most steps of Newton's method
LAST_STEP = 1e-5  # relative size of the last step; the error after it is about its square
FOLD_STEP = 0.1  # the same without a fold, which the losses depend on little
MOST_LINES = 20_000  # lines that a temperature is fitted on
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MOST_BESIDE = 6  # parameters beside the last layer, whose subsets are tried
LINEAR = (nn.Linear, nn.Bilinear, *CONVOLUTIONS, *TRANSPOSED)


def fit_temperature(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None, *, binary: bool | None = None
) -> float:
    """Return the temperature T >= 1 with the lowest mean log loss of `logits / T`.

    The log loss is convex in 1 / T. A network that is not confident enough keeps T = 1, because
    smaller temperatures hurt on fresh rows. T is at most 100.

    Args:
        logits: (n, classes) or (n, classes, ...); (n,) or (n, 1) for two classes; (n, labels) with
            targets of the same shape for labels that do not exclude each other. Rows whose loss is
            not finite do not count.
        targets: (n,) or (n, ...) numbers of classes (-100: does not count), probabilities (n,
            classes), or 0 and 1.
        weights: (n,) weights of the rows, not negative.
        binary: whether every logit stands for a class of its own (a sigmoid, not a softmax). None:
            so if targets are as many as logits and their rows do not all sum to 1.

    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    >>> targets = torch.tensor([0, 0, 1, 1])  # one of four is wrong: log(3) would be right, not 4
    >>> round(fit_temperature(logits, targets), 3)
    3.641
    >>> fit_temperature(logits / 4, targets)
    1.0
    """
    terms = _Terms(logits, targets, binary)
    return terms.temperature(_checked_weights(weights, terms.rows), 0.5)


def temperature_losses(
    logits: Tensor, targets: Tensor, temperature: float, *, binary: bool | None = None
) -> Tensor:
    """Return the (n,) log losses of the rows at `logits / temperature`.

    The loss of a row with several positions or labels is their mean. See `fit_temperature` for the
    arguments.

    >>> logits, targets = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])
    >>> temperature_losses(logits, targets, 2.0)
    tensor([0.3133, 1.3133], dtype=torch.float64)
    """
    return _Terms(logits, targets, binary).losses(1 / _checked_temperature(temperature))


def cross_fitted(
    logits: Tensor,
    targets: Tensor,
    folds: Tensor,
    weights: Tensor | None = None,
    *,
    binary: bool | None = None,
) -> tuple[float, Tensor]:
    """Return the temperature of all rows, and row losses that do not profit from its fit.

    The rows of each fold are scored with the temperature of the other folds. A single fold is cut
    into two halves, every second row in one of them.

    Args:
        logits, targets, weights, binary: see `fit_temperature`.
        folds: (n,) numbers of the rows' folds.

    Returns:
        The temperature fitted on all rows, and (n,) row losses.

    >>> logits = torch.tensor([[4.0, 0.0]] * 4)
    >>> temperature, losses = cross_fitted(
    ...     logits, torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1])
    ... )
    >>> round(temperature, 3)
    3.641
    >>> losses  # rows 0 and 1 at T = 100, rows 2 and 3 at T = 1
    tensor([0.6733, 0.6733, 0.0181, 4.0181], dtype=torch.float64)
    """
    fit = calibrate(logits, targets, folds, weights, binary=binary, last_step=0.0)
    return fit.temperature, fit.losses


class Calibrated(NamedTuple):
    """Logits with a temperature.

    Attributes:
        temperature: fitted on all rows.
        curve: (n,) losses of the rows at it.
        row_temperatures: (n,) fitted on the other folds.
        losses: (n,) losses of the rows at these.
    """

    temperature: float
    curve: Tensor
    row_temperatures: Tensor
    losses: Tensor


def calibrate(
    logits: Tensor,
    targets: Tensor,
    folds: Tensor,
    weights: Tensor | None = None,
    *,
    binary: bool | None = None,
    start: float = 2.0,
    last_step: float = FOLD_STEP,
) -> Calibrated:
    """Return what `cross_fitted` returns, and more.

    Args:
        logits, targets, folds, weights, binary: see `cross_fitted`.
        start: a temperature to start from.
        last_step: relative size up to which one step of Newton's method is enough without a fold.
    """
    terms = _Terms(logits, targets, binary)
    row_weights = _checked_weights(weights, terms.rows)
    numbers = torch.as_tensor(folds).detach().cpu()
    if numbers.shape != (terms.rows,):
        raise HeldinError(
            f"folds has shape {tuple(numbers.shape)}; give the fold of each of {terms.rows} rows"
        )
    names, numbers = torch.unique(numbers, return_inverse=True)
    if len(names) == 1:
        numbers = torch.arange(terms.rows) % 2
    temperature = terms.temperature(row_weights, 1 / start)
    sharpness = terms.without_folds(row_weights, numbers, 1 / temperature, last_step)
    return Calibrated(
        temperature, terms.losses(1 / temperature), 1 / sharpness, terms.losses(sharpness)
    )


class _Terms:
    """Logits and targets, one line for each softmax or sigmoid; each row has as many lines."""

    def __init__(self, logits: Tensor, targets: Tensor, binary: bool | None) -> None:
        for name, value in (("logits", logits), ("targets", targets)):
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) == 0:
                raise HeldinError(f"{name} must be a tensor with one entry for each row")
        self.rows = len(logits)
        z = logits.detach().to("cpu", torch.float64)
        t = targets.detach().cpu()
        if z.dim() == 1:
            z = z[:, None]
        if t.dim() == z.dim() - 1 and z.shape[1] == 1:
            t = t.unsqueeze(1)
        self.binary = _is_binary(z, t) if binary is None else binary
        self.target_sums: Tensor | float = 1.0
        counts = torch.ones((), dtype=torch.bool)
        if self.binary and t.shape == z.shape:
            scores, t = z.reshape(-1, 1), t.double().reshape(-1)
            counts = t != IGNORED
            used = t[counts]
            if len(used) and not bool(((used >= 0) & (used <= 1)).all()):
                raise HeldinError("targets of sigmoid logits must lie between 0 and 1")
            self.target_scores = t * scores[:, 0]
        elif not self.binary and t.shape == z.shape:
            scores, t = _class_lines(z), _class_lines(t.double())
            scores = scores - scores.amax(1, keepdim=True)
            self.target_sums = t.sum(1)
            self.target_scores = torch.where(t > 0, t * scores, 0.0).sum(1)
        elif not self.binary and not t.is_floating_point() and t.shape == z[:, 0].shape:
            scores, labels = _class_lines(z), t.reshape(-1).long()
            scores = scores - scores.amax(1, keepdim=True)
            counts = labels != IGNORED
            used, classes = labels[counts], z.shape[1]
            if len(used) and not 0 <= int(used.min()) <= int(used.max()) < classes:
                raise HeldinError(
                    f"targets must be numbers from 0 to {classes - 1}, the classes of the logits; "
                    f"they lie between {int(used.min())} and {int(used.max())}"
                )
            self.target_scores = scores.gather(1, labels.clamp_min(0)[:, None])[:, 0]
        else:
            raise HeldinError(
                f"logits of shape {tuple(logits.shape)} do not match targets of shape "
                f"{tuple(targets.shape)} and type {targets.dtype}; give logits (n, classes) with "
                "whole numbers (n,), or logits (n,) with targets 0 and 1"
            )
        self.scores = scores
        shares = counts.expand(len(scores)).double().reshape(self.rows, -1)
        number = shares.sum(1, keepdim=True)
        self.shares = (shares / number.clamp_min(1)).reshape(-1)  # of the row's mean
        finite = self.target_scores.isfinite() | (self.shares == 0)
        self.finite = finite.reshape(self.rows, -1).all(1) & (number[:, 0] > 0)
        self.broken: Tensor | None = None  # losses of rows, if some are not finite
        if not bool(self.finite.all()):
            self.broken = self.losses(1.0)
            used = self._of_lines(self.finite)
            self.scores = torch.where(used[:, None], self.scores, 0.0)
            self.target_scores = torch.where(used, self.target_scores, 0.0)
        # a class that is masked by -inf has probability 0 and no part in the derivatives
        self.scores = self.scores.clamp_min(-1e100)
        # lines that a temperature is fitted on
        self.sample: Any = slice(None)
        if len(scores) > MOST_LINES:
            self.sample = torch.linspace(0, len(scores) - 1, MOST_LINES).round().long()
        self._latest: tuple[float, Tensor, Tensor] | None = None

    def _of_lines(self, values: Tensor) -> Tensor:
        """Repeat values of rows for their lines."""
        count = len(self.scores) // self.rows
        return values if count == 1 else values.repeat_interleave(count)

    def losses(self, sharpness: float | Tensor) -> Tensor:
        """Return the rows' losses at logits x sharpness: one for all, or one for each row."""
        if isinstance(sharpness, Tensor):
            sharpness = self._of_lines(sharpness)[:, None]
        z = self.scores * sharpness
        if self.binary:
            normaliser = (z.clamp_min(0) + torch.log1p((-z.abs()).exp()))[:, 0]
        else:
            normaliser = self.target_sums * z.exp().sum(1).log()  # scores are at most 0
        if isinstance(sharpness, Tensor):
            sharpness = sharpness[:, 0]
        lines = torch.where(
            self.shares > 0, (normaliser - self.target_scores * sharpness) * self.shares, 0.0
        )
        rows = lines.reshape(self.rows, -1).sum(1)
        return rows if self.broken is None else torch.where(self.finite, rows, self.broken)

    def slopes(self, sharpness: float) -> tuple[Tensor, Tensor]:
        """Return two derivatives of every sampled line's loss by the sharpness."""
        if self._latest is not None and self._latest[0] == sharpness:
            return self._latest[1:]
        z, target_scores = self.scores[self.sample], self.target_scores[self.sample]
        if self.binary:
            p = (z * sharpness).sigmoid()
            first = (p * z)[:, 0] - target_scores
            second = (p * (1 - p) * z.square())[:, 0]
        else:
            p = (z * sharpness).exp_()
            total, p = p.sum(1), p.mul_(z)
            mean, square = p.sum(1) / total, p.mul_(z).sum(1) / total
            sums = self.target_sums
            sums = sums[self.sample] if isinstance(sums, Tensor) else sums
            first = sums * mean - target_scores
            second = sums * (square - mean.square())
        self._latest = (sharpness, first, second)
        return first, second

    def without_folds(
        self, weights: Tensor, folds: Tensor, sharpness: float, last_step: float
    ) -> Tensor:
        """Return the (n,) sharpness that fits the other folds of each row.

        Args:
            weights, folds: (n,) of the rows.
            sharpness: that fits all rows.
            last_step: relative size up to which one step of Newton's method is enough.
        """
        slopes = torch.stack(self.slopes(sharpness)) * self._line_weights(weights)
        sums = torch.zeros(2, int(folds.max()) + 1, dtype=torch.float64)
        sums.index_add_(1, self._of_lines(folds)[self.sample], slopes)
        first, second = sums.sum(1, keepdim=True) - sums
        each: Tensor = (sharpness - first / second).clamp(1 / HOTTEST, 1.0)
        near = ((each - sharpness).abs() <= last_step * sharpness) & (second > 0)
        for fold in (~near).nonzero()[:, 0].tolist():
            start = float(each[fold].nan_to_num(sharpness))
            others = weights * (folds != fold)
            each[fold] = 1 / self.temperature(others, start, max(last_step, LAST_STEP))
        return each[folds]

    def _line_weights(self, weights: Tensor) -> Tensor:
        return (self._of_lines(weights * self.finite) * self.shares)[self.sample]

    def temperature(self, weights: Tensor, start: float, last_step: float = LAST_STEP) -> float:
        """Return the best temperature for weighted rows, by Newton's method with bisection.

        Args:
            weights: (n,) of the rows.
            start: sharpness, 1 / temperature, to start from.
            last_step: relative size of the last step.
        """
        line_weights = self._line_weights(weights)
        if not bool((line_weights > 0).any()):
            return 1.0
        low, high, sharpness = 1 / HOTTEST, 1.0, start
        for _ in range(STEPS):
            first, second = (float(line_weights @ each) for each in self.slopes(sharpness))
            if sharpness == 1 and first <= 0:
                return 1.0
            if sharpness == 1 / HOTTEST and first >= 0:
                return HOTTEST
            at_an_end = sharpness in (low, high)
            low, high = (sharpness, high) if first < 0 else (low, sharpness)
            step = sharpness - first / second if second > 0 else math.nan
            after = step if low < step < high else (low + high) / 2
            if not at_an_end and high == 1 and step >= 1:
                after = 1.0
            elif not at_an_end and low == 1 / HOTTEST and step <= low:
                after = low
            if abs(after - sharpness) <= last_step * sharpness and after not in (1.0, 1 / HOTTEST):
                return 1 / after
            sharpness = after
        return 1 / sharpness


def _class_lines(values: Tensor) -> Tensor:
    """Reshape (n, classes, ...) to one line of classes for each position of each row."""
    return values.movedim(1, -1).reshape(-1, values.shape[1])


def _is_binary(logits: Tensor, targets: Tensor) -> bool:
    if logits.shape != targets.shape:
        return False
    if logits.shape[1] == 1 or not targets.is_floating_point():
        return True
    return not bool(((targets.double().sum(1) - 1).abs() < 1e-4).all())


def _checked_weights(weights: Tensor | None, rows: int) -> Tensor:
    if weights is None:
        return torch.ones(rows, dtype=torch.float64)
    row_weights = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    if row_weights.shape != (rows,) or not bool((row_weights >= 0).all()):
        raise HeldinError(f"weights must be {rows} numbers >= 0, one for each row")
    return row_weights


def _checked_temperature(temperature: float) -> float:
    if not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf:
        raise HeldinError(f"temperature must be a positive number, got {shown(temperature)}")
    return float(temperature)


def scale_last_layer(
    model: nn.Module,
    temperature: float,
    inputs: Any,
    predict: Callable[[nn.Module, Any], Tensor] | None = None,
) -> bool:
    """Divide the model's outputs by a temperature through the weights of its last linear layer.

    The model is called on example inputs, in evaluation mode and without gradients. The weights are
    first multiplied by a power of two: unless this multiplies the outputs exactly, something else
    than the layer determines them. Otherwise the weights stay as they are: where the layer's
    weights are shared with another layer, parametrized or not floating-point numbers, too.

    A LoRA layer is scaled by its base layer and its B matrices; one of the user's own making by
    those of the parameters beside the base layer that the outputs are proportional to. A checkpoint
    of the adapter alone does not contain the base layer and loses the temperature.

    Args:
        model: with a linear or convolutional last layer.
        temperature: to divide the outputs by.
        inputs: example inputs: a tensor, a tuple of arguments or a mapping of keywords.
        predict: (model, inputs) -> logits (default: call the model; `.logits` if it has some).

    Returns:
        Whether the weights were scaled.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x = torch.randn(5, 3)
    >>> before = model(x)
    >>> scale_last_layer(model, 1.7, x)
    True
    >>> torch.allclose(model(x), before / 1.7)
    True
    >>> scale_last_layer(nn.Sequential(model, nn.Softmax(1)), 1.7, x)
    False
    """
    divisor = _checked_temperature(temperature)
    call = _call if predict is None else predict
    with _quiet(model):
        layer, before = _last_layer(model, inputs, call)
        if not bool(before.isfinite().all()):
            return False
        linear: Any = getattr(
            model, "linear_layers", list
        )()  # where layers are no modules of PyTorch
        return any(
            _scale(parameters, divisor, before, lambda: call(model, inputs))
            for parameters in (linear if layer is None else _scalable(model, layer))
        )


def _scale(
    parameters: list[nn.Parameter], divisor: float, before: Tensor, call: Callable[[], Tensor]
) -> bool:
    """Divide parameters by a number if that divides the outputs; else leave them as they are."""
    backup = [p.clone() for p in parameters]
    kept = False
    try:
        factor = 16.0 if before.dtype == torch.float16 else 1024.0
        for p in parameters:
            p.mul_(factor)
        if torch.equal(call(), before * factor):
            for p, old in zip(parameters, backup, strict=True):
                p.copy_(old / divisor)
            kept = _equal_to_rounding(call(), before / divisor, parameters)
    finally:
        if not kept:
            for p, old in zip(parameters, backup, strict=True):
                p.copy_(old)
    return kept


def _call(model: nn.Module, inputs: Any) -> Tensor:
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise HeldinError(
            f"scale_last_layer: the model returned {shown(output)}; give predict=(model, inputs) "
            "-> logits"
        )
    return logits


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Call a model in evaluation mode; leave modes and random numbers as they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _last_layer(
    model: nn.Module, inputs: Any, call: Callable[[nn.Module, Any], Tensor]
) -> tuple[nn.Module | None, Tensor]:
    """Return the linear layer that was called last, and the outputs."""
    called: list[nn.Module] = []
    layers = (m for m in model.modules() if isinstance(m, LINEAR) or _is_lora(m))
    with after_calls(layers, lambda module, output: called.append(module)):
        outputs = call(model, inputs).clone()
    return (called[-1] if called else None), outputs


def _is_lora(module: nn.Module) -> bool:
    """Return whether this is a layer that peft wraps around another one."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_B")


def _scalable(model: nn.Module, layer: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield parameters that the outputs may be proportional to, none of which is shared.

    Those of the layer; then the same with some of the few other parameters of the module around
    it, which may add to its outputs.
    """
    layers = [layer]
    if _is_lora(layer):
        b_matrices: Any = layer.lora_B
        layers = [layer.base_layer, *b_matrices.values()]  # type: ignore[list-item]
    parameters: list[nn.Parameter] = []
    for each in layers:
        for p in (getattr(each, "weight", None), getattr(each, "bias", None)):
            if p is None:
                continue
            # a parametrized weight is computed from other parameters
            if not isinstance(p, nn.Parameter) or not p.is_floating_point():
                return
            parameters.append(p)
    storages = [
        p.untyped_storage().data_ptr()
        for module in model.modules()
        for p in module.parameters(recurse=False)
    ]

    def is_own(p: nn.Parameter) -> bool:
        return storages.count(p.untyped_storage().data_ptr()) == 1

    if not parameters or not all(map(is_own, parameters)):
        return
    yield parameters
    own = {id(p) for p in parameters}
    around = [m for m in model.modules() if any(layer is child for child in m.children())]
    if not around or around[0] is model or isinstance(around[0], nn.Sequential):
        return
    others = [p for p in around[0].parameters() if id(p) not in own and is_own(p)]
    if len(others) <= MOST_BESIDE:
        for number in range(1, len(others) + 1):
            for some in combinations(others, number):
                yield [*parameters, *some]


def _equal_to_rounding(values: Tensor, expected: Tensor, parameters: list[nn.Parameter]) -> bool:
    """Return whether two outputs agree up to the rounding of weights and outputs."""
    coarse = max(torch.finfo(tensor.dtype).eps for tensor in (values, *parameters))
    difference = (values - expected).abs().max()
    return bool(difference <= 100 * coarse * expected.abs().max())
