"""Cases: `EarlyStopping` of the frameworks that train in several processes."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import heldin
from tests.support import estimated, plain

from .common import case, everyone, refused, same_everywhere
from .shadows import Batches, Run

OPTIONS: dict[str, Any] = {"rule": "folds", "patience": estimated.PATIENCE, "temperature": False}
X, Y = plain.data()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=plain.RATE, momentum=plain.MOMENTUM)


def prepare(rank: int, world: int) -> None:
    """What torchrun tells a process, beside its rank."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), NODE_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", heldin.HeldinWarning)


def numbers(x: Tensor) -> list[int]:
    """The rows of a batch."""
    return [int((row == X).all(1).nonzero()) for row in x]


class OneProcess(Run):
    """Held-out rows are evaluated in batches of the size that each rank of the framework has."""

    batch_size = 8


def expect_one_process(
    stopping: Any, model: nn.Module, own: list[list[int]], y: Tensor = Y, **options: Any
) -> None:
    """The run of one process in which each step has the rows of all ranks.

    Args:
        stopping: the rule of the framework's run.
        model: with its restored weights.
        own: the rows of the batches of this rank.
        y: targets.
        options: of the rule.
    """
    plan: Batches = [list(parts) for parts in zip(*everyone(own), strict=True)]
    options = {"data": TensorDataset(X, y), "folds": 5, "patience": estimated.PATIENCE, **options}
    alone = OneProcess(plan, None, plain.net(), sgd, **options).train()
    assert alone.stopping.should_stop
    found, expected = stopping.history, alone.stopping.history
    assert [r.step for r in found] == [r.step for r in expected]
    for name in ("estimate", "standard_error", "training_loss"):
        torch.testing.assert_close(
            found.columns()[name], expected.columns()[name], rtol=1e-8, atol=1e-8, equal_nan=True
        )
    assert stopping.stopped_step == alone.stopping.stopped_step
    alone.stopping.restore()
    alone.stopping.close()
    for p, q in zip(model.parameters(), alone.net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-8)
    same_everywhere([p.tolist() for p in model.parameters()])
    same_everywhere(found.columns())


def folder() -> Path:
    """One for all ranks."""
    return Path(everyone(tempfile.mkdtemp())[0])


@case
def frameworks_accelerate(rank: int, world: int) -> None:
    """Loaders that accelerate divides, and a state that one process saves."""
    from accelerate import Accelerator

    from heldin.accelerate import EarlyStopping

    prepare(rank, world)
    here = folder()

    def run(resume: int = 0, stop: int = 1000) -> tuple[Any, nn.Module, list[list[int]]]:
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == world
        net = plain.net()
        rows = DataLoader(TensorDataset(X, Y), batch_size=8)
        model, optimizer, loader = accelerator.prepare(net, plain.sgd(net), rows)
        seen: list[list[int]] = []
        parts = (accelerator, model, optimizer, loader, estimated.batch_loss)
        with EarlyStopping(*parts, metrics=["accuracy"], **OPTIONS) as auto:
            batches: Any = loader
            if resume:
                accelerator.load_state(str(here))
                batches = accelerator.skip_first_batches(loader, resume % len(loader))
                auto.follow(batches)
            while True:
                for batch in batches:
                    seen.append(numbers(batch[0]))
                    share = len(batch[1]) * world / sum(map(len, everyone(seen[-1])))
                    accelerator.backward(estimated.batch_loss(model, batch) * share)
                    optimizer.step()
                    optimizer.zero_grad()
                    if auto.step(batch):
                        return auto, net, seen
                    if len(seen) == stop:
                        accelerator.save_state(str(here))
                        return auto, net, seen
                batches = loader

    auto, net, seen = run()
    expect_one_process(auto.stopping, net, seen)
    held = auto.out_of_fold
    assert torch.equal(held.targets, Y)
    same_everywhere(held.outputs.tolist())
    torch.testing.assert_close(
        float(F.cross_entropy(held.outputs, Y)), auto.estimates["loss"].value, check_dtype=False
    )
    _, _, first = run(stop=9)
    auto, net, rest = run(resume=9)
    assert first + rest == seen
    expect_one_process(auto.stopping, net, seen)
    dispatched = Accelerator(cpu=True, dataloader_config=_dispatching())
    rows = dispatched.prepare(DataLoader(TensorDataset(X, Y), batch_size=8))
    with refused("dispatch_batches=True one process draws the rows of all"):
        EarlyStopping(dispatched, net, plain.sgd(net), rows, estimated.batch_loss)
    if rank == 0:
        shutil.rmtree(here)


