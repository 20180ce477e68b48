"""The paper's experiments: their mathematics, their runs, and the report, in tiny settings."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import heldin
from heldin import HeldinError
from heldin.cli import reproduce as _commands
from heldin.cli.main import main
from heldin.lab.reproduce import EXPERIMENTS, reproduce
from heldin.lab.reproduce import runner as _runner
from heldin.lab.reproduce import tables as _tables
from heldin.lab.reproduce import training as training
from heldin.lab.reproduce.experiment import Claim
from heldin.lab.reproduce.experiments import greedy, quadratic, toy, wdbc
from heldin.lab.reproduce.report import write_docs
from heldin.lab.reproduce.run import Run
from tests.support.small_data import TINY, data

for package in ("joblib", "matplotlib", "pandas", "sklearn", "rich"):
    pytest.importorskip(package)

__all__ = ["data"]

NAMES = list(EXPERIMENTS)
NO_DATA = [name for name, e in EXPERIMENTS.items() if e.data is None]


def settings_of(name: str) -> Any:
    return replace(EXPERIMENTS[name].settings["quick"], **TINY[name])


def rows_of(name: str, part: dict[str, Any], **options: Any) -> list[dict[str, float]]:
    run = Run(0, settings_of(name), part, **options)
    EXPERIMENTS[name].run(run, **part)
    return run.rows


def same(first: list[dict[str, float]], second: list[dict[str, float]]) -> bool:
    """Equal to the last bit, nan being itself."""
    return json.dumps(first) == json.dumps(second)


def numbers(table: Any) -> Any:
    """A run's table without the columns that tell when it was made and how long it took."""
    return table.drop(columns=["seconds", "cpu_seconds", "date"])


# --- the mathematics, against slow twins -----------------------------------------------------


def test_quadratic_is_eq_10() -> None:
    """The rule's criterion is 1 - mean (B (w + zeta))_k^2 / diag(B Lambda B^T)_k."""
    s = replace(quadratic.Settings(), dimension=7, steps=5, rate=0.3)
    b, zeta, start = quadratic.problem(3, "exponential", s)
    run = Run(3, s)
    quadratic.train(run, b, zeta, start)
    error = (b @ (s.noise * torch.eye(7, dtype=torch.float64)) @ b.T).diagonal()
    w = start
    for row in run.rows:
        gradient = b @ (w + zeta)
        assert row["criterion"] == pytest.approx(1 - float((gradient**2 / error).mean()), rel=1e-4)
        assert row["test_loss"] == pytest.approx(float(0.5 * w @ b @ w), rel=1e-4)
        assert row["train_loss"] == pytest.approx(float(0.5 * (w + zeta) @ gradient), rel=1e-4)
        w = w - s.rate * gradient


@pytest.mark.parametrize("kind", quadratic.SPECTRA)
def test_quadratic_spectra(kind: str) -> None:
    s = replace(quadratic.Settings(), dimension=50)
    b, zeta, other = quadratic.problem(0, kind, s)
    found = torch.linalg.eigvalsh(b).flip(0)
    torch.testing.assert_close(found, quadratic.spectrum(kind, 50).sort(descending=True).values)
    assert not torch.equal(zeta, other)
    again = quadratic.problem(0, kind, s)
    assert torch.equal(b, again[0])


def test_random_rotations_are_haar() -> None:
    """Their first entries have mean 0 and variance 1/D; QR alone gives a fixed sign."""
    s = replace(quadratic.Settings(), dimension=2)
    values = []
    for seed in range(400):  # B = R diag(1, 0.01) R^T: entry 12 is 0.99 cos sin of a random angle
        b, _, _ = quadratic.problem(seed, "uniform", s)
        values.append(float(b[0, 1]))
    found = torch.tensor(values)
    assert abs(float(found.mean())) < 0.06
    assert float(found.var()) == pytest.approx(0.99**2 / 8, rel=0.25)


