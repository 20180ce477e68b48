"""What every rule can show of its run: a page, a live line, a card in notebooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heldin.errors import docs
from heldin.pages.live import Watching
from heldin.pages.run import Advice, RunPage, card, write_page
from heldin.state.estimates import COVERAGE, Estimate, EstimateHistory
from heldin.state.history import History

__all__ = [
    "ElementwiseReport",
    "EstimateReport",
    "EvidenceReport",
    "Reporting",
    "ValidationReport",
    "advice_on_estimates",
    "advice_on_evidence",
    "table",
]

CHECKS = 8  # fewer than so many say little
WIDE = 0.25  # standard error over estimate, from which the estimate is called rough
EARLY = 30  # steps before which a stop by evidence is called early


class Reporting:
    """A rule that can show its run."""

    @abstractmethod
    def _page(self, groups: bool) -> RunPage:
        """All that there is to show."""

    @abstractmethod
    def _look(self) -> tuple[int, str]:
        """The step, and what is to be said at the moment."""

    def report(
        self,
        path: str | Path,
        *,
        groups: bool = False,
        curves: Mapping[str, Sequence[float]] | None = None,
    ) -> Path:
        """Write a page about the run: curves, decision, settings, cost, and what to try.

        The page is one file that needs no network. Works during a run, after it, and after
        `close()`. Needs matplotlib and jinja2: `pip install 'heldin[report]'`.

        Args:
            path: the file, which is overwritten.
            groups: also draw each group of parameters by itself, for rules that have them.
            curves: losses that you have kept, one for each step, by name: they are drawn above.

        Returns:
            The path.
        """
        return write_page(self._page(groups), path, curves)

    def progress(self, total: int | None = None, *, console: Any = None) -> Watching:
        """A `with` block that shows step, estimate or criterion, and verdict while it runs.

        A bar on a terminal or in a notebook, a line every five seconds elsewhere. Needs rich: `pip
        install 'heldin[report]'`.

        Args:
            total: steps that training takes at most, if that is known.
            console: a `rich.console.Console` (default: stderr).
        """
        return Watching(self._look, total, console)

    def _repr_html_(self) -> str | None:
        return card(self._page(groups=False))


class EvidenceReport(Reporting):
    """Of the rule by evidence."""

    history: History
    should_stop: bool
    evidence: Any
    _step: int

    @property
    @abstractmethod
    def criterion(self) -> float:
        """What decides."""

    @property
    @abstractmethod
    def armed(self) -> bool:
        """Whether the criterion has left zero."""

    def _standing(self, groups: bool) -> dict[str, Any]:
        found = {
            "steps": self._step,
            "criterion": f"{self.criterion:.4g} (smoothed; training stops above 0)",
            "value of the last check": self.evidence.criterion,
            "samples in it": self.evidence.count,
            "may stop": "yes" if self.armed else "not yet: the criterion has never left zero",
        }
        parts = self.evidence.groups if groups else {}
        return found | {f"criterion of {name}": value for name, value in parts.items()}

    def _advice(self) -> list[Advice]:
        return advice_on_evidence(self.history, self.should_stop, self.armed)

    def _plot(self, ax: Any, groups: bool) -> None:
        self.history.plot(ax, groups=groups)


class EstimateReport(Reporting):
    """Of the rules that estimate a test loss."""

    history: EstimateHistory
    should_stop: bool
    reason_chosen: str
    _step: int
    _kept: Mapping[int, Mapping[str, Any]]

    def _standing(self, groups: bool) -> dict[str, Any]:
        best = next(r for r in self.history if r.step == self.history.best_step)
        last, known = self.history.last(), COVERAGE.get(self.history.rule, {}).get(2)
        covered = "" if known is None else f", which covered {known:.0%} of the runs in our study"
        return {
            "test loss to expect": f"{_and_error(best)} (two standard errors{covered})",
            "best step": best.step,
            "training loss there": best.training_loss,
            "last check": (
                f"step {last.step}: estimated loss {_and_error(last)}, training loss "
                f"{last.training_loss:.4g}"
            ),
            "steps": self._step,
        }

    def _advice(self) -> list[Advice]:
        return advice_on_estimates(self.history, self.should_stop)

    def _cost(self) -> dict[str, Any]:
        kept = sum(t.numel() * t.element_size() for w in self._kept.values() for t in w.values())
        return {
            **({"choice": self.reason_chosen} if self.reason_chosen else {}),
            "checks": len(self.history),
            "weights kept": f"{kept / 2**20:,.1f} MB, of {len(self._kept)} checks",
        }


class ValidationReport(Reporting):
    """Of a rule with held-out rows."""

    history: History
    best_loss: float
    best_step: int | None
    last_loss: float
    _step: int

    def _standing(self, groups: bool) -> dict[str, Any]:
        best = "none yet" if self.best_step is None else f"{self.best_loss:.6g}"
        return {
            "lowest validation loss": best,
            "best step": self.best_step,
            "last validation loss": self.last_loss,
            "steps": self._step,
        }

    def _plot(self, ax: Any, groups: bool) -> None:
        found = self.history.columns()
        ax.plot(found["step"], found["raw"], color="tab:red", label="validation loss")
        if self.history.stopped is not None:
            ax.axvline(self.history.stopped.step, color="0.6", linestyle=":", label="stop")
        ax.set_xlabel("step")
        ax.set_ylabel("loss")
        ax.legend(fontsize="small")


class ElementwiseReport(Reporting):
    """Of the optimiser that stops single weights: how many are, in each tensor."""

    _step: int
    stopped_fraction: Any
    _settings: Any

    def _look(self) -> tuple[int, str]:
        return self._step, f"{self.stopped_fraction():.1%} of the weights stopped"

    def _page(self, groups: bool) -> RunPage:
        share, parts = self.stopped_fraction(), self.stopped_fraction(by="tensor")

        def plot(ax: Any) -> None:
            ax.barh(list(parts), list(parts.values()), color="tab:blue")
            ax.invert_yaxis()
            ax.set_xlim(0, 1)
            ax.set_xlabel("share of stopped weights")

        return RunPage(
            title=f"{type(self).__name__}: {share:.1%} of the weights stopped",
            verdict=f"after {self._step} steps",
            facts=table({"steps": self._step, "stopped": share}),
            settings=table(self._settings()),
            cost=table({"averages": "one number for each weight"}),
            advice=[
                (
                    "Weights stop when their smoothed f is below 1. If too many stop, raise "
                    "start or smoothing; if none does, lower the learning rate.",
                    docs("tutorials/single-weights.html"),
                )
            ],
            plot=plot if parts else None,
        )


def table(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings as rows, without the fingerprint of the model."""
    return [(name, _text(value)) for name, value in values.items() if name != "model"]