def _dispatching() -> Any:
    from accelerate.utils import DataLoaderConfiguration

    return DataLoaderConfiguration(dispatch_batches=True)


@case
def frameworks_lightning(rank: int, world: int) -> None:
    """strategy="ddp", with the sampler that Lightning makes for itself."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    from heldin.lightning import EarlyStopping

    prepare(rank, world)
    seen: list[list[int]] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = plain.net()

        def configure_model(self) -> None:
            """Nothing; strategies that divide the model want it to be there."""

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(numbers(batch[0]))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)  # which shadows must not do
            return loss

        def configure_optimizers(self) -> Any:
            return plain.sgd(self.net)

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "strategy": "ddp",
        "devices": world,
        "precision": "64-true",
    }
    rows = DataLoader(TensorDataset(X, Y), batch_size=8)

    def fit(**options: Any) -> tuple[Any, Any, Any]:
        callback, module, start = EarlyStopping(**OPTIONS), Module(), options.pop("start", None)
        trainer = lightning.Trainer(
            callbacks=[callback], enable_checkpointing=False, **{**quiet, **options}
        )
        trainer.fit(module, rows, ckpt_path=start)
        return trainer, callback.stopping, module

    _, whole, module = fit(max_epochs=40)
    expect_one_process(whole, module, seen)
    seen.clear()
    here = folder()
    trainer, _, _ = fit(max_steps=8)  # two epochs
    trainer.save_checkpoint(here / "first.ckpt")
    _, resumed, module = fit(max_epochs=40, start=here / "first.ckpt")
    assert repr(resumed.history.columns()) == repr(whole.history.columns())
    expect_one_process(resumed, module, seen)
    with refused("divides the weights among the processes"):
        fit(max_steps=1, strategy=ModelParallelStrategy(), precision="32-true")
    if rank == 0:
        shutil.rmtree(here)


def by_tokens(logits: Tensor, labels: Tensor, items: Any = None) -> Tensor:
    """Sum over the tokens that are not -100, divided by a number of them."""
    each = logits[:, None].expand(*labels.shape, -1).flatten(0, 1)
    total = F.cross_entropy(each, labels.flatten(), reduction="sum")
    return total / (labels.ne(-100).sum() if items is None else items)


@case
def frameworks_transformers(rank: int, world: int) -> None:
    """A Trainer that torchrun has launched; losses by rows, and by tokens of all processes."""
    import transformers

    from heldin.transformers import EarlyStoppingCallback

    prepare(rank, world)
    here = folder()

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = plain.net()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    class Tokens(Rows):
        def forward(self, x: Tensor, labels: Tensor, **given: Any) -> dict[str, Tensor]:
            return {"loss": by_tokens(self.net(x), labels, given.get("num_items_in_batch"))}

    class Trainer(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            seen.append(numbers(inputs["x"]))
            return super().training_step(model, inputs, *rest, **named)

    seen: list[list[int]] = []

    def train(model: nn.Module, y: Tensor, **options: Any) -> Any:
        callback, start = EarlyStoppingCallback(**OPTIONS), options.pop("start", None)
        arguments = transformers.TrainingArguments(
            str(here),
            per_device_train_batch_size=8,
            num_train_epochs=40,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            learning_rate=plain.RATE,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            **{"save_strategy": "no", **options},
        )
        Trainer(
            model,
            arguments,
            train_dataset=[{"x": a, "labels": b} for a, b in zip(X, y, strict=True)],
            callbacks=[callback],
            optimizer_cls_and_kwargs=(
                torch.optim.SGD,
                {"lr": plain.RATE, "momentum": plain.MOMENTUM},
            ),
        ).train(resume_from_checkpoint=start)
        return callback.stopping

    model: nn.Module = Rows()
    whole = train(model, Y)
    expect_one_process(whole, model, seen)
    first = list(seen)
    seen.clear()
    train(Rows(), Y, max_steps=9, save_strategy="steps", save_steps=9)
    model = Rows()
    resumed = train(model, Y, start=str(here / "checkpoint-9"))
    assert seen == first
    assert repr(resumed.history.columns()) == repr(whole.history.columns())
    same_everywhere([p.tolist() for p in model.parameters()])

    seen.clear()
    counts = 1 + torch.arange(len(Y)) % 3
    tokens = torch.where(torch.arange(3) < counts[:, None], Y[:, None], -100)
    model = Tokens()
    expect_one_process(train(model, tokens), model, seen, tokens, batch_loss=mean_of_tokens)
    if rank == 0:
        shutil.rmtree(here)


def mean_of_tokens(model: nn.Module, batch: Any) -> Tensor:
    return by_tokens(model(batch[0]), batch[1])
