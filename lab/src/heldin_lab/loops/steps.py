"""Loops whose step is not, or not only, `zero_grad`, `backward`, `step`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from .job import Job, class_rows, loop, mlp, plain, rows

GRADIENTS, WEIGHTS = "what the loop does to gradients", "what the loop does to weights"
OPTIMISERS = "optimisers and schedules"


def _mse(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return mse_loss(model(x), y)


def _loader(size: int = 12, n: int = 48) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*rows(n)), size, shuffle=True)


# --- gradients --------------------------------------------------------------------------------


@loop(GRADIENTS)
def plain_with_loss_fn() -> Job:
    """The plain loop on tensors, with loss_fn: shadows in one stack."""
    return plain(mlp(), loss_fn=nn.MSELoss())


@loop(GRADIENTS, train_step="exact")
def plain_with_batch_loss() -> Job:
    """The plain loop with batch_loss and AdamW."""
    model = mlp()
    return plain(model, optimizer=torch.optim.AdamW(model.parameters(), 0.02))


@loop(GRADIENTS, "refused", train_step="exact")
def clipping_not_announced() -> Job:
    """The loop clips the norm of the gradient, without clip=."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS)
def clipping_announced() -> Job:
    """The loop clips the norm of the gradient, with clip=0.3."""
    job = clipping_not_announced()
    job.arguments["clip"] = 0.3
    return job


@loop(GRADIENTS, "refused", train_step="exact")
def clipping_of_stacked_networks() -> Job:
    """Clipping without clip= in a loop with loss_fn (stacked shadows)."""
    job = clipping_not_announced()
    job.arguments = {"loss_fn": nn.MSELoss()}
    return job


@loop(GRADIENTS)
def clipping_values() -> Job:
    """The loop clips values of gradients; clip= is a function."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()

    arguments = {"clip": lambda parameters: clip_grad_value_(parameters, 0.05)}
    return plain(model, optimizer=optimizer, step=step, arguments=arguments)


@loop(GRADIENTS, "refused")
def announced_clipping_that_does_nothing() -> Job:
    """The loop clips before backward(), to no effect, and says clip=."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = _mse(model, batch)
        clip_grad_norm_(model.parameters(), 0.3)
        loss.backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step, arguments={"clip": 0.3})


@loop(GRADIENTS, "refused", train_step="exact")
def l1_penalty() -> Job:
    """The loop adds an L1 penalty to the loss."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        penalty = sum(p.abs().sum() for p in model.parameters())
        (_mse(model, batch) + 1e-3 * penalty).backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "refused", train_step="exact")
def penalty_with_dropout() -> Job:
    """An L2 penalty in the loop, and a model with dropout."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        (_mse(model, batch) + 1e-2 * penalty).backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "refused", train_step="exact")
def scaled_by_hand() -> Job:
    """The loop scales its loss by 0.5."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        (0.5 * _mse(model, batch)).backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "refused", train_step="exact")
def scaled_after_some_steps() -> Job:
    """The loop halves its gradient from step 5 on: a check of the first step sees nothing."""
    model: Any = mlp()
    model.calls = 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        model.calls += 1
        optimizer.zero_grad()
        _mse(model, batch).backward()
        if model.calls > 4:
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= 0.5
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "refused", train_step="exact")
def gradient_noise() -> Job:
    """The loop adds random noise to the gradient."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(0.01 * torch.randn_like(p))
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "exact", "refused")
def hooks_of_parameters() -> Job:
    """Hooks of the parameters change their gradients (gradient centralisation)."""
    model = mlp()
    for p in model.parameters():
        if p.dim() > 1:
            p.register_hook(lambda gradient: gradient - gradient.mean(1, keepdim=True))
    return plain(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def _accumulating(
    divide: Callable[[Tensor, int], Tensor], every: int = 2, flush: bool = True
) -> Job:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    loader = _loader(10)
    done = 0

    def step(batch: Any) -> None:
        nonlocal done
        done += 1
        divide(_mse(model, batch), len(batch[0])).backward()
        last = flush and done % len(loader) == 0
        if done % every == 0 or last:
            optimizer.step()
            optimizer.zero_grad()

    return plain(model, loader, _mse, optimizer=optimizer, step=step)


@loop(GRADIENTS, train_step="exact")
def accumulation() -> Job:
    """Gradients of loss / 2 over two batches; the last step of an epoch has one."""
    return _accumulating(lambda loss, _: loss / 2)


@loop(GRADIENTS)
def accumulation_across_epochs() -> Job:
    """Gradients of loss / 3 over three batches of five, across the ends of epochs."""
    return _accumulating(lambda loss, _: loss / 3, 3, flush=False)


@loop(GRADIENTS)
def accumulation_of_sums() -> Job:
    """Gradients of two batches are added up."""
    return _accumulating(lambda loss, _: loss)


@loop(GRADIENTS, "refused", train_step="exact")
def accumulation_by_rows() -> Job:
    """Each batch counts by its rows, over a fixed number."""
    return _accumulating(lambda loss, n: loss * n / 20)


@loop(GRADIENTS, "refused", train_step="exact")
def zero_grad_every_second_step() -> Job:
    """Gradients are zeroed at every second step only."""
    model: Any = mlp()
    model.calls = 0
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(batch: Any) -> None:
        if model.calls % 2 == 0:
            optimizer.zero_grad()
        model.calls += 1
        _mse(model, batch).backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "none", train_step="exact")
