"""heldin.keras.EarlyStopping against the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import heldin
from tests.support import estimated, plain

keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

from heldin.adapters.patches import MethodWrapper
from heldin.keras import EarlyStopping, Variables
from tests.adapters.test_keras import SINGLE, as_torch, fit, made

pytestmark = plain.foreign
PLAIN = estimated.CASES[0]


def rule(**options: Any) -> EarlyStopping:
    return EarlyStopping(**estimated.arguments(**options))


def expect_no_trace(model: Any) -> None:
    plain.expect_no_trace(model)
    for owner in (model, model.optimizer):
        assert not [k for k, v in vars(owner).items() if isinstance(v, MethodWrapper)]
    assert not hasattr(model, "_heldin_shadows")


@pytest.mark.parametrize("case", estimated.CASES[:3], ids=lambda case: case.name)
def test_same_as_plain(case: plain.Case) -> None:
    """Keras goes on accumulating over the end of an epoch."""
    callback, model = rule(), made(case)
    history = fit(model, case, callback)
    found = callback.stopping
    estimated.expect_same(
        case, found, as_torch(model), rtol=20 * SINGLE, shuffle=False, flush=False
    )
    assert found is not None
    assert callback.stopped_epoch == len(history.history["loss"]) - 1
    assert history.history["heldin/estimate"][-1] == found.history[-1].estimate
    assert history.history["heldin/standard_error"][-1] > 0
    expect_no_trace(model)


@pytest.mark.parametrize("kind", ["Adam", "RMSprop", "AdamW"])
def test_a_shadow_takes_the_same_steps_as_a_model_without_its_rows(kind: str) -> None:
    """With batch normalisation, dropout left out, weight decay and a schedule."""

    def build() -> Any:
        keras.utils.set_random_seed(3)
        layers = keras.layers
        model = keras.Sequential(
            [
                layers.Input((plain.INPUTS,)),
                layers.Dense(6),
                layers.BatchNormalization(),
                layers.Dense(3, kernel_regularizer="l2", kernel_constraint="unit_norm"),
            ]
        )
        rate = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.8)
        optimizer = getattr(keras.optimizers, kind)(rate, clipnorm=0.5)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = plain.data(torch.float32)
    callback, model, twin = rule(rule="shadow", restore=False, patience=None), build(), build()
    options: dict[str, Any] = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
    model.fit(x.numpy(), y.numpy(), callbacks=[callback], **options)
    stopping: Any = callback.stopping
    kept = [
        [i for i in range(a, min(a + 16, plain.ROWS)) if stopping.fold_of_row[i] < 0]
        for a in (0, 16, 32, 48)
    ]
    for _ in range(3):
        for rows in kept:
            twin.train_on_batch(x[rows].numpy(), y[rows].numpy())
    shadow = estimated.last_shadows(callback.state_dict())[0]
    expected = [v.value.detach() for v in twin.trainable_variables]
    for weight, other in zip(shadow["weights"].values(), expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)
    moving = [v.value.detach() for v in twin.layers[1].non_trainable_variables]
    found = [b for b in shadow["buffers"].values() if b.shape == (6,)]
    for buffer, other in zip(found, moving, strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-4, atol=1e-5)
    expect_no_trace(model)


@pytest.mark.parametrize(
    "loss", ["mse", "MeanSquaredError", keras.losses.Huber(), "sum", "weights"]
)
def test_losses_of_rows_are_those_of_batches_of_one(loss: Any) -> None:
    """Targets (rows,) beside outputs (rows, 1), and a penalty that each batch has whole."""
    x, y = (a.float() for a in plain.data())
    model = keras.Sequential(
        [keras.layers.Input((plain.INPUTS,)), keras.layers.Dense(1, kernel_regularizer="l2")]
    )
    chosen = keras.losses.MeanSquaredError(reduction="sum") if loss == "sum" else loss
    model.compile("sgd", "mse" if loss == "weights" else chosen)
    view = Variables(model)
    view.eval()
    assert view.has_row_losses == (loss != "sum")
    if loss == "weights":
        assert view.row_losses(view, (x, y, torch.ones(len(x)))).dim() == 0
    elif view.has_row_losses:
        alone = [view.loss(view, (a[None], b[None])) for a, b in zip(x, y, strict=True)]
        torch.testing.assert_close(view.row_losses(view, (x, y)), torch.stack(alone))


def test_loaders_of_pytorch() -> None:
    callback, model = rule(), made(PLAIN)
    x, y = plain.data(torch.float32)
    batches: Any = DataLoader(TensorDataset(x, y), batch_size=16)
    model.fit(batches, epochs=PLAIN.epochs, callbacks=[callback], verbose=0)
    estimated.expect_same(
        PLAIN, callback.stopping, as_torch(model), rtol=20 * SINGLE, shuffle=False
    )
    assert "_get_iterator" not in vars(batches)


def test_shuffled_arrays() -> None:
    callback = rule(patience=None, average="best")
    fit(made(PLAIN), PLAIN, callback, shuffle=True, epochs=3)
    assert callback.state_dict()["rule"]["rule"]["seen"] == 3 * plain.ROWS


def test_exact_resume(tmp_path: Path) -> None:
    whole, model = rule(), made(PLAIN)
    fit(model, PLAIN, whole)

    class Broken(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 5:
                raise RuntimeError("broken")

    backup = str(tmp_path / "backup")
    first = made(PLAIN)
    with pytest.raises(RuntimeError, match="broken"):
        fit(first, PLAIN, rule(), Broken(), keras.callbacks.BackupAndRestore(backup))
    expect_no_trace(first)
    callback, second = rule(), made(PLAIN)
    fit(second, PLAIN, callback, keras.callbacks.BackupAndRestore(backup))
    assert callback.stopping is not None
    assert whole.stopping is not None
    assert str(callback.stopping.history.columns()) == str(whole.stopping.history.columns())
    for a, b in zip(second.get_weights(), model.get_weights(), strict=True):
        assert (a == b).all()


def test_a_second_fit_is_refused() -> None:
    model = made(PLAIN)
    fit(model, PLAIN, rule(patience=None, average="best"), epochs=1)
    with pytest.raises(heldin.HeldinError, match="state of its shadows is not there"):
        fit(model, PLAIN, rule(patience=None, average="best"), epochs=1)
    expect_no_trace(model)


def test_what_cannot_be_followed_is_refused() -> None:
    model = made(PLAIN)
    x, y = plain.data(torch.float32)

    def stream() -> Any:
        while True:
            yield x.numpy(), y.numpy()

    with pytest.raises(heldin.HeldinError, match="IterableDataset has no row numbers"):
        model.fit(stream(), steps_per_epoch=2, callbacks=[rule()], verbose=0)
    expect_no_trace(model)
    with pytest.raises(heldin.HeldinError, match="two in this fit"):
        fit(model, PLAIN, rule(), rule())
    model = made(PLAIN)
    model.compile("adam", model.loss, jit_compile=True)
    with pytest.raises(heldin.HeldinError, match="jit_compile=False"):
        fit(model, PLAIN, rule())
    model = made(PLAIN)
    model.compile(keras.optimizers.Adam(use_ema=True), model.loss)
    with pytest.raises(heldin.HeldinError, match=r"use_ema=True keeps averages.*averaged_model="):
        fit(model, PLAIN, rule())
