"""Reports of a rule's run: a page of HTML, which notebooks show."""

from __future__ import annotations

import bisect
import math
import platform
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from heldin.crossval import compare
from heldin.errors import HeldinError, docs
from heldin.pages import Report, Section, Table, csv_link, render
from heldin.pages.charts import Series, chart
from heldin.pages.predictions import Predictions, prediction_sections
from heldin.state.estimates import EstimateHistory
from heldin.state.history import History

__all__ = [
    "ElementwiseReport",
    "EstimateReport",
    "EvidenceReport",
    "Reporting",
    "RunFacts",
    "ValidationReport",
    "advice_on_estimates",
    "advice_on_evidence",
]

Advice = tuple[str, str]  # what to try, and the address of the page that says more
CHECKS = 8  # below this number of checks the report calls the curve coarse
WIDE = 0.25  # standard error over estimate above which the report calls the estimate rough
EARLY = 30  # number of steps below which the report calls a stop by evidence early
STYLES = "abcde"  # colours of runs side by side


@dataclass
class RunFacts:
    """What a report says of a run beside its rule.

    Attributes:
        model, optimizer: in words.
        rates: learning rates at first, and at last.
        epoch_ends: the step at the end of every epoch.
        began, ended: times of the first and the last step, in seconds.
    """

    model: str = ""
    optimizer: str = ""
    rates: list[str] = field(default_factory=list)
    epoch_ends: list[int] = field(default_factory=list)
    began: float = math.nan
    ended: float = math.nan

    def describe(self, model: nn.Module, optimizer: Any) -> None:
        """Take down what the model and the optimiser are."""
        made = [p for p in model.parameters() if not isinstance(p, UninitializedParameter)]
        trained, total = (
            sum(p.numel() for p in made if p.requires_grad),
            sum(map(Tensor.numel, made)),
        )
        some = "" if trained == total else f", {trained:,} of them trained"
        device = f", on {made[0].device}" if made else ""
        self.model = f"{type(model).__name__}, {total:,} parameters{some}{device}"
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

    def epoch(self, step: int) -> int | None:
        """Return the number of epochs that a step lies in, from 1 on; None if they are unknown.

        >>> facts = RunFacts(epoch_ends=[10, 20])
        >>> facts.epoch(0), facts.epoch(10), facts.epoch(11), facts.epoch(45)
        (0, 1, 2, 5)
        """
        ends = self.epoch_ends
        if not ends:
            return None
        if step > ends[-1]:
            return math.ceil(step * len(ends) / ends[-1])
        return bisect.bisect_left(ends, step) + 1 if step else 0

    def place(self, step: int) -> str:
        """Return a step in words, with its epoch.

        >>> RunFacts(epoch_ends=[10, 20]).place(15)
        'epoch 2 (step 15)'
        """
        epoch = self.epoch(step)
        return f"step {step:,}" if epoch is None else f"epoch {epoch:,} (step {step:,})"

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


class Reporting:
    """The base class of rules with a report."""

    @property
    @abstractmethod
    def run(self) -> RunFacts:
        """What is known of the run beside the rule."""

    history: Any
    should_stop: bool
    reason: str

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
        """Return the settings of the rule."""
        return {}

    def report(
        self, path: str | Path | None = None, *, beside: Mapping[str, Any] | None = None
    ) -> Report:
        """Return a page about the run: estimates, curves, out-of-fold predictions, settings.

        The page is one file that needs no network; the numbers behind its charts are in it as CSV.
        Works during a run, after it, and after `close()`. Notebooks show the page.

        Args:
            path: a file that the page is written to as well.
            beside: other runs by name, to show beside this one.
        """
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
        rows = [f"| {name} | {value} |" for name, value in (*self._estimates(), *self.run.rows())]
        lines = [
            "## Evaluation without a validation set", "", f"{title.rstrip('.')}. {verdict}", "",
            "| | |", "|---|---|", *rows, "", self._method(), "",
        ]  # fmt: skip
        return "\n".join(lines)

    def _estimates(self) -> list[tuple[str, str]]:
        """Return names and values of the numbers to expect on new rows."""
        return []

    def _method(self) -> str:
        return f"Training was stopped by [heldin]({docs('')}); no test loss was estimated."

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def _epoch_ticks(self) -> Any:
        """Return the text below the steps of an axis, if epochs are known."""
        if not self.run.epoch_ends:
            return None
        return lambda step: f"epoch {self.run.epoch(int(step))}" if step > 0 else ""

    def _axis(self) -> str:
        return "step, and its epoch" if self.run.epoch_ends else "step"


