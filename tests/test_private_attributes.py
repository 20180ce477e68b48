"""Tests look at what users see: how often they read or set private attributes of other objects."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGET = 59  # in tests/ and lab/tests/ together


def private_accesses(text: str) -> list[str]:
    """Return accesses to private attributes, except those of an object to its own."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        special = node.attr.startswith("__") and node.attr.endswith("__")
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not special and not own:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("stopping._inner._label = model.weight._grad", 3),
        ("module._slope(2)", 1),
        ("self._x + cls._y + type(self).__name__ + x.__class__", 0),
        ("self.stopping._step", 1),
    ],
)
def test_accesses_are_counted(text: str, count: int) -> None:
    assert len(private_accesses(text)) == count


def test_the_tests_keep_their_budget() -> None:
    found = [
        f"{path.relative_to(ROOT)}, {access}"
        for folder in ("tests", "lab/tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for access in private_accesses(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= BUDGET, (
        "test by what users see (a result, history, state_dict), or read it in tests/support:\n"
        + "\n".join(found)
    )
