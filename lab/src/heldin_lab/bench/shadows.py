"""What a user waits for: whole runs until they stop, with shadows and with a validation split.

    heldin-lab bench shadows --out docs/results

Every way trains the same network on the same rows in a loop of one's own (or by `fit()`), until its
rule stops it or the epochs are over, and keeps what its rule says. Measured are the processor's
time with one thread, the peak of memory above what the process had before, the number of steps,
and the loss on new rows of what was kept. The split withholds a fifth of the rows and has a
patience of five epochs; "folds, refit" trains five such models and then one on all rows, for the
mean of their best epochs; "plain" trains to the last epoch. Runs that are in the output are not
repeated.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

from heldin_lab.rules import Auto, EarlyStopping, Folds, Validation

__all__ = ["SETTINGS", "WAYS", "bench_shadows", "run", "table"]

TEST_ROWS, PATIENCE = 2000, 5  # epochs
FEWEST_WINS, SLOWEST = 0.8, 2.0  # limits of general models beside a split, see `table`


class Text(nn.Module):
    """A small transformer on word numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.last(self.encoder(self.words(ids)).mean(1))
        return logits


class LowRank(nn.Module):
    """Adds a trained product of two thin matrices to a frozen weight."""

    def __init__(self, weight: Tensor, rank: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def adapted() -> Text:
    """Freeze a transformer but for its last layer, and adapt its feed-forward layers."""
    model = Text().requires_grad_(False)
    for layer in model.encoder.layers:
        for name in ("linear1", "linear2"):
            linear = getattr(layer, name)
            parametrize.register_parametrization(linear, "weight", LowRank(linear.weight))
    model.last.requires_grad_(True)
    return model


def network(*sizes: int, extra: Callable[[int], list[nn.Module]] = lambda _: []) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), *extra(b), nn.ReLU()]
    return nn.Sequential(*layers[: -1 - len(extra(1))])


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 4),
    )


