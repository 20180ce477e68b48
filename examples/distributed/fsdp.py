"""Sharded parameters (FSDP2): torchrun --nproc-per-node 2 examples/distributed/fsdp.py."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import heldin

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500, help="stop here at the latest")
parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(200, 20)
y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
mine = slice(rank, None, world)  # the rows of this rank

mesh = init_device_mesh("cpu", (world,))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
resumed = options.checkpoint and options.checkpoint.exists()
if resumed:
    get_state_dict(model, optimizer)  # torch takes a step of rate 0, which is no step of training
stopping = heldin.EarlyStopping(model, optimizer, rule="evidence")  # the ranks decide alike


def state() -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "stopping": heldin.state.Packed(stopping)}


done = 0
if resumed:
    saved = {**state(), "step": 0}
    dcp.load(saved, checkpoint_id=options.checkpoint)  # of any number of ranks
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    done = saved["step"]

with stopping:
    while done < options.steps and not stopping.should_stop:
        done += 1
        optimizer.zero_grad()
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
if options.checkpoint:
    dcp.save({**state(), "step": done}, checkpoint_id=options.checkpoint)
print(f"rank {rank} of {world}: {stopping.should_stop} at {stopping.reason}", flush=True)
dist.destroy_process_group()
