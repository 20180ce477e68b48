"""heldin.accelerate.EarlyStopping against the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import heldin
from tests.support import estimated, plain

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import DistributedType

from heldin.accelerate import EarlyStopping
from tests.adapters.test_accelerate import _fresh  # noqa: F401  (a fixture)

pytestmark = plain.foreign
PLAIN = estimated.CASES[0]


def run(
    case: plain.Case, stop: int | None = None, folder: Any = None, resume: int = 0, **options: Any
) -> tuple[EarlyStopping, nn.Module, Any]:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if case.bf16 else "no",
        gradient_accumulation_steps=case.accumulate,
    )
    model = plain.net(case.dtype)
    batches: Any = estimated.loader(case, shuffle=False)
    model, optimizer, batches = accelerator.prepare(model, plain.sgd(model), batches)
    loss_of = options.pop("batch_loss", estimated.batch_loss)
    settings = estimated.arguments(clip=case.clip, **options)
    done = 0
    with EarlyStopping(accelerator, model, optimizer, batches, loss_of, **settings) as stopping:
        skipped = batches
        if resume:
            accelerator.load_state(str(folder))
            done, skipped = resume, accelerator.skip_first_batches(batches, resume % 4)
            stopping.follow(skipped)
        first = done // 4
        for epoch in range(first, case.epochs):
            for batch in skipped if epoch == first else batches:
                with accelerator.accumulate(model):
                    accelerator.backward(estimated.batch_loss(model, batch))
                    if case.clip is not None and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), case.clip)
                    optimizer.step()
                    optimizer.zero_grad()
                    done += 1
                    if stopping.step(batch):
                        return stopping, model, batches
                    if done == stop:
                        accelerator.save_state(str(folder))
                        return stopping, model, batches
    return stopping, model, batches


@estimated.cases
def test_same_as_plain(case: plain.Case) -> None:
    stopping, model, batches = run(case)
    near = 2e-3 if case.bf16 else None  # the accelerator casts the outputs back before the loss
    estimated.expect_same(case, stopping.stopping, model, shuffle=False, rtol=near)
    estimated.expect_no_trace(model, batches)
    assert stopping.metrics()["heldin/should_stop"] == 1.0


@pytest.mark.parametrize("steps", [20, 22])
def test_exact_resume(steps: int, tmp_path: Path) -> None:
    run(PLAIN, stop=steps, folder=tmp_path)
    stopping, model, _ = run(PLAIN, folder=tmp_path, resume=steps)
    estimated.expect_same(PLAIN, stopping.stopping, model, shuffle=False, rtol=plain.EXACT)


def test_errors_leave_no_trace_and_no_other_weights() -> None:
    kept: list[Any] = []

    class Broken:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, model: nn.Module, batch: Any) -> Any:
            self.calls += 1
            kept[:] = [model]
            if self.calls == 60:
                raise RuntimeError("broken")
            return estimated.batch_loss(model, batch)

    with pytest.raises(RuntimeError, match="broken"):
        run(PLAIN, batch_loss=Broken())
    plain.expect_no_trace(kept[0])


def test_divided_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model = Accelerator(cpu=True), plain.net()
    batches = accelerator.prepare(estimated.loader(PLAIN))
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(heldin.HeldinError, match=r"FSDP divides the weights.*rule='evidence'"):
        EarlyStopping(accelerator, model, plain.sgd(model), batches, estimated.batch_loss)
    plain.expect_no_trace(model)
