"""Ray Train: python examples/distributed/with_ray.py --workers 2."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import heldin


def train(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(200, 20)
    y = (x[:, 0] + x[:, 1] + torch.randn(200) > 0).long()
    mine = slice(rank, None, world)  # the rows of this rank

    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    model = prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    stopping = heldin.EarlyStopping(model, optimizer, rule="evidence")  # the ranks decide alike
    done = 0
    if config["checkpoint"]:
        saved = torch.load(Path(config["checkpoint"]) / "state.pt", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        stopping.load_state_dict(saved["stopping"])
        done = saved["step"]

    with stopping:
        while done < config["steps"] and not stopping.should_stop:
            done += 1
            optimizer.zero_grad()
            F.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
    with tempfile.TemporaryDirectory() as folder:
        torch.save({**state, "stopping": stopping.state_dict()}, Path(folder) / "state.pt")
        kept = Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report(stopping.metrics(), checkpoint=kept)
    told = f"rank {rank} of {world}: {stopping.should_stop} at {stopping.reason}"
    (Path(config["out"]) / f"{rank}.txt").write_text(told)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500, help="stop here at the latest")
    parser.add_argument("--checkpoint", help="folder of a checkpoint to go on from")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", default=tempfile.gettempdir(), help="folder for results")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(storage_path=options.out, name=f"with-{options.workers}"),
    )
    result = trainer.fit()
    for rank in range(options.workers):
        print((Path(options.out) / f"{rank}.txt").read_text())
    print(result.checkpoint.path)
