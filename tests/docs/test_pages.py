"""Links of the pages lead somewhere, images have texts, words are spelt right.

Python blocks are run by test_docs.py, those of the tutorials by the lab's test_figures.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)(```|~~~)(?P<kind>[^\n]*)\n(?P<code>.*?)^\1\2", re.M | re.S)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# --- code ------------------------------------------------------------------------------------


def is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return "(" in code or "=" in code


@each_page
def test_no_python_hides_from_the_tests(page: Path) -> None:
    """Python is in fences that say so, in doctests, or marked as an illustration; or a tutorial."""
    for fence in FENCE.finditer(page.read_text()):
        kind = fence["kind"].strip()
        if kind in ("", "text"):
            assert not is_python(fence["code"]), f"call it python: {fence['code'][:60]!r}"
        elif kind.startswith("py"):
            known = (
                ("py",)
                if page.parent.name == "tutorials"
                else ("python", "python illustration", "pycon")
            )
            assert kind in known, f"{kind}: {fence['code'][:60]!r}"


# --- links and images ------------------------------------------------------------------------


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site make them, and of API entries."""
    text = prose(page)
    found = set(re.findall(r"^::: (\S+)$", text, re.M))
    for heading in re.findall(r"^#+ (.+?)\s*$", text, re.M):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        found.add(re.sub(r"[-\s]+", "-", plain.strip().lower()))
    return found


def links(page: Path) -> Iterator[re.Match[str]]:
    text = re.sub(r"`[^`\n]*`", lambda code: code[0].replace("[", " "), prose(page))
    yield from LINK.finditer(text)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target = link["target"]
        if "://" in target:
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]{2,}(/[^\s<>\"]*)?", target), target
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if page.name == "CONTRIBUTING.md" or place.name == "contributing.md":
            place = place.with_name("CONTRIBUTING.md") if place.name == "contributing.md" else place
            place = ROOT / place.name if place.name == "CONTRIBUTING.md" else place
        assert place.exists(), f"{name_of(page)}: {target}"
        assert ROOT in place.parents, f"{name_of(page)}: {target} leads out of the repository"
        if anchor:
            assert anchor in anchors(place), f"{name_of(page)}: no #{anchor} in {place.name}"


@each_page
def test_images_have_words(page: Path) -> None:
    for link in links(page):
        if link["image"]:
            assert len(link["text"].split()) >= 2, f"{name_of(page)}: {link['target']} needs a text"
    for image in re.findall(r"<img[^>]*>", prose(page)):
        assert re.search(r'\balt="[^"]+\s[^"]+"', image), f"{name_of(page)}: {image}"


def test_every_figure_is_shown() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for suffix in ("png", "svg"):
        for image in (ROOT / "docs" / "figures").glob(f"*.{suffix}"):
            name = re.sub(r"(-narrow)?(-dark)?(?=\.png)", "", image.name)  # the site adds these
            assert f"figures/{name}" in text, f"{image.name} is in no page"


# --- words -----------------------------------------------------------------------------------


@cache
def american() -> dict[str, str]:
    """American spellings and the British ones, from codespell's list."""
    data = pytest.importorskip("codespell_lib").__path__[0]
    lines = (Path(data) / "data" / "dictionary_en-GB_to_en-US.txt").read_text().splitlines()
    pairs = (line.rstrip(",").split("->") for line in lines if "->" in line)
    both = {"biased", "check", "draft", "disk", "inquiry", "program", "routing", "story", "tire"}
    return {us: gb for gb, us in pairs if us not in both}


def misspelt(text: str) -> set[str]:
    """American words in prose; code, names and titles in italics may have them."""
    text = re.sub(r"`+[^`]*`+|\*[^*\n]+\*|<[^>]*>|https?://\S+|\]\([^)]*\)", " ", text)
    words = re.findall(r"(?<![\w./])[a-z]+(?![\w(=]|\.\w)", text)
    return {f"{word} -> {american()[word]}" for word in words if word in american()}


@each_page
def test_british_spelling(page: Path) -> None:
    text = re.sub(r"^>>> .*?(?=^\s*$|\Z)", "", prose(page), flags=re.M | re.S)
    assert misspelt(text) == set()


def test_british_spelling_of_docstrings() -> None:
    wrong: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = re.sub(
                    r"^\s*(>>>|\.\.\.) .*$", "", ast.get_docstring(node) or "", flags=re.M
                )
                text = re.sub(r"^\s+[\w, ]+:", "", text, flags=re.M)  # names of arguments
                wrong[path.name] = wrong.get(path.name, set()) | misspelt(text)
    assert {name: words for name, words in wrong.items() if words} == {}


def test_the_spelling_test_can_fail() -> None:
    assert misspelt("the color of behavior") == {"color -> colour", "behavior -> behaviour"}
    assert misspelt("`color` and *The color*") == set()


# --- messages --------------------------------------------------------------------------------


def test_every_warning_links_to_the_page_that_explains_it() -> None:
    anchors, silent = set(), []
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text()
        anchors |= set(re.findall(r"""\bmore\(["']([\w-]+)["']\)""", text))
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"):
                continue
            message, category = (ast.unparse(part) for part in node.args[:2])
            linked = "more(" in message or "IF_COPIES" in message  # which ends with a link
            if category.endswith("Warning") and not linked:
                silent.append(f"{path.name}: {message[:60]}")
    assert [line.partition(":")[0] for line in silent] == [
        "plan_cache.py",  # whose caller gives the link
        "early_stopping.py",  # the way out is in the message
        "row_checks.py",  # whose callers give the link
        "auto.py",  # the way out is in the message
    ]
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "when-it-goes-wrong.md").read_text(), re.M)
    assert {heading.lower().replace(" ", "-") for heading in headings} == anchors


