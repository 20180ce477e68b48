"""Groups of patients: eight rows of each, and folds that split a patient's rows."""

# %% 40 patients with 8 rows each, and 200 patients whom nobody has seen
import matplotlib.pyplot as plt
import torch
from torch import nn

import heldin


def patients(count):
    person = torch.randn(count, 10).repeat_interleave(8, 0)  # what all rows of a patient share
    ill = (3 * person[:, 0] + torch.randn(count).repeat_interleave(8) > 0).long()
    return person + 0.3 * torch.randn(len(person), 10), ill


torch.manual_seed(0)
x, y = patients(40)
new_x, new_y = patients(200)
number = torch.arange(40).repeat_interleave(8)

# %% Two runs: folds of rows, and folds of patients
loss_fn, shown = nn.CrossEntropyLoss(), {}
for name, groups in {"folds of rows": None, "folds of patients": number}.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    stopping = heldin.EarlyStopping(model, optimizer, loss_fn, (x, y), groups=groups)
    stopping.fit(batch_size=32)
    truth = loss_fn(model(new_x), new_y).item()
    shown[name] = (stopping.estimates["loss"].value, truth)
    print(f"{name}: estimate {stopping.estimates['loss']}, on new patients {truth:.2f}")

# %% The estimate and the truth
for side, label in enumerate(["estimate", "on new patients"]):
    heights = [pair[side] for pair in shown.values()]
    plt.bar([side / 3 + i for i in range(2)], heights, 0.3, label=label)
plt.xticks([1 / 6, 7 / 6], list(shown))
plt.legend(title="loss")
plt.savefig("patients.png")
