"""The user's training is the same, bit for bit, with and without heldin, in every framework.

The network has dropout and batch normalisation, rows come in random order, and Adam has a state.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support import plain

pytestmark = plain.foreign
EPOCHS = 3
STEPS = 4 * EPOCHS
OPTIONS: dict[str, Any] = {
    "rule": "folds",
    "patience": None,
    "restore": False,
    "metrics": ["accuracy"],  # and a temperature, which is tried on the last layer
}


def net() -> nn.Module:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    return nn.Sequential(
        nn.Linear(plain.INPUTS, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, plain.CLASSES),
    )


def rows() -> Any:
    return TensorDataset(*plain.data(torch.float32))


def loader() -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=16, shuffle=True)


class Trace(list[int]):
    """Checksums of weights, buffers and random numbers."""

    def add(self, tensors: Any) -> None:
        state = [*tensors, torch.get_rng_state()]
        parts = [t.detach().cpu().contiguous().numpy().tobytes() for t in state]
        self.append(crc32(b"".join(parts)))


def expect_same(train: Callable[[bool], Trace]) -> None:
    without, with_heldin = train(False), train(True)
    assert len(without) == len(set(without)) == STEPS  # every step changes something
    assert with_heldin == without


def test_lightning() -> None:
    lightning = pytest.importorskip("lightning")
    from heldin.lightning import EarlyStopping

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def train(follow: bool) -> Trace:
        trace, module = Trace(), Module()

        class Tracing(lightning.Callback):
            def on_train_batch_end(self, *_: Any) -> None:
                trace.add(module.state_dict().values())

        callbacks = [*([EarlyStopping(**OPTIONS)] if follow else []), Tracing()]
        lightning.Trainer(
            callbacks=callbacks, max_epochs=EPOCHS, accelerator="cpu", barebones=True
        ).fit(module, loader())
        return trace

    expect_same(train)


def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from heldin.transformers import EarlyStoppingCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def train(follow: bool) -> Trace:
        trace, model = Trace(), Model()

        class Tracing(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                trace.add(model.state_dict().values())

        callbacks = [
            *([EarlyStoppingCallback(**OPTIONS, finish=False)] if follow else []),
            Tracing(),
        ]
        transformers.Trainer(
            model,
            transformers.TrainingArguments(
                str(tmp_path),
                per_device_train_batch_size=16,
                num_train_epochs=EPOCHS,
                learning_rate=0.01,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=[{"x": a, "labels": b} for a, b in rows()],
            callbacks=callbacks,
        ).train()
        return trace

    expect_same(train)


@pytest.mark.parametrize("accumulate", [None, 2])
def test_keras(accumulate: int | None) -> None:
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras runs on another backend")
    from heldin.keras import EarlyStopping

    def train(follow: bool) -> Trace:
        keras.utils.set_random_seed(5)
        layers, trace = keras.layers, Trace()
        model = keras.Sequential(
            [
                layers.Input((plain.INPUTS,)),
                layers.Dense(8, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.5),
                layers.Dense(plain.CLASSES),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

        class Tracing(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                states = [*model.variables, *model.optimizer.variables]
                trace.add(v.value for v in states)

        callbacks = [*([EarlyStopping(**OPTIONS)] if follow else []), Tracing()]
        x, y = plain.data(torch.float32)
        model.fit(
            x.numpy(), y.numpy(), batch_size=16, epochs=EPOCHS, verbose=0, callbacks=callbacks
        )
        return trace

    expect_same(train)


def test_skorch() -> None:
    pytest.importorskip("skorch")
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Callback

    from heldin.skorch import EarlyStopping

    def train(follow: bool) -> Trace:
        trace = Trace()

        class Tracing(Callback):
            def on_batch_end(self, net: Any, training: bool = False, **_: Any) -> None:
                trace.add(net.module_.state_dict().values())

        callbacks = [*([EarlyStopping(**OPTIONS)] if follow else []), Tracing()]
        x, y = plain.data(torch.float32)
        NeuralNetClassifier(
            net(),
            criterion=nn.CrossEntropyLoss,
            optimizer=torch.optim.Adam,
            lr=0.01,
            batch_size=16,
            max_epochs=EPOCHS,
            iterator_train__shuffle=True,
            train_split=None,
            verbose=0,
            callbacks=callbacks,
        ).fit(x.numpy(), y.numpy())
        return trace

    expect_same(train)


@pytest.mark.parametrize("native", [True, False])
def test_fastai(native: bool) -> None:
    pytest.importorskip("fastai")
    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as FastLoader
    from fastai.learner import Learner
    from fastai.optimizer import Adam, OptimWrapper

    from heldin.fastai import EarlyStopping

    def wrapped(params: Any, **options: Any) -> Any:
        return OptimWrapper(params, torch.optim.Adam, **options)

    def train(follow: bool) -> Trace:
        trace, model = Trace(), net()

        class Tracing(Callback):
            def after_batch(self) -> None:
                if self.learn.training:
                    trace.add(model.state_dict().values())

        batches = FastLoader(list(rows()), bs=16, shuffle=True, num_workers=0)
        learn = Learner(
            DataLoaders(batches, FastLoader([], bs=16, num_workers=0)),
            model,
            loss_func=nn.CrossEntropyLoss(),
            opt_func=Adam if native else wrapped,
            lr=0.01,
            cbs=[*([EarlyStopping(**OPTIONS)] if follow else []), Tracing()],
        )
        with learn.no_bar(), learn.no_logging():
            learn.fit(EPOCHS)
        return trace

    expect_same(train)


def test_ignite() -> None:
    pytest.importorskip("ignite")
    from ignite.engine import Events, create_supervised_trainer

    from heldin.ignite import EarlyStopping

    def train(follow: bool) -> Trace:
        trace, model = Trace(), net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
        if follow:
            EarlyStopping(model, optimizer, F.cross_entropy, **OPTIONS).attach(trainer)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: trace.add(model.state_dict().values())
        )
        trainer.run(loader(), max_epochs=EPOCHS)
        return trace

    expect_same(train)


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from heldin.accelerate import EarlyStopping

    def batch_loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def train(follow: bool) -> Trace:
        trace, model, accelerator = Trace(), net(), Accelerator(cpu=True)
        prepared, optimizer, batches = accelerator.prepare(
            model, torch.optim.Adam(model.parameters(), lr=0.01), loader()
        )
        stopping: Any = None
        if follow:
            stopping = EarlyStopping(
                accelerator, prepared, optimizer, batches, batch_loss, **OPTIONS
            )
        for _ in range(EPOCHS):
            for batch in batches:
                accelerator.backward(batch_loss(prepared, batch))
                optimizer.step()
                optimizer.zero_grad()
                if stopping is not None:
                    stopping.step(batch)
                trace.add(model.state_dict().values())
        if stopping is not None:
            stopping.close()
        return trace

    expect_same(train)


def test_fabric() -> None:
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric

    from heldin.fabric import EarlyStopping

    def train(follow: bool) -> Trace:
        trace, fabric = Trace(), Fabric(accelerator="cpu", devices=1)
        network = net()
        model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=0.01))
        batches = fabric.setup_dataloaders(loader())
        if follow:
            options = {name: value for name, value in OPTIONS.items() if name != "restore"}
            stopping = EarlyStopping(model, optimizer, F.cross_entropy, batches, **options)
        for _ in range(EPOCHS):
            for inputs, labels in batches:
                optimizer.zero_grad()
                fabric.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                trace.add(network.state_dict().values())
        if follow:
            stopping.close()
        return trace

    expect_same(train)
