"""heldin.transformers against the plain loop."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support import plain

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from heldin.adapters.patches import MethodWrapper
from heldin.transformers import (
    EarlyStoppingCallback,
    ElementwiseLoggingCallback,
    elementwise,
)

pytestmark = plain.foreign


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.net = plain.net(dtype)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def trainer(case: plain.Case, folder: Path, *callbacks: Any, **options: Any) -> Any:
    settings = {
        "per_device_train_batch_size": case.batch,
        "num_train_epochs": case.epochs,
        "gradient_accumulation_steps": case.accumulate,
        "max_grad_norm": case.clip or 0.0,
        "bf16": case.bf16,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "learning_rate": plain.RATE,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    model = options.pop("model", None) or Model(case.dtype)
    how = options.pop("optimizer_cls_and_kwargs", (torch.optim.SGD, OPTIMISER))
    if callable(how):
        how = how(model)
    args = transformers.TrainingArguments(str(folder), **{**settings, **options})
    if options.get("train_sampling_strategy"):
        assert args.train_sampling_strategy == options["train_sampling_strategy"]
    x, y = plain.data(case.dtype)
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    return transformers.Trainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=how,
    )


OPTIMISER = {"lr": plain.RATE, "momentum": plain.MOMENTUM}


def rule(case: plain.Case, **options: Any) -> EarlyStoppingCallback:
    return EarlyStoppingCallback(case.rule, **options)


@plain.cases
def test_same_as_plain(case: plain.Case, tmp_path: Path) -> None:
    callback = rule(case)
    run = trainer(case, tmp_path, callback)
    run.train()
    plain.expect_same(case, callback.stopping, run.model, true_mean=True)
    assert callback.stopping is not None
    assert run.state.global_step == callback.stopping.stopped_step
    plain.expect_no_trace(run.model)


def test_evaluation_does_not_count(tmp_path: Path) -> None:
    case = plain.CASES[0]
    callback = rule(case)
    run = trainer(case, tmp_path, callback, eval_strategy="steps", eval_steps=7)
    run.train()
    assert any("eval_loss" in entry for entry in run.state.log_history)
    assert not any("heldin/criterion" in e for e in run.state.log_history if "eval_loss" in e)
    plain.expect_same(case, callback.stopping, run.model)


def test_a_second_run_starts_anew(tmp_path: Path) -> None:
    case = plain.CASES[0]
    callback = rule(case)
    run = trainer(case, tmp_path, callback)
    run.train()
    run.model.load_state_dict(Model().state_dict())
    run.optimizer, run.lr_scheduler = None, None
    run.train()
    plain.expect_same(case, callback.stopping, run.model)


# -- checkpoints


@pytest.mark.parametrize("case", [plain.CASES[0], plain.CASES[4]], ids=lambda case: case.name)
@pytest.mark.parametrize("step", [20, 22])
def test_exact_resume(case: plain.Case, step: int, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": step}
    trainer(case, tmp_path, rule(case), max_steps=step, **saving).train()
    assert (tmp_path / f"checkpoint-{step}" / "heldin_evidence.ckpt").is_file()
    callback = rule(case)
    run = trainer(case, tmp_path, callback, **saving)
    run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    plain.expect_same(case, callback.stopping, run.model, rtol=plain.EXACT)
    last = tmp_path / f"checkpoint-{callback.stopping.stopped_step}"  # the stop is saved as well
    assert last.is_dir()


def test_groups_by_a_function_are_taken_up(tmp_path: Path) -> None:
    case = plain.CASES[0]
    saving = {"save_strategy": "steps", "save_steps": 8}

    def made() -> EarlyStoppingCallback:
        groups = replace(case.rule, parameter_groups=lambda name: name.split(".")[-1])
        return EarlyStoppingCallback(groups)

    trainer(case, tmp_path, made(), max_steps=8, **saving).train()
    callback = made()
    run = trainer(case, tmp_path, callback, **saving)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert set(callback.stopping.evidence.groups) == {"weight", "bias"}
    steps = [r.step for r in callback.stopping.history]
    assert steps == list(range(1, len(steps) + 1))


def test_resume_of_a_run_without_heldin(tmp_path: Path) -> None:
    case = plain.CASES[0]
    saving = {"save_strategy": "steps", "save_steps": 8}
    trainer(case, tmp_path, max_steps=8, **saving).train()
    callback = rule(case)
    run = trainer(case, tmp_path, callback, max_steps=16, **saving)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert callback.stopping is not None
    assert [r.step for r in callback.stopping.history] == list(range(1, 9))
    assert (tmp_path / "checkpoint-16").is_dir()


def test_other_settings_are_refused_on_resume(tmp_path: Path) -> None:
    case = plain.CASES[0]
    trainer(case, tmp_path, rule(case), max_steps=8, save_strategy="steps", save_steps=8).train()
    run = trainer(case, tmp_path, EarlyStoppingCallback(heldin.rules.Evidence(smoothing=0.5)))
    with pytest.raises(heldin.HeldinError, match=r"smoothing=0\.7"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(heldin.HeldinError, match=r"EarlyStoppingCallback: .*'smoothness'"):
        EarlyStoppingCallback(smoothness=0.5)
    with pytest.raises(heldin.HeldinError, match="patience must be a number of epochs"):
        EarlyStoppingCallback(patience=0)


# -- logging


def test_log_history_and_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    case = plain.CASES[0]
    callback = rule(case, log_groups=True)
    logging = {"report_to": "tensorboard", "logging_strategy": "steps", "logging_steps": 9}
    run = trainer(case, tmp_path, callback, **logging)
    run.train()
    assert callback.stopping is not None
    values = {r.step: r for r in callback.stopping.history}
    steps = [9, 18, 27, 36, 42]
    history = {e["step"]: e for e in run.state.log_history if "heldin/criterion" in e}
    assert list(history) == steps
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    logged = {e.step: e.value for e in events.Scalars("train/heldin/criterion")}
    assert list(logged) == steps
    for step in steps:
        assert history[step]["heldin/criterion"] == values[step].criterion
        assert logged[step] == pytest.approx(values[step].criterion, rel=1e-6)
    group = {e.step: e.value for e in events.Scalars("train/heldin/group/net.0.weight")}
    assert group[27] == pytest.approx(values[27].groups["net.0.weight"], rel=1e-6)
    assert "train_runtime" in run.state.log_history[-1]
    assert "heldin/criterion" not in run.state.log_history[-1]


def test_mlflow(mlflow_uri: str, tmp_path: Path) -> None:
    import mlflow

    case = plain.CASES[0]
    callback = rule(case)
    logging = {"report_to": "mlflow", "logging_strategy": "steps", "logging_steps": 10}
    with mlflow.start_run() as active:
        trainer(case, tmp_path, callback, **logging).train()
    client = mlflow.MlflowClient(mlflow_uri)
    found = client.get_metric_history(active.info.run_id, "heldin/criterion")
    assert callback.stopping is not None
    values = {r.step: r.criterion for r in callback.stopping.history}
    assert {m.step: m.value for m in found} == pytest.approx(
        {s: values[s] for s in (10, 20, 30, 40, 42)}
    )


# -- single weights


def test_elementwise(tmp_path: Path) -> None:
    """As in a plain loop, and from a checkpoint in the middle as well."""
    case = plain.CASES[0]
    expected, model = plain.train_elementwise(case, epochs=15)

    def build(epochs: int, *callbacks: Any) -> Any:
        def how(model: nn.Module) -> Any:
            args = transformers.TrainingArguments(
                str(tmp_path), optim="sgd", learning_rate=plain.RATE, report_to="none"
            )
            kind, kwargs = elementwise(model, args, smoothing=0.9)
            return kind, {**kwargs, "momentum": plain.MOMENTUM}

        return trainer(
            case,
            tmp_path,
            ElementwiseLoggingCallback(log_groups=True),
            optimizer_cls_and_kwargs=how,
            num_train_epochs=epochs,
            save_strategy="steps",
            save_steps=28,
            logging_strategy="steps",
            logging_steps=4,
        )

    for split in (False, True):
        run = build(7 if split else 15)
        run.train()
        if split:
            run = build(15)
            run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-28"))
        optimizer = run.optimizer.optimizer
        assert isinstance(optimizer, heldin.ElementwiseStopping)
        fractions = optimizer.stopped_fraction(by="tensor")
        same = {f"net.{n}": v for n, v in expected.stopped_fraction("tensor").items()}
        assert fractions == same
        for p, q in zip(run.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q)
        logged = [e for e in run.state.log_history if "heldin/stopped" in e][-1]
        assert logged["step"] == 60
        assert logged["heldin/stopped"] == optimizer.stopped_fraction() > 0.05
        assert logged["heldin/stopped/net.0.weight"] == fractions["net.0.weight"]
        optimizer.close()


def test_a_real_model_learns_its_loss_inside(tmp_path: Path) -> None:
    """A small BERT with labels, padding and the Trainer's own clipping: values as by hand."""
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).double()
    ids = torch.randint(1, 30, (20, 6))
    rows = [
        {"input_ids": i, "attention_mask": (i > 3).long(), "labels": (i[0] > 15).long()}
        for i in ids
    ]
    callback = EarlyStoppingCallback(heldin.rules.Evidence(smoothing=0.0, estimator="exact"))
    args = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=8,
        max_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    grads: dict[str, list[Tensor]] = {}
    for row in rows[:8]:
        model.zero_grad()
        model(**{k: v[None] for k, v in row.items()}).loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            grads.setdefault(name, []).append(p.grad.clone())
    model.zero_grad()
    transformers.Trainer(model, args, train_dataset=rows, callbacks=[callback]).train()
    assert callback.stopping is not None
    for name, value in callback.stopping.evidence.groups.items():
        each = torch.stack(grads[name])
        f = 8 * each.mean(0) ** 2 / each.var(0)
        live = (each != 0).any(0)
        if "key.bias" not in name:  # rounding noise
            assert value == pytest.approx(float(1 - f[live].mean()), rel=1e-6), name
    assert not math.isnan(callback.stopping.criterion)


