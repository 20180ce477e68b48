"""`make matrix`: the core suite with other versions of Python and PyTorch, each kept apart.

Versions of Python that are not on the machine are left out. Which build of PyTorch is taken is up
to pip: on Linux it has the libraries for GPUs with it, several GB for each environment, unless pip
is told of another place (PIP_INDEX_URL, PIP_FIND_LINKS).
"""

from __future__ import annotations

import datetime
import platform
from pathlib import Path
from xml.etree import ElementTree

import nox

ROOT = Path(__file__).parent
OUT = ROOT / "out" / "matrix"
RESULT = ROOT / "docs" / "results" / "matrix.md"
VERSIONS = [  # the ends of what is supported, and what constraints.txt pins
    ("3.10", "2.10.0"),
    ("3.11", "2.13.0"),
    ("3.13", "2.15.0"),
]
# among the cores, all tests of a module in one process
SHARED = ["--numprocesses", "auto", "--dist", "loadscope", "--no-loadscope-reorder"]
EXTRAS_TESTS = [f"tests/{name}" for name in ("adapters", "cli", "sklearn", "state", "tables")]
EXTRAS_TESTS += ["tests/docs/test_examples.py", "lab/tests"]
FRAMEWORKS = "accelerate,ignite,keras,lightning,skorch,transformers"
METADATA = nox.project.load_toml(ROOT / "pyproject.toml")
nox.options.error_on_missing_interpreters = False


def group(*names: str) -> list[str]:
    """Return the requirements of groups of pyproject.toml."""
    return list(nox.project.dependency_groups(METADATA, *names))


@nox.session
@nox.parametrize("python,torch", [nox.param(*v, id="-".join(v)) for v in VERSIONS])
def core(session: nox.Session, torch: str) -> None:
    """The tests, with PyTorch and no other package but those that run tests."""
    session.install(f"torch=={torch}", "--editable", ".", *group("test"))
    OUT.mkdir(parents=True, exist_ok=True)
    report = OUT / f"{session.python}-{torch}"
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    found = session.run("python", "-c", code, silent=True)
    Path(f"{report}.txt").write_text(str(found).strip().splitlines()[-1])
    command = ["python", "-m", "pytest", *SHARED]
    session.run(
        *command,
        f"--junitxml={report}.xml",
        *(session.posargs or ["tests"]),
        env={"OMP_NUM_THREADS": "1"},
        success_codes=[0, 1],  # the table tells what failed, and fails then
    )


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The tests of adapters, tables and commands with the oldest extras that are allowed."""
    torch = dict(VERSIONS)["3.11"]
    session.install("uv", f"torch=={torch}")
    packages = ["--editable", f".[{FRAMEWORKS},parquet]", "--editable", "./lab"]
    resolved = ["uv", "pip", "install", "--resolution", "lowest-direct"]
    session.run(*resolved, f"torch=={torch}", *packages, *group("test", "frameworks"))
    session.run("uv", "pip", "install", "ipython")  # that fastai imports
    session.run("uv", "pip", "install", "--no-deps", "fastai==2.8.12")
    OUT.mkdir(parents=True, exist_ok=True)
    report = OUT / f"{session.python}-{torch}-lowest"
    Path(f"{report}.txt").write_text(f"{session.python} {torch},_oldest_extras")
    session.run(
        "python", "-m", "pytest", *SHARED,
        f"--junitxml={report}.xml", *(session.posargs or EXTRAS_TESTS),
        env={"OMP_NUM_THREADS": "1"}, success_codes=[0, 1],
    )  # fmt: skip


@nox.session(venv_backend="none")
def table(session: nox.Session) -> None:
    """The results, into CONTRIBUTING.md; of what was not run this time, those of before."""
    head, rows = RESULT.read_text().splitlines()[:2], {}
    for line in RESULT.read_text().splitlines()[2:]:
        rows[tuple(cell.strip() for cell in line.split("|")[1:3])] = line
    machine, failed = f"{platform.system()} {platform.machine()}", 0
    for report in sorted(OUT.glob("*.xml"), key=lambda path: path.stem):
        python, torch = Path(f"{report}"[:-4] + ".txt").read_text().split()
        suite = next(ElementTree.parse(report).iter("testsuite")).attrib
        bad, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
        passed = int(suite["tests"]) - bad - skipped
        day = datetime.datetime.fromisoformat(suite["timestamp"]).date()
        torch = torch.replace("_", " ")
        cells = (python, torch, passed, bad, skipped, machine, day)
        rows[python, torch] = f"| {' | '.join(map(str, cells))} |"
        failed += bad
    RESULT.write_text("\n".join([*head, *(rows[key] for key in sorted(rows))]) + "\n")
    session.run("python", "docs/fill.py", external=True)
    if failed:
        session.error(f"{failed} tests failed; {OUT} has the reports")
