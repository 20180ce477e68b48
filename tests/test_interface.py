"""What `import heldin` shows, and what becomes of names that were there before."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
