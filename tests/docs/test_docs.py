"""Every Python block in the guides runs, unless it is marked as an illustration.

Those of the README are run by test_pages.py.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

import heldin
from tests.support import plain
from tests.support.loops import close

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^(?P<indent> *)```python(?P<mark>[^\n]*)\n(?P<code>.*?)^ *```", re.M | re.S)
TAB = re.compile(r'^=== "(?P<label>[^"]*)"$', re.M)
FRAMEWORKS = {
    "Accelerate": "accelerate",
    "Fabric": "fabric",
    "Hugging Face": "transformers",
    "Ignite": "ignite",
    "Keras": "keras",
    "Lightning": "lightning",
    "fastai": "fastai",
    "skorch": "skorch",
}
ANSWERS = (  # pages whose blocks run as they stand, when pasted into an empty file
    "augmentation", "choosing", "coming-from", "cost", "cross-validation", "groups-time-imbalance",
    "how-many-epochs", "k-fold-lightning", "lora", "metrics", "no-validation-set",
    "per-sample-gradients", "schedules", "search", "shadows", "skorch-grid-search", "time-series",
    "wrong-labels",
)  # fmt: skip
FOREIGN = ("frameworks", "k-fold-lightning", "skorch-grid-search")  # pages that import frameworks
PARTS = [pytest.param(p, marks=plain.foreign if p.stem in FOREIGN else ()) for p in PAGES]


def surroundings() -> dict[str, Any]:
    """What the pages take for granted: a model, data, a loss and an optimiser."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(40, 5)
    y = (x[:, 0] > 0).long()
    data = torch.utils.data.TensorDataset(x, y)
    return {
        "torch": torch,
        "nn": nn,
        "heldin": heldin,
        "model": model,
        "x": x,
        "y": y,
        "data": data,
        "loader": torch.utils.data.DataLoader(data, batch_size=10),
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


def tab(text: str, block: re.Match[str]) -> str:
    """The label of the tab in which a block is."""
    labels = [m["label"] for m in TAB.finditer(text, 0, block.start())]
    return labels[-1] if block["indent"] and labels else ""


def importable(name: str) -> bool:
    try:
        importlib.import_module(f"heldin.{name}")
    except ImportError:
        return False
    return True


def missing_for(code: str) -> list[str]:
    """Optional packages that a block names and that are not installed."""
    optional = ("lightning", "matplotlib", "optuna", "pandas", "sklearn", "skorch", "transformers")
    return [name for name in optional if name in code and find_spec(name) is None]


@pytest.mark.parametrize("page", PARTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [m for m in BLOCK.finditer(page.read_text()) if "illustration" not in m["mark"]]
    blocks = [m for m in found if not missing_for(m["code"])]
    monkeypatch.chdir(tmp_path)
    start = surroundings if page.stem not in ANSWERS else lambda: {"__name__": "__main__"}
    spaces: defaultdict[str, dict[str, Any]] = defaultdict(start)  # one for each tab
    skipped: list[str] = []
    lost = sorted({name for m in found for name in missing_for(m["code"])})
    try:
        for block in blocks:
            label = tab(page.read_text(), block)
            needed = FRAMEWORKS.get(label)
            if needed is None or importable(needed):
                exec(compile(dedent(block["code"]), str(page), "exec"), spaces[label])
            else:
                skipped.append(needed)
    except (NameError, AttributeError) as error:  # of what a block that was left out has made
        if lost:
            pytest.skip(f"not installed: {', '.join(lost)}; the blocks before {error.name} ran")
        raise
    finally:
        values = [value for space in spaces.values() for value in space.values()]
        for value in [value for value in values if not isinstance(value, type)]:
            if hasattr(value, "should_stop") or isinstance(value, heldin.ElementwiseStopping):
                close(value)
    if skipped:
        pytest.skip(f"not installed: {', '.join(dict.fromkeys(skipped))}; the rest ran")


def test_every_test_that_the_guarantees_name_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`((?:lab/)?tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) == text.count("::") > 40
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), f"{file}::{name}"


def test_sklearn_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    space: dict[str, Any] = {"__name__": "sklearn_estimator"}
    source = (ROOT / "examples" / "sklearn_estimator.py").read_text()
    assert source.count("MLPClassifier(random_state=seed)") == 1
    quick = source.replace("random_state=seed)", "random_state=seed, hidden_layer_sizes=(5,))")
    exec(compile(quick, "sklearn_estimator.py", "exec"), space)
    space["main"](seeds=1)
    assert "what heldin had estimated" in capsys.readouterr().out
