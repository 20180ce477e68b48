"""Cases: found by looking for trouble."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

from .common import M, add, linear, model, normal

# --- found by looking for trouble ------------------------------------------------------------

add(
    "distance to prototypes (whose batched backward is wrong in PyTorch)",
    model(lambda s, x: torch.cdist(s.a(x), s.e), a=linear(3, 4), e=(6, 4)),
    normal(M, 3),
    autocast=False,
)
add(
    "distance between parameters",
    model(lambda s, x: x @ torch.cdist(s.e, s.g), e=(3, 4), g=(2, 4)),
    normal(M, 3),
    autocast=False,
)
for _op, _combine in (
    ("times", lambda x, w: x * w),
    ("over", lambda x, w: x / w),
    ("plus", lambda x, w: x + w),
):
    add(
        f"spectrum {_op} complex weights (Fourier layer)",
        model(
            lambda s, x, combine=_combine: torch.fft.irfft(
                combine(torch.fft.rfft(x), torch.view_as_complex(s.w)), n=6
            ),
            w=(4, 2),
        ),
        normal(M, 6),
        autocast=False,
    )
add(
    "Fourier transform seen as pairs",
    model(
        lambda s, x: torch.view_as_real(torch.fft.fft(s.a(x), dim=1)) * s.b, a=linear(3, 4), b=(2,)
    ),
    normal(M, M, 3),
    autocast=False,
)
add(
    "windows that overlap in memory",
    model(
        lambda s, x: s.b(s.a(x).as_strided((M, 3, 2, 2), (8, 2, 2, 1))),
        a=linear(3, 2),
        b=linear(2, 2),
    ),
    normal(M, 4, 3),
)
add(
    "complex matrix",
    model(lambda s, x: (torch.fft.rfft(x) @ torch.view_as_complex(s.w)).abs(), w=(4, 3, 2)),
    normal(M, 6),
    autocast=False,
)
for _layout in (torch.sparse_coo, torch.sparse_csr):
    add(
        f"{_layout} inputs",
        model(lambda s, x: s.a((x @ s.w + s.b).tanh()), w=(3, 5), b=(5,), a=linear(5, 2)),
        lambda layout=_layout: (torch.randn(M, 3).relu().to_sparse(layout=layout),),
        autocast=False,
    )
add(
    "sparse product inside",
    model(lambda s, x: torch.sparse.mm(x.to_sparse(), s.w), w=(3, 2)),
    normal(M, 3),
    autocast=False,
)
add(
    "random leaky relu",
    lambda: nn.Sequential(nn.Linear(3, 5), nn.RReLU(), nn.Linear(5, 2)),
    normal(M, 3),
)
add(
    "spectral norm",
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh()),
    normal(M, 3),
    autocast=False,  # the singular vectors move with every forward pass
)
add(
    "force of an energy (double backward)",
    model(lambda s, x: _force(s, x), a=linear(3, 4), b=linear(4, 1)),
    normal(M, 3),
    autocast=False,
)


def _force(s: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(s.b(s.a(x).tanh()).sum(), x, create_graph=True)
    return force


add(
    "linear on packed rows",
    model(lambda s, x, n: _on_packed(s, x, n), a=linear(3, 2)),
    lambda: (torch.randn(M, 5, 3), torch.randint(1, 6, (M,))),
)


def _on_packed(s: Any, x: Tensor, n: Tensor) -> Tensor:
    packed = rnn.pack_padded_sequence(x, n.cpu(), batch_first=True, enforce_sorted=False)
    rows = packed._replace(data=s.a(packed.data))
    return rnn.pad_packed_sequence(rows, batch_first=True, total_length=x.shape[1])[0]


add(
    "carried state",
    model(lambda s, x: _carried(s, x), a=linear(3, 3)),
    normal(M, 3),
)


def _carried(s: Any, x: Tensor) -> Tensor:
    old = getattr(s, "state", None)
    h = s.a(x) if old is None else s.a(x) + s.a(old)
    s.state = h.detach().to(x.dtype)
    return h


class Context(nn.Module):
    """An argument with as many rows as there are samples, which are none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.a(x) + self.b(context).mean(0)


add(
    "no batch, declared by the name of a positional argument",
    Context,
    lambda: (torch.randn(M, 3), torch.randn(M, 3)),
    batch_dim={"context": None},
)
_lengths = iter([2, 4, 2, 6, 3, 1, 6] * 1000)
for _name, _cut in {
    "linear": model(lambda s, x: s.a(x[:, : next(_lengths)]).tanh().mean(1), a=linear(3, 4)),
    "positions": model(lambda s, x: _at_positions(s, x, next(_lengths)), p=(6, 3)),
    "repeats": model(lambda s, x: _repeated(s, x[:, 0], next(_lengths)), a=linear(3, 2)),
    "part of the batch": model(
        lambda s, x: _in_two(s, x, next(_lengths) % 3 + 1), a=linear(3, 2), b=linear(3, 2)
    ),
    "rolled rows": model(lambda s, x: _rolled(s, x[:, 0], next(_lengths)), a=linear(3, 2)),
}.items():
    add(f"a size that no argument tells: {_name}", _cut, normal(M, 6, 3))


def _at_positions(s: Any, x: Tensor, length: int) -> Tensor:
    return (x[:, :length] + s.p[:length]).sin().mean(1)


def _repeated(s: Any, x: Tensor, times: int) -> Tensor:
    return s.a(x.repeat_interleave(times, 0)).view(M, times, 2).sin().mean(1)


def _in_two(s: Any, x: Tensor, first: int) -> Tensor:
    return torch.cat([s.a(x[:first]), s.b(x[first:])])


def _rolled(s: Any, x: Tensor, by: int) -> Tensor:
    return s.a(x) + 2 * s.a(x.roll(by, 0)).roll(-by, 0)