class EvidenceReport(Reporting):
    """The report of the rule by evidence."""

    history: History
    stopped_step: int | None
    evidence: Any
    _step: int

    @property
    @abstractmethod
    def criterion(self) -> float:
        """The smoothed criterion."""

    @property
    @abstractmethod
    def armed(self) -> bool:
        """Whether the criterion has left zero."""

    def _headline(self) -> tuple[str, str]:
        if self.stopped_step is None:
            return f"Evidence: no stop in {self._step:,} steps", self.reason
        return f"Evidence: stop at {self.run.place(self.stopped_step)}", self.reason

    def _sections(self) -> list[Section]:
        facts = [
            ("steps", f"{self._step:,}"),
            ("criterion", f"{self.criterion:.4g} (smoothed; training stops above 0)"),
            ("value of the last check", f"{self.evidence.criterion:.4g}"),
            ("samples in it", str(self.evidence.count)),
            ("may stop", "yes" if self.armed else "not yet: the criterion has never left zero"),
            *((f"criterion of {n}", f"{v:.4g}") for n, v in self.evidence.groups.items()),
        ]
        columns = self.history.columns()
        series = [
            Series("one check", columns["step"], columns["raw"], "soft"),
            Series("smoothed", columns["step"], columns["criterion"], "b"),
        ]
        marks = [] if self.stopped_step is None else [(self.stopped_step, "stop")]
        figure = chart(
            series, "Criterion", self._axis(), "criterion", signed=True, marks=marks,
            under=self._epoch_ticks(),
        )  # fmt: skip
        files = {"history.csv": csv_link(columns)}
        return [Section("Criterion", "", [figure], [Table([], facts)], files)]

    def _advice(self) -> list[Advice]:
        return advice_on_evidence(self.history, self.should_stop, self.armed)


class ValidationReport(Reporting):
    """The report of a rule with a validation set."""

    history: History
    best_loss: float
    best_step: int | None
    last_loss: float
    _step: int

    def _headline(self) -> tuple[str, str]:
        if self.best_step is None:
            return "No validation loss yet", self.reason
        return f"Validation loss {self.best_loss:.4g}", self.reason

    def _sections(self) -> list[Section]:
        columns = self.history.columns()
        losses = Series("validation loss", columns["step"], columns["raw"], "a")
        figure = chart([losses], "Validation loss", "step", "loss")
        facts = [("steps", str(self._step)), ("last validation loss", f"{self.last_loss:.4g}")]
        if self.best_step is not None:
            facts += [("lowest", f"{self.best_loss:.6g} at step {self.best_step}")]
        files = {"history.csv": csv_link({"step": columns["step"], "loss": columns["raw"]})}
        return [Section("Validation loss", "", [figure], [Table([], facts)], files)]


