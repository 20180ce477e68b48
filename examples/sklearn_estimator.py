"""scikit-learn with and without a validation split, on one of its own datasets.

Five times, 150 rows for training and the others for testing: scikit-learn's MLPClassifier as it
comes, with early_stopping=True (which holds a tenth of the rows out), and heldin's, which trains on
all rows and knows when to stop.
"""

from __future__ import annotations

import warnings
from statistics import mean
from typing import Any

from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier as SklearnMLP
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from heldin.sklearn import MLPClassifier

SEEDS, ROWS = 5, 150


def estimators(seed: int) -> dict[str, Any]:
    return {
        "scikit-learn": SklearnMLP(max_iter=1000, random_state=seed),
        "scikit-learn, early_stopping=True": SklearnMLP(
            max_iter=1000, early_stopping=True, random_state=seed
        ),
        "heldin": MLPClassifier(random_state=seed),
    }


def main(seeds: int = SEEDS) -> None:
    X, y = load_breast_cancer(return_X_y=True)
    losses: dict[str, list[float]] = {}
    estimates = []
    for seed in range(seeds):
        train_X, test_X, train_y, test_y = train_test_split(
            X, y, train_size=ROWS, random_state=seed, stratify=y
        )
        for name, network in estimators(seed).items():
            model = make_pipeline(StandardScaler(), network)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                model.fit(train_X, train_y)
            loss = log_loss(test_y, model.predict_proba(test_X))
            losses.setdefault(name, []).append(loss)
            if name == "heldin":
                estimates.append(network.estimate_)
    print(f"{'log loss on new rows, mean of ' + str(seeds):42}")
    for name, found in losses.items():
        print(f"  {name:40} {mean(found):.3f}")
    print(f"  {'what heldin had estimated':40} {mean(estimates):.3f}")


if __name__ == "__main__":
    main()
