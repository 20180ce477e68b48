"""The compiled sums beside PyTorch's, and that nothing else decides whether they are used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from array import array
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import heldin
from heldin._kernels import KERNELS
from heldin._moments import _at_once, piece_sums, snr, usual
from heldin._parts import Outer

compiled = pytest.mark.skipif(not KERNELS, reason="src/heldin/_kernels.c was not compiled here")
NOWHERE = (0,) * 8
sizes = st.integers(1, 37)
dtypes = st.sampled_from([torch.float32, torch.float64])


def close(found: Tensor, expected: Tensor, rounding: float = 0.0) -> bool:
    tolerance = 1e-4 if found.dtype == torch.float32 else 1e-11
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    allowed = tolerance * (scale + 1e-30) + rounding
    return bool(((found.double() - expected).abs() <= allowed).all())


def moments_of(each: Tensor) -> tuple[Tensor, Tensor]:
    return each.sum(0), each.square().sum(0)


def check(out: Tensor, ratios: Any, each: Tensor, m: int, terms: int = 1) -> None:
    """`terms` numbers of size one are behind each entry of `each`, and may cancel."""
    total, squares = moments_of(each)
    rounding = 8 * torch.finfo(out.dtype).eps * terms**0.5 if terms > 1 else 0.0
    assert close(out[0], total, m * rounding)
    assert close(out[1], squares, 2 * rounding * float(each.abs().sum(0).max()))
    expected = (out[0].double().square() / (out[1] - out[0].square() / m)).nansum()
    if 0 <= float(expected) < 1e3 * m:
        assert ratios[0] == pytest.approx(float(expected), rel=1e-3, abs=1e-12)
    assert ratios[1] == float((out[1] != 0).sum())


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
@pytest.mark.skipif(os.environ.get("HELDIN_KERNELS") == "0", reason="left out on purpose")
def test_they_are_compiled_where_there_is_a_compiler() -> None:
    """Installing goes on without them, so that nothing else would show it."""
    assert set(KERNELS) == {torch.float32, torch.float64}, (
        "make setup compiles src/heldin/_kernels.c"
    )


@compiled
@settings(max_examples=150, deadline=None)
@given(dtypes, sizes, sizes, sizes, st.integers(1, 70), st.integers(1, 3), st.booleans())
def test_outer_products(
    dtype: torch.dtype, m: int, rows: int, a: int, b: int, step: int, interleaved: bool
) -> None:
    kernels = KERNELS[dtype]
    torch.manual_seed(m * a + b)
    left, right = (torch.randn(rows * m, n * step, dtype=dtype)[:, ::step] for n in (a, b))
    by_sample, by_row = (1, m) if interleaved else (rows, 1)
    out, ratios = torch.full((2, a, b), torch.nan, dtype=dtype), array("d", [0, 0])
    (i, k), (u, w), at = left.stride(), right.stride(), out.data_ptr()
    assert kernels.outer(
        left.data_ptr(), i * by_sample, i * by_row, k,
        right.data_ptr(), u * by_sample, u * by_row, w,
        m, rows, a, b, at, at + a * b * kernels.size, 1 / m, ratios.buffer_info()[0],
    )  # fmt: skip
    x, y = (
        t.double().reshape((rows, m, -1) if interleaved else (m, rows, -1)) for t in (left, right)
    )
    each = torch.einsum("rma,rmb->mab" if interleaved else "mra,mrb->mab", x, y)
    check(out, ratios, each, m)


@compiled
@settings(max_examples=150, deadline=None)
@given(dtypes, sizes, sizes, st.integers(1, 1200), st.integers(0, 2), st.booleans(), st.booleans())
def test_sums_of_columns(
    dtype: torch.dtype, m: int, rows: int, w: int, order: int, norm: bool, faint: bool
) -> None:
    kernels = KERNELS[dtype]
    torch.manual_seed(m * rows + w)
    shapes = [(m, rows, w), (m, w, rows), (w, rows, m)]
    orders = [(0, 1, 2), (0, 2, 1), (2, 1, 0)]
    values, x = (torch.randn(shapes[order], dtype=dtype).permute(orders[order]) for _ in range(2))
    values = values.clone() if order == 0 else values
    values[:, :, 0] = 0.0
    mean, scale = torch.randn(m, rows, dtype=dtype), torch.rand(m, rows, dtype=dtype)
    others = (x.data_ptr(), *x.stride(), mean.data_ptr(), scale.data_ptr(), *mean.stride())
    out, ratios = torch.full((2, w), torch.nan, dtype=dtype), array("d", [0, 0])
    at = out.data_ptr()
    assert kernels.columns(
        values.data_ptr(), *values.stride(), m, rows, w, 0.5 if faint else 0.0,
        *(others if norm else NOWHERE), at, at + w * kernels.size, 1 / m, ratios.buffer_info()[0],
    )  # fmt: skip
    terms = values.double()
    if norm:
        terms = terms * ((x.double() - mean.double()[..., None]) * scale.double()[..., None])
    each = terms.sum(1)
    if faint and not (rows == 1 and not norm):
        gap = each.abs() - 0.5 * terms.abs().sum(1)
        each = torch.where(gap <= 0, 0.0, each)
        if bool((gap.abs() < 1e-5 * terms.abs().sum(1)).any()) and rows > 1:
            return  # on the border, where rounding decides
    check(out, ratios, each, m)


@compiled
@settings(max_examples=100, deadline=None)
@given(
    dtypes, st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.integers(0, 90),
    st.integers(0, 90), st.booleans(),
)  # fmt: skip
def test_products_of_planes(
    dtype: torch.dtype, m: int, a: int, b: int, high: int, wide: int, last: bool
) -> None:
    kernels = KERNELS[dtype]
    torch.manual_seed(m * a + wide)
    left, right = (torch.randn(m, n, 2 * high, wide, dtype=dtype) for n in (a, b))
    if last:
        left = left.contiguous(memory_format=torch.channels_last)
    left, right = left[:, :, ::2], right[:, :, ::2]
    out, ratios = torch.full((2, a, b), torch.nan, dtype=dtype), array("d", [0, 0])
    at = out.data_ptr()
    assert kernels.planes(
        left.data_ptr(), *left.stride(), right.data_ptr(), *right.stride(),
        m, a, b, high, wide, at, at + a * b * kernels.size, 1 / m, ratios.buffer_info()[0],
    )  # fmt: skip
    each = torch.einsum("mahw,mbhw->mab", left.double(), right.double())
    check(out, ratios, each, m, high * wide)


@compiled
@settings(max_examples=60, deadline=None)
@given(dtypes, st.integers(1, 9000), st.integers(9, 50), st.booleans(), st.booleans())
def test_ratios_are_the_same_with_and_without(
    dtype: torch.dtype, size: int, m: int, symmetric: bool, strip: bool
) -> None:
    torch.manual_seed(size)
    each = torch.randn(m, size, 2, dtype=dtype)
    each[:, ::7] = 0.0
    total, squares = moments_of(each)
    if strip:
        total, squares = total[:, :1], squares[:, :1]
    found = piece_sums(total, squares, m, symmetric)
    with pytest.MonkeyPatch.context() as patch:
        for kind in list(KERNELS):
            patch.delitem(KERNELS, kind)
        expected = piece_sums(total, squares, m, symmetric)
    assert found == pytest.approx(expected, rel=1e-4 if dtype == torch.float32 else 1e-11)


def ratios_in_registers(
    left: Tensor, right: Tensor, total: Tensor, symmetric: bool
) -> tuple[float, float, bool] | None:
    if left.dim() == 2:
        left, right = left[:, None], right[:, None]
    return Outer(left, right)._at_once(total, symmetric)


registers = pytest.mark.skipif(
    ratios_in_registers(torch.ones(2, 1), torch.ones(2, 1), torch.zeros(1, 1), True) is None,
    reason="this machine has no AVX-512, or nothing was compiled",
)


@registers
@settings(max_examples=200, deadline=None)
@given(
    dtypes, st.integers(9, 90), st.integers(1, 5), st.integers(1, 90), st.integers(1, 90),
    st.booleans(), st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_ratios_of_outer_products_in_registers(
    dtype: torch.dtype, m: int, rows: int, a: int, b: int, symmetric: bool, turned: bool, step: int
) -> None:
    torch.manual_seed(m * a + b)
    left, right = (torch.randn(m, rows, n * step, dtype=dtype)[..., ::step] for n in (a, b))
    if turned:
        left = left.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    left[..., ::5] = 0.0
    total, squares = moments_of(left.double().mT @ right.double())
    room = torch.randn(a, b + step, dtype=dtype)
    room[:, :b] = total  # rows that do not follow one another at once
    found = ratios_in_registers(left, right, room[:, :b], symmetric)
    expected = piece_sums(total, squares, m, symmetric)
    assert found == pytest.approx(expected, rel=1e-4 if dtype == torch.float32 else 1e-11)


@registers
def test_ratios_in_registers_of_many_samples_by_any_number_of_threads() -> None:
    """More than the caches hold; the order of the sums is the same."""
    torch.manual_seed(0)
    left, right = torch.randn(500, 2, 31), torch.randn(500, 2, 600)
    total, squares = moments_of(left.double().mT @ right.double())
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(ratios_in_registers(left, right, total.float(), False))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]
    assert found[0] == pytest.approx(piece_sums(total, squares, 500, False), rel=1e-4)


@compiled
def test_many_coordinates_of_few_samples_are_nothing_extreme() -> None:
    """With four samples ratios have no variance, and a sum over many of them is large."""
    torch.manual_seed(0)
    each = torch.randn(4, 700, 900, dtype=torch.float64)
    total, squares = moments_of(each)
    summed, _, largest = _at_once(KERNELS[torch.float64], total, squares, 1 / 4)
    assert summed > 1e5 * 4 > largest
    assert usual(summed, 0.0, 4, False) is None
    found = usual(summed, 0.0, 4, False, largest)
    assert found is not None
    assert found[0] == pytest.approx(float(snr(total, squares, 4).sum()), rel=1e-9)


@registers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_registers_cannot_hold_is_left_to_others(dtype: torch.dtype) -> None:
    """Numbers that are not finite, or too large or too small for their squares; no variance."""
    left, right = torch.randn(12, 40, dtype=dtype), torch.randn(12, 50, dtype=dtype)
    assert ratios_in_registers(left, right, left.t() @ right, False) is not None
    for bad in (torch.inf, torch.nan, torch.finfo(dtype).max ** 0.5):
        broken = left.clone()
        broken[3, 7] = bad
        assert ratios_in_registers(broken, right, broken.t() @ right, False) is None
    same = torch.ones(12, 40, dtype=dtype)
    assert ratios_in_registers(same, same, same.t() @ same, False) is None
    found = ratios_in_registers(0 * left, right, (0 * left).t() @ right, False)
    assert found == (0.0, 0.0, True)
    tiny = left * torch.finfo(dtype).tiny ** 0.5  # squares of squares are rounded to nothing
    found = Outer(tiny[:, None], right[:, None]).ratios(tiny.t() @ right, False)
    squares = (tiny.double().square().t() @ right.double().square()).to(dtype)
    assert found == pytest.approx(piece_sums(tiny.t() @ right, squares, 12, False), rel=1e-2)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["total", "squares"])
def test_what_is_not_finite_is_seen(bad: float, where: str, kernels: str) -> None:
    each = torch.randn(8, 50)
    each[2, 17] = bad
    if where == "squares":  # the contributions cancel
        each[2:4, 17] = torch.tensor([1e30, -1e30]) if bad == torch.inf else bad
    total, squares = moments_of(each)
    for symmetric in (False, True):
        assert not piece_sums(total, squares, 8, symmetric)[2]


def model_of(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "linear":
        return nn.Sequential(nn.Linear(70, 90), nn.ReLU(), nn.Linear(90, 3)), torch.randn(12, 70)
    if kind == "large":  # beyond `_shortcuts.LARGE`
        return nn.Sequential(nn.Linear(600, 500), nn.ReLU(), nn.Linear(500, 3)), torch.randn(
            32, 600
        )
    if kind == "convolution":
        layers = [
            nn.Conv2d(3, 20, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(20, 30, 3, dilation=2),
        ]
        return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3)), torch.randn(6, 3, 17, 13)
    layer = nn.TransformerEncoderLayer(24, 2, 60, dropout=0.0, batch_first=kind == "batch first")
    shape = (5, 9, 24) if kind == "batch first" else (9, 5, 24)
    return nn.Sequential(layer, nn.LayerNorm(24)), torch.randn(shape)


@compiled
@pytest.mark.parametrize("budget", [40, 4096])
@pytest.mark.parametrize("estimator", ["exact", "sampled"])
@pytest.mark.parametrize("kind", ["linear", "large", "convolution", "batch first", "time first"])
def test_evidence_is_the_same_with_and_without(kind: str, estimator: Any, budget: int) -> None:
    """Several steps; what is compiled is used in all of them, or in none."""
    torch.manual_seed(0)
    model, x = model_of(kind)
    model, x = model.double(), x.double()
    model(x)  # lazy layers take their shape
    found = []
    for leave_out in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            for dtype in list(KERNELS) if leave_out else []:
                patch.delitem(KERNELS, dtype)
            options = {"batch_dim": 1} if kind == "time first" else {}
            stopping = heldin.EvidenceStopping(model, estimator=estimator, budget=budget, **options)
            values = []
            for step in range(5):
                for part in x.chunk(1 + step % 2, 1 if kind == "time first" else 0):
                    model(part).square().sum().backward()
                stopping.step()
                values.append(stopping.evidence.groups)
            found.append(values)
            stopping.remove()
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-7)


@pytest.mark.parametrize("size", [1, 2])
def test_images_smaller_than_the_kernel(size: int, kernels: str) -> None:
    """At some places of the kernel there is nothing but padding."""
    model = nn.Conv2d(6, 9, 3, padding=1).double()
    x = torch.randn(5, 6, size, size, dtype=torch.float64)
    sampled = heldin.observe(model, estimator="sampled", budget=4)
    with heldin.observe(model) as exact, sampled:
        for _ in range(30):
            model(x).square().sum().backward()
            block, _ = sampled.sampler._blocks["weight"]
            assert torch.allclose(sampled["weight"].squares, exact["weight"].squares[block])
            exact.clear()
            sampled.clear()


@compiled
def test_a_gradient_that_does_not_lie_plainly_goes_the_general_way() -> None:
    """Expanded, transposed and lazily negated tensors; another type than at first."""
    model = nn.Linear(6, 5).double()
    x = torch.randn(8, 6, dtype=torch.complex128)
    for inputs in (x.real, x.conj().imag, x.imag, torch.randn(6, 8, dtype=torch.float64).t()):
        for loss in (lambda y: y.sum(), lambda y: (y.t() * torch.arange(8.0)).sum()):
            with heldin.observe(model) as seen:
                for _ in range(2):
                    loss(model(inputs)).backward()
                    model.zero_grad()
            out = model(inputs)
            each = []
            for i in range(8):
                alone = torch.zeros_like(out)
                alone[i] = 1
                part = torch.autograd.grad(loss(out * alone), model.weight, retain_graph=True)[0]
                each.append(part)
            assert torch.allclose(seen["weight"].squares, 2 * torch.stack(each).square().sum(0))
    with heldin.observe(model) as seen:
        model(x.real).sum().backward()
        seen.clear()
        model.float()
        model(x.real.float()).sum().backward()
        assert seen["weight"].squares.dtype == torch.float32
        expected = x.real.square().sum(0).expand(5, 6).float()
        assert torch.allclose(seen["weight"].squares, expected, rtol=1e-5)


def test_they_can_be_left_out() -> None:
    code = "import heldin._kernels as k; print(len(k.KERNELS))"
    env = {**os.environ, "HELDIN_KERNELS": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "0"


@compiled
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_the_source_compiles_without_a_warning(tmp_path: Any) -> None:
    source = heldin.__file__.replace("__init__.py", "_compiled.c")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unknown-pragmas"]
    flags += ["-I", sysconfig.get_path("include")]
    command = ["cc", *flags, "-fPIC", "-shared", source, "-o", str(tmp_path / "k.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@compiled
@pytest.mark.parametrize("estimator", ["exact", "sampled"])
@pytest.mark.parametrize("kind", ["linear", "convolution", "batch first", "time first"])
def test_common_layers_take_the_shortcut(
    kind: str, estimator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on; the filters of a convolution only where a block is looked at."""
    from heldin._pass import Pass

    model, x = model_of(kind)
    model(x)
    general, real = [], Pass._take

    def take(self: Any, use: Any, sink: Any, plan: Any) -> None:
        general.append(sink.params[0])
        real(self, use, sink, plan)

    monkeypatch.setattr(Pass, "_take", take)
    options = {"batch_dim": 1} if kind == "time first" else {}
    with heldin.EvidenceStopping(model, estimator=estimator, budget=40, **options) as stopping:
        for _ in range(2):
            general.clear()
            model(x).square().sum().backward()
            stopping.step()
    filters = ["0.weight", "2.weight"] if kind == "convolution" and estimator == "exact" else []
    assert sorted(general) == filters