ANSWERS = (
    "augmentation", "cost", "cross-validation", "distributed", "faq", "groups-time-imbalance",
    "how-many-epochs", "k-fold-lightning", "lora", "metrics", "no-validation-set",
    "per-sample-gradients", "schedules", "search", "skorch-grid-search",
    "time-series", "wrong-labels",
)  # fmt: skip


def count_words(text: str) -> int:
    """Words that a reader sees, without blocks of code."""
    return len(re.sub(r"<script>.*?</script>|<[^>]*>", "", FENCE.sub("", text), flags=re.S).split())


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_short(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert len(re.sub(r"<script>.*?</script>", "", text, flags=re.S).split()) < 900


# --- citation and README ---------------------------------------------------------------------


def test_citation() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.search(r"^## \[(\d.+?)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released is not None
    assert cited["version"] == released[1]  # what can be installed
    paper = cited["preferred-citation"]
    assert paper["title"] == "Early Stopping without a Validation Set"
    names = [author["family-names"] for author in paper["authors"]]
    assert names == ["Mahsereci", "Balles", "Lassner", "Hennig"]


def test_readme_has_its_parts_in_order() -> None:
    text = (ROOT / "README.md").read_text()
    parts = ["Train your PyTorch model on every row", "Tutorials", "<picture>"]
    parts += ["| today: hold out 20 % | today: five folds, then refit | heldin |"]
    parts += ['pip install "heldin', "```python", "```text", "## From a clone", "make demo"]
    parts += ["make test", "## Your own loop", "train_step", "## Your framework"]
    parts += ["heldin fit", "## The paper's criterion", "## Limits", "## Citation", "CITATION.cff"]
    places = [text.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    assert count_words(text) <= 700


def run_alone(code: str, folder: Path) -> str:
    """Return what a program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(kind: str) -> list[str]:
    fences = FENCE.finditer((ROOT / "README.md").read_text())
    return [fence["code"] for fence in fences if fence["kind"] == kind]


def test_the_first_block_of_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    """The block runs in an empty file, imports included."""
    pytest.importorskip("sklearn")
    code = blocks("python")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    printed = run_alone("import torch; torch.set_num_threads(1)\n" + code, tmp_path)
    number = re.compile(r"[\d.]+")
    (shown,) = blocks("text")
    assert number.sub("#", printed) == number.sub("#", shown)
    pairs = zip(number.findall(printed), number.findall(shown), strict=True)
    assert all(float(one) == pytest.approx(float(other), abs=0.02) for one, other in pairs)


def test_the_blocks_of_the_readme_run_from_the_top(tmp_path: Path) -> None:
    """In one namespace, as in a notebook; each later block trains a model of its own."""
    pytest.importorskip("sklearn")
    first, *later = blocks("python")
    assert len(later) == 3
    code = "import torch; torch.set_num_threads(1)\n" + first
    for block in later:
        short = block.replace(".epochs(500)", ".epochs(3)")
        assert short != block
        assert "model, optimizer = make()\n" in short
        code += f"{short}\nprint('ran', stopping.history[-1].step, epoch)\n"
    assert run_alone(code, tmp_path).count("ran 54 2") == 3


# --- arguments that pages name ---------------------------------------------------------------

PUBLIC = (
    "*.py", "adapters/*.py", "capture/observation.py", "criterion/*.py", "crossval/*.py",
    "rules/elementwise.py", "rules/options.py", "rules/policy.py", "rules/results.py",
    "sklearn/*.py",
)  # fmt: skip
FOREIGN = {  # arguments of PyTorch, scikit-learn and frameworks
    "amp_mode", "bf16", "ckpt_path", "direction", "dispatch_batches", "find_unused_parameters",
    "flatten_optimizer_state_dict", "fp16", "jit_compile", "metric_names", "mixed_precision",
    "packing", "padding_free", "restore_best_weights", "restore_callback_states_from_checkpoint",
    "resume_from_checkpoint", "retain_graph", "scoring", "static_graph", "strategy",
    "train_split", "use_buffers", "use_ema", "validation_split", "weights_only",
}  # fmt: skip


@cache
def arguments() -> frozenset[str]:
    """Names of arguments and fields of what users call."""
    found: set[str] = set()
    for pattern in PUBLIC:
        for path in (ROOT / "src" / "heldin").glob(pattern):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    found |= {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
    return frozenset(found)


def unknown_arguments(text: str) -> set[str]:
    """`name=` in the code of a sentence, where nothing has an argument of that name."""
    code = " ".join(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))
    named = set(re.findall(r"(?<![\w.-])([a-z_]\w*)=(?!=)", code))
    return named - arguments() - FOREIGN


@each_page
def test_arguments_that_a_page_names_exist(page: Path) -> None:
    assert unknown_arguments(page.read_text()) == set()


def test_the_test_of_arguments_can_fail() -> None:
    assert unknown_arguments("`patience=5`, `rules.Evidence(arming=0.5)`") == {"arming"}
