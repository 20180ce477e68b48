"""A temperature for logits: the fit, the cross-fit, and the last layer that takes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from heldin.crossval import Calibrator, fit_temperature, temperature_losses
from heldin.errors import HeldinError
from heldin.rules.calibration import scale_last_layer
from tests.support.outcome_runs import cross_fitted


def drawn(kind: str, rows: int = 400, factor: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are too large by a factor, with targets drawn from the right probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind in ("one column", "vector", "labels"):
        logits = normal(rows, 3 if kind == "labels" else 1)
        targets = torch.bernoulli(logits.sigmoid(), generator=generator)
        if kind == "vector":
            logits, targets = logits[:, 0], targets[:, 0]
        return factor * logits, targets
    if kind == "positions":
        logits = normal(rows, 4, 5)
        flat = torch.multinomial(
            logits.movedim(1, -1).reshape(-1, 4).softmax(1), 1, generator=generator
        )
        targets = flat.reshape(rows, 5)
        targets[::3, 2:] = -100
        return factor * logits, targets
    logits = normal(rows, 4)
    targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    if kind == "probabilities":
        return factor * logits, 0.9 * F.one_hot(targets, 4).double() + 0.025
    return factor * logits, targets


KINDS = ["classes", "one column", "vector", "labels", "positions", "probabilities"]


def torch_losses(kind: str, logits: Tensor, targets: Tensor) -> Tensor:
    """Row losses by PyTorch's own functions."""
    if kind in ("one column", "vector", "labels"):
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return losses.reshape(len(losses), -1).mean(1)
    losses = F.cross_entropy(logits, targets, reduction="none")
    if kind == "positions":
        return losses.sum(1) / (targets != -100).sum(1)
    return losses


def best_on_a_grid(kind: str, logits: Tensor, targets: Tensor, weights: Tensor) -> float:
    """Golden-section search in 1 / T, a slow twin."""
    low, high = 0.01, 1.0
    ratio = (5**0.5 - 1) / 2

    def value(sharpness: float) -> float:
        return float(weights @ torch_losses(kind, logits * sharpness, targets))

    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if value(left) < value(right) else (left, high)
    return 2 / (low + high)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.5, 3.0, 8.0])
def test_the_fit_is_the_minimum(kind: str, factor: float) -> None:
    logits, targets = drawn(kind, factor=factor)
    weights = torch.linspace(0, 2, len(logits), dtype=torch.float64)
    for row_weights in (None, weights):
        weighted = torch.ones(len(logits)).double() if row_weights is None else row_weights
        expected = best_on_a_grid(kind, logits, targets, weighted)
        assert fit_temperature(logits, targets, row_weights) == pytest.approx(expected, rel=1e-6)


def test_the_fit_finds_the_factor() -> None:
    logits, targets = drawn("classes", rows=20_000, factor=3.0)
    assert fit_temperature(logits, targets) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_calibrated_or_timid_logits_keep_one(kind: str) -> None:
    logits, targets = drawn(kind, factor=0.5)
    assert fit_temperature(logits, targets) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_larger_logits_need_a_larger_temperature(kind: str) -> None:
    logits, targets = drawn(kind)
    temperature = fit_temperature(logits, targets)
    assert fit_temperature(2 * logits, targets) == pytest.approx(2 * temperature, rel=1e-8)


def test_logits_that_know_nothing_get_the_largest() -> None:
    logits, targets = drawn("classes")
    for factor in (1, 1e3, 1e12):  # the loss of very large logits has no curvature
        assert fit_temperature(-factor * logits, targets) == 100.0


