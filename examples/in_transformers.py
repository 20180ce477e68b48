"""Hugging Face: a small BERT, built from a configuration, trained without an evaluation set."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

import heldin
from heldin.transformers import EarlyStoppingCallback

set_seed(0)
config = BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
)
ids = torch.randint(1, 50, (200, 8))
labels = (ids[:, 0] + 10 * torch.randn(200) > 25).long()
rows = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
patience = heldin.Patience(factor=2, slack=50, checks=3)  # less than usual: a short run
first = EarlyStoppingCallback(budget=2.5, patience=patience)
second = EarlyStoppingCallback("evidence")
for callback in (first, second):  # an estimated test loss; or evidence, which needs no second model
    trainer = Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            "out",
            num_train_epochs=100,
            per_device_train_batch_size=40,
            learning_rate=1e-3,
            lr_scheduler_type="constant",  # a schedule with an end is no run to stop early
            save_strategy="no",
            report_to="none",  # or your tracker: it gets heldin/estimate and its standard error
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=rows,
        callbacks=[callback],
    )
    trainer.train()
    print(f"stopped at {callback.stopping.reason}")
auto, evidence = first.stopping, second.stopping
print(f"expected test loss {first.estimates['loss']}")
