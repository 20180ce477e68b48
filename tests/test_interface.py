"""What `import heldin` shows, and what becomes of names that were there before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import heldin


def test_few_names_at_the_top_level() -> None:
    assert len(heldin.__all__) <= 16
    for name in heldin.__all__:
        assert getattr(heldin, name) is not None


@pytest.mark.parametrize("name", sorted(heldin._MOVED))
def test_an_old_name_works_and_says_the_new_one(name: str) -> None:
    module, new = heldin._MOVED[name].split(".")
    with pytest.warns(DeprecationWarning, match=rf"heldin\.{name} is now heldin\.{module}\.{new};"):
        found = getattr(heldin, name)
    assert found is getattr(getattr(heldin, module), new)
    assert new in getattr(heldin, module).__all__


def test_an_old_name_can_be_imported() -> None:
    with pytest.warns(DeprecationWarning, match=r"heldin\.save is now heldin\.state\.save"):
        from heldin import save
    assert save is heldin.state.save


def test_a_name_that_never_was() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = heldin.nothing


def test_modules_of_the_library_do_not_load_the_laboratory() -> None:
    code = (
        "import sys, heldin, heldin.tables.trainer, heldin.adapters.session; "
        "print([name for name in sys.modules if name.startswith(('heldin.lab', 'heldin.cli'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- old names of methods and arguments


def test_remove_is_close() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(20, 2), torch.randn(20, 1)
    rules = [
        heldin.EvidenceStopping(model),
        heldin.ValidationStopping(model),
        heldin.ElementwiseStopping(optimizer, model),
        heldin.stopping("shadow", model, optimizer, torch.nn.MSELoss(), data),
    ]
    for rule in rules:
        name = type(rule).__name__
        with pytest.warns(DeprecationWarning, match=rf"{name}\.remove is now {name}\.close"):
            rule.remove()
    with heldin.ElementwiseStopping(optimizer, model) as wrapped:
        pass
    assert wrapped._model is None


def test_old_ways_to_restore() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.warns(
        DeprecationWarning, match=r"\(restore=\.\.\.\) is now .*\(restore_best=\.\.\.\)"
    ):
        rule = heldin.ValidationStopping(model, restore=False)
    rule.step(1.0)
    old = pytest.warns(DeprecationWarning, match=r"is now ValidationStopping\.restore;")
    with old, pytest.raises(heldin.HeldinError, match="no weights are kept"):
        rule.restore_best()
