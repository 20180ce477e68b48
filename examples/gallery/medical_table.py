"""A medical table: 150 patients, accuracy and AUC with intervals, a confusion matrix."""

# %% 150 rows of scikit-learn's breast-cancer table
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import ConfusionMatrixDisplay
from torch import nn

import heldin

torch.manual_seed(0)
features, labels = map(torch.tensor, load_breast_cancer(return_X_y=True))
chosen = torch.randperm(len(labels))
train, test = chosen[:150], chosen[150:]
scaled = ((features - features[train].mean(0)) / features[train].std(0)).float()
x, y = scaled[train], labels[train]

# %% Train on all of them
model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
stopping = heldin.EarlyStopping(
    model, optimizer, nn.CrossEntropyLoss(), (x, y), metrics=["accuracy", "roc_auc"]
)
stopping.fit(batch_size=32)
for name, interval in stopping.estimates.items():
    print(f"{name}: {interval} to expect on new patients")
accuracy = (model(scaled[test]).argmax(1) == labels[test]).float().mean()
print(f"accuracy on the other {len(test)} patients: {accuracy:.3f}")

# %% Confusion matrix of out-of-fold predictions
rows = stopping.out_of_fold
ConfusionMatrixDisplay.from_predictions(
    rows.targets,
    rows.outputs.argmax(1),
    display_labels=["malignant", "benign"],
    cmap="Blues",
    colorbar=False,
)
plt.savefig("medical_table.png")