class EstimateReport(Reporting):
    """The report of the rules that estimate a test loss."""

    history: EstimateHistory
    stopped_step: int | None
    reason_chosen: str
    _step: int
    _count: int
    _outcome: Any
    intervals: Any
    row_losses: Any
    loss_interval: Any
    record: Any
    metric_values: Any
    stop_limit: Any
    best_step: Any
    best_number: Any
    finish: Any
    shares: Any
    temperature: Any
    uncalibrated: Any
    _lowest: Any

    def _headline(self) -> tuple[str, str]:
        title = f"Test loss {self.intervals()['loss']}"
        weights = f"The weights are those of {self.run.place(self.best_step)}"
        if self.finish:
            end = self.run.place(self._step)
            lowest = self.run.place(self.best_step)
            return title, f"Kept weights: {end} (the end); lowest estimate at {lowest}."
        if self.stopped_step is None:
            return title, f"{weights}; training had not stopped after {self._step:,} steps."
        return title, f"{weights}; training stopped at {self.run.place(self.stopped_step)}."

    def conclusions(self) -> list[str]:
        """Return why the run ended, what was chosen and the temperature, in words."""
        reason = self.reason.partition(": ")[2].partition("; stops by")[0]
        if self.stopped_step is None:
            words = [f"not stopped after {self.run.place(self._step)}: {reason}"]
        else:
            since = f"no improvement since step {self.history[self._lowest()].step:,}"
            words = [f"stopped after {self.run.place(self.stopped_step)}: {since}, {reason}"]
        averaged = "the average of those around " if len(self.shares) > 1 else "those of "
        if self.finish:
            words.append(f"kept weights: step {self._step:,} (the end)")
            words.append(f"lowest estimate at step {self.best_step:,}")
        else:
            words.append(f"the chosen weights are {averaged}step {self.best_step:,}")
        if self.temperature != 1:
            words.append(f"temperature {self.temperature:.3g}")
        elif self.uncalibrated:
            words.append(f"no temperature, as {self.uncalibrated}")
        return words

    def _estimates(self) -> list[tuple[str, str]]:
        intervals = self.intervals().items()
        return [("test loss" if name == "loss" else name, str(i)) for name, i in intervals]

    def _method(self) -> str:
        return (
            f"The numbers with 95 % intervals are estimates for new rows by [heldin]({docs('')}): "
            f"the model was trained on all {self._count:,} rows, and each row was evaluated on a "
            "model that was trained beside it without that row."
        )

    def _sections(self) -> list[Section]:
        best = self.history[self.best_number]
        names = {"loss": "test loss"}
        rows = [
            (names.get(name, name), f"{i.value:.4g}", _ends(i))
            for name, i in self.intervals().items()
        ]
        estimates = Table(["to expect on new rows", "estimate", "95 % interval"], rows)
        facts = [
            ("rows", f"{self._count:,}, all of them trained on"),
            ("training loss at the chosen weights", f"{best.training_loss:.4g}"),
            ("steps", f"{self._step:,}, with {len(self.history)} checks"),
            *([("choice of the rule", self.reason_chosen)] if self.reason_chosen else []),
            *([("temperature", f"none, as {self.uncalibrated}")] if self.uncalibrated else []),
        ]
        predictions = [] if self._outcome is None else prediction_sections(self._predictions())
        return [
            Section("", tables=[estimates]),
            self._curve(Table([], facts)),
            *predictions,
        ]

    def _curve(self, facts: Table) -> Section:
        """Draw the training loss and the estimated test loss over the steps."""
        columns = self.history.columns()
        bands = [self.loss_interval(number) for number in range(len(self.history))]
        columns |= {"low": [i.low for i in bands], "high": [i.high for i in bands]}
        if self.run.epoch_ends:
            columns["epoch"] = [self.run.epoch(step) for step in columns["step"]]
        series = [
            Series("training loss", columns["step"], columns["training_loss"], "soft"),
            Series(
                "estimated test loss with its 95 % interval", columns["step"],
                columns["estimate"], "a", columns["low"], columns["high"],
            ),
        ]  # fmt: skip
        best = "lowest" if self.finish else "chosen"
        marks: list[tuple[float, str]] = [(float(self.best_step), best)]
        if self.stopped_step is not None:
            marks.append((float(self.stopped_step), "stopped"))
        figure = chart(
            series, "Losses over the steps", self._axis(), "loss", steps=True, marks=marks,
            under=self._epoch_ticks(),
        )  # fmt: skip
        return Section("Losses", "", [figure], [facts], {"history.csv": csv_link(columns)})

    def _predictions(self) -> Predictions:
        """Return the out-of-fold outputs as probabilities of classes, or as numbers."""
        held, losses = self._outcome.out_of_fold(self.best_number), self.row_losses()
        rows, outputs, targets = held.rows.tolist(), held.outputs.cpu(), held.targets.cpu()
        row_losses = losses.tolist() if len(losses) == len(rows) else []
        if not outputs.is_floating_point() or not bool(outputs.isfinite().all()):
            return Predictions(rows, losses=row_losses)
        outputs = outputs.double()
        single = outputs.numel() == targets.numel() == len(rows)
        if single and self._outcome.binary and set(targets.flatten().tolist()) <= {0, 1}:
            ones = outputs.flatten().sigmoid()
            truth, both = targets.flatten().tolist(), torch.stack([1 - ones, ones], 1).tolist()
            return Predictions(rows, truth, row_losses, both, (), ("0", "1"))
        if single and targets.is_floating_point():
            values = outputs.flatten().tolist()
            return Predictions(rows, targets.double().flatten().tolist(), row_losses, (), values)
        whole = targets.dim() == 1 and not targets.is_floating_point()
        if whole and outputs.dim() == 2 and 0 <= targets.min() <= targets.max() < outputs.shape[1]:
            names = [str(i) for i in range(outputs.shape[1])]
            sums = outputs.sum(1)
            if bool((outputs < 0).any()) or not torch.allclose(sums, torch.ones_like(sums)):
                outputs = outputs.softmax(1)
            return Predictions(rows, targets.tolist(), row_losses, outputs.tolist(), (), names)
        return Predictions(rows, losses=row_losses)

    def _advice(self) -> list[Advice]:
        return advice_on_estimates(self.history, self.should_stop)


