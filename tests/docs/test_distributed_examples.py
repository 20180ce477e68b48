"""The scripts in examples/distributed stop together, and go on with another number of processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="torch.distributed.all_gather_object needs numpy")
SCRIPTS = Path(__file__).parents[2] / "examples" / "distributed"
NEEDS = {
    "ddp": "torch",
    "fsdp": "torch",
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
}


def run(command: list[str], timeout: int = 300) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, timeout=timeout, env=environment
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode()


def torchrun(processes: int, script: str, *options: object) -> str:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return run([*start, str(SCRIPTS / f"{script}.py"), *map(str, options)])


def check(together: str, alone: str = "rank 0 of 1: False at step 20: ") -> None:
    """One process up to step 20, then two until the stop, which they take together."""
    assert "rank 0 of 1: False at step 20: " in alone
    told = re.findall(r"rank (\d) of 2: (\w+) at step (\d+): ", together)
    assert {rank for rank, _, _ in told} == {"0", "1"}, together
    assert {stopped for _, stopped, _ in told} == {"True"}
    (step,) = {int(step) for _, _, step in told}
    assert 20 < step < 200


# one Ray for both runs: most of the time it takes to start
RAY = """
import contextlib, io, runpy, sys
import ray

script, out = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False)


def run(*options):
    sys.argv, printed = [script, *options, "--out", out], io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


alone = run("--workers", "1", "--steps", "20")
print(alone, "## together", run("--checkpoint", alone.strip().splitlines()[-1]))
"""


@pytest.mark.parametrize("script", NEEDS)
def test_script(script: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDS[script]) is None:
        pytest.skip(f"{NEEDS[script]} is not installed")
    where = tmp_path / "checkpoint"
    alone = torchrun(1, script, "--steps", 20, "--checkpoint", where)
    check(torchrun(2, script, "--checkpoint", where), alone)


def test_lightning_with_sharded_parameters() -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    check(torchrun(2, "with_lightning", "--strategy", "fsdp"))


def test_ray(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    script = str(SCRIPTS / "with_ray.py")
    both = run(["-c", RAY, script, str(tmp_path)], timeout=600)
    alone, together = both.split("## together")
    check(together, alone)
