"""Models, data and comparisons of the cases that ranks run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import heldin
from tests.support import runs

Case = Callable[[int, int], None]
CASES: dict[str, Case] = {}
TIGHT = 1e-10
PATIENCE = 60  # seconds that a rank waits for the others, whatever the machine has to do


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Words(nn.Module):
    """Embeddings with broadcast positions, attention, a norm, tied output weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(1, 6, 8))
        self.three, self.norm = nn.Linear(8, 24, bias=False), nn.LayerNorm(8)
        self.out = nn.Linear(8, 11)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids) + self.places
        q, k, v = self.three(self.norm(h)).chunk(3, -1)
        result: Tensor = self.out(h + F.scaled_dot_product_attention(q, k, v))
        return result


class Forked(nn.Module):
    """Half of the samples go one way, the others the other."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, way: Tensor) -> Tensor:
        h = self.trunk(x).tanh()
        parts = [(self.left, way == 0), (self.right, way == 1)]
        used = [(layer, mask) for layer, mask in parts if bool(mask.any())]
        if len(used) == 1:
            return used[0][0](h)
        result = h.new_zeros(len(x), 3)
        for layer, mask in used:
            result = result.index_put((mask,), layer(h[mask]))
        return result


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)
    )


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 3))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 9, 3))


def batch(kind: str, m: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    if kind == "words":
        ids = torch.randint(0, 11, (m, 6), generator=random)
        return ids, ids.roll(1, 1)
    shape = (m, 2, 5, 5) if kind == "conv" else (m, 5)
    x = torch.randn(shape, generator=random)
    y = (x.flatten(1)[:, 0] + torch.randn(m, generator=random) > 0).long()
    return x, y


def make(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return {"mlp": mlp, "smooth": smooth, "conv": conv, "words": Words}[kind]()


def loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def sizes_of(world: int, even: bool, step: int) -> list[int]:
    return [4] * world if even else [[5, 3, 1, 7], [1, 6, 4, 2]][step % 2][:world]


def part(data: tuple[Tensor, Tensor], sizes: list[int], rank: int) -> tuple[Tensor, ...]:
    return tuple(t.split(sizes)[rank] for t in data)


def close(one: heldin.criterion.Evidence, other: heldin.criterion.Evidence) -> None:
    assert one.count == other.count, (one.count, other.count)
    assert one.live == other.live, (one.live, other.live)
    assert one.groups.keys() == other.groups.keys(), (one.groups, other.groups)
    for name, value in one.groups.items():
        assert abs(value - other.groups[name]) <= TIGHT * max(1, abs(value)), (
            f"{name}: {value} and {other.groups[name]}"
        )
    near(one.criterion, other.criterion)


def near(one: float, other: float) -> None:
    same = abs(one - other) <= TIGHT * max(1, abs(one))
    assert same or repr(one) == repr(other) == "nan", (one, other)


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def refused(message: str) -> Iterator[None]:
    try:
        yield
    except heldin.HeldinError as error:
        if message not in str(error):
            raise
    else:
        raise AssertionError(f"not refused: {message}")


def same_everywhere(value: Any) -> None:
    assert all(repr(other) == repr(value) for other in everyone(value)), everyone(value)


def both(
    kind: str,
    rank: int,
    world: int,
    *,
    steps: int = 3,
    even: bool = True,
    ddp: dict[str, Any] | None = None,
    penalty: float = 0.0,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    **options: Any,
) -> None:
    """Train in all ranks; compare every step with one process on the concatenated batch."""
    plain = make(kind)
    inner = copy.deepcopy(plain)
    model = DDP(inner, **(ddp or {})) if wrap is None else wrap(inner)
    alone = runs.EvidenceStopping(plain, process_group=None, arming=None, **options)
    together = runs.EvidenceStopping(model, arming=None, **options)
    rate = 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with alone, together:
        for step in range(steps):
            sizes = sizes_of(world, even, step)
            x, y = batch(kind, sum(sizes), step)
            mine = part((x, y), sizes, rank)
            both_ways: Any = ((plain, x, y), (model, *mine))
            for net, a, b in both_ways:
                value = loss(net(a), b)
                if penalty:
                    value = value + penalty * sum(p.square().sum() for p in net.parameters())
                value.backward()
            assert together.step() == alone.step()
            close(together.evidence, alone.evidence)
            near(together.criterion, alone.criterion)
            optimizer.step()
            optimizer.zero_grad()
            plain.zero_grad()
            copy_weights(model, plain)
    same_everywhere((together.criterion, together.evidence))
    assert together.bytes_sent > 0
    assert alone.bytes_sent == 0


def copy_weights(model: nn.Module, plain: nn.Module) -> None:
    own = dict(plain.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            full = p.full_tensor() if hasattr(p, "full_tensor") else p
            own[name.removeprefix("module.")].copy_(full)