@compiled
def test_a_pass_inside_a_pass_has_memory_of_its_own() -> None:
    """A hook of the user's runs another backward pass through the same model."""
    model, x = nn.Linear(5, 4).double(), torch.randn(6, 5, dtype=torch.float64)

    def once(y: Tensor) -> None:
        with torch.enable_grad():
            y.square().sum().backward()

    stopping = heldin.EvidenceStopping(model, arming=None, smoothing=0)
    for _ in range(3):
        once(model(x))
        stopping.step()
    y, other = model(x), model(x)
    y.register_hook(lambda grad: once(other))
    once(y)
    stopping.step()
    nested = stopping.evidence
    once(model(x))
    once(model(x))
    stopping.step()
    assert nested.count == stopping.evidence.count == 12
    assert nested.criterion == pytest.approx(stopping.evidence.criterion, rel=1e-9)
    stopping.remove()


@pytest.mark.parametrize("estimator", ["exact", "sampled"])
def test_saved_tensors_that_are_packed(estimator: Any, kernels: str) -> None:
    """What lies in memory is not what the node has saved; later steps know the way already."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(96, 5), nn.LayerNorm(5), nn.Linear(5, 2)]
    model, x = nn.Sequential(*layers).double(), torch.randn(7, 2, 6, 6, dtype=torch.float64)
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: t + 1, lambda t: t - 1)
    found = []
    for packed in (False, True):
        with heldin.EvidenceStopping(model, estimator=estimator, budget=20) as stopping:
            for step in range(4):
                with pack if packed and step != 2 else nullcontext():
                    model(x).square().sum().backward()
                stopping.step()
                found.append(stopping.evidence.groups)
    for plain, hidden in zip(found[:4], found[4:], strict=True):
        assert plain == pytest.approx(hidden, rel=1e-7)
