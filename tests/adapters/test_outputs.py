"""Out-of-fold outputs, metrics and a temperature in every framework.

Outputs are compared with those of freshly built networks that are trained without a fold, and a run
with a temperature with `heldin.EarlyStopping` in a plain loop.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from heldin import rules
from tests.support import estimated, plain
from tests.support.folds_runs import separately

pytestmark = plain.foreign
CASE = replace(plain.CASES[0], epochs=8)
FOLDS = rules.Folds(folds=3, average="best")
METRICS = ["accuracy", "neg_log_loss"]


@dataclass
class Run:
    """A run that is over: its callback, the torch network, its end in the logs, and the model."""

    callback: Any
    net: nn.Module
    logged: dict[str, Any]
    model: Any = None


def logits(model: nn.Module, batch: Any) -> Tensor:
    """Return 1 more than the logits of a batch."""
    inputs = {"x": batch["x"]} if isinstance(batch, dict) else {}
    out = (
        model(**inputs, labels=batch["labels"])
        if inputs
        else getattr(model, "net", model)(batch[0])
    )
    return getattr(out, "logits", out["logits"] if isinstance(out, dict) else out) + 1  # type: ignore[operator, return-value]


def saved(callback: Any) -> dict[str, Any]:
    """Return the saved state of the rule."""
    of_skorch = hasattr(callback, "run_state")
    state = callback.run_state() if of_skorch else callback.state_dict()
    rule: dict[str, Any] = copy.deepcopy(state.get("run", state)["rule"])
    return rule


def in_lightning(folder: Path, **options: Any) -> Run:
    lightning = pytest.importorskip("lightning")
    from heldin.lightning import EarlyStopping
    from tests.adapters.test_lightning_estimates import Module, trainer

    callback, module = EarlyStopping(**options), Module()
    fit = trainer(CASE, callback)
    assert isinstance(fit, lightning.Trainer)
    fit.fit(module, estimated.loader(CASE, shuffle=False))
    return Run(callback, module.net, {k: float(v) for k, v in fit.callback_metrics.items()})


def in_transformers(folder: Path, **options: Any) -> Run:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from heldin.transformers import EarlyStoppingCallback
    from tests.adapters.test_transformers_estimates import trainer

    callback = EarlyStoppingCallback(**options)
    run = trainer(CASE, folder, callback, logging_strategy="steps", logging_steps=1)
    run.train()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    return Run(callback, run.model.net, logged[-1], run.model)


def in_skorch(folder: Path, **options: Any) -> Run:
    pytest.importorskip("skorch")
    from heldin.skorch import EarlyStopping
    from tests.adapters.test_skorch_estimates import fit, used

    made = fit(CASE, EarlyStopping(**options))
    return Run(used(made), made.module_.net, dict(made.history[-1]), made.module_)


def in_fastai(folder: Path, **options: Any) -> Run:
    pytest.importorskip("fastai")
    from heldin.fastai import EarlyStopping
    from tests.adapters.test_fastai_estimates import fit, learner  # type: ignore[attr-defined]

    callback = EarlyStopping(**options)
    learn = learner(CASE, callback)
    fit(learn, CASE.epochs)
    names = learn.recorder.metric_names
    return Run(callback, learn.model.net, dict.fromkeys(names, learn.recorder.values[-1]))


def in_ignite(folder: Path, **options: Any) -> Run:
    pytest.importorskip("ignite")
    from ignite.engine import create_supervised_trainer

    from heldin.ignite import EarlyStopping

    model = plain.net()
    optimizer = plain.sgd(model)
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
    handler = EarlyStopping(model, optimizer, F.cross_entropy, **options).attach(trainer)
    trainer.run(estimated.loader(CASE, shuffle=False), max_epochs=CASE.epochs)
    return Run(handler, model, trainer.state.metrics)


def in_accelerate(folder: Path, **options: Any) -> Run:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from heldin.accelerate import EarlyStopping

    accelerator, net = Accelerator(cpu=True), plain.net()
    model, optimizer, batches = accelerator.prepare(
        net, plain.sgd(net), estimated.loader(CASE, shuffle=False)
    )
    loss = estimated.batch_loss
    with EarlyStopping(accelerator, model, optimizer, batches, loss, **options) as stopping:
        for _ in range(CASE.epochs):
            for batch in batches:
                accelerator.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                stopping.step(batch)
    return Run(stopping, net, stopping.metrics())


def in_keras(folder: Path, **options: Any) -> Run:
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras runs on another backend")
    from heldin.keras import EarlyStopping
    from tests.adapters.test_keras import as_torch, fit, made

    callback, model = EarlyStopping(**options), made(CASE)
    history = fit(model, CASE, callback).history
    return Run(callback, as_torch(model), {name: values[-1] for name, values in history.items()})


FRAMEWORKS = {
    f.__name__.removeprefix("in_"): f
    for f in (
        in_accelerate,
        in_fastai,
        in_ignite,
        in_keras,
        in_lightning,
        in_skorch,
        in_transformers,
    )
}
each = pytest.mark.parametrize("name", [*FRAMEWORKS])


def twins(folds: Tensor, steps: int) -> list[nn.Module]:
    """Return freshly built networks, each trained without one fold."""
    batches = list(torch.arange(plain.ROWS).split(CASE.batch)) * CASE.epochs
    trained = []
    for fold in folds.unique().tolist():
        twin = plain.net()
        separately(
            twin, plain.sgd(twin), F.cross_entropy, plain.data(), batches[:steps], folds != fold
        )
        trained.append(twin)
    return trained  # type: ignore[return-value]


@each
def test_outputs_are_those_of_networks_trained_without_the_rows(name: str, tmp_path: Path) -> None:
    near: dict[str, Any] = (
        {"rtol": 2e-4, "atol": 2e-5} if name == "keras" else {"rtol": 1e-8, "atol": 1e-10}
    )
    run = FRAMEWORKS[name](tmp_path, rule=FOLDS, patience=None, metrics=METRICS, temperature=False)
    callback, (x, y) = run.callback, plain.data()
    held = callback.out_of_fold
    step = callback.best_step
    assert 0 < step < 4 * CASE.epochs
    assert torch.equal(held.rows, torch.arange(plain.ROWS))
    assert torch.equal(held.targets.flatten(), y)
    models = twins(held.folds, step)
    expected = torch.empty(plain.ROWS, plain.CLASSES, dtype=torch.float64)
    with torch.no_grad():
        for fold, twin in enumerate(models):
            expected[held.folds == fold] = twin(x[held.folds == fold])
    torch.testing.assert_close(held.outputs.double(), expected, **near)

    accuracy = float((expected.argmax(1) == y).double().mean())
    loss = float(F.cross_entropy(expected, y))
    estimates = callback.estimates
    assert estimates["accuracy"].value == pytest.approx(accuracy)
    assert estimates["accuracy"].low < accuracy < estimates["accuracy"].high
    assert estimates["loss"].value == pytest.approx(loss, rel=near["rtol"])
    assert estimates["neg_log_loss"].value == pytest.approx(-loss, rel=near["rtol"])
    assert {"heldin/estimate", "heldin/accuracy", "heldin/neg_log_loss"} <= run.logged.keys()
    if name not in ("fastai", "keras", "skorch"):  # which show fewer values
        assert run.logged["heldin/best_accuracy"] == pytest.approx(accuracy)

    plan = callback.plan()
    assert (plan.steps, plan.epochs, plan.temperature) == (step, -(-step // 4), 1.0)
    assert heldin.compare(callback, callback)["accuracy"].difference == 0.0
    summary = callback.summary()
    assert summary["heldin/best_step"] == step
    assert summary["heldin/accuracy_low"] == estimates["accuracy"].low
    assert callback.conclusion.startswith("not stopped after ")
    assert (
        f"expect loss {estimates['loss']}, accuracy {estimates['accuracy']}" in callback.conclusion
    )
    if name == "keras":
        with pytest.raises(heldin.HeldinError, match=r"EarlyStopping\.committee: models of this"):
            callback.committee()
        return
    members = [getattr(member, "net", member) for member in callback.committee().members]
    for member, twin in zip(members, [run.net, *models], strict=True):
        for p, q in zip(member.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, **near)
        assert member is not run.net


def in_a_plain_loop(**options: Any) -> tuple[heldin.EarlyStopping, nn.Module]:
    model, loader = plain.net(), estimated.loader(CASE, shuffle=False)
    optimizer = plain.sgd(model)
    stopping = heldin.EarlyStopping(model, optimizer, F.cross_entropy, loader, **options)
    for _ in stopping.epochs(CASE.epochs):
        for batch in loader:
            optimizer.zero_grad()
            estimated.batch_loss(model, batch).backward()
            optimizer.step()
    return stopping, model


@each
def test_a_temperature_is_that_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    options = {"rule": replace(FOLDS, engine="replay"), "patience": None}
    stopping, model = in_a_plain_loop(**options)
    run = FRAMEWORKS[name](tmp_path, **options)
    callback = run.callback
    temperature = callback.temperature_ if name == "skorch" else callback.temperature
    assert temperature > 1.001
    near: dict[str, float] = {"rtol": 2e-4, "atol": 2e-5} if name == "keras" else {}
    assert temperature == pytest.approx(stopping.temperature, rel=near.get("rtol", 1e-8))
    assert callback.best_step == stopping.best_step
    assert callback.plan() == replace(stopping.plan(), temperature=temperature)
    assert callback.estimates["loss"].value == pytest.approx(stopping.estimates["loss"].value)
    for p, q in zip(run.net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, **near)  # type: ignore[arg-type]
    difference = heldin.compare(callback, stopping).difference
    assert difference == pytest.approx(0.0, abs=1e-6 if near else 1e-9)


@each
def test_a_metric_chooses_the_weights(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "rule": FOLDS,
        "patience": None,
        "metrics": {
            "rightness": lambda outputs, targets: (
                (outputs.argmax(1) == targets.flatten()).double().mean()
            )
        },
        "monitor": "rightness",
        "mode": "max",
        "temperature": False,
    }
    stopping, _ = in_a_plain_loop(**options)
    run = FRAMEWORKS[name](tmp_path, **options)
    assert run.callback.best_step == stopping.best_step
    expected = stopping.estimates["rightness"].value
    assert run.callback.estimates["rightness"].value == pytest.approx(expected)
    assert expected == max(saved(run.callback)["outcome"]["monitored"])


@each
def test_functions_of_ones_own(name: str, tmp_path: Path) -> None:
    """`predict` sees the model of the framework, `targets` its batch."""
    seen: list[Any] = []

    def predict(model: Any, batch: Any) -> Any:
        seen.append(type(model).__name__)
        return model(batch[0]) + 1 if name == "keras" else logits(model, batch)

    def targets(batch: Any) -> Any:
        return -(batch["labels"] if isinstance(batch, dict) else batch[1]).flatten()

    options = {"rule": FOLDS, "patience": None, "temperature": False}
    usual = FRAMEWORKS[name](tmp_path, **options).callback.out_of_fold
    run = FRAMEWORKS[name](tmp_path, predict=predict, targets=targets, **options)
    held = run.callback.out_of_fold
    torch.testing.assert_close(held.outputs, usual.outputs + 1)
    assert torch.equal(held.targets, -usual.targets.flatten())
    assert set(seen) == {
        {
            "keras": "Sequential",
            "lightning": "Module",
            "skorch": "Module",
            "transformers": "Model",
            "fastai": "Autocast",
        }.get(name, "Sequential")
    }


def test_predict_step_of_lightning() -> None:
    """It is called where `training_step` calls several children."""
    pytest.importorskip("lightning")
    from heldin.lightning import EarlyStopping
    from tests.adapters.test_lightning_estimates import Module, trainer

    class Parts(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = self.net[:2], self.net[2:]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.last(self.first(batch[0])), batch[1])

    class Predicting(Parts):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("predicted", 1.0)  # which is dropped
            return self.last(self.first(batch[0])).softmax(1)

    def run(kind: type, **options: Any) -> Any:
        callback = EarlyStopping(rule=FOLDS, patience=None, **options)
        fit = trainer(CASE, callback)
        fit.fit(kind(), estimated.loader(CASE, shuffle=False))
        assert "predicted" not in fit.callback_metrics
        return callback

    held = run(Predicting, metrics=["accuracy"]).out_of_fold
    usual = in_lightning(Path(), rule=FOLDS, patience=None, temperature=False).callback.out_of_fold
    torch.testing.assert_close(held.outputs, usual.outputs.softmax(1))
    with pytest.raises(heldin.HeldinError, match="give predict="):
        run(Parts, metrics=["accuracy"])
    callback = run(Parts)  # nothing was asked for
    with pytest.raises(heldin.HeldinError, match="the loss calls the model 0 times"):
        _ = callback.out_of_fold


@each
def test_a_resumed_run_has_the_same_outputs(name: str, tmp_path: Path) -> None:
    """The state of a callback has the outputs of all checks."""
    run = FRAMEWORKS[name](tmp_path, rule=FOLDS, patience=None, metrics=METRICS)
    outcome = saved(run.callback)["outcome"]
    number = estimated.followed(run.callback).best_number
    held = run.callback.out_of_fold.outputs * outcome["temperatures"][number]
    torch.testing.assert_close(outcome["outputs"][number], held)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "metrics": ({"metrics": ["f1_makro"]}, "no scorer 'f1_makro'"),
    "monitor": ({"monitor": "f1"}, "monitor must be one of 'loss'"),
    "mode": ({"mode": "best"}, "mode must be 'min' or 'max'"),
    "predict": ({"predict": 3}, "predict must be a function"),
    "temperature": ({"temperature": 2.0}, "temperature must be True, False or 'auto'"),
    "evidence": ({"rule": "evidence", "metrics": ["accuracy"]}, "metrics has no effect"),
}


@pytest.mark.parametrize("mistake", [*MISTAKES])
@each
def test_mistakes_are_refused_when_the_object_is_made(
    name: str, mistake: str, tmp_path: Path
) -> None:
    options, message = MISTAKES[mistake]
    with pytest.raises(heldin.HeldinError, match=message):
        FRAMEWORKS[name](tmp_path, **options)


def test_results_of_evidence_and_before_a_run() -> None:
    pytest.importorskip("lightning")
    from heldin.lightning import EarlyStopping

    for rule in ("auto", "evidence"):
        callback = EarlyStopping(rule)
        assert callback.estimates == {}
        assert callback.conclusion == "no run yet"
        with pytest.raises(heldin.HeldinError, match=r"EarlyStopping\.out_of_fold: there was no"):
            _ = callback.out_of_fold
        with pytest.raises(heldin.HeldinError, match="plan: the run has no best step"):
            callback.plan()


@each
def test_one_line_at_the_end(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"rule": FOLDS, "patience": heldin.Patience(1.0, 4, 1)}
    if name == "skorch":
        options["sink"] = lambda text: print(text)  # the net is not verbose
    run = FRAMEWORKS[name](tmp_path, **options)
    conclusion, printed = run.callback.conclusion, capsys.readouterr().out
    step = estimated.followed(run.callback).stopped_step
    assert conclusion.startswith("stopped after ")
    assert f"step {step}" in conclusion
    assert f"; expect loss {run.callback.estimates['loss']}" in conclusion
    silent = name in ("fastai", "keras")  # as their own switches say in these tests
    told = [line for line in printed.splitlines() if "expect loss" in line]
    kind = "EarlyStoppingCallback" if name == "transformers" else "EarlyStopping"
    assert told == ([] if silent else [f"{kind}: {conclusion}"])
    assert repr(run.callback) == f"<{kind}({FOLDS!r}): {conclusion}>"
    FRAMEWORKS[name](tmp_path, **options, verbose=False)
    assert "expect loss" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ignite", "skorch"])
def test_results_are_logged_at_the_end(name: str, tmp_path: Path) -> None:
    run = FRAMEWORKS[name](tmp_path, rule=FOLDS, verbose=False)
    summary = run.callback.summary()
    assert summary == {key: run.logged[key] for key in summary}


def test_a_repr_before_a_run() -> None:
    pytest.importorskip("lightning")
    from heldin.lightning import EarlyStopping

    assert repr(EarlyStopping(budget=4, groups=list(range(99)))) == (
        "EarlyStopping(groups=[0, 1, 2, 3, 4, 5, ...], budget=4)"
    )


class Own(heldin.rules.Rule):
    """A rule of the user's own."""


def test_a_rule_of_the_users_own() -> None:
    pytest.importorskip("lightning")
    from heldin.lightning import EarlyStopping

    said = r"EarlyStopping: tests\.adapters\.test_outputs\.Own is a rule that frameworks do not"
    with pytest.raises(heldin.HeldinError, match=said):
        EarlyStopping(Own())


def test_settings_of_skorch_are_the_arguments() -> None:
    pytest.importorskip("skorch")
    from sklearn.base import clone

    from heldin.skorch import EarlyStopping

    given: dict[str, Any] = {"metrics": ["accuracy"], "temperature": False, "on_check": print}
    callback = clone(EarlyStopping(**given))
    assert {name: callback.get_params()[name] for name in given} == given
    assert callback.temperature_ == 1.0
    callback.set_params(rule="evidence", on_check=None)
    with pytest.raises(heldin.HeldinError, match="metrics has no effect with rule 'evidence'"):
        callback.initialize().make_session()
