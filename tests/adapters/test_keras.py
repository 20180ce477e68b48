"""heldin.keras against the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heldin
from tests.support import inside, plain

keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

from heldin.adapters.patches import MethodWrapper
from heldin.keras import EarlyStopping
from tests.support import runs

pytestmark = plain.foreign


SINGLE = 1e-4  # whatever the type of its weights, Keras multiplies in single precision on PyTorch


def made(case: plain.Case) -> Any:
    """The same network, with activations inside of layers."""
    kind = "mixed_bfloat16" if case.bf16 else "float32"
    model = keras.Sequential(
        [
            keras.layers.Input((plain.INPUTS,)),
            keras.layers.Dense(12, activation="tanh", dtype=kind),
            keras.layers.Dense(plain.CLASSES, dtype=kind),
        ]
    )
    weights = [p.detach() for p in plain.net(torch.float32).parameters()]
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
    x, y = (a.numpy() for a in plain.data(torch.float32))
    settings = {"batch_size": case.batch, "epochs": case.epochs, "shuffle": False, "verbose": 0}
    return model.fit(x, y, callbacks=list(callbacks), **{**settings, **options})


def by_hand(case: plain.Case) -> tuple[runs.EvidenceStopping, Any]:
    """A plain loop with the same Keras model and optimiser."""
    model, (x, y) = made(case), plain.data(torch.float32)
    waiting = 0
    with runs.EvidenceStopping(model, **case.options) as stopping:
        inside.collector(stopping).keeps_all_passes = True  # as in the adapter: Keras adds them up
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


def rule(case: plain.Case, **options: Any) -> EarlyStopping:
    return EarlyStopping(case.rule, **options)


def as_torch(model: Any) -> nn.Module:
    module = plain.net(torch.float64)
    for p, w in zip(module.parameters(), model.get_weights(), strict=True):
        p.data = torch.tensor(w.T if w.ndim == 2 else w, dtype=torch.float64)
    return module


def expect_no_trace(model: Any) -> None:
    plain.expect_no_trace(model)
    assert "apply" not in vars(model.optimizer)
    assert not hasattr(model, "_heldin_state")


@plain.cases
def test_same_as_plain(case: plain.Case) -> None:
    """Keras goes on accumulating over the end of an epoch, and rounds to bfloat16 elsewhere."""
    callback, model = rule(case), made(case)
    fit(model, case, callback)
    found = callback.stopping
    assert found is not None
    if not case.bf16:
        plain.expect_same(case, found, as_torch(model), rtol=SINGLE, flush=False)
    expected, other = by_hand(case)
    assert found.stopped_step == expected.stopped_step
    assert [r.raw for r in found.history] == [r.raw for r in expected.history]
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        assert (a == b).all()
    expect_no_trace(model)


@pytest.mark.parametrize("kind", ["rows", "images"])
def test_batch_normalisation(kind: str) -> None:
    """As in PyTorch, and trained as by Keras alone, moving averages included."""
    shape = (plain.INPUTS,) if kind == "rows" else (4, 5, 1)
    x, y = plain.data(torch.float32)
    x = x.reshape(-1, *shape)

    def build() -> Any:
        keras.utils.set_random_seed(3)
        first = keras.layers.Dense(6) if kind == "rows" else keras.layers.Conv2D(6, 3)
        layers = [first, keras.layers.BatchNormalization(), keras.layers.Activation("tanh")]
        model = keras.Sequential(
            [keras.layers.Input(shape), *layers, keras.layers.Flatten(), keras.layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(plain.RATE), loss)
        return model

    callback, model, alone = (
        EarlyStopping(heldin.rules.Evidence(warmup=1000, estimator="exact")),
        build(),
        build(),
    )
    same = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
    weights = [torch.tensor(v.numpy()) for v in model.trainable_variables]
    with pytest.warns(heldin.errors.MixedSamplesWarning, match="batch normalisation"):
        model.fit(x.numpy(), y.numpy(), callbacks=[callback], **same)
    alone.fit(x.numpy(), y.numpy(), **same)
    for a, b in zip(model.get_weights(), alone.get_weights(), strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=SINGLE, atol=1e-5)
    expect_no_trace(model)
    assert not [layer for layer in model.layers if "call" in vars(layer)]

    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.ParameterList(weights)

        def forward(self, x: Any) -> Any:
            first, bias, gamma, beta, last, last_bias = self.values
            if kind == "rows":
                h = x @ first + bias
            else:
                h = nn.functional.conv2d(x.movedim(-1, 1), first.permute(3, 2, 0, 1), bias)
            h = nn.functional.batch_norm(h, None, None, gamma, beta, True, eps=1e-3).tanh()
            return (h.movedim(1, -1) if h.dim() > 2 else h).flatten(1) @ last + last_bias

    twin = Twin()
    optimizer = torch.optim.SGD(twin.parameters(), lr=plain.RATE)
    expected = runs.EvidenceStopping(twin, warmup=1000, estimator="exact")
    with pytest.warns(heldin.errors.MixedSamplesWarning):
        twin(x)
    for start in [*range(0, plain.ROWS, 16)] * 3:
        loss = nn.functional.cross_entropy(twin(x[start : start + 16]), y[start : start + 16])
        loss.backward()
        expected.step()
        optimizer.step()
        optimizer.zero_grad()
    expected.close()
    assert callback.stopping is not None
    named = {p.data_ptr(): name for name, p in model.named_parameters()}
    names = [named[v.value.data_ptr()] for v in model.trainable_variables]
    for a, b in zip(callback.stopping.history, expected.history, strict=True):
        found = [a.groups[name] for name in names]
        values = [b.groups[f"values.{i}"] for i in range(len(names))]
        assert found == pytest.approx(values, rel=SINGLE, abs=SINGLE)


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
    groups = [name for name in history if name.startswith("heldin/group/")]
    assert sorted(name.rsplit("/", 1)[1] for name in groups) == 2 * ["bias"] + 2 * ["kernel"]
    assert not any("_torch_params" in name for name in groups)
    assert callback.stopped_epoch == 10


def test_start_from_epoch_and_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    case = plain.CASES[0]
    callback = rule(case, start_from_epoch=15)
    history = fit(made(case), case, callback).history
    assert callback.stopping is not None
    assert callback.stopping.stopped_step == 42
    assert len(history["loss"]) == 16
    assert capsys.readouterr().out == ""  # fit(verbose=0)
    for verbose in (True, False):
        callback = rule(case, verbose=verbose)
        fit(made(case), case, callback, verbose=2)
        assert (f"EarlyStopping: {callback.conclusion}" in capsys.readouterr().out) is verbose


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

    def callbacks() -> tuple[EarlyStopping, list[Any]]:
        backup = keras.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
        callback = rule(case)
        return callback, [callback, backup] if first else [backup, callback]

    _, both = callbacks()
    fit(made(case), case, *both, epochs=5)
    callback, both = callbacks()
    model = made(case)
    fit(model, case, *both)
    plain.expect_same(case, callback.stopping, as_torch(model), rtol=SINGLE)
    expected, other = by_hand(case)
    assert callback.stopping is not None
    assert [r.raw for r in callback.stopping.history] == [r.raw for r in expected.history]
    assert callback.stopping.criterion == expected.criterion
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        assert (a == b).all()


def test_validation_data_do_not_count() -> None:
    case = plain.CASES[0]
    callback, model = rule(case), made(case)
    x, y = (a.numpy() for a in plain.data(torch.float32))
    history = fit(model, case, callback, validation_data=(x[:20], y[:20])).history
    assert "val_loss" in history
    plain.expect_same(case, callback.stopping, as_torch(model), rtol=SINGLE)


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


def test_a_model_saved_in_training_loads_without_heldin(tmp_path: Path) -> None:
    case = plain.CASES[0]
    model = made(case)
    saver = keras.callbacks.ModelCheckpoint(str(tmp_path / "saved.keras"))
    fit(model, case, rule(case), saver, epochs=2)
    other = keras.models.load_model(tmp_path / "saved.keras")
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        assert (a == b).all()


def test_after_an_error_the_next_fit_starts_clean() -> None:
    """Keras tells no callback of an error."""

    def fail(batch: int, logs: Any) -> None:
        raise RuntimeError("broken")

    case = plain.CASES[0]
    model, broken = made(case), keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    lost, callback = rule(case), rule(case)
    with pytest.raises(RuntimeError, match="broken"):
        fit(model, case, lost, broken)
    fit(model, case, callback, epochs=2)
    assert lost.stopping is not None
    assert lost.stopping._model is None
    assert callback.stopping is not None
    assert len(callback.stopping.history) == 8
    expect_no_trace(model)


def test_two_at_once_and_compiled_models_are_refused() -> None:
    """And what was refused is not in the way of the next fit."""
    case = plain.CASES[0]
    model = made(case)
    with pytest.raises(heldin.HeldinError, match="there are two"):
        fit(model, case, rule(case), rule(case))
    model.jit_compile = True
    with pytest.raises(heldin.HeldinError, match="jit_compile=False"):
        fit(model, case, rule(case))
    model.jit_compile = False
    callback = rule(case)
    fit(model, case, callback)
    plain.expect_same(case, callback.stopping, as_torch(model), rtol=SINGLE)
    expect_no_trace(model)


def test_state_by_other_means() -> None:
    case = plain.CASES[4]
    callback, model = rule(case), made(case)
    fit(model, case, callback, epochs=5)
    other = rule(case)
    other.load_state_dict(callback.state_dict())
    fit(model, case, other)
    plain.expect_same(case, other.stopping, as_torch(model), rtol=SINGLE)


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(heldin.HeldinError, match=r"EarlyStopping: .*'smoothness'"):
        EarlyStopping(smoothness=0.5)


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
    # threads of MLflow's queue may log an entry again, if both make the folder of a file store
    entries = {(m.step, m.timestamp, m.value) for m in found}
    logged = [value for _, _, value in sorted(entries)]
    assert logged == pytest.approx([*values[3::4], values[-1]])


def test_tensorboard(tmp_path: Path) -> None:
    """Keras' own TensorBoard callback needs TensorFlow: the logs, written by PyTorch."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    case = plain.CASES[0]
    callback = rule(case)
    with SummaryWriter(str(tmp_path)) as writer:

        def write(epoch: int, logs: dict[str, float]) -> None:
            for name, value in logs.items():
                writer.add_scalar(name, value, epoch)

        fit(made(case), case, callback, keras.callbacks.LambdaCallback(on_epoch_end=write))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert callback.stopping is not None
    values = [r.criterion for r in callback.stopping.history]
    logged = [e.value for e in events.Scalars("heldin/criterion")]
    assert logged == pytest.approx([*values[3::4], values[-1]], rel=1e-6)
    assert len(events.Scalars("loss")) == len(logged)


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError, match="but it runs on jax: set KERAS_BACKEND=torch"):
        plain.imported_again("keras")


