"""A plain PyTorch loop that stops by evidence: all 200 rows are trained on, none is held out."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heldin

torch.manual_seed(0)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)


def train(stopping: heldin.EvidenceStopping, max_epochs: int) -> None:
    for _ in range(max_epochs):
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            if stopping.step():
                return
            optimizer.step()
            optimizer.zero_grad()


with heldin.EvidenceStopping(model) as stopping:
    train(stopping, max_epochs=200)
print(f"stopped at {stopping.reason}")
