"""Reports of a rule's run: a page of HTML, which notebooks show."""

from __future__ import annotations

import bisect
import math
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from heldin.crossval import Interval, compare
from heldin.errors import HeldinError, docs
from heldin.pages import Report, Section, Table, csv_link, render
from heldin.pages.charts import Series, chart
from heldin.state.estimates import EstimateHistory
from heldin.state.history import History

__all__ = ["Advice", "Follower", "RunFacts", "advice_on_estimates", "advice_on_evidence"]

Self = TypeVar("Self", bound="Follower")
Advice = tuple[str, str]  # what to try, and the address of the page that says more
CHECKS = 8  # below this number of checks the report calls the curve coarse
WIDE = 0.25  # standard error over estimate above which the report calls the estimate rough
EARLY = 30  # number of steps below which the report calls a stop by evidence early
STYLES = "abcde"  # colours of runs side by side


@dataclass
class RunFacts:
    """What a report says of a run beside its rule."""

    model: str = ""
    optimizer: str = ""
    rates: list[str] = field(default_factory=list)  # at first, and at last
    epoch_ends: list[int] = field(default_factory=list)  # the step at the end of every epoch
    epoch_steps: float | None = None  # number of steps in an epoch, where it is known
    began: float = math.nan  # time of the first step, in seconds
    ended: float = math.nan  # of the last one

    def describe(self, model: nn.Module, optimizer: Any) -> None:
        """Take down what the model and the optimiser are."""
        parameters = [p for p in model.parameters() if not isinstance(p, UninitializedParameter)]
        total = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        part = "" if trained == total else f", {trained:,} of them trained"
        device = f", on {parameters[0].device}" if parameters else ""
        self.model = f"{type(model).__name__}, {total:,} parameters{part}{device}"
        names = ("weight_decay", "momentum", "betas", "nesterov")
        group = optimizer.param_groups[0]
        used = ", ".join(f"{name} {group[name]}" for name in names if group.get(name))
        self.optimizer = type(optimizer).__name__ + (f", {used}" if used else "")
        self.note_rates(optimizer)

    def note_rates(self, optimizer: Any) -> None:
        """Take down the learning rates of now."""
        rates = {f"{float(group['lr']):.3g}" for group in optimizer.param_groups if "lr" in group}
        text = ", ".join(sorted(rates, key=float))
        if text and text not in self.rates[-1:]:
            self.rates = [*self.rates[:1], text]

    def note_step(self) -> None:
        """Take down the time of a step."""
        self.ended = time.monotonic()
        if math.isnan(self.began):
            self.began = self.ended

    @property
    def knows_epochs(self) -> bool:
        """Whether steps can be counted in epochs."""
        return bool(self.epoch_ends or self.epoch_steps)

    def epoch(self, step: int) -> int | None:
        """Return the number of epochs that a step lies in, from 1 on; None if they are unknown."""
        ends, steps = self.epoch_ends, self.epoch_steps
        if not self.knows_epochs or not step:
            return 0 if self.knows_epochs else None
        if ends and step <= ends[-1]:
            return bisect.bisect_left(ends, step) + 1
        return math.ceil(step * len(ends) / ends[-1] if ends else step / (steps or 1))

    def place(self, step: int) -> str:
        """Return a step in words, with its epoch."""
        epoch = self.epoch(step)
        return f"step {step:,}" if epoch is None else f"epoch {epoch:,} (step {step:,})"

    def step_axis(self) -> dict[str, Any]:
        """Return the axis of a chart over the steps, with their epochs if they are known."""
        if not self.knows_epochs:
            return {"x": "step"}
        return {
            "x": "step, and its epoch",
            "under": lambda step: f"epoch {self.epoch(int(step))}" if step > 0 else "",
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the facts that are known, as names and values."""
        facts = {
            "model": self.model,
            "optimiser": self.optimizer,
            "learning rate": " at first, ".join(self.rates) + " at last" * (len(self.rates) > 1),
            "duration": "" if math.isnan(self.began) else _duration(self.ended - self.began),
            "date": time.strftime("%Y-%m-%d"),
            # `import heldin` would be upwards
            "versions": f"heldin {sys.modules['heldin'].__version__}, "
            f"PyTorch {torch.__version__}, Python {platform.python_version()}",
        }
        return [(name, value) for name, value in facts.items() if value]


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class Follower:
    """The base class of objects that follow a run: a `with` block that closes them, and a report.

    Attributes:
        run: what is known of the run beside the rule.
        history: the checks; the type of a record depends on the rule.
    """

    run: RunFacts
    history: Any
    should_stop: bool
    reason: str

    def close(self) -> None:
        """Remove all hooks. Results remain available."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()

    def report(
        self, path: str | Path | None = None, *, beside: Mapping[str, Any] | None = None
    ) -> Report:
        """Return a page about the run, see `heldin.EarlyStopping.report`."""
        title, verdict = self._headline()
        sections = self._sections()
        if beside:
            sections.insert(1, side_by_side(self, beside))
        settings = [(n, _text(v)) for n, v in self._settings().items() if n != "model"]
        facts = Table([], [*self.run.rows(), *settings])
        sections.append(Section("Run", tables=[facts]))
        page = render(
            "page.html", title=title, verdict=verdict, sections=sections, advice=self._advice()
        )
        if path is not None:
            page.save(path)
        return page

    def model_card(self) -> str:
        """Return the run as Markdown: a section of the model card of a hub."""
        title, verdict = self._headline()
        facts = (*self.named_intervals().items(), *self.run.rows())
        rows = [f"| {name} | {value} |" for name, value in facts]
        lines = [
            "## Evaluation without a validation set", "", f"{title.rstrip('.')}. {verdict}", "",
            "| | |", "|---|---|", *rows, "", self._method(), "",
        ]  # fmt: skip
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    # -- what a rule adds

    def _headline(self) -> tuple[str, str]:
        """Return the title, and the decision in words."""
        return f"{type(self).__name__}: {'stopped' if self.should_stop else 'no stop'}", self.reason

    def _sections(self) -> list[Section]:
        """Return the parts of the report that belong to the rule."""
        files = {"history.csv": csv_link(self.history.columns())}
        return [Section("History", f"{len(self.history)} checks", files=files)]

    def _advice(self) -> list[Advice]:
        """Return what to try if the run looks wrong."""
        return [("A sceptic's questions, with answers.", docs("faq.html"))]

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the saved one."""
        return {}

    def named_intervals(self) -> Mapping[str, Interval]:
        """Return the numbers to expect on new rows, by the names that reports show."""
        return {}

    def _method(self) -> str:
        return f"Training was stopped by [heldin]({docs('')}); no test loss was estimated."


def side_by_side(run: Any, others: Mapping[str, Any]) -> Section:
    """Return a section with the estimates of several runs, and their paired differences."""
    runs = {"this run": run, **{str(name): other for name, other in others.items()}}
    for name, each in runs.items():
        if not hasattr(each, "loss_interval"):
            raise HeldinError(
                f"report: {name!r} is a {type(each).__name__}, which estimates no test loss; give "
                "runs by one of the rules 'auto', 'folds', 'shadow' and 'leave-one-out'"
            )
    names = list(dict.fromkeys(name for each in runs.values() for name in each.named_intervals()))
    rows, series = [], []
    for number, (name, each) in enumerate(runs.items()):
        difference, better = "", ""
        if number:
            try:
                paired = compare(each, run)["loss"]
            except HeldinError as error:
                difference = str(error).removeprefix("heldin.compare: ")
            else:
                difference = str(paired.interval)
                better = f"{paired.probability:.0%}"
        cells = [str(each.named_intervals().get(shown, "")) for shown in names]
        rows.append([name, *cells, each.run.place(each.best_step), difference, better])
        columns = each.history.columns()
        style = STYLES[number % len(STYLES)]
        series.append(Series(name, columns["step"], columns["estimate"], style))
    header = ["run", *names, "chosen", "loss minus that of this run", "better in"]
    text = "Differences are paired row by row; the last column is the share of resamplings."
    figure = chart(series, "Estimated test losses", "step", "estimated test loss", steps=True)
    return Section("Side by side", text, [figure], [Table(header, rows)])


def _text(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def advice_on_estimates(history: EstimateHistory, should_stop: bool) -> list[Advice]:
    """Return what to try with a rule that estimates a test loss."""
    if history.last().step == 0:
        return [("No step was taken yet: call step() after each optimizer.step().", "")]
    best = next(r for r in history if r.step == history.best_step)
    later = sum(r.step > best.step for r in history)
    return _advice_where(
        (
            best.step == 0 and len(history) > 1,
            "The model before training has the lowest estimate. Lower the learning rate, and "
            "check whether the inputs are related to the targets.",
            docs("when-it-goes-wrong.html#never-better-than-untrained"),
        ),
        (
            not should_stop and later < 3,
            "The estimate was still falling at the end: train longer.",
            "",
        ),
        (
            not should_stop and later >= 3,
            "The lowest estimate has passed, but the rule has not asked to stop yet: it waits "
            "for its patience. restore() gives the best weights at any time.",
            "",
        ),
        (
            best.estimate > 0 and best.standard_error > WIDE * best.estimate,
            "The estimate is rough: its standard error is more than a quarter of it. Only more "
            "rows help.",
            docs("which-rule.html"),
        ),
        (
            best.training_loss < 0.1 * best.estimate,
            "The training loss is less than a tenth of the estimate: the model can memorise "
            "the rows. A smaller model or weight decay may do better.",
            "",
        ),
        (
            len(history) < CHECKS,
            f"There were only {len(history)} checks, so that the curve is coarse.",
            "",
        ),
        (
            True,
            "Rows that belong together (a patient, a document) have to be given as groups=, or the "
            "estimate is too good.",
            docs("groups-time-imbalance.html"),
        ),
        (True, "A sceptic's questions say when such estimates are wrong.", docs("faq.html")),
    )


def advice_on_evidence(history: History, should_stop: bool, armed: bool) -> list[Advice]:
    """Return what to try with the rule by evidence."""
    trust = docs("when-to-trust.html")
    if not len(history):
        return [("There was no check yet: call step() after each backward pass.", "")]
    last = history[-1].step
    bad = {name for record in history for name in record.nonfinite}
    return _advice_where(
        (
            not should_stop and not armed,
            "The criterion has never left zero, so that the rule does not stop (arming). "
            "Training may be on a plateau, or there is nothing to learn.",
            f"{trust}#plateaus",
        ),
        (
            not should_stop and armed,
            "No stop: a large learning rate, momentum, or a model that fits every row keep the "
            'criterion below zero. rule="auto" is not affected.',
            docs("when-it-goes-wrong.html#evidence-will-hardly-stop"),
        ),
        (
            should_stop and last < EARLY,
            f"It stopped after {last} steps, which is early. warmup= sets a "
            "number of steps before which it does not stop.",
            f"{trust}#plateaus",
        ),
        (
            bool(bad),
            f"Gradients were infinite or not a number in: {', '.join(sorted(bad))}.",
            "",
        ),
        (
            should_stop,
            "With full batches or correlated inputs the stop tends to be early. "
            'rule="auto" estimates the test loss in its place.',
            trust,
        ),
    )


def _advice_where(*cases: tuple[bool, str, str]) -> list[Advice]:
    """Return the advice of the cases that hold: (whether it does, what to try, a page)."""
    return [(text, page) for holds, text, page in cases if holds]
