"""Three more kinds of network tasks: what their rows and networks are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import heldin
from heldin_lab.study import more_networks
from heldin_lab.study.more_networks import MORE, more_task
from heldin_lab.study.spec import Spec


def spec(kind: str, model: int = 0, seed: int = 3) -> Spec:
    ways = MORE[kind]
    return Spec(kind, ways.sizes[0], 0.2, ways.models[model], ways.optimizers[-1], seed, 40)


@pytest.mark.parametrize("kind", ["halves", "topics"])
def test_a_run_trains_and_is_made_again_by_its_seed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(more_networks, "STEPS", 3)
    task, run = more_task(kind, tmp_path), spec(kind)
    problem, again = task.problem(run), task.problem(run)
    assert torch.equal(problem.y, again.y)
    assert len(problem.x) == len(problem.y) == run.n
    assert len(problem.x_test) > 500
    assert not torch.equal(problem.y_test, problem.y_clean)  # there is noise
    model, twin = task.model(run, problem), task.model(run, problem)
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    optimizer, _ = task.optimizer(run, model)
    before = float(problem.loss_fn(model(problem.x), problem.y).detach())
    for _ in range(run.steps):
        optimizer.zero_grad()
        problem.loss_fn(model(problem.x), problem.y).backward()
        optimizer.step()
    assert float(problem.loss_fn(model(problem.x), problem.y).detach()) < before


def test_pieces_of_text_are_not_of_what_the_reader_has_seen() -> None:
    texts = more_networks.texts_by_topic()
    classes, rest = texts[: more_networks.TOPICS], texts[more_networks.TOPICS :]
    assert not any(text[:100] in other for text in classes for other in rest)


def test_only_the_head_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(more_networks, "STEPS", 1)
    task, run = more_task("topics", tmp_path), spec("topics", model=1)
    model = task.model(run, task.problem(run))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "1.weight",
        "1.bias",
    ]


def test_the_detector_computes_what_its_weights_say(tmp_path: Path) -> None:
    """Flattened by columns, rows, channels, as the published weights were trained."""
    sizes = {"conv1": (28, 3, 3, 3), "conv2": (48, 28, 3, 3), "conv3": (64, 48, 2, 2)}
    generator = torch.Generator().manual_seed(0)
    state = {f"{k}.weight": 0.1 * torch.randn(v, generator=generator) for k, v in sizes.items()}
    state |= {f"{k}.bias": torch.zeros(v[0]) for k, v in sizes.items()}
    state |= {f"prelu{i}.weight": torch.full((n,), 0.3) for i, n in enumerate((28, 48, 64, 128), 1)}
    state["dense4.weight"] = torch.randn(128, 576, generator=generator)
    state["dense4.bias"] = torch.zeros(128)
    torch.save(state, tmp_path / "rnet.pt")
    trunk = more_networks.detector(tmp_path / "rnet.pt")
    x = torch.randn(2, 3, 24, 24, generator=generator)
    maps = trunk[:8](x)
    flat = maps.permute(0, 3, 2, 1).flatten(1)
    wanted = torch.nn.functional.prelu(flat @ state["dense4.weight"].T, torch.full((128,), 0.3))
    assert torch.allclose(trunk(x), wanted, atol=1e-5)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(more_networks, "find_spec", lambda name: None)
    with pytest.raises(heldin.HeldinError, match="pip install --no-deps facenet-pytorch"):
        more_task("faces", tmp_path)


def test_faces(tmp_path: Path) -> None:
    for package in ("facenet_pytorch", "skimage"):
        if more_networks.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    task = more_task("faces", tmp_path)
    problem = task.problem(spec("faces"))
    assert problem.x.shape == (50, 3, 24, 24)
    assert np.isclose(float(problem.y_clean.mean()), 0.5, atol=0.15)
