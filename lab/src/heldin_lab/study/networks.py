"""Networks on images and texts, from scratch and fine-tuned: what `Table` is for tables.

Nothing is downloaded. Images are MNIST, where the data folder has it, else scikit-learn's digits;
texts are the help on Python's syntax that comes with every Python; fine-tuning starts from a
network that was trained on MNIST and goes on with scikit-learn's digits, which other people wrote
and another scanner read.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from heldin.errors import HeldinError
from heldin.state.files import replacing
from heldin_lab.reproduce import data as _paper

from .data import Problem, other_classes
from .spec import NOISE, Spec, Ways, factor

__all__ = ["KINDS", "CausalBlock", "Kind", "NetworkTask", "network_task"]

Kind = Literal["images", "texts", "tuning"]
KINDS: dict[str, Ways] = {
    "images": Ways(("cnn", "cnn-augmented"), ("sgd", "adam"), NOISE, (100, 300, 1000), 600),
    "texts": Ways(("transformer",), ("adam",), (0.0, 0.1), (100, 300, 1000), 300),
    "tuning": Ways(("all-weights", "last-layer", "lora"), ("adam",), NOISE, (50, 150, 500), 600),
}
SIDE = 14  # pixels of an image
POOL = 50_000  # images of MNIST to train on; the others are for tests
TEST = 1000  # rows of a test set; of texts half as many
LENGTH = 16  # characters of a text
WIDTH, HEADS, RANK = 32, 4, 4
PRETRAINED = "pretrained.pt"


@dataclass(frozen=True, eq=False)
class NetworkTask:
    """A dataset and the networks that are trained on it.

    Attributes:
        name: of the dataset.
        rows: training and test rows that it has.
        kind: which of `KINDS`.
        data: folder of data sets.
        start: file with the weights that fine-tuning starts from.
    """

    name: str
    rows: int
    kind: Kind
    data: str | Path | None = None
    start: Path | None = None

    def problem(self, spec: Spec) -> Problem:
        """Training and test rows of a run."""
        generator = np.random.default_rng([spec.seed, zlib.crc32(self.name.encode())])
        if self.kind == "texts":
            return _texts(spec, generator)
        if self.name == "mnist":
            x, y = _mnist(self.data)
            train = generator.permutation(POOL)[: spec.n]
            test = POOL + generator.permutation(len(y) - POOL)[:TEST]
        else:
            x, y = digits()
            order = generator.permutation(len(y))
            train, test = order[: spec.n], order[spec.n :][:TEST]
        index = np.concatenate([train, test])
        x, clean = x[index], y[index]
        noisy = torch.tensor(other_classes(clean.numpy(), spec.noise, 10, generator))
        n = spec.n
        return Problem(x[:n], noisy[:n], x[n:], noisy[n:], clean[n:], F.cross_entropy, 10)

    def model(self, spec: Spec, problem: Problem) -> nn.Module:
        """The network at the start of a run."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            if self.kind == "texts":
                return _Transformer(problem.outputs)
            if self.kind == "images":
                return _with_batch_norm()
            net = plain_network()
            assert self.start is not None
            net.load_state_dict(torch.load(self.start, weights_only=True))
            return _to_be_tuned(net, spec.model)

    def optimizer(self, spec: Spec, model: nn.Module) -> tuple[Optimizer, float]:
        """With a rate that differs from run to run."""
        params = [p for p in model.parameters() if p.requires_grad]
        if spec.optimizer == "sgd":
            rate = 0.05 * factor(spec)
            return torch.optim.SGD(params, lr=rate, momentum=0.9), rate
        whole_image = spec.model in ("cnn", "cnn-augmented", "all-weights")
        rate = (0.003 if whole_image else 0.01) * factor(spec)
        return torch.optim.Adam(params, lr=rate), rate

    def shown(self, spec: Spec, x: Tensor, generator: torch.Generator) -> Tensor:
        """A minibatch as the network sees it: moved at random, if the run has augmentation."""
        return moved(x, generator) if spec.model.endswith("augmented") else x


