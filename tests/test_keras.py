"""heldin.keras against the plain loop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heldin
import plain

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

from heldin.keras import EvidenceStopping

pytestmark = plain.foreign


@pytest.fixture(autouse=True)
def _width() -> Iterator[None]:
    width = keras.config.floatx()
    yield
    keras.config.set_floatx(width)


def made(case: plain.Case) -> Any:
    """The same network, with activations inside of layers."""
    keras.config.set_floatx("float32" if case.bf16 else "float64")  # also of the data
    kind = "mixed_bfloat16" if case.bf16 else "float64"
    model = keras.Sequential(
        [
            keras.layers.Input((plain.INPUTS,)),
            keras.layers.Dense(12, activation="tanh", dtype=kind),
            keras.layers.Dense(plain.CLASSES, dtype=kind),
        ]
    )
    weights = [p.detach() for p in plain.net(case.dtype).parameters()]
    model.set_weights([w.T.numpy() if w.dim() == 2 else w.numpy() for w in weights])
    model.compile(
        keras.optimizers.SGD(
            plain.RATE,
            momentum=plain.MOMENTUM,
            global_clipnorm=case.clip,
            gradient_accumulation_steps=case.accumulate if case.accumulate > 1 else None,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def fit(model: Any, case: plain.Case, *callbacks: Any, **options: Any) -> Any:
    x, y = (a.numpy() for a in plain.data(case.dtype))
    settings = {"batch_size": case.batch, "epochs": case.epochs, "shuffle": False, "verbose": 0}
    return model.fit(x, y, callbacks=list(callbacks), **{**settings, **options})


def by_hand(case: plain.Case) -> tuple[heldin.EvidenceStopping, Any]:
    """A plain loop with the same Keras model and optimiser."""
    model, (x, y) = made(case), plain.data(case.dtype)
    waiting = 0
    with heldin.EvidenceStopping(model, **case.options) as stopping:
        for _ in range(case.epochs):
            for start in range(0, plain.ROWS, case.batch):
                a, b = x[start : start + case.batch], y[start : start + case.batch]
                loss = model.compute_loss(x=a, y=b, y_pred=stopping.call(model, a))
                model.zero_grad()
                loss.backward()
                waiting = (waiting + 1) % case.accumulate
                if waiting == 0 and stopping.step():
                    return stopping, model
                grads = [v.value.grad for v in model.trainable_weights]
                with torch.no_grad():
                    model.optimizer.apply(grads, model.trainable_weights)
    raise AssertionError("it did not stop")


def rule(case: plain.Case, **options: Any) -> EvidenceStopping:
    return EvidenceStopping(**case.options, **options)


def as_torch(model: Any) -> nn.Module:
    module = plain.net(torch.float64)
    for p, w in zip(module.parameters(), model.get_weights(), strict=True):
        p.data = torch.tensor(w.T if w.ndim == 2 else w, dtype=torch.float64)
    return module


@plain.cases
def test_same_as_plain(case: plain.Case) -> None:
    """Keras goes on accumulating over the end of an epoch, and rounds to bfloat16 elsewhere."""
    callback, model = rule(case), made(case)
    fit(model, case, callback)
    found = callback.stopping
    assert found is not None
    if not case.bf16:
        rtol = 1e-4 if case.clip else 1e-8  # PyTorch adds 1e-6 to the norm, Keras does not
        plain.expect_same(case, found, as_torch(model), rtol=rtol, flush=False)
    expected, other = by_hand(case)
    assert found.stopped_step == expected.stopped_step
    assert [r.raw for r in found.history] == pytest.approx([r.raw for r in expected.history])
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b))
    assert "call" not in vars(model)
    assert "apply" not in vars(model.optimizer)
    assert not hasattr(model, "_heldin_state")
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_logs_and_history() -> None:
    case = plain.CASES[0]
    callback, model = rule(case, log_groups=True), made(case)
    seen: list[float] = []
    listener = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["heldin/criterion"])
    )
    history = fit(model, case, callback, listener).history
    assert callback.stopping is not None
    values = [r.criterion for r in callback.stopping.history]
    assert seen == values
    assert history["heldin/criterion"] == [*values[3::4], values[-1]]
    assert len(history["loss"]) == 11
    assert sum(name.startswith("heldin/group/") for name in history) == 4
    assert callback.stopped_epoch == 10


def test_start_from_epoch_and_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    case = plain.CASES[0]
    callback = rule(case, start_from_epoch=15, verbose=1)
    history = fit(made(case), case, callback).history
    assert callback.stopping is not None
    assert callback.stopping.stopped_step == 42
    assert len(history["loss"]) == 16
    assert "Epoch 16: early stopping (step " in capsys.readouterr().out
    fit(made(case), case, rule(case))
    assert capsys.readouterr().out == ""


def test_each_fit_starts_anew() -> None:
    case = plain.CASES[0]
    callback, model = rule(case), made(case)
    fit(model, case, callback, epochs=2)
    fit(model, case, callback, epochs=3)
    assert callback.stopping is not None
    assert [r.step for r in callback.stopping.history] == list(range(1, 13))


@pytest.mark.parametrize("case", [plain.CASES[0], plain.CASES[4]], ids=lambda case: case.name)
@pytest.mark.parametrize("first", [True, False])
def test_exact_resume_with_backup_and_restore(
    case: plain.Case, first: bool, tmp_path: Path
) -> None:
    """In whatever order the callbacks are listed."""

    def callbacks() -> tuple[EvidenceStopping, list[Any]]:
        backup = keras.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
        callback = rule(case)
        return callback, [callback, backup] if first else [backup, callback]

    _, both = callbacks()
    fit(made(case), case, *both, epochs=5)
    callback, both = callbacks()
    model = made(case)
    fit(model, case, *both)
    plain.expect_same(case, callback.stopping, as_torch(model))


def test_saved_weights_load_into_any_model(tmp_path: Path) -> None:
    """With the state in them, into a model without; and without, into one that has a callback."""
    case = plain.CASES[0]
    model = made(case)
    saver = keras.callbacks.ModelCheckpoint(
        str(tmp_path / "saved.weights.h5"), save_weights_only=True
    )
    fit(model, case, rule(case), saver, epochs=2)
    other = made(case)
    other.load_weights(tmp_path / "saved.weights.h5")
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        assert (a == b).all()
    model.save_weights(tmp_path / "plain.weights.h5")
    callback = rule(case)
    callback.set_model(other)
    other.load_weights(tmp_path / "plain.weights.h5")
    assert callback.state_dict() == {}
    fit(other, case, callback, epochs=1)


def test_state_by_other_means() -> None:
    case = plain.CASES[4]
    callback, model = rule(case), made(case)
    fit(model, case, callback, epochs=5)
    other = rule(case)
    other.load_state_dict(callback.state_dict())
    fit(model, case, other)
    plain.expect_same(case, other.stopping, as_torch(model))


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(heldin.HeldinError, match=r"EvidenceStopping: .*'smoothness'"):
        EvidenceStopping(smoothness=0.5)


def test_mlflow(mlflow_uri: str) -> None:
    import mlflow
    from mlflow.keras.callback import MlflowCallback

    case = plain.CASES[0]
    callback = rule(case)
    with mlflow.start_run() as active:
        fit(made(case), case, callback, MlflowCallback())
    found = mlflow.MlflowClient(mlflow_uri).get_metric_history(
        active.info.run_id, "heldin/criterion"
    )
    assert callback.stopping is not None
    values = [r.criterion for r in callback.stopping.history]
    logged = [m.value for m in sorted(found, key=lambda m: m.step)]
    assert logged == pytest.approx([*values[3::4], values[-1]])


def test_another_backend_is_refused() -> None:
    for code, said in (
        ("import heldin.keras", "and set KERAS_BACKEND=torch"),
        (
            "import keras; keras.backend.backend = lambda: 'jax'; import heldin.keras",
            "this one runs on jax; set KERAS_BACKEND=torch",
        ),
    ):
        backend = "tensorflow" if said.startswith("and") else "torch"
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "KERAS_BACKEND": backend},
            check=False,
        )
        assert "ImportError: heldin.keras needs Keras" in run.stderr
        assert said in run.stderr
