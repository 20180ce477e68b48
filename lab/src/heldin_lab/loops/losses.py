"""Loops whose losses are no plain means over rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from .batches import Bigram, Tokens
from .job import Job, class_rows, loop, mlp, plain, rows

KIND = "losses"


def _classes(size: int = 12) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*class_rows()), size, shuffle=True)


@loop(KIND)
def class_weights() -> Job:
    """Class weights, with batch_loss."""
    weight = torch.tensor([0.2, 1.0, 3.0])

    def batch_loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch[0]), batch[1], weight)

    return plain(mlp(6, 3), _classes(), batch_loss, evaluates="blocks")


@loop(KIND, "exact", "refused")
def class_weights_with_loss_fn() -> Job:
    """Class weights, with loss_fn."""
    loss_fn = nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0]))
    return plain(mlp(6, 3), _classes(), loss_fn=loss_fn, evaluates="blocks")


def _padded(items: list[Tensor]) -> dict[str, Tensor]:
    longest = max(map(len, items))
    tokens = torch.stack([nn.functional.pad(row, (0, longest - len(row))) for row in items])
    labels = tokens.masked_fill(tokens == 0, -100)
    return {"input_ids": tokens[:, :-1], "labels": labels[:, 1:]}


@loop(KIND)
def ignored_tokens() -> Job:
    """The mean over tokens, whose number changes from batch to batch (ignore_index)."""

    def batch_loss(model: Any, batch: Any) -> Any:
        logits = model(batch["input_ids"])
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    loader = DataLoader(Tokens(), 12, shuffle=True, collate_fn=_padded)
    return plain(Bigram(), loader, batch_loss, evaluates="blocks")


@loop(KIND)
def dice() -> Job:
    """Dice: one ratio over all pixels of a batch."""
    x, _ = rows(features=16)
    y = (x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(8)) > 0).double()

    def batch_loss(model: Any, batch: Any) -> Any:
        guess, target = model(batch[0]).sigmoid(), batch[1]
        return 1 - 2 * (guess * target).sum() / (guess.sum() + target.sum())

    loader = DataLoader(TensorDataset(x, y), 12, shuffle=True)
    return plain(mlp(16, 16), loader, batch_loss, evaluates="blocks")


@loop(KIND)
def info_nce() -> Job:
    """InfoNCE: every other row of the batch is a negative."""
    x, _ = rows(features=12)

    def batch_loss(model: Any, batch: Any) -> Any:
        (pair,) = batch
        one, other = (normalize(model(part), dim=1) for part in pair.split(6, 1))
        return cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))

    loader = DataLoader(TensorDataset(x), 12, shuffle=True)
    return plain(mlp(6, 4), loader, batch_loss, evaluates="blocks")


@loop(KIND, train_step="exact")
def sum_of_rows() -> Job:
    """The sum of the rows' losses (a variational autoencoder's style)."""

    def batch_loss(model: Any, batch: Any) -> Any:
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")

    model = mlp()
    return plain(model, None, batch_loss, optimizer=torch.optim.SGD(model.parameters(), 0.005))


@loop(KIND)
def sum_with_loss_fn() -> Job:
    """A sum over rows, with loss_fn."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.005)
    return plain(model, loss_fn=nn.MSELoss(reduction="sum"), optimizer=optimizer)


def _with_count(items: list[Any]) -> dict[str, Any]:
    x, y = zip(*items, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y), "count": len(items)}


@loop(KIND)
def divided_by_a_number_in_the_batch() -> Job:
    """The loss divides a sum by the number of samples, a plain number in the batch."""

    def batch_loss(model: Any, batch: Any) -> Any:
        return (model(batch["x"]) - batch["y"]).square().sum() / batch["count"]

    loader = DataLoader(TensorDataset(*rows()), 12, shuffle=True, collate_fn=_with_count)
    return plain(mlp(), loader, batch_loss)


@loop(KIND, "exact", "warned", "refused")
def divided_by_a_constant() -> Job:
    """The loss divides a sum by the loop's batch size, written as a constant."""

    def batch_loss(model: Any, batch: Any) -> Any:
        return (model(batch[0]) - batch[1]).square().sum() / 12

    return plain(mlp(), None, batch_loss)


@loop(KIND)
def positive_weight() -> Job:
    """Binary targets with a weight for the positive class."""
    x, y = class_rows(classes=2)
    weight = torch.tensor([4.0])

    def batch_loss(model: Any, batch: Any) -> Any:
        return nn.functional.binary_cross_entropy_with_logits(
            model(batch[0]), batch[1], pos_weight=weight
        )

    loader = DataLoader(TensorDataset(x, y[:, None].double()), 12, shuffle=True)
    return plain(mlp(6, 1), loader, batch_loss)


class Uncertainty(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, out: Tensor, target: Tensor) -> Any:
        """Compute the outputs."""
        return ((out - target).square() * torch.exp(-self.log_scale) + self.log_scale).mean()


@loop(KIND, "refused", train_step="exact")
def loss_with_a_parameter() -> Job:
    """The optimiser also trains a parameter of the loss; with train_step, state=[criterion]."""
    model, criterion = mlp(), Uncertainty()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.05)

    def batch_loss(model: Any, batch: Any) -> Any:
        loss: Tensor = criterion(model(batch[0]), batch[1])
        return loss

    return plain(model, None, batch_loss, optimizer=optimizer, state=[criterion])


@loop(KIND)
def metric_beside_the_loss() -> Job:
    """The estimated loss is another than the trained one (eval_loss)."""

    def mistakes(model: Any, batch: Any) -> Any:
        return (model(batch[0]).argmax(1) != batch[1]).double().mean()

    def batch_loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    return plain(mlp(6, 3), _classes(), batch_loss, arguments={"eval_loss": mistakes})
