"""Lightning: a Trainer without a validation loop."""

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from heldin.lightning import EarlyStopping


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)


lightning.seed_everything(0, verbose=False)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)
first, second = EarlyStopping(), EarlyStopping("evidence")
for callback in (first, second):  # an estimated test loss; or evidence, which needs no second model
    trainer = lightning.Trainer(
        max_epochs=200,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,  # or your logger: it gets heldin/estimate and heldin/standard_error
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    print(f"stopped at {callback.stopping.reason}")
auto, evidence = first.stopping, second.stopping
print(f"expected test loss {first.estimates['loss']}")
