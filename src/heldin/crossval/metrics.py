"""Metrics on pooled out-of-fold outputs: functions, scikit-learn's scorers, torchmetrics."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heldin.errors import HeldinError
from heldin.state.schema import shown

__all__ = ["Metric", "are_probabilities", "described", "resolve_metrics"]

IGNORED = -100  # target of positions that do not count, as in torch.nn.CrossEntropyLoss
# Words in a metric's name, in lower case.
LOSSES = {
    "loss", "error", "errors", "mse", "rmse", "mae", "mape", "nll", "perplexity", "deviance",
    "brier", "hamming", "ece", "wer", "cer", "crps", "rmsle", "entropy",
}  # fmt: skip
SCORES = {
    "accuracy", "acc", "f1", "fbeta", "auc", "auroc", "auprc", "roc", "ap", "map", "r2",
    "precision", "recall", "sensitivity", "specificity", "dice", "iou", "miou", "jaccard", "kappa",
    "mcc", "matthews", "score", "corr", "correlation", "pearson", "spearman", "ndcg", "bleu",
    "rouge", "psnr", "ssim", "likelihood",
}  # fmt: skip
# Names of scikit-learn's scorers that compare numbers, not classes.
REGRESSION = re.compile(
    r"r2|explained_variance|(neg_)?max_error|d2_(absolute|pinball|tweedie)|neg_(mean|median|root)_"
)


@dataclass(frozen=True)
class Metric:
    """A number that says how well outputs fit targets.

    Attributes:
        name: the key in `estimates`.
        function: (outputs, targets) -> number; with `sample_weight=`, if rows have weights.
        larger_is_better: None: unknown.
    """

    name: str
    function: Callable[[Any, Any], Any]
    larger_is_better: bool | None

    def __call__(self, outputs: Any, targets: Any, sample_weight: Any = None) -> float:
        """Return the metric on rows of outputs and targets; nan where it is undefined."""
        if len(outputs) != len(targets):
            raise HeldinError(
                f"metric {self.name!r}: there are {len(outputs)} outputs, but {len(targets)} "
                "targets; give one of each for each row"
            )
        options = {}
        if sample_weight is not None:
            options = {"sample_weight": sample_weight}
            parameters = inspect.signature(self.function).parameters.values()
            if not any(p.name in options or p.kind is p.VAR_KEYWORD for p in parameters):
                raise HeldinError(
                    f"metric {self.name!r} does not take the rows' weights; give the name of a "
                    "scikit-learn scorer, or a function (outputs, targets, sample_weight) -> number"
                )
        try:
            value = self.function(outputs, targets, **options)
        except Exception as error:
            raise _refused(self, outputs, targets, error) from error
        return _number(self.name, value)

    def of_probabilities(self, probabilities: bool) -> Metric:
        """Return the metric with outputs known to be probabilities, or known to be logits."""
        function: Any = self.function
        if getattr(function, "probabilities", True) is not None:
            return self  # a user's function, or decided before
        return replace(self, function=replace(function, probabilities=probabilities))


def are_probabilities(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether outputs look like probabilities, not like logits."""
    if not bool(((outputs >= 0) & (outputs <= 1)).all()):
        return False
    single = outputs.dim() < 2 or outputs.shape[1] == 1 or outputs.shape == targets.shape
    return single or bool(((outputs.double().sum(1) - 1).abs() < 1e-4).all())


def _comes_from(value: Any, module: str) -> bool:
    """Return whether the type of a value, or one that it is derived from, is of a module."""
    return any(kind.__module__ == module for kind in type(value).__mro__)


def described(function: Any) -> str:
    """Return a text that is the same for functions that do the same, as far as that is known."""
    if isinstance(function, _Scorer):
        return function.scorer_name or repr(function.scorer)
    if isinstance(function, _TorchMetric):
        return repr(function.metric)
    if hasattr(function, "func"):  # functools.partial
        return f"{described(function.func)}{function.args}{function.keywords}"
    if hasattr(function, "__code__"):
        name, code = function.__name__.lower().replace("_", ""), function.__code__
        if function.__module__ == "torch.nn.functional":
            return str(name if name.endswith("loss") else f"{name}loss")
        enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
        options = [described(v) for v in enclosed if _comes_from(v, nn.MSELoss.__module__)]
        options += [repr(v) for v in enclosed if isinstance(v, (bool, int, float, str))]
        text = (
            f"{code.co_code!r} {code.co_names} {code.co_consts} {function.__defaults__} {options}"
        )
        return f"{name} {zlib.crc32(text.encode()):x}"
    try:
        parameters = inspect.signature(type(function)).parameters
    except ValueError:  # a type of Python's own, such as int, in the place of a function
        return type(function).__name__.lower()
    texts = [
        f"{name}={value}"
        for name, parameter in parameters.items()
        if name != "reduction"
        and str(value := getattr(function, name, parameter.default)) != str(parameter.default)
    ]
    return f"{type(function).__name__.lower()}({', '.join(texts)})".removesuffix("()")


