"""Metrics: functions, scikit-learn's scorers and torchmetrics objects."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heldin.crossval import Metric, described, resolve_metrics, statistic_interval
from heldin.errors import HeldinError


def error_rate(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).double().mean()


def classes(rows: int = 60, number: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, number, generator=generator, dtype=torch.float64)
    drawn = torch.multinomial((2 * logits).softmax(1), 1, generator=generator)[:, 0]
    return logits, drawn


def numbers(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.rand(*shape, generator=generator, dtype=torch.float64)
    return outputs, outputs + 0.5 * torch.rand(*shape, generator=generator, dtype=torch.float64)


# -- functions


def test_a_mapping_of_functions() -> None:
    metrics = resolve_metrics({"wrong": error_rate, "accuracy": lambda o, t: 1 - error_rate(o, t)})
    logits, targets = classes()
    wrong = float((logits.argmax(1) != targets).double().mean())
    assert list(metrics) == ["wrong", "accuracy"]
    assert metrics["wrong"](logits, targets) == wrong
    assert metrics["accuracy"](logits, targets) == pytest.approx(1 - wrong)
    assert metrics["wrong"].name == "wrong"


def test_a_function_with_a_name() -> None:
    for metrics in (error_rate, [error_rate], (error_rate,)):
        assert list(resolve_metrics(metrics)) == ["error_rate"]
    assert resolve_metrics(None) == {}
    assert resolve_metrics([]) == {}


def test_metrics_are_taken_as_they_are() -> None:
    metric = Metric("mine", error_rate, False)
    assert resolve_metrics(metric) == {"mine": metric}
    renamed = resolve_metrics({"yours": metric})["yours"]
    assert (renamed.name, renamed.larger_is_better) == ("yours", False)


@pytest.mark.parametrize(
    ("name", "larger"),
    [
        ("accuracy", True),
        ("val_f1_macro", True),
        ("TestAUC", True),
        ("r2", True),
        ("dice_score", True),
        ("neg_mean_squared_error", True),
        ("mean_squared_error", False),
        ("neg_log_likelihood", False),
        ("log_likelihood", True),
        ("log_loss", False),
        ("RMSE", False),
        ("ErrorRate", False),
        ("length", None),
        ("roach", None),
    ],
)
def test_mode_by_name(name: str, larger: bool | None) -> None:
    assert resolve_metrics({name: error_rate})[name].larger_is_better is larger


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.tensor([[0.5]])])
def test_numbers_of_any_kind(value: Any) -> None:
    metric = resolve_metrics({"half": lambda outputs, targets: value})["half"]
    assert metric(torch.ones(3), torch.ones(3)) == 0.5
    assert isinstance(metric(torch.ones(3), torch.ones(3)), float)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "metric 'bad' returned None; return a number"),
        ("0.5", "returned '0.5'"),
        ({"f1": 0.5}, "returned {'f1': 0.5}"),
        (torch.ones(3), "a tensor of shape \\(3,\\); return one number"),
        ([0.5, 0.5], "returned \\[0.5, 0.5\\]"),
    ],
)
def test_what_is_no_number(value: Any, message: str) -> None:
    metric = resolve_metrics({"bad": lambda outputs, targets: value})["bad"]
    with pytest.raises(HeldinError, match=message):
        metric(torch.ones(3), torch.ones(3))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda o, t: 0, "a function without a name"),
        ([error_rate, error_rate], "two metrics are called 'error_rate'"),
        ({"loss": error_rate}, '"loss" is the name of the estimated loss'),
        ({1: error_rate}, "name must be a text, got 1"),
        ({"": error_rate}, "name must be a text, got ''"),
        (3, "3 is no metric; give a function"),
        ({"f1": 3}, "3 is no metric"),
    ],
)
def test_mistakes(metrics: Any, message: str) -> None:
    with pytest.raises(HeldinError, match=message):
        resolve_metrics(metrics)


def test_different_numbers_of_rows() -> None:
    metric = resolve_metrics(error_rate)["error_rate"]
    with pytest.raises(HeldinError, match="'error_rate': there are 3 outputs, but 2 targets"):
        metric(torch.ones(3, 2), torch.ones(2))


# -- scikit-learn's scorers


class TestScorers:
    """Each scorer against the function of `sklearn.metrics` that it is made of."""

    @pytest.fixture(autouse=True)
    def sklearn(self) -> Any:
        return pytest.importorskip("sklearn.metrics")

    @pytest.mark.parametrize("column", ["vector", "column", "two"])
    def test_two_classes(self, sklearn: Any, column: str) -> None:
        logits, targets = classes(number=2)
        margin = logits[:, 1] - logits[:, 0]
        probability, label = margin.sigmoid().numpy(), (margin > 0).long().numpy()
        outputs = {"vector": margin, "column": margin[:, None], "two": logits}[column]
        truth = targets.numpy()
        expected = {
            "accuracy": sklearn.accuracy_score(truth, label),
            "balanced_accuracy": sklearn.balanced_accuracy_score(truth, label),
            "f1": sklearn.f1_score(truth, label),
            "f1_macro": sklearn.f1_score(truth, label, average="macro"),
            "precision": sklearn.precision_score(truth, label),
            "recall": sklearn.recall_score(truth, label),
            "jaccard": sklearn.jaccard_score(truth, label),
            "matthews_corrcoef": sklearn.matthews_corrcoef(truth, label),
            "roc_auc": sklearn.roc_auc_score(truth, probability),
            "average_precision": sklearn.average_precision_score(truth, probability),
            "neg_log_loss": -sklearn.log_loss(truth, probability),
            "neg_brier_score": -sklearn.brier_score_loss(truth, probability),
        }
        metrics = resolve_metrics(list(expected))
        for name, value in expected.items():
            assert metrics[name](outputs, targets) == pytest.approx(value, rel=1e-9), name
            assert metrics[name].larger_is_better is True
        if column != "two":
            floats = targets[:, None].double() if column == "column" else targets.double()
            assert metrics["f1"](outputs, floats) == pytest.approx(expected["f1"])
            assert metrics["f1"](outputs, 2 * targets - 1) == pytest.approx(expected["f1"])

    def test_several_classes(self, sklearn: Any) -> None:
        logits, targets = classes()
        probabilities, labels = logits.softmax(1).numpy(), logits.argmax(1).numpy()
        truth = targets.numpy()
        expected = {
            "accuracy": sklearn.accuracy_score(truth, labels),
            "f1_macro": sklearn.f1_score(truth, labels, average="macro"),
            "recall_weighted": sklearn.recall_score(truth, labels, average="weighted"),
            "roc_auc_ovr": sklearn.roc_auc_score(truth, probabilities, multi_class="ovr"),
            "roc_auc_ovo": sklearn.roc_auc_score(truth, probabilities, multi_class="ovo"),
            "neg_log_loss": -sklearn.log_loss(truth, probabilities),
            "top_k_accuracy": sklearn.top_k_accuracy_score(truth, probabilities, k=2),
        }
        metrics = resolve_metrics(tuple(expected))
        for name, value in expected.items():
            assert metrics[name](logits, targets) == pytest.approx(value, rel=1e-9), name
            single = metrics[name](logits.float(), targets)
            assert single == pytest.approx(value, rel=1e-5), name
        assert metrics["accuracy"](logits.bfloat16().requires_grad_(), targets) > 0.3

    @pytest.mark.parametrize("shape", ["two", "column", "labels", "several"])
    def test_probabilities(self, sklearn: Any, shape: str) -> None:
        """A model that ends in a sigmoid or a softmax is scored as its logits are."""
        logits, targets = classes(number=4 if shape == "several" else 2)
        probabilities = logits.softmax(1)
        names = ["accuracy", "f1_macro", "neg_log_loss", "roc_auc_ovr"]
        if shape == "column":
            logits = logits[:, 1:] - logits[:, :1]
            probabilities = logits.sigmoid()
        if shape == "labels":
            targets, probabilities = torch.stack([1 - targets, targets], 1), logits.sigmoid()
            names = ["accuracy", "f1_macro", "roc_auc"]
        for name in names:
            expected = resolve_metrics(name, probabilities=False)[name](logits, targets)
            for given in (None, True):
                metric = resolve_metrics(name, probabilities=given)[name]
                assert metric(probabilities, targets) == pytest.approx(expected), name
        if shape in ("column", "labels"):  # every probability is > 0
            metric = resolve_metrics("accuracy", probabilities=False)["accuracy"]
            assert metric(probabilities, targets) < metric(logits, targets) - 0.1

    def test_probabilities_of_zero_and_one(self, sklearn: Any) -> None:
        targets = torch.tensor([0, 1, 1, 0, 1, 0])
        outputs = torch.tensor([0.0, 1.0, 1.0, 0.2, 0.6, 0.0])
        both = torch.stack([1 - outputs, outputs], 1)
        for name in ("roc_auc", "accuracy"):
            metric = resolve_metrics(name)[name]
            assert metric(outputs, targets) == metric(both, targets) == 1
        metric = resolve_metrics("neg_log_loss")["neg_log_loss"]
        expected = (math.log(0.8) + math.log(0.6)) / 6
        assert metric(outputs, targets) == pytest.approx(expected, rel=1e-6)
        assert metric(both, targets) == pytest.approx(expected, rel=1e-6)

    def test_a_class_without_a_row(self, sklearn: Any) -> None:
        logits, targets = classes()
        kept = targets > 0
        expected = -float(torch.nn.functional.cross_entropy(logits[kept], targets[kept]))
        metric = resolve_metrics("neg_log_loss")["neg_log_loss"]
        assert metric(logits[kept], targets[kept]) == pytest.approx(expected)

    def test_several_labels_of_a_row(self, sklearn: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(60, 3, generator=generator, dtype=torch.float64)
        targets = torch.bernoulli((2 * logits).sigmoid(), generator=generator)
        truth, labels = targets.long().numpy(), (logits > 0).long().numpy()
        expected = {
            "accuracy": sklearn.accuracy_score(truth, labels),
            "f1_macro": sklearn.f1_score(truth, labels, average="macro"),
            "roc_auc": sklearn.roc_auc_score(truth, logits.sigmoid().numpy()),
            "average_precision": sklearn.average_precision_score(truth, logits.numpy()),
        }
        for name in ("accuracy", "f1_macro", "roc_auc", "average_precision"):
            value = resolve_metrics(name)[name](logits, targets)
            assert value == pytest.approx(expected[name]), name

    @pytest.mark.parametrize("last", [False, True])
    def test_positions(self, sklearn: Any, last: bool) -> None:
        """Pixels have their classes in dimension 1, tokens in the last one."""
        logits, targets = classes(rows=60)
        targets[::7] = -100
        outputs = logits.reshape(10, 6, 4)
        outputs = outputs if last else outputs.movedim(-1, 1)
        kept = targets != -100
        expected = sklearn.accuracy_score(targets[kept], logits.argmax(1)[kept])
        metric = resolve_metrics("accuracy")["accuracy"]
        assert metric(outputs, targets.reshape(10, 6)) == pytest.approx(expected)

    @pytest.mark.parametrize("shape", [(60,), (60, 1), (60, 3)])
    def test_numbers(self, sklearn: Any, shape: tuple[int, ...]) -> None:
        outputs, targets = numbers(*shape)
        truth, predicted = targets.numpy(), outputs.numpy()
        expected = {
            "r2": sklearn.r2_score(truth, predicted),
            "explained_variance": sklearn.explained_variance_score(truth, predicted),
            "neg_mean_squared_error": -sklearn.mean_squared_error(truth, predicted),
            "neg_mean_absolute_error": -sklearn.mean_absolute_error(truth, predicted),
            "neg_root_mean_squared_error": -sklearn.root_mean_squared_error(truth, predicted),
            "neg_median_absolute_error": -sklearn.median_absolute_error(truth, predicted),
            "d2_absolute_error_score": sklearn.d2_absolute_error_score(truth, predicted),
        }
        for name, metric in resolve_metrics(list(expected)).items():
            assert metric(outputs, targets) == pytest.approx(expected[name], rel=1e-9), name

    def test_a_column_of_outputs_and_a_vector_of_targets(self, sklearn: Any) -> None:
        """These would be broadcast to 60 x 60 numbers."""
        outputs, targets = numbers(60)
        metric = resolve_metrics("r2")["r2"]
        expected = sklearn.r2_score(targets.numpy(), outputs.numpy())
        assert metric(outputs[:, None], targets) == pytest.approx(expected)
        assert metric(outputs, targets[:, None]) == pytest.approx(expected)
        assert metric(torch.zeros(4), torch.tensor([0, 1, 1, 0])) == pytest.approx(-1)

    def test_scorers_that_were_made(self, sklearn: Any) -> None:
        logits, targets = classes(number=2)
        f2 = sklearn.make_scorer(sklearn.fbeta_score, beta=2)
        margin = sklearn.make_scorer(sklearn.mean_absolute_error, greater_is_better=False)
        metrics = resolve_metrics({"f2": f2, "margin": margin, "same": "f1"})
        expected = sklearn.fbeta_score(targets.numpy(), logits.argmax(1).numpy(), beta=2)
        assert metrics["f2"](logits, targets) == pytest.approx(expected)
        outputs, truth = numbers(60)
        assert metrics["margin"](outputs, truth) == pytest.approx(
            -float((outputs - truth).abs().mean())
        )
        assert metrics["same"](logits, targets) == resolve_metrics("f1")["f1"](logits, targets)
        confusing = resolve_metrics({"r2": f2, "neg_log_loss": f2})
        assert confusing["r2"](logits, targets) == pytest.approx(expected)
        assert confusing["neg_log_loss"](logits, targets) == pytest.approx(expected)
        with pytest.raises(HeldinError, match="has no name; give it one"):
            resolve_metrics([f2])

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("accuracies", "no scorer 'accuracies'. Did you mean 'accuracy'"),
            ("auc", "Did you mean 'roc_auc'"),
            ("xyz", "no scorer 'xyz'. sklearn.metrics.get_scorer_names"),
        ],
    )
    def test_unknown_names(self, name: str, hint: str) -> None:
        with pytest.raises(HeldinError, match=hint):
            resolve_metrics([name])

    @pytest.mark.parametrize(
        ("name", "outputs", "targets", "message"),
        [
            ("f1", (6, 3), torch.tensor([0, 1, 2, 0, 1, 2]), "average='binary'"),
            ("accuracy", (6, 3), torch.full((6,), 0.5), "numbers of classes, not probabilities"),
            ("accuracy", (6, 3, 2), torch.zeros(6, 5).long(), "give logits"),
            ("r2", (6, 3), torch.rand(6), "must have the same shape"),
        ],
    )
    def test_shapes_that_do_not_match(
        self, name: str, outputs: tuple[int, ...], targets: Tensor, message: str
    ) -> None:
        metric = resolve_metrics(name)[name]
        with pytest.raises(HeldinError, match=f"metric '{name}' cannot.*{message}"):
            metric(torch.rand(*outputs), targets)

    def test_undefined_in_some_resamplings(self) -> None:
        generator = torch.Generator().manual_seed(0)
        outputs, targets = torch.rand(40, generator=generator), torch.zeros(40).long()
        targets[:3] = 1
        interval = statistic_interval(resolve_metrics("roc_auc")["roc_auc"], outputs, targets)
        assert interval.low < interval.value < interval.high
        targets[1:3] = 0
        interval = statistic_interval(resolve_metrics("roc_auc")["roc_auc"], outputs, targets)
        assert math.isnan(interval.low)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(HeldinError, match="scikit-learn is not installed"):
        resolve_metrics(["accuracy"])
    assert list(resolve_metrics([error_rate])) == ["error_rate"]


# -- torchmetrics


class TestTorchmetrics:
    @pytest.fixture(autouse=True)
    def torchmetrics(self) -> Any:
        return pytest.importorskip("torchmetrics")

    def test_pooled_and_unchanged(self, torchmetrics: Any) -> None:
        from torchmetrics.classification import MulticlassF1Score

        logits, targets = classes()
        used = MulticlassF1Score(num_classes=4, average="macro")
        used.update(logits[:5], targets[:5])
        before = float(used.compute())
        metrics = resolve_metrics({"f1": used})
        fresh = MulticlassF1Score(num_classes=4, average="macro")
        assert metrics["f1"](logits, targets) == pytest.approx(float(fresh(logits, targets)))
        assert metrics["f1"](logits, targets) == pytest.approx(float(fresh.compute()))
        assert float(used.compute()) == before
        assert metrics["f1"].larger_is_better is True
        assert list(resolve_metrics([used])) == ["MulticlassF1Score"]

    def test_regression(self, torchmetrics: Any) -> None:
        outputs, targets = numbers(60)
        metric = resolve_metrics(torchmetrics.MeanSquaredError())["MeanSquaredError"]
        expected = float((outputs - targets).square().mean())
        assert metric(outputs, targets) == pytest.approx(expected, rel=1e-6)
        assert metric(outputs[:, None], targets) == pytest.approx(expected, rel=1e-6)
        assert metric.larger_is_better is False

    def test_one_column_with_floating_targets(self, torchmetrics: Any) -> None:
        from torchmetrics.classification import BinaryAccuracy

        logits, targets = classes(number=2)
        margin = 9 * (logits[:, 1:] - logits[:, :1])
        expected = float(((margin[:, 0] > 0) == (targets == 1)).double().mean())
        metric = resolve_metrics(BinaryAccuracy())["BinaryAccuracy"]
        assert metric(margin, targets[:, None].double()) == pytest.approx(expected)
        assert metric(margin, targets) == pytest.approx(expected)

    def test_a_collection(self, torchmetrics: Any) -> None:
        from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

        collection = torchmetrics.MetricCollection(
            {"acc": MulticlassAccuracy(4, average="micro"), "f1": MulticlassF1Score(4)}
        )
        logits, targets = classes()
        metrics = resolve_metrics(collection)
        assert list(metrics) == ["acc", "f1"]
        expected = float((logits.argmax(1) == targets).double().mean())
        assert metrics["acc"](logits, targets) == pytest.approx(expected)
        assert list(resolve_metrics({"test": collection})) == ["test_acc", "test_f1"]

    def test_mistakes(self, torchmetrics: Any) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        logits, targets = classes()
        vector = resolve_metrics({"acc": MulticlassAccuracy(4, average=None)})["acc"]
        with pytest.raises(HeldinError, match="a tensor of shape \\(4,\\)"):
            vector(logits, targets)
        wrong = resolve_metrics({"acc": MulticlassAccuracy(3)})["acc"]
        with pytest.raises(HeldinError, match="metric 'acc' cannot be computed from outputs"):
            wrong(logits, targets)


class TestLogitsOrProbabilities:
    @pytest.mark.parametrize("metric", ["accuracy", "torchmetrics"])
    def test_logits_within_zero_and_one(self, metric: str) -> None:
        logits, targets = torch.tensor([[0.1], [0.2], [0.6], [0.9]]), torch.ones(4, 1)
        given: Any = metric
        if metric == "torchmetrics":
            given = pytest.importorskip("torchmetrics").classification.BinaryAccuracy()
        (name, resolved) = next(iter(resolve_metrics(given).items()))
        assert resolved(logits, targets) == 0.5  # as probabilities
        known = resolved.of_probabilities(False)
        assert (known.name, known(logits, targets)) == (name, 1.0)
        assert known.of_probabilities(True) is known

    def test_torchmetrics_get_probabilities_of_classes(self) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")
        logits = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        targets = torch.arange(60) % 3
        metric = torchmetrics.classification.MulticlassCalibrationError(3)
        (resolved,) = resolve_metrics(metric, probabilities=False).values()
        assert resolved(logits, targets) == pytest.approx(float(metric(logits.softmax(1), targets)))


def test_functions_of_scikit_learn_are_refused() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    for given in (metrics.r2_score, partial(metrics.f1_score, average="macro")):
        with pytest.raises(HeldinError, match=r"takes \(y_true, y_pred\).*'(r2|f1)'.*lambda"):
            resolve_metrics({"name": given})
    swapped = resolve_metrics({"r2": lambda outputs, targets: metrics.r2_score(targets, outputs)})
    outputs, targets = torch.randn(9), torch.randn(9)
    expected = resolve_metrics("r2")["r2"](outputs, targets)
    assert swapped["r2"](outputs, targets) == pytest.approx(expected)


def test_what_a_users_function_raises_names_the_metric() -> None:
    (metric,) = resolve_metrics({"mine": lambda outputs, targets: {}["key"]}).values()
    with pytest.raises(HeldinError, match=r"'mine'.*outputs \(4, 2\) and targets \(4,\): KeyError"):
        metric(torch.ones(4, 2), torch.ones(4))


def test_a_class_without_rows_is_named() -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(HeldinError, match="no row has class 1"):
        resolve_metrics("roc_auc_ovr")["roc_auc_ovr"](torch.randn(6, 3), torch.tensor([0, 2] * 3))


def test_rows_with_weights() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    logits = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    targets, weights = torch.arange(40) % 3, torch.linspace(0, 2, 40)
    value = resolve_metrics("f1_macro")["f1_macro"](logits, targets, weights)
    labels = logits.argmax(1)
    expected = metrics.f1_score(targets, labels, average="macro", sample_weight=weights)
    assert value == pytest.approx(expected)
    image, maps = torch.randn(4, 2, 3, 3), torch.zeros(4, 3, 3, dtype=torch.long)
    maps[:2, 0] = -100
    shares = (image.argmax(1) == 0).double() * (maps == 0)
    weights = torch.tensor([1.0, 2.0, 0.0, 3.0])
    expected = (shares.sum((1, 2)) @ weights.double()) / ((maps == 0).sum((1, 2)) @ weights.long())
    value = resolve_metrics("accuracy")["accuracy"](image, maps, weights)
    assert value == pytest.approx(float(expected))
    own = resolve_metrics({"mine": lambda outputs, targets, sample_weight: sample_weight.sum()})
    assert own["mine"](logits, targets, torch.ones(40)) == 40
    plain = resolve_metrics({"mine": lambda outputs, targets: 0.0})["mine"]
    with pytest.raises(HeldinError, match="'mine' does not take the rows' weights"):
        plain(logits, targets, torch.ones(40))


def test_descriptions() -> None:
    losses = [
        nn.MSELoss(),
        nn.L1Loss(),
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])),
        partial(nn.functional.cross_entropy, label_smoothing=0.2),
        lambda outputs, targets: (outputs - targets).abs().mean(),
        lambda outputs, targets: (outputs - targets).square().mean(),
    ]
    assert len({described(loss) for loss in losses}) == len(losses)
    assert described(nn.MSELoss(reduction="sum")) == described(nn.functional.mse_loss)
    assert described(nn.CrossEntropyLoss()) == described(nn.functional.cross_entropy)

    def with_loss(loss: Any) -> Any:
        return lambda model, batch: loss(model(batch[0]), batch[1])

    assert described(with_loss(losses[0])) != described(with_loss(losses[1]))
    assert described(with_loss(losses[0])) == described(with_loss(nn.MSELoss()))


def test_the_area_of_several_classes_has_a_name_of_its_own() -> None:
    outputs, targets = torch.randn(30, 3), torch.arange(30) % 3
    metric = resolve_metrics(["roc_auc"], probabilities=False)["roc_auc"]
    with pytest.raises(HeldinError, match="give 'roc_auc_ovr'"):
        metric(outputs, targets)
    metric = resolve_metrics(["roc_auc_ovr"], probabilities=False)["roc_auc_ovr"]
    assert 0 < metric(outputs, targets) < 1