def test_of_temperatures_that_change_nothing_one_is_taken() -> None:
    logits, targets = torch.ones(12, 3), torch.arange(12) % 3
    assert fit_temperature(logits, targets) == 1.0
    temperature, losses = cross_fitted(logits, targets, targets)
    assert temperature == 1.0
    assert torch.allclose(losses, torch.tensor(3.0).double().log())


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_has_the_temperatures_of_new_rows(kind: str) -> None:
    logits, targets = drawn(kind, rows=60)
    folds, weights = torch.arange(60) % 3, torch.linspace(0, 2, 60, dtype=torch.float64)
    binary = kind in ("one column", "vector", "labels")
    calibrator = Calibrator(logits, targets, binary, weights, folds)
    bad = logits.clone()
    bad[7] = torch.nan
    for some in (logits, 0.2 * logits, bad, -logits, 3 * logits):
        temperature, losses = cross_fitted(some, targets, folds, weights, binary=binary)
        fit, rough = calibrator(some, exact=True), calibrator(some)
        assert fit.temperature == temperature
        assert torch.equal(fit.losses.nan_to_num(), losses.nan_to_num())
        assert rough.temperature == pytest.approx(temperature, rel=1e-5)
        mean = float(losses.nanmean())
        assert float(rough.losses.nanmean()) == pytest.approx(mean, rel=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_row_losses_agree_with_torch(kind: str) -> None:
    logits, targets = drawn(kind)
    expected = torch_losses(kind, logits / 1.7, targets)
    assert torch.allclose(temperature_losses(logits, targets, 1.7), expected, rtol=1e-12)


def test_whole_numbers_as_targets_of_one_logit() -> None:
    logits, targets = drawn("one column")
    expected = fit_temperature(logits, targets)
    for same in (targets.long(), targets[:, 0], targets[:, 0].long(), targets.bool()):
        assert fit_temperature(logits, same) == expected


def test_sigmoids_where_rows_sum_to_one() -> None:
    """One label per row looks like probabilities of classes; binary= says which it is."""
    logits, targets = drawn("classes")
    one_hot = F.one_hot(targets, 4).double()
    assert fit_temperature(logits, one_hot) == pytest.approx(fit_temperature(logits, targets))
    same = fit_temperature(logits, one_hot.long(), binary=False)
    assert same == pytest.approx(fit_temperature(logits, targets))
    expected = best_on_a_grid("labels", logits, one_hot, torch.ones(400).double())
    assert fit_temperature(logits, one_hot, binary=True) == pytest.approx(expected, rel=1e-6)
    losses = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none").mean(1)
    assert torch.allclose(temperature_losses(logits, one_hot, 1.0, binary=True), losses)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["classes", "one column"])
def test_rows_that_are_not_finite_do_not_count(kind: str, bad: float) -> None:
    logits, targets = drawn(kind)
    expected = fit_temperature(logits[5:], targets[5:])
    wrong = logits.clone()
    for i in range(5):
        worst = int(targets[i]) if kind == "classes" else 0
        if bad == torch.inf and kind == "classes":
            worst = (worst + 1) % 4
        wrong[i, worst] = bad
    if kind == "one column":
        targets = targets.clone()
        targets[:5] = float(bad < 0)  # infinitely sure, and wrong
        expected = fit_temperature(logits[5:], targets[5:])
    assert fit_temperature(wrong, targets) == expected
    assert not temperature_losses(wrong, targets, 2.0)[:5].isfinite().any()
    assert temperature_losses(wrong, targets, 2.0)[5:].isfinite().all()


def test_masked_classes_have_no_part() -> None:
    logits, targets = drawn("classes")
    masked = torch.cat([logits, torch.full((400, 2), -torch.inf)], 1)
    assert fit_temperature(masked, targets) == pytest.approx(fit_temperature(logits, targets))


def test_rows_without_a_position_do_not_count() -> None:
    logits, targets = drawn("positions")
    expected = fit_temperature(logits[10:], targets[10:])
    targets[:10] = -100
    assert fit_temperature(logits, targets) == pytest.approx(expected)
    assert fit_temperature(logits[:10], targets[:10]) == 1.0


# -- cross-fitting


@pytest.mark.parametrize("kind", KINDS)
def test_each_fold_is_scored_with_the_others(kind: str) -> None:
    logits, targets = drawn(kind, rows=60)
    folds = torch.arange(60) % 3 + 4
    temperature, losses = cross_fitted(logits, targets, folds)
    assert temperature == fit_temperature(logits, targets)
    for fold in (4, 5, 6):
        inside = folds == fold
        others = fit_temperature(logits[~inside], targets[~inside])
        expected = temperature_losses(logits[inside], targets[inside], others)
        assert torch.allclose(losses[inside], expected, rtol=1e-9)