def resolve_metrics(metrics: Any, *, probabilities: bool | None = None) -> dict[str, Metric]:
    """Return metrics by their names.

    Scorers of scikit-learn take labels or probabilities. These are made from logits: of the shape
    (n, classes) or (n, classes, ...) by argmax and softmax, of the shape (n,) or (n, 1) by the
    sign and a sigmoid, and so are logits with targets of the same shape, for several labels of
    one row. A scorer's value has the sign that scikit-learn gives it: "neg_log_loss" is negative.
    torchmetrics objects for classification get the probabilities, where outputs are known to be
    logits, and else the outputs as they are.

    Args:
        metrics: a mapping of names to functions (outputs, targets) -> number; the name of a scorer
            ("accuracy", "f1_macro", "roc_auc", "r2", ...), a torchmetrics object, or a list of
            these. Values of a mapping may be scorers' names and torchmetrics objects, too.
        probabilities: whether the outputs of a classifier are probabilities, not logits, for the
            scorers of scikit-learn and torchmetrics. None: so if those of every row of a call lie
            between 0 and 1 and, of several classes, sum to 1; a run decides once for all calls.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping) and not _is_torchmetrics(metrics, "MetricCollection"):
        pairs = list(metrics.items())
    elif isinstance(metrics, (list, tuple)):
        pairs = [(None, metric) for metric in metrics]
    else:
        pairs = [(None, metrics)]
    resolved: dict[str, Metric] = {}
    for name, metric in pairs:
        for each in _resolve(name, metric, probabilities):
            if each.name in resolved:
                raise HeldinError(
                    f"metrics: two metrics are called {each.name!r}; use a mapping of different "
                    "names"
                )
            if each.name == "loss":
                raise HeldinError('metrics: "loss" is the name of the estimated loss; use another')
            resolved[each.name] = each
    return resolved


def _resolve(name: Any, metric: Any, probabilities: bool | None) -> list[Metric]:
    """Return one metric as a list; a collection of torchmetrics is a list of several."""
    if name is not None and (not isinstance(name, str) or not name):
        raise HeldinError(f"metrics: a metric's name must be a text, got {shown(name)}")
    if isinstance(metric, Metric):
        return [metric if name is None else Metric(name, metric.function, metric.larger_is_better)]
    if isinstance(metric, str):
        return [Metric(name or metric, _Scorer(metric, _scorer(metric), probabilities), True)]
    if _is_torchmetrics(metric, "MetricCollection"):
        prefix = "" if name is None else f"{name}_"
        pairs = [(f"{prefix}{key}", member) for key, member in metric.items()]
        return [each for pair in pairs for each in _resolve(*pair, probabilities)]
    if _is_torchmetrics(metric, "Metric"):
        better = getattr(metric, "higher_is_better", None)
        title = name or type(metric).__name__
        return [Metric(title, _TorchMetric(metric, probabilities), better)]
    if _comes_from(metric, "sklearn.metrics._scorer"):  # by make_scorer
        if name is None:
            raise HeldinError(
                f"metrics: {shown(metric)} has no name; give it one: metrics={{'name': scorer}}"
            )
        return [Metric(name, _Scorer("", metric, probabilities), True)]
    if not callable(metric):
        raise HeldinError(
            f"metrics: {shown(metric)} is no metric; give a function (outputs, targets) -> number, "
            "the name of a scikit-learn scorer or a torchmetrics object"
        )
    _refuse_swapped(metric)
    title = str(name or getattr(metric, "__name__", "<lambda>"))
    if title == "<lambda>":
        raise HeldinError(
            "metrics: a function without a name; give it one: metrics={'name': function}"
        )
    return [Metric(title, metric, _larger_is_better(title))]


def _refuse_swapped(function: Any) -> None:
    """Refuse a function of sklearn.metrics, whose arguments are (y_true, y_pred)."""
    inner = getattr(function, "func", function)  # of functools.partial
    if str(getattr(inner, "__module__", "")).startswith("sklearn.metrics"):
        name = inner.__name__
        raise HeldinError(
            f"metrics: {name} of scikit-learn takes (y_true, y_pred) in this order, and no logits: "
            f"give the name of its scorer ({name.removesuffix('_score')!r} or similar, see "
            "sklearn.metrics.get_scorer_names()) or a function: lambda outputs, targets: "
            f"{name}(targets, outputs)"
        )


def _larger_is_better(name: str) -> bool | None:
    """Return whether a larger value is better, by the words of a name."""
    words = set(re.findall(r"[a-z]+\d*", re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name).lower()))
    if words & {"neg", "negative"}:
        return "likelihood" not in words
    if words & LOSSES:
        return False
    return True if words & SCORES else None


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise HeldinError(
                f"metric {name!r} returned a tensor of shape {tuple(value.shape)}; return one "
                "number, the mean over classes for instance"
            )
        value = value.item()
    number: Any = None if isinstance(value, (str, bytes)) else value
    try:
        return float(number)
    except (TypeError, ValueError):
        raise HeldinError(f"metric {name!r} returned {shown(value)}; return a number") from None


def _is_torchmetrics(value: Any, kind: str) -> bool:
    """Return whether this is an object of torchmetrics, without importing it."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, getattr(module, kind))


