import os
from pathlib import Path

import pytest

import heldin._flow
from heldin._kernels import KERNELS

heldin._flow.DEBUG = True
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


@pytest.fixture(params=["compiled", "PyTorch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With what is compiled, and with the calls of PyTorch that say the same."""
    if request.param == "PyTorch":
        for kind in list(KERNELS):
            monkeypatch.delitem(KERNELS, kind)
    elif not KERNELS:
        pytest.skip("src/heldin/_kernels.c was not compiled here")
    return str(request.param)
