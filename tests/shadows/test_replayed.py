"""Shadows of any model on any batch: the numbers of training each of them on its own."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    default_collate,
)

import heldin
from tests.support import runs
from tests.support.shadow_runs import Augmented, D, N, Numbers, batch_loss, mse, np


class Sentences(Dataset[Any]):
    """Sequences of various lengths, in dictionaries."""

    def __init__(self, n: int = N) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(2, 7, (n,), generator=generator).tolist()
        self.rows = [torch.randn(k, D, generator=generator).double() for k in self.lengths]
        self.labels = torch.randint(3, (n,), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return {"x": self.rows[i], "y": self.labels[i], "number": i, "name": f"row {i}"}


def pad(rows: list[Any]) -> Any:
    """Padded to the longest of the batch, and the length first."""
    x = nn.utils.rnn.pad_sequence([row["x"] for row in rows])  # (length, batch, D)
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    for i, row in enumerate(rows):
        mask[: len(row["x"]), i] = True
    return {
        "x": x,
        "mask": mask,
        "y": torch.stack([row["y"] for row in rows]),
        "number": torch.tensor([row["number"] for row in rows]),
        "name": [row["name"] for row in rows],
        "temperature": 1.5,
        "square": torch.eye(4),  # as long as some batches, and no sample's
    }


class Pooled(nn.Module):
    """Frozen, tied and normalised layers, and a buffer that is replaced in training."""

    seen: Tensor

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.first = nn.Linear(D, D)
        self.again = self.first
        self.norm = nn.BatchNorm1d(D) if norm else nn.Identity()
        self.last = nn.Linear(D, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        h = torch.tanh(self.again(torch.tanh(self.first(self.frozen(x)))))
        weight = mask.to(x).unsqueeze(-1)
        return self.last(self.norm((h * weight).sum(0) / weight.sum(0)))


def only(batch: Any, kept: Tensor) -> Any:
    """The slow twin's own way to take samples out of a batch of `pad`."""
    names = [name for name, keep in zip(batch["name"], kept.tolist(), strict=True) if keep]
    cut = {"x": batch["x"][:, kept], "mask": batch["mask"][:, kept], "name": names}
    return batch | cut | {key: batch[key][kept] for key in ("y", "number")}


MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def twin_of(
    start: nn.Module,
    make: Any,
    steps: list[list[Any]],
    label: Tensor,
    k: int,
    schedule: Any = None,
    clip: float | None = None,
    least: int = 1,
) -> nn.Module:
    """The slow twin: one model in a plain loop on exactly the samples that shadow k may see."""
    model = copy.deepcopy(start)
    optimizer = make(trainable(model))
    scheduler = schedule(optimizer) if schedule else None
    for batches in steps:
        kept = [label[batch["number"]] != k for batch in batches]
        usable = [int(some.sum()) >= least for some in kept]
        if any(some.any() and use for some, use in zip(kept, usable, strict=True)):
            optimizer.zero_grad()
            for batch, some, use in zip(batches, kept, usable, strict=True):
                if use and some.any():
                    (batch_loss(model, only(batch, some)) / len(batches)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        if scheduler:
            scheduler.step()
    return model


def train(
    start: nn.Module,
    make: Any,
    loader: Any,
    epochs: int = 2,
    accumulate: int = 1,
    schedule: Any = None,
    clip: float | None = None,
    tell: bool = False,
    **options: Any,
) -> tuple[Any, nn.Module, list[list[Any]]]:
    """The user's loop."""
    model = copy.deepcopy(start)
    optimizer = make(trainable(model))
    options = {"patience": None, "data": loader, "batch_loss": batch_loss} | options
    stopping = runs.FoldStopping(model, optimizer, clip=clip, **options)
    scheduler = schedule(optimizer) if schedule else None
    steps: list[list[Any]] = []
    for _ in range(epochs):
        waiting: list[Any] = []
        for batch in loader:
            waiting.append(batch)
            (batch_loss(model, batch) * (1 / accumulate)).backward()
            if len(waiting) < accumulate:
                continue
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if tell:
                for one in waiting:
                    stopping.add_batch(copy.deepcopy(one))
            stopping.step()
            if scheduler:
                scheduler.step()
            steps.append(waiting)
            waiting = []
    return stopping, model, steps


def check(stopping: Any, start: nn.Module, make: Any, steps: Any, **more: Any) -> None:
    """Weights, buffers and held-out losses are those of the slow twins."""
    data, label = Sentences(), stopping.fold_of_row
    losses: dict[int, float] = {}
    for k in range(int(label.max()) + 1):
        twin = twin_of(start, make, steps, label, k, **more)
        shadow, weights = stopping.backend.shadows[k], stopping.backend.weights_of(k)
        for name, p in twin.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(
                    weights[name].detach(), p.detach(), rtol=1e-9, atol=1e-11
                )
        assert float(twin.get_buffer("seen")) in [float(b) for b in shadow.buffers if not b.dim()]
        twin.eval()
        for i in (label == k).nonzero().flatten().tolist():
            losses[i] = float(batch_loss(twin, pad([data[i]])).detach())
    found = stopping.backend.held_out()
    assert len(found) == len(losses)
    expected = [losses[i] for i in sorted(losses)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("engine", ["replay"])
@pytest.mark.parametrize("optimizer", MAKERS)
def test_shadows_have_the_weights_of_separate_runs(engine: str, optimizer: str) -> None:
    torch.manual_seed(0)
    start, make = Pooled().double(), MAKERS[optimizer]
    loader = DataLoader(Sentences(), batch_size=4, shuffle=True, collate_fn=pad)
    stopping, _, steps = train(start, make, loader, engine=engine, folds=3)
    assert stopping.backend.engine == engine
    assert stopping.backend.held == N
    check(stopping, start, make, steps)


def test_some_of_the_folds() -> None:
    torch.manual_seed(0)
    start, make = Pooled().double(), MAKERS["sgd"]
    loader = DataLoader(Sentences(), batch_size=4, shuffle=True, collate_fn=pad)
    every, _, _ = train(start, make, loader, folds=5)
    every.close()
    some, _, steps = train(start, make, loader, folds=5, shadows=2)
    assert torch.equal(some.fold_of_row, torch.where(every.fold_of_row < 2, every.fold_of_row, -1))
    assert len(some.backend.shadows) == 2
    check(some, start, make, steps)


def test_batch_statistics_are_those_of_the_samples_seen() -> None:
    torch.manual_seed(1)
    start, make = Pooled(norm=True).double(), MAKERS["sgd"]
    loader = DataLoader(Sentences(), batch_size=4, shuffle=True, collate_fn=pad, drop_last=True)
    stopping, _, steps = train(start, make, loader, folds=2)
    twin = twin_of(start, make, steps, stopping.fold_of_row, 1, least=2)
    found = [b for b in stopping.backend.shadows[1].buffers if b.shape == (D,)]
    for mine, own in zip(
        found,
        [twin.get_buffer("norm.running_mean"), twin.get_buffer("norm.running_var")],
        strict=True,
    ):
        torch.testing.assert_close(mine, own)


@pytest.mark.filterwarnings("ignore:.*until a fixed end")
def test_schedules_accumulation_clipping_and_groups() -> None:
    torch.manual_seed(2)
    start = Pooled().double()

    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        groups = [{"params": [first], "lr": 0.2}, {"params": others, "weight_decay": 0.3}]
        return torch.optim.AdamW(groups, lr=0.02)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.2, 0.05], total_steps=40)

    loader = DataLoader(Sentences(), batch_size=4, shuffle=True, collate_fn=pad, drop_last=True)
    more: dict[str, Any] = {"schedule": schedule, "clip": 0.05}
    for tell in (False, True):
        stopping, _, steps = train(start, make, loader, 3, 2, tell=tell, folds=3, **more)
        check(stopping, start, make, steps, **more)
        stopping.close()


def test_a_shadow_without_samples_takes_no_step() -> None:
    torch.manual_seed(3)
    start, make = Pooled().double(), MAKERS["adamw"]
    loader = DataLoader(Sentences(), batch_size=1, shuffle=True, collate_fn=pad)
    stopping, _, steps = train(start, make, loader, 1, folds=2)
    counts = [int(s.optimizer[0]["step"]) for s in stopping.backend.shadows]
    assert sum(counts) == N < 2 * len(steps)
    check(stopping, start, make, steps)


def test_frozen_weights_are_shared_and_never_copied() -> None:
    model = Pooled()
    optimizer = MAKERS["sgd"](model.parameters())  # frozen ones are among its groups
    loader = DataLoader(Sentences(), batch_size=4, collate_fn=pad)
    stopping = runs.FoldStopping(model.double(), optimizer, data=loader, batch_loss=batch_loss)
    for number in range(5):
        weights = stopping.backend.weights_of(number)
        assert set(weights) == {"first.weight", "first.bias", "last.weight", "last.bias"}
        assert weights["first.weight"].data_ptr() != model.first.weight.data_ptr()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return self.last(self.net(x)) * (scale if self.training else 1.0)


