"""Three more kinds of network tasks for the comparison with rivals.

- faces: a public face detector (R-Net of MTCNN, weights of the package facenet-pytorch) is tuned to
  tell faces from other pictures, on real photographs that come with scikit-image.
- topics: a small transformer, trained here to continue Python's help, is tuned to tell which of
  six topics a piece of text is from, with 20 or 50 rows of each class (the form of BUS-stop).
- halves: a convolutional network predicts the lower half of a scanned digit from the upper half,
  a regression.

Nothing is downloaded while it runs: `pip install --no-deps facenet-pytorch scikit-image` brings
what "faces" needs.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from heldin.errors import HeldinError
from heldin.state.files import replacing

from .data import Problem, other_classes
from .networks import WIDTH, CausalBlock
from .spec import NOISE, Spec, Ways, factor

__all__ = ["MORE", "MoreTask", "detector", "more_task", "texts_by_topic"]

MORE: dict[str, Ways] = {
    "faces": Ways(("all-weights", "last-layer"), ("adam",), NOISE, (50, 100), 600),
    "topics": Ways(("all-weights", "last-layer"), ("adam",), (0.0, 0.2), (120, 300), 300),
    "halves": Ways(("cnn",), ("sgd", "adam"), (0.0, 0.5), (100, 300, 1000), 600),
}
TEST = 1000
LENGTH, TOPICS = 48, 6  # characters of a piece of text, and classes
STEPS, BATCH = 1000, 64  # of the training before the tuning


@dataclass(frozen=True, eq=False)
class MoreTask:
    """A dataset and its network; the interface of `NetworkTask`.

    Attributes:
        name: "faces", "topics" or "halves".
        rows: training and test rows that there are.
        start: file with the weights that tuning starts from; None: training starts from scratch.
    """

    name: str
    rows: int
    start: Path | None = None

    def problem(self, spec: Spec) -> Problem:
        """Return training and test rows of a run."""
        generator = np.random.default_rng([spec.seed, zlib.crc32(self.name.encode())])
        x, y = {"faces": _faces, "topics": _topics, "halves": _halves}[self.name]()
        index, n = generator.permutation(len(y))[: spec.n + TEST], spec.n
        x, clean = x[index], y[index]
        if self.name == "halves":
            noise = torch.tensor(generator.standard_normal(clean.shape), dtype=torch.float32)
            noisy = clean + spec.noise * noise
            return Problem(x[:n], noisy[:n], x[n:], noisy[n:], clean[n:], F.mse_loss, 32)
        classes = 2 if self.name == "faces" else TOPICS
        noisy = torch.tensor(other_classes(clean.numpy(), spec.noise, classes, generator))
        if classes > 2:
            return Problem(x[:n], noisy[:n], x[n:], noisy[n:], clean[n:], F.cross_entropy, classes)
        noisy, clean = noisy.float()[:, None], clean.float()[:, None]
        loss_fn = F.binary_cross_entropy_with_logits
        return Problem(x[:n], noisy[:n], x[n:], noisy[n:], clean[n:], loss_fn, 1)

    def model(self, spec: Spec, problem: Problem) -> nn.Module:
        """Return the network at the start of a run: a pretrained trunk with a new head."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            if self.name == "halves":
                return nn.Sequential(
                    nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(),
                    nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(),
                    nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 32),
                )  # fmt: skip
            assert self.start is not None
            trunk: nn.Module
            if self.name == "faces":
                trunk, width = detector(self.start), 128
            else:
                trunk, width = _Reader(len(_characters())), WIDTH
                trunk.load_state_dict(torch.load(self.start, weights_only=True))
            trunk.requires_grad_(spec.model == "all-weights")
            return nn.Sequential(trunk, nn.Linear(width, problem.outputs))

    def optimizer(self, spec: Spec, model: nn.Module) -> tuple[Optimizer, float]:
        """Return an optimiser with a rate that differs from run to run."""
        params = [p for p in model.parameters() if p.requires_grad]
        if spec.optimizer == "sgd":
            rate = 0.05 * factor(spec)
            return torch.optim.SGD(params, lr=rate, momentum=0.9), rate
        rate = (0.01 if spec.model == "last-layer" else 0.002) * factor(spec)
        return torch.optim.Adam(params, lr=rate), rate

    def shown(self, spec: Spec, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return a minibatch as the network sees it."""
        return x


def more_task(kind: str, out: Path) -> MoreTask:
    """Return the task of a kind; the start of "topics" is trained once, into the folder `out`."""
    if kind == "faces":
        start = _file("facenet_pytorch", "data/rnet.pt")
        return MoreTask(kind, len(_faces()[1]), start)
    if kind == "halves":
        return MoreTask(kind, len(_halves()[1]))
    start = out / "reader.pt"
    if not start.exists():
        with replacing(start) as part:
            torch.save(_pretrained_reader().state_dict(), part)
    return MoreTask(kind, len(_topics()[1]), start)


def _file(package: str, name: str) -> Path:
    """Return a file of an installed package, without importing it."""
    found = find_spec(package)
    places = [] if found is None else found.submodule_search_locations or []
    for place in places:
        if (Path(place) / name).exists():
            return Path(place) / name
    raise HeldinError(
        f"study: --task faces needs {name} of {package}: "
        "pip install --no-deps facenet-pytorch scikit-image"
    )


# -- data


@cache
def _faces() -> tuple[Tensor, Tensor]:
    """(200, 3, 24, 24) photographs as the detector takes them, and whether they are faces."""
    grey = np.load(_file("skimage", "data/lfw_subset.npy"))  # 100 faces, then 100 other pictures
    x = torch.tensor(grey[:, None, :24, :24], dtype=torch.float32).expand(-1, 3, -1, -1)
    labels = torch.cat([torch.ones(100), torch.zeros(len(grey) - 100)]).long()
    return (x * 255 - 127.5) / 128, labels


@cache
def _halves() -> tuple[Tensor, Tensor]:
    """(1797, 1, 4, 8) upper and (1797, 32) lower halves of scikit-learn's digits."""
    from sklearn.datasets import load_digits

    x = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    return x[:, :, :4], (x[:, :, 4:].flatten(1) - 0.5) * 2


@cache
def texts_by_topic() -> list[str]:
    """Return Python's help by topic, the longest first, without those that are part of others."""
    from pydoc_data.topics import topics

    texts: list[str] = []
    for text in sorted(topics.values(), key=len, reverse=True):
        if not any(text[-400:-200] in other or text[200:400] in other for other in texts):
            texts.append(text)
    return texts


@cache
def _characters() -> dict[str, int]:
    return {c: i for i, c in enumerate(sorted(set("".join(texts_by_topic()))))}


def _pieces(text: str) -> Tensor:
    """(pieces, LENGTH) numbers of characters."""
    numbers = torch.tensor([_characters()[c] for c in text])
    return numbers[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)


@cache
def _topics() -> tuple[Tensor, Tensor]:
    """Return the same number of pieces of each of the longest topics, and their topics."""
    pieces = [_pieces(text) for text in texts_by_topic()[:TOPICS]]
    each = min(map(len, pieces))
    return torch.cat([p[:each] for p in pieces]), torch.arange(TOPICS).repeat_interleave(each)


# -- networks


def detector(weights: Path) -> nn.Sequential:
    """Return the trunk of R-Net (Zhang, Zhang, Li, Qiao 2016) with its published weights."""
    trunk = nn.Sequential(
        nn.Conv2d(3, 28, 3), nn.PReLU(28), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(28, 48, 3), nn.PReLU(48), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(48, 64, 2), nn.PReLU(64), nn.Flatten(), nn.Linear(576, 128), nn.PReLU(128),
    )  # fmt: skip
    layers = {"0": "conv1", "1": "prelu1", "3": "conv2", "4": "prelu2", "6": "conv3"}
    layers |= {"7": "prelu3", "9": "dense4", "10": "prelu4"}
    stored = torch.load(weights, weights_only=True)
    names = trunk.state_dict()
    state = {name: stored[f"{layers[name.split('.')[0]]}.{name.split('.')[1]}"] for name in names}
    dense = state["9.weight"].view(128, 3, 3, 64)  # columns, rows, channels
    state["9.weight"] = dense.permute(0, 3, 2, 1).reshape(128, 576)
    trunk.load_state_dict(state)
    return trunk


class _Reader(nn.Module):
    """Two causal blocks on characters; the mean over the places."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) / WIDTH**0.5)
        self.blocks = nn.Sequential(CausalBlock(), CausalBlock())

    def places(self, x: Tensor) -> Tensor:
        """(rows, places, WIDTH) what is known at each place."""
        states: Tensor = self.blocks(self.embed(x) + self.place)
        return states

    def forward(self, x: Tensor) -> Tensor:
        return self.places(x).mean(1)


def _pretrained_reader() -> _Reader:
    """Return a reader that has learnt to continue the topics that are not classes."""
    pieces = torch.cat([_pieces(text) for text in texts_by_topic()[TOPICS:] if len(text) > LENGTH])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reader = _Reader(len(_characters()))
        head = nn.Linear(WIDTH, len(_characters()))
        optimizer = torch.optim.Adam([*reader.parameters(), *head.parameters()], lr=0.003)
        for _ in range(STEPS):
            x = pieces[torch.randint(len(pieces), (BATCH,))]
            scores = head(reader.places(x))[:, :-1]
            optimizer.zero_grad()
            F.cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
    return reader
