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
