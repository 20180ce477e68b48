"""Layers with all the settings that their documentation allows, against the per-sample loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import heldin
from tests.support import inside
from tests.support.truth import observe_once

Draw = Callable[[st.SearchStrategy[Any]], Any]
Drawn = tuple[nn.Module, Tensor]  # a layer and a batch
M = 3  # samples
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def per_axis(draw: Draw, axes: int, low: int, high: int) -> Any:
    """Draw one number for all axes, or a tuple of one per axis."""
    numbers = st.integers(low, high)
    return draw(st.one_of(numbers, st.tuples(*[numbers] * axes)))


def as_tuple(setting: Any, axes: int) -> tuple[int, ...]:
    return (setting,) * axes if isinstance(setting, int) else setting


def convolution(draw: Draw) -> Drawn:
    axes, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    padding = draw(st.sampled_from(["valid", "same", "number"]))
    if padding == "number":
        padding = per_axis(draw, axes, 0, 2)
    stride = 1 if padding == "same" else per_axis(draw, axes, 1, 3)
    inputs, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    layer = CONV[axes](
        inputs, outputs, per_axis(draw, axes, 1, 3), stride, padding,
        per_axis(draw, axes, 1, 2), groups, draw(st.booleans()),
        draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    )  # fmt: skip
    return layer, torch.randn(M, inputs, *[draw(st.integers(5, 6)) for _ in range(axes)])


def transposed_convolution(draw: Draw) -> Drawn:
    axes, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    stride, dilation = per_axis(draw, axes, 1, 3), per_axis(draw, axes, 1, 3)
    room = zip(as_tuple(stride, axes), as_tuple(dilation, axes), strict=True)
    output_padding = tuple(draw(st.integers(0, max(pair) - 1)) for pair in room)
    inputs, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    layer = TRANSPOSED[axes](
        inputs, outputs, per_axis(draw, axes, 1, 3), stride, per_axis(draw, axes, 0, 1),
        output_padding, groups, draw(st.booleans()), dilation,  # type: ignore[arg-type]
    )  # fmt: skip
    return layer, torch.randn(M, inputs, *[draw(st.integers(3, 4)) for _ in range(axes)])


def linear(draw: Draw) -> Drawn:
    layer = nn.Linear(draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.booleans()))
    between = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    return layer, torch.randn(M, *between, layer.in_features)


def embedding(draw: Draw) -> Drawn:
    sparse = draw(st.booleans())
    layer = nn.Embedding(
        5, draw(st.integers(1, 3)),
        padding_idx=draw(st.sampled_from([None, 0, 3, -1, -5])),
        max_norm=draw(st.sampled_from([None, 0.5])),
        norm_type=draw(st.sampled_from([1.0, 2.0])),
        scale_grad_by_freq=not sparse and draw(st.booleans()),  # PyTorch has no backward for both
        sparse=sparse,
    )  # fmt: skip
    between = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(0, 2)))]
    return layer, torch.randint(0, 5, (M, *between))


def embedding_bag(draw: Draw) -> Drawn:
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    sparse = mode != "max" and draw(st.booleans())
    layer = nn.EmbeddingBag(
        5, draw(st.integers(1, 3)),
        max_norm=draw(st.sampled_from([None, 0.5])),
        scale_grad_by_freq=mode != "max" and not sparse and draw(st.booleans()),
        mode=mode,
        sparse=sparse,
        padding_idx=draw(st.sampled_from([None, 0, 3, -1])),
    )  # fmt: skip
    return layer, torch.randint(0, 5, (M, draw(st.integers(1, 4))))


def layer_norm(draw: Draw) -> Drawn:
    normalized = [draw(st.integers(2, 4)) for _ in range(draw(st.integers(1, 2)))]
    between = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    eps, bias = draw(st.sampled_from([1e-5, 0.1])), draw(st.booleans())
    return nn.LayerNorm(normalized, eps, bias=bias), torch.randn(M, *between, *normalized)


def rms_norm(draw: Draw) -> Drawn:
    normalized = [draw(st.integers(2, 4)) for _ in range(draw(st.integers(1, 2)))]
    layer = nn.RMSNorm(normalized, draw(st.sampled_from([None, 1e-5, 0.1])))
    return layer, torch.randn(M, draw(st.integers(1, 3)), *normalized)


def group_norm(draw: Draw) -> Drawn:
    groups, each = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    layer = nn.GroupNorm(groups, groups * each, draw(st.sampled_from([1e-5, 0.1])))
    sides = [draw(st.integers(2, 3)) for _ in range(draw(st.integers(0, 3)))]
    return layer, torch.randn(M, groups * each, *sides)


def batch_norm(draw: Draw) -> Drawn:
    """Batch normalisation with running statistics: in training mode samples mix."""
    axes, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    momentum = draw(st.sampled_from([0.1, None]))
    layer = BATCH_NORM[axes](channels, draw(st.sampled_from([1e-5, 0.1])), momentum)
    layer(torch.randn(4, channels, *[3] * axes))
    sides = [] if axes == 1 and draw(st.booleans()) else [draw(st.integers(1, 4))] * axes
    return layer.eval(), torch.randn(M, channels, *sides)


def instance_norm(draw: Draw) -> Drawn:
    axes, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    layer = INSTANCE_NORM[axes](
        channels, draw(st.sampled_from([1e-5, 0.1])), affine=True,
        track_running_stats=draw(st.booleans()),
    )  # fmt: skip
    layer.train(draw(st.booleans()))
    return layer, torch.randn(M, channels, *[draw(st.integers(2, 4)) for _ in range(axes)])


def prelu(draw: Draw) -> Drawn:
    channels = draw(st.integers(1, 3))
    layer = nn.PReLU(draw(st.sampled_from([1, channels])), draw(st.sampled_from([0.25, -0.5, 0.0])))
    sides = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 3)))]
    return layer, torch.randn(M, channels, *sides)


LAYERS = [
    linear, convolution, transposed_convolution, embedding, embedding_bag, layer_norm, rms_norm,
    group_norm, batch_norm, instance_norm, prelu,
]  # fmt: skip


def sample_losses(model: nn.Module, batch: Tensor) -> Tensor:
    outputs = model(batch).flatten(1)
    return outputs.sin().mean(1) + outputs.square().mean(1)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda draw_layer: draw_layer.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_settings_of_layers(layer: Callable[[Draw], Drawn], data: Any) -> None:
    torch.manual_seed(0)
    model, batch = layer(data.draw)
    with heldin.observe(model) as seen:
        for _ in range(2):
            worst = observe_once(seen, model, sample_losses, (batch,), 1e-12)
            assert max(worst.values()) < 1e-9, (model, batch.shape, worst)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda draw_layer: draw_layer.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_settings_of_layers_with_the_sampled_estimator(
    layer: Callable[[Draw], Drawn], data: Any
) -> None:
    """Compare sampled coordinates with the same coordinates of the exact sums."""
    torch.manual_seed(0)
    model, batch = layer(data.draw)
    exact = heldin.observe(model)
    sampled = heldin.observe(model, estimator="sampled", coordinates=data.draw(st.integers(1, 3)))
    with exact, sampled:
        for _ in range(3):
            exact.clear()
            sampled.clear()
            sample_losses(model, batch).sum().backward()
            for name, part in sampled.items():
                whole, where = exact[name], ()
                if part.total.shape != whole.total.shape:
                    where = inside.block(sampled, name)[0]
                assert torch.allclose(part.total, whole.total[where], atol=1e-10), (model, name)
                assert torch.allclose(part.squares, whole.squares[where], atol=1e-10), (model, name)
