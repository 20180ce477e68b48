"""A check of the installed version of PyTorch, when heldin is imported."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["OLDEST_TORCH", "check_torch"]

OLDEST_TORCH = (2, 10)  # must agree with pyproject.toml


def check_torch() -> None:
    """Refuse versions of PyTorch on which results would be silently wrong."""
    version_text = _torch_version()
    numbers = re.match(r"(\d+)\.(\d+)", version_text or "")
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"heldin needs PyTorch {needed} or newer, and {version_text} is installed, on which "
            f"parts of the gradients would be missed; pip install 'torch>={needed}'"
        )


def _torch_version() -> str | None:
    """Return the version of PyTorch, without importing it."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return version("torch")
    except PackageNotFoundError:
        return None  # a source tree, or PyTorch is missing and its import will fail
