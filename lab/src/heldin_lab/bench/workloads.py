"""The training steps that are timed: model, batch and loss of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SMALL", "WORKLOADS", "Workload", "encoder", "mlp", "texts_batches"]


@dataclass(frozen=True)
class Workload:
    """A model that maps a batch to class scores, to be trained with cross-entropy.

    Attributes:
        make: the model and a batch.
        targets: largest ratios asked for, by method without "heldin" (time, then memory).
        repeats: rounds of the timing in each process.
        inner: steps per timing; more for tiny ones.
        batches: if it is not None, a timing is a whole run of `inner` steps with a new model and
            these batches in turn, learning what the graphs look like included.
    """

    title: str
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]]
    targets: dict[str, float]
    memory: dict[str, float]
    repeats: int = 9
    inner: int = 1
    batches: Callable[[], list[tuple[Tensor, Tensor]]] | None = None


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy; the scores of sequences are flattened with their targets."""
    scores = model(x)
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), y.reshape(-1))


def mlp(
    sizes: tuple[int, ...] = (784, 2500, 2000, 1500, 1000, 500, 10), batch: int = 128
) -> tuple[nn.Module, Tensor, Tensor]:
    """The paper's multi-layer perceptron, with 11,972,510 parameters."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    return model, torch.randn(batch, sizes[0]), torch.randint(0, sizes[-1], (batch,))


def cnn(width: int = 32, batch: int = 64) -> tuple[nn.Module, Tensor, Tensor]:
    """Three convolutions and two linear layers on images of 32 x 32."""
    stages: list[nn.Module] = []
    for a, b in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        stages += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    wide = 4 * width
    head = [nn.Flatten(), nn.Linear(16 * wide, wide), nn.ReLU(), nn.Linear(wide, 10)]
    labels = torch.randint(0, 10, (batch,))
    return nn.Sequential(*stages, *head), torch.randn(batch, 3, 32, 32), labels


class _Encoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(x).mean(1))
        return scores


def encoder(
    width: int = 256, depth: int = 4, length: int = 128, batch: int = 16
) -> tuple[nn.Module, Tensor, Tensor]:
    """A transformer encoder over vectors, with a class per sequence."""
    return (
        _Encoder(width, depth),
        torch.randn(batch, length, width),
        torch.randint(0, 10, (batch,)),
    )


class _Decoder(nn.Module):
    """GPT-2's shape in plain PyTorch: learnt positions, norm first, causal, tied output."""

    def __init__(self, words: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        # As GPT-2 begins. With PyTorch's own, wider start the tied output is so sure of itself that
        # its gradients are zeros and, more with every step, denormal numbers: products get slow.
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", torch.triu(torch.full((length, length), -torch.inf), 1))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        h = self.layers(h, mask=self.mask, is_causal=True)
        return F.linear(self.norm(h), self.words.weight)


def gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    """GPT-2 small: 124 million parameters."""
    tokens = torch.randint(0, 50257, (4, 129))
    return _Decoder(50257, 768, 12, 12, 128), tokens[:, :-1], tokens[:, 1:]


def logistic() -> tuple[nn.Module, Tensor, Tensor]:
    """The paper's logistic regression: nothing but overhead."""
    return nn.Linear(496, 2), torch.randn(200, 496), torch.randint(0, 2, (200,))


class _Texts(nn.Module):
    """BERT-tiny's shape: two layers of 128, learnt positions, padded texts, a class for each."""

    def __init__(self, words: int = 30522, width: int = 128, length: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 4 * width, dropout=0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1]))
        h = self.norm(self.words(tokens) + places)
        scores: Tensor = self.head(self.encoder(h, src_key_padding_mask=tokens == 0)[:, 0])
        return scores


def texts() -> tuple[nn.Module, Tensor, Tensor]:
    """BERT-tiny and one batch."""
    return _Texts(), *texts_batches(1)[0]


def texts_batches(count: int = 200) -> list[tuple[Tensor, Tensor]]:
    """Batches of 16 texts, each padded to a length of its own between 20 and 128."""
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        length = int(torch.randint(20, 129, (), generator=random))
        tokens = torch.randint(1, 30522, (16, length), generator=random)
        shortest = torch.randint(length // 2, length + 1, (16, 1), generator=random)
        shortest[0] = length
        tokens[torch.arange(length) >= shortest] = 0
        found.append((tokens, torch.randint(0, 2, (16,), generator=random)))
    return found


# The same kinds of layers, for whatever a first use brings with it.
SMALL: list[Callable[[], tuple[nn.Module, Tensor, Tensor]]] = [
    lambda: mlp((6, 5, 4), batch=4),
    lambda: cnn(2, batch=4),
    lambda: encoder(8, 1, 4, batch=4),
]

WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(
        "the paper's MLP, 12.0 M parameters, batch 128",
        mlp,
        {"sampled": 1.05, "exact": 1.5},
        {"sampled": 1.02, "exact": 2.2},
        repeats=21,
    ),
    "cnn": Workload(
        "CNN (3 conv + 2 linear, 32x32x3), batch 64",
        cnn,
        {"sampled": 1.06, "exact": 1.8},
        {"sampled": 1.02},
        repeats=21,
    ),
    "encoder": Workload(
        "transformer encoder, 4 layers, d = 256, T = 128, batch 16",
        encoder,
        {"sampled": 1.03, "exact": 1.5},
        {"sampled": 1.02},
        repeats=9,
    ),
    "gpt2": Workload(
        "GPT-2 small shape (d = 768, 12 layers, T = 128), batch 4",
        gpt2,
        {"sampled": 1.02},
        {},
        repeats=5,
    ),
    "logistic": Workload(
        "logistic regression, 496 features, batch 200",
        logistic,
        {"sampled": 2.5, "every=10": 1.2, "exact": 2.5},
        {},
        repeats=100,
        inner=20,
    ),
    "texts": Workload(
        "BERT-tiny, batch 16, a run of 200 steps, lengths 20 to 128",
        texts,
        {"sampled": 1.15},
        {},
        repeats=3,
        inner=200,
        batches=texts_batches,
    ),
}
