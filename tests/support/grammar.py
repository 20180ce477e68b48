"""Random models: layers, shapes, reuse and views, put together by a grammar.

A model is a chain of steps. Between them a tensor of shape (m, T, d) is handed on, in whatever
memory layout; within a step it may be folded, transposed, cut up and put together again. T is often
equal to m.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Step = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A random model. `names` says what it is made of."""

    def __init__(self, seed: int, m: int) -> None:
        super().__init__()
        self.random = random = Random(seed)
        self.m = m
        self.parts = nn.ModuleList()
        self.weights = nn.ParameterList()
        self.steps: list[Step] = []
        self.names: list[str] = []
        self.length = random.choice([m, m, random.randint(1, 5)])
        self.width = random.choice([2, 3, 4])
        self.tokens = random.random() < 0.3
        if self.tokens:
            self.parts.append(nn.Embedding(7, self.width, padding_idx=random.choice([None, 0])))
        else:
            self.parts.append(nn.Linear(3, self.width, bias=random.random() < 0.7))
        made: list[Step] = []
        for _ in range(random.randint(1, 5)):
            if made and random.random() < 0.25:
                self.names.append("again")  # a step that was made before: shared weights
                self.steps.append(random.choice(made))
                continue
            kind = random.choice(KINDS)
            self.names.append(kind.__name__)
            made.append(kind(self))
            self.steps.append(made[-1])
        self.wrap = [random.random() for _ in self.steps]
        self.output = random.choice(["rows", "time first", "folded", "loss"])
        self.tied = self.tokens and random.random() < 0.5
        self.names.append(self.output + (" tied" if self.tied else ""))

    def part(self, module: nn.Module) -> Any:
        self.parts.append(module)
        return module

    def weight(self, *shape: int) -> Any:
        self.weights.append(nn.Parameter(torch.randn(*shape) * 0.5))
        return self.weights[-1]

    def batch(self) -> Tensor:
        if self.tokens:
            return torch.randint(0, 7, (self.m, self.length))
        return torch.randn(self.m, self.length, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts[0](x)
        for step, way in zip(self.steps, self.wrap, strict=True):
            if way < 0.1:
                h = checkpoint(step, h, use_reentrant=False)
            elif way < 0.3:
                h = h + step(h)
            elif way < 0.4:
                h = F.dropout(step(h), 0.3)
            else:
                h = step(h)
        if self.tied:
            h = F.linear(h, self.parts[0].get_parameter("weight"))
        if self.output == "time first":
            return h.transpose(0, 1)
        if self.output == "folded":
            return h.reshape(-1, h.shape[2])
        return each(h).mean() if self.output == "loss" else h

    def losses(self, x: Tensor) -> Tensor:
        """Per-sample losses (m,), or their mean if that is all the model gives."""
        out = self(x)
        if self.output == "time first":
            out = out.transpose(0, 1)
        if self.output == "folded":
            out = out.reshape(self.m, self.length, -1)
        return out if self.output == "loss" else each(out)


def each(h: Tensor) -> Tensor:
    return h.flatten(1).sin().sum(1) + 0.1 * h.flatten(1).square().sum(1)


# --- steps: functions of a net that make a step ----------------------------------------------


def linear(net: Net) -> Step:
    layer = net.part(nn.Linear(net.width, net.width, bias=net.random.random() < 0.7))
    return lambda h: layer(h).tanh()


def folded(net: Net) -> Step:
    layer = net.part(nn.Linear(net.width, net.width))
    if net.random.random() < 0.5:
        return lambda h: layer(h.reshape(-1, net.width)).tanh().reshape(h.shape)
    return lambda h: (
        layer(h.transpose(0, 1).reshape(-1, net.width))
        .reshape(net.length, net.m, net.width)
        .transpose(0, 1)
    )


def raw_matrix(net: Net) -> Step:
    w = net.weight(net.width, net.width)
    return net.random.choice(
        [
            lambda h: h @ w,
            lambda h: (w.t() @ h.mT).mT,
            lambda h: torch.einsum("ntd,de->nte", h, w),
            lambda h: torch.einsum("ed,ntd->nte", w, h).relu_(),
            lambda h: torch.bmm(h, w.expand(net.m, -1, -1)),
            lambda h: F.linear(h, (2 * w).tril()),
            lambda h: F.linear(h, w.view(-1).view(net.width, net.width), w[0]),
            lambda h: torch.stack([row @ w for row in h.unbind(1)], 1),
            lambda h: torch.cat([h[:, :1] @ w, h[:, 1:]], 1),
        ]
    )


def low_rank(net: Net) -> Step:
    a, b, w = net.weight(net.width, 1), net.weight(1, net.width), net.weight(net.width, net.width)
    if net.random.random() < 0.5:
        return lambda h: F.linear(h, w + a @ b)
    return lambda h: h + h @ a @ b


def weight_norm(net: Net) -> Step:
    layer = net.part(parametrizations.weight_norm(nn.Linear(net.width, net.width)))
    return lambda h: layer(h).sigmoid()


def scale_and_shift(net: Net) -> Step:
    shape = net.random.choice([(net.width,), (1, 1, net.width), (net.length, 1), (1,)])
    g, b = net.weight(*shape), net.weight(*net.random.choice([shape, (net.width,)]))
    return net.random.choice(
        [
            lambda h: h * g + b,
            lambda h: torch.addcmul(b, h, g),
            lambda h: (h - b) / (1 + g**2),
            lambda h: torch.where(h > 0, h * g, h * b),
            lambda h: h.mul(g).add_(b),
        ]
    )


def positions(net: Net) -> Step:
    table = net.part(nn.Embedding(net.length + 2, net.width))
    at = torch.arange(net.length)
    if net.random.random() < 0.5:
        return lambda h: h + table(at[None])
    return lambda h: h + table.weight[1 : net.length + 1]


def class_token(net: Net) -> Step:
    c = net.weight(1, 1, net.width)
    query = net.part(nn.Linear(net.width, net.width))

    def step(h: Tensor) -> Tensor:
        longer = torch.cat([c.expand(net.m, 1, net.width), h], 1)
        mixed = (query(longer) @ longer.mT).softmax(-1) @ longer
        return mixed[:, 1:] + mixed[:, :1]

    return step


def norm(net: Net) -> Step:
    kind = net.random.choice(["layer", "rms", "group", "instance", "batch"])
    if kind == "layer":
        layer = net.part(nn.LayerNorm(net.width))
    elif kind == "rms":
        layer = net.part(nn.RMSNorm(net.width))
    elif kind == "group":
        inner = net.part(nn.GroupNorm(1, net.width))
        return lambda h: inner(h.mT).mT
    elif kind == "instance" and net.length > 1:
        inner = net.part(nn.InstanceNorm1d(net.width, affine=True))
        return lambda h: inner(h.mT).mT
    else:
        inner = net.part(nn.BatchNorm1d(net.width).eval())
        return lambda h: inner(h.mT).mT
    return lambda h: layer(h)


def attention(net: Net) -> Step:
    first = net.random.random() < 0.5
    bias = net.random.random() < 0.2
    layer = net.part(nn.MultiheadAttention(net.width, 1, batch_first=first, add_bias_kv=bias))
    weights = net.random.random() < 0.5
    if first:
        return lambda h: layer(h, h, h, need_weights=weights)[0]
    return lambda h: layer(*[h.transpose(0, 1)] * 3, need_weights=weights)[0].transpose(0, 1)


def recurrence(net: Net) -> Step:
    kind = net.random.choice([nn.RNN, nn.GRU, nn.LSTM])
    both = net.random.random() < 0.3
    layer = net.part(kind(net.width, net.width, batch_first=True, bidirectional=both))
    out = net.part(nn.Linear(2 * net.width, net.width)) if both else nn.Identity()
    return lambda h: out(layer(h)[0])


def cell(net: Net) -> Step:
    layer = net.part(nn.GRUCell(net.width, net.width))

    def step(h: Tensor) -> Tensor:
        state, out = h.new_zeros(net.m, net.width), []
        for t in range(net.length):
            state = layer(h[:, t], state)
            out.append(state)
        return torch.stack(out, 1)

    return step


def convolution(net: Net) -> Step:
    mode: Any = net.random.choice(["zeros", "circular", "replicate"])
    groups = net.random.choice([1, net.width])
    layer = net.part(
        nn.Conv1d(net.width, net.width, 3, padding=1, padding_mode=mode, groups=groups)
    )
    return lambda h: layer(h.mT).mT


def image(net: Net) -> Step:
    layer = net.part(nn.Conv2d(1, 2, 2, padding=1, stride=net.random.choice([1, 2])))
    back = net.part(nn.ConvTranspose2d(2, 1, 2))

    def step(h: Tensor) -> Tensor:
        out = back(layer(h[:, None]).relu())
        return h + F.interpolate(out, h.shape[1:])[:, 0]

    return step


def prelu(net: Net) -> Step:
    layer = net.part(nn.PReLU(net.random.choice([1, net.length])))
    return lambda h: layer(h)


def gate(net: Net) -> Step:
    layer = net.part(nn.Linear(net.width, 2 * net.width))
    return lambda h: F.glu(layer(h))


def bilinear(net: Net) -> Step:
    layer = net.part(nn.Bilinear(net.width, net.width, net.width))
    return lambda h: layer(h.contiguous(), h.flip(1).contiguous())


def generated(net: Net) -> Step:
    layer = net.part(nn.Linear(net.width, net.width * net.width))

    def step(h: Tensor) -> Tensor:
        kernels = layer(h.mean(1)).reshape(net.m, net.width, net.width)
        return torch.bmm(h, kernels)

    return step


def moving(net: Net) -> Step:
    """No weights: elements go to other places within their sample."""
    return net.random.choice(
        [
            lambda h: h.flip(1),
            lambda h: h.roll(1, 1),
            lambda h: h.transpose(0, 1).contiguous().transpose(0, 1),
            lambda h: h.reshape(net.m, -1).reshape(h.shape),
            lambda h: h.reshape(-1, net.width)[None].view(h.shape),
            lambda h: torch.stack(h.unbind(1), 1),
            lambda h: torch.cat(h.split(1, 0), 0),
            lambda h: h.sort(1).values,
            lambda h: h.cumsum(1),
            lambda h: h[:, torch.arange(net.length - 1, -1, -1)],
            lambda h: h.gather(1, h.argsort(1)),
            lambda h: F.pad(h, (0, 0, 1, 1))[:, 1:-1],
            lambda h: h.repeat(1, 2, 1)[:, : net.length],
            lambda h: h.expand(2, *h.shape).mean(0),
            lambda h: h.clone().relu_(),
            lambda h: h.masked_fill(h < -1, 0.0),
            lambda h: h.softmax(1),
            lambda h: h - h.mean(1, keepdim=True),
            lambda h: h.max(1, keepdim=True).values + h,
            lambda h: h.index_select(1, torch.arange(net.length)),
            lambda h: _filled(h),
            lambda h: h.to_dense().unfold(1, 1, 1).squeeze(3),
        ]
    )


def _filled(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 0] = h[:, -1]
    out[:, 1:] += h[:, 1:] * 2
    return out


def shuffled(net: Net) -> Step:
    """Samples are shuffled, worked on and put back: right for one batch is not for the next."""
    layer = net.part(nn.Linear(net.width, net.width))

    def step(h: Tensor) -> Tensor:
        order = torch.randperm(net.m)
        return layer(h[order])[order.argsort()]

    return step


def routed(net: Net) -> Step:
    """Rows go to one of two layers, by their content."""
    a, b = (net.part(nn.Linear(net.width, net.width)) for _ in range(2))

    def step(h: Tensor) -> Tensor:
        flat = h.reshape(-1, net.width)
        out = torch.zeros_like(flat)
        chosen = flat.detach().sum(1) > 0
        out[chosen] = a(flat[chosen])
        out[~chosen] = b(flat[~chosen])
        return out.reshape(h.shape)

    return step


KINDS: list[Callable[[Net], Step]] = [
    linear, folded, raw_matrix, low_rank, weight_norm, scale_and_shift, positions, class_token,
    norm, attention, recurrence, cell, convolution, image, prelu, gate, bilinear, generated,
    moving, moving, shuffled, routed,
]  # fmt: skip