def test_toy_features_and_criterion() -> None:
    s = settings_of("toy")
    x, y = toy.data(0, s)[0]
    found = toy.features(x, s)
    for row, value in zip(found, x.tolist(), strict=True):
        angles = [s.frequency * j * value for j in range(1, s.pairs + 1)]
        waves = [f(a) for a in angles for f in (math.sin, math.cos)]
        torch.testing.assert_close(row, torch.tensor([1.0, value, *waves]), atol=1e-5, rtol=0)
    first = rows_of("toy", {})[0]
    each = -y[:, None].double() * found.double()  # gradients of the samples at w = 0
    ratio = len(y) * each.mean(0) ** 2 / each.var(0)
    assert first["criterion"] == pytest.approx(1 - float(ratio.mean()), rel=1e-4)
    losses = 0.5 * y.double() ** 2
    assert first["train_error"] == pytest.approx(float(losses.std()) / len(y) ** 0.5, rel=1e-5)


def test_wdbc_expansion() -> None:
    from sklearn.preprocessing import PolynomialFeatures

    x = torch.randn(5, 30, dtype=torch.float64)
    twin = PolynomialFeatures(2, include_bias=False).fit_transform(x.numpy())
    assert wdbc.expand(x).shape[1] + 1 == 496
    torch.testing.assert_close(wdbc.expand(x), torch.from_numpy(twin))


def test_perceptron() -> None:
    model = training.perceptron([784, 300, 10], seed=1)
    assert model[0].weight.std().item() == pytest.approx((2 / 784) ** 0.5, rel=0.02)
    assert model[2].bias.abs().sum() == 0
    again = training.perceptron([784, 300, 10], seed=1)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


