"""PyTorch-Ignite: a trainer without an evaluator."""

import torch
import torch.nn.functional as F
from ignite.engine import create_supervised_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heldin.ignite import EvidenceStopping

torch.manual_seed(0)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
handler = EvidenceStopping(model).attach(trainer)
trainer.run(DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True), max_epochs=200)
stopping = handler.stopping
print(f"stopped at {stopping.reason}")
