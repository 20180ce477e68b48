"""A classifier of transformers with frozen weights: outputs, a temperature, a committee."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import heldin
from heldin import rules

transformers = pytest.importorskip("transformers")

N, LENGTH = 24, 6


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens, whose class is that of the first one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 40, (N, LENGTH), generator=generator)
        noise = torch.rand(N, generator=generator) < 0.3
        self.labels = ((self.tokens[:, 0] % 2).bool() ^ noise).long()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=40, dim=16, hidden_dim=16, n_layers=1, n_heads=2, max_position_embeddings=8
    )
    model = transformers.DistilBertForSequenceClassification(config)
    model.distilbert.embeddings.requires_grad_(False)
    return model.double()


def batch_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def test_a_run_with_frozen_weights() -> None:
    model, texts = classifier(), Texts()
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(texts, batch_size=8, shuffle=True, generator=generator)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    stopping = heldin.EarlyStopping(
        model,
        optimizer,
        data=loader,
        batch_loss=batch_loss,
        rule=rules.Folds(folds=3, average="best"),
        metrics=["accuracy"],
    )
    for _ in stopping.epochs(6):
        for batch in loader:
            optimizer.zero_grad()
            batch_loss(model, batch).backward()
            optimizer.step()
    held = stopping.out_of_fold
    assert held.outputs.shape == (N, 2)
    assert torch.equal(held.targets, texts.labels)
    right = (held.outputs.argmax(1) == texts.labels).double().mean()
    assert stopping.estimates["accuracy"].value == pytest.approx(float(right))

    committee = stopping.committee()
    shared = dict(model.named_parameters())
    for number, member in enumerate(committee.members):
        for name, p in member.named_parameters():
            assert (p is shared[name]) == (not shared[name].requires_grad), name
        if number:
            inside = held.folds == number - 1
            with torch.no_grad():
                logits = member(input_ids=texts.tokens[inside]).logits
            torch.testing.assert_close(logits, held.outputs[inside])
    losses = F.cross_entropy(held.outputs, held.targets)
    assert float(losses) == pytest.approx(stopping.estimates["loss"].value, rel=0.2)