def vectors(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four classes by a noisy linear map."""
    x = torch.randn(n, 20, generator=generator)
    return x, _classes(x, generator)


def pictures(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four classes by the brightness of four quarters."""
    x = torch.randn(n, 1, 16, 16, generator=generator)
    return x, _classes(F.avg_pool2d(x, 8).flatten(1) * 8, generator)


def texts(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four classes by how often some words occur."""
    x = torch.randint(500, (n, 24), generator=generator)
    counts = torch.stack([(x % 20 == k).sum(1) for k in range(4)], 1).float()
    return x, _classes(2 * counts, generator)


def _classes(features: Tensor, generator: torch.Generator) -> Tensor:
    weights = torch.randn(features.shape[1], 4, generator=torch.Generator().manual_seed(0))
    scores = features @ weights
    noise = torch.randn(scores.shape, generator=generator) * scores.std()
    return (scores + noise).argmax(1)


@dataclass(frozen=True)
class Setting:
    model: Callable[[], nn.Module]
    rows_of: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    rows: int
    batch: int = 32
    epochs: int = 100
    fits: bool = False  # by fit() in place of a loop
    rate: float = 3e-3
    limit: str = "split"  # which the time of auto is compared with, see `table`


def _table_network(extra: Callable[[int], list[nn.Module]] = lambda _: []) -> Any:
    return lambda: network(20, 64, 64, 4, extra=extra)


SETTINGS = {
    "table, 200 rows": Setting(_table_network(), vectors, 200, limit="own loop"),
    "table, 200 rows, fit()": Setting(_table_network(), vectors, 200, fits=True, limit="fit"),
    "table, 200 rows, Dropout": Setting(
        _table_network(lambda _: [nn.Dropout(0.2)]), vectors, 200, limit="own loop"
    ),
    "table, 200 rows, BatchNorm": Setting(
        _table_network(lambda b: [nn.BatchNorm1d(b)]), vectors, 200, limit="own loop"
    ),
    "table, 20,000 rows": Setting(
        lambda: network(20, 256, 256, 4), vectors, 20_000, batch=256, epochs=20, rate=1e-3
    ),
    "CNN, 500 images": Setting(images, pictures, 500, epochs=40),
    "CNN, 500 images, fit()": Setting(images, pictures, 500, epochs=40, fits=True),
    "transformer, 500 texts": Setting(Text, texts, 500, epochs=20, rate=1e-3),
    "transformer, 500 texts, low rank": Setting(adapted, texts, 500, epochs=20, rate=3e-3),
}


@dataclass(frozen=True)
class Outcome:
    seconds: float
    steps: int
    test_loss: float
    megabytes: float = math.nan


WAYS: dict[str, Any] = {
    "plain": None,
    "split": None,
    "folds, refit": None,
    "auto": Auto(),
    "light": Folds(shadows=3, rows=0.25),
    "one shadow": Folds(shadows=1),
    "five folds": Folds(),
}
DEFAULT = ("split", "auto", "folds, refit", "plain")


def run(setting: Setting, way: str, seed: int) -> Outcome:
    """Train until the rule stops; the loss is of what is kept."""
    generator = torch.Generator().manual_seed(seed)
    rows = setting.rows_of(setting.rows + TEST_ROWS, generator)
    test = tuple(t[setting.rows :] for t in rows)
    rows = rows[0][: setting.rows], rows[1][: setting.rows]
    torch.manual_seed(seed)
    start = time.process_time()
    if way == "plain":
        model, steps, _ = _plain(setting, rows, setting.epochs)
    elif way == "split":
        model, steps, _ = _split(setting, rows, slice(0, setting.rows // 5))
    elif way == "folds, refit":
        folds = [slice(i * setting.rows // 5, (i + 1) * setting.rows // 5) for i in range(5)]
        trained = [_split(setting, rows, fold) for fold in folds]
        best = round(statistics.mean(epochs for _, _, epochs in trained))
        model, steps, _ = _plain(setting, rows, best)
        steps += sum(each for _, each, _ in trained)
    else:
        model, steps = _shadows(setting, rows, WAYS[way], seed)
    seconds = time.process_time() - start
    model.eval()
    with torch.no_grad():
        loss = float(F.cross_entropy(model(test[0]), test[1]))
    return Outcome(seconds, steps, loss)


def _made(setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = setting.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.Adam(trained, lr=setting.rate)


def _epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> int:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return len(loader)


def _plain(
    setting: Setting, rows: tuple[Tensor, Tensor], epochs: int
) -> tuple[nn.Module, int, int]:
    model, optimizer = _made(setting)
    loader = DataLoader(TensorDataset(*rows), setting.batch, shuffle=True)
    return model, sum(_epoch(model, optimizer, loader) for _ in range(epochs)), epochs


def _split(
    setting: Setting, rows: tuple[Tensor, Tensor], held: slice
) -> tuple[nn.Module, int, int]:
    """Return the model, the steps that it took, and its best epoch."""
    model, optimizer = _made(setting)
    seen = torch.ones(setting.rows, dtype=torch.bool)
    seen[held] = False
    data = TensorDataset(*(t[seen] for t in rows))
    loader = DataLoader(data, setting.batch, shuffle=True)
    rule = Validation(data=tuple(t[held] for t in rows))
    stopping = EarlyStopping(model, optimizer, F.cross_entropy, rule=rule, patience=PATIENCE)
    steps = sum(_epoch(model, optimizer, loader) for _ in stopping.epochs(setting.epochs))
    return model, steps, round((stopping.best_step or 0) / len(loader))


def _shadows(
    setting: Setting, rows: tuple[Tensor, Tensor], rule: Any, seed: int
) -> tuple[nn.Module, int]:
    model, optimizer = _made(setting)
    loader = DataLoader(TensorDataset(*rows), setting.batch, shuffle=True)
    data: Any = rows if setting.fits else loader
    stopping = EarlyStopping(model, optimizer, F.cross_entropy, data, rule, seed=seed)
    if setting.fits:
        stopping.fit(setting.batch, setting.epochs)
    else:
        for _ in stopping.epochs(setting.epochs):
            _epoch(model, optimizer, loader)
    return model, stopping._step


# -- all of them, each in a process of its own


def bench_shadows(
    out: Path,
    ways: tuple[str, ...] = DEFAULT,
    rounds: int = 3,
    only: str = "",
    tell: Callable[[str], None] = print,
) -> str:
    """Run what is missing in `shadows.json`; write it and the table; return the table.

    Args:
        out: folder of both files.
        ways: names of `WAYS`.
        rounds: number of seeds.
        only: settings whose name contains this.
        tell: is told of every run.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "shadows.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    names = [name for name in SETTINGS if only in name]
    for seed, name, way in itertools.product(range(rounds), names, ways):
        key = f"{name} | {way} | {seed}"
        if key not in results:
            results[key] = asdict(_in_a_process(name, way, seed))
            tell(f"{key}: {results[key]}")
            path.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    (out / "shadows.md").write_text(text)
    (out / "shadows-limits.md").write_text(text.partition("## Limits\n\n")[2])
    (out / "shadows-split.md").write_text(beside_split(results))
    return text


def _in_a_process(name: str, way: str, seed: int) -> Outcome:
    """Fork, so that the peak of memory is that of one run."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_measured, (name, way, seed))


def _measured(name: str, way: str, seed: int) -> Outcome:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = run(SETTINGS[name], way, seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Outcome(outcome.seconds, outcome.steps, outcome.test_loss, (peak - before) / 1024)


def table(results: dict[str, Any]) -> str:
    """Return a page of medians, and which limits were reached.

    >>> one = {"seconds": 2.0, "steps": 50, "test_loss": 0.5, "megabytes": 1.0}
    >>> other = {"seconds": 1.0, "steps": 50, "test_loss": 0.4, "megabytes": 3.0}
    >>> results = {"CNN, 500 images | split | 0": one, "CNN, 500 images | auto | 0": other}
    >>> print(table(results).splitlines()[-1][-26:])
    | 0.50, 100 % | reached |
    """
    runs = _by_setting(results)
    lines = [
        "# Whole runs until they stop",
        "",
        f"By `heldin-lab bench shadows`, torch {torch.__version__}, {platform.machine()}, one "
        "thread, processor time; medians over seeds. Time and test loss are ratios to the split "
        "with a patience of five epochs, on the same rows.",
        "",
        "| | way | runs | time | test loss | lower in | steps | memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, ways in runs.items():
        for way in (way for way in WAYS if way in ways):
            lines.append(_line(name, way, ways))
    lines += ["", "## Limits", "", "| | limit | measured | |", "|---|---|---|---|"]
    lines += [line for name, ways in runs.items() for line in _limits(name, ways)]
    return "\n".join(lines) + "\n"


def beside_split(results: dict[str, Any]) -> str:
    """Return the time of each way until it stops, in times of the split.

    >>> one = {"seconds": 2.0, "steps": 50, "test_loss": 0.5, "megabytes": 1.0}
    >>> results = {f"CNN, 500 images | {way} | 0": one for way in ("split", "auto")}
    >>> print(beside_split(results).splitlines()[-1])
    | CNN, 500 images | - | 1.0 |
    """
    lines = ["| | five folds, then refit | heldin |", "|---|---:|---:|"]
    for name, ways in _by_setting(results).items():
        cells = []
        for way in ("folds, refit", "auto"):
            ratios = [a.seconds / b.seconds for a, b in _pairs(ways, way, "split")]
            cells.append(f"{statistics.median(ratios):.1f}" if ratios else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _by_setting(results: dict[str, Any]) -> dict[str, dict[str, dict[int, Outcome]]]:
    runs: dict[str, dict[str, dict[int, Outcome]]] = {}
    for key, values in results.items():
        name, way, seed = key.split(" | ")
        runs.setdefault(name, {}).setdefault(way, {})[int(seed)] = Outcome(**values)
    return runs


def _pairs(ways: dict[str, dict[int, Outcome]], way: str, other: str) -> list[Any]:
    seeds = sorted(ways.get(way, {}).keys() & ways.get(other, {}).keys())
    return [(ways[way][seed], ways[other][seed]) for seed in seeds]


def _line(name: str, way: str, ways: dict[str, dict[int, Outcome]]) -> str:
    own, pairs = list(ways[way].values()), _pairs(ways, way, "split")
    times = statistics.median(a.seconds / b.seconds for a, b in pairs)
    losses = statistics.median(a.test_loss / b.test_loss for a, b in pairs)
    wins = sum(a.test_loss < b.test_loss for a, b in pairs)
    steps = statistics.median(each.steps for each in own)
    memory = statistics.median(each.megabytes for each in own)
    lower = "" if way == "split" else f"{wins} of {len(pairs)}"
    cells = (name, way, len(own), f"{times:.2f}", f"{losses:.3f}", lower, f"{steps:.0f}")
    return "| " + " | ".join(map(str, cells)) + f" | {memory:.0f} |"


def _limits(name: str, ways: dict[str, dict[int, Outcome]]) -> Iterator[str]:
    """Yield the line of a setting: the time of auto, beside the split or a plain run as long."""
    kind = SETTINGS[name].limit
    if kind == "split":
        pairs = _pairs(ways, "auto", "split")
        if not pairs:
            return
        times = statistics.median(a.seconds / b.seconds for a, b in pairs)
        wins = sum(a.test_loss < b.test_loss for a, b in pairs) / len(pairs)
        limit = f"at most {SLOWEST} of the split's time, lower loss in {FEWEST_WINS:.0%}"
        shown = f"{times:.2f}, {wins:.0%}".replace("%", " %")
        reached = times <= SLOWEST and wins >= FEWEST_WINS
    else:
        pairs = _pairs(ways, "auto", "plain")
        if not pairs:
            return
        per_step = [(a.seconds / a.steps) / (b.seconds / b.steps) for a, b in pairs]
        most = {"fit": 1.0, "own loop": 2.0}[kind]
        limit = f"at most {most} of a plain run of as many steps"
        shown, reached = f"{statistics.median(per_step):.2f}", statistics.median(per_step) <= most
    limit = limit.replace("80%", "80 %")
    yield f"| {name} | {limit} | {shown} | {'reached' if reached else '**missed**'} |"
