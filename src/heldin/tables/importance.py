"""How much a column matters: the loss of out-of-fold rows after the column is shuffled."""

from __future__ import annotations

from typing import Any

import numpy as np

from .columns import Columns

__all__ = ["importances"]

REPEATS = 5
MOST_ROWS = 2_000


def importances(estimator: Any, inputs: Any, targets: Any, columns: Columns) -> dict[str, Any]:
    """Return by how much the mean loss rises with each column, and the standard deviation.

    A row is predicted by the shadow that was not trained on it. Columns of the table are shuffled
    among the rows, five times each; the inputs of one column move jointly.

    Args:
        estimator: an estimator of `heldin.sklearn`, fitted to these rows.
        inputs, targets: encoded rows.
        columns: their encoding.

    Returns:
        Pairs by the name of the column, the largest first; empty without out-of-fold rows.
    """
    shadow_of = estimator._shadow_of
    if shadow_of is None:
        return {}
    generator = np.random.default_rng(0)
    rows = np.flatnonzero(shadow_of >= 0)
    rows = rows[:: -(-len(rows) // MOST_ROWS)]
    x, y, shadow_of = inputs[rows], targets[rows], shadow_of[rows]

    def loss(x: Any) -> float:
        predicted = estimator._out_of_fold(x, shadow_of)
        single = predicted.shape[1] == 1  # numbers
        return float(estimator._row_losses(predicted[:, 0] if single else predicted, y).mean())

    baseline, first, rises = loss(x), 0, {}
    for column in columns.used:
        inputs_of_column = slice(first, first + column.width)
        first += column.width
        losses = []
        for _ in range(REPEATS):
            shuffled = x.copy()
            shuffled[:, inputs_of_column] = x[generator.permutation(len(x)), inputs_of_column]
            losses.append(loss(shuffled) - baseline)
        rises[column.name] = [float(np.mean(losses)), float(np.std(losses))]
    return dict(sorted(rises.items(), key=lambda item: -item[1][0]))
