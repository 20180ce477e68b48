"""Loops with models that keep more than weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from .job import Job, class_rows, loop, mlp, plain, rows

KIND = "models"


def _mse(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return mse_loss(model(x), y)


class Block(nn.Module):
    """minGPT's block: a lambda keeps the submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"up": nn.Linear(6, 12), "down": nn.Linear(12, 6)})
        m: Any = self.mlp
        self.mlpf: Any = lambda x: m["down"](torch.tanh(m["up"](x)))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        return self.head(x + self.mlpf(x))


@loop(KIND, train_step="exact")
def lambda_with_submodule() -> Job:
    """A lambda keeps a submodule (minGPT's block)."""
    model = Block()
    return plain(model, optimizer=torch.optim.AdamW(model.parameters(), 0.02))


@loop(KIND)
def lambda_with_submodule_and_loss_fn() -> Job:
    """The same block with loss_fn, where shadows may be stacked."""
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    return plain(model, loss_fn=nn.MSELoss(), optimizer=optimizer)


class Tempered(nn.Module):
    """A temperature in a tensor of a configuration dictionary."""

    def __init__(self, as_number: bool = False) -> None:
        super().__init__()
        self.net = mlp(6, 3)
        self.config: dict[str, Any] = {"temperature": torch.tensor(2.0), "nested": [1.0]}
        self.temperature = 2.0
        self.as_number = as_number

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        factor = self.temperature if self.as_number else self.config["temperature"]
        return self.net(x) / factor * self.config["nested"][0]


def _tempered(as_number: bool, **others: Any) -> Job:
    model = Tempered(as_number)

    def begin(epoch: int) -> None:
        model.config["temperature"].mul_(0.6)
        model.config["nested"][0] = 1.0 + 0.1 * epoch
        model.temperature *= 0.6

    loader = DataLoader(TensorDataset(*class_rows()), 12, shuffle=True)
    return plain(model, loader, begin_epoch=begin, **others)


@loop(KIND, train_step="exact")
def temperature_in_a_tensor() -> Job:
    """A temperature in a tensor of a dictionary falls along the run."""
    return _tempered(False, batch_loss=lambda m, b: cross_entropy(m(b[0]), b[1]))


@loop(KIND, "exact", "refused")
def temperature_in_a_tensor_with_loss_fn() -> Job:
    """The same with loss_fn, where shadows may be stacked."""
    return _tempered(False, loss_fn=nn.CrossEntropyLoss())


@loop(KIND, train_step="exact")
def number_changed_on_the_way() -> Job:
    """A temperature in a plain number falls along the run."""
    return _tempered(True, batch_loss=lambda m, b: cross_entropy(m(b[0]), b[1]))


@loop(KIND, "exact", "refused")
def number_changed_with_loss_fn() -> Job:
    """The same with loss_fn."""
    return _tempered(True, loss_fn=nn.CrossEntropyLoss())


class Hooked(nn.Module):
    """A model that reads an inner layer through a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.more = mlp(), nn.Linear(8, 1)
        self.features: dict[str, Tensor] = {}
        self.net[1].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features["hidden"] = output

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        out: Tensor = self.net(x)
        return out + self.more(self.features.pop("hidden"))


@loop(KIND, train_step="exact")
def forward_hooks() -> Job:
    """The model works by a forward hook."""
    return plain(Hooked())


@loop(KIND)
def forward_hooks_with_loss_fn() -> Job:
    """A model with forward hooks, and loss_fn."""
    return plain(Hooked(), loss_fn=nn.MSELoss())


@loop(KIND, train_step="exact")
def spectral_norm() -> Job:
    """Spectral normalisation by parametrization."""
    model = mlp()
    parametrizations.spectral_norm(model[0])
    return plain(model)


@loop(KIND, train_step="exact")
def weight_norm() -> Job:
    """Weight normalisation, by hook and by parametrization."""
    model = mlp()
    torch.nn.utils.weight_norm(model[0])
    parametrizations.weight_norm(model[2])
    return plain(model)


@loop(KIND)
def orthogonal() -> Job:
    """An orthogonal layer by parametrization."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    parametrizations.orthogonal(model[0])
    return plain(model)


@loop(KIND, train_step="exact")
def batch_norm() -> Job:
    """Batch normalisation, with statistics of its own for each shadow."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return plain(model)


@loop(KIND)
def batch_norm_in_evaluation_mode() -> Job:
    """The loop keeps a batch normalisation in evaluation mode (fine-tuning)."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model[1].eval()
    return plain(model)


