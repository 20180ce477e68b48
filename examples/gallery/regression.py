"""Regression: predicted against true values, RMSE and R² with intervals."""

# %% 200 rows of scikit-learn's diabetes table
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import heldin

torch.manual_seed(0)
features, progress = map(torch.tensor, load_diabetes(return_X_y=True))
x = (features / features.std(0)).float()
y = ((progress - progress.mean()) / progress.std()).float()[:, None]
train, test = torch.randperm(len(y)).split([200, len(y) - 200])


def rmse(outputs, targets):
    return (outputs - targets).square().mean().sqrt()


# %% Train on all 200
model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
metrics = {"RMSE": rmse, "R2": lambda out, true: 1 - rmse(out, true) ** 2 / true.var()}
stopping = heldin.EarlyStopping(
    model, optimizer, nn.MSELoss(), (x[train], y[train]), metrics=metrics
)
stopping.fit(batch_size=32)
print(f"RMSE {stopping.estimates['RMSE']} and R2 {stopping.estimates['R2']} to expect")
print(f"RMSE on {len(test)} other rows: {rmse(model(x[test]), y[test]):.2f}")

# %% Out-of-fold predictions
rows = stopping.out_of_fold
plt.scatter(rows.targets, rows.outputs, s=12)
plt.axline((0, 0), slope=1, color="grey", linewidth=1)
plt.xlabel("true")
plt.ylabel("predicted out of fold")
plt.savefig("regression.png")
