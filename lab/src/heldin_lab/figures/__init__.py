"""The figures and tables of the documentation, each made by `python -m heldin_lab.figures.NAME`."""

from pathlib import Path

__all__ = ["DOCS", "IMAGES", "ROOT"]

ROOT = Path(__file__).parents[4]  # the repository
DOCS = ROOT / "docs"
IMAGES = DOCS / "figures"