class ElementwiseReport(Reporting):
    """The report of the optimiser that stops single weights: the stopped share of each tensor."""

    _step: int
    stopped_fraction: Any

    @property
    def run(self) -> RunFacts:
        """What is known of the run beside the rule."""
        return RunFacts()

    def _headline(self) -> tuple[str, str]:
        share = self.stopped_fraction()
        return f"{share:.1%} of the weights stopped", f"after {self._step:,} steps"

    def _sections(self) -> list[Section]:
        parts = self.stopped_fraction(by="tensor")
        rows = [[name, f"{share:.1%}"] for name, share in parts.items()]
        shades = [[0.0, share] for share in parts.values()]
        return [Section("", tables=[Table(["parameter", "stopped"], rows, shades)])]

    def _advice(self) -> list[Advice]:
        return [
            (
                "Weights stop when their smoothed f is below 1. If too many stop, raise start or "
                "smoothing; if none does, lower the learning rate.",
                docs("tutorials/single-weights.html"),
            )
        ]


def side_by_side(run: Any, others: Mapping[str, Any]) -> Section:
    """Return a section with the estimates of several runs, and their paired differences.

    Args:
        run: the rule of the first run.
        others: rules of other runs, by name.
    """
    runs = {"this run": run, **{str(name): other for name, other in others.items()}}
    for name, each in runs.items():
        if not isinstance(each, EstimateReport):
            raise HeldinError(
                f"report: {name!r} is a {type(each).__name__}, which estimates no test loss; give "
                "runs by one of the rules 'auto', 'folds', 'shadow' and 'leave-one-out'"
            )
    metrics = list(dict.fromkeys(key for each in runs.values() for key in each.intervals()))
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
        cells = [str(each.intervals().get(key, "")) for key in metrics]
        rows.append([name, *cells, each.run.place(each.best_step), difference, better])
        columns = each.history.columns()
        style = STYLES[number % len(STYLES)]
        series.append(Series(name, columns["step"], columns["estimate"], style))
    names = ["test loss" if key == "loss" else key for key in metrics]
    header = ["run", *names, "chosen", "loss minus that of this run", "better in"]
    text = "Differences are paired row by row; the last column is the share of resamplings."
    figure = chart(series, "Estimated test losses", "step", "estimated test loss", steps=True)
    return Section("Side by side", text, [figure], [Table(header, rows)])


