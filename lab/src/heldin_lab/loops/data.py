"""Loops whose rows change, repeat, overlap or are drawn unevenly."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from .job import Job, loop, mlp, plain, rows

KIND = "data"


class Noisy(Dataset[Any]):
    """Rows with noise from a generator that the dataset keeps."""

    def __init__(self, generator: Any) -> None:
        self.x, self.y = rows()
        self.generator = generator

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if isinstance(self.generator, torch.Generator):
            noise = torch.randn(6, generator=self.generator)
        elif isinstance(self.generator, random.Random):
            noise = torch.tensor([self.generator.gauss(0, 1) for _ in range(6)])
        else:
            noise = torch.from_numpy(self.generator.normal(size=6))
        return self.x[i] + 0.1 * noise, self.y[i]


def _noisy(generator: Any) -> Job:
    loader = DataLoader(Noisy(generator), 12, shuffle=True)
    return plain(mlp(), loader, arguments={"eval_data": TensorDataset(*rows())})


@loop(KIND)
def generator_of_numpy() -> Job:
    """The dataset augments with a NumPy generator of its own (albumentations, MONAI)."""
    return _noisy(np.random.default_rng(0))


@loop(KIND)
def random_state_of_numpy() -> Job:
    """The dataset augments with a NumPy RandomState of its own (MONAI)."""
    return _noisy(np.random.RandomState(0))


@loop(KIND)
def generator_of_python() -> Job:
    """The dataset augments with a `random.Random` of its own."""
    return _noisy(random.Random(0))  # noqa: S311


@loop(KIND)
def generator_of_torch() -> Job:
    """The dataset augments with a `torch.Generator` of its own."""
    return _noisy(torch.Generator().manual_seed(0))


@loop(KIND)
def augmented_without_eval_data() -> Job:
    """The dataset augments with a generator of its own, and no eval_data is given."""
    loader = DataLoader(Noisy(np.random.default_rng(0)), 12, shuffle=True)
    return plain(mlp(), loader, compares="weights")


class Globally(Noisy):
    """Rows with noise from the global generators."""

    def __init__(self) -> None:
        super().__init__(None)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(6) + random.gauss(0, 1) + np.random.normal()
        return self.x[i] + 0.1 * noise, self.y[i]


@loop(KIND)
def global_generators() -> Job:
    """The dataset augments with the global generators of torch, Python and NumPy."""
    loader = DataLoader(Globally(), 12, shuffle=True)
    return plain(mlp(), loader, arguments={"eval_data": TensorDataset(*rows())})


class ByEpoch(Dataset[Any]):
    """Rows that change with the epoch."""

    def __init__(self) -> None:
        self.x, self.y = rows()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] * (1 + 0.3 * self.epoch), self.y[i]


@loop(KIND)
def dataset_changes_with_the_epoch() -> Job:
    """The dataset has a `set_epoch` that changes its rows."""
    data = ByEpoch()
    return plain(mlp(), DataLoader(data, 12, shuffle=True), begin_epoch=data.set_epoch)


@loop(KIND)
def sampler_with_zero_weights() -> Job:
    """A WeightedRandomSampler never draws some rows: these are not held out."""
    weights = torch.ones(48)
    weights[:8] = 0
    sampler = WeightedRandomSampler(weights.tolist(), 48)
    loader = DataLoader(TensorDataset(*rows()), 12, sampler=sampler)
    return plain(mlp(), loader, undrawn=range(8))


@loop(KIND)
def sampler_of_a_subset() -> Job:
    """A SubsetRandomSampler draws some rows of a dataset that holds test rows, too."""
    sampler = SubsetRandomSampler(range(8, 48))
    loader = DataLoader(TensorDataset(*rows()), 12, sampler=sampler)
    return plain(mlp(), loader, undrawn=range(8))


@loop(KIND)
def sampler_of_a_subset_with_loss_fn() -> Job:
    """A SubsetRandomSampler, and loss_fn."""
    sampler = SubsetRandomSampler(range(8, 48))
    loader = DataLoader(TensorDataset(*rows()), 12, sampler=sampler)
    return plain(mlp(), loader, loss_fn=nn.MSELoss(), undrawn=range(8))


class Plain(Dataset[Any]):
    """Rows that are not in tensors, with coin flips as targets."""

    def __init__(self, n: int = 24, order: Any = None) -> None:
        self.x, _ = rows(n)
        generator = torch.Generator().manual_seed(3)
        self.y = torch.randint(2, (n, 1), generator=generator).double()
        self.order = range(n) if order is None else order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[self.order[i]], self.y[self.order[i]]


def _bce(model: nn.Module, batch: Any) -> Tensor:
    return binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def _coin_flips(data: Any, **others: Any) -> Job:
    model = mlp(6, 1, 32)
    loader = others.pop("loader", None) or DataLoader(data, 12, shuffle=True)
    return plain(
        model,
        loader,
        _bce,
        optimizer=torch.optim.Adam(model.parameters(), 0.03),
        coin_flips=True,
        epochs=10,
        **others,
    )


@loop(KIND)
def coin_flips() -> Job:
    """Targets are coin flips: no honest estimate is below 0.693."""
    return _coin_flips(Plain(48))


@loop(KIND, "warned", "refused")
def repeated_rows_in_a_subset() -> Job:
    """A Subset repeats rows (oversampling)."""
    return _coin_flips(Subset(Plain(), [i % 24 for i in range(72)]), independent=False)


@loop(KIND)
def repeated_rows_with_groups() -> Job:
    """A Subset repeats rows, and groups= says so."""
    data = Subset(Plain(), [i % 24 for i in range(72)])
    return _coin_flips(data, arguments={"groups": [i % 24 for i in range(72)]})


@loop(KIND, "warned", "refused")
def repeated_rows_in_a_concatenation() -> Job:
    """A ConcatDataset has a dataset twice."""
    data = Plain()
    return _coin_flips(ConcatDataset([data, data]), independent=False)


@loop(KIND, "warned", "refused")
def repeated_rows_in_a_dataset() -> Job:
    """A dataset of its own kind shows each row three times."""
    return _coin_flips(Plain(24, [i % 24 for i in range(72)]), independent=False)


@loop(KIND, "refused")
def eval_data_in_another_order() -> Job:
    """eval_data has the same rows in another order."""
    order = list(reversed(range(48)))
    return _coin_flips(Plain(48), arguments={"eval_data": Plain(48, order)}, independent=False)


class Windows(Dataset[Any]):
    """Windows of a series that overlap by all but one value."""

    def __init__(self, step: int = 1) -> None:
        generator = torch.Generator().manual_seed(9)
        self.series = torch.randn(80, generator=generator).cumsum(0)
        self.step = step

    def __len__(self) -> int:
        return (len(self.series) - 13) // self.step

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = i * self.step
        return self.series[start : start + 12], self.series[start + 1 : start + 13]


@loop(KIND, "warned", "refused")
def overlapping_windows() -> Job:
    """Windows of a series overlap by all but one value."""
    return plain(mlp(12, 12), DataLoader(Windows(), 12, shuffle=True), independent=False)


@loop(KIND)
def separate_windows() -> Job:
    """Windows of a series that do not overlap."""
    model = mlp(12, 12)
    return plain(
        model,
        DataLoader(Windows(13), 3, shuffle=True),
        optimizer=torch.optim.SGD(model.parameters(), 0.01),
    )


class Pairs(Dataset[Any]):
    """Siamese pairs: the partner of a row is drawn when it is read."""

    def __init__(self) -> None:
        self.x, _ = rows()
        self.kind = torch.arange(48) % 4

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        j = random.randrange(len(self.x))  # noqa: S311
        same = (self.kind[i] == self.kind[j]).double()
        return torch.cat([self.x[i], self.x[j]]), same[None]


@loop(KIND, "warned", "refused")
def siamese_pairs() -> Job:
    """The partner of a row is drawn from all rows in `__getitem__`."""
    loader = DataLoader(Pairs(), 12, shuffle=True)
    return plain(mlp(12), loader, _bce, compares="weights", independent=False)


@loop(KIND, "refused")
def dataset_grows() -> Job:
    """The dataset gets new rows on the way."""
    data = list(zip(*rows(), strict=True))
    job = plain(mlp(), DataLoader(data, 12))  # type: ignore[arg-type]

    def begin(epoch: int) -> None:
        if epoch == 1:
            data.extend(data[:12])

    job.begin_epoch = begin
    return job


def _with_bad_row(loss_fn: Any) -> Job:
    x, y = rows()
    x[5, 2] = float("nan")
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = mse_loss(model(batch[0]), batch[1])
        if not torch.isfinite(loss):
            return
        loss.backward()
        optimizer.step()

    loader = DataLoader(TensorDataset(x, y), 12, shuffle=True)
    job = plain(model, loader, loss_fn=loss_fn, optimizer=optimizer, step=step, skips=True, bad=[5])
    return job


@loop(KIND)
def one_row_is_nan() -> Job:
    """One row is nan; the loop skips its batches."""
    return _with_bad_row(None)


@loop(KIND)
def one_row_is_nan_with_loss_fn() -> Job:
    """One row is nan, with loss_fn."""
    return _with_bad_row(nn.MSELoss())


@loop(KIND)
def the_last_batch_is_dropped() -> Job:
    """drop_last: the last rows of an order are not drawn in that epoch."""
    loader = DataLoader(TensorDataset(*rows(50)), 12, shuffle=True, drop_last=True)
    return plain(mlp(), loader)


@loop(KIND, "exact", "warned")
def evaluates_the_training_loader() -> Job:
    """The loop evaluates the model on its training loader after every epoch (Ignite's example)."""
    job = plain(mlp())

    def end() -> None:
        job.model.eval()
        with torch.no_grad():
            for x, y in job.loader:
                mse_loss(job.model(x), y)
        job.model.train()

    job.end_epoch = end
    return job


@loop(KIND)
def loop_left_inside_an_epoch() -> Job:
    """The loop leaves some batches of its loader unused: it breaks off its epochs."""
    job = plain(mlp(), DataLoader(TensorDataset(*rows()), 6, shuffle=True))
    inner, count = job.loader, 3
    job.data = inner
    job.loader = _Broken(inner, count)
    return job


class _Broken:
    """The first batches of a loader."""

    def __init__(self, inner: DataLoader[Any], count: int) -> None:
        self.inner, self.count = inner, count
        self.dataset, self.batch_size = inner.dataset, inner.batch_size
        self.collate_fn = inner.collate_fn
        self.handed_out: list[list[int]] = []
        noting = self.handed_out
        sampler = inner.batch_sampler

        class Noting:
            def __iter__(self) -> Any:
                for numbers in sampler:  # type: ignore[union-attr]
                    noting.append(list(numbers))
                    yield numbers

            def __len__(self) -> int:
                return len(sampler)  # type: ignore[arg-type]

        vars(inner)["batch_sampler"] = Noting()

    def __iter__(self) -> Any:
        first = len(self.handed_out)
        for number, batch in enumerate(self.inner):
            if number == self.count:
                del self.handed_out[first + self.count :]
                break
            yield batch

    def __len__(self) -> int:
        return self.count
