"""What a public host reads: workflows, forms, the changelog, and the versions that they name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import heldin
from heldin._requirements import OLDEST_TORCH

ROOT = Path(heldin.__file__).parents[2]
HOST = ROOT / ".github"
if not HOST.exists():
    pytest.skip("not run from the repository", allow_module_level=True)
yaml = pytest.importorskip("yaml")
WORKFLOWS = sorted((HOST / "workflows").glob("*.yml"))
FORMS = sorted((HOST / "ISSUE_TEMPLATE").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.github-issue-forms": [form for form in FORMS if form.stem != "config"],
    "vendor.github-issue-config": [HOST / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.dependabot": [HOST / "dependabot.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
    "vendor.readthedocs": [ROOT / ".readthedocs.yaml"],
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_have_the_form_that_the_host_asks_for(schema: str) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    done = subprocess.run([*command, *map(str, SCHEMAS[schema])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_do_little_and_end(path: Path) -> None:
    flow = read(path)
    assert flow["permissions"] == {"contents": "read"}
    for name, job in flow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 90, name
        for step in job["steps"]:
            if "uses" in step:  # a tag can be moved, a commit cannot
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), step
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False
            # what an outsider can name must not be pasted into a shell
            assert "${{ github." not in step.get("run", ""), step


def test_the_matrix_has_both_ends() -> None:
    matrix = read(HOST / "workflows" / "tests.yml")["jobs"]["core"]["strategy"]["matrix"]
    oldest, newest = matrix["include"][:2]
    assert oldest["torch"] == ".".join(map(str, OLDEST_TORCH))
    metadata = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', metadata)
    assert (oldest["python"], newest["python"]) == (pythons[0], pythons[-1])
    page = (ROOT / "docs" / "versions.md").read_text()
    assert f"| Python | {oldest['python']} | {newest['python']} |" in page
    assert f"| PyTorch | {oldest['torch']} | {newest['torch']} |" in page
    assert (
        f"Python {oldest['python']} and PyTorch {oldest['torch']}, or newer"
        in (ROOT / "README.md").read_text()
    )


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.+)$", text, re.M)
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title) for title in titles[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= kinds
    for title in titles:  # each leads to the changes on the host
        assert re.search(rf"^{re.escape(title.split(' ')[0])}: https://", text, re.M), title
    coming, released = heldin.__version__.partition(".dev")[0], titles[1][1:].split("]")[0]
    newer = [tuple(map(int, version.split("."))) for version in (coming, released)]
    assert newer[0] > newer[1] if ".dev" in heldin.__version__ else newer[0] == newer[1]


# Whoever installs heldin says where packages come from, and no machine's folders are another's.
FOREIGN = re.compile(
    r"(pypi|pythonhosted|download\.pytorch|anaconda|npmjs)[.](org|com)"
    r"|(?<![\w.~*$}/)-])(file://)?/(work|root|home|tmp|Users|opt)/\w"
)


def test_no_package_index_and_no_machine_is_named() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    if not files:
        pytest.skip("not run from a clone")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.is_file()
        for match in FOREIGN.finditer(path.read_text(encoding="latin-1"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",  # | is / and , is . as this file is looked at, too
    [
        "https:||download,pytorch,org|whl|cpu",
        "[PyPI](https:||pypi,org|p|heldin)",
        "HELDIN_DATA=|home|me|data",
        "cd |work|main && make",
        '"|tmp|x"',
        "file:|||opt|wheels",
    ],
)
def test_what_names_one_is_found(text: str) -> None:
    assert FOREIGN.search(text.replace("|", "/").replace(",", "."))


@pytest.mark.parametrize("text", ["https://a.org/work/x", "~/work/x", "out/tmp/x", "a.io/pypi/v"])
def test_what_names_none_is_not(text: str) -> None:
    assert FOREIGN.search(text) is None


def test_the_recipe_has_what_the_package_has() -> None:
    """Compare the conda-forge recipe with pyproject.toml; conda calls torch pytorch."""
    text, recipe = (ROOT / "pyproject.toml").read_text(), read(ROOT / "recipe" / "recipe.yaml")
    needed = dict(re.findall(r'"([\w-]+)(>=[\d.]+)"', text.partition("[tool.")[0]))
    requires = re.search(r"^requires = \[(.*)\]$", text, re.M)
    assert requires is not None
    builders = re.findall(r'"([\w-]+)(>=[\d.]+)"', requires[1])
    host, run = (recipe["requirements"][part] for part in ("host", "run"))
    assert [each for each in host if each.startswith("hatch")] == [" ".join(b) for b in builders]
    assert run[1:] == [f"pytorch {needed['torch']}"]
    (script,) = recipe["build"]["python"]["entry_points"]
    name, _, target = script.partition(" = ")
    assert f'{name} = "{target}"' in text
    for part in ("homepage", "documentation"):
        assert f'{part.capitalize()} = "{recipe["about"][part]}"' in text
    assert f'description = "{recipe["about"]["summary"]}"' in text
    assert heldin.__version__.startswith(recipe["context"]["version"])
