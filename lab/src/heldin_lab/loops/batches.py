"""Loops whose collate functions, batches or samplers are not the plain ones."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from .job import Job, Randperm, class_rows, loop, mlp, plain, rows

KIND = "rows between sampler and model"


class Sequences(Dataset[Any]):
    """Rows of different lengths, with a target each."""

    def __init__(self, n: int = 48, coin_flips: bool = False) -> None:
        generator = torch.Generator().manual_seed(2)
        lengths = torch.randint(2, 9, (n,), generator=generator).tolist()
        self.rows = [torch.randn(length, 3, generator=generator) for length in lengths]
        self.targets = [row.mean(0)[:1] for row in self.rows]
        if coin_flips:
            self.targets = [torch.randint(2, (), generator=generator) for _ in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.rows[i], self.targets[i]


class MeanOfSequence(nn.Module):
    """The mean over a padded sequence, of a small network."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, outputs)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        """Compute the outputs."""
        mask = (torch.arange(x.shape[1]) < lengths[:, None]).to(x)[..., None]
        hidden = (self.inner(x).tanh() * mask).sum(1) / lengths[:, None]
        return self.outer(hidden)


def _sorted(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    items = sorted(items, key=lambda item: -len(item[0]))
    x, y = zip(*items, strict=True)
    lengths = torch.tensor([len(row) for row in x])
    return pad_sequence(list(x), batch_first=True), lengths, torch.stack(y)


@loop(KIND)
def collate_sorts_by_length() -> Job:
    """The collate function sorts by length and pads."""
    loader = DataLoader(Sequences(), 12, shuffle=True, collate_fn=_sorted)
    return plain(MeanOfSequence(), loader, lambda m, b: mse_loss(m(b[0], b[1]), b[2]))


@loop(KIND)
def collate_sorts_coin_flips() -> Job:
    """A sorting collate function; targets are coin flips, so that a leak shows."""
    loader = DataLoader(Sequences(coin_flips=True), 12, shuffle=True, collate_fn=_sorted)
    model = MeanOfSequence(2)
    return plain(
        model,
        loader,
        lambda m, b: cross_entropy(m(b[0], b[1]), b[2]),
        optimizer=torch.optim.Adam(model.parameters(), 0.03),
        coin_flips=True,
        epochs=8,
    )


def _mixup(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    share, order = torch.rand(()), torch.randperm(len(x))
    return share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]


@loop(KIND)
def mixup_in_collate() -> Job:
    """The collate function mixes rows (MixUp); eval_data shows them unmixed."""
    dataset = TensorDataset(*rows())
    loader = DataLoader(dataset, 12, shuffle=True, collate_fn=_mixup)
    return plain(mlp(), loader, arguments={"eval_data": dataset})


@loop(KIND)
def mixup_coin_flips() -> Job:
    """MixUp in the collate function; targets are coin flips."""
    x, _ = rows()
    y = torch.randint(2, (len(x),), generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(x, nn.functional.one_hot(y, 2).double())
    loader = DataLoader(dataset, 12, shuffle=True, collate_fn=_mixup)
    model = mlp(6, 2, 32)
    return plain(
        model,
        loader,
        lambda m, b: cross_entropy(m(b[0]), b[1]),
        optimizer=torch.optim.Adam(model.parameters(), 0.03),
        arguments={"eval_data": dataset},
        coin_flips=True,
        epochs=8,
    )


def _cutmix(items: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, y = default_collate(items)
    order = torch.randperm(len(x))
    at = int(torch.randint(1, 5, ()))
    x = x.clone()
    x[:, :, :at] = x[order][:, :, :at]
    share = at / x.shape[2]
    return {"x": x, "y": (1 - share) * y + share * y[order]}


def _pictures(items: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, y = default_collate(items)
    return {"x": x, "y": y}


@loop(KIND)
def cutmix_in_collate() -> Job:
    """The collate function pastes parts of images (CutMix); the model is convolutional."""
    x, y = class_rows(features=36)
    dataset = TensorDataset(x.view(-1, 1, 6, 6), nn.functional.one_hot(y, 3).double())
    loader = DataLoader(dataset, 12, shuffle=True, collate_fn=_cutmix)
    view = DataLoader(dataset, 12, collate_fn=_pictures)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return plain(
        model,
        loader,
        lambda m, b: cross_entropy(m(b["x"]), b["y"]),
        arguments={"eval_data": view},
    )


class Tokens(Dataset[Tensor]):
    """Rows of tokens of different lengths."""

    def __init__(self, n: int = 48) -> None:
        generator = torch.Generator().manual_seed(4)
        lengths = torch.randint(3, 9, (n,), generator=generator).tolist()
        self.rows = [torch.randint(1, 7, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]


class Bigram(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Any:
        """Compute the outputs."""
        return self.head(self.embedding(tokens).tanh())


def _packed(items: list[Tensor]) -> dict[str, Tensor]:
    targets = [torch.cat([row[1:], torch.tensor([-100])]) for row in items]
    return {"input_ids": torch.cat(items)[None], "labels": torch.cat(targets)[None]}


@loop(KIND)
def packing() -> Job:
    """The collate function packs all sequences of a batch into one row, as for language models."""
    loader = DataLoader(Tokens(), 12, shuffle=True, collate_fn=_packed)

    def batch_loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    return plain(Bigram(), loader, batch_loss, evaluates="blocks")


class MixedRows(Dataset[Any]):
    """Rows that are mixed with a random other row when they are read."""

    def __init__(self) -> None:
        self.x, _ = rows()
        generator = torch.Generator().manual_seed(3)
        self.y = torch.randint(2, (len(self.x), 1), generator=generator).double()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        share, j = torch.rand(()), int(torch.randint(len(self.x), ()))
        mixed = share * self.x[i] + (1 - share) * self.x[j]
        return mixed, share * self.y[i] + (1 - share) * self.y[j]


@loop(KIND, "refused", "warned")
def mixing_in_getitem() -> Job:
    """A row is mixed with another one in `__getitem__`: rows have no numbers."""
    loader = DataLoader(MixedRows(), 12, shuffle=True)
    model = mlp(6, 1, 32)
    loss = nn.functional.binary_cross_entropy_with_logits
    return plain(
        model,
        loader,
        lambda m, b: loss(m(b[0]), b[1]),
        optimizer=torch.optim.Adam(model.parameters(), 0.03),
        compares="weights",
        independent=False,
    )


@loop(KIND)
def dictionary() -> Job:
    """Batches are dictionaries; the loop takes the targets out."""
    x, y = rows()
    data: Any = [
        {"x": a, "labels": b, "name": f"row {i}"} for i, (a, b) in enumerate(zip(x, y, strict=True))
    ]
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def batch_loss(model: Any, batch: Any) -> Any:
        return mse_loss(model(batch["x"]), batch["labels"])

    def step(batch: Any) -> None:
        labels = batch.pop("labels")
        loss = mse_loss(model(batch["x"]), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    loader = DataLoader(data, 12, shuffle=True)
    return plain(model, loader, batch_loss, optimizer=optimizer, step=step)


@dataclass
class Graphs:
    """A batch with a field, an `InitVar`, and something computed from it (chemprop's style)."""

    rows: InitVar[list[Any]]
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)

    def __post_init__(self, rows: list[Any]) -> None:
        self.x = torch.stack([row[0] for row in rows])
        self.y = torch.stack([row[1] for row in rows])


