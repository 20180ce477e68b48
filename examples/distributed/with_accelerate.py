"""Accelerate: accelerate launch --cpu --num_processes 2 examples/distributed/with_accelerate.py."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heldin.accelerate import EarlyStopping

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500, help="stop here at the latest")
parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to")
options = parser.parse_args()

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.Adam(model.parameters(), lr=0.003),
    DataLoader(TensorDataset(x, y), batch_size=200 // accelerator.num_processes),
)
evidence = EarlyStopping(accelerator, model, rule="evidence")  # is in save_state
if options.checkpoint and options.checkpoint.exists():
    accelerator.load_state(options.checkpoint)
stopping = evidence.stopping

with evidence:
    while stopping.state_dict()["step"] < options.steps and not stopping.should_stop:
        for a, b in loader:
            accelerator.backward(F.cross_entropy(model(a), b))
            if evidence.step():
                break
            optimizer.step()
            optimizer.zero_grad()
if options.checkpoint:
    accelerator.save_state(options.checkpoint)
rank, world = accelerator.process_index, accelerator.num_processes
print(f"rank {rank} of {world}: {stopping.should_stop} at {stopping.reason}", flush=True)
accelerator.end_training()
