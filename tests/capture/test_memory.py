"""Per-sample gradients of a large layer are never written out: peak memory in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

import heldin

PROGRAM = """
import sys, torch, heldin
from tests.support import runs
torch.set_num_threads(1)
how, kind = sys.argv[1:]
if kind == "linear":
    model, x = torch.nn.Linear(3000, 2000, bias=False), torch.randn(64, 3000)
elif kind == "sequence":
    model, x = torch.nn.Linear(3000, 2000, bias=False), torch.randn(64, 4, 3000)
else:
    model, x = torch.nn.Embedding(6000, 1000), torch.randint(0, 6000, (64, 4))
small = torch.nn.Linear(2, 2)
with heldin.observe(small):                              # imports and first uses
    small(torch.randn(4, 2)).sum().backward()
seen = heldin.observe(model)
if how == "observed":
    seen.__enter__()
if how == "stopping":
    stopping = runs.EvidenceStopping(model, estimator="exact")
model(x).sum().backward()
if how == "stopping":
    stopping.step()
if how == "written out":
    torch.ones(16, 6_000_000)
# Not ru_maxrss: it survives exec, so that the child of a large process starts at its parent's.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
# The heap returns every larger block as soon as it is freed; what it keeps by default varies.
HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak(how: str, kind: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, kind],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **HEAP},
    )
    return int(done.stdout) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["linear", "sequence", "embedding"])
def test_extra_memory_is_a_few_times_the_parameter(kind: str) -> None:
    weights = 6_000_000 * 4  # bytes; per-sample gradients would be 64 times this
    extra = peak("observed", kind) - peak("plain", kind)
    assert extra < 4 * weights, f"{extra / weights:.1f} times the parameter"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_exact_evidence_holds_two_sums() -> None:
    """The sum and the sum of squares; ratios are formed in pieces."""
    weights = 6_000_000 * 4
    extra = peak("stopping", "linear") - peak("plain", "linear")
    assert extra < 2.5 * weights, f"{extra / weights:.1f} times the parameter"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_gradients_of_sixteen_samples_would_be_noticed() -> None:
    extra = peak("written out", "linear") - peak("plain", "linear")
    assert extra > 10 * 6_000_000 * 4


class Projected(nn.Module):
    """Copies a projection, as attention does with queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.project(x)
        self.seen = weakref.ref(projected)
        first, second = projected.clone().chunk(2, -1)
        return first * second


def test_following_a_call_keeps_no_tensor_that_the_graph_does_not_need() -> None:
    model = Projected()
    with heldin.observe(model) as found:
        loss = model(torch.randn(4, 3)).sum()
        assert model.seen() is None
        loss.backward()
    assert found.count == 4
