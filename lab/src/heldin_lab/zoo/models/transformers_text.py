"""Hugging Face transformers that read text, small and from configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from heldin_lab.zoo.entry import Batch, Entry, Named, lib

__all__ = ["ENTRIES", "hugging_face"]

SIZE, LENGTH = 32, 8  # tokens that there are, and in a sequence
SMALL: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {**GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
NARROW = {**SMALL, "embedding_size": 16}
PAIR = {  # an encoder and a decoder
    "vocab_size": SIZE,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": SIZE,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}


def hugging_face(
    name: str, config: dict[str, Any], batch: Callable[[int], Batch], **more: Any
) -> Entry:
    """A model by the name of its class."""

    def make() -> Any:
        kind = getattr(lib("transformers"), name)
        return kind(kind.config_class(**config))

    return Entry("transformers", name, make, batch, **more)


def ids(m: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, SIZE, (m, length))


def plain(m: int) -> Batch:
    """Sequences of one length."""
    return {"input_ids": ids(m)}


def padded(m: int) -> Named:
    """Sequences of several lengths, with a mask."""
    lengths = torch.randint(3, LENGTH + 1, (m, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids(m) * mask, "attention_mask": mask}


def labelled(m: int) -> Batch:
    """With labels, so that the model returns its own loss beside its outputs."""
    tokens = ids(m)
    return {"input_ids": tokens, "labels": tokens}


def pairs(m: int) -> Batch:
    """For an encoder and a decoder."""
    return {**padded(m), "decoder_input_ids": ids(m, 5)}


def long(m: int) -> Batch:
    """Longer than the windows of attention."""
    return {"input_ids": ids(m, 24)}


def _linear(**more: Any) -> dict[str, Any]:
    return {**SMALL, **more}


ENTRIES = [
    hugging_face("BertForMaskedLM", SMALL, padded),
    hugging_face("BertForSequenceClassification", SMALL, padded),
    hugging_face("BertForTokenClassification", SMALL, padded),
    hugging_face("BertForQuestionAnswering", SMALL, padded),
    hugging_face("RobertaForMaskedLM", SMALL, padded),
    hugging_face("RobertaForMultipleChoice", SMALL, lambda m: {
        "input_ids": torch.randint(3, SIZE, (m, 3, LENGTH))
    }),
    hugging_face("XLMRobertaForSequenceClassification", SMALL, padded),
    hugging_face("AlbertForMaskedLM", NARROW, padded),
    hugging_face("ElectraForPreTraining", NARROW, padded),
    hugging_face("DistilBertForMaskedLM", {
        "vocab_size": SIZE, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32
    }, padded),
    hugging_face("DebertaV2ForSequenceClassification", _linear(
        relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8
    ), padded),
    hugging_face("MPNetForMaskedLM", SMALL, padded),
    hugging_face("ModernBertForMaskedLM", _linear(
        cls_token_id=1, sep_token_id=2, local_attention=4, global_attn_every_n_layers=2
    ), padded),
    hugging_face("FNetForMaskedLM", SMALL, plain),
    hugging_face("FunnelForMaskedLM", {
        "vocab_size": SIZE, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32,
        "block_sizes": [1, 1], "num_decoder_layers": 1,
    }, padded),
    hugging_face("ConvBertForMaskedLM", _linear(embedding_size=16, head_ratio=1), padded),
    hugging_face("SqueezeBertForMaskedLM", _linear(
        embedding_size=16, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1,
        intermediate_groups=2, output_groups=2,
    ), padded),
    hugging_face("MobileBertForMaskedLM", _linear(
        embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8
    ), padded),
    hugging_face("LongformerForMaskedLM", _linear(attention_window=4), long),
    hugging_face("LongformerForSequenceClassification", _linear(attention_window=4), long),
    hugging_face("BigBirdForMaskedLM", _linear(
        attention_type="original_full", block_size=4
    ), padded),
    hugging_face("GPT2LMHeadModel", {
        "vocab_size": SIZE, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40
    }, labelled),
    hugging_face("GPT2ForSequenceClassification", {
        "vocab_size": SIZE, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0
    }, padded),
    hugging_face("GPTNeoForCausalLM", {
        "vocab_size": SIZE, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 4,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 40,
    }, plain),
    hugging_face("GPTNeoXForCausalLM", SMALL, plain),
    hugging_face("GPTJForCausalLM", {
        "vocab_size": SIZE, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4
    }, plain),
    hugging_face("OPTForCausalLM", _linear(ffn_dim=32, word_embed_proj_dim=16), padded),
    hugging_face("BloomForCausalLM", {
        "vocab_size": SIZE, "hidden_size": 16, "n_layer": 2, "n_head": 2
    }, padded),
    hugging_face("FalconForCausalLM", SMALL, padded),
    hugging_face("LlamaForCausalLM", GROUPED, labelled),
    hugging_face("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, padded),
    hugging_face("GemmaForCausalLM", GROUPED, padded),
    hugging_face("Gemma2ForCausalLM", {**GROUPED, "sliding_window": 4}, plain),
    hugging_face("PhiForCausalLM", SMALL, padded),
    hugging_face("Qwen2ForCausalLM", GROUPED, padded),
    hugging_face("Qwen3ForCausalLM", GROUPED, padded),
    hugging_face("OlmoForCausalLM", GROUPED, plain),
    hugging_face("Olmo2ForCausalLM", GROUPED, plain),
    hugging_face("StableLmForCausalLM", GROUPED, plain),
    hugging_face("CohereForCausalLM", GROUPED, plain),
    hugging_face("MixtralForCausalLM", EXPERTS, padded, double=False),
    hugging_face("OlmoeForCausalLM", EXPERTS, plain, double=False),
    hugging_face("Qwen2MoeForCausalLM", {
        **EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16
    }, plain, double=False),
    hugging_face("MambaForCausalLM", {
        "vocab_size": SIZE, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4
    }, plain),
    hugging_face("Mamba2ForCausalLM", {
        "vocab_size": SIZE, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4,
        "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4,
    }, plain),
    hugging_face("RwkvForCausalLM", {
        "vocab_size": SIZE, "hidden_size": 16, "num_hidden_layers": 2
    }, plain),
    hugging_face("T5ForConditionalGeneration", T5, pairs),
    hugging_face("MT5ForConditionalGeneration", T5, pairs),
    hugging_face("UMT5ForConditionalGeneration", T5, pairs),
    hugging_face("LongT5ForConditionalGeneration", {
        **T5, "local_radius": 3, "encoder_attention_type": "transient-global",
        "global_block_size": 4,
    }, pairs, mixes=False),
    hugging_face("SwitchTransformersForConditionalGeneration", {
        **T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1
    }, pairs),
    hugging_face("BartForConditionalGeneration", PAIR, pairs),
    hugging_face("MBartForConditionalGeneration", PAIR, pairs),
    hugging_face("PegasusForConditionalGeneration", PAIR, pairs),
    hugging_face("MarianMTModel", PAIR, pairs),
    hugging_face("BlenderbotForConditionalGeneration", PAIR, pairs),
    hugging_face("LEDForConditionalGeneration", {
        **PAIR, "attention_window": 4, "max_encoder_position_embeddings": 40,
        "max_decoder_position_embeddings": 40,
    }, lambda m: {"input_ids": ids(m, 24), "decoder_input_ids": ids(m, 5)}),
    hugging_face("XLNetLMHeadModel", {
        "vocab_size": SIZE, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32
    }, padded),
    hugging_face("PerceiverForMaskedLM", {
        "vocab_size": SIZE, "d_model": 16, "d_latents": 16, "num_latents": 4,
        "num_self_attends_per_block": 1, "num_blocks": 1, "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2, "max_position_embeddings": LENGTH,
    }, lambda m: {"inputs": ids(m)}),
]  # fmt: skip