@loop(KIND, train_step="exact")
def dropout() -> Job:
    """Dropout: a shadow draws its own random numbers."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 1))
    return plain(model, optimizer=torch.optim.Adam(model.parameters(), 0.02))


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(9, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        """Compute the outputs."""
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def _tokens() -> DataLoader[Any]:
    tokens = torch.randint(9, (48, 7), generator=torch.Generator().manual_seed(6))
    return DataLoader(TensorDataset(tokens), 12, shuffle=True)


def _next_token(model: nn.Module, batch: Any) -> Tensor:
    (tokens,) = batch
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@loop(KIND, train_step="exact")
def tied_weights() -> Job:
    """The output layer shares its Parameter with the embedding."""
    model = Tied()
    return plain(
        model, _tokens(), _next_token, optimizer=torch.optim.AdamW(model.parameters(), 0.02)
    )


class Views(nn.Module):
    """Two Parameters that are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(12) * 0.3
        self.first, self.second = nn.Parameter(flat[:9]), nn.Parameter(flat[3:])

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        return (x @ self.first[:6] + (x @ self.second[:6]).tanh())[:, None]


@loop(KIND, "exact", "refused")
def parameters_with_one_storage() -> Job:
    """Two Parameters share a storage, and overlap."""
    model = Views()
    return plain(model, optimizer=torch.optim.SGD(model.parameters(), 0.05))


class Adapted(nn.Module):
    """A frozen layer and a low-rank adapter with dropout (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = mlp()
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.up.weight)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        return self.base(x) + self.up(self.down(self.drop(x)))


@loop(KIND, train_step="exact")
def frozen_base_with_adapter() -> Job:
    """A frozen base with a low-rank adapter and dropout."""
    model = Adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    return plain(model, optimizer=torch.optim.AdamW(trained, 0.02))


class OwnNoise(nn.Module):
    """A layer that draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.generator = torch.Generator().manual_seed(11)

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        if self.training:
            x = x + 0.1 * torch.randn(len(x), 6, generator=self.generator)
        return self.net(x)


@loop(KIND, train_step="exact")
def generator_of_the_model() -> Job:
    """A module draws noise from a torch.Generator of its own."""
    return plain(OwnNoise())


class Running(nn.Module):
    """A module that counts and averages in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.mean = torch.zeros(6)
        self.calls, self.seen = 0, [0.0]

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        if self.training:
            self.calls += 1
            self.mean = self.mean + (x.detach().mean(0) - self.mean) / self.calls
            self.seen[0] += float(x.sum())
        return self.net(x - self.mean) * (1 + 0.001 * self.seen[0])


@loop(KIND, train_step="exact")
def attributes_changed_in_forward() -> Job:
    """The model keeps a running mean in attributes, not buffers."""
    return plain(Running())


@loop(KIND)
def attributes_changed_with_loss_fn() -> Job:
    """The same with loss_fn."""
    return plain(Running(), loss_fn=nn.MSELoss())


class Teacher(nn.Module):
    """A teacher inside the model follows the student by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), mlp()
        self.teacher.requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the outputs."""
        if self.training:
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    t.lerp_(s, 0.1)
        return self.student(x), self.teacher(x)


@loop(KIND, "refused", train_step="exact")
def teacher_in_the_model() -> Job:
    """Frozen parameters are changed in forward (BYOL); with train_step, state=[model.teacher]."""

    def batch_loss(model: Any, batch: Any) -> Any:
        x, y = batch
        student, teacher = model(x)
        return mse_loss(student, y) + 0.1 * mse_loss(student, teacher)

    model = Teacher()
    return plain(model, None, batch_loss, state=[model.teacher])


class Checkpointed(nn.Module):
    """Gradient checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        hidden = checkpoint(lambda t: self.first(t).tanh(), x, use_reentrant=False)
        return self.second(hidden)


@loop(KIND)
def gradient_checkpointing() -> Job:
    """Activations are computed again in the backward pass."""
    return plain(Checkpointed())


@loop(KIND)
def sparse_embedding() -> Job:
    """Sparse gradients of an embedding, with SparseAdam."""
    tokens = torch.randint(9, (48, 4), generator=torch.Generator().manual_seed(6))
    loader = DataLoader(TensorDataset(tokens, rows()[1]), 12, shuffle=True)
    model = nn.EmbeddingBag(9, 1, sparse=True, mode="mean")
    return plain(model, loader, optimizer=torch.optim.SparseAdam(model.parameters(), 0.02))


