"""Hugging Face models, small, from configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support.truth import error, observe_once, truth

transformers = pytest.importorskip("transformers")

M, T = 4, 4
TEXT = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
CAUSAL = {**TEXT, "intermediate_size": 12, "num_key_value_heads": 1, "max_position_embeddings": 16}
ENCODER = {**TEXT, "intermediate_size": 12, "max_position_embeddings": 16}


def build(model: str, config: str, **settings: Any) -> nn.Module:
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return made.train()


def text() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 31, (M, T))}


def masked_text() -> dict[str, Tensor]:
    mask = (torch.arange(T)[None] < torch.randint(2, T + 1, (M, 1))).long()
    return {**text(), "attention_mask": mask}


def pair() -> dict[str, Tensor]:
    return {**text(), "decoder_input_ids": torch.randint(3, 31, (M, T))}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(M, 3, 8, 8)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "bert": (
        lambda: build("BertForSequenceClassification", "BertConfig", **ENCODER),
        masked_text,
    ),
    "bert tied": (lambda: build("BertForMaskedLM", "BertConfig", **ENCODER), text),
    "distilbert": (
        lambda: build(
            "DistilBertForSequenceClassification", "DistilBertConfig",
            vocab_size=31, dim=8, n_layers=2, n_heads=2, hidden_dim=12, max_position_embeddings=16,
        ),
        masked_text,
    ),
    "gpt2": (
        lambda: build(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=31, n_embd=8, n_layer=2, n_head=2,
            n_positions=16,
        ),
        text,
    ),
    "gpt2 classifier": (
        lambda: build(
            "GPT2ForSequenceClassification", "GPT2Config", vocab_size=31, n_embd=8, n_layer=2,
            n_head=2, n_positions=16, pad_token_id=0,
        ),
        text,
    ),
    "llama": (lambda: build("LlamaForCausalLM", "LlamaConfig", **CAUSAL), text),
    "qwen2": (lambda: build("Qwen2ForCausalLM", "Qwen2Config", **CAUSAL), masked_text),
    "t5": (
        lambda: build(
            "T5ForConditionalGeneration", "T5Config", vocab_size=31, d_model=8, d_kv=4, d_ff=12,
            num_layers=2, num_heads=2,
        ),
        pair,
    ),
    "vit": (
        lambda: build(
            "ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4, hidden_size=8,
            num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        ),
        image,
    ),
    "resnet": (
        lambda: build(
            "ResNetForImageClassification", "ResNetConfig", embedding_size=4, hidden_sizes=[4, 8],
            depths=[1, 1], layer_type="basic",
        ).eval(),
        image,
    ),
    "convnext": (
        lambda: build(
            "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[4, 8], depths=[1, 1],
            num_stages=2, patch_size=2, layer_scale_init_value=0.5,
        ),
        image,
    ),
}  # fmt: skip


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**batch).logits
    return logits.flatten(1).sin().mean(1) + logits.flatten(1).square().mean(1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_exact(name: str, attention: str) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(1)
    model = make()
    if attention == "eager":
        if name in ("resnet", "convnext"):
            pytest.skip("no attention")
        model.set_attn_implementation("eager")  # type: ignore[operator]
    model.double()
    torch.set_default_dtype(torch.float64)
    try:
        with heldin.observe(model) as seen:
            for _ in range(3):
                worst = observe_once(seen, model, losses, (batch(),), 1e-12)
                assert max(worst.values()) < 1e-8, worst
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_under_autocast(name: str) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(1)
    model = make()
    with torch.autocast("cpu", torch.bfloat16), heldin.observe(model) as seen:
        for _ in range(2):
            worst = observe_once(seen, model, losses, (batch(),), 1e-2)
            assert max(worst.values()) < 0.1, worst


@pytest.mark.parametrize("name", ["bert tied", "gpt2", "llama", "t5"])
def test_loss_inside_the_model(name: str) -> None:
    """The model computes its own mean loss: the truth is one sample at a time."""
    make, batch = MODELS[name]
    torch.manual_seed(1)
    model = make().double().eval()
    with heldin.observe(model) as seen:
        for _ in range(2):
            seen.clear()
            inputs = batch()
            inputs["labels"] = torch.randint(3, 31, (M, T))
            model(**inputs).loss.backward()
    each = torch.stack(
        [model(**{k: v[i : i + 1] for k, v in inputs.items()}).loss / M for i in range(M)]
    )
    worst = error(seen, truth(model, each), 1e-12)
    assert max(worst.values()) < 1e-8, worst


def test_loss_outside_with_ignored_tokens() -> None:
    model = MODELS["gpt2"][0]().double().eval()
    ids = text()["input_ids"]
    targets = torch.where(torch.rand(M, T) < 0.3, -100, ids)
    with heldin.observe(model) as seen:
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    terms = F.cross_entropy(
        model(input_ids=ids).logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    each = terms.reshape(M, T).sum(1) / (targets != -100).sum()
    assert max(error(seen, truth(model, each), 1e-12).values()) < 1e-8
