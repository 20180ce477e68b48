"""How many models each library gives the right second moment for, and how the others end.

Runs every case of `tests/support/cases/` in float64 against one backward pass per sample:

    python -m heldin_lab.bench.coverage --out out/coverage        # `make peers` installs the others

exact    all parameters, relative error below 1e-6
wrong    numbers for all parameters, and at least one of them is wrong, without a word
missing  no numbers for some parameters, without a word
refused  an exception
noise    wrong, but the model draws random numbers (dropout) and the library others than the truth
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import heldin
from tests.support.cases import CASES, Case
from tests.support.truth import truth

Squares = dict[str, Tensor]


class NotInstalled(Exception):
    pass


def ours(case: Case, model: nn.Module, batch: tuple[Any, ...]) -> Squares:
    with heldin.observe(model, **case.options) as seen:
        case.losses(model, *batch).sum().backward()
    return {name: moments.squares for name, moments in seen.items()}


def backpack(case: Case, model: nn.Module, batch: tuple[Any, ...]) -> Squares:
    try:
        import backpack as library
        from backpack.extensions import SumGradSquared
    except ImportError:
        raise NotInstalled from None
    library.extend(model)
    with library.backpack(SumGradSquared()):
        case.losses(model, *batch).sum().backward()
    named = model.named_parameters()
    return {n: p.sum_grad_squared for n, p in named if hasattr(p, "sum_grad_squared")}


def opacus(case: Case, model: nn.Module, batch: tuple[Any, ...]) -> Squares:
    try:
        from opacus import GradSampleModule
    except ImportError:
        raise NotInstalled from None
    first = case.options.get("batch_dim", 0) == 0
    twin = GradSampleModule(model, batch_first=first, loss_reduction="sum")
    case.losses(twin, *batch).sum().backward()
    return {
        name.removeprefix("_module."): p.grad_sample.square().sum(0)
        for name, p in twin.named_parameters()
        if getattr(p, "grad_sample", None) is not None
    }


def functional(case: Case, model: nn.Module, batch: tuple[Any, ...]) -> Squares:
    from torch.func import functional_call, grad, vmap

    if not all(isinstance(part, Tensor) for part in batch):
        raise NotImplementedError("inputs that are not tensors")
    dim = case.options.get("batch_dim", 0)
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    buffers = dict(model.named_buffers())

    def loss(weights: Squares, *one: Tensor) -> Tensor:
        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(model, {**weights, **buffers}, args, kwargs)

        losses: Tensor = case.losses(call, *(part.unsqueeze(dim) for part in one))
        return losses.sum()

    each = vmap(grad(loss), in_dims=(None, *[dim] * len(batch)), randomness="different")
    return {name: g.square().sum(0) for name, g in each(params, *batch).items()}


LIBRARIES: dict[str, Callable[[Case, nn.Module, tuple[Any, ...]], Squares]] = {
    "heldin": ours,
    "BackPACK": backpack,
    "Opacus": opacus,
    "torch.func": functional,
}


def outcome(found: Squares, expected: dict[str, tuple[Tensor, Tensor]]) -> str:
    scale = max(float(second.norm()) for _, second in expected.values())
    for name, (_, second) in expected.items():
        if name not in found:
            return "missing"
        if found[name].shape != second.shape:
            return "wrong"
        if float((found[name] - second).norm()) > 1e-6 * (float(second.norm()) + 1e-6 * scale):
            return "wrong"
    return "exact"


def run(case: Case, library: str) -> tuple[str, str]:
    """The outcome, and the first line of what was said."""
    torch.manual_seed(len(case.name))
    model = case.make()
    batch = case.batch()
    state = torch.get_rng_state()
    expected = truth(model, case.losses(model, *batch))
    torch.set_rng_state(state)  # the same dropout masks
    twin = copy.deepcopy(model)
    try:
        found = LIBRARIES[library](case, twin, batch)
        result = outcome(found, expected)
        if result == "wrong":  # a fair chance: does the truth itself depend on random numbers?
            other = truth(model, case.losses(model, *batch))
            again = {name: second for name, (_, second) in other.items()}
            result = "wrong" if outcome(again, expected) == "exact" else "noise"
        return result, ""
    except NotInstalled:
        raise
    except Exception as error:
        return (
            "refused",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/coverage", help="folder for table and JSON")
    parser.add_argument("--cases", type=int, help="only so many")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    cases = [case for case in CASES if case.exact][: options.cases]
    results: dict[str, dict[str, tuple[str, str]]] = {}
    for library in LIBRARIES:
        try:
            results[library] = {case.name: run(case, library) for case in cases}
        except NotInstalled:
            print(f"{library} is not installed: left out", file=sys.stderr)
        print(f"{library}: done", file=sys.stderr)
    columns = ("exact", "refused", "missing", "wrong", "noise")
    text = f"| of {len(cases)} models | " + " | ".join(columns) + " |\n" + "|---" * 6 + "|\n"
    for library, each in results.items():
        counts = Counter(result for result, _ in each.values())
        text += f"| {library} | " + " | ".join(str(counts[c]) for c in columns) + " |\n"
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "coverage.md").write_text(text)
    (out / "coverage.json").write_text(json.dumps(results, indent=1))
    print(text, end="")


if __name__ == "__main__":
    main()
