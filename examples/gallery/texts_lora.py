"""200 texts with LoRA: the shadows share the frozen weights, and add adapters only."""

# %% 200 texts for training, 500 to see what became of it
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import heldin


def texts(count):
    words = torch.randint(1, 21, (count, 12))
    words[:, 0] = 0  # where the classifier looks
    friendly = (words[:, 1:] <= 10).float().mean(1)  # words 1 to 10 are
    label = (friendly + 0.08 * torch.randn(count) > 0.5).long()
    return [{"input_ids": w, "labels": y} for w, y in zip(words, label, strict=True)]


torch.manual_seed(0)
train, test = texts(200), next(iter(DataLoader(texts(500), 500)))

# %% A model with adapters; yours comes from BertForSequenceClassification.from_pretrained
size = {"vocab_size": 21, "hidden_size": 64, "intermediate_size": 128}
config = BertConfig(**size, num_hidden_layers=2, num_attention_heads=4)
lora = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["value", "dense"])
model = get_peft_model(BertForSequenceClassification(config), lora)

# %% Any model and batch: batch_loss
stopping = heldin.EarlyStopping(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.002),
    data=DataLoader(train, batch_size=20, shuffle=True),
    batch_loss=lambda model, batch: model(**batch).loss,
    metrics=["accuracy"],
).fit(max_epochs=40)
print(f"accuracy {stopping.estimates['accuracy']} to expect")
right = model.eval()(**test).logits.argmax(1) == test["labels"]
print(f"accuracy on 500 other texts: {right.float().mean():.3f}")
stopping.history.plot().figure.savefig("texts_lora.png")
