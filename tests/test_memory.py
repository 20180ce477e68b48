"""Per-sample gradients of a large layer are never written out: peak memory in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch, heldin
torch.set_num_threads(1)
observed, kind = sys.argv[1] == "observed", sys.argv[2]
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
if observed:
    seen.__enter__()
model(x).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak(observed: str, kind: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, observed, kind], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux")
@pytest.mark.parametrize("kind", ["linear", "sequence", "embedding"])
def test_extra_memory_is_a_few_times_the_parameter(kind: str) -> None:
    weights = 6_000_000 * 4  # bytes; per-sample gradients would be 64 times this
    extra = peak("observed", kind) - peak("plain", kind)
    assert extra < 4 * weights, f"{extra / weights:.1f} times the parameter"
