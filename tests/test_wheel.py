"""The wheel and the sdist: what is in them, and that they work beside PyTorch and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

for needed in ("build", "hatchling", "hatch_fancy_pypi_readme", "packaging"):
    pytest.importorskip(needed, reason=f"{needed} is needed to build the wheel: make setup")
from packaging.requirements import Requirement

import heldin

ROOT = Path(heldin.__file__).parents[2]
if not (ROOT / "pyproject.toml").exists():
    pytest.skip("not run from the source tree", allow_module_level=True)

KINDS = {".py", ".typed", ".html", ".css", ".js", ".md"}  # templates of reports, too


# What the README takes for granted: a model, data, a loss and an optimiser.
def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
    bare["PYTHONWARNINGS"] = "ignore::UserWarning"  # PyTorch's, of a numpy that it did not find
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=bare, cwd=cwd
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, built from the sdist, and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def test_the_wheel_has_the_library_and_nothing_else(built: tuple[Path, Path]) -> None:
    assert built[0].name == f"heldin-{heldin.__version__}-py3-none-any.whl"
    assert built[0].stat().st_size < 1_000_000
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
    folders = {name.split("/")[0] for name in names}
    assert folders == {"heldin", f"heldin-{heldin.__version__}.dist-info"}
    assert {Path(name).suffix for name in names if name.startswith("heldin/")} <= KINDS
    source = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "heldin").rglob("*.py")}
    assert source <= {name.replace("/", os.sep) for name in names}
    assert "heldin/py.typed" in names


def test_the_sdist_has_what_the_tests_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "tests/test_wheel.py", "docs/index.md"}
    assert wanted | {"pyproject.toml", "src/heldin/__init__.py"} <= names
    assert not {name.split("/")[0] for name in names} & {".github", ".venv", "lab", "site", "out"}


def test_the_page_of_the_package_index(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        head, _, page = wheel.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(targets) > 15
    assert [target for target in targets if not target.startswith("https://")] == []
    ours = [t for t in targets if "/main/" in t]
    assert len(ours) > 10
    for target in ours:  # they name files that are there
        assert (ROOT / target.split("/main/")[1].partition("#")[0]).exists(), target


@pytest.mark.parametrize(
    ("tool", "options"),
    [("twine", ["check", "--strict"]), ("check_wheel_contents", []), ("pyroma", ["--min=10"])],
)
def test_checkers_find_nothing(tool: str, options: list[str], built: tuple[Path, Path]) -> None:
    pytest.importorskip(tool)
    files = {"twine": [*built], "check_wheel_contents": [built[0]], "pyroma": [built[1]]}[tool]
    done = run(sys.executable, "-m", tool, *options, *files)
    assert done.returncode == 0, done.stdout + done.stderr


# --- installed ---------------------------------------------------------------------------------


def needs_of(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """A distribution and all that it requires here, by name."""
    if name not in found:
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # an optional part that this platform goes without
            return found
        for line in found[name].requires or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                needs_of(need.name, found)
    return found


def link(name: str, packages: Path) -> None:
    """Link a distribution of this environment, and all that it requires, into a folder."""
    packages.mkdir(exist_ok=True)
    for needed in needs_of(name, {}).values():
        for top in {file.parts[0] for file in needed.files or [] if file.parts[0] != ".."}:
            there = Path(str(needed.locate_file(top)))
            if there.name != "__pycache__" and not (packages / top).exists():
                try:
                    (packages / top).symlink_to(there, target_is_directory=there.is_dir())
                except OSError as error:
                    pytest.skip(f"no links to files can be made here: {error}")


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a fresh environment with the wheel and this one's PyTorch alone."""
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, symlinks=os.name != "nt")
    programs = home / ("Scripts" if os.name == "nt" else "bin")
    python = programs / ("python.exe" if os.name == "nt" else "python")
    done = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    packages = Path(done.stdout.strip())
    link("torch", packages)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet"]
    done = run(*pip, built[0])
    if "no such option: --python" in done.stderr or "No module named pip" in done.stderr:
        pytest.skip("pip 22.3 is needed to install into another environment")
    assert done.returncode == 0, done.stderr
    return programs


def test_the_first_example_of_the_readme(installed: Path, tmp_path: Path) -> None:
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert first is not None
    pytest.importorskip("sklearn")
    link("scikit-learn", tmp_path / "extra")
    program = f"import sys; sys.path.append({str(tmp_path / 'extra')!r})\n{first[1]}"
    done = run(installed / "python", "-c", program + "\nprint(heldin.__file__)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loss, accuracy, place = done.stdout.splitlines()
    assert loss.startswith("loss 0.")
    assert accuracy.startswith("accuracy 0.9")
    assert Path(place).is_relative_to(installed.parent)
    done = run(installed / "python", "-c", "import heldin, numpy; heldin.EarlyStopping")
    assert "ModuleNotFoundError" in done.stderr  # or this test shows less than it says
    assert "numpy" in done.stderr


def test_the_program(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "heldin", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "predict" in done.stdout
    done = run(installed / "heldin", "--version", cwd=tmp_path)
    assert done.stdout == f"heldin {heldin.__version__}\n"


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("fit table.csv --target y --out model", "fit"),
        ("predict model table.csv", "fit"),
        ("demo", "demo"),
    ],
)
def test_commands_name_their_extra(
    command: str, extra: str, installed: Path, tmp_path: Path
) -> None:
    done = run(installed / "heldin", *command.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()  # no traceback
    assert f"pip install 'heldin[{extra}]'" in line
    assert list(tmp_path.iterdir()) == []
