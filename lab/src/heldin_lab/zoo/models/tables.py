"""Tables and time series."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from heldin_lab.zoo.entry import Batch, Entry, lib, normal

__all__ = ["ENTRIES"]


def mixed_columns(m: int) -> Batch:
    """Columns of numbers, and of categories."""
    return torch.randn(m, 3), torch.randint(0, 4, (m, 2))


def tabnet() -> Any:
    net = lib("pytorch_tabnet.tab_network")
    return net.TabNet(6, 2, n_d=4, n_a=4, n_steps=2, virtual_batch_size=128,
                      group_attention_matrix=torch.eye(6).double())  # fmt: skip


def tsai(name: str, *shape: int, module: str = "", **options: Any) -> Entry:
    def make() -> Any:
        return getattr(lib(f"tsai.models.{module or name}"), name)(**options)

    return Entry("tsai", name, make, normal(*shape or (3, 16)))


def forecast(name: str, double: bool = True, **options: Any) -> Entry:
    """A model of neuralforecast, which takes windows of a series."""

    def make() -> Any:
        kind = getattr(lib("neuralforecast.models"), name)
        return kind(h=4, input_size=8, **options)

    def batch(m: int) -> Batch:
        window: dict[str, Any] = {
            "insample_y": torch.randn(m, 8, 1),
            "insample_mask": torch.ones(m, 8, 1),
            "hist_exog": None,
            "futr_exog": None,
            "stat_exog": None,
        }
        return (window,)

    return Entry("neuralforecast", name, make, batch, double=double)


def tabm(kind: str) -> Any:
    return lib("tabm").TabM.make(
        n_num_features=3, cat_cardinalities=[4, 4], d_out=1, arch_type=kind, k=3, n_blocks=2,
        d_block=8)  # fmt: skip


def embedded(kind: str) -> nn.Module:
    r = lib("rtdl_num_embeddings")
    layers = {
        "PeriodicEmbeddings": lambda: r.PeriodicEmbeddings(3, 4, lite=False),
        "LinearReLUEmbeddings": lambda: r.LinearReLUEmbeddings(3, 4),
        "PiecewiseLinearEmbeddings": lambda: r.PiecewiseLinearEmbeddings(
            [torch.tensor([-1.0, 0.0, 1.0])] * 3, 4, activation=True, version="B"
        ),
    }
    return nn.Sequential(layers[kind](), nn.Flatten(), nn.Linear(12, 2))


ENTRIES = [
    Entry("rtdl_revisiting_models", "MLP", lambda: lib("rtdl_revisiting_models").MLP(
        d_in=3, d_out=1, n_blocks=2, d_block=8, dropout=0.1), normal(3)),
    Entry("rtdl_revisiting_models", "ResNet", lambda: lib("rtdl_revisiting_models").ResNet(
        d_in=3, d_out=1, n_blocks=2, d_block=8, d_hidden=16, d_hidden_multiplier=None,
        dropout1=0.1, dropout2=0.0), normal(3)),
    Entry("rtdl_revisiting_models", "FTTransformer", lambda: lib(
        "rtdl_revisiting_models").FTTransformer(
            n_cont_features=3, cat_cardinalities=[4, 4], d_out=1, n_blocks=2, d_block=8,
            attention_n_heads=2, attention_dropout=0.1, ffn_d_hidden=16,
            ffn_d_hidden_multiplier=None, ffn_dropout=0.1, residual_dropout=0.0), mixed_columns),
    *(Entry("rtdl_num_embeddings", kind, partial(embedded, kind), normal(3))
      for kind in ("PeriodicEmbeddings", "LinearReLUEmbeddings", "PiecewiseLinearEmbeddings")),
    *(Entry("tabm", arch, partial(tabm, arch), mixed_columns)
      for arch in ("tabm", "tabm-mini", "tabm-packed")),
    Entry("pytorch-tabnet", "TabNet", tabnet, normal(6)),
    tsai("FCN", c_in=3, c_out=2),
    tsai("ResNet", c_in=3, c_out=2),
    tsai("InceptionTime", c_in=3, c_out=2, nf=4),
    tsai("XceptionTime", c_in=3, c_out=2, nf=4),
    tsai("OmniScaleCNN", c_in=3, c_out=2, seq_len=16),
    tsai("TCN", c_in=3, c_out=2, layers=[4, 4]),
    tsai("LSTM", module="RNN", c_in=3, c_out=2, hidden_size=6, bidirectional=True),
    tsai("GRU", module="RNN", c_in=3, c_out=2, hidden_size=6, n_layers=2),
    tsai("LSTM_FCN", module="RNN_FCN", c_in=3, c_out=2, seq_len=16, hidden_size=4,
         conv_layers=[4, 4, 4]),
    tsai("TST", c_in=3, c_out=2, seq_len=16, d_model=8, n_heads=2, d_ff=16, n_layers=1),
    tsai("TSiT", module="TSiTPlus", c_in=3, c_out=2, seq_len=16, d_model=8, n_heads=2,
         depth=1),
    tsai("mWDN", c_in=3, c_out=2, seq_len=16, levels=2),
    tsai("gMLP", c_in=3, c_out=2, seq_len=16, patch_size=4, d_model=8, d_ffn=16, depth=1),
    tsai("PatchTST", c_in=3, c_out=None, seq_len=16, pred_dim=4, n_layers=1, n_heads=2,
         d_model=8, d_ff=16, patch_len=4, stride=4),
    forecast("NHITS", mlp_units=[[8, 8]] * 3),
    forecast("NBEATS", mlp_units=[[8, 8]] * 3),
    forecast("MLP", hidden_size=8),
    forecast("DLinear"),
    forecast("NLinear"),
    forecast("LSTM", encoder_hidden_size=8, decoder_hidden_size=8),
    forecast("GRU", encoder_hidden_size=8, decoder_hidden_size=8),
    forecast("TCN", encoder_hidden_size=8, decoder_hidden_size=8, kernel_size=2),
    forecast("DilatedRNN", encoder_hidden_size=8, decoder_hidden_size=8),
    forecast("TFT", double=False, hidden_size=8, n_head=2),
    forecast("BiTCN", hidden_size=8),
    forecast("TiDE", hidden_size=8, decoder_output_dim=4, temporal_decoder_dim=8),
    forecast("PatchTST", hidden_size=8, n_heads=2, encoder_layers=1, linear_hidden_size=16,
             patch_len=4, stride=2),
    forecast("VanillaTransformer", hidden_size=8, n_head=2, conv_hidden_size=8),
    forecast("Informer", hidden_size=8, n_head=2, conv_hidden_size=8),
    forecast("Autoformer", hidden_size=8, n_head=2, conv_hidden_size=8),
    forecast("FEDformer", double=False, hidden_size=8, n_head=8, conv_hidden_size=8, modes=2),
    forecast("TimesNet", hidden_size=8, conv_hidden_size=8, top_k=2),
    forecast("DeepNPTS", hidden_size=8),
    forecast("KAN", hidden_size=8),
]  # fmt: skip
