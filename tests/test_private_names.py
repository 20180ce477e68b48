"""No module but one uses names of PyTorch that it does not promise to keep."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heldin import _private_torch as private

SOURCE = Path(private.__file__).parent


def private_names() -> set[str]:
    """Those of one object of each kind of PyTorch's that heldin handles."""
    leaf = torch.ones(2, requires_grad=True)
    things: list[Any] = [leaf, leaf.exp().grad_fn, leaf.untyped_storage(), nn.Linear(2, 2)]
    things += [torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.optim.SGD([leaf])]
    things += [DataLoader(TensorDataset(torch.ones(4)))]
    return {n for thing in things for n in dir(thing) if n[0] == "_" and n[:2] != "__"}


# on objects that come to be while a model trains; and asked for by text
OTHERS = re.compile(
    r"_(raw_)?saved_|_input_metadata$|_optimizer_.*hooks$|_join_config$|_get_iterator$"
)


def own_names(trees: list[ast.Module]) -> set[str]:
    """The methods and attributes that heldin's classes define."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    stored = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return functions | {node.attr for node in stored if ast.unparse(node.value) == "self"}


def private_uses(tree: ast.Module, names: set[str], own: set[str]) -> list[str]:
    """Imports, attributes and their names as texts that PyTorch does not promise to keep."""
    found = []
    for node in ast.walk(tree):
        said = ast.unparse(node) if isinstance(node, ast.Attribute | ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            path = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            found += [said] if any(part[0] == "_" for part in path) else []
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if re.match(r"torch\..*\b_", a.name)]
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            own_one = node.attr in own and said == f"self.{node.attr}"
            of_module = re.match(r"(torch|nn)\.", said)
            if of_module or OTHERS.match(node.attr) or (node.attr in names and not own_one):
                found.append(said)
        elif isinstance(node, ast.Constant) and OTHERS.match(str(node.value)):
            found.append(repr(node.value))
    return found


def test_private_names_stand_in_one_module() -> None:
    trees = {
        str(path.relative_to(SOURCE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "_private_torch.py"
    }
    names, own = private_names(), own_names(list(trees.values()))
    found = [f"{at}: {use}" for at, tree in trees.items() for use in private_uses(tree, names, own)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._C import thing",
        "from torch.nn.modules.dropout import _DropoutNd",
        "torch._foreach_norm([])",
        "nn.modules.dropout._DropoutNd",
        "tensor._base",
        "tensor.untyped_storage()._cdata",
        "func._schema",
        "module._buffers",
        "node._saved_self",
        "getattr(node, f'_raw_saved_{name}')",
        "vars(loader)['_get_iterator']",
        "getattr(model, '_join_config')",
        "self._optimizer_step_pre_hooks",
        "self._patch_step_function()",
    ],
)
def test_a_private_name_elsewhere_is_found(text: str) -> None:
    assert private_uses(ast.parse(text), private_names(), {"_buffers"})


@pytest.mark.parametrize("text", ["self._buffers", "self._heldin", "torch.__version__", "a._mine"])
def test_other_names_are_not(text: str) -> None:
    assert private_uses(ast.parse(text), private_names(), {"_buffers"}) == []


def test_every_private_name_has_a_test() -> None:
    text = Path(__file__).with_name("test_private_torch.py").read_text(encoding="utf-8")
    assert [name for name in private.__all__ if f"private.{name}" not in text] == []