def counter_outside_of_the_model() -> Job:
    """train_step counts its calls in a variable of the function around it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    calls = 0

    def step(batch: Any) -> None:
        nonlocal calls
        optimizer.zero_grad()
        calls += 1
        (_mse(model, batch) / (1 + calls)).backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


class Meter:
    """A mean that goes on, as training scripts keep it."""

    def __init__(self) -> None:
        self.total, self.count, self.values = 0.0, 0, [0.0]

    def update(self, value: float) -> float:
        """Take a value in; return the mean."""
        self.total += value
        self.count += 1
        self.values.append(value)
        return self.total / self.count


class Trainer:
    """A trainer of a script, with its step as a method."""

    def __init__(self) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        self.meter, self.steps = Meter(), 0
        self.averages: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            self.averages[name] = p.detach().clone()

    def step(self, batch: Any) -> float:
        """Take a step whose size depends on everything that the trainer remembers."""
        self.steps += 1
        self.optimizer.zero_grad()
        loss = _mse(self.model, batch)
        mean = self.meter.update(loss.item())
        pull = sum(
            (p - self.averages[name]).square().sum() for name, p in self.model.named_parameters()
        )
        (loss * (1 + 0.1 * mean) / (1 + 0.1 * self.steps) + 0.01 * pull).backward()
        self.optimizer.step()
        for name, p in self.model.named_parameters():
            self.averages[name].lerp_(p.detach(), 0.1)
        return loss.item()


@loop(GRADIENTS, "refused", train_step="exact")
def trainer_with_memory() -> Job:
    """A trainer's method counts, keeps a running loss and a moving average in a dictionary."""
    trainer = Trainer()
    return plain(trainer.model, optimizer=trainer.optimizer, step=trainer.step)


@loop(GRADIENTS)
def two_steps_per_batch() -> Job:
    """Two steps are taken on each batch."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(batch: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            _mse(model, batch).backward()
            optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "refused", train_step="exact")
def sharpness_aware() -> Job:
    """Two passes per step: the gradient is taken at weights nearby (SAM)."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(batch: Any) -> None:
        _mse(model, batch).backward()
        moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        _mse(model, batch).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "refused", train_step="exact")
def second_loss_on_the_same_batch() -> Job:
    """The loop adds a consistency loss on a noisy copy of the batch."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        out = model(x)
        loss = mse_loss(out, y) + 0.1 * mse_loss(model(x + 0.1 * torch.randn_like(x)), out)
        loss.backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, train_step="exact")
def noise_before_the_call() -> Job:
    """The loss draws noise before it calls the model (diffusion models)."""
    model = mlp(7, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)

    def batch_loss(model: Any, batch: Any) -> Any:
        (x,) = batch
        if not model.training:
            return mse_loss(model(torch.cat([x, x[:, :1]], 1)), x)
        level, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return mse_loss(model(torch.cat([(1 - level) * x + level * noise, level], 1)), noise)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        batch_loss(model, batch).backward()
        optimizer.step()

    loader = DataLoader(TensorDataset(rows()[0]), 12, shuffle=True)
    return plain(model, loader, batch_loss, optimizer=optimizer, step=step)


@loop(GRADIENTS, "refused", train_step="exact")
def last_batch_scaled() -> Job:
    """The loop divides a sum by its batch size, so that the smaller last batch counts less."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        ((model(batch[0]) - batch[1]).square().sum() / 10).backward()
        optimizer.step()

    return plain(model, _loader(10), _mse, optimizer=optimizer, step=step)


