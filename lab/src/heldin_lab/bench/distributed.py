"""What evidence costs in data-parallel training: a model, measurements, an extrapolation.

    python -m heldin_lab.bench.distributed [--out out/distributed] [--ranks 1,2,4]

The model counts, for one rank and one step, the bytes that it puts into the all-reduce and the
multiplications and additions that evidence adds. Both are compared with what processes on this
machine send (`EvidenceStopping.bytes_sent`) and compute (`torch.utils.flop_counter`). Then it is
asked about 1,000 ranks and a model of 70 billion parameters; the time of the all-reduce there is
simulated message by message.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from heldin.capture.sampling import Sampler
from heldin_lab.bench.workloads import mlp
from heldin_lab.rules import COLUMNS, HEAD, Evidence, EvidenceStopping

BUDGET = 4096
Shapes = Mapping[str, tuple[int, ...]]
Estimator = Literal["sampled", "exact", "microbatch"]

# --- the model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A model of matrices and vectors, trained on `batch` sequences of `rows` rows per rank."""

    shapes: Shapes
    batch: int
    rows: int = 1
    ranks: int = 1

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def step(self) -> int:
        """FLOPs of a plain step of one rank, as PyTorch's counter sees it: the products."""
        sizes = [prod(shape) for shape in self.shapes.values() if len(shape) == 2]
        first = sizes[0]  # whose inputs need no gradient
        return self.batch * self.rows * (6 * sum(sizes) - 2 * first)


def block(job: Job, name: str) -> tuple[int, ...]:
    """The shape of a sampled block; the sampler itself says it."""
    shape = job.shapes[name]
    reads = job.ranks * job.batch * job.rows  # of the concatenated batch
    if len(shape) > 1 and job.rows == 1:
        reads = 0
    first = next(n for n, s in job.shapes.items() if len(s) > 1)  # the one that reads the data
    found, _ = Sampler(BUDGET).block(name, shape, reads, job.rows == 1 and name == first)
    if found is None:
        return shape
    return tuple(len(range(n)[piece]) for piece, n in zip(found, shape, strict=True))


def sent(job: Job, estimator: Estimator, itemsize: int = 4) -> int:
    """Bytes that a rank puts into the all-reduce of a check."""
    if job.ranks == 1:
        return 0
    head = HEAD + len(COLUMNS) * len(job.shapes)
    if estimator == "sampled":
        size = sum(prod(block(job, name)) for name in job.shapes)
    else:
        size = job.parameters
    return itemsize * (head + 2 * size)


def products(job: Job, estimator: Estimator) -> int:
    """FLOPs that evidence adds to the products of a rank's step.

    Each matrix of one row per sample needs the product of squares; in the sampled estimator also
    that of the block itself, which no gradient holds. Of sequences, every sample's product is
    formed once. A single sample's contribution is the gradient, which is there.
    """
    if job.batch == 1 or estimator == "microbatch":
        return 0
    total = 0
    for name, shape in job.shapes.items():
        if len(shape) == 2:
            size = prod(block(job, name) if estimator == "sampled" else shape)
            twice = 2 if estimator == "sampled" and job.rows == 1 else 1
            total += 2 * twice * job.batch * job.rows * size
    return total


def on_the_wire(size: int, ranks: int) -> float:
    """Bytes that a rank sends in a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def ring_time(size: int, ranks: int, latency: float, bandwidth: float) -> float:
    """Seconds of a ring all-reduce: 2 (R-1) messages of 1/R of the data each."""
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def simulated_ring(
    size: int, ranks: int, latency: float, bandwidth: float, jitter: float = 0.0, seed: int = 0
) -> float:
    """The same, message by message: a rank sends on what it has received from its neighbour.

    Args:
        size: bytes.
        ranks: their number.
        latency: seconds per message.
        bandwidth: bytes per second of a link.
        jitter: mean of the random delay of a message (exponential), as a multiple of its time.
        seed: of the delays.
    """
    random = torch.Generator().manual_seed(seed)
    one = latency + size / ranks / bandwidth
    ready = torch.zeros(ranks, dtype=torch.float64)  # when each rank can send its next chunk
    for _ in range(2 * (ranks - 1)):
        delay = torch.full((ranks,), one, dtype=torch.float64)
        if jitter:
            delay += one * jitter * torch.empty_like(delay).exponential_(generator=random)
        arrived = (ready + delay).roll(1)  # from the left neighbour
        ready = torch.maximum(arrived, ready + delay)  # and the own link is free again
    return float(ready.max())


# --- measuring -------------------------------------------------------------------------------


class Sequences(nn.Module):
    """A stack of linear layers on sequences."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def workload(name: str, batch: int) -> tuple[nn.Module, torch.Tensor, int]:
    """Model, inputs, rows per sample."""
    if name == "mlp":
        model, x, _ = mlp(batch=batch)
        return model, x, 1
    return Sequences(), torch.randn(batch, 32, 256), 32


