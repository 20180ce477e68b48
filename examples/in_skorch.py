"""skorch: a scikit-learn estimator without a validation split."""

import torch
from skorch import NeuralNetClassifier
from torch import nn

from heldin.skorch import EarlyStopping

torch.manual_seed(0)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
first, second = EarlyStopping(), EarlyStopping("evidence")
for callback in (first, second):  # an estimated test loss; or evidence, which needs no second model
    net = NeuralNetClassifier(
        nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=0.003,
        batch_size=40,
        max_epochs=200,
        iterator_train__shuffle=True,
        train_split=None,
        callbacks=[callback],
        verbose=0,
    )
    net.fit(x.numpy(), y.numpy())
    print(f"stopped at {callback.stopping_.reason}")
auto, evidence = first.stopping_, second.stopping_
print(f"expected test loss {first.estimates['loss']}")
