import os
import sys
from pathlib import Path

import pytest

import heldin.capture.ownership.flows

sys.path.insert(0, str(Path(__file__).parent))
heldin.capture.ownership.flows.DEBUG = True
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
