"""A plain PyTorch loop: all 200 rows are trained on, none is held out."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heldin

torch.manual_seed(0)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.003)


# By an estimated test loss; the best weights are in the model at the end.
model, optimizer = network()
auto = heldin.EarlyStopping(model, optimizer, F.cross_entropy, loader)
print(auto.reason_chosen)
for _ in auto.epochs(200):
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
print(f"stopped at {auto.reason}")
print(f"expected test loss {auto.estimates['loss']}")

# By evidence, where no second model is affordable.
model, optimizer = network()
rule = heldin.rules.Evidence(window="epoch")
evidence = heldin.EarlyStopping(model, optimizer, data=loader, rule=rule)
for _ in evidence.epochs(200):
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
print(f"stopped at {evidence.reason}")
