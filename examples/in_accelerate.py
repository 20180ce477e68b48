"""Accelerate: a plain loop with an Accelerator."""

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin.accelerate import EarlyStopping

RULE = heldin.rules.Evidence(window="epoch")

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()


def prepared() -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)
    return accelerator.prepare(model, optimizer, loader)


def batch_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# By an estimated test loss; the weights of the best estimate are in the model at the end.
model, optimizer, loader = prepared()
with EarlyStopping(accelerator, model, optimizer, loader, batch_loss) as first:
    auto = first.stopping  # its state is in accelerator.save_state
    while not auto.should_stop:
        for batch in loader:
            accelerator.backward(batch_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if first.step(batch):  # after the optimiser's step
                break
accelerator.print(f"stopped at {auto.reason}")
accelerator.print(f"expected test loss {first.estimates['loss']}")

# By evidence, where no second model is affordable, and in several processes.
model, optimizer, loader = prepared()
with EarlyStopping(accelerator, model, loader=loader, rule=RULE) as second:
    evidence = second.stopping
    while not evidence.should_stop:
        for batch in loader:
            accelerator.backward(batch_loss(model, batch))
            if second.step():  # before it, in all processes alike
                break
            optimizer.step()
            optimizer.zero_grad()
accelerator.print(f"stopped at {evidence.reason}")
