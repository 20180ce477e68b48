"""Full-size runs: sets by name, results of several rates, real stops beside replayed ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heldin_lab.cli.main import main
from heldin_lab.reproduce import EXPERIMENTS, fullsize
from heldin_lab.reproduce import confirm as confirm_module
from heldin_lab.reproduce import data as _data
from heldin_lab.reproduce import planned as planned_module
from heldin_lab.reproduce.collected import Found, collect
from heldin_lab.reproduce.confirm import TRAININGS, Confirmed, confirm
from heldin_lab.reproduce.experiment import Claim
from heldin_lab.reproduce.fullsize import PLAN, make, tasks
from heldin_lab.reproduce.leading import counts, leading
from heldin_lab.reproduce.multiverse import Universe, judge, merged, read_universe, universe
from heldin_lab.reproduce.page import universes, write_page
from heldin_lab.reproduce.readings import Choice, Value
from heldin_lab.reproduce.replay import shortened
from heldin_lab.reproduce.store import Store
from heldin_lab.reproduce.survey import survey
from heldin_lab.reproduce.tables import step_of
from small_data import TINY, data

joblib = pytest.importorskip("joblib")
np = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
for package in ("matplotlib", "sklearn", "rich"):
    pytest.importorskip(package)

__all__ = ["data"]
CHOICE = Choice("a", "?", (Value("x", "", 0), Value("y", "", 1)))


# --- the plan --------------------------------------------------------------------------------


def test_sets_are_made_by_name(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = {**TINY["mnist-sgd"], "travel": None, "budget": None, "rates": (0.03,)}
    parts = ("rate 0.03, validation", "rate 0.03, evidence")
    first = replace(PLAN[0], changes=small, parts=parts)
    monkeypatch.setattr(fullsize, "ALL", (first, replace(first, name="another")))
    out = tmp_path / "out"
    arguments = ["reproduce", "--plan", "--jobs", "2", "--out", str(out), "--data", str(data)]
    assert main([*arguments, "nothing"]) == 2
    assert "unknown set of runs 'nothing'; the plan has full-sgd, another" in (
        capsys.readouterr().err
    )
    with joblib.parallel_config(backend="threading"):  # processes would not see the tiny data
        assert main([*arguments, "another"]) == 0
    assert capsys.readouterr().out.count(": finished\n") == 2
    assert sorted(path.name for path in out.iterdir()) == ["another"]
    assert len(list((out / "another" / "runs").glob("*.csv"))) == 2


# --- several rates, and sizes ----------------------------------------------------------------


def _universe(
    texts: dict[str, list[float]], size: str = "full size", experiment: str = "greedy"
) -> tuple[Universe, list[Claim]]:
    """Claims that hold above 0.5, under two readings."""
    claims = [
        Claim(text, "", lambda tables: 0.0, above=0.5, across=max if "up to" in text else None)
        for text in texts
    ]
    values = [
        ({"a": name}, [[numbers[k]] for numbers in texts.values()]) for k, name in enumerate("xy")
    ]
    return universe(experiment, size, claims, (CHOICE,), values), claims


def test_other_rates_stay(tmp_path: Path) -> None:
    """Logs of a rate need not be there any more when another rate is added."""
    old, claims = _universe({"rate 0.01: off": [0.2, 0.7], "up to 80 %": [0.6, 0.3]})
    new, others = _universe({"rate 0.005: off": [0.9, 0.1], "up to 80 %": [0.4, 0.8]})
    store = Store(tmp_path)
    store.keep(old, claims)
    store.keep(new, others)
    found = read_universe(tmp_path / "readings-greedy-full-size.csv")
    assert found.claims == ("rate 0.005: off", "rate 0.01: off", "up to 80 %")
    assert [[cell[2] for cell in cells] for _, cells in found.rows] == [
        [0.9, 0.2, 0.6],
        [0.1, 0.7, 0.8],
    ]
    assert judge(found, 2).share == 1.0
    again, _ = _universe({"rate 0.01: off": [0.3, 0.3]})
    assert merged(found, again, []).rows[0][1][1][2] == 0.3
    differs = replace(again, choices=("b",))
    assert merged(found, differs, []) is differs


def test_the_largest_size_of_each_claim_leads() -> None:
    full, _ = _universe({"rate 0.01: share": [1, 1]}, experiment="rmsprop")
    real, _ = _universe(
        {"rate 0.01: share": [0, 0], "loss": [1, 1]}, "full size, real runs", "rmsprop"
    )
    tenth, _ = _universe(
        {"rate 0.03: share": [0, 0], "no factor": [0, 0]}, "a tenth of the width", "rmsprop"
    )
    varied, _ = _universe({"fresh": [1, 1]}, "full size, length varied", "rmsprop")
    lines = leading([full, varied, real, tenth])
    assert [(line.found.size, line.text, line.counted) for line in lines] == [
        ("full size", "rate 0.01: share", True),
        ("full size, real runs", "rate 0.01: share", False),
        ("full size, real runs", "loss", True),
        ("a tenth of the width", "no factor", True),
    ]
    assert counts(lines) == {
        "all": 3, "holds": 2, "holds under some readings": 0, "does not hold": 1
    }  # fmt: skip


def test_a_shorter_run() -> None:
    """Validation stops at the least loss that is left; the log ends with the run."""
    table = pandas.DataFrame(
        {
            "step": [2.0, 4.0, 6.0, 8.0, 10.0],
            "validation_loss": [5.0, 3.0, 4.0, 2.0, 1.0],
            "stop": [0.0, 0.0, 0.0, 0.0, 1.0],
        }
    )
    log = {"steps": np.arange(1, 11), "counts": np.ones(10), "table": np.zeros((10, 1, 6))}
    one = Found(table, log, True, 10, 10, 1.0)
    cut = shortened({0: {"validation": one}}, 0.6)[0]["validation"]
    assert (cut.total, list(cut.table.step)) == (6, [2, 4, 6])
    assert step_of(cut.table) == 4
    assert len(cut.log["table"]) == len(cut.log["steps"]) == 6


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> tuple[fullsize.Planned, ...]:
    """Tiny runs of MNIST with SGD, of greedy stopping and of RMSprop, as if at full size."""
    net = {"travel": None, "budget": None, "rates": (0.1,)}
    long = {"steps": 60, "every": 4, "smoothing": 0.8}
    sets = (
        replace(PLAN[0], changes={**TINY["mnist-sgd"], **net, "steps": 60},
                parts=("rate 0.1, validation", "rate 0.1, evidence")),
        replace(PLAN[2], changes={**TINY["greedy"], **net, **long}, parts=("rate 0.1, greedy",)),
        replace(PLAN[3], changes={**TINY["rmsprop"], **net, "steps": 60, "smoothing": 0.99},
                parts=("SGD", "SGD with stopping", "RMSprop")),
    )  # fmt: skip
    monkeypatch.setattr(planned_module, "PLAN", sets)
    monkeypatch.setattr(planned_module, "TENTHS", ())
    monkeypatch.setattr(planned_module, "ELEMENTWISE", ())
    for planned in sets:
        e = EXPERIMENTS[planned.experiment]
        settings = {**e.settings, "full": replace(e.settings["full"], **planned.changes)}
        monkeypatch.setitem(EXPERIMENTS, e.name, replace(e, settings=settings))
    return sets


def test_real_stops_at_full_size(
    data: Path, tmp_path: Path, plan: tuple[fullsize.Planned, ...]
) -> None:
    """Greedy stopping beside its twin, the evidence run of MNIST with SGD; then RMSprop."""
    runs, folder = tmp_path / "runs", tmp_path / "docs" / "results" / "page"
    make(plan[:2], runs, data, tell=lambda line: None)
    survey(["greedy"], runs, folder)
    found = {(u.experiment, u.size): u for u in universes(folder)}
    real = found["greedy", "full size, real runs"]
    tables: dict[str, Any] = {}
    for _, task in tasks(plan[:2], runs, data):
        tables |= {task.part: collect([task])[0][task.part].table}
    own, plain = tables["rate 0.1, greedy"], tables["rate 0.1, evidence"]
    expected = {
        "10 % of the weights": own.off[own.step > 11].iloc[0],
        "about 50 %": own.off.iloc[-1],
        "comparable": own.test_loss.min() / plain.test_loss.min(),
    }
    for words, value in expected.items():
        (place,) = [k for k, text in enumerate(real.claims) if words in text]
        assert judge(real, place).ours[2] == pytest.approx(float(value), rel=1e-3), words
    assert float(own.off.iloc[-1]) > 0
    assert (folder / "greedy-full.png").exists()
    assert Store(folder).facts()["greedy, full size, rate 0.1"]["real"] == float(own.off.iloc[-1])
    # shares of Eq. 15 come from the same plain run; what needs RMSprop's run is not there yet
    shares = found["rmsprop", "full size"]
    assert (len(shares.claims), len(shares.rows)) == (3, 15)
    assert ("rmsprop", "full size, real runs") not in found
    make(plan, runs, data, tell=lambda line: None)
    survey(["rmsprop"], runs, folder)
    found = {(u.experiment, u.size): u for u in universes(folder)}
    assert len(found["rmsprop", "full size"].rows) == 15
    assert len(found["rmsprop", "full size, factors of RMSprop"].rows) == 8
    assert len(found["rmsprop", "full size, real runs"].claims) == 6
    page = tmp_path / "docs" / "page.md"
    write_page(page, folder, "the command")
    text = page.read_text()
    assert "only this reading was run" in text
    assert "A weight that stops hardly changes when the others do" in text
    assert "Largest share of factors below 1e-5 under any reading (full size)" in text


# --- real stops ------------------------------------------------------------------------------


def test_simulated_stops_are_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On noise, of which a small net learns what it can; most pixels are constant."""
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(100, 784, dtype=torch.uint8)
    images[:, :20] = torch.randint(0, 256, (100, 20), generator=generator).byte()
    labels = torch.randint(0, 10, (100,), generator=generator)
    monkeypatch.setattr(_data, "mnist", lambda folder: (images, labels))
    first = TRAININGS[0]
    tiny = replace(first.settings, widths=(784, 4, 10), training=99, batch=99, rates=(0.5,))
    found = confirm([replace(first, settings=tiny, steps=100, whole=False)])
    assert len(found) == 40
    assert all(one.agrees for one in found)
    by = {one.by: sum(not math.isnan(o.real) for o in found if o.by == one.by) for one in found}
    assert min(by.values()) >= 4  # readings of both kinds stop
    assert len({one.real for one in found if not math.isnan(one.real)}) >= 4
    assert not replace(found[0], real=-1.0).agrees
    # and the page tells it
    rows = [replace(one, simulated=7.0, real=7.0) for one in found[:3]]
    rows.append(replace(rows[0], real=8.0))
    folder = tmp_path / "results" / "page"
    folder.mkdir(parents=True)
    universe_, claims = _universe({"rate 0.01: off": [0.2, 0.7]})
    Store(folder).keep(universe_, claims)

    def stored(trainings: Any, where: Any, tell: Any) -> list[Confirmed]:
        own = rows if trainings[0] is first else []
        return [one for one in own if one.by == "EvidenceStopping.paper"]

    monkeypatch.setattr(confirm_module, "confirm", stored)
    monkeypatch.setattr(confirm_module, "beside_steps", lambda **options: {"steps": 7})
    page = tmp_path / "page.md"
    assert main(["reproduce", "--readings", "--confirm", "--docs", str(page)]) == 0
    count = len(stored([first], None, None))
    text = page.read_text()
    assert Store(folder).facts() == {"flow beside steps": {"steps": 7}}
    assert f"Simulated stop = real stop for {count - 1} of {count} readings" in text
    assert f"the same step in {count - 1} of {count}, of which {count} stop at all." in text
