"""A time series: shadows see the past, and are tested on what comes next."""

# %% 500 days to train on, then 100 days
import matplotlib.pyplot as plt
import torch
from torch import nn

import heldin

torch.manual_seed(1)
day = torch.arange(600)
level = (0.15 * torch.randn(600)).cumsum(0)  # moves slowly
y = (level + torch.sin(day / 1.1) + 0.5 * torch.randn(600))[:, None]
angles = day[:, None] * torch.tensor([1 / 1.1, *(k / 58 for k in range(1, 9))])
x = torch.cat([day[:, None] / 200 - 1.5, angles.sin(), angles.cos()], 1)
past, future = slice(500), slice(500, 600)

# %% Random folds, and folds in the order of time
plt.plot(day, y, color="grey", linewidth=1, label="series")
for name, time in {"random folds": None, "time=day": day[past]}.items():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(19, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    stopping = heldin.EarlyStopping(
        model, optimizer, nn.MSELoss(), (x[past], y[past]), "folds", time=time
    ).fit(batch_size=50, max_epochs=80)
    forecast = model(x[future]).detach()
    truth = nn.functional.mse_loss(forecast, y[future])
    print(f"{name}: promises {stopping.estimates['loss'].value:.2f}, has {truth:.2f}")
    plt.plot(day[future], forecast, label=f"forecast, {name}")

# %% The forecast of 100 days
plt.legend()
plt.savefig("time_series.png")