def _scorer(name: str) -> Any:
    try:
        from sklearn.metrics import get_scorer, get_scorer_names
    except ImportError:
        raise HeldinError(
            f"metrics: {name!r} is the name of a scikit-learn scorer, and scikit-learn is not "
            "installed; install it, or give a function (outputs, targets) -> number"
        ) from None
    names = get_scorer_names()
    if name in names:
        return get_scorer(name)
    likely = difflib.get_close_matches(name, names, n=3) or [n for n in names if name in n][:3]
    hint = f" Did you mean {' or '.join(map(repr, likely))}?" if likely else ""
    raise HeldinError(
        f"metrics: scikit-learn has no scorer {name!r}.{hint} sklearn.metrics.get_scorer_names() "
        "lists them"
    )


@dataclass(frozen=True)
class _TorchMetric:
    """A torchmetrics object as a function of all outputs; the object itself stays unchanged."""

    metric: Any
    probabilities: bool | None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        metric = copy.deepcopy(self.metric).to(outputs.device)
        metric.reset()
        classification = type(metric).__module__.startswith("torchmetrics.classification")
        if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
            outputs = outputs.squeeze(-1)
        elif classification and outputs.dim() == targets.dim() and outputs.shape[-1] == 1:
            outputs, targets = outputs.squeeze(-1), targets.squeeze(-1)
        if classification and targets.is_floating_point():
            targets = targets.long()
        if classification and self.probabilities is False and outputs.is_floating_point():
            classes = outputs.dim() == targets.dim() + 1
            outputs = outputs.softmax(1) if classes else outputs.sigmoid()
        metric.update(outputs, targets)
        return metric.compute()


