"""DistributedDataParallel: torchrun --nproc-per-node 2 examples/distributed/ddp.py."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import heldin

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500, help="stop here at the latest")
parser.add_argument("--checkpoint", type=Path, help="file to go on from, and to save to")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
mine = slice(rank, None, world)  # the rows of this rank

net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
stopping = heldin.EarlyStopping(model, optimizer, rule="evidence")  # the ranks decide alike
done = 0
if options.checkpoint and options.checkpoint.exists():
    saved = torch.load(options.checkpoint, weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    stopping.load_state_dict(saved["stopping"])
    done = saved["step"]

with stopping:
    while done < options.steps and not stopping.should_stop:
        done += 1
        optimizer.zero_grad()
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
if options.checkpoint and rank == 0:
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
    torch.save({**state, "stopping": stopping.state_dict()}, options.checkpoint)
print(f"rank {rank} of {world}: {stopping.should_stop} at {stopping.reason}", flush=True)
dist.destroy_process_group()
