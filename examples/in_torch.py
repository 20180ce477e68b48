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


# By an estimated test loss; the weights of the best estimate are in the model at the end.
model, optimizer = network()
with heldin.stopping("auto", model, optimizer, F.cross_entropy, loader) as auto:
    print(auto.reason_chosen)
    while not auto.should_stop:
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            if auto.step():  # after the optimiser's step
                break
print(f"stopped at {auto.reason}")
print(f"expected test loss {auto.estimate:.2f} ± {auto.standard_error:.2f}")

# By evidence, where no second model is affordable.
model, optimizer = network()
with heldin.EvidenceStopping(model, window=len(loader)) as evidence:
    while not evidence.should_stop:
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            if evidence.step():  # before it
                break
            optimizer.step()
            optimizer.zero_grad()
print(f"stopped at {evidence.reason}")
