"""Networks on tables with what they need to predict."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pandas")
pytest.importorskip("safetensors")

import numpy as np
import pandas

from heldin.tables.model import Target


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        ([0, 1, 1, 0], "classification", ("0", "1")),
        ([10, 9, 100, 9], "classification", ("9", "10", "100")),
        ([1.0, 2.0, 1.0, 2.0], "classification", ("1", "2")),
        ([True, False, True, True], "classification", ("False", "True")),
        (["b", "a", "b", "a"], "classification", ("a", "b")),
        ([0.5, 1.0, 1.5, 2.0], "regression", ()),
        (list(range(30)), "regression", ()),
    ],
)
def test_target_is_understood(values: list[Any], task: str, classes: tuple[str, ...]) -> None:
    target = Target.learn(pandas.Series(values, name="t"))
    assert (target.task, target.classes) == (task, classes)
    encoded = target.encode(pandas.Series(values))
    if classes:
        assert [classes[i] for i in encoded] == [str(v).removesuffix(".0") for v in values]
    else:
        np.testing.assert_array_equal(encoded, values)