@pytest.mark.parametrize("engine", ["replay"])
@pytest.mark.parametrize("workers", [0, 2])
def test_training_is_untouched_bit_for_bit(engine: str, workers: int) -> None:
    def run(follow: bool) -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        loader = DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=workers)
        model = Noisy()
        called: list[int] = []
        model.register_forward_hook(lambda *_: called.append(1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        stopping: Any = None
        if follow:
            stopping = runs.FoldStopping(
                model, optimizer, data=loader, batch_loss=mse, engine=engine, folds=3
            )
        for _ in range(2):
            for batch in loader:
                mse(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if stopping is not None:
                    stopping.step()
        state = random.getstate()[1]
        return [
            *(value.clone() for value in model.state_dict().values()),
            torch.random.get_rng_state(),
            torch.tensor(state, dtype=torch.int64),
            torch.from_numpy(np.random.get_state()[1].astype(np.int64)),
        ]

    for plain, followed in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, followed)


def test_autocast_is_followed() -> None:
    kinds: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        kinds.append(outputs.dtype)
        return F.mse_loss(outputs.float(), batch[1])

    model = nn.Linear(D, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Augmented(), batch_size=8)
    stopping = runs.FoldStopping(model, optimizer, data=loader, batch_loss=loss, folds=2)
    for batch in loader:
        with torch.autocast("cpu", torch.bfloat16):
            loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        kinds.clear()
        stopping.step()
        assert set(kinds) == {torch.bfloat16}
    with torch.autocast("cpu", torch.float16):
        model(batch[0]).sum().backward()
    optimizer.step()
    stopping.add_batch(batch)
    with pytest.raises(heldin.HeldinError, match="use bfloat16"):
        stopping.step()


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    def parts() -> tuple[Any, Any, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        stopping = runs.FoldStopping(
            model, optimizer, data=Numbers(), batch_loss=mse, shadows=2, folds=3
        )
        return model, optimizer, stopping

    order = [torch.randperm(N)[:8].tolist() for _ in range(40)]

    def go(model: Any, optimizer: Any, stopping: Any, some: list[list[int]]) -> None:
        for index in some:
            torch.manual_seed(sum(index))
            batch = default_collate([Numbers()[i] for i in index])
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            stopping.add_batch(batch, index)
            stopping.step()

    whole, first, second = parts(), parts(), parts()
    go(*whole, order)
    go(*first, order[:17])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*second, order[17:])
    a, b = whole[2].history.columns(), second[2].history.columns()
    assert str(a) == str(b)
    assert torch.equal(whole[2].backend.held_out(), second[2].backend.held_out())
    for stopping in (whole[2], second[2]):
        stopping.restore()
    for p, q in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(p, q)
    state = first[2].state_dict()
    state["rule"]["shadows"][1]["weights"].pop("0.weight")
    with pytest.raises(heldin.HeldinError, match="incomplete or damaged"):
        second[2].load_state_dict(state)
    model, optimizer, _ = parts()
    seeded = runs.FoldStopping(
        model, optimizer, data=Numbers(), batch_loss=mse, shadows=2, folds=3, seed=1
    )
    with pytest.raises(heldin.HeldinError, match="divided in another way"):
        seeded.load_state_dict(first[2].state_dict())


def test_arguments_that_would_be_ignored_are_refused() -> None:
    model = nn.Linear(D, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.ones(6, D), torch.ones(6, 1)
    for options, message in (
        ({}, "either loss_fn"),
        ({"loss_fn": F.mse_loss, "batch_loss": mse}, "either loss_fn"),
        ({"loss_fn": F.mse_loss, "eval_data": rows}, "eval_loss and eval_data need"),
        ({"batch_loss": mse, "sample_weight": torch.ones(6)}, "let the batch carry"),
        ({"batch_loss": mse, "engine": "dense"}, "'auto' or 'replay'"),
        ({"batch_loss": 3}, "must be a function of"),
        ({"batch_loss": mse, "groups": [1, 2]}, "one for each of the 6 rows"),
        ({"batch_loss": mse, "groups": "aabbcc"}, "3 groups for 5 folds"),
        ({"batch_loss": mse, "shadows": 6}, "at most the number of folds, 5, got 6"),
        ({"batch_loss": mse, "groups": "abcdef", "stratify": "aabbcc"}, "cannot both"),
        ({"batch_loss": lambda m, b: m(b[0])}, "must return the loss of a batch"),
        ({"loss_fn": F.mse_loss, "clip": print}, "by the norm only"),
    ):
        with pytest.raises(heldin.HeldinError, match=message):
            runs.FoldStopping(model, optimizer, data=rows, **options)
    with pytest.raises(heldin.HeldinError, match="data is missing"):
        runs.FoldStopping(model, optimizer, batch_loss=mse)
    extra = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(heldin.HeldinError, match="also trains a tensor"):
        runs.FoldStopping(model, extra, data=rows, batch_loss=mse)
    stopping = runs.FoldStopping(model, optimizer, data=rows, batch_loss=mse)
    with pytest.raises(heldin.HeldinError, match="it is for tensors and loss_fn"):
        stopping.train()
    stacked = runs.FoldStopping(model, optimizer, F.mse_loss, rows)
    with pytest.raises(heldin.HeldinError, match="stacked"):
        stacked.add_batch(rows)


def test_a_step_that_shadows_do_not_repeat_is_refused() -> None:
    x = torch.randn(N, D)
    for factor, clip, silent in ((2.0, None, False), (1.0, None, True), (1.0, 0.01, True)):
        torch.manual_seed(0)
        model = nn.Linear(D, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stopping = runs.FoldStopping(
            model, optimizer, data=[x, x[:, :1]], batch_loss=mse, clip=clip
        )
        (factor * mse(model, [x, x[:, :1]])).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if silent:
            stopping.step()
        else:
            with pytest.raises(heldin.HeldinError, match=r"another gradient .* 2 times that"):
                stopping.step()


def test_stacked_shadows_clip_each_by_itself() -> None:
    torch.manual_seed(0)
    x = torch.randn(N, D, dtype=torch.float64)
    y = 5 * x[:, :1]
    start = nn.Sequential(nn.Linear(D, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    for engine in ("dense", "vmap", "replay"):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stopping = runs.FoldStopping(
            model,
            optimizer,
            F.mse_loss,
            (x, y),
            2,
            clip=0.3,
            engine=engine,
        )
        twin = copy.deepcopy(start)
        own = torch.optim.SGD(twin.parameters(), lr=0.1)
        for _ in range(4):
            for m, o, rows in (
                (model, optimizer, slice(None)),
                (twin, own, stopping.fold_of_row != 1),
            ):
                o.zero_grad()
                F.mse_loss(m(x[rows]), y[rows]).backward()
                nn.utils.clip_grad_norm_(m.parameters(), 0.3)
                o.step()
            stopping.step()
        expected = torch.stack([(twin(x[i : i + 1]) - y[i]).square().sum() for i in range(N)])
        found = stopping.backend.held_out()
        mine = stopping.fold_of_row == 1
        torch.testing.assert_close(found[mine], expected.detach()[mine])


def test_models_that_cannot_be_copied() -> None:
    model = nn.Linear(D, 1)
    model.stuck = (i for i in range(3))  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(N, D)
    stopping = runs.FoldStopping(model, optimizer, data=[x, x[:, :1]], batch_loss=mse)
    mse(model, [x, x[:, :1]]).backward()
    optimizer.step()
    stopping.step()
    assert len(stopping.history) == 2


def test_lbfgs() -> None:
    torch.manual_seed(0)
    x = torch.randn(N, D, dtype=torch.float64)
    y = x[:, :1] + torch.randn(N, 1, dtype=torch.float64)
    model = nn.Linear(D, 1).double()
    twin = copy.deepcopy(model)
    optimizer, own = (torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=4) for m in (model, twin))
    stopping = runs.FoldStopping(model, optimizer, data=[x, y], batch_loss=mse, folds=2)

    def closure(m: nn.Module, o: Any, keep: Any) -> Any:
        def evaluate() -> Tensor:
            o.zero_grad()
            loss = F.mse_loss(m(x[keep]), y[keep])
            loss.backward()
            return loss

        return evaluate

    for _ in range(3):
        optimizer.step(closure(model, optimizer, slice(None)))
        stopping.step(indices=torch.arange(N))
        own.step(closure(twin, own, stopping.fold_of_row != 0))
    found = stopping.backend.weights_of(0)["weight"]
    torch.testing.assert_close(found.detach(), twin.weight.detach())


class CountsInGroups(torch.optim.Optimizer):
    """Its first step makes a setting of the group, which later steps read."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                p.sub_(group["lr"] / group["count"] * p.grad)


def test_shadows_make_their_own_settings_of_groups() -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def made() -> tuple[nn.Module, CountsInGroups]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        return model, CountsInGroups(model.parameters())

    def step(model: nn.Module, optimizer: CountsInGroups, rows: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(rows), rows[:, :1]).backward()
        optimizer.step()

    model, optimizer = made()
    rule = heldin.rules.Folds(engine="replay")
    stopping: Any = heldin.EarlyStopping(model, optimizer, F.mse_loss, (x, x[:, :1]), rule)
    for _ in range(5):
        step(model, optimizer, x)
    for number in range(5):
        twin = made()
        for _ in range(5):
            step(*twin, x[stopping.following.fold_of_row != number])
        weights = stopping.following.backend.weights_of(number)
        for name, p in twin[0].named_parameters():
            assert torch.allclose(weights[name], p, rtol=1e-12)
    stopping.close()