@loop(KIND)
def dataclass_with_initvar() -> Job:
    """Batches are dataclasses with an `InitVar`."""
    loader = DataLoader(TensorDataset(*rows()), 12, shuffle=True, collate_fn=Graphs)
    return plain(mlp(), loader, lambda m, b: mse_loss(m(b.x), b.y))


Pair = namedtuple("Pair", "x y")


@loop(KIND)
def named_tuple() -> Job:
    """Rows and batches are named tuples."""
    data: Any = [Pair(x, y) for x, y in zip(*rows(), strict=True)]
    loader = DataLoader(data, 12, shuffle=True)
    return plain(mlp(), loader, lambda m, b: mse_loss(m(b.x), b.y))


class Held:
    """A batch that is an object of some library."""

    def __init__(self, items: list[Any]) -> None:
        self.inputs = torch.stack([item[0] for item in items])
        self.targets = torch.stack([item[1] for item in items])

    def to(self, device: Any) -> Held:
        """Move the batch."""
        self.inputs, self.targets = self.inputs.to(device), self.targets.to(device)
        return self


@loop(KIND)
def objects() -> Job:
    """Batches are objects of a class of their own."""
    loader = DataLoader(TensorDataset(*rows()), 12, shuffle=True, collate_fn=Held)
    return plain(mlp(), loader, lambda m, b: mse_loss(m(b.inputs), b.targets))


class Graph:
    """A graph, or several in one, as torch_geometric's `Data` and `Batch`."""

    def __init__(self, x: Tensor, edges: Tensor, batch: Tensor, y: Tensor) -> None:
        self.x, self.edges, self.batch, self.y = x, edges, batch, y
        self.num_graphs = len(y)


def _graphs(n: int = 48) -> Any:
    generator = torch.Generator().manual_seed(5)
    graphs = []
    for _ in range(n):
        nodes = int(torch.randint(3, 7, (), generator=generator))
        x = torch.randn(nodes, 4, generator=generator)
        edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
        graphs.append(Graph(x, edges, torch.zeros(nodes, dtype=torch.long), x.sum()[None]))
    return graphs


def _joined(graphs: list[Graph]) -> Graph:
    starts = torch.tensor([0, *(len(g.x) for g in graphs)]).cumsum(0)
    return Graph(
        torch.cat([g.x for g in graphs]),
        torch.cat([g.edges + start for g, start in zip(graphs, starts, strict=False)], 1),
        torch.cat([torch.full((len(g.x),), i) for i, g in enumerate(graphs)]),
        torch.cat([g.y for g in graphs]),
    )