# --- weights ----------------------------------------------------------------------------------


@loop(WEIGHTS, "refused", train_step="exact")
def weights_clamped() -> Job:
    """Weights are clamped after each step, through `.data`."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-0.3, 0.3)

    return plain(model, optimizer=optimizer, step=step)


@loop(WEIGHTS, "refused", train_step="exact")
def weight_decay_by_hand() -> Job:
    """Weights decay by hand before each step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        for p in model.parameters():
            p.data.mul_(0.99)
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(WEIGHTS, "refused", train_step="refused")
def state_loaded_on_the_way() -> Job:
    """An earlier state is loaded into the model after an epoch."""
    job = plain(mlp())
    kept: dict[str, Any] = {}

    def begin(epoch: int) -> None:
        if epoch == 0:
            kept.update(copy.deepcopy(job.model.state_dict()))
        elif epoch == 2:
            job.model.load_state_dict(kept)

    job.begin_epoch = begin
    return job


@loop(WEIGHTS, "refused", "exact")
def weights_loaded_after_the_rule_was_made() -> Job:
    """Weights are loaded between making the stopping object and the first step."""
    job = plain(mlp())

    def load() -> None:
        torch.manual_seed(7)
        job.model.load_state_dict(mlp().state_dict())

    job.after_making = load
    return job


@loop(WEIGHTS, "refused")
def rule_made_late() -> Job:
    """The stopping object is made after two epochs of training with Adam."""
    model = mlp()
    job = plain(model, optimizer=torch.optim.Adam(model.parameters(), 0.02))

    def train() -> None:
        for _ in range(2):
            for batch in job.loader:
                job.step(batch)

    job.before = train
    return job


@loop(WEIGHTS, "refused", "warned")
def rule_made_late_with_plain_sgd() -> Job:
    """The stopping object is made late; SGD without momentum has no state that shows it."""
    job = rule_made_late()
    job.optimizer = torch.optim.SGD(job.model.parameters(), 0.1)
    optimizer = job.optimizer

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(job.model, batch).backward()
        optimizer.step()

    job.step, job.independent = step, False
    return job


class Average:
    """An average of weights, as small EMA helpers keep it."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        """Take the weights in."""
        for name, p in model.named_parameters():
            self.values[name].mul_(0.9).add_(p.detach(), alpha=0.1)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average."""
        return self.values

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take an average over."""
        self.values = {name: value.clone() for name, value in state.items()}


def _averaging() -> Job:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    average = Average(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = _mse(model, batch)
        pull = sum((p - average.values[n]).square().sum() for n, p in model.named_parameters())
        (loss + 0.01 * pull).backward()
        optimizer.step()
        average.update(model)

    return plain(model, optimizer=optimizer, step=step, state=[average])


@loop(WEIGHTS, "refused", train_step="exact")
def average_in_the_loss() -> Job:
    """The loss pulls weights towards their moving average (mean teacher); state=[average]."""
    return _averaging()


@loop(WEIGHTS, "none", train_step="refused")
def average_not_given() -> Job:
    """The same moving average, which is not given as state=."""
    job = _averaging()
    job.state = ()
    return job


@loop(WEIGHTS)
def average_beside_training() -> Job:
    """A moving average of the weights is kept beside training."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    average = Average(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        optimizer.step()
        average.update(model)

    return plain(model, optimizer=optimizer, step=step)


