"""The figures of the documentation can be drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "docs" / "figures" / "when_to_trust.py"


@pytest.mark.parametrize("name", ["path", "tiny"])
def test_when_to_trust(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("when_to_trust", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([name, "--out", str(tmp_path)])
    assert (tmp_path / f"when-to-trust-{name}.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    text = (SCRIPT.parent.parent / "when-to-trust.md").read_text()
    quoted = {"path": ["2.03", "2.01", "7.67"], "tiny": ["-0.012", "-0.152", "-0.681"]}[name]
    assert all(number in printed and number in text for number in quoted)


def test_every_figure_is_in_the_text() -> None:
    text = (SCRIPT.parent.parent / "when-to-trust.md").read_text()
    for image in SCRIPT.parent.glob("when-to-trust-*.png"):
        assert f"figures/{image.name}" in text
