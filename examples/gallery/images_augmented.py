"""500 images with augmentation: train on shifted digits, estimate on plain ones."""

# %% 500 digits; each is shifted at random whenever it is read
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heldin

torch.manual_seed(0)
digits, order = load_digits(), torch.randperm(1797)  # the file is sorted by writer
images = torch.tensor(digits.images / 16).float()[order, None]
labels = torch.tensor(digits.target)[order]


class Shifted:
    def __len__(self):
        return 500

    def __getitem__(self, i):
        right, down = torch.randint(-1, 2, (2,)).tolist()
        return images[i].roll((down, right), (1, 2)), labels[i]


# %% eval_data shows the same rows without augmentation
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
stopping = heldin.EarlyStopping(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.01),
    data=DataLoader(Shifted(), batch_size=50, shuffle=True),
    batch_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    eval_data=TensorDataset(images[:500], labels[:500]),
    metrics=["accuracy"],
).fit(max_epochs=40)
print(f"accuracy {stopping.estimates['accuracy']} to expect")
right = model(images[500:]).argmax(1) == labels[500:]
print(f"accuracy on {len(right)} other digits: {right.float().mean():.3f}")
stopping.history.plot().figure.savefig("images_augmented.png")