def test_a_single_fold_is_cut_into_halves() -> None:
    logits, targets = drawn("classes", rows=61)
    temperature, losses = cross_fitted(logits, targets, torch.full((61,), 7))
    again, twin = cross_fitted(logits, targets, torch.arange(61) % 2)
    assert temperature == again
    assert torch.equal(losses, twin)


def test_weights_of_a_cross_fit() -> None:
    logits, targets = drawn("classes", rows=60)
    folds, weights = torch.arange(60) % 3, torch.rand(60, dtype=torch.float64)
    temperature, losses = cross_fitted(logits, targets, folds, weights)
    assert temperature == fit_temperature(logits, targets, weights)
    others = fit_temperature(logits[folds > 0], targets[folds > 0], weights[folds > 0])
    expected = temperature_losses(logits[folds == 0], targets[folds == 0], others)
    assert torch.allclose(losses[folds == 0], expected, rtol=1e-9)


def test_cross_fitting_is_not_optimistic() -> None:
    """On average the losses are larger than those at the temperature of the same rows."""
    gaps = []
    for seed in range(40):
        logits, targets = drawn("classes", rows=30, seed=seed)
        temperature, losses = cross_fitted(logits, targets, torch.arange(30) % 5)
        gaps.append(float((losses - temperature_losses(logits, targets, temperature)).mean()))
    assert sum(gaps) / 40 > 0.001


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: fit_temperature(x, y[:-1]), "do not match targets of shape"),
        (lambda x, y: fit_temperature(x, y.double()), "do not match targets"),
        (lambda x, y: fit_temperature(x, y + 1), "numbers from 0 to 3.*between 1 and 4"),
        (lambda x, y: fit_temperature(x, y - 1), "between -1 and 2"),
        (lambda x, y: fit_temperature(x.tolist(), y), "logits must be a tensor"),
        (lambda x, y: fit_temperature(x, None), "targets must be a tensor"),  # type: ignore[arg-type]
        (lambda x, y: fit_temperature(x[:0], y[:0]), "one entry for each row"),
        (lambda x, y: fit_temperature(x, y, -torch.ones(400)), "400 numbers >= 0"),
        (lambda x, y: fit_temperature(x, y, torch.ones(3)), "400 numbers >= 0"),
        (lambda x, y: fit_temperature(x, y, binary=True), "do not match"),
        (lambda x, y: fit_temperature(x[:, 0], y), "between 0 and 1"),
        (lambda x, y: temperature_losses(x, y, 0.0), "positive number, got 0.0"),
        (lambda x, y: temperature_losses(x, y, float("inf")), "positive number"),
    ],
)
def test_mistakes(call: Callable[[Tensor, Tensor], Any], message: str) -> None:
    logits, targets = drawn("classes")
    targets[:4] = torch.arange(4)
    with pytest.raises(HeldinError, match=message):
        call(logits, targets)


# -- the last layer


class Tagged(nn.Module):
    """An output like those of Hugging Face."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.inner(x))


class Tied(nn.Module):
    """A model whose output weights are those of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x.abs().long().clamp_max(6)[:, 0]))


class TiedStorage(Tied):
    """The same with two parameters that share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embedding.weight.detach())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Twice(nn.Module):
    """The last layer is also the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).relu())


class Lora(nn.Module):
    """A layer as peft wraps it."""

    def __init__(self, base: nn.Linear, adapters: tuple[str, ...] = ("default",)) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({a: nn.Linear(4, 2, bias=False) for a in adapters})
        self.lora_B = nn.ModuleDict({a: nn.Linear(2, 3, bias=False) for a in adapters})

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name, a in self.lora_A.items():
            result = result + 2.0 * self.lora_B[name](a(x))
        return result


