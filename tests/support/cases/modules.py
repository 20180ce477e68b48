"""Cases: embeddings, normalisation, attention, recurrences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

from .common import M, add, linear, model, normal, rows, tokens

# --- embeddings ------------------------------------------------------------------------------

add("embedding", lambda: nn.Embedding(11, 3), tokens(M, M))
add("embedding, one token each", lambda: nn.Embedding(11, 3), tokens(M))
add("embedding, padding", lambda: nn.Embedding(11, 3, padding_idx=2), tokens(M, M, size=4))
add(
    "embedding, scaled by frequency",
    lambda: nn.Embedding(11, 3, scale_grad_by_freq=True),
    tokens(M, M, size=4),
)
add("embedding, sparse", lambda: nn.Embedding(11, 3, sparse=True), tokens(M, M, size=5))
add(
    "embedding of a scaled table",
    model(lambda s, i: F.embedding(i, s.w * 2).tanh(), w=(2 * M, 3)),
    lambda: (torch.randperm(2 * M).reshape(M, 2),),
)
add(
    "embedding of a scaled table, regular tokens first",
    model(lambda s, i: F.embedding(i, s.w * 2).tanh(), w=(2 * M, 3)),
    lambda: _regular_first(),
)
_calls = [0]


def _regular_first() -> tuple[Tensor]:
    _calls[0] += 1
    regular = torch.arange(2 * M).reshape(M, 2)
    return (regular if _calls[0] % 2 else torch.randint(0, 2 * M, (M, 2)),)


add("embedding bag, mean", lambda: nn.EmbeddingBag(11, 3), tokens(M, 5), autocast=False)
add("embedding bag, sum", lambda: nn.EmbeddingBag(11, 3, mode="sum"), tokens(M, 5), autocast=False)
add("embedding bag, max", lambda: nn.EmbeddingBag(11, 3, mode="max"), tokens(M, 5), autocast=False)
add(
    "look-up by hand",
    model(lambda s, i: s.w[i].tanh(), w=(11, 3)),
    tokens(M, M),
)
add(
    "one-hot",
    model(lambda s, i: s.a(F.one_hot(i, 11).to(s.a.weight.dtype)), a=linear(11, 3)),
    tokens(M, M),
)

# --- normalisation and activations with parameters -------------------------------------------

add("layer norm", lambda: nn.LayerNorm(3), normal(M, M, 3))
add("layer norm over two dimensions", lambda: nn.LayerNorm((2, 3)), normal(M, 5, 2, 3))
add("layer norm without bias", lambda: nn.LayerNorm(3, bias=False), normal(M, 3))
add("rms norm", lambda: nn.RMSNorm(3), normal(M, M, 3))
add(
    "rms norm by hand",
    model(lambda s, x: s.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), w=(3,)),
    normal(M, M, 3),
)
add("group norm", lambda: nn.GroupNorm(2, 4), normal(M, 4, 3, 3))
add(
    "group norm after a layer",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4)),
    normal(M, 3),
)
add("instance norm 1d", lambda: nn.InstanceNorm1d(3, affine=True), normal(M, 3, 5))
add(
    "instance norm 2d after a convolution",
    lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True)),
    normal(M, 2, 4, 4),
    autocast=False,  # the bias of the convolution has no gradient but rounding noise
)
add(
    "batch norm, eval mode",
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).eval(),
    normal(M, 2, 4, 4),
)
add(
    "batch norm 1d, eval mode",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(),
    normal(M, 3),
)
add("prelu", lambda: nn.PReLU(), normal(M, 3, 4))
add("prelu per channel", lambda: nn.PReLU(3), normal(M, 3, 4, 4))
add(
    "dropout",
    lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
    normal(M, 3),
)
add(
    "dropout of channels",
    lambda: nn.Sequential(nn.Conv2d(2, 8, 2), nn.Dropout2d(0.5)),
    normal(M, 2, 4, 4),
)
add(
    "local response norm",
    lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.LocalResponseNorm(3)),
    normal(M, 2, 4, 4),
)

# --- attention -------------------------------------------------------------------------------

_attention: dict[str, Any] = {"dropout": 0.2}
add(
    "attention, batch first",
    model(lambda s, x: s.a(x, x, x)[0], a=lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
    normal(M, M, 4),
)
add(
    "attention, time first",
    model(lambda s, x: s.a(x, x, x, need_weights=False)[0], a=lambda: nn.MultiheadAttention(4, 2)),
    normal(5, M, 4),
    lambda s, x: s(x).sin().mean((0, 2)),
    batch_dim=1,
)
add(
    "attention, time first, T = m",
    model(lambda s, x: s.a(x, x, x)[0], a=lambda: nn.MultiheadAttention(4, 2)),
    normal(M, M, 4),
    lambda s, x: s(x).sin().mean((0, 2)),
    batch_dim=1,
)
add(
    "cross attention with other widths",
    model(
        lambda s, q, k, v: s.a(q, k, v)[0],
        a=lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True),
    ),
    lambda: (torch.randn(M, M, 4), torch.randn(M, 6, 3), torch.randn(M, 6, 5)),
)
add(
    "cross attention, same widths",
    model(lambda s, q, k: s.a(q, k, k)[0], a=lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
    lambda: (torch.randn(M, M, 4), torch.randn(M, 6, 4)),
)
add(
    "attention with learnt keys",
    model(
        lambda s, x: s.a(x, x, x)[0],
        a=lambda: nn.MultiheadAttention(
            4, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True
        ),
    ),
    normal(M, M, 4),
)
add(
    "attention with a padding mask",
    model(
        lambda s, x, mask: s.a(x, x, x, key_padding_mask=mask, need_weights=False)[0],
        a=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    ),
    lambda: (torch.randn(M, M, 4), torch.arange(M)[None] > torch.randint(0, M, (M, 1))),
)
add(
    "encoder layer",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, **_attention),
    normal(M, M, 4),
)
add(
    "encoder layer, time first, norm first",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, norm_first=True, **_attention),
    normal(M, M, 4),
    lambda s, x: s(x).sin().mean((0, 2)),
    batch_dim=1,
)
add(
    "encoder with a causal mask",
    model(
        lambda s, x: s.e(x, mask=nn.Transformer.generate_square_subsequent_mask(M).to(x.dtype)),
        e=lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
        ),
    ),
    normal(M, M, 4),
)
add(
    "encoder, mask given as an argument, T = m",
    lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    ),
    normal(M, M, 4),
    lambda s, x: rows(s(x, mask=torch.triu(torch.full((M, M), -torch.inf, dtype=x.dtype), 1))),
)
add(
    "decoder layer",
    lambda: nn.TransformerDecoderLayer(4, 2, 8, batch_first=True, **_attention),
    lambda: (torch.randn(M, M, 4), torch.randn(M, 6, 4)),
)
add(
    "transformer",
    lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
    lambda: (torch.randn(M, M, 4), torch.randn(M, 3, 4)),
)

# --- recurrences -----------------------------------------------------------------------------

for _kind in (nn.RNN, nn.GRU, nn.LSTM):
    add(
        f"{_kind.__name__}, two layers, both directions",
        lambda kind=_kind: kind(3, 4, num_layers=2, bidirectional=True, batch_first=True),
        normal(M, M, 3),
    )
    add(
        f"{_kind.__name__}, time first",
        lambda kind=_kind: kind(3, 4),
        normal(M, M, 3),
        lambda s, x: s(x)[0].sin().mean((0, 2)),
        batch_dim=1,
    )
add(
    "LSTM with projection",
    lambda: nn.LSTM(3, 5, proj_size=2, batch_first=True),
    normal(M, M, 3),
)
add(
    "LSTM, last state only",
    model(
        lambda s, x: s.a(s.r(x)[1][0][-1]),
        r=lambda: nn.LSTM(3, 4, batch_first=True),
        a=linear(4, 2),
    ),
    normal(M, M, 3),
)
add(
    "GRU with a learnt initial state",
    model(
        lambda s, x: s.r(x, s.h.expand(1, len(x), 4).contiguous())[0],
        r=lambda: nn.GRU(3, 4, batch_first=True),
        h=(1, 1, 4),
    ),
    normal(M, M, 3),
)
add(
    "GRU on packed sequences",
    model(
        lambda s, x, n: rnn.pad_packed_sequence(
            s.r(rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))[0],
            batch_first=True,
            total_length=x.shape[1],
        )[0],
        r=lambda: nn.GRU(3, 4, batch_first=True),
    ),
    lambda: (torch.randn(M, 5, 3), torch.randint(1, 6, (M,))),
)