@loop(WEIGHTS, train_step="exact")
def stochastic_weight_averaging() -> Job:
    """torch's AveragedModel is updated after each step; with train_step, state=[averaged]."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    averaged = AveragedModel(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        optimizer.step()
        averaged.update_parameters(model)

    return plain(model, optimizer=optimizer, step=step, state=[averaged])


@loop(WEIGHTS, "refused", "exact")
def unfreezing() -> Job:
    """The first layer is frozen in the first epoch."""
    model = mlp()
    for p in model[0].parameters():
        p.requires_grad_(False)
    job = plain(model)

    def begin(epoch: int) -> None:
        if epoch == 1:
            for p in model[0].parameters():
                p.requires_grad_(True)

    job.begin_epoch = begin
    return job


# --- optimisers -------------------------------------------------------------------------------


@loop(OPTIMISERS, "refused")
def optimiser_replaced() -> Job:
    """Another optimiser takes over in the second epoch."""
    model = mlp()
    optimizer: Optimizer = torch.optim.Adam(model.parameters(), 0.02)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        optimizer.step()

    def begin(epoch: int) -> None:
        nonlocal optimizer
        if epoch == 1:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)

    return plain(model, optimizer=optimizer, step=step, begin_epoch=begin)


@loop(OPTIMISERS, "refused")
def optimiser_state_cleared() -> Job:
    """The state of the optimiser is cleared on the way."""
    model = mlp()
    job = plain(model, optimizer=torch.optim.Adam(model.parameters(), 0.02))
    job.begin_epoch = lambda epoch: job.optimizer.state.clear() if epoch == 1 else None
    return job


class ScheduleFree(Optimizer):
    """SGD with averaging in place of a schedule; evaluation uses other weights."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self) -> None:
        """Put the averaged weights into the model."""
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Put the weights for training into the model."""
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call optimizer.train() before training")
            share = 1 / (group["k"] + 1)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


@loop(OPTIMISERS, train_step="exact")
def schedule_free() -> Job:
    """An optimiser with an evaluation mode and state in its groups."""
    model = mlp()
    optimizer = ScheduleFree(model.parameters(), 0.1)
    return plain(model, optimizer=optimizer, begin_epoch=lambda _: optimizer.train())


@loop(OPTIMISERS)
def schedule_free_evaluated_by_the_loop() -> Job:
    """The loop switches a schedule-free optimiser to evaluation after each epoch."""
    job = schedule_free()
    job.end_epoch = job.optimizer.eval  # type: ignore[attr-defined]
    return job


class Learnt(Optimizer):
    """SGD that learns a factor of its rate in the group, as Prodigy and D-Adaptation do."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 0.02, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            norm = sum(float(p.grad.square().sum()) for p in group["params"])
            group["d"] = max(group["d"], 0.02 + 0.01 * norm**0.5)
            group["k"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * group["d"])


@loop(OPTIMISERS, train_step="exact")
def learnt_group_state() -> Job:
    """An optimiser that learns its rate in a group (Prodigy)."""
    model = mlp()
    return plain(model, optimizer=Learnt(model.parameters()))


class Counting(torch.optim.SGD):
    """An optimiser that keeps a number of its own as an attribute, from its first step on."""

    taken = 0

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, 0.1)

    def step(self, closure: Any = None) -> Any:
        """Take a step whose rate falls."""
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.taken
        return super().step(closure)


@loop(OPTIMISERS)
def optimiser_with_an_attribute() -> Job:
    """An optimiser counts its steps in an attribute."""
    model = mlp()
    return plain(model, optimizer=Counting(model.parameters()))


