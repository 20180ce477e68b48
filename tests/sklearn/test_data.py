"""Inputs of the estimators: scales, gaps and categories."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

pytest.importorskip("sklearn")

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone

import heldin
from heldin.sklearn import MLPClassifier, MLPRegressor
from heldin.sklearn.data import (
    Scaler,
    as_rows,
    category,
    find_copies,
    join_groups,
    largest_input,
    missing_labels,
)

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
QUICK: dict[str, Any] = {"max_iter": 40, "learning_rate_init": 0.02, "random_state": 0}


def table(n: int = 100, seed: int = 0) -> tuple[Any, Any]:
    """Numbers, gaps, categories and truth values; and labels that depend on them."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "age": rng.normal(50, 10, n),
            "city": rng.choice(["Bern", "Basel", "Zug"], n),
            "member": rng.random(n) < 0.5,
        }
    )
    score = (frame["age"] - 50) / 10 + 2 * (frame["city"] == "Bern")
    frame.loc[[2, 5], "age"] = np.nan
    frame.loc[[3, 9], "city"] = None
    return frame, (score.fillna(0) + rng.normal(size=n) > 0.5).to_numpy()


def test_units_do_not_matter_to_networks() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 4))
    y = X[:, 0] + 0.3 * rng.normal(size=60)
    units = np.array([1e-3, 1.0, 1e4, 10.0])
    model = MLPRegressor((5,), shuffle=False, **QUICK)
    plain = clone(model).fit(X, y)
    scaled = clone(model).fit(X * units + 100 * units, 1e5 * y + 7)
    found, expected = scaled.predict(X * units + 100 * units), 1e5 * plain.predict(X) + 7
    np.testing.assert_allclose(found, expected, atol=2e-3 * expected.std())
    assert scaled.estimate_ == pytest.approx(1e10 * plain.estimate_, rel=1e-3)
    assert scaled.loss_ == pytest.approx(1e10 * plain.loss_, rel=1e-3)
    assert not hasattr(model, "_scaler")
    as_given = MLPRegressor((5,), standardize=False, **QUICK).fit(X, y)
    assert as_given._scaler is None


def test_inputs_far_out_are_cut_off() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    model = MLPRegressor((5,), **QUICK).fit(X, X[:, 0])
    far, farther = np.full((1, 3), 1e3), np.full((1, 3), 1e9)
    np.testing.assert_array_equal(model.predict(far), model.predict(farther))


@pytest.mark.parametrize("hidden", [(100,), ()])
def test_wide_tables_and_constant_columns(hidden: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 300))
    X[:, 25] = 3.0
    y = X[:, :20].sum(1) > 0
    X[:, :20] += 0.8 * (2 * y[:, None] - 1)
    model = MLPClassifier(hidden, **QUICK).fit(X[:40], y[:40])
    assert model.score(X[40:], y[40:]) > 0.7
    moved = X.copy()
    moved[:, 25] = 3.0 + 1e-9
    np.testing.assert_allclose(model.predict_proba(moved), model.predict_proba(X), atol=1e-6)


def test_gaps_are_filled_and_marked() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 3))
    gone = rng.random(80) < 0.3
    y = gone + 0.1 * rng.normal(size=80)  # that it is missing is all that there is to know
    X[gone, 1] = np.nan
    model = MLPRegressor((5,), **{**QUICK, "max_iter": 200}).fit(X, y)
    assert model.score(X, y) > 0.8
    assert model.n_features_in_ == 3
    new = np.array([[np.nan, 0.0, 0.0]])  # never missing in training: the mean
    mean = np.array([[X[:, 0].mean(), 0.0, 0.0]])
    np.testing.assert_allclose(model.predict(new), model.predict(mean))
    with pytest.raises(ValueError, match="infinity"):
        model.fit(np.where(np.isnan(X), np.inf, X), y)


