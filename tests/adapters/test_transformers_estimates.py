"""heldin.transformers.EarlyStoppingCallback against the plain loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import heldin
from tests.support import estimated, inside, plain

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from heldin.adapters.patches import MethodWrapper
from heldin.transformers import EarlyStoppingCallback

pytestmark = plain.foreign
PLAIN = estimated.CASES[0]
OPTIMISER = {"lr": plain.RATE, "momentum": plain.MOMENTUM}
SAVING = {"save_strategy": "steps"}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.net = plain.net(dtype)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def arguments(folder: Path, **options: Any) -> Any:
    settings = {
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "learning_rate": plain.RATE,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return transformers.TrainingArguments(str(folder), **{**settings, **options})


def trainer(case: plain.Case, folder: Path, callback: Any, **options: Any) -> Any:
    settings = {
        "per_device_train_batch_size": case.batch,
        "num_train_epochs": case.epochs,
        "gradient_accumulation_steps": case.accumulate,
        "max_grad_norm": case.clip or 0.0,
        "bf16": case.bf16,
    }
    rows = [{"x": a, "labels": b} for a, b in zip(*plain.data(case.dtype), strict=True)]
    return transformers.Trainer(
        options.pop("model", None) or Model(case.dtype),
        arguments(folder, **{**settings, **options}),
        train_dataset=options.get("data") or rows,
        eval_dataset=rows,
        callbacks=[callback],
        optimizer_cls_and_kwargs=(torch.optim.SGD, OPTIMISER),
    )


def rule(**options: Any) -> EarlyStoppingCallback:
    return EarlyStoppingCallback(**estimated.arguments(**options))


def test_the_default_schedule_has_an_end(tmp_path: Path) -> None:
    case = plain.Case("plain", epochs=6)
    run = trainer(case, tmp_path, rule(), lr_scheduler_type="linear")
    with pytest.warns(heldin.HeldinWarning, match="num_training_steps=24.*finish=True"):
        run.train()
    callback = EarlyStoppingCallback("folds", finish=True)
    run = trainer(case, tmp_path, callback, lr_scheduler_type="linear")
    run.train()
    alone = trainer(case, tmp_path, transformers.TrainerCallback(), lr_scheduler_type="linear")
    alone.train()
    assert callback.stopping is not None
    assert callback.stopping.history.last().step == run.state.global_step == 24
    for mine, theirs in zip(run.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def expect_no_trace(run: Any) -> None:
    estimated.expect_no_trace(run.model, run.callback_handler.train_dataloader)
    for owner in (run, run.callback_handler, transformers.trainer):
        assert not [k for k, v in vars(owner).items() if isinstance(v, MethodWrapper)]


@estimated.cases
def test_same_as_plain(case: plain.Case, tmp_path: Path) -> None:
    callback = rule()
    run = trainer(case, tmp_path, callback)
    run.train()
    near = 2e-3 if case.bf16 else None  # the Trainer casts the logits back before the loss
    estimated.expect_same(
        case, callback.stopping, run.model, shuffle=False, true_mean=True, rtol=near
    )
    assert callback.stopping is not None
    assert run.state.global_step == callback.stopping.stopped_step
    expect_no_trace(run)


def test_evaluation_and_logs(tmp_path: Path) -> None:
    callback = rule()
    options = {"eval_strategy": "steps", "eval_steps": 7, "logging_strategy": "steps"}
    run = trainer(PLAIN, tmp_path, callback, logging_steps=1, **options)
    run.train()
    estimated.expect_same(PLAIN, callback.stopping, run.model, shuffle=False)
    history = run.state.log_history
    assert any("eval_loss" in entry for entry in history)
    logged = [entry["heldin/estimate"] for entry in history if "loss" in entry]
    assert callback.stopping is not None
    last = callback.stopping.history.last()
    assert logged[-1] == last.estimate
    assert len(logged) == callback.stopping.stopped_step
    assert history[-1]["heldin/loss_low"] == callback.estimates["loss"].low  # of summary()
    assert history[-2]["heldin/standard_error"] == last.standard_error


# -- checkpoints


@pytest.mark.parametrize("step", [20, 22])
def test_exact_resume(step: int, tmp_path: Path) -> None:
    """Between epochs, or in the middle of one, where the Trainer makes a loader of its own."""
    trainer(PLAIN, tmp_path, rule(), max_steps=step, save_steps=step, **SAVING).train()
    folder = tmp_path / f"checkpoint-{step}"
    assert heldin.state.load(folder / "heldin.ckpt")["run"]["rule"]["step"] == step
    callback = rule()
    run = trainer(PLAIN, tmp_path, callback, save_steps=1000, **SAVING)
    run.train(resume_from_checkpoint=str(folder))
    estimated.expect_same(PLAIN, callback.stopping, run.model, shuffle=False, rtol=plain.EXACT)
    assert callback.stopping is not None
    assert (tmp_path / f"checkpoint-{callback.stopping.stopped_step}" / "heldin.ckpt").is_file()
    expect_no_trace(run)


def test_a_checkpoint_without_the_shadows_is_refused(tmp_path: Path) -> None:
    """New ones would have seen the rows that they hold out."""
    run = trainer(PLAIN, tmp_path, rule(), max_steps=8, save_steps=8, **SAVING)
    run.train()
    (tmp_path / "checkpoint-8" / "heldin.ckpt").unlink()
    run = trainer(PLAIN, tmp_path, rule(), **SAVING)
    with pytest.raises(heldin.HeldinError, match="state of its shadows is not there"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    expect_no_trace(run)


def test_a_second_run_starts_anew(tmp_path: Path) -> None:
    callback = rule()
    run = trainer(PLAIN, tmp_path, callback)
    run.train()
    run.model.load_state_dict(Model().state_dict())
    run.optimizer, run.lr_scheduler = None, None
    run.train()
    estimated.expect_same(PLAIN, callback.stopping, run.model, shuffle=False)


# -- language models: dictionaries, padding, tokens


def texts(number: int = 24) -> list[dict[str, list[int]]]:
    """Counting, of very different lengths."""
    stream = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 12, (number,), generator=stream).tolist()
    starts = torch.randint(0, 19, (number,), generator=stream).tolist()
    ids = [[1 + (a + i) % 19 for i in range(n)] for a, n in zip(starts, lengths, strict=True)]
    return [{"input_ids": i, "attention_mask": [1] * len(i), "labels": i} for i in ids]


def language_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).double()


def padded(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(s["input_ids"]) for s in samples)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: torch.tensor([s[key] + [value] * (longest - len(s[key])) for s in samples])
        for key, value in fill.items()
    }


def tune(model: Any, folder: Path, callback: Any, **options: Any) -> Any:
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "max_steps": -1}
    run = transformers.Trainer(
        model,
        arguments(folder, **{**settings, **options}),
        train_dataset=texts(),
        data_collator=padded,
        callbacks=[callback],
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5}),
    )
    run.train()
    return run


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_shadow_takes_the_same_steps_as_a_model_without_its_rows(
    smoothing: float, tmp_path: Path
) -> None:
    """Accumulated batches of different lengths: a mean over all tokens that it may see."""
    model = language_model()
    twin = copy.deepcopy(model)
    callback = rule(rule="shadow", restore=False, average="best")
    accumulated = {"gradient_accumulation_steps": 2, "label_smoothing_factor": smoothing}
    tune(model, tmp_path, callback, **accumulated)
    stopping: Any = callback.stopping
    label = stopping.fold_of_row
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for start in range(0, 24, 8):
        kept = [row for i, row in enumerate(texts()) if start <= i < start + 8 and label[i] < 0]
        batch = padded(kept)
        logits = twin(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        # the smoothed part is a mean over the vocabulary
        log = logits.log_softmax(-1)[targets != -100]
        nll = -log.gather(1, targets[targets != -100][:, None]).mean()
        ((1 - smoothing) * nll - smoothing * log.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = estimated.last_shadows(callback.state_dict())[0]["weights"]
    assert 0 < int((label >= 0).sum()) < 24
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(found[name], weight.detach())


class Careless(Model):
    """Takes the number of items, as many classifiers do, and does not divide by it."""

    def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


def test_losses_that_the_trainer_adds_up(tmp_path: Path) -> None:
    case, callback = estimated.CASES[2], rule()
    run = trainer(case, tmp_path, callback, model=Careless())
    assert run.model_accepts_loss_kwargs
    run.train()
    estimated.expect_same(case, callback.stopping, run.model.net, shuffle=False, added=True)


def test_length_grouped_batches_keep_their_rows(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Listening(EarlyStoppingCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seen.extend(inside.waiting(self.stopping))
            super().on_step_end(*args, **kwargs)

    callback = Listening(rule="shadow", patience=None)
    tune(language_model(), tmp_path, callback, train_sampling_strategy="group_by_length")
    assert sorted(i for record in seen for i in record.rows.tolist()) == list(range(24))
    for record in seen:
        batch, index = record.prepared, record.rows
        for row, number in zip(batch["input_ids"], index.tolist(), strict=True):
            ids = texts()[number]["input_ids"]
            assert row.tolist() == ids + [0] * (len(row) - len(ids))


def test_noise_on_embeddings_reaches_the_shadows(tmp_path: Path) -> None:
    callback = rule(rule="shadow")
    tune(language_model(), tmp_path, callback, neftune_noise_alpha=5.0)
    assert callback.stopping is not None
    assert callback.stopping.backend.engine == "replay"


def test_adapters_alone_have_shadows(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(language_model(), config)
    callback = rule(rule="folds")
    run = tune(model, tmp_path, callback, num_train_epochs=8, gradient_accumulation_steps=2)
    stopping: Any = callback.stopping
    shadows = estimated.last_shadows(callback.state_dict())
    (names,) = {tuple(shadow["weights"]) for shadow in shadows}
    assert all("lora_" in name for name in names)
    assert len(stopping.history) > 5
    plain.expect_no_trace(run.model)


def test_supervised_fine_tuning_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "out"
    callback = rule(rule="folds")
    args = trl.SFTConfig(
        str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=4,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    tokenizer = word_tokenizer()
    run = trl.SFTTrainer(
        language_model().float(),
        args,
        train_dataset=datasets.Dataset.from_list([{"input_ids": t["input_ids"]} for t in texts()]),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    run.train()
    stopping: Any = callback.stopping
    assert len(stopping.history) > 3
    assert stopping.estimate < stopping.history[0].estimate
    logged = [entry for entry in run.state.log_history if "mean_token_accuracy" in entry]
    assert len(logged) == 12
    # those of the shadows are not counted
    assert logged[-1]["num_tokens"] == 4 * sum(len(t["input_ids"]) for t in texts())


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{i}": i for i in range(1, 20)} | {"<pad>": 0}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="w1"
    )


# -- what cannot be followed


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ({"x": a, "labels": b} for a, b in zip(*plain.data(), strict=True))


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    run = trainer(PLAIN, tmp_path, rule(), max_steps=4)
    run.train_dataset = Stream()
    with pytest.raises(heldin.HeldinError, match="IterableDataset has no row numbers"):
        run.train()
    plain.expect_no_trace(run.model)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    run = trainer(PLAIN, tmp_path, rule(), **best)
    with pytest.raises(heldin.HeldinError, match="load_best_model_at_end=True and restore=True"):
        run.train()
    expect_no_trace(run)
    run = trainer(PLAIN, tmp_path, rule())
    run.args._n_gpu = 2
    with pytest.raises(heldin.HeldinError, match="DataParallel divides each batch among 2 GPUs"):
        run.train()


@plain.broken
def test_errors_and_interrupts_leave_no_trace(error: type[BaseException], tmp_path: Path) -> None:
    class Broken(Model):
        calls = 0

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            Broken.calls += self.training and torch.is_grad_enabled()
            if Broken.calls == 40:
                raise error("broken")
            return super().forward(x, labels)

    run = trainer(PLAIN, tmp_path, rule(), model=Broken())
    with pytest.raises(error):
        run.train()
    assert run.state.global_step > 3
    expect_no_trace(run)