@given(
    rows=st.integers(1, 50),
    size=st.integers(1, 20),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_batches_are_epochs(rows: int, size: int, seed: int, epoch: int) -> None:
    per_epoch = max(1, rows // size)
    found = [
        training.batch(1 + epoch * per_epoch + i, rows, size, seed).tolist()
        for i in range(per_epoch)
    ]
    flat = [place for part in found for place in part]
    assert len(set(flat)) == len(flat) == per_epoch * min(size, rows)
    assert all(0 <= place < rows for place in flat)


def test_mean_loss_in_pieces() -> None:
    model = torch.nn.Linear(3, 4)
    x, y = torch.randn(10, 3), torch.arange(10) % 4
    found = training.mean_loss(model, lambda places: (x[places], y[places]), 10, size=3)
    assert found == pytest.approx(torch.nn.functional.cross_entropy(model(x), y).item())


def test_full_preset_has_the_papers_sizes() -> None:
    full = {name: e.settings["full"] for name, e in EXPERIMENTS.items()}
    sizes = [784, 2500, 2000, 1500, 1000, 500, 10]
    for name in ("mnist-gd", "mnist-sgd", "greedy", "rmsprop"):
        s = full[name]
        assert list(s.widths) == sizes
        assert (s.training, s.validation, s.test) == (40_000, 10_000, 10_000)
    assert full["mnist-gd"].batch is None
    assert full["mnist-gd"].rates == (0.01,)
    for name in ("mnist-sgd", "greedy"):
        assert (full[name].batch, full[name].rates) == (128, (0.003, 0.005, 0.01))
    assert (full["rmsprop"].batch, full["rmsprop"].smoothing) == (120, 0.99)
    s = full["sector"]
    assert (s.training, s.training // 5, s.test, s.steps) == (6412, 1282, 3207, 250_000)
    assert (s.batch, s.rates, s.official) == (128, (0.03, 0.003), True)
    assert s.features * 105 + 105 == pytest.approx(5.8e6, rel=0.01)
    assert (s.features + 1) * s.hidden + 105 * (s.hidden + 1) == pytest.approx(11.1e6, rel=0.01)
    assert (full["wdbc"].test, full["wdbc"].validation) == (369, 60)
    assert full["quadratic"].dimension == 1000
    assert full["toy"].training == 20
    # the warm-up of the greedy rule, in which no weight can stop
    assert full["greedy"].start * full["greedy"].smoothing ** (full["greedy"].warmup - 1) > 1


# --- claims ----------------------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.floats(-5, 5), st.just(math.nan)), min_size=1, max_size=9),
    st.floats(-5, 5),
    st.floats(-5, 5),
)
def test_verdicts(values: list[float], above: float, most: float) -> None:
    claim = Claim("text", "paper", lambda tables: tables["x"], above=above, most=most)
    found = claim.judge({seed: {"x": value} for seed, value in enumerate(values)})
    held = 0
    for value in values:
        if not math.isnan(value) and value > above and value <= most:
            held += 1
    assert found.held == held
    assert found.confirmed == (held > len(values) / 2)
    lost = sum(map(math.isnan, values))
    assert (f"no stop with {lost} of {len(values)} seeds" in found.ours) == (lost > 0)


def test_conditions_in_words() -> None:
    def made(**options: float) -> str:
        return Claim("", "", lambda tables: 0.0, **options).condition

    assert made(most=1.1) == "at most 1.10"
    assert made(above=0.35, most=0.65) == "above 0.35, at most 0.65"
    assert made() == "any number"


def _table(**columns: list[float]) -> Any:
    import pandas

    return pandas.DataFrame({"step": range(1, 1 + len(next(iter(columns.values())))), **columns})


@pytest.mark.parametrize(
    ("stop", "held", "end", "expected"),
    [
        (2, 0.5, 0.4, [True, True, True, True, True]),  # 0.41 at the stop
        (1, 0.5, 0.4, [False, False, True, True, True]),  # 0.9: too early
        (3, 0.5, 0.4, [True, True, True, True, False]),  # where it is least: not early
        (None, 0.5, 0.4, [False, False, True, True, False]),  # it did not stop
        (2, 0.3, 0.4, [True, False, True, False, True]),  # validation reaches less
        (2, 0.5, 0.6, [True, True, False, True, True]),  # the validation loss turns
    ],
)
def test_claims_of_wdbc(stop: int | None, held: float, end: float, expected: list[bool]) -> None:
    marks = [float(step == stop) for step in (1, 2, 3)]
    tables = {
        "evidence": _table(test_loss=[0.9, 0.41, 0.4], stop=marks),
        "validation": _table(test_loss=[0.9, held, 0.7], validation_loss=[0.8, 0.5, end]),
    }
    claims = EXPERIMENTS["wdbc"].claims(EXPERIMENTS["wdbc"].settings["quick"])
    assert [claim.judge({0: tables}).confirmed for claim in claims] == expected


def test_claims_of_greedy_and_rmsprop_look_at_the_right_rows() -> None:
    s = replace(greedy.Settings(), rates=(0.1,), smoothing=0.5, start=4.0)
    assert s.warmup == 2
    own = _table(
        off=[0.0, 0.0, 0.12, 0.6],
        test_loss=[2.0, 1.0, 0.52, 0.6],
        **{"off/0.weight": [0, 0, 0.1, 0.5], "off/0.bias": [0, 0, 1, 0.8]},
    )
    plain = _table(test_loss=[2.0, 1.0, 0.5, 0.7])
    tables = {"rate 0.1, greedy": own, "rate 0.1, plain": plain}
    found = [claim.value(tables) for claim in greedy._claims(s, 0.1)]
    # least test loss at step 3: nothing grows between the warm-up and it
    assert found == pytest.approx([0.12, 0.6, 1.04, math.nan], nan_ok=True)
    assert greedy.largest(s).value(tables) == pytest.approx(0.8)
    later = _table(off=[0.0, 0.0, 0.1, 0.2, 0.5], test_loss=[2.0, 1.0, 0.6, 0.5, 0.7])
    assert greedy.acceleration(later, 2) == pytest.approx(3.0)
    rms = EXPERIMENTS["rmsprop"]
    settings = replace(rms.settings["quick"], smoothing=0.5)
    tables = {
        "SGD": _table(test_loss=[1.0, 0.5], train_loss=[1.0, 0.1]),
        "SGD with stopping": _table(test_loss=[1.0, 0.51], train_loss=[1.0, 0.2], off=[0.3, 0.28]),
        "SGD with stopping, 0/0 left out": _table(
            test_loss=[1.0, 0.5], train_loss=[1.0, 0.1], off=[0.0, 0.5]
        ),
        "RMSprop": _table(**{"below 1e-05": [0.0, 0.01]}),
    }
    values = [claim.value(tables) for claim in rms.claims(settings)]
    assert values == pytest.approx([0.28, 0.28, 0.02, 1.02, 2, 0.5, 0.5, 0, 1, 1, 0.01])


# --- runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All experiments in tiny settings: the data folder, the report's and what came."""
    with pytest.MonkeyPatch.context() as patch:
        folder = data.__wrapped__(tmp_path_factory.mktemp("tiny"), patch)  # type: ignore[attr-defined]
        out = folder.parent / "report"
        heard: list[Any] = []
        found = reproduce(
            out=out, data=folder, changes=TINY, device="cpu", jobs=1, watch=heard.append
        )
        yield folder, out, found, heard


def test_all_experiments_run(everything: Any) -> None:
    _, out, found, heard = everything
    assert [o.experiment.name for o in found.outcomes] == NAMES
    assert not found.missing
    for outcome in found.outcomes:
        e = outcome.experiment
        for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            assert (out / "figures" / f"{e.name}.{kind}").read_bytes().startswith(start)
        assert len(outcome.verdicts) == len(e.claims(outcome.settings)) > 0
        for verdict in outcome.verdicts:
            assert set(verdict.values) == set(range(outcome.settings.seeds))
    assert not list((out / "checkpoints").iterdir())
    totals = {name: total for name, (_, total) in heard[-1].items()}
    assert totals == {name: done for name, (done, _) in heard[-1].items()}
    assert totals["wdbc"] == 2 * 2 * 60
    assert found.command == "heldin reproduce all --preset quick"


def test_tables_are_tidy(everything: Any) -> None:
    import pandas

    _, out, found, _ = everything
    paths = sorted((out / "runs").glob("*.csv"))
    runs = sum(len(o.experiment.parts(o.settings)) * o.settings.seeds for o in found.outcomes)
    assert len(paths) == runs
    whole = pandas.concat(map(_tables.read, paths))
    assert (whole.groupby(["experiment", "part", "seed"]).step.apply(lambda s: s.is_unique)).all()
    for column in (
        "preset",
        "seconds",
        "cpu_seconds",
        "device",
        "heldin",
        "torch",
        "python",
        "settings",
    ):
        assert whole[column].notna().all()
    assert (whole.torch == torch.__version__).all()
    settings = json.loads(whole[whole.experiment == "sector"].settings.iloc[0])
    assert settings["features"] == 30
    assert settings["rates"] == [1.0, 0.1]


def test_rows_are_at_the_stops(everything: Any) -> None:
    """Whatever the interval of records, there is a row where a rule stops, with a test loss."""
    _, _, found, _ = everything
    stops = 0
    for outcome in found.outcomes:
        for tables in outcome.results.values():
            for part, table in tables.items():
                if "stop" not in table:
                    continue
                assert table.stop.sum() <= 1
                stops += int(table.stop.sum())
                if "criterion" in table and table.stop.any():
                    assert table.criterion[table.stop == 1].iloc[0] > 0, part
                if "validation_loss" in table and outcome.experiment.name != "toy":
                    at = table.validation_loss[table.stop == 1].iloc[0]
                    assert at == table.validation_loss.min()
    assert stops > 10


def test_evidence_trains_on_all_images(data: Path) -> None:
    from heldin.lab.reproduce.experiments import mnist as _mnist

    run = Run(0, settings_of("mnist-sgd"), data=data)
    kept, whole = (_mnist.digits(run, held_out=held) for held in (True, False))
    assert (kept.rows, whole.rows) == (64, 88)
    first, second = kept.train(torch.arange(64))[0], whole.train(torch.arange(88))[0]
    assert torch.equal(first, second[:64])
    assert torch.equal(kept.validation(torch.arange(24))[0], second[64:])
    tests = kept.test(torch.arange(40))[0]
    distances = torch.cdist(tests, second)
    assert distances.min() > 0  # no image is in both


def test_full_batch_is_accumulated(data: Path) -> None:
    """Pieces of any size give the same run."""
    from heldin.lab.reproduce.experiments import mnist as _mnist

    found = []
    for piece in (7, 1000):
        run = Run(0, replace(settings_of("mnist-gd"), piece=piece, steps=8), data=data)
        _mnist.train(run, rate=0.1, method="evidence")
        found.append([row["raw"] for row in run.rows])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_sector_scaling(data: Path) -> None:
    from heldin.lab.reproduce.experiments import sector

    run = Run(0, settings_of("sector"), data=data)
    for held_out, rows in ((True, 48), (False, 60)):
        found = sector.split(run, held_out=held_out)
        x, y = found.train(torch.arange(found.rows))
        assert x.shape == (rows, 30)
        assert x[x != 0].square().mean() == pytest.approx(1.0)
        assert y.shape == (rows,)
    run.settings = replace(run.settings, training=61)
    with pytest.raises(HeldinError, match="61 training and 30 test rows are asked for"):
        sector.split(run, held_out=True)


# --- killed runs -----------------------------------------------------------------------------


class Killed(BaseException):
    """In the place of a kill."""


def _first_parts(name: str) -> list[dict[str, Any]]:
    parts = [dict(p) for p in EXPERIMENTS[name].parts(settings_of(name)).values()]
    return parts if name in ("greedy", "rmsprop", "wdbc", "mnist-gd") else parts[-1:]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_where_it_was(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice, right after a checkpoint and some steps later, it gives the same rows."""
    for i, part in enumerate(_first_parts(name)):
        expected = rows_of(name, part, data=data)
        path = tmp_path / f"{i}.pt"
        seen: list[int] = []
        tick = Run._tick
        for end, pause in ((7, 0.0), (13, 1e9)):  # the second one writes no new checkpoint

            def dies(self: Run, step: int, parts: Any, end: int = end) -> None:
                tick(self, step, parts)
                seen.append(step)
                if step == end:
                    raise Killed

            monkeypatch.setattr(Run, "_tick", dies)
            with pytest.raises(Killed):
                rows_of(name, part, data=data, path=path, pause=pause)
        monkeypatch.setattr(Run, "_tick", tick)
        assert seen == [*range(1, 8), *range(8, 14)]  # the second try began at 8
        assert same(rows_of(name, part, data=data, path=path, pause=1e9), expected)


def test_other_settings_do_not_go_on(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    model = torch.nn.Linear(1, 1)

    def count(seed: int, rate: float) -> list[int]:
        run = Run(seed, toy.Settings(rate=rate), path=path, pause=0.0)
        return list(run.steps(4, model=model))

    assert count(0, 0.1) == [1, 2, 3, 4]
    assert count(0, 0.1) == []
    assert count(0, 0.2) == [1, 2, 3, 4]
    assert count(1, 0.2) == [1, 2, 3, 4]


KILLED = """
import sys
from heldin.lab.reproduce import reproduce
reproduce(["toy", "wdbc"], out=sys.argv[1], jobs=2, pause=0.05, seeds=2, device="cpu",
          changes={"wdbc": {"steps": 600}, "toy": {"steps": 100, "test": 100}})
"""


def test_resume_after_a_real_kill(tmp_path: Path) -> None:
    """Kill the whole process group in the middle; --resume repeats nothing and loses nothing."""
    changes = {"wdbc": {"steps": 600}, "toy": {"steps": 100, "test": 100}}
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], start_new_session=True)
    limit = time.monotonic() + 300
    while not (list(out.glob("checkpoints/wdbc*.pt")) and list(out.glob("runs/*.csv"))):
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("runs/*.csv")}
    assert 0 < len(finished) < 6
    assert not (out / "report.html").exists()
    options: dict[str, Any] = {"seeds": 2, "changes": changes, "device": "cpu", "jobs": 1}
    reproduce(["toy", "wdbc"], out=out, resume=True, **options)
    reproduce(["toy", "wdbc"], out=tmp_path / "whole", **options)
    assert all(path.stat().st_mtime_ns == then for path, then in finished.items())
    tables = sorted((tmp_path / "whole" / "runs").glob("*.csv"))
    assert len(tables) == 6
    for path in tables:
        first, second = _tables.read(path), _tables.read(out / "runs" / path.name)
        assert numbers(first).equals(numbers(second))
    whole = (tmp_path / "whole" / "claims.csv").read_text()
    assert (out / "claims.csv").read_text() == whole
    assert not list((out / "checkpoints").iterdir())


def test_resume_keeps_what_is_finished(tmp_path: Path) -> None:
    """More seeds keep the old runs, other settings make new ones; without --resume, all are new."""
    options: dict[str, Any] = {"out": tmp_path, "device": "cpu", "changes": {"toy": TINY["toy"]}}

    def times() -> list[int]:
        return [p.stat().st_mtime_ns for p in sorted((tmp_path / "runs").glob("*.csv"))]

    changes = {"toy": {k: v for k, v in TINY["toy"].items() if k != "seeds"}}
    options["changes"] = changes
    reproduce(["toy"], seeds=2, **options)
    first = times()
    reproduce(["toy"], seeds=3, resume=True, **options)
    assert times()[:2] == first
    assert len(times()) == 3
    second = times()
    reproduce(["toy"], seeds=3, **options)
    assert not set(times()) & set(second)
    third = times()
    options["changes"] = {"toy": {**changes["toy"], "rate": 0.02}}
    reproduce(["toy"], seeds=3, resume=True, **options)
    assert not set(times()) & set(third)


def test_processes_give_the_same(tmp_path: Path) -> None:
    found = []
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        reproduce(["toy"], out=out, jobs=jobs, changes={"toy": TINY["toy"]}, device="cpu")
        tables = [_tables.read(path) for path in sorted((out / "runs").glob("*.csv"))]
        found.append([numbers(table) for table in tables])
    assert all(a.equals(b) for a, b in zip(*found, strict=True))


def test_workers_may_be_elsewhere(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative folders are those of the caller; joblib keeps workers, wherever they began."""
    import joblib

    joblib.Parallel(n_jobs=2)(joblib.delayed(os.chdir)("/") for _ in range(8))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HELDIN_DATA", "data")
    found = reproduce(
        ["sketch2d"], out="report", jobs=2, changes={"sketch2d": {"steps": 60}}, device="cpu"
    )
    assert found.report == Path("report/report.html")
    assert len(list((tmp_path / "report" / "runs").glob("*.csv"))) == 2
    tasks: list[_runner.Task] = []
    monkeypatch.setattr(_runner, "_make", lambda given, *others: tasks.extend(given))
    with pytest.raises(FileNotFoundError):  # nothing was run
        reproduce(["sector"], out="report", changes=TINY, device="cpu")
    assert {task.data for task in tasks} == {str(data)}
    assert {task.folder for task in tasks} == {tmp_path / "report"}


@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_takes_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip(
        "distributed", reason="dask.distributed is not installed: pip install 'heldin[dev]'"
    )
    import joblib

    threads: list[str] = []
    write = _tables.write

    def told(*arguments: Any, **about: Any) -> None:
        threads.append(threading.current_thread().name)
        write(*arguments, **about)

    monkeypatch.setattr(_tables, "write", told)
    options: dict[str, Any] = {"changes": {"toy": TINY["toy"]}, "device": "cpu"}
    reproduce(["toy"], out=tmp_path / "here", jobs=1, **options)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        reproduce(["toy"], out=tmp_path / "there", **options)
    assert len(threads) == 4
    assert all("Dask" in name for name in threads[2:]), threads
    for path in (tmp_path / "here" / "runs").glob("*.csv"):
        twin = tmp_path / "there" / "runs" / path.name
        assert numbers(_tables.read(path)).equals(numbers(_tables.read(twin)))


# --- errors ----------------------------------------------------------------------------------


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data folder, an empty cache."""
    monkeypatch.delenv("HELDIN_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_DATA])
def test_without_data_it_fails_at_once(
    name: str, nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", name]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    needs = EXPERIMENTS[name].data
    assert re.fullmatch(
        rf"heldin: {name}: .* is not there: run `heldin data fetch {needs}`, or give a folder that "
        rf"has {needs}/ with --data or HELDIN_DATA\n",
        told.err,
    )
    assert not (nowhere / "report").exists()


def test_without_data_the_others_run(nowhere: Path) -> None:
    lines: list[str] = []
    found = reproduce(["toy", "mnist-gd", "greedy"], changes=TINY, device="cpu", tell=lines.append)
    assert [o.experiment.name for o in found.outcomes] == ["toy"]
    assert len(lines) == 1
    assert lines[0].startswith("mnist-gd, greedy: ")
    assert set(found.missing) == {"mnist-gd", "greedy"}
    for name in ("report.html", "report.md"):
        assert "greedy was not run: " in (nowhere / "report" / name).read_text()


def test_exit_code_says_that_something_is_missing(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "sketch2d", "sector", "--device", "cpu"]) == 1
    told = capsys.readouterr()
    assert "heldin: sector: " in told.err
    assert "sketch2d" in told.out
    assert "confirmed" in told.out
    assert "The report is report/report.html" in told.out
    assert main(["reproduce", "sketch2d", "--device", "cpu", "--resume", "--jobs", "1"]) == 0


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"names": ["mnist"]}, "unknown experiment 'mnist'; known are all, sketch, toy"),
        ({"names": []}, "name experiments, or all"),
        ({"names": ["toy"], "preset": "huge"}, "preset must be 'quick' or 'full', got 'huge'"),
        ({"names": ["toy"], "seeds": 0}, "seeds must be at least 1, got 0"),
        ({"names": ["toy"], "changes": {"toy": {"speed": 1}}}, "changes of toy: .*speed"),
    ]
    for options, reason in cases:
        with pytest.raises(HeldinError, match=reason):
            reproduce(out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert main(["reproduce"]) == 2
    assert "name experiments, or all" in capsys.readouterr().err


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runner, "PACKAGES", ("joblib", "no_such_package"))
    with pytest.raises(HeldinError, match=r"no_such_package not installed; .*heldin\[reproduce\]"):
        reproduce(["toy"], out=tmp_path)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert "needs mnist" in lines[NAMES.index("greedy")]


def test_nothing_heavy_is_imported() -> None:
    """The command line starts without the packages that only the experiments need."""
    code = (
        "import sys, heldin.cli.main; heavy = 'matplotlib', 'pandas', 'sklearn', 'joblib', 'rich'; "
        "print([m for m in heavy if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# --- the report ------------------------------------------------------------------------------


class Page(HTMLParser):
    """Open tags, links and words of a page."""

    VOID = ("meta", "link", "img", "br", "!doctype")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.images = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.images += tag == "img"
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.words.append(text)


def test_report_is_one_file(everything: Any) -> None:
    _, out, found, _ = everything
    text = (out / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.images == len(NAMES)
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert "url(" not in text
    assert "<script" not in text
    words = " ".join(page.words)
    for outcome in found.outcomes:
        for verdict in outcome.verdicts:
            assert verdict.claim.text in words
            assert verdict.ours in words
        for choice in outcome.experiment.choices:
            assert choice in words
    confirmed = sum(v.confirmed for o in found.outcomes for v in o.verdicts)
    claims = sum(len(o.verdicts) for o in found.outcomes)
    assert f"{confirmed} of {claims} claims confirmed" in words
    assert "a part of SECTOR" in words


@pytest.fixture(scope="module")
def browser() -> Any:
    """Debian's Chromium, or another one that is on the path."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install 'heldin[dev]'"
    )
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the path")
    with api.sync_playwright() as play:
        yield (opened := play.chromium.launch(executable_path=found))
        opened.close()


@pytest.mark.parametrize("width", [360, 1280], ids=["phone", "desk"])
def test_report_in_a_browser(everything: Any, browser: Any, width: int) -> None:
    _, out, found, _ = everything
    page = browser.new_page(viewport={"width": width, "height": 800})
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((out / "report.html").as_uri())
    assert all(url.startswith(("file:", "data:")) for url in asked)
    assert said == []
    loaded = page.eval_on_selector_all("img", "all => all.map(i => i.complete && i.naturalWidth)")
    assert len(loaded) == len(NAMES)
    assert min(loaded) > 400
    # nothing makes the page wider than the screen; what is wide scrolls in its own box
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = page.eval_on_selector_all(
        "p, td, li", "all => Math.min(...all.map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert small >= 12
    verdicts = page.locator(".claims td:last-child")
    words = [verdict.confirmed for outcome in found.outcomes for verdict in outcome.verdicts]
    assert verdicts.count() == len(words)
    for place, confirmed in enumerate(words):
        told = verdicts.nth(place).inner_text()
        assert told.startswith("confirmed" if confirmed else "not confirmed")
    boxes = page.eval_on_selector_all(
        ".claims td", "all => all.map(e => e.getBoundingClientRect().right)"
    )
    assert max(boxes) <= width
    head = page.locator(".claims thead").first
    assert head.is_visible() == (width > 700)  # on a phone each cell has its label instead
    page.click(f"nav a[href='#{NAMES[-1]}']")
    assert page.locator(f"#{NAMES[-1]} h2").is_visible()
    page.locator("summary").last.click()
    assert page.locator("details code", has_text="rms_rate").is_visible()
    page.close()


def test_docs(everything: Any, tmp_path: Path) -> None:
    """A page of documentation, with all figures, small enough for a repository."""
    _, _, found, _ = everything
    write_docs(tmp_path / "page.md", found)
    text = (tmp_path / "page.md").read_text()
    assert f"Made by `{found.command}`" in text
    shown = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert shown == [f"figures/page/{name}.png" for name in NAMES]
    assert all(1000 < (tmp_path / name).stat().st_size < 150_000 for name in shown)
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (5, 6)  # four or five columns
    assert ">>>" not in text


def test_claims_table(everything: Any) -> None:
    import csv

    _, out, found, _ = everything
    with open(out / "claims.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    verdicts = [v for o in found.outcomes for v in o.verdicts]
    assert [row["claim"] for row in rows] == [v.claim.text for v in verdicts]
    assert [row["confirmed"] for row in rows] == [str(v.confirmed) for v in verdicts]
    markdown = (out / "report.md").read_text()
    assert all(v.claim.text in markdown for v in verdicts)


def test_figures_have_the_papers_layout(everything: Any) -> None:
    _, _, found, _ = everything
    outcomes = {o.experiment.name: o for o in found.outcomes}

    def axes(name: str, *others: Any) -> list[Any]:
        outcome = outcomes[name]
        figure = outcome.experiment.figure(outcome.results, outcome.settings, *others)
        return list(figure.get_axes())

    def grid(name: str, *others: Any) -> tuple[int, int]:
        spec = axes(name, *others)[0].get_subplotspec().get_gridspec()
        return spec.nrows, spec.ncols

    beside = outcomes["mnist-gd"].results, outcomes["mnist-gd"].settings
    assert grid("sketch") == (1, 3)
    assert grid("quadratic") == grid("counterexample") == (3, 3)
    assert grid("sketch2d") == (1, 1)
    assert grid("wdbc") == grid("mnist-gd") == (3, 1)
    assert grid("mnist-sgd") == (3, 2)  # two rates here
    assert grid("mnist-sgd", *beside) == (3, 3)
    assert grid("sector") == (3, 4)
    assert grid("greedy") == (2, 2)
    assert grid("rmsprop") == (7, 1)
    assert len(axes("toy")) == 5
    top = axes("toy")[0]
    assert len(top.collections) == 3  # the bands
    assert top.get_yscale() == "log"
    bottom = axes("greedy")[2]
    tensors = 2 * 2  # weights and biases of two layers
    assert len(bottom.get_lines()) == tensors + 2  # and the whole net, and the end of the warm-up


@pytest.mark.parametrize("name", NAMES)
def test_experiments_use_the_public_api(name: str) -> None:
    source = Path(sys.modules[EXPERIMENTS[name].run.__module__].__file__ or "").read_text()
    imported = re.findall(r"^\s*(?:from|import) heldin([\w.]*)", source, re.M)
    assert not [module for module in imported if module.startswith("._")]
    names = re.findall(r"^from heldin import (.*)$", source, re.M)
    assert all(hasattr(heldin, word.strip()) for line in names for word in line.split(","))


def test_an_interruption_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_commands, "run", interrupted)
    assert main(["reproduce", "toy", "--out", str(tmp_path)]) == 130
    assert "with --resume goes on" in capsys.readouterr().err


def test_stops_are_public_rules_stops(data: Path) -> None:
    """A run's stop is the one that heldin's rule gives when training really ends there."""
    from heldin.lab.reproduce.experiments import mnist as _mnist

    s = replace(settings_of("mnist-sgd"), steps=24, smoothing=0.5)
    run = Run(1, s, data=data)
    _mnist.train(run, rate=0.1, method="evidence")
    marked = [row["step"] for row in run.rows if row["stop"]]
    digits, model = _mnist.digits(run, held_out=False), _mnist.net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with heldin.EvidenceStopping.paper(model, smoothing=0.5) as rule:
        for step in range(1, 25):
            x, y = digits.train(training.batch(step, digits.rows, s.batch, 1))
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if rule.step():
                found = [step]
                break
            optimizer.step()
            optimizer.zero_grad()
    assert marked == found
