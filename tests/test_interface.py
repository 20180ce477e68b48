"""What `import heldin` shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

import heldin


def test_few_names_at_the_top_level() -> None:
    assert len(heldin.__all__) <= 19
    for name in heldin.__all__:
        assert getattr(heldin, name) is not None


def test_a_name_that_never_was() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = heldin.nothing


def test_modules_of_the_library_do_not_load_the_laboratory() -> None:
    code = (
        "import sys, heldin, heldin.adapters.session; "
        "print([name for name in sys.modules if name.startswith(('heldin_lab', 'heldin.cli'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
