"""fastai: a Learner whose validation set is empty."""

import torch
import torch.nn.functional as F
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from torch import nn
from torch.utils.data import TensorDataset

from heldin.fastai import EarlyStopping

torch.manual_seed(0)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
loaders = DataLoaders(
    DataLoader(TensorDataset(x, y), bs=40, shuffle=True, num_workers=0),
    DataLoader(TensorDataset(x[:0], y[:0]), bs=40, num_workers=0),
    device="cpu",
)
first, second = EarlyStopping(), EarlyStopping("evidence")
for callback in (first, second):  # an estimated test loss; or evidence, which needs no second model
    torch.manual_seed(1)
    learn = Learner(
        loaders,
        nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)),
        loss_func=F.cross_entropy,
        lr=0.003,
        cbs=callback,
    )
    with learn.no_bar(), learn.no_logging():
        learn.fit(200)
    print(f"stopped at {callback.stopping.reason}")
auto, evidence = first.stopping, second.stopping
print(f"expected test loss {first.estimates['loss']}")
