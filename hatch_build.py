"""Compiles src/heldin/_compiled.c while the package is built or installed, if that can be done.

heldin works without it, more slowly. The compiler is that of the environment variable CC, or the
first of cc, gcc and clang; the headers of Python have to be there, too. What is compiled fits every
version of Python from 3.10 on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

FLAGS = ["-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
# With OpenMP the library shares PyTorch's threads; macOS has none.
WAYS = [[*FLAGS, "-fopenmp"], [*FLAGS, "-fopenmp-simd"], FLAGS]


class CompileKernels(BuildHookInterface):
    """The build hook, see pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; on success the wheel is one for this platform."""
        folder = Path(self.root, "src", "heldin")
        target = folder / "_compiled.abi3.so"
        target.unlink(missing_ok=True)
        if self.target_name == "wheel" and compiled(folder / "_compiled.c", target):
            build_data["pure_python"] = False
            build_data["tag"] = f"cp310-abi3-{next(sys_tags()).platform}"


def compiled(source: Path, target: Path) -> bool:
    """Whether the source could be compiled."""
    named = os.environ.get("CC")
    known = [shutil.which(name) for name in ((named,) if named else ("cc", "gcc", "clang"))]
    compiler = next((path for path in known if path is not None), None)
    if compiler is None or sys.platform == "win32":
        return False
    for flags in WAYS:
        headers = ["-I", sysconfig.get_path("include")]
        command = [compiler, *flags, *headers, str(source), "-o", str(target)]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return True
    return False