class GraphNet(nn.Module):
    """One round of messages, then the sum over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, graph: Graph) -> Any:
        """Compute the outputs."""
        sent = self.message(graph.x).tanh()
        got = sent.index_add(0, graph.edges[1], sent[graph.edges[0]])
        pooled = sent.new_zeros(graph.num_graphs, 8).index_add(0, graph.batch, got)
        return self.out(pooled).squeeze(1)


@loop(KIND)
def graph_batches() -> Job:
    """Graphs are joined into one large graph, as torch_geometric does it."""
    loader = DataLoader(_graphs(), 12, shuffle=True, collate_fn=_joined)
    return plain(
        GraphNet(),
        loader,
        lambda m, b: mse_loss(m(b), b.y),
        optimizer=None,
    )


class Crops(Dataset[Any]):
    """Two crops of every row, as MONAI's `RandCropByPosNegLabeld` gives them."""

    def __init__(self) -> None:
        self.x, self.y = rows(features=9)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> list[dict[str, Tensor]]:
        return [{"x": self.x[i, at : at + 6], "y": self.y[i]} for at in (0, 3)]


def _flattened(items: list[list[dict[str, Tensor]]]) -> Any:
    return default_collate([crop for item in items for crop in item])


@loop(KIND)
def several_crops_per_row() -> Job:
    """A row gives two samples (`list_data_collate`)."""
    loader = DataLoader(Crops(), 12, shuffle=True, collate_fn=_flattened)
    return plain(mlp(), loader, lambda m, b: mse_loss(m(b["x"]), b["y"]))


@loop(KIND)
def one_row_at_a_time() -> Job:
    """Rows of different sizes with batch_size=1."""
    loader = DataLoader(Sequences(24), batch_size=1, shuffle=True)

    def batch_loss(model: Any, batch: Any) -> Any:
        x, y = batch
        return mse_loss(model(x, torch.tensor([x.shape[1]])), y)

    return plain(MeanOfSequence(), loader, batch_loss, epochs=2)


@loop(KIND)
def list_of_tensors() -> Job:
    """The dataset is a list of tensors of different lengths."""
    data: Any = Tokens(24).rows
    loader = DataLoader(data, batch_size=1, shuffle=True)

    def batch_loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return plain(Bigram(), loader, batch_loss, epochs=2)


@loop(KIND)
def tensors_by_randperm() -> Job:
    """No DataLoader: slices of tensors by `torch.randperm`, with loss_fn."""
    x, y = rows()
    return plain(mlp(), Randperm(x, y, 12), loss_fn=nn.MSELoss(), data=(x, y))


@loop(KIND)
def two_workers() -> Job:
    """A sorting collate function in two worker processes."""
    loader = DataLoader(Sequences(), 12, shuffle=True, collate_fn=_sorted, num_workers=2)
    return plain(MeanOfSequence(), loader, lambda m, b: mse_loss(m(b[0], b[1]), b[2]), epochs=2)


def _time_first(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*items, strict=True)
    return torch.stack(x, 1), torch.stack(y)


@loop(KIND)
def time_first() -> Job:
    """Sequences lie in columns, for a recurrent network."""
    x, y = rows(features=15)
    loader = DataLoader(
        TensorDataset(x.view(-1, 5, 3), y), 12, shuffle=True, collate_fn=_time_first
    )

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Any:
            """Compute the outputs."""
            return self.head(self.rnn(x)[0][-1])

    return plain(Recurrent(), loader, lambda m, b: mse_loss(m(b[0]), b[1]))


def _positive_only(items: list[tuple[Tensor, Tensor]]) -> Any:
    """Drop rows that the loop cannot use; keep one at least."""
    return default_collate([item for item in items if item[0][5] > -1] or items[:1])


@loop(KIND)
def collate_drops_rows() -> Job:
    """The collate function drops unusable rows (a filter on None, usually)."""
    x, y = rows()
    loader = DataLoader(TensorDataset(x, y), 12, shuffle=True, collate_fn=_positive_only)
    return plain(mlp(), loader, compares="weights")


class Buckets:
    """A batch sampler with rows of like lengths in a batch."""

    def __init__(self, lengths: list[int], size: int) -> None:
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        self.lists = [order[i : i + size] for i in range(0, len(order), size)]

    def __iter__(self) -> Any:
        for i in torch.randperm(len(self.lists)).tolist():
            yield self.lists[i]

    def __len__(self) -> int:
        return len(self.lists)


@loop(KIND)
def bucket_sampler() -> Job:
    """A batch sampler puts rows of like lengths into a batch."""
    data = Sequences()
    sampler = Buckets([len(row) for row in data.rows], 12)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=_sorted)
    return plain(MeanOfSequence(), loader, lambda m, b: mse_loss(m(b[0], b[1]), b[2]))


@loop(KIND)
def batch_moved_and_changed_by_the_loop() -> Job:
    """The loop normalises the batch before it calls the model; batch_loss does the same."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def batch_loss(model: Any, batch: Any) -> Any:
        x, y = batch
        return mse_loss(model((x - 0.1) / 2.0), y)

    def step(batch: Any) -> None:
        x, y = (t.clone() for t in batch)
        optimizer.zero_grad()
        mse_loss(model((x - 0.1) / 2.0), y).backward()
        optimizer.step()

    return plain(model, None, batch_loss, optimizer=optimizer, step=step)