# -- every way out


@plain.broken
@pytest.mark.parametrize("place", ["begin", "step", "data", "callback"])
def test_errors_and_interrupts_leave_no_trace(
    place: str, error: type[BaseException], tmp_path: Path
) -> None:
    case, fuse = plain.CASES[0], plain.Fuse(error)

    class Burning(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if place == "begin":
                raise error("broken")

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if place == "callback":
                fuse()

    class Model2(Model):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            if place == "step":
                fuse()
            return super().forward(x, labels)

    class Rows(plain.Rows):
        def __getitem__(self, i: int) -> Any:
            x, labels = super().__getitem__(i)
            return {"x": x, "labels": labels}

    run = trainer(case, tmp_path, rule(case), Burning(), model=Model2())
    if place == "data":
        run.train_dataset = Rows(fuse)
    with pytest.raises(error, match="broken"):
        run.train()
    plain.expect_no_trace(run.model)
    for owner in (run, run.callback_handler) if place != "begin" else ():
        assert not [v for v in vars(owner).values() if isinstance(v, MethodWrapper)]


def test_arguments_by_other_names_are_refused() -> None:
    with pytest.raises(heldin.HeldinError, match="'early_stopping_patience'; is it 'patience'"):
        EarlyStoppingCallback(early_stopping_patience=5)
    with pytest.raises(heldin.HeldinError, match="elementwise: unknown argument 'smooth'"):
        elementwise(nn.Linear(1, 1), None, smooth=0.5)