def _and_error(record: Estimate) -> str:
    return f"{record.estimate:.4g} ± {2 * record.standard_error:.2g}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def advice_on_estimates(history: EstimateHistory, should_stop: bool) -> list[Advice]:
    """What to try with a rule that estimates a test loss.

    Args:
        history: its `heldin.state.EstimateHistory`.
        should_stop: whether it has asked to stop.
    """
    trust = docs("when-to-trust.html")
    found: list[Advice] = []
    if history.last().step == 0:
        return [("No step was taken yet: call step() after each optimizer.step().", "")]
    best = next(r for r in history if r.step == history.best_step)
    later = sum(r.step > best.step for r in history)
    if best.step == 0 and len(history) > 1:
        found.append(
            (
                "The model before training has the lowest estimate. Lower the learning rate, and "
                "look whether the inputs say anything about the targets.",
                docs("errors.html#never-better-than-untrained"),
            )
        )
    if not should_stop and later < 3:
        found.append(("The estimate was still falling at the end: train longer.", ""))
    if not should_stop and later >= 3:
        found.append(
            (
                "The lowest estimate has passed, but the rule has not asked to stop yet: it waits "
                "for its patience. restore() gives the best weights at any time.",
                "",
            )
        )
    if best.estimate > 0 and best.standard_error > WIDE * best.estimate:
        found.append(
            (
                "The estimate is rough: its standard error is more than a quarter of it. Only more "
                "rows help.",
                docs("which-rule.html"),
            )
        )
    if best.training_loss < 0.1 * best.estimate:
        found.append(
            (
                "The training loss is less than a tenth of the estimate: the model can fit the "
                "rows by heart. A smaller model or weight decay may do better.",
                "",
            )
        )
    if len(history) < CHECKS:
        found.append((f"There were only {len(history)} checks, so that the curve is coarse.", ""))
    found.append(
        (
            "Rows that belong together (a patient, a document) have to be given as groups=, or the "
            "estimate is too good.",
            docs("faq.html#grouped-data"),
        )
    )
    found.append(("Where such estimates go wrong is shown with figures.", trust))
    return found


def advice_on_evidence(history: History, should_stop: bool, armed: bool) -> list[Advice]:
    """What to try with the rule by evidence.

    Args:
        history: its `heldin.state.History`.
        should_stop: whether it has asked to stop.
        armed: whether the criterion has left zero.
    """
    trust = docs("when-to-trust.html")
    found: list[Advice] = []
    if not len(history):
        return [("There was no check yet: call step() after each backward pass.", "")]
    if not should_stop and not armed:
        found.append(
            (
                "The criterion has never left zero, so that the rule does not stop (arming). "
                "Training may be on a plateau, or there is nothing to learn.",
                f"{trust}#plateaus",
            )
        )
    elif not should_stop:
        found.append(
            (
                "No stop: a large learning rate, momentum, or a model that fits every row keep the "
                'criterion below zero. heldin.stopping("auto", ...) does not mind.',
                docs("errors.html#evidence-will-hardly-stop"),
            )
        )
    last = history[-1].step
    if should_stop and last < EARLY:
        found.append(
            (
                f"It stopped after {last} steps, which is early. warmup= sets a "
                "number of steps before which it may not.",
                f"{trust}#plateaus",
            )
        )
    bad = {name for record in history for name in record.nonfinite}
    if bad:
        found.append((f"Gradients were infinite or not a number in: {', '.join(sorted(bad))}.", ""))
    if should_stop:
        found.append(
            (
                "With full batches or correlated inputs the stop tends to be early. "
                'heldin.stopping("auto", ...) estimates the test loss in its place.',
                trust,
            )
        )
    return found
