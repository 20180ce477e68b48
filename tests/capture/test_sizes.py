"""Batches of changing size: a plan holds between the sizes that were followed, and only there."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import heldin
from heldin.capture.layout import Layout
from heldin.capture.sizes import LayoutPattern, Range, sizes_of
from tests.support.truth import error, truth


class Texts(nn.Module):
    """Words, learnt positions, a layer over all places, a mean: samples in folded rows."""

    def __init__(self, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 6), nn.Embedding(length, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.inner, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        h = h + self.attention(h, h, h, key_padding_mask=tokens == 0, need_weights=False)[0]
        scores: Tensor = self.head(self.inner(h).tanh().mean(1))
        return scores


class Timed(nn.Module):
    """Time before samples, as recurrent layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(20, 6), nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(self.words(tokens).transpose(0, 1)).tanh().sum(0)


class Pairs(nn.Module):
    """Two texts of lengths of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.left, self.right = nn.Embedding(20, 6), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.left(self.words(one)).mean(1) * self.right(self.words(other)).tanh().mean(1)


class Halves(nn.Module):
    """Swaps the halves of long texts: the graph of a length is not that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(20, 6), nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens)
        if tokens.shape[1] in range(20, 30):
            h = h.transpose(0, 1).sin()
            return self.inner(h).tanh().sum(0)
        return self.inner(h).tanh().sum(1)


def follows(seen: heldin.Observation, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls that are followed."""
    from heldin.capture import forward

    found: list[int] = []
    make = forward.Tracker  # type: ignore[attr-defined]

    def counted(m: int, model: nn.Module) -> object:
        found.append(m)
        return make(m, model)

    monkeypatch.setattr(forward, "Tracker", counted)
    return found


def check(seen: heldin.Observation, model: nn.Module, *inputs: Tensor) -> None:
    seen.clear()
    model.zero_grad()
    losses = model(*inputs).square().sum(1)
    expected = truth(model, losses)
    losses.sum().backward()
    assert max(error(seen, expected, 1e-12).values()) < 1e-9, [i.shape for i in inputs]
    assert seen.count == len(inputs[0])


@pytest.mark.parametrize("make", [Texts, Timed])
@pytest.mark.parametrize("estimator", ["exact"])
def test_lengths_between_those_followed_are_known(
    make: type[nn.Module], estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = make().double()
    with heldin.observe(model) as seen:
        followed = follows(seen, monkeypatch)
        for length in (10, 40):
            check(seen, model, torch.randint(1, 20, (4, length)))
        assert len(followed) == 2
        for length in range(10, 41, 3):
            check(seen, model, torch.randint(1, 20, (4, length)))
        assert len(followed) == 2
        check(seen, model, torch.randint(1, 20, (4, 50)))  # longer than any
        assert len(followed) == 3


def test_the_number_of_samples_may_change_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Texts().double()
    with heldin.observe(model) as seen:
        followed = follows(seen, monkeypatch)
        for m, length in ((3, 10), (9, 40), (5, 20), (7, 33), (9, 11)):
            check(seen, model, torch.randint(1, 20, (m, length)))
        assert len(followed) == 2
        check(seen, model, torch.randint(1, 20, (1, 20)))


def test_two_lengths_that_vary_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, chance = Pairs().double(), random.Random(0)
    with heldin.observe(model) as seen:
        followed = follows(seen, monkeypatch)
        for _ in range(80):
            one, other = chance.randint(5, 60), chance.randint(5, 60)
            check(seen, model, torch.randint(1, 20, (4, one)), torch.randint(1, 20, (4, other)))
        assert len(followed) < 25


def test_a_length_equal_to_the_number_of_samples_is_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Timed().double()
    with heldin.observe(model) as seen:
        followed = follows(seen, monkeypatch)
        for length in (3, 9):
            check(seen, model, torch.randint(1, 20, (4, length)))
        check(seen, model, torch.randint(1, 20, (4, 4)))
        assert len(followed) == 3


def test_another_graph_at_a_length_in_between_is_exact_all_the_same() -> None:
    torch.manual_seed(0)
    model, chance = Halves().double(), random.Random(0)
    with heldin.observe(model) as seen:
        for length in (10, 40, *[chance.randint(10, 40) for _ in range(40)]):
            check(seen, model, torch.randint(1, 20, (4, length)))


def test_forms_of_layouts() -> None:
    def layout(size: int, m: int, inner: int) -> Layout:
        owner = torch.arange(size) // inner % m
        return Layout.from_owners(owner.reshape(-1, 1), (size, 7), m)

    folded = LayoutPattern.from_layout(layout(4 * 10, 4, 10))
    assert folded is not None
    folded = folded.merge(layout(4 * 12, 4, 12))
    assert folded is not None
    found = folded.instantiate((3 * 11, 7), 3)
    assert found is not None
    assert found.inner == 11
    assert folded.instantiate((3 * 11 + 1, 7), 3) is None
    assert folded.merge(layout(4 * 12, 4, 1)) is None  # time first: another layout
    assert folded.merge(layout(4 * 12, 4, 2)) is None
    uneven = Layout.from_owners(torch.tensor([0, 0, 1]).reshape(-1, 1), (3, 7), 2)
    assert LayoutPattern.from_layout(uneven) is None


def test_sizes_and_ranges() -> None:
    assert sizes_of([(4, 9), (9, 9)]) == (((0, 1), (1, 1)), (4, 9))
    assert sizes_of([(4, 4)])[0] != sizes_of([(4, 9)])[0]
    assert sizes_of([(1, 4)])[0] != sizes_of([(2, 4)])[0]
    between = Range((4, 10), (4, 10))
    assert (4, 11) not in between
    between.widen((8, 20))
    assert (6, 15) in between
    assert (9, 15) not in between
    assert (6, 15, 1) not in between
