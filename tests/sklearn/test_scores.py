"""Scores of the estimators and their intervals."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

import numpy as np

from heldin.sklearn.scores import class_scores, number_scores


def test_perfect_scores_have_an_interval() -> None:
    for n in (4, 6, 20, 100):
        codes = np.arange(n) % 2
        sure = np.column_stack([1 - codes, codes]).astype(float)
        for shares, value in ((sure, 1.0), (1 - sure, 0.0)):
            for interval in class_scores(shares, codes).values():
                assert interval.value == value
                assert interval.high - interval.low > 1 / n
    equally_wrong = number_scores(np.array([1.0, -1.0]), np.array([2.0, -2.0]))
    assert all(high - low > 0.5 for _, low, high in equally_wrong.values())


@pytest.mark.parametrize("n", [10, 40])
def test_intervals_of_the_area_cover_it(n: int) -> None:
    rng = np.random.default_rng(0)
    truth, codes, covered = 0.9214, np.arange(n) % 2, 0  # two normals that lie two apart
    for _ in range(400):
        score = rng.normal(size=n) + 2 * codes
        low, high = class_scores(np.column_stack([-score, score]), codes)["auc"][1:]
        covered += low <= truth <= high
    assert 0.92 < covered / 400 <= 1
