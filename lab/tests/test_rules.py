"""The laboratory takes heldin's stopping rules from one module."""

from __future__ import annotations

import ast
from pathlib import Path

import heldin_lab

PACKAGE = Path(heldin_lab.__file__).parent


def is_rule(name: str) -> bool:
    """Return whether a name is that of a rule; `heldin.EarlyStopping` is for all users."""
    return name.endswith(("Stopping", "stopping")) and name != "EarlyStopping"


def uses(path: Path) -> list[str]:
    """Return the names of stopping rules that a module takes from heldin itself."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("heldin.rules"):
            names.append(str(node.module))
        elif isinstance(node, ast.ImportFrom) and node.module == "heldin":
            names += [a.name for a in node.names if is_rule(a.name)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "heldin":
            names += [node.attr] if is_rule(node.attr) else []
    return names


def test_rules_come_from_one_module() -> None:
    modules = {path: uses(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert [path.name for path, names in modules.items() if names] == ["rules.py"]