class Routed(nn.Module):
    """Experts of which some get no row, and so no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        choice = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 1.2).long()
        out = x.new_zeros(len(x), 1)
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if chosen.any():
                out = out.masked_scatter(chosen[:, None], expert(x[chosen]))
        return out


@loop(KIND, "exact", "refused")
def experts_without_rows() -> Job:
    """Experts that get no row of a batch have no gradient, and Adam skips them."""
    model = Routed()
    return plain(model, optimizer=torch.optim.Adam(model.parameters(), 0.02))


class Convolutional(nn.Module):
    """A small image classifier with a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding="same")
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch, as sbi and other libraries do."""
        hidden = self.norm(self.conv(x)).relu().mean((2, 3))
        return cross_entropy(self.head(hidden), y)


def _own_loss(model: Any, batch: Any) -> Any:
    return model.loss(*batch)


@loop(KIND, "exact", "refused", train_step="exact")
def a_method_in_place_of_forward() -> Job:
    """The loop calls a method of the model, and never the model."""
    x, y = class_rows(features=36)
    loader = DataLoader(TensorDataset(x.view(-1, 1, 6, 6), y), 12, shuffle=True)
    return plain(Convolutional(), loader, _own_loss)


class Cached(nn.Module):
    """A model that makes an attribute, and a buffer's contents, at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("scale", torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        if not hasattr(self, "shift"):
            self.shift = x.detach().mean(0)
            self.scale = x.detach().std(0)
        return self.net((x - self.shift) / self.scale)


@loop(KIND, train_step="exact")
def statistics_of_the_first_batch() -> Job:
    """The model keeps statistics of the first batch that it sees (ActNorm)."""
    return plain(Cached(), compares="weights")


class Buffered(nn.Module):
    """A queue of keys in a buffer, which each call moves on (MoCo)."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 4)
        self.register_buffer("queue", torch.ones(16, 4))
        self.place = 0

    def forward(self, x: Tensor) -> Any:
        """Compute the outputs."""
        out = self.net(x)
        result = out @ self.queue.clone().T
        if self.training:
            keys = out.detach()
            for key in keys:
                self.queue[self.place] = key
                self.place = (self.place + 1) % len(self.queue)
        return result.mean(1, keepdim=True)


@loop(KIND, train_step="exact")
def queue_in_a_buffer() -> Job:
    """A queue of outputs in a buffer, with its place in a number (MoCo)."""
    model = Buffered()
    return plain(model, optimizer=torch.optim.SGD(model.parameters(), 0.02))


@loop(KIND, train_step="exact")
def recurrent_with_dropout() -> Job:
    """An LSTM with dropout between its layers."""
    x, y = rows(features=15)
    loader = DataLoader(TensorDataset(x.view(-1, 5, 3), y), 12, shuffle=True)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 6, 2, batch_first=True, dropout=0.3)
            self.head = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.rnn(x)[0][:, -1])

    model = Recurrent()
    return plain(model, loader, optimizer=torch.optim.Adam(model.parameters(), 0.01))


@loop(KIND, train_step="exact")
def transformer() -> Job:
    """A transformer encoder with dropout and layer normalisation."""
    x, y = rows(features=24)
    loader = DataLoader(TensorDataset(x.view(-1, 3, 8), y), 12, shuffle=True)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.encoder(x).mean(1))

    model = Encoder()
    return plain(model, loader, optimizer=torch.optim.AdamW(model.parameters(), 0.01))


@loop(KIND)
def noise_in_evaluation_too() -> Job:
    """A variational autoencoder draws noise in evaluation, too: weights are compared."""

    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(6, 4), nn.Linear(2, 6)

        def forward(self, x: Tensor) -> Any:
            mean, log_scale = self.down(x).chunk(2, 1)
            return self.up(mean + torch.randn_like(mean) * log_scale.exp()), mean, log_scale

    def batch_loss(model: Any, batch: Any) -> Any:
        out, mean, log_scale = model(batch[0])
        spread = (mean.square() + (2 * log_scale).exp() - 2 * log_scale - 1).sum() / 2
        return mse_loss(out, batch[0], reduction="sum") + spread

    model = Variational()
    optimizer = torch.optim.SGD(model.parameters(), 0.002)
    return plain(model, None, batch_loss, optimizer=optimizer, compares="weights")