class LowRank(nn.Module):
    """A layer with a product of two thin matrices beside it, as people write it themselves."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = x @ self.down.T @ self.up.T
        return self.layer(x) + change


class Squared(LowRank):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up.square().sum()


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5))


SCALED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "network": lambda: nn.Sequential(body(), nn.Linear(4, 3)),
    "no bias": lambda: nn.Sequential(body(), nn.Linear(4, 3, bias=False)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 3, 1)),
    "logits": lambda: Tagged(nn.Sequential(body(), nn.Linear(4, 3))),
    "one column": lambda: nn.Sequential(body(), nn.Linear(4, 1), nn.Flatten(0)),
    "lora": lambda: nn.Sequential(body(), Lora(nn.Linear(4, 3), ("default", "other"))),
    "lora by hand": lambda: nn.Sequential(body(), LowRank(nn.Linear(4, 3))),
    "spectral norm before it": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 3)
    ),
}
LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: nn.Sequential(body(), nn.Linear(4, 3), nn.LogSoftmax(1)),
    "tanh of small outputs": lambda: nn.Sequential(small(nn.Linear(4, 3)), nn.Tanh()),
    "normalised": lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)),
    "tied": Tied,
    "tied memory": TiedStorage,
    "shared with a layer that is not called": lambda: TwoHeads(),
    "residual": Residual,
    "twice": Twice,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "lora on a shared layer": lambda: shared_lora(),
    "what is beside it is squared": lambda: nn.Sequential(body(), Squared(nn.Linear(4, 3))),
    "no layer": lambda: nn.Sequential(nn.ReLU()),
    "not finite": lambda: nn.Sequential(nn.Linear(4, 3), Infinite()),
}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.first.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x)


class Infinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.inf


def small(layer: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(1e-9)  # tanh(x) = x to rounding
    return layer


def shared_lora() -> nn.Module:
    base = nn.Linear(4, 3)
    return nn.Sequential(nn.ModuleDict({"copy": Shared(base)})["copy"], Lora(base))


class Shared(nn.Module):
    """Uses a weight that another layer has, too."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight = base.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight.T).sum(1, keepdim=True)


def call(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(x)
    return getattr(output, "logits", output)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCALED)
def test_outputs_are_divided(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = SCALED[name]().to(dtype)
    x = torch.randn(6, 4, dtype=dtype)
    model.train()
    modes = [m.training for m in model.modules()]
    buffers = copy.deepcopy(dict(model.named_buffers()))
    state = torch.get_rng_state()
    assert scale_last_layer(model, 1.7, lambda: model(x))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in model.named_buffers())
    torch.manual_seed(0)
    plain = SCALED[name]().to(dtype)
    other = torch.randn(50, 4, dtype=dtype)
    model.eval()
    plain.eval()
    tolerance = 20 * torch.finfo(dtype).eps
    assert torch.allclose(call(model, other), call(plain, other) / 1.7, tolerance, tolerance)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_weights_stay_where_it_is_not_exact(name: str) -> None:
    torch.manual_seed(0)
    model = LEFT_ALONE[name]().double()
    if name == "tied memory":
        model = LEFT_ALONE[name]()  # .double() would copy
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(6, 4, dtype=torch.float32 if name == "tied memory" else torch.float64)
    assert not scale_last_layer(model, 1.7, lambda: model(x))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_error_of_the_model_leaves_the_weights() -> None:
    model = nn.Linear(4, 3)
    before = copy.deepcopy(model.state_dict())
    calls: list[int] = []

    def predict() -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return model(torch.ones(5, 4))

    with pytest.raises(RuntimeError, match="out of memory"):
        scale_last_layer(model, 2.0, predict)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training


def test_parameters_with_their_values_before() -> None:
    bilinear = nn.Bilinear(2, 3, 4)
    pair = torch.randn(5, 2), torch.randn(5, 3)
    before, weight = bilinear(*pair), bilinear.weight.detach().clone()
    scaled = scale_last_layer(bilinear, 2.0, lambda: bilinear(*pair))
    assert torch.equal(bilinear(*pair), before / 2)
    assert scaled[0][0] is bilinear.weight
    assert torch.equal(scaled[0][1], weight)


def test_other_heads_stay() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    model = Heads()
    second = model.second.weight.clone()
    assert scale_last_layer(model, 3.0, lambda: model(torch.ones(5, 4)))
    assert torch.equal(model.second.weight, second)


def test_mistakes_in_the_last_layer() -> None:
    with pytest.raises(HeldinError, match="positive number, got -1"):
        scale_last_layer(nn.Linear(4, 3), -1, lambda: None)
    with pytest.raises(HeldinError, match="not logits"):
        scale_last_layer(nn.LSTM(4, 3), 2.0, lambda: (torch.zeros(5, 3), None))
