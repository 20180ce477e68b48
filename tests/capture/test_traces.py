"""Observing leaves no trace: in training, in memory, in what is imported."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support.observe_runs import agree, net


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train(observed: bool) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    ).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    values = []
    seen = heldin.observe(model)
    if observed:
        seen.__enter__()
    for _ in range(20):
        x = torch.randn(5, 6, dtype=torch.float32)
        loss = F.cross_entropy(model(x), torch.randint(0, 3, (5,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values += [loss.detach(), *[p.detach().clone() for p in model.parameters()]]
    seen.close()
    return values, torch.get_rng_state()


def test_training_is_bit_identical() -> None:
    plain, observed = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], observed[0], strict=True))
    assert torch.equal(plain[1], observed[1])


def test_hooks_of_the_user_see_what_they_would() -> None:
    model, x = net(3, 4, 2), torch.randn(5, 3)
    calls: list[Tensor] = []
    handle = model[0].weight.register_hook(lambda g: calls.append(g.clone()) or g * 0)
    with heldin.observe(model) as seen:
        model(x).sin().sum().backward()
    assert len(calls) == 1
    assert torch.equal(model[0].weight.grad, torch.zeros(4, 3))
    handle.remove()
    agree(seen, model, model(x).sin().sum(1))


def test_backward_is_put_back() -> None:
    before = torch.autograd.backward
    with heldin.observe(net(3, 2)):
        assert torch.autograd.backward is not before
        with heldin.observe(net(3, 2)):
            pass
        assert torch.autograd.backward is not before
    assert torch.autograd.backward is before


def test_errors_in_forward_and_backward_leave_no_trace() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.fail = nn.Linear(3, 2), ""

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if self.fail == "forward":
                raise RuntimeError("on purpose")
            if self.fail == "backward":
                h.register_hook(self.broken)
            return h.sin()

        def broken(self, grad: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    model, x = Fragile(), torch.randn(4, 3)
    with heldin.observe(model) as seen:
        for fail in ("forward", "", "forward", "backward", ""):
            model.fail = fail
            seen.clear()
            if fail:
                with pytest.raises(RuntimeError, match="on purpose"):
                    model(x).sum().backward()
                assert len(seen) == 0
                assert seen.count == 0
            else:
                model(x).sum().backward()
                agree(seen, model, model(x).sum(1))
                seen.clear()


def test_two_models_and_nested_observation() -> None:
    a, b, x = net(3, 2), net(2, 2), torch.randn(5, 3)
    with heldin.observe(a) as outer, heldin.observe(b) as other, heldin.observe(a) as inner:
        b(a(x)).sin().sum().backward()
    agree(outer, a, b(a(x)).sin().sum(1))
    agree(inner, a, b(a(x)).sin().sum(1))
    agree(other, b, b(a(x)).sin().sum(1))


def test_copies_of_an_observed_model_are_not_observed() -> None:
    model, x = net(3, 2), torch.randn(5, 3)
    with heldin.observe(model) as seen:
        model(x).sum().backward()
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        read = torch.load(buffer, weights_only=False)
        for other in (twin, read):
            other(x).sum().backward()
            assert torch.equal(other(x), model(x))
    assert seen.count == 5


def test_closing_one_observation_leaves_the_others() -> None:
    a, b, x = net(3, 2), net(3, 2), torch.randn(5, 3)
    with heldin.observe(a) as first:
        other = heldin.observe(b)
        other.__enter__()
        other.pause()
        a(x).sum().backward()
        b(x).sum().backward()
        other.close()
        a(x).sum().backward()
    assert first.count == 10
    assert other.count == 0


def test_threads() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            model = net(3, 4, 2)
            with heldin.observe(model) as seen:
                for _ in range(20):
                    x = torch.randn(4 + seed, 3, generator=generator)
                    seen.clear()
                    model(x).sin().sum().backward()
                    agree(seen, model, model(x).sin().sum(1))
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


def tensors_alive() -> int:
    gc.collect()
    return sum(1 for o in gc.get_objects() if issubclass(type(o), Tensor))


def test_nothing_is_kept_alive(request: pytest.FixtureRequest) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    gc.collect()
    request.addfinalizer(gc.unfreeze)
    gc.freeze()  # what other tests have left is not searched again and again
    with heldin.observe(model) as seen:
        counts = []
        for step in range(30):
            out = model(torch.randn(5 if step % 3 else 6, 3))
            out.sin().sum().backward()
            seen.clear()
            model(torch.randn(5, 3))  # never followed back
            del out
            counts.append(tensors_alive())
            model.zero_grad()
        assert len(set(counts[6:])) <= 2, counts
    reference = sys.getrefcount(model)
    del seen
    assert sys.getrefcount(model) == reference


def test_the_graph_dies_with_the_step() -> None:
    class Watched(torch.autograd.Function):
        alive = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            class Token:
                def __init__(self) -> None:
                    Watched.alive += 1

                def __del__(self) -> None:
                    Watched.alive -= 1

            ctx.token = Token()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(self.a(x))

    model = Model()
    gc.disable()
    try:
        with heldin.observe(model):
            for _ in range(5):
                model(torch.randn(4, 3)).sum().backward()
                assert Watched.alive == 0  # without the help of the garbage collector
    finally:
        gc.enable()


def test_importing_heldin_imports_no_framework() -> None:
    code = (
        "import sys, heldin; heavy = {'transformers', 'lightning', 'sklearn', 'matplotlib', "
        "'pandas', 'skorch', 'ignite', 'keras', 'fastai', 'accelerate', 'ray', 'scipy', 'joblib'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
