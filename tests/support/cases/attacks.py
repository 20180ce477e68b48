"""Cases: found by attacks on the promise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

from .common import M, add, linear, model, normal, rows

# --- found by attacks: functions of the user's -------------------------------------------------


class Scaled(torch.autograd.Function):
    """Arguments that are no tensors before, between and after the tensors; two outputs."""

    @staticmethod
    def forward(ctx: Any, by: float, x: Tensor, how: str, w: Tensor, b: Tensor, flag: bool) -> Any:
        ctx.save_for_backward(x, w)
        ctx.by = by
        return by * x * w + b, x - w

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx, dw = ctx.by * one * w + two, ctx.by * one * x - two  # both must be tensors
        return None, dx, None, dw.sum(0), one.sum(0), None


for _count in (1, 2):
    add(
        f"function with numbers among its arguments, {_count} outputs used",
        model(
            lambda s, x, n=_count: sum(Scaled.apply(2.0, s.a(x), "a", s.w, s.b, True)[:n]),
            a=linear(3, 3),
            w=(3,),
            b=(3,),
        ),
        normal(M, 3),
        autocast=False,
    )


# --- found by attacks: numbers that leave tensors ----------------------------------------------

_PARTS = ([1, 3, 2, 4], [4, 2, 3, 1], [2, 2, 3, 3], [4, 1, 4, 1], [3, 3, 3, 1])  # of ten rows
_parts = iter([_PARTS[i % 5] for i in range(5000)])


def _unpadded(s: Any, x: Tensor, lengths: Any) -> Tensor:
    rows = torch.cat([x[i, :n] for i, n in enumerate(lengths)])
    return torch.stack([part.mean(0) for part in s.a(rows).tanh().split([int(n) for n in lengths])])


for _name, _read in {
    "tolist": lambda n: n.tolist(),
    "numpy": lambda n: n.numpy().copy(),
    "item": lambda n: [each.item() for each in n],
    "slices": lambda n: n,
    "single yes and no": lambda n: [sum(1 for j in range(5) if j < each) for each in n],
}.items():
    add(
        f"lengths that become numbers of Python: {_name}",
        model(lambda s, x, n, read=_read: _unpadded(s, x, read(n)), a=linear(3, 2)),
        lambda: (torch.randn(M, 5, 3), torch.tensor(next(_parts))),
    )
for _name, _given in {
    "a list": lambda n: n,
    "a list in a dictionary": lambda n: {"lengths": {"of": n}},
    "an array": lambda n: torch.tensor(n).numpy(),
}.items():
    add(
        f"lengths among the arguments: {_name}",
        model(
            lambda s, x, n: _unpadded(s, x, n["lengths"]["of"] if isinstance(n, dict) else n),
            a=linear(3, 2),
        ),
        lambda given=_given: (torch.randn(M, 5, 3), given(next(_parts))),
    )


_OF: list[list[int]] = [[]]  # numbers from elsewhere


class SimpleSlots:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Hidden:
    """A number that no attribute shows."""

    __slots__ = ("_of",)

    def __init__(self, number: int) -> None:
        self._of = iter([number] * 100)


def _number(value: Any) -> int:
    if isinstance(value, SimpleSlots):
        return value.number
    if isinstance(value, Hidden):
        return next(value._of)
    return _number(value[0]) if isinstance(value, list) else int(value)


def _padded(s: Any, x: Tensor, lengths: list[int]) -> tuple[Tensor]:
    """All rows that are none of padding; who owns each is known by the lengths alone."""
    _OF[0] = lengths
    return (s.a(torch.cat([x[i, :n] for i, n in enumerate(lengths)])).tanh(),)


_OBJECTS: dict[str, Callable[[Any], Any]] = {
    "objects with slots": lambda n: [SimpleSlots(each) for each in n],
    "objects that hide it": lambda n: [Hidden(each) for each in n],
    "a deque": deque,
    "deep inside": lambda n: [[[[[[each]]]]] for each in n],
}
for _name, _given in _OBJECTS.items():
    add(
        f"lengths among the arguments: {_name}",
        model(lambda s, x, n: _padded(s, x, [_number(each) for each in n]), a=linear(3, 2)),
        lambda given=_given: (torch.randn(M, 5, 3), given(next(_parts))),
        lambda s, x, n: torch.stack([part.square().sum() for part in s(x, n)[0].split(_OF[0])]),
    )
add(
    "lengths that are an attribute of the model",
    model(lambda s, x: _unpadded(s, x, _OF[0]), a=linear(3, 2)),
    lambda: (torch.randn(M, 5, 3), next(_parts)),
    lambda s, x, n: (_OF.__setitem__(0, n), rows(s(x)))[1],
)


def _even_or_not(s: Any, x: Tensor, n: Tensor) -> Tensor:
    if (n == n[0]).all():  # a question about the whole batch
        rows = x[:, :2].reshape(-1, 3)
    else:
        rows = torch.cat([x[i, :k] for i, k in enumerate(n.tolist())])
    where = torch.repeat_interleave(torch.arange(M), n)
    return torch.zeros(M, 2, dtype=x.dtype).index_add(0, where, s.a(rows).tanh().to(x.dtype))


_evens = iter([([2, 2, 2, 2], [1, 3, 3, 1], [3, 1, 1, 3])[i % 3] for i in range(3000)])
add(
    "a branch for batches without padding",
    model(_even_or_not, a=linear(3, 2)),
    lambda: (torch.randn(M, 5, 3), torch.tensor(next(_evens))),
)

# --- found by attacks: what counts samples ------------------------------------------------------

_sizes = iter([(3, 1, 5, 2)[i % 4] for i in range(4000)])


def _with_mask(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 5, 4), torch.triu(torch.full((5, 5), -torch.inf), 1)


add(
    "batches of any size, also one, beside a mask",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0),
    lambda: _with_mask(next(_sizes)),
)
add(
    "a batch of one beside a mask",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0),
    lambda: _with_mask(1),
)
add(
    "prompts before the batch",
    model(
        lambda s, p, x: s.b(torch.cat([s.a(p).expand(len(x), -1, -1), x], 1)).tanh().mean(1),
        a=linear(3, 3),
        b=linear(3, 2),
    ),
    lambda: (torch.randn(7, 3), torch.randn(next(_sizes), 2, 3)),
    autocast=False,  # cat of two precisions
)
add(
    "positions before the batch",
    model(lambda s, p, x: s.a(x) + s.e(p), a=linear(3, 2), e=lambda: nn.Embedding(9, 2)),
    lambda: (torch.arange(6), torch.randn(next(_sizes), 6, 3)),
)
add(
    "points before functions, told which",
    model(lambda s, p, f: s.a(f) @ s.b(p).T, a=linear(3, 2), b=linear(2, 2)),
    lambda: (torch.randn(5, 2), torch.randn(next(_sizes), 3)),
    batch_dim={0: None},
)
_images = model(
    lambda s, xs: s.c(torch.stack(xs)).tanh().mean((2, 3)), c=lambda: nn.Conv2d(3, 2, 3)
)
add(
    "a list of images, sometimes as many as they have channels",
    _images,
    lambda: ([torch.randn(3, 6, 6) for _ in range(next(_sizes) + 1)],),
)
_graph = model(
    lambda s, xs: torch.stack([s.b(s.a(x).tanh().mean(0)) for x in xs]),
    a=linear(3, 4),
    b=linear(4, 2),
)
add(
    "a list of graphs of equal size",
    _graph,
    lambda: ([torch.randn(3, 3) for _ in range(next(_sizes))],),
)
add(
    "a list of graphs of different sizes, targets beside them",
    model(
        lambda s, xs, ys: torch.stack(
            [s.a(x).tanh().mean(0) - y["target"] for x, y in zip(xs, ys, strict=True)]
        ),
        a=linear(3, 2),
    ),
    lambda: (
        [torch.randn(2 + i, 3) for i in range(M)],
        [{"target": torch.randn(2)} for _ in range(M)],
    ),
)
add(
    "two inputs in a list",
    model(lambda s, xs: s.a(xs[0]) + s.b(xs[1]), a=linear(3, 4), b=linear(2, 4)),
    lambda: ([torch.randn(M, 3), torch.randn(M, 2)],),
)


# --- found by attacks: refused, though people expect it to work ---------------------------------

add(
    "channels last, pooled to one pixel",
    lambda: nn.Sequential(  # type: ignore[call-overload]
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).to(memory_format=torch.channels_last),
    lambda: (torch.randn(M, 3, 6, 6).to(memory_format=torch.channels_last),),
)


def _some(count: int) -> Tensor:
    """A mask (M, 5) with so many true entries in each row."""
    return torch.rand(M, 5).argsort(1) < count


add(
    "masked scatter of another input",
    model(
        lambda s, x, v, mask: s.b(
            s.a(x).masked_scatter(mask[..., None].expand(-1, -1, 3), s.v(v))
        ).tanh(),
        a=linear(3, 3),
        b=linear(3, 2),
        v=linear(2, 3),
    ),
    lambda: (torch.randn(M, 5, 3), torch.randn(M, 2, 2), _some(2)),
)


def _masked_by_parameter(s: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = s.a(x)
    h[mask] = s.p.to(h.dtype)
    return s.b(h)


add(
    "a parameter put where a mask is true",
    model(_masked_by_parameter, a=linear(3, 3), b=linear(3, 2), p=(3,)),
    lambda: (torch.randn(M, 5, 3), torch.rand(M, 5) > 0.5),
)


def _packed_both_ways(s: Any, x: Tensor, n: Tensor) -> Tensor:
    packed = rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
    return rnn.pad_packed_sequence(s.l(packed)[0], batch_first=True, total_length=5)[0]


add(
    "packed, in both directions",
    model(_packed_both_ways, l=lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)),
    lambda: (torch.randn(M, 5, 3), torch.randint(1, 6, (M,))),
    autocast=False,
)
add(
    "packed, in both directions, GRU",
    model(_packed_both_ways, l=lambda: nn.GRU(3, 4, 2, batch_first=True, bidirectional=True)),
    lambda: (torch.randn(M, 5, 3), torch.randint(1, 6, (M,))),
    autocast=False,
)
add(
    "activations in place that are not marked as such",
    model(
        lambda s, x: s.c(F.mish(F.hardswish(s.b(s.a(x).abs_()), inplace=True), inplace=True)),
        a=linear(3, 4), b=linear(4, 4), c=linear(4, 2),
    ),
    normal(M, M, 3),
)  # fmt: skip
add(
    "products of vectors, bins, solved matrices",
    model(
        lambda s, x: s.b(torch.linalg.cross(s.a(x), x)) * (_bins(s.a(x)) + 1)
        + torch.cholesky_solve(s.a(x), torch.eye(3) + x.tril() ** 2),
        a=linear(3, 3), b=linear(3, 3),
    ),
    normal(M, 3, 3),
    autocast=False,
)  # fmt: skip


def _bins(x: Tensor) -> Tensor:
    return torch.searchsorted(x.detach().sort(-1)[0], x.detach()).to(x.dtype)


_bags = iter([([0, 2, 3, 6], [0, 1, 5, 6], [0, 3, 4, 5])[i % 3] for i in range(3000)])
for _mode in ("mean", "sum"):
    add(
        f"bags with offsets: {_mode}",
        model(
            lambda s, i, o: s.b(s.e(i, o)),
            e=lambda mode=_mode: nn.EmbeddingBag(7, 3, mode=mode),
            b=linear(3, 2),
        ),
        lambda: (torch.randint(0, 7, (9,)), torch.tensor(next(_bags))),
    )


class Labelled(Tensor):
    """A subclass that ops keep."""


add(
    "a subclass of Tensor",
    lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
    lambda: (torch.randn(M, 3).as_subclass(Labelled),),
    lambda s, x: rows(s(x).as_subclass(Tensor)),
)
add(
    "rows ordered by a number that the data give",
    model(lambda s, x: _in_order(s, x), a=linear(3, 3), b=linear(3, 2)),
    normal(M, 5, 3),
)


def _in_order(s: Any, x: Tensor) -> Tensor:
    rows = s.a(x.reshape(-1, 3))
    order = x.reshape(-1, 3).sum(1).argsort()  # as routing to experts does
    out = torch.zeros(len(order), 2, dtype=rows.dtype).to(s.b(rows[:1]).dtype)
    return out.index_copy(0, order, s.b(rows[order]).tanh()).reshape(*x.shape[:2], 2)


# --- found by a second round of attacks ----------------------------------------------------------

add(
    "a table whose rows are shortened in forward",
    model(lambda s, i: s.b(s.e(i)), e=lambda: nn.Embedding(7, 3, max_norm=1.0), b=linear(3, 2)),
    lambda: (torch.randint(0, 7, (M, 5)),),
)
_few = iter([(0, 2, 0, 3)[i % 4] for i in range(4000)])
add(
    "an argument that is empty at times",
    model(lambda s, x, e: s.a(x) + s.b(e).sum(0), a=linear(3, 2), b=linear(3, 2)),
    lambda: (torch.randn(M, 3), torch.randn(next(_few), 3)),
)
add(
    "an argument that is always empty",
    model(lambda s, x, e: s.a(torch.cat([x, e], 1)).mean(1), a=linear(3, 2)),
    lambda: (torch.randn(M, 5, 3), torch.randn(M, 0, 3)),
)


def _routed(s: Any, x: Tensor) -> Tensor:
    """Rows in the order of their experts, one product for all of these."""
    rows = s.a(x.reshape(-1, 4))
    expert = (rows[:, 0] > 0).long()
    order, ends = expert.argsort(stable=True), torch.bincount(expert, minlength=2).cumsum(0)
    out = F.grouped_mm(rows[order], s.w, offs=ends.int()).tanh()
    return torch.zeros_like(out).index_copy(0, order, out).reshape(*x.shape[:2], 4)


add(
    "experts in one grouped product",
    model(_routed, a=linear(4, 4), w=(2, 4, 4)),
    normal(M, 3, 4),
    autocast=False,
    exact=False,  # single precision only
)


# --- found in public scripts: fields that a dataclass does not keep ----------------------------


@dataclass
class Rows:
    """A batch whose constructor takes more than it keeps."""

    scale: InitVar[float]
    x: Tensor
    scaled: Tensor = field(init=False)
    label: str = field(init=False)  # never set

    def __post_init__(self, scale: float) -> None:
        self.scaled = self.x * scale


add(
    "a dataclass with an InitVar",
    model(lambda s, batch: s.a(batch.x) * batch.scaled[:, :2], a=linear(3, 2)),
    lambda: (Rows(2.0, torch.randn(M, 3)),),
)
add(
    "an output in a dataclass with an InitVar",
    model(lambda s, x: Rows(2.0, s.a(x)), a=linear(3, 2)),
    normal(M, 3),
    lambda s, x: rows(s(x).scaled),
)


# --- found by attacks: outputs that change from call to call -----------------------------------


def _two_outputs(s: Any, x: Tensor) -> Any:
    """The same two tensors as a tuple, in the other order, in a dictionary, by turns."""
    s.turn = getattr(s, "turn", -1) + 1
    first = s.a(x)
    second = first.tanh()[:, None] * s.b(first)[:, :, None]
    return ((first, second), (second, first), {"x": second, "y": first})[s.turn % 3]


def _of_both(s: Any, x: Tensor) -> Tensor:
    out = s(x)
    parts = [*out.values()] if isinstance(out, dict) else [*out]
    return rows(parts[0]) + rows(parts[1])


add(
    "outputs in another order and structure from call to call",
    model(_two_outputs, a=linear(3, 2), b=linear(2, 5)),
    normal(M, 3),
    _of_both,
)
add(
    "a tensor, then several that hold it",
    model(
        lambda s, x: _more_and_more(s, s.a(x)),
        a=linear(3, 2),
    ),
    normal(M, 3),
    lambda s, x: rows(_last(s(x))),
)


def _more_and_more(s: Any, h: Tensor) -> Any:
    s.turn = getattr(s, "turn", -1) + 1
    return (h, (h, h.sin()), [h.sum(0), {"h": h, "cos": h.cos()}])[s.turn % 3]


def _last(out: Any) -> Tensor:
    while not isinstance(out, Tensor):
        out = list(out.values() if isinstance(out, dict) else out)[-1]
    return out
