"""Lightning: torchrun --nproc-per-node 2 examples/distributed/with_lightning.py."""

import argparse
import os
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from heldin.lightning import EarlyStopping

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500, help="stop here at the latest")
parser.add_argument("--checkpoint", type=Path, help="file to go on from, and to save to")
parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
options = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

    def configure_model(self) -> None:
        if self.device_mesh is not None:  # --strategy fsdp
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)


lightning.seed_everything(0, verbose=False)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
callback = EarlyStopping("evidence")
devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # or simply devices=2, without torchrun
strategy: str | ModelParallelStrategy = "ddp"
if options.strategy == "fsdp":
    strategy = ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
trainer = lightning.Trainer(
    max_steps=options.steps,
    max_epochs=-1,
    callbacks=[callback],
    accelerator="cpu",
    devices=devices,
    strategy=strategy,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
known = options.checkpoint and options.checkpoint.exists()
rows = DataLoader(TensorDataset(x, y), batch_size=200 // devices)  # each rank has its share
trainer.fit(Classifier(), rows, ckpt_path=options.checkpoint if known else None)
if options.checkpoint:
    trainer.save_checkpoint(options.checkpoint)
stopping, rank = callback.stopping, trainer.global_rank
print(f"rank {rank} of {devices}: {stopping.should_stop} at {stopping.reason}", flush=True)
