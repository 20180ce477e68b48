"""The paper's experiments: their mathematics, their claims, and what is refused."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from heldin import HeldinError
from heldin_lab.cli.main import main
from heldin_lab.reproduce import EXPERIMENTS, reproduce
from heldin_lab.reproduce import training as training
from heldin_lab.reproduce.experiment import Claim
from heldin_lab.reproduce.experiments import greedy, quadratic, toy, wdbc
from heldin_lab.reproduce.run import Run
from small_data import TINY, data, rows_of, settings_of

for package in ("joblib", "matplotlib", "pandas", "sklearn", "rich"):
    pytest.importorskip(package)

__all__ = ["data"]
NAMES = list(EXPERIMENTS)
NO_DATA = [name for name, e in EXPERIMENTS.items() if e.data is None]


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
    found = [claim.value(tables) for claim in greedy.claims_at(s, 0.1)]
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
        rf"heldin-lab: {name}: .* is not there: run `heldin-lab data fetch {needs}`, or give "
        rf"a folder that has {needs}/ with --data or HELDIN_DATA\n",
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
    assert "heldin-lab: sector: " in told.err
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


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert "needs mnist" in lines[NAMES.index("greedy")]


def test_nothing_heavy_is_imported() -> None:
    """The command line starts without the packages that only the experiments need."""
    code = (
        "import sys, heldin_lab.cli.main; "
        "heavy = 'matplotlib', 'pandas', 'sklearn', 'joblib', 'rich'; "
        "print([m for m in heavy if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
