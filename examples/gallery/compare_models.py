"""Which of two models is better? A comparison row by row, on the same folds."""

# %% 200 rows of one table, a narrow and a wide network
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import heldin

features, labels = map(torch.tensor, load_breast_cancer(return_X_y=True))
x, y = ((features - features.mean(0)) / features.std(0)).float()[:200], labels[:200]


def run(units, rate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, units), nn.ReLU(), nn.Linear(units, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    stopping = heldin.EarlyStopping(model, optimizer, nn.CrossEntropyLoss(), (x, y), "folds")
    return stopping.fit(batch_size=32)


# %% Two intervals overlap; the paired comparison is sharper
narrow, wide = run(1, 0.01), run(32, 0.001)
print(f"1 unit {narrow.estimates['loss']}, 32 units {wide.estimates['loss']}")
print(heldin.compare(wide, narrow, names=("32 units", "1 unit")))

# %% The two curves
for name, stopping in {"1 unit": narrow, "32 units": wide}.items():
    checks = list(stopping.history)
    plt.plot([c.step for c in checks], [c.estimate for c in checks], label=name)
plt.xscale("log")
plt.yscale("log")
plt.xlabel("step")
plt.ylabel("estimated test loss")
plt.legend()
plt.savefig("compare_models.png")
