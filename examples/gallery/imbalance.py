"""Imbalance: 5 % positives, F1 and average precision with intervals."""

# %% 600 rows, one in twenty positive
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_classification
from sklearn.metrics import PrecisionRecallDisplay
from torch import nn

import heldin

torch.manual_seed(0)
features, labels = make_classification(
    600, 20, n_informative=6, weights=[0.95], class_sep=1.5, flip_y=0.01, random_state=0
)
x, y = torch.tensor(features).float(), torch.tensor(labels)

# %% Folds with equal shares of both classes
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
stopping = heldin.EarlyStopping(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.003),
    nn.CrossEntropyLoss(),
    (x, y),
    stratify=y,
    metrics=["f1", "average_precision", "accuracy"],
)
stopping.fit(batch_size=32)
print(f"{int(y.sum())} of {len(y)} rows are positive")
for name, interval in stopping.estimates.items():
    print(f"{name}: {interval}")

# %% Choose a threshold on out-of-fold probabilities
rows = stopping.out_of_fold
PrecisionRecallDisplay.from_predictions(
    rows.targets, rows.outputs.softmax(1)[:, 1], name="out of fold"
)
plt.savefig("imbalance.png")