def counted(step: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def worker(rank: int, ranks: int, name: str, batch: int, estimator: Estimator, out: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=ranks
    )
    model, x, rows = workload(name, batch)
    trained = DistributedDataParallel(model) if ranks > 1 else model

    def step() -> None:
        value = trained(x)
        F.cross_entropy(
            value.flatten(0, -2), torch.zeros(value.flatten(0, -2).shape[:1]).long()
        ).backward()

    plain = counted(step)
    with EvidenceStopping(trained, Evidence(estimator=estimator)) as stopping:
        for _ in range(3):  # the first steps find out how to look
            step()
            stopping.step()
        seen = counted(step)
        stopping.step()
    if rank == 0:
        job = Job({n: tuple(p.shape) for n, p in model.named_parameters()}, batch, rows, ranks)
        result = {
            "model": name,
            "parameters": job.parameters,
            "ranks": ranks,
            "batch": batch,
            "estimator": estimator,
            "bytes": {"model": sent(job, estimator), "measured": stopping.bytes_sent},
            "share of gradients": stopping.bytes_sent / (4 * job.parameters),
            "step": {"model": job.step, "measured": plain},
            "flops": {"model": products(job, estimator), "measured": seen - plain},
        }
        Path(out, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def measured(name: str, ranks: int, estimator: Estimator, batch: int = 32) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        spawn(worker, (ranks, name, batch, estimator, out), nprocs=ranks)
        result: dict[str, Any] = json.loads(Path(out, "result.json").read_text())
        return result


# --- extrapolating ---------------------------------------------------------------------------


def llama_70b() -> dict[str, tuple[int, ...]]:
    """The shapes of a decoder of 70 billion parameters: 80 layers of width 8,192."""
    width, inner, kv, vocab = 8192, 28672, 1024, 128256
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab, width)}
    for i in range(80):
        for name, shape in {
            "q": (width, width), "k": (kv, width), "v": (kv, width), "o": (width, width),
            "gate": (inner, width), "up": (inner, width), "down": (width, inner),
        }.items():  # fmt: skip
            shapes[f"{i}.{name}.weight"] = shape
        shapes[f"{i}.before.weight"] = shapes[f"{i}.after.weight"] = (width,)
    return {**shapes, "norm.weight": (width,), "head.weight": (vocab, width)}


def extrapolated(latency: float, bandwidth: float) -> list[dict[str, Any]]:
    net, _, _ = mlp()
    small = {n: tuple(p.shape) for n, p in net.named_parameters()}
    jobs = {
        "MLP, 12 M": Job(small, batch=32, ranks=1000),
        "decoder, 70 B, 1 sequence": Job(llama_70b(), batch=1, rows=4096, ranks=1000),
        "decoder, 70 B, 4 sequences": Job(llama_70b(), batch=4, rows=4096, ranks=1000),
    }
    lines = []
    for title, job in jobs.items():
        for estimator in ("sampled", "exact"):
            size = sent(job, estimator)
            gradients = (4 if job.parameters < 1e9 else 2) * job.parameters  # float32, bfloat16
            lines.append({
                "job": title,
                "estimator": estimator,
                "parameters": job.parameters,
                "bytes": size,
                "share of gradients": size / gradients,
                "flops": products(job, estimator),
                "share of step": products(job, estimator) / job.step,
                "ring": ring_time(size, job.ranks, latency, bandwidth),
                "simulated": simulated_ring(size, job.ranks, latency, bandwidth, jitter=0.2),
                "gradients": ring_time(gradients, job.ranks, latency, bandwidth),
            })  # fmt: skip
    return lines


# --- reporting -------------------------------------------------------------------------------


def tables(measurements: list[dict[str, Any]], beyond: list[dict[str, Any]]) -> str:
    lines = [
        "| model | ranks | estimator | bytes, model | measured | of the gradients | FLOPs, model "
        "| measured | of the step |",
        "|---" * 9 + "|",
    ]
    for each in measurements:
        sizes, flops = each["bytes"], each["flops"]
        lines.append(
            f"| {each['model']} | {each['ranks']} | {each['estimator']} | {sizes['model']:,} | "
            f"{sizes['measured']:,} | {each['share of gradients']:.2%} | {flops['model']:,} | "
            f"{flops['measured']:,} | {flops['measured'] / each['step']['measured']:.1%} |"
        )
    lines += [
        "",
        "| job on 1,000 ranks | estimator | bytes | of the gradients | FLOPs of the step | "
        "all-reduce | simulated, with delays | of the gradients |",
        "|---" * 8 + "|",
    ]
    for each in beyond:
        lines.append(
            f"| {each['job']} | {each['estimator']} | {each['bytes']:,} | "
            f"{each['share of gradients']:.3%} | {each['share of step']:.3%} | "
            f"{each['ring'] * 1e3:,.1f} ms | {each['simulated'] * 1e3:,.1f} ms | "
            f"{each['gradients'] * 1e3:,.1f} ms |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/distributed"))
    parser.add_argument("--ranks", default="1,2,4", help="numbers of processes to measure with")
    parser.add_argument("--latency", type=float, default=1e-5, help="seconds per message")
    parser.add_argument("--bandwidth", type=float, default=2.5e10, help="bytes per second")
    options = parser.parse_args()
    measurements = []
    for name in ("mlp", "sequences"):
        for ranks in map(int, options.ranks.split(",")):
            for estimator in ("sampled", "exact"):
                print(f"{name}, {ranks} ranks, {estimator} ...", flush=True)
                measurements.append(measured(name, ranks, estimator))
    beyond = extrapolated(options.latency, options.bandwidth)
    print("\n" + tables(measurements, beyond))
    options.out.mkdir(parents=True, exist_ok=True)
    result = {
        "measured": measurements,
        "extrapolated": beyond,
        "torch": torch.__version__,
        "links": {"latency": options.latency, "bandwidth": options.bandwidth},
    }
    (options.out / "distributed.json").write_text(json.dumps(result, indent=1))
    print(f"\nJSON is in {options.out}")


if __name__ == "__main__":
    main()
