"""PyTorch-Ignite: a trainer without an evaluator."""

import torch
import torch.nn.functional as F
from ignite.engine import create_supervised_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heldin.ignite import EarlyStopping

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
trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
first = EarlyStopping(model, optimizer, F.cross_entropy).attach(trainer)
trainer.run(loader, max_epochs=200)
auto = first.stopping
print(f"stopped at {auto.reason}")
print(f"expected test loss {first.estimates['loss']}")

# By evidence, where no second model is affordable.
model, optimizer = network()
trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
second = EarlyStopping(model, rule="evidence").attach(trainer)
trainer.run(loader, max_epochs=200)
evidence = second.stopping
print(f"stopped at {evidence.reason}")
