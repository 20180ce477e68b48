import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from heldin.capture.ownership.flow import failures

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when keras is imported


@pytest.fixture
def mlflow_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place where MLflow writes and reads, without a server or a database."""
    mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    return uri


@pytest.fixture(autouse=True)
def no_flow_fails() -> Iterator[None]:
    """A flow that fails costs nothing but precision; here it is a bug all the same."""
    failures.clear()
    yield
    assert not failures


# What `make quick` runs: less than a minute, and a good part of what can break.
QUICK = {
    "test_auto",
    "test_bad_input",
    "test_cases",
    "test_elementwise",
    "test_evidence",
    "test_evidence_loops",
    "test_interface",
    "test_package",
    "test_ops",
    "test_refused_input",
    "test_surprises",
    "test_validation",
    "test_wrapper",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the modules that are quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --quick, the other modules are not even imported."""
    name = collection_path.stem
    left_out = name.startswith("test_") and collection_path.is_file() and name not in QUICK
    return True if left_out and config.getoption("--quick") else None