# -- every way out


@plain.broken
@pytest.mark.parametrize("place", ["begin", "step", "data", "batch end", "epoch end"])
def test_errors_and_interrupts_leave_no_trace(place: str, error: type[BaseException]) -> None:
    case, fuse = plain.CASES[0], plain.Fuse(error)
    x, y = plain.data(torch.float32)

    class Burning(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            if place == "begin":
                raise error("broken")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if place == "batch end":
                fuse()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if place == "epoch end":
                fuse()

    class Loss(keras.losses.SparseCategoricalCrossentropy):
        def call(self, *args: Any, **kwargs: Any) -> Any:
            if place == "step":
                fuse()
            return super().call(*args, **kwargs)

    model = made(case)
    model.compile(model.optimizer, Loss(from_logits=True))
    data = torch.utils.data.DataLoader(
        plain.Rows(fuse if place == "data" else plain.Fuse(error), torch.float32)
        if place == "data"
        else torch.utils.data.TensorDataset(x, y),
        batch_size=16,
    )
    with pytest.raises(error, match="broken"):
        model.fit(data, epochs=9, verbose=0, callbacks=[EarlyStopping("evidence"), Burning()])
    plain.expect_no_trace(model)
    assert hasattr(model, "_heldin_state") == (place == "begin")  # does nothing by itself
    for owner in (model, model.optimizer, *model.layers):
        assert not [v for v in vars(owner).values() if isinstance(v, MethodWrapper)]


def test_a_model_that_nobody_trains_is_noticed() -> None:
    case = plain.CASES[0]
    model = made(case)
    model.train_step = lambda data: {"loss": 0.0}
    with pytest.warns(heldin.HeldinWarning, match=r"no backward pass .* whole epoch of 4 batches"):
        fit(model, case, EarlyStopping(case.rule), epochs=2)