def test_categories_of_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    frame, y = table()
    model = MLPClassifier((8,), **{**QUICK, "max_iter": 200}).fit(frame, y)
    assert model.n_features_in_ == 3
    assert list(model.feature_names_in_) == ["age", "city", "member"]
    assert model.score(frame, y) > 0.75
    by_hand = pandas.DataFrame(
        {
            "Basel": frame["city"] == "Basel",
            "Bern": frame["city"] == "Bern",
            "Zug": frame["city"] == "Zug",
            "none": frame["city"].isna(),
            "no": ~frame["member"],
            "yes": frame["member"],
            "age": frame["age"],
        }
    ).astype(float)
    twin = MLPClassifier((8,), **{**QUICK, "max_iter": 200}).fit(by_hand.to_numpy(), y)
    np.testing.assert_allclose(
        model.predict_proba(frame), twin.predict_proba(by_hand.to_numpy()), atol=1e-9
    )
    new = frame.iloc[:2].assign(city="Chur")
    none = by_hand.iloc[:2].assign(Basel=0, Bern=0, Zug=0, none=0)
    np.testing.assert_allclose(
        model.predict_proba(new), twin.predict_proba(none.to_numpy()), atol=1e-9
    )


def test_columns_that_are_no_categories_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    frame, y = table()
    dated = frame.assign(day=pandas.Timestamp("2020-01-01"))
    named = frame.assign(name=[f"person {i}" for i in range(len(frame))])
    for wrong, message in ((dated, "'day' holds dates"), (named, "'name' holds free text")):
        with pytest.raises(heldin.HeldinError, match=message):
            MLPClassifier((4,), **QUICK).fit(wrong, y)
    model = MLPClassifier((4,), **QUICK).fit(frame, y)
    with pytest.raises(ValueError, match="give one"):
        model.predict(frame.to_numpy())
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["age", "member"]])


def test_a_scaler_cuts_off_what_is_far_out() -> None:
    scaler = Scaler(4.0, np.array([[0.0, 5.0], [2.0, 5.0]]), None)
    assert scaler(np.array([[1.0, 5.0], [100.0, 5.0]])).tolist() == [[0, 0], [4, 0]]


def test_values_of_a_category_are_compared_as_texts() -> None:
    assert [category(value) for value in (1.0, 1, True, "a ")] == ["1", "1", "True", "a"]


def test_labels_that_are_missing() -> None:
    labels = np.array(["a", None, "b", float("nan")], object)
    assert missing_labels(labels).tolist() == [1, 3]


def test_the_largest_input() -> None:
    column, size = largest_input(np.array([[1.0, -30.0], [1.0, 40.0]]))
    assert (column, size) == (1, pytest.approx(35.355, abs=1e-3))


def test_scales_are_learnt_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    X, weights = rng.normal(3, 2, size=(100, 4)), rng.uniform(1, 2, 100)
    whole = Scaler(None, X, weights).standard
    monkeypatch.setattr("heldin.sklearn.data.ROWS", 7)
    pieces = Scaler(None, X, weights).standard
    np.testing.assert_allclose(pieces.mean_, whole.mean_)
    np.testing.assert_allclose(pieces.scale_, whole.scale_)


def test_rows_are_not_copied_and_read_only_ones_are() -> None:
    X = np.ones((3, 2))
    assert as_rows(X).data_ptr() == X.ctypes.data
    X.flags.writeable = False
    assert as_rows(X).data_ptr() != X.ctypes.data


@pytest.mark.filterwarnings("ignore:.*no better than a constant:heldin.HeldinWarning")  # noise
@pytest.mark.parametrize("standardize", [True, False])
def test_what_was_given_is_left_alone(standardize: bool) -> None:
    rng = np.random.default_rng(0)
    X, y = 100 * rng.normal(size=(40, 3)), rng.normal(size=40)
    before = X.copy()
    model = MLPRegressor((5,), shuffle=False, standardize=standardize, **QUICK).fit(X, y)
    model.predict(X)
    np.testing.assert_array_equal(X, before)


def told(model: Any, X: Any, y: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, y)
    return " ".join(str(warning.message) for warning in caught)


