"""Accelerate: a plain loop that stops in all processes at the same step."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heldin.accelerate import EvidenceStopping

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.Adam(model.parameters(), lr=0.003),
    DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True),
)


def train(evidence: EvidenceStopping, max_epochs: int) -> None:
    for _ in range(max_epochs):
        for a, b in loader:
            accelerator.backward(F.cross_entropy(model(a), b))
            if evidence.step():
                return
            optimizer.step()
            optimizer.zero_grad()


with EvidenceStopping(accelerator, model) as evidence:  # its state is in accelerator.save_state
    train(evidence, max_epochs=200)
stopping = evidence.stopping
accelerator.print(f"stopped at {stopping.reason}")