@loop(OPTIMISERS, train_step="exact")
def gradient_scaler() -> Job:
    """torch's GradScaler scales the loss and unscales the gradient; state=[scaler]."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(_mse(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()

    return plain(model, optimizer=optimizer, step=step, state=[scaler])


@loop(OPTIMISERS, train_step="exact")
def lbfgs() -> Job:
    """LBFGS with a closure and the whole data."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.3, max_iter=4)

    def step(batch: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = _mse(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    return plain(model, _loader(48), _mse, optimizer=optimizer, step=step, epochs=6)


@loop(OPTIMISERS, "refused", train_step="exact")
def lbfgs_with_a_penalty() -> Job:
    """The closure of LBFGS adds a penalty."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.3, max_iter=4)

    def step(batch: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = _mse(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            return loss

        optimizer.step(closure)

    return plain(model, _loader(48), _mse, optimizer=optimizer, step=step, epochs=6)


@loop(OPTIMISERS, train_step="exact")
def one_cycle() -> Job:
    """OneCycleLR after each step; with train_step it is inside, as state=[schedule]."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = OneCycleLR(optimizer, 0.3, total_steps=12)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        optimizer.step()
        schedule.step()

    return plain(model, optimizer=optimizer, step=step, state=[schedule])


@loop(OPTIMISERS, "none", train_step=("refused", "exact"))
def schedule_not_given() -> Job:
    """train_step moves a schedule that is not given as state=."""
    job = one_cycle()
    job.state = ()
    return job


@loop(OPTIMISERS, train_step="exact")
def plateau() -> Job:
    """ReduceLROnPlateau on the training loss of the epoch."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    losses: list[float] = []

    def end() -> None:
        with torch.no_grad():
            losses.append(float(_mse(model, rows())))
        schedule.step(losses[-1])

    return plain(model, optimizer=optimizer, end_epoch=end, epochs=5, follows_rates=True)


@loop(OPTIMISERS)
def parameter_groups() -> Job:
    """Groups with their own rates and weight decay, and a warm-up."""
    model = mlp()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups, 0.02, weight_decay=0.0)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        optimizer.step()
        schedule.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(OPTIMISERS, "refused", train_step="exact")
def two_optimisers() -> Job:
    """A second optimiser trains the last layer; with train_step, state=[second]."""
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), 0.1)
    second = torch.optim.Adam(model[2].parameters(), 0.02)

    def step(batch: Any) -> None:
        first.zero_grad()
        second.zero_grad()
        _mse(model, batch).backward()
        first.step()
        second.step()

    return plain(model, optimizer=first, step=step, state=[second])


@loop(OPTIMISERS, train_step="exact")
def set_to_none_false() -> Job:
    """Gradients are zeroed in place after the step; RMSprop with momentum."""
    x, y = class_rows()
    model = mlp(6, 3)
    optimizer = torch.optim.RMSprop(model.parameters(), 0.01, momentum=0.5, centered=True)
    loader = DataLoader(TensorDataset(x, y), 12, shuffle=True)

    def batch_loss(model: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    def step(batch: Any) -> None:
        batch_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return plain(model, loader, batch_loss, optimizer=optimizer, step=step)


@loop(OPTIMISERS, "exact", "refused")
def optimiser_with_maximize_and_amsgrad() -> Job:
    """Adam with amsgrad, and gradients that the loop turns round (maximize)."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.02, amsgrad=True, maximize=True)

    def batch_loss(model: Any, batch: Any) -> Any:
        return -_mse(model, batch)

    return plain(model, None, batch_loss, optimizer=optimizer)


@loop(GRADIENTS, "refused", train_step="exact")
def clipping_from_the_third_step() -> Job:
    """The loop clips from step 3 on, which no check of steps 1 and 2 shows."""
    model: Any = mlp()
    model.calls = 0
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)

    def step(batch: Any) -> None:
        model.calls += 1
        optimizer.zero_grad()
        _mse(model, batch).backward()
        if model.calls == 3:
            clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "refused", train_step="exact")
def clipping_that_rarely_matters() -> Job:
    """The loop clips at every step, and only at step 7 the norm is too large."""
    model: Any = mlp()
    model.calls = 0
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)

    def step(batch: Any) -> None:
        model.calls += 1
        optimizer.zero_grad()
        _mse(model, batch).backward()
        clip_grad_norm_(model.parameters(), 0.01 if model.calls == 7 else 100.0)
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS)
def norm_of_gradients_logged() -> Job:
    """The loop calls clip_grad_norm_ with an infinite norm, to log it."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        _mse(model, batch).backward()
        clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(WEIGHTS, "refused", train_step="exact")
def weights_set_once_through_data() -> Job:
    """Weights are changed once, through `.data`, after step 5."""
    model: Any = mlp()
    model.calls = 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        model.calls += 1
        optimizer.zero_grad()
        _mse(model, batch).backward()
        optimizer.step()
        if model.calls == 5:
            model[0].weight.data.mul_(0.5)

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "exact", "refused")
def gradients_by_autograd_grad() -> Job:
    """The loop computes gradients by `torch.autograd.grad` and sets `.grad` itself."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        grads = torch.autograd.grad(_mse(model, batch), list(model.parameters()))
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(GRADIENTS, "exact", "refused")
def batch_in_two_halves() -> Job:
    """The loop trains on each batch in two halves and adds their gradients up."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        x, y = batch
        for part in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
            (mse_loss(model(x[part]), y[part], reduction="sum") / len(x)).backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)


@loop(OPTIMISERS, "refused")
def schedule_replaced_rate_by_hand() -> Job:
    """The loop trains with one optimiser and steps a second one over the same weights."""
    model = mlp()
    first = torch.optim.SGD(model.parameters(), 0.1)
    second = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: Any) -> None:
        first.zero_grad()
        _mse(model, batch).backward()
        first.step()
        second.step()

    return plain(model, optimizer=first, step=step)


@loop(GRADIENTS, "exact", "refused", "warned")
def extra_forward_passes() -> Job:
    """The loop calls the model on other rows with gradients, without a backward pass."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 6)).mean().item()
        _mse(model, batch).backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step)