def _ends(interval: Any) -> str:
    """Return the ends of an interval, in the digits of its text."""
    _, _, ends = str(interval).partition(" ")
    return ends.strip("[]").replace(", ", " to ") or "none"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def advice_on_estimates(history: EstimateHistory, should_stop: bool) -> list[Advice]:
    """Return what to try with a rule that estimates a test loss.

    Args:
        history: its `heldin.state.EstimateHistory`.
        should_stop: whether the rule has stopped training.
    """
    advice: list[Advice] = []
    if history.last().step == 0:
        return [("No step was taken yet: call step() after each optimizer.step().", "")]
    best = next(r for r in history if r.step == history.best_step)
    later = sum(r.step > best.step for r in history)
    if best.step == 0 and len(history) > 1:
        advice.append(
            (
                "The model before training has the lowest estimate. Lower the learning rate, and "
                "check whether the inputs are related to the targets.",
                docs("when-it-goes-wrong.html#never-better-than-untrained"),
            )
        )
    if not should_stop and later < 3:
        advice.append(("The estimate was still falling at the end: train longer.", ""))
    if not should_stop and later >= 3:
        advice.append(
            (
                "The lowest estimate has passed, but the rule has not asked to stop yet: it waits "
                "for its patience. restore() gives the best weights at any time.",
                "",
            )
        )
    if best.estimate > 0 and best.standard_error > WIDE * best.estimate:
        advice.append(
            (
                "The estimate is rough: its standard error is more than a quarter of it. Only more "
                "rows help.",
                docs("which-rule.html"),
            )
        )
    if best.training_loss < 0.1 * best.estimate:
        advice.append(
            (
                "The training loss is less than a tenth of the estimate: the model can memorise "
                "the rows. A smaller model or weight decay may do better.",
                "",
            )
        )
    if len(history) < CHECKS:
        advice.append((f"There were only {len(history)} checks, so that the curve is coarse.", ""))
    advice.append(
        (
            "Rows that belong together (a patient, a document) have to be given as groups=, or the "
            "estimate is too good.",
            docs("groups-time-imbalance.html"),
        )
    )
    advice.append(("A sceptic's questions say when such estimates are wrong.", docs("faq.html")))
    return advice


def advice_on_evidence(history: History, should_stop: bool, armed: bool) -> list[Advice]:
    """Return what to try with the rule by evidence.

    Args:
        history: its `heldin.state.History`.
        should_stop: whether the rule has stopped training.
        armed: whether the criterion has left zero.
    """
    trust = docs("when-to-trust.html")
    advice: list[Advice] = []
    if not len(history):
        return [("There was no check yet: call step() after each backward pass.", "")]
    if not should_stop and not armed:
        advice.append(
            (
                "The criterion has never left zero, so that the rule does not stop (arming). "
                "Training may be on a plateau, or there is nothing to learn.",
                f"{trust}#plateaus",
            )
        )
    elif not should_stop:
        advice.append(
            (
                "No stop: a large learning rate, momentum, or a model that fits every row keep the "
                'criterion below zero. rule="auto" is not affected.',
                docs("when-it-goes-wrong.html#evidence-will-hardly-stop"),
            )
        )
    last = history[-1].step
    if should_stop and last < EARLY:
        advice.append(
            (
                f"It stopped after {last} steps, which is early. warmup= sets a "
                "number of steps before which it does not stop.",
                f"{trust}#plateaus",
            )
        )
    bad = {name for record in history for name in record.nonfinite}
    if bad:
        advice.append(
            (f"Gradients were infinite or not a number in: {', '.join(sorted(bad))}.", "")
        )
    if should_stop:
        advice.append(
            (
                "With full batches or correlated inputs the stop tends to be early. "
                'rule="auto" estimates the test loss in its place.',
                trust,
            )
        )
    return advice