def test_scaling_is_recommended_where_it_is_missing() -> None:
    """... and training did not come to an end."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 4))
    X[:, 1] += 5000
    y = X[:, 0] > 0
    short: dict[str, Any] = {"max_iter": 2, "random_state": 0}
    for rule in ("auto", "evidence", "validation"):
        model = MLPClassifier((5,), standardize=False, early_stopping=rule, **short)
        said = told(model, X, y)
        assert "not scaled (numbers of about 5e+03 in column 1): standardize=True" in said
    assert "scaled" not in told(MLPClassifier((5,), **short), X, y)
    assert "scaled" not in told(MLPClassifier((5,), standardize=False, **short), X - X.mean(0), y)
    sparse = pytest.importorskip("scipy.sparse").csr_matrix(X)
    assert largest_input(sparse) == pytest.approx(largest_input(X))


@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
def test_all_fitted_attributes_are_documented(kind: Any) -> None:
    frame, label = table(60)
    model = kind(max_iter=3, random_state=0).fit(frame[["age"]], label)
    documented = (kind.__doc__ or "") + (MLPClassifier.__doc__ or "")
    assert kind is MLPClassifier or "see `MLPClassifier`" in kind.__doc__.replace("See", "see")
    public = [name for name in vars(model) if name.endswith("_") and not name.startswith("_")]
    assert len(public) > 15
    assert [name for name in public if not re.search(rf"\b{name}\b", documented)] == []


def test_a_frame_may_have_any_of_pandas_types() -> None:
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    n = 80
    frame = pandas.DataFrame(
        {
            "age": pandas.array(rng.integers(20, 80, n), dtype="Int64"),
            "deck": pandas.array(rng.choice(["A", "B"], n), dtype="string"),
            "paid": pandas.array(rng.random(n) < 0.5, dtype="boolean"),
            "class": pandas.Categorical(rng.choice([1, 2, 3], n)),
            "mixed": rng.choice(np.array([1, "two", None], object), n),
        }
    )
    y = ((frame["deck"] == "A") & (frame["class"] != 3)).to_numpy(bool)
    for column in ("age", "deck", "paid", "class"):
        frame.loc[frame.index[::9], column] = None
    model = MLPClassifier((8,), **{**QUICK, "max_iter": 200}).fit(frame, y)
    assert model.score(frame, y) > 0.8
    before = model.predict_proba(frame.iloc[1:4])
    # a file that is read again has other types, and the same values
    same = frame.astype({"deck": object, "class": float, "paid": object}).iloc[1:4]
    np.testing.assert_array_equal(model.predict_proba(same), before)


def test_wrong_frames_and_labels_are_named() -> None:
    pandas = pytest.importorskip("pandas")
    frame, y = table()
    twice = pandas.concat([frame, frame[["city"]]], axis=1)
    with pytest.raises(heldin.HeldinError, match="several columns are named 'city'"):
        MLPClassifier((4,), **QUICK).fit(twice, y)
    labels = pandas.Series(np.where(y, "yes", "no"), dtype=object)
    labels[3] = None
    for wrong in (labels, labels.astype("string")):
        with pytest.raises(heldin.HeldinError, match=r"no label in 1 rows \(the first is row 3\)"):
            MLPClassifier((4,), **QUICK).fit(frame, wrong)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 40), columns=st.integers(1, 12))
def test_copies_are_those_of_a_slow_search(seed: int, n: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    X = rng.integers(-1, 2, (n, columns)) * np.array(-1.0, [np.float32, np.float64][seed % 2])
    y = rng.integers(0, 2, n)
    rows = [(*row, label) for row, label in zip((X + 0.0).tolist(), y.tolist(), strict=True)]
    found = find_copies(X, y)
    assert found.extra == n - len(set(rows))
    for row, which in zip(rows, found.which, strict=True):
        assert rows[found.first[which]] == row
    order = rng.permutation(n)
    again = find_copies(X[order], y[order])
    np.testing.assert_array_equal(X[order][again.first], X[found.first])


@pytest.mark.parametrize("columns", [2, 5, 8])
def test_rows_that_repeat_by_chance_are_separate(columns: int) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 2, (2000, columns)).astype(float), rng.integers(0, 2, 2000)
    assert find_copies(X, y).by_chance
    several = find_copies(np.column_stack([X, rng.normal(size=2000)]).repeat(2, 0), y.repeat(2))
    assert several.extra == 2000
    assert not several.by_chance


def test_groups_and_copies_are_joined() -> None:
    groups, copies = np.array([0, 0, 1, 1, 2, 3]), np.array([0, 1, 1, 2, 3, 4])
    assert join_groups(groups, copies).tolist() == [0, 0, 0, 0, 1, 2]
