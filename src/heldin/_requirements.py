"""What heldin needs, checked when it is imported and not at the first surprise."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["OLDEST_TORCH", "check_torch"]

OLDEST_TORCH = (2, 10)  # as in pyproject.toml, a test compares them


def check_torch() -> None:
    """Refuse versions of PyTorch on which results would be wrong, not only code that fails."""
    found = _torch_version()
    numbers = re.match(r"(\d+)\.(\d+)", found or "")
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"heldin needs PyTorch {needed} or newer, and {found} is installed, on which parts of "
            f"the gradients would be missed; pip install 'torch>={needed}'"
        )


def _torch_version() -> str | None:
    """The version of PyTorch, which need not have been imported."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return version("torch")
    except PackageNotFoundError:
        return None  # from a source tree; or not there, which the import of it will say
