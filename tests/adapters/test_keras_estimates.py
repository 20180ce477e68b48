"""heldin.keras.EarlyStopping against the plain loop."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import heldin
from tests.support import estimated, plain
from tests.support.outcome_runs import cross_fitted

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
    assert callback.state_dict()["rule"]["seen"] == 3 * plain.ROWS


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
    model.optimizer.gradient_accumulation_steps = 2
    with pytest.raises(heldin.HeldinError, match=r"use_ema=True\) are followed in one fit"):
        fit(model, PLAIN, rule())


# -- temperature

LAYERS = keras.layers
CROSS_ENTROPY = "sparse_categorical_crossentropy"
ENDS: dict[str, tuple[list[Any], Any]] = {  # the last layers, and the loss
    "logits": (
        [lambda: LAYERS.Dense(3)],
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ),
    "softmax": ([lambda: LAYERS.Dense(3, activation="softmax")], CROSS_ENTROPY),
    "layer": ([lambda: LAYERS.Dense(3), LAYERS.Softmax], keras.losses.get(CROSS_ENTROPY)),
    "one-hot": ([lambda: LAYERS.Dense(3, activation="softmax")], "categorical_crossentropy"),
    "sigmoid": (
        [lambda: LAYERS.Dense(1, activation="sigmoid")],
        keras.losses.BinaryCrossentropy(),
    ),
    "column": ([lambda: LAYERS.Dense(3, activation="softmax")], CROSS_ENTROPY),
}


def classify(end: str, **options: Any) -> tuple[EarlyStopping, Any]:
    """Train a network on few rows for long, and keep its last weights."""
    layers, loss = ENDS[end]
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [LAYERS.Input((plain.INPUTS,)), LAYERS.Dense(16, activation="tanh"), *(f() for f in layers)]
    )
    model.compile(keras.optimizers.SGD(0.5), loss)
    x, y = plain.data(torch.float32)
    targets = {"one-hot": torch.eye(3)[y], "sigmoid": (y > 0).long(), "column": y[:, None]}
    callback = EarlyStopping(rule=heldin.rules.Folds(folds=3), finish=True, **options)
    data = {"x": x.numpy(), "y": targets.get(end, y).numpy()}
    model.fit(**data, batch_size=16, epochs=20, shuffle=False, verbose=0, callbacks=[callback])
    return callback, model


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("CosineDecay", {}, r"CosineDecay\(decay_steps=8\) lowers .*finish=True"),
        ("PolynomialDecay", {}, r"PolynomialDecay\(decay_steps=8\) lowers"),
        ("PolynomialDecay", {"cycle": True}, ""),
        ("ExponentialDecay", {"decay_rate": 0.9}, ""),
    ],
)
def test_schedules_with_an_end_are_recognised(kind: str, options: Any, words: str) -> None:
    schedule = getattr(keras.optimizers.schedules, kind)(0.1, 8, **options)
    layers = LAYERS.Input((plain.INPUTS,)), LAYERS.Dense(3, activation="softmax")
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(schedule), CROSS_ENTROPY)
    x, y = plain.data(torch.float32)
    callback = EarlyStopping(rule=heldin.rules.Folds(folds=3), verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", heldin.HeldinWarning)
        model.fit(x.numpy(), y.numpy(), batch_size=16, epochs=2, verbose=0, callbacks=[callback])
    said = [str(each.message) for each in caught if "fixed end" in str(each.message)]
    assert len(said) == bool(words)
    assert all(re.search(words, text) for text in said)


@pytest.mark.parametrize("end", [*ENDS])
def test_a_temperature_is_in_the_last_layer(end: str) -> None:
    callback, model = classify(end)
    plain_run, uncalibrated = classify(end, temperature=False)
    temperature, logits = callback.temperature, plain_run.out_of_fold.outputs
    held = plain_run.out_of_fold
    expected, losses = cross_fitted(logits, held.targets, held.folds)
    assert plain_run.temperature == 1.0
    assert temperature == pytest.approx(expected, rel=1e-4)
    assert temperature > 1.2
    assert callback.estimates["loss"].value == pytest.approx(float(losses.mean()), rel=1e-3)
    assert callback.estimates["loss"].value < plain_run.estimates["loss"].value
    torch.testing.assert_close(callback.out_of_fold.outputs, logits / temperature)
    x, _ = plain.data(torch.float32)
    after, before = model(x), uncalibrated(x)
    if end == "sigmoid":
        after, before = after.logit(), before.logit()
    elif end != "logits":  # known up to a constant
        after, before = after.log(), before.log() - before.log().mean(1, keepdim=True)
        after = after - after.mean(1, keepdim=True)
    torch.testing.assert_close(after, before / temperature, rtol=1e-3, atol=1e-3)
    expect_no_trace(model)


def test_a_temperature_that_no_layer_takes() -> None:
    ENDS["scaled"] = (
        [lambda: LAYERS.Dense(3), lambda: LAYERS.Rescaling(2.0, offset=1.0)],
        ENDS["logits"][1],
    )
    callback, _ = classify("scaled")
    assert callback.temperature == 1.0
    with pytest.warns(heldin.HeldinWarning, match=r"divide its outputs by stopping\.temperature"):
        callback, _ = classify("scaled", temperature=True)
    assert callback.temperature > 1.2
    del ENDS["scaled"]


# -- averages of weights


@pytest.mark.parametrize("overwrites", [None, 3])
def test_averages_of_weights_are_followed(overwrites: int | None) -> None:
    """Shadows have averages of their own; that of the best step is restored."""

    def build() -> Any:
        model = made(PLAIN)
        optimizer = keras.optimizers.Adam(
            0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=overwrites
        )
        model.compile(optimizer, model.loss)
        return model

    def averages(model: Any) -> list[torch.Tensor]:
        return [v.value.detach() for v in model.optimizer._model_variables_moving_average]

    x, y = plain.data(torch.float32)
    batches = [slice(a, a + 16) for a in range(0, plain.ROWS, 16)] * 3
    callback, model = rule(rule="folds", average="best", patience=None, temperature=False), build()
    fit(model, PLAIN, callback, epochs=3, batch_size=16)
    step, held = callback.stopping.best_step, callback.out_of_fold
    twin, shadows = build(), [build() for _ in held.folds.unique()]
    for rows in batches[:step]:
        twin.train_on_batch(x[rows].numpy(), y[rows].numpy())
        for fold, shadow in enumerate(shadows):
            seen = torch.arange(plain.ROWS)[rows]
            seen = seen[held.folds[seen] != fold]
            shadow.train_on_batch(x[seen].numpy(), y[seen].numpy())
    assert 0 < step <= len(batches)
    for weight, average in zip(model.get_weights(), averages(twin), strict=True):
        torch.testing.assert_close(torch.tensor(weight), average)
    for fold, shadow in enumerate(shadows):
        shadow.set_weights([average.numpy() for average in averages(shadow)])
        outputs = shadow(x[held.folds == fold]).detach()
        torch.testing.assert_close(held.outputs[held.folds == fold], outputs, rtol=1e-3, atol=1e-4)
    expect_no_trace(model)
