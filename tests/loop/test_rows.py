"""Shadows: batches of any structure, rows that are known, checks that thin out."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import heldin
from heldin.loop.items import ItemStore, joined, single_items
from heldin.loop.rows import RowSource, has_same_rows, repeated_rows, undrawn_rows
from heldin.shadows.replayed import ReplayedShadows
from tests.support import runs
from tests.support.shadow_runs import Augmented, D, N, Numbers, mse


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Record:
    x: Any
    y: Any
    weight: Any


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding: a mapping that carries something more."""

    encodings: Any = None


def as_encoding(rows: list[Any]) -> Any:
    made = Encoding(default_collate([{"x": x, "y": y} for x, y in rows]))
    made.encodings = "kept"
    return made


def as_record(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return Record({"deep": [x]}, y, torch.ones(len(rows)))


STRUCTURES: dict[str, Any] = {
    "list": (default_collate, lambda b: (b[0], b[1])),
    "named tuple": (lambda rows: Pair(*default_collate(rows)), lambda b: (b.x, b.y)),
    "encoding": (as_encoding, lambda b: (b["x"], b["y"])),
    "record": (as_record, lambda b: (b.x["deep"][0], b.y)),
    "numpy": (
        lambda rows: tuple(t.numpy() for t in default_collate(rows)),
        lambda b: (torch.as_tensor(b[0]), torch.as_tensor(b[1])),
    ),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_batches_of_any_structure(kind: str) -> None:
    collate, read = STRUCTURES[kind]
    seen: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch)
        x, y = read(batch)
        return F.mse_loss(model(x), y)

    torch.manual_seed(0)
    loader = DataLoader(Augmented(), batch_size=8, collate_fn=collate)
    model = nn.Linear(D, 1)
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stopping = runs.FoldStopping(model, optimizer, data=loader, batch_loss=loss, folds=2)
    own = torch.optim.SGD(start.parameters(), lr=0.1)
    for number, batch in enumerate(loader):
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        stopping.add_batch(batch)
        stopping.step()
        assert all(type(one) is type(batch) for one in seen)
        x, y = read(batch)
        kept = stopping.fold_of_row[8 * number : 8 * number + len(x)] != 1
        own.zero_grad()
        F.mse_loss(start(x[kept]), y[kept]).backward()
        own.step()
    torch.testing.assert_close(
        stopping.backend.weights_of(1)["weight"].detach(), start.weight.detach()
    )
    if kind == "encoding":
        assert all(one.encodings == "kept" for one in seen)


def _packed(rows: Any) -> Any:
    """One long row of all samples, with their lengths."""
    xs, ys = zip(*rows, strict=True)
    return torch.cat(xs), [len(x) for x in xs], torch.stack(ys)


def _as_keys(rows: Any) -> Any:
    return {f"{i}": row for i, row in enumerate(rows)}


class _Graph:
    def __init__(self, rows: Any) -> None:
        self.rows = list(rows)


@pytest.mark.parametrize("collate", [_packed, _as_keys, _Graph], ids=["packed", "keys", "object"])
def test_batches_that_cannot_be_sliced_are_collated_again(collate: Any) -> None:
    def read(batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, tuple):
            return torch.stack(batch[0].split(batch[1])), batch[2]
        rows = batch.rows if isinstance(batch, _Graph) else batch.values()
        x, y = zip(*rows, strict=True)
        return torch.stack(x), torch.stack(y)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = read(batch)
        return F.mse_loss(model(x), y)

    torch.manual_seed(0)
    model, start = nn.Linear(D, 1).double(), nn.Linear(D, 1).double()
    start.load_state_dict(model.state_dict())
    optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, start))
    x = torch.randn(N, D, dtype=torch.float64)
    rows = list(zip(x, x[:, :1], strict=True))
    loader: Any = DataLoader(rows, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    stopping = runs.FoldStopping(model, optimizer, data=loader, batch_loss=loss)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        stopping.step()
        a, b = read(batch)
        kept = stopping.fold_of_row[8 * number : 8 * number + len(a)] != 1
        own.zero_grad()
        F.mse_loss(start(a[kept]), b[kept]).backward()
        own.step()
    torch.testing.assert_close(stopping.backend.weights_of(1)["weight"], start.weight.detach())


class LongFirst(BatchSampler):
    """Batches of various sizes, as when samples are grouped by length."""

    def __init__(self) -> None:
        super().__init__(RandomSampler(range(N)), 4, False)

    def __iter__(self) -> Any:
        order = torch.randperm(N).tolist()
        yield from (order[:7], order[7:9], order[9:])


LOADERS: dict[str, Any] = {
    "shuffled": {"batch_size": 4, "shuffle": True},
    "in order": {"batch_size": 4},
    "last dropped": {"batch_size": 4, "shuffle": True, "drop_last": True},
    "drawn twice": {"batch_size": 4, "sampler": WeightedRandomSampler(torch.rand(N).tolist(), 40)},
    "of two processes": {
        "batch_size": 4,
        "sampler": DistributedSampler(Numbers(), num_replicas=2, rank=1),
    },
    "batch sampler": {"batch_sampler": LongFirst()},
    "workers": {"batch_size": 4, "shuffle": True, "num_workers": 2, "prefetch_factor": 3},
    "persistent": {
        "batch_size": 4,
        "shuffle": True,
        "num_workers": 2,
        "persistent_workers": True,
    },
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("tell", [False, True])
def test_the_rows_of_every_batch_are_known(
    kind: str, tell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(D, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader: Any = DataLoader(Numbers(), **LOADERS[kind])
    stopping = runs.FoldStopping(model, optimizer, data=loader, batch_loss=mse, folds=2)
    given: list[Tensor] = []
    plain = ReplayedShadows._parts

    def spied(self: Any, batches: Any, number: int) -> Any:
        given.extend(batch.rows for batch in batches)
        return plain(self, batches, number)

    monkeypatch.setattr(ReplayedShadows, "_parts", spied)
    for epoch in range(3):
        for number, batch in enumerate(loader):
            if number == 1:
                continue  # a batch that is not used
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            given.clear()
            if tell:
                stopping.add_batch(copy.deepcopy(batch))
            stopping.step()
            assert given
            for index in given:
                assert index.tolist() == batch[0][:, 0].tolist()
            if epoch == 1 and number == 2:
                break  # an epoch cut short
    sampler = loader.batch_sampler
    stopping.close()
    assert "_get_iterator" not in vars(loader)
    assert loader.batch_sampler is sampler
    assert len(list(loader)) > 1


def test_batches_of_elsewhere_are_refused() -> None:
    model = nn.Linear(D, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader: Any = DataLoader(Numbers(), batch_size=4, shuffle=True)
    other: Any = DataLoader(Augmented(), batch_size=4)

    def once(used: Any, batch: Any = None, indices: Any = None) -> None:
        optimizer.zero_grad()
        mse(model, used).backward()
        optimizer.step()
        if batch is None:
            stopping.step(indices)
        else:
            stopping.add_batch(batch, indices)
            stopping.step()

    stopping = runs.FoldStopping(model, optimizer, data=loader, batch_loss=mse)
    foreign, own = next(iter(other)), next(iter(loader))
    with pytest.raises(heldin.HeldinError, match="another gradient"):
        once(foreign)
    with pytest.raises(heldin.HeldinError, match="not one of those that the loader"):
        once(foreign, batch=foreign)
    with pytest.raises(heldin.HeldinError, match="4 samples and 3 row numbers"):
        once(own, batch=own, indices=[0, 1, 2])
    with pytest.raises(heldin.HeldinError, match="cannot be made again"):
        once(own, indices=[0, 1, 2, 3])
    with pytest.raises(heldin.HeldinError, match="another structure"):
        once(own, batch={"x": own[0]}, indices=own[0][:, 0].long())
    with pytest.raises(heldin.HeldinError, match="another stopping object"):
        runs.FoldStopping(model, optimizer, data=loader, batch_loss=mse)
    stopping.close()
    optimizer.zero_grad()
    stopping = runs.FoldStopping(model, optimizer, data=Numbers(), batch_loss=mse)
    with pytest.raises(heldin.HeldinError, match="give the DataLoader"):
        once(own, batch=own)
    optimizer.zero_grad()
    stopping = runs.FoldStopping(model, optimizer, data=Numbers(), batch_loss=mse)
    once(own, batch=own, indices=own[0][:, 0].long())  # a Dataset, told


def test_tensors_in_a_dictionary() -> None:
    x = torch.randn(N, D)
    rows = {"x": x, "y": x[:, :1]}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    torch.manual_seed(0)
    model = nn.Linear(D, 1)
    twin = copy.deepcopy(model)
    optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    stopping = runs.FoldStopping(model, optimizer, data=rows, batch_loss=loss, folds=2)
    for index in torch.arange(N).split(8):
        loss(model, {key: value[index] for key, value in rows.items()}).backward()
        optimizer.step()
        optimizer.zero_grad()
        stopping.step(indices=index)
        kept = index[stopping.fold_of_row[index] != 0]
        own.zero_grad()
        F.mse_loss(twin(x[kept]), x[kept, :1]).backward()
        own.step()
    found = stopping.backend.weights_of(0)["weight"]
    torch.testing.assert_close(found.detach(), twin.weight.detach())


@pytest.mark.parametrize("engine", ["replay"])
def test_loss_fn_on_tensors_is_the_same_in_every_engine(engine: Any) -> None:
    def history(engine: Any) -> list[float]:
        torch.manual_seed(0)
        x = torch.randn(N, D, generator=torch.Generator().manual_seed(1)).double()
        model = nn.Sequential(nn.Linear(D, 6), nn.ReLU(), nn.Linear(6, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        rows = x, x[:, :1]
        stopping = runs.FoldStopping(model, optimizer, F.mse_loss, rows, 3, engine=engine)
        for _ in range(6):
            for index in torch.arange(N).split(9):
                F.mse_loss(model(x[index]), x[index, :1]).backward()
                optimizer.step()
                optimizer.zero_grad()
                stopping.step()
        return [float(stopping.backend.held_out().mean()), stopping.estimate > 0]

    assert history(engine) == pytest.approx(history("auto"), rel=1e-9)


def test_checks_thin_out_and_take_a_small_share() -> None:
    calls = {"checked": 0, "trained": 0}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls["trained" if torch.is_grad_enabled() else "checked"] += len(batch[0])
        return mse(model, batch)

    x = torch.randn(3000, D)
    model = nn.Linear(D, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [x, x[:, :1]]
    stopping = runs.ShadowStopping(
        model, optimizer, data=data, batch_loss=loss, patience=None, groups=torch.arange(3000) // 2
    )
    steps = 0
    for _ in range(40):
        for index in torch.randperm(3000).split(60):
            loss(model, [part[index] for part in data]).backward()
            optimizer.step()
            optimizer.zero_grad()
            stopping.step(indices=index)
            steps += 1
    assert steps == 2000
    assert 20 <= len(stopping.history) <= 40
    assert calls["checked"] < 0.05 * 3 * calls["trained"]
    label = stopping.fold_of_row.view(-1, 2)
    assert torch.equal(label[:, 0], label[:, 1])
    assert int((label == 0).sum()) == 600


def test_the_view_without_augmentation_is_evaluated() -> None:
    class View(Dataset[Any]):
        def __init__(self, value: float) -> None:
            self.value = value

        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> Any:
            return torch.full((D,), self.value), torch.tensor([float(i)])

    seen: set[tuple[bool, float]] = set()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.add((torch.is_grad_enabled(), float(batch[0][0, 0])))
        return mse(model, batch)

    def per_sample(model: nn.Module, batch: Any) -> Tensor:
        seen.add((torch.is_grad_enabled(), float(batch[0][0, 0])))
        return (model(batch[0]) - batch[1]).square()[:, 0]

    model = nn.Linear(D, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(View(2.0), batch_size=5)
    options: dict[str, Any] = {"data": loader, "batch_loss": loss, "eval_data": View(1.0)}
    stopping = runs.FoldStopping(model, optimizer, eval_loss=per_sample, **options)
    for batch in loader:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        stopping.step()
    assert {value for grad, value in seen if grad} == {2.0}
    assert (False, 1.0) in seen
    assert len(stopping.backend.held_out()) == N
    rows: Any = list(zip(torch.ones(3, D), torch.ones(3, 1), strict=True))
    few: DataLoader[Any] = DataLoader(rows, batch_size=2)
    stopping.close()
    with pytest.raises(heldin.HeldinError, match="eval_data must show the same rows"):
        runs.FoldStopping(model, optimizer, data=loader, batch_loss=loss, eval_data=few)


def test_sums_are_divided_by_their_samples() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum")

    x = torch.randn(500, D, dtype=torch.float64)
    found = []
    for own in (loss, mse):
        torch.manual_seed(0)
        model = nn.Linear(D, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        stopping = runs.FoldStopping(model, optimizer, data=[x, x[:, :1]], batch_loss=own)
        found.append(stopping.estimate)
    assert found[0] == pytest.approx(found[1])
    with torch.no_grad():
        assert found[1] == pytest.approx(float(F.mse_loss(model(x), x[:, :1])))


def test_rows_are_read_by_their_numbers() -> None:
    source = RowSource({"x": torch.arange(4.0), "y": torch.arange(4)}, seed=0)
    batch = source.read(torch.tensor([3, 1]))
    assert {name: part.tolist() for name, part in batch.items()} == {"x": [3.0, 1.0], "y": [3, 1]}
    columns = single_items({"x": torch.arange(2)})
    assert [joined([row]) for row in columns] == [{"x": torch.tensor([i])} for i in range(2)]
    assert joined(columns)["x"].tolist() == [0, 1]
    assert joined(["a", "b"]) == ["a", "b"]
    store = ItemStore()
    store.add({3: "three", 5: "five"})
    assert store[5] == "five"
    assert 4 not in store


def test_rows_of_nested_datasets_and_samplers() -> None:
    loaders: list[Any] = [DataLoader(range(n)) for n in (9, 9, 8)]  # type: ignore[arg-type]
    assert has_same_rows(loaders[0], loaders[1])
    assert not has_same_rows(loaders[0], loaders[2])
    dataset = TensorDataset(torch.arange(4))
    assert repeated_rows(Subset(dataset, [0, 0, 1])) == 2
    assert repeated_rows(ConcatDataset([dataset, dataset])) == 8
    loader = DataLoader(dataset, sampler=SubsetRandomSampler([0, 2]))
    assert undrawn_rows(loader, 4).tolist() == [False, True, False, True]
