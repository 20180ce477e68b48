"""Transformers, recurrences and state spaces of smaller libraries."""

from __future__ import annotations

from typing import Any

import torch

from heldin_lab.zoo.entry import Entry, lib, normal, tokens

__all__ = ["ENTRIES"]


def worded(name: str, **options: Any) -> Entry:
    """A decoder of x-transformers; the name says what is special."""

    def make() -> Any:
        x = lib("x_transformers")
        layers = x.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
        return x.TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers)

    return Entry("x-transformers", f"Decoder, {name}", make, tokens(8))


def encoded() -> Any:
    x = lib("x_transformers")
    return x.ViTransformerWrapper(
        image_size=16, patch_size=4, num_classes=5, attn_layers=x.Encoder(dim=16, depth=2, heads=2)
    )


def xlstm(kind: str) -> Any:
    x = lib("xlstm")
    config: dict[str, Any] = {"context_length": 8, "num_blocks": 2, "embedding_dim": 16}
    if kind == "mLSTM":
        layer = x.mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2)
        config["mlstm_block"] = x.mLSTMBlockConfig(mlstm=layer)
    else:
        layer = x.sLSTMLayerConfig(backend="vanilla", num_heads=2, conv1d_kernel_size=4)
        config["slstm_block"] = x.sLSTMBlockConfig(slstm=layer)
        config["slstm_at"] = "all"
    return x.xLSTMBlockStack(x.xLSTMBlockStackConfig(**config))


def mamba() -> Any:
    m = lib("mambapy.mamba")
    return m.Mamba(m.MambaConfig(d_model=8, n_layers=2, d_state=4, pscan=False))


def scanned() -> Any:
    m = lib("mambapy.mamba")
    return m.Mamba(m.MambaConfig(d_model=8, n_layers=1, d_state=4, pscan=True))


ENTRIES = [
    worded("plain"),
    worded("rotary", rotary_pos_emb=True),
    worded("ALiBi", alibi_pos_bias=True),
    worded("T5 bias", rel_pos_bias=True),
    worded("RMSNorm, GLU", use_rmsnorm=True, ff_glu=True, ff_swish=True),
    worded("one key for all heads", attn_one_kv_head=True),
    worded("talking heads", attn_pre_talking_heads=True),
    worded("memories", attn_num_mem_kv=3),
    worded("sandwich", sandwich_coef=1),
    worded("Macaron", macaron=True),
    worded("shifted tokens", shift_tokens=1),
    worded("residual attention", residual_attn=True),
    worded("gated residual", gate_residual=True),
    worded("sparse top k", attn_sparse_topk=2),
    worded("QK norm", attn_qk_norm=True),
    worded("dropout", attn_dropout=0.1, ff_dropout=0.1),
    worded("layer dropout", layer_dropout=0.3),
    Entry("x-transformers", "ViTransformerWrapper", encoded, normal(3, 16, 16)),
    Entry("x-transformers", "ContinuousTransformerWrapper", lambda: lib(
        "x_transformers").ContinuousTransformerWrapper(
            dim_in=4, dim_out=3, max_seq_len=8,
            attn_layers=lib("x_transformers").Encoder(dim=16, depth=1, heads=2)),
        normal(8, 4)),
    Entry("xlstm", "mLSTM", lambda: xlstm("mLSTM"), normal(8, 16)),
    Entry("xlstm", "sLSTM", lambda: xlstm("sLSTM"), normal(8, 16)),
    Entry("mambapy", "Mamba", mamba, normal(8, 8)),
    Entry("mambapy", "Mamba, parallel scan", scanned, normal(8, 8)),
    Entry("performer-pytorch", "PerformerLM", lambda: lib("performer_pytorch").PerformerLM(
        num_tokens=32, max_seq_len=16, dim=16, depth=1, heads=2, dim_head=8, nb_features=6,
        causal=False), tokens(8)),
    Entry("linear-attention-transformer", "LinearAttentionTransformerLM", lambda: lib(
        "linear_attention_transformer").LinearAttentionTransformerLM(
            num_tokens=32, dim=16, heads=2, depth=1, max_seq_len=16), tokens(16)),
    Entry("perceiver-pytorch", "Perceiver", lambda: lib("perceiver_pytorch").Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=2, max_freq=4.0, depth=2, num_latents=4,
        latent_dim=8, cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8,
        num_classes=5, self_per_cross_attn=1), normal(6, 6, 3)),
    Entry("perceiver-pytorch", "PerceiverIO", lambda: lib("perceiver_pytorch").PerceiverIO(
        dim=8, queries_dim=8, logits_dim=5, depth=1, num_latents=4, latent_dim=8,
        cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8), normal(6, 8)),
    Entry("conformer", "Conformer", lambda: lib("conformer").Conformer(
        dim=16, depth=1, dim_head=8, heads=2, conv_kernel_size=5), normal(8, 16)),
    Entry("local-attention", "LocalTransformer", lambda: lib("local_attention").LocalTransformer(
        num_tokens=32, dim=16, depth=1, causal=True, local_attn_window_size=4, max_seq_len=16),
        tokens(16)),
    Entry("soft-moe-pytorch", "SoftMoE", lambda: lib("soft_moe_pytorch").SoftMoE(
        dim=8, seq_len=6, num_experts=3), normal(6, 8)),
    Entry("vector-quantize-pytorch", "FSQ", lambda: torch.nn.Sequential(
        torch.nn.Linear(8, 8), lib("vector_quantize_pytorch").FSQ([5, 4], dim=8)), normal(6, 8)),
    Entry("vector-quantize-pytorch", "LFQ", lambda: torch.nn.Sequential(
        torch.nn.Linear(8, 8),
        lib("vector_quantize_pytorch").LFQ(codebook_size=16, dim=8, entropy_loss_weight=0.0)),
        normal(6, 8)),
]  # fmt: skip
