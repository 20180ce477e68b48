"""The package as it is imported and called by its name: quick, and sure of its versions."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

import heldin
from heldin import _api, _requirements
from heldin.cli import main as _cli
from tests.support import machine, shuffled

ROOT = Path(heldin.__file__).parents[2]
METADATA = ROOT / "pyproject.toml"
if not METADATA.exists():
    pytest.skip("not run from the source tree", allow_module_level=True)


def test_every_public_name_has_a_home() -> None:
    assert heldin.__all__ == sorted(heldin.__all__)
    homes = {name for name in vars(_api) if name[0] != "_"}
    assert homes == set(heldin.__all__)
    assert heldin.EarlyStopping is _api.EarlyStopping
    assert set(dir(heldin)) >= {*heldin.__all__, "state", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'LateStopping'"):
        heldin.LateStopping  # noqa: B018


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, heldin; assert 'torch' not in sys.modules; heldin.observe; heldin.ops"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert not re.search(r"^version = ", METADATA.read_text(), re.M)  # it is read from the package
    with pytest.raises(SystemExit) as exit:
        _cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"heldin {heldin.__version__}\n"


def test_help_is_quick() -> None:
    """Below a second: of what takes long to import, it imports nothing (0.1 s; PyTorch: 1.4 s)."""
    code = (
        "import sys, heldin.cli.main as cli\n"
        "try: cli.main(['--help'])\n"
        "finally: assert not {'torch', 'numpy', 'tqdm'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert all(f"\n    {name}" in done.stdout for name in _cli.COMMANDS)


@pytest.mark.parametrize("name", _cli.COMMANDS)
def test_commands_say_how_they_are_called(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        _cli.main([name, "--help"])
    assert exit.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"usage: heldin {name} ")
    assert _cli.COMMANDS[name][1] in said


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: heldin ")
    assert all(f"\n    {name}" in said for name in _cli.COMMANDS)


def test_a_wrong_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(["Fits", "data.csv"]) == 2
    said = "heldin: there is no command 'Fits'; did you mean 'fit'?\n"
    assert capsys.readouterr().err == said
    assert _cli.main(["xyz"]) == 2
    assert "'xyz'; commands are demo, fit, predict" in capsys.readouterr().err


def test_all_commands_at_once() -> None:
    assert _cli.parser().parse_args(["predict", "model", "rows.csv"]).data == "rows.csv"


@pytest.mark.parametrize("found", ["2.9.1", "2.6.0+cpu", "1.13.1"])
def test_an_old_torch_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=found))
    with pytest.raises(ImportError, match=r"needs PyTorch \d\.\d+ or newer, and .* is installed"):
        _requirements.check_torch()


@pytest.mark.parametrize("found", ["2.13.0+cpu", "2.16.0.dev20261116", "3.0.0a0+git", "unknown"])
def test_another_torch_is_not(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=found))
    _requirements.check_torch()


def test_the_version_is_known_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert _requirements._torch_version()
    monkeypatch.setattr(_requirements, "version", lambda name: "2.5.1")
    with pytest.raises(ImportError, match=r"2\.5\.1"):
        _requirements.check_torch()

    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(_requirements, "version", nothing)
    _requirements.check_torch()


def test_the_oldest_torch_is_the_one_that_is_asked_for() -> None:
    floor = ".".join(map(str, _requirements.OLDEST_TORCH))
    assert f'\ndependencies = ["torch>={floor}"]\n' in METADATA.read_text()


# --- what the machine cannot do ------------------------------------------------------------------


def cannot() -> None:
    raise RuntimeError("could not create a primitive. Run with ONEDNN_VERBOSE=all\nand more")


def test_what_pytorch_alone_cannot_do_is_skipped_by_name() -> None:
    reason = r"PyTorch alone cannot do this here: could not create a primitive$"
    with pytest.raises(pytest.skip.Exception, match=reason), machine.supported(cannot):
        cannot()


def test_what_only_heldin_cannot_do_fails() -> None:
    with pytest.raises(RuntimeError, match="primitive"), machine.supported(lambda: None):
        cannot()
    with pytest.raises(AssertionError), machine.supported(cannot):  # a wrong value is no excuse
        raise AssertionError


def test_another_order_of_tests() -> None:
    names = [f"tests/test_{module}.py::test_{number}" for module in "abcd" for number in range(5)]
    order = shuffled.shuffled(names, seed=1)
    assert sorted(order) == list(range(20)) != order
    modules = [place // 5 for place in order]
    assert sum(a != b for a, b in itertools.pairwise(modules)) == 3  # kept together
    assert modules != sorted(modules)
    assert shuffled.shuffled(names, seed=1) == order != shuffled.shuffled(names, seed=2)
