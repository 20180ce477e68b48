"""Two settings of the constants of `rule="auto"`, on the same runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heldin.rules import auto
from heldin_lab.study import choice
from heldin_lab.study.contest import UNITS, WAYS, Ways


def line(n: int, losses: dict[str, float], chosen: tuple[str, str] = ("3", "1")) -> dict[str, Any]:
    """Return a stored run with these losses; the time of a rule is ten times its loss."""
    rules = {name: [loss, 0.5, 0.5, 0.1, 1.0, 10 * loss] for name, loss in losses.items()}
    rules["no stopping"] = [2.0, 0.5, 0.5, 0.1, 1.0, 5.0]
    assert len(rules["no stopping"]) == len(UNITS)
    return {
        "spec": {"n": n},
        "chosen": dict(zip(choice.SETTINGS, chosen, strict=True)),
        "rules": rules,
    }


def test_runs_are_stored_once_and_leave_the_constants_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = auto.WORK, auto.SLACK
    monkeypatch.setitem(WAYS, "texts", Ways(("transformer",), ("adam",), (0.0,), (40,), 8))
    monkeypatch.setitem(choice.PLAN, "texts", (2, None))  # type: ignore[index]
    for _ in range(2):
        choice.runs("texts", None, tmp_path, None)
    stored = (tmp_path / "texts.jsonl").read_text().splitlines()
    assert len(stored) == 2
    for text in stored:
        run = json.loads(text)
        assert run["chosen"] == {"before": "3", "candidate": "1"}
        assert {"best on the path", "before", "candidate"} < run["rules"].keys()
    assert before == (auto.WORK, auto.SLACK)


def test_table_compares_runs_that_differ() -> None:
    equal = {"before": 1.0, "candidate": 1.0, "best on the path": 1.0}
    lower = {"before": 1.0, "candidate": 0.9, "best on the path": 0.8}
    texts = [line(100, lower), line(100, lower), line(300, equal, ("1", "1"))]
    text = choice.choice_table({"texts": texts, "faces": []})
    wanted = "| 2 of 2 | 1.250 | 2.00 | 1.125 | 1.80 | 0.900 [0.900, 0.900] | 0.90 |"
    assert f"| texts, up to 200 rows {wanted}" in text
    assert "| texts, more rows | 0 of 1 | - |" in text
    assert "faces" not in text