def network_task(kind: Kind, data: str | Path | None, out: Path) -> NetworkTask:
    """The task of a kind; fine-tuning trains its start once and keeps it in the folder `out`."""
    if kind == "texts":
        return NetworkTask("python-help", len(_corpus()[0]) // (LENGTH + 1), kind)
    found = (_paper.folder(data) / "mnist").is_dir()
    if kind == "images" and found:
        return NetworkTask("mnist", 60_000, kind, data)
    if kind == "images":
        return NetworkTask("digits", len(digits()[1]), kind)
    if not found:
        raise HeldinError(
            "study: fine-tuning starts from a network trained on MNIST, which the data folder does "
            "not have; `heldin-lab data fetch mnist`, or --data DIR with DIR/mnist"
        )
    start = out / PRETRAINED
    if not start.exists():
        with replacing(start) as part:
            torch.save(_pretrained(data), part)
    return NetworkTask("digits-after-mnist", len(digits()[1]), kind, data, start)


# -- data


@cache
def _mnist(data: str | Path | None) -> tuple[Tensor, Tensor]:
    """(60000, 1, 14, 14) images, two by two pixels in one, and labels."""
    images, labels = _paper.mnist(data)
    return F.avg_pool2d(images.view(-1, 1, 28, 28).float() / 255, 2), labels


@cache
def digits() -> tuple[Tensor, Tensor]:
    """(1797, 1, 14, 14) images of scikit-learn, enlarged, and labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return F.interpolate(x, (SIDE, SIDE), mode="bilinear"), torch.tensor(found.target)


@cache
def _corpus() -> tuple[Tensor, int]:
    """Python's help on its syntax as numbers of characters, and how many characters there are."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    known = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


def _texts(spec: Spec, generator: np.random.Generator) -> Problem:
    """Predict the next character of pieces of text; noise: that share of characters is another."""
    text, many = _corpus()
    pieces = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    clean = pieces[generator.permutation(len(pieces))[: spec.n + TEST // 2]]
    noisy = torch.tensor(other_classes(clean.numpy(), spec.noise, many, generator))
    x, y, truth, n = noisy[:, :-1], noisy[:, 1:], clean[:, 1:], spec.n
    return Problem(x[:n], y[:n], x[n:], y[n:], truth[n:], F.cross_entropy, many)


def moved(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to one pixel in each direction.

    >>> x = torch.arange(9.0).view(1, 1, 3, 3)
    >>> moved(x, torch.Generator().manual_seed(1))[0, 0].shape
    torch.Size([3, 3])
    """
    height, width = x.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1))
    by = torch.randint(3, (2, len(x)), generator=generator)
    rows = by[0, :, None, None] + torch.arange(height)[None, :, None]
    columns = by[1, :, None, None] + torch.arange(width)[None, None, :]
    return padded[torch.arange(len(x))[:, None, None], 0, rows, columns].unsqueeze(1)


# -- networks


def _with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def plain_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


class _LowRank(nn.Module):
    """A linear layer that stays, and a product of two thin matrices that is learnt (LoRA)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        change = F.linear(F.linear(x, self.down), self.up)
        result: Tensor = self.layer(x) + change
        return result


def _to_be_tuned(net: nn.Sequential, way: str) -> nn.Module:
    if way == "all-weights":
        return net
    net.requires_grad_(False)
    if way == "last-layer":
        net[-1].requires_grad_(True)
        return net
    for i, layer in enumerate(net):
        if isinstance(layer, nn.Linear):
            net[i] = _LowRank(layer)
    return net


def _pretrained(data: str | Path | None) -> dict[str, Tensor]:
    """A network after two passes over 50,000 digits of MNIST."""
    x, y = _mnist(data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = plain_network()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
        for _ in range(2):
            for index in torch.randperm(POOL).split(128):
                optimizer.zero_grad()
                F.cross_entropy(net(x[index]), y[index]).backward()
                optimizer.step()
    return net.state_dict()


class CausalBlock(nn.Module):
    """Attention to what came before, and two layers; dropout on both."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states of all places, (rows, length, WIDTH)."""
        rows, length, _ = x.shape
        parts = self.mix(self.before(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)  # F.sdpa has no vmap rule
        scores = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).masked_fill(later, -torch.inf)
        seen = scores.softmax(-1) @ v
        x = x + self.drop(self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH)))
        result: Tensor = x + self.drop(self.narrow(F.gelu(self.wide(self.between(x)))))
        return result


class _Transformer(nn.Module):
    """Two blocks on characters; (rows, characters, places), as `F.cross_entropy` takes them."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) / math.sqrt(WIDTH))
        self.blocks = nn.Sequential(CausalBlock(), CausalBlock())
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.embed(x) + self.place))
        return scores.transpose(1, 2)
