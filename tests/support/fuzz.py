"""Many random models against one backward pass per sample: python -m tests.support.fuzz 2000.

Prints how many were exact, how many were refused and why, and every one that was wrong; fails if
one was.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch

import heldin
from tests.support import inside
from tests.support.grammar import Net
from tests.support.truth import error, truth


def check(seed: int) -> str:
    """ "exact", or why it was refused; AssertionError if something is wrong."""
    torch.manual_seed(seed)
    m = 2 + seed % 3
    net = Net(seed, m)
    exact = heldin.observe(net)
    sampled = heldin.observe(net, estimator="sampled", coordinates=1 + seed % 4)
    try:
        with exact, sampled:
            for step in range(3):
                exact.clear()
                sampled.clear()
                net.zero_grad()
                x = net.batch()
                state = torch.get_rng_state()
                losses = net.losses(x)
                if losses.dim() == 0:  # only a mean loss: the same pass again, for its terms
                    losses.backward()
                    after = torch.get_rng_state()
                    net.output = "rows"
                    torch.set_rng_state(state)
                    with heldin_off(exact, sampled):
                        expected = truth(net, net.losses(x) / m)
                    net.output = "loss"
                    torch.set_rng_state(after)
                else:
                    expected = truth(net, losses)
                    losses.sum().backward()
                worst = error(exact, expected, 1e-12)
                assert max(worst.values()) < 1e-8, f"seed {seed}, step {step}, {net.names}: {worst}"
                for name, part in sampled.items():
                    whole, where = exact[name], ()
                    if part.total.shape != whole.total.shape:
                        where = inside.block(sampled, name)[0]
                    close = torch.allclose(part.squares, whole.squares[where], atol=1e-9)
                    assert close, f"seed {seed}: sampled {name} {net.names}"
    except heldin.HeldinError as refusal:
        return f"refused: {str(refusal)[:90]}"
    return "exact"


class heldin_off:
    """Pause observations for a moment, and keep what they have seen."""

    def __init__(self, *observations: heldin.Observation) -> None:
        self.observations = observations

    def __enter__(self) -> None:
        for each in self.observations:
            each.pause()

    def __exit__(self, *_: object) -> None:
        for each in self.observations:
            each.resume()


def main(count: int, start: int = 0, out: str | None = None) -> int:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    found: Counter[str] = Counter()
    for seed in range(start, start + count):
        try:
            found[check(seed)] += 1
        except AssertionError as wrong:
            found["WRONG"] += 1
            print(f"\n{wrong}")
        except Exception as failure:
            found[f"error: {type(failure).__name__}: {str(failure)[:80]}"] += 1
            print(f"\nseed {seed}: {type(failure).__name__}: {failure}")
        if seed % 20 == 0:
            print(f"\r{seed - start + 1} of {count}", end="", flush=True)
    print()
    for what, number in found.most_common():
        print(f"{number:6d}  {what}")
    if out:
        Path(out).write_text(markdown(found), encoding="utf-8")
    fine = [number for what, number in found.items() if what.startswith(("exact", "refused"))]
    return found.total() - sum(fine)


def markdown(found: Counter[str]) -> str:
    """The counts as a table for the documentation."""
    refused = {what: n for what, n in found.items() if what.startswith("refused")}
    wrong = found.total() - found["exact"] - sum(refused.values())
    rows = {"random models": found.total(), "exact": found["exact"], "wrong": wrong}
    rows |= {"refused": sum(refused.values()), **refused}
    lines = [f"| {name} | {number} |" for name, number in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("start", type=int, nargs="?", default=0, help="the first seed")
    parser.add_argument("--out", help="a file for the counts, as a table")
    given = parser.parse_args()
    sys.exit(1 if main(given.count, given.start, given.out) else 0)