@dataclass(frozen=True)
class _Scorer:
    """A scikit-learn scorer as a function of logits or numbers."""

    scorer_name: str  # that scikit-learn gives it; "" for a scorer that the user made
    scorer: Any
    probabilities: bool | None

    def __call__(self, outputs: Tensor, targets: Tensor, sample_weight: Any = None) -> float:
        estimator, inputs, truth, counts = self._answers(outputs, targets)
        options = {}
        if sample_weight is not None:
            weights = torch.as_tensor(sample_weight).cpu()
            counts = torch.ones(len(inputs)) if counts is None else counts
            lines = weights.repeat_interleave(len(counts) // len(weights))
            options["sample_weight"] = lines[counts.bool()].numpy()
        labels = getattr(estimator, "classes_", None)
        if self.scorer_name == "neg_log_loss" and labels is not None and labels.ndim == 1:
            from sklearn.metrics import log_loss  # the scorer fails where a class has no row

            predictions = estimator.predict_proba(inputs)
            return -float(log_loss(truth, predictions, labels=labels, **options))
        return float(self.scorer(estimator, inputs, truth, **options))

    def _answers(self, outputs: Tensor, targets: Tensor) -> tuple[Any, Any, Any, Tensor | None]:
        """Return an estimator, the inputs from which it predicts the outputs, and targets.

        And which lines of outputs these are, as booleans; None: all.
        """
        scores = outputs.detach().to("cpu", torch.float64)
        truth = targets.detach().cpu()
        numbers = not bool((truth == truth.round()).all())
        if self.scorer_name:
            numbers = REGRESSION.match(self.scorer_name) is not None
        if numbers:
            if scores.shape != truth.shape:
                if scores.numel() != truth.numel():
                    raise ValueError("outputs and targets must have the same shape")
                scores = scores.reshape(truth.shape)
            flat = (part.double().reshape(len(scores), -1).numpy() for part in (scores, truth))
            return _regressor(), *flat, None
        probabilities = self.probabilities
        if probabilities is None:
            probabilities = are_probabilities(outputs, targets)
        scores, labels, several = _class_scores(scores, truth)
        counts = None if several else labels != IGNORED
        if counts is not None:
            scores, labels = scores[counts], labels[counts]
        if probabilities:
            least = torch.finfo(scores.dtype).eps
            single = several or scores.shape[1] == 1
            scores = scores.logit(eps=least) if single else scores.clamp_min(least**4).log()
        if several:
            classes: Any = ((0, 1),) * scores.shape[1]
        elif scores.shape[1] == 1:
            classes = (-1, 1) if bool((labels == -1).any()) else (0, 1)
        else:
            classes = tuple(range(scores.shape[1]))
        return _classifier(classes, several), scores.numpy(), labels.numpy(), counts


def _refused(metric: Metric, outputs: Any, targets: Any, error: Exception) -> HeldinError:
    """Return an error that names what the user can do about a metric that failed."""
    shapes = " and ".join(
        f"{name} {tuple(getattr(values, 'shape', (len(values),)))}"
        for name, values in (("outputs", outputs), ("targets", targets))
    )
    if not isinstance(metric.function, _Scorer):
        text = "it is called with tensors of all held-out rows, as the model returns them"
    elif metric.function.scorer_name == "roc_auc" and "multi_class" in str(error):
        text = "for more than two classes, give 'roc_auc_ovr' or 'roc_auc_ovo'"
    elif (absent := _absent_classes(outputs, targets)) and not isinstance(error, TypeError):
        text = f"no row has class {', '.join(map(str, absent))}; leave the metric out or the class"
    else:
        text = "give another metric, or a function (outputs, targets) -> number"
    kind = "" if isinstance(error, HeldinError) else f"{type(error).__name__}: "
    return HeldinError(
        f"metric {metric.name!r} cannot be computed from {shapes}: {kind}{error}; {text}"
    )


def _absent_classes(outputs: Tensor, targets: Tensor) -> list[int]:
    """Return the classes of logits (n, classes) that no target has."""
    if outputs.dim() < 2 or outputs.shape == targets.shape or outputs.shape[1] < 2:
        return []
    return sorted(set(range(outputs.shape[1])) - set(targets.flatten().tolist()))


def _class_scores(scores: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return scores (lines, classes), labels, and whether a line may have several labels."""
    if scores.dim() == 1:
        scores = scores[:, None]
    if truth.is_floating_point() and not bool((truth == truth.round()).all()):
        raise ValueError("targets must be numbers of classes, not probabilities")
    truth = truth.long()
    if truth.shape == scores.shape and scores.shape[1] > 1:
        return scores.flatten(1), truth.flatten(1), True
    if truth.numel() == scores.numel():  # one logit for each target
        scores, truth = scores.reshape(-1, 1), truth.reshape(-1)
    elif truth.shape == scores.shape[:1] + scores.shape[2:]:
        scores, truth = scores.movedim(1, -1).flatten(0, -2), truth.reshape(-1)
    elif truth.shape == scores.shape[:-1] or truth.shape == (len(scores), 1):
        scores, truth = scores.flatten(0, -2), truth.reshape(-1)
    else:
        raise ValueError("give logits (n, classes) and numbers of classes (n,)")
    return scores, truth, False


@functools.cache
def _regressor() -> Any:
    from sklearn.base import BaseEstimator, RegressorMixin

    class Outputs(RegressorMixin, BaseEstimator):  # type: ignore[misc]
        """An estimator whose inputs are its predictions."""

        def predict(self, inputs: Any) -> Any:
            """Return the inputs."""
            return inputs

    return Outputs()


@functools.lru_cache(maxsize=8)  # it takes as long to make as a small metric to compute
def _classifier(classes: Any, several: bool) -> Any:
    import numpy as np
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Logits(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        """An estimator whose inputs are its logits."""

        classes_ = np.asarray(classes)

        def decision_function(self, logits: Any) -> Any:
            """Return the logits, as one column for two classes."""
            if several or logits.shape[1] > 2:
                return logits
            return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]

        def predict(self, logits: Any) -> Any:
            """Return the most probable class, or 0 and 1 for each label."""
            if several:
                return (logits > 0).astype(int)
            if logits.shape[1] == 1:
                return self.classes_[(logits[:, 0] > 0).astype(int)]
            return self.classes_[logits.argmax(1)]

        def predict_proba(self, logits: Any) -> Any:
            """Return the probabilities of the classes, or of each label."""
            values = torch.as_tensor(logits)
            if several:
                return values.sigmoid().numpy()
            if values.shape[1] == 1:
                values = torch.cat([torch.zeros_like(values), values], 1)
            return values.softmax(1).numpy()

    return Logits()
