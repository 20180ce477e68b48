"""Hugging Face: a small BERT, built from a configuration, trained without an evaluation set."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from heldin.transformers import EvidenceStoppingCallback

set_seed(0)
config = BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
)
ids = torch.randint(1, 50, (200, 8))
labels = (ids[:, 0] + 20 * torch.randn(200) > 25).long()
rows = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
callback = EvidenceStoppingCallback()
trainer = Trainer(
    BertForSequenceClassification(config),
    TrainingArguments(
        "out",
        num_train_epochs=60,
        per_device_train_batch_size=40,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",  # or your tracker: it gets heldin/criterion
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=rows,
    callbacks=[callback],
)
trainer.train()
stopping = callback.stopping
print(f"stopped at {stopping.reason}")
