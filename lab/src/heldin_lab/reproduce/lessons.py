"""What the paper does not say and the runs show: numbers, and the sentences they make."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .flow import stages_for
from .ledger import criteria, first_above, smooth
from .multiverse import Universe
from .readings import DIVISION, SMOOTHING
from .tables import at

__all__ = [
    "from_flow",
    "from_full",
    "from_readings",
    "from_sector",
    "from_stopped",
    "from_tenth",
    "sentences",
    "table",
]


def _stop(one: Any, smoothing: float, division: str | float) -> tuple[float, float]:
    """The step at which a reading stops, and the test loss there over the least."""
    import numpy

    raw, steps = criteria(one.log, division), one.log["steps"]
    stop = float(first_above(smooth(raw, smoothing, 0.0, steps), steps))
    if math.isnan(stop):
        return stop, stop
    loss = float(numpy.interp(stop, one.table.step, one.table.test_loss))
    return stop, loss / float(one.table.test_loss.min())


def from_full(facts: dict[str, Any], found: Mapping[int, Mapping[str, Any]]) -> None:
    """From runs at full size, as far as they are: sampling, and the first steps; then the stop."""
    import numpy

    for part, one in found.get(0, {}).items():
        if one.finished and one.log:
            facts[f"full, {part}"] = _path([one], part)
        if "exact_table" not in one.log or len(one.log["exact_steps"]) < 20:
            continue
        exact = criteria(one.log, "out", exact=True)
        places = numpy.searchsorted(one.log["steps"], one.log["exact_steps"])
        sampled = criteria(one.log, "out")[places]
        zero = criteria(one.log, "zero", exact=True)
        facts[f"sampled, {part}"] = {
            "steps": len(exact),
            "difference": float(abs(sampled - exact).mean()),
            "bias": float((sampled - exact).mean()),
            "spread": float(exact.std()),
            "correlation": float(numpy.corrcoef(sampled, exact)[0, 1]),
            "zeros": [float(value) for value in zero[:2]],
        }


def from_tenth(
    facts: dict[str, Any], runs: Mapping[int, Mapping[str, Any]], parts: Sequence[str]
) -> None:
    """From a tenth of the width: where the criterion stays, and what decides the stop."""
    facts["tenth"] = _path([each[parts[1]] for each in runs.values()], parts[1])


def _path(own: Sequence[Any], part: str) -> dict[str, Any]:
    """Where the test loss turns and the criterion stays, and what decides the stop."""
    import numpy

    raw = [criteria(one.log, "out") for one in own]
    late = numpy.concatenate([values[len(values) // 10 :] for values in raw])
    windows = numpy.concatenate([_windows(values) for values in raw])
    return {
        "seeds": len(own),
        "steps": int(own[0].steps),
        "turn": [float(one.table.step[one.table.test_loss.idxmin()]) for one in own],
        "rate": float(part.split()[1].strip(",")),
        "least": [float(one.table.test_loss.min()) for one in own],
        "mean": float(late.mean()),
        "deviation": float(late.std()),
        "above": float((late > 0).mean()),
        "windows": [float(numpy.quantile(windows, q)) for q in (0.05, 0.95)],
        "smoothing": {
            f"{b:g}": [_stop(one, b, "out") for one in own]
            for b in (0.0, *(v.setting for v in SMOOTHING.values))
        },
        "division": {v.name: [_stop(one, 0.9, v.setting) for one in own] for v in DIVISION.values},
    }


def _windows(values: Any) -> Any:
    """Means over a hundred steps, after the first tenth of the run."""
    late = values[len(values) // 10 :]
    width = min(100, len(late))
    return late[: len(late) // width * width].reshape(-1, width).mean(1)


def from_sector(facts: dict[str, Any], runs: Mapping[int, Mapping[str, Any]]) -> None:
    """From SECTOR: what each treatment of the division does there."""
    own = [one for each in runs.values() for one in each.values() if one.log]
    facts["sector"] = {
        "runs": len(own),
        "division": {v.name: [_stop(one, 0.9, v.setting) for one in own] for v in DIVISION.values},
    }


def from_stopped(facts: dict[str, Any], size: str, real: Any, replayed: Any) -> None:
    """From greedy stopping: the share of stopped weights at the end, real and replayed."""
    shares = {"real": float(real.off.iloc[-1]), "replayed": float(replayed.off.iloc[-1])}
    facts[f"greedy, {size}"] = shares


def from_flow(facts: dict[str, Any], rate: float, runs: Mapping[str, Any]) -> None:
    """From gradient flow: how many gradients it took, how sharp the loss is, where it turns."""
    tables = {part: one.table for part, one in runs.items()}
    facts["flow"] = {
        "rate": rate,
        "steps": int(next(iter(tables.values())).step.iloc[-1]),
        "gradients": {part: _gradients(table, rate) for part, table in tables.items()},
        "sharpness": float(max(t.sharpness.max() for t in tables.values())),
        "turn": float(tables["evidence"].step[tables["evidence"].test_loss.idxmin()]),
        "crossing": _stop(runs["evidence"], 0.0, "out"),
        "against": at(tables["evidence"], "test_loss") / at(tables["validation"], "test_loss"),
    }


def _gradients(table: Any, rate: float) -> int:
    """The number of gradients along a flow, from its records."""
    gaps = table.step.diff().iloc[1:]
    return sum(stages_for(rate * g, s) for g, s in zip(gaps, table.sharpness.iloc[1:], strict=True))


# --- in words --------------------------------------------------------------------------------


def _ratio(found: Sequence[Sequence[float]], never: str = "never stops") -> str:
    """The test loss at the stops over the least, the median of the runs that stop.

    >>> _ratio([(7.0, 1.25), (math.nan, math.nan)]), _ratio([(math.nan, math.nan)])
    ('1.25 (1 of 2 runs)', 'never stops')
    """
    known = [ratio for _, ratio in found if not math.isnan(ratio)]
    if not known:
        return never
    lost = f" ({len(known)} of {len(found)} runs)" if len(known) < len(found) else ""
    return f"{statistics.median(known):.2f}{lost}"


def _paths(facts: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The runs of MNIST with SGD on all images, the largest first, by their size in words."""
    full = {
        f"full size, {name.removeprefix('full, ').removesuffix(', evidence')}": path
        for name, path in facts.items()
        if name.startswith("full, rate")
    }
    if tenth := facts.get("tenth"):
        full[f"a tenth of the width, rate {tenth['rate']:g}"] = tenth
    return full


def _turn(path: Mapping[str, Any]) -> float:
    """Rate x steps at the least test loss."""
    return float(path["rate"] * statistics.median(path["turn"]))


TABLE = (
    "run",
    "seeds",
    "rate x steps at the least test loss",
    "mean",
    "standard deviation",
    "above zero",
)


def table(facts: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """All runs side by side: head and rows; a dash where a reading never stops."""
    paths = _paths(facts)
    if not paths:
        return (), []
    first = next(iter(paths.values()))
    divisions = [name for name in first["division"] if name != DIVISION.values[0].name]
    head = (*TABLE, *(f"smoothing {b}" for b in first["smoothing"]), *divisions)
    rows = [
        (
            name,
            str(path["seeds"]),
            f"{_turn(path):.0f}",
            f"{path['mean']:.2f}",
            f"{path['deviation']:.2f}",
            f"{path['above']:.0%}",
            *(_ratio(path["smoothing"][b], "-") for b in first["smoothing"]),
            *(_ratio(path["division"][d], "-") for d in divisions),
        )
        for name, path in paths.items()
    ]
    return head, rows


def sentences(facts: Mapping[str, Any]) -> list[str]:
    """Each with its number; those whose runs are not there are missing."""
    paths = _paths(facts)
    found = []
    if paths:
        name, first = next(iter(paths.items()))
        found += _about(name, first)
        if sector := facts.get("sector"):
            found.append(_epsilons(name, first, sector))
    if flow := facts.get("flow"):
        found += [_early(flow), _flow(flow, facts.get("flow beside steps"))]
    for name, shares in facts.items():
        if name.startswith("greedy, "):
            found.append(
                f"A weight that stops hardly changes when the others do: with real stops "
                f"({name.removeprefix('greedy, ')}) {shares['real']:.0%} of the weights have "
                f"stopped in the end, along plain training {shares['replayed']:.0%} would have."
            )
    sampled = [(n.removeprefix("sampled, "), v) for n, v in facts.items() if n[:7] == "sampled"]
    for name, each in sampled[:1]:
        found += [
            f"A part of the weights is enough to know the criterion: at full size ({name}) a "
            f"random block of 16,384 weights of each matrix differs from all of them by "
            f"{each['difference']:.3f} on average in {each['steps']} steps, while the criterion "
            f"itself has standard deviation {each['spread']:.2f} (correlation "
            f"{each['correlation']:.3f}).",
            f"Zeros for 0/0 do not stop training at once: the criterion is {each['zeros'][0]:.2f} "
            f"and {each['zeros'][1]:.2f} in the first two steps of that run.",
        ]
    return found


def _about(name: str, path: Mapping[str, Any]) -> list[str]:
    """What the largest run says."""
    low, high = path["windows"]
    smoothing = dict(path["smoothing"])
    without = _ratio(smoothing.pop("0"))
    division = dict(path["division"])
    return [
        f"The test loss is least at rate x steps of {_turn(path):.0f} ({name}), after "
        f"{statistics.median(path['turn']):,.0f} steps.",
        f"The criterion does not cross zero there. From a tenth of the run on its mean is "
        f"{path['mean']:.2f}, and its means over 100 steps stay between {low:.2f} and {high:.2f} "
        "(5 % and 95 %).",
        f"It is noise that carries it over zero: the criterion of a single batch has standard "
        f"deviation {path['deviation']:.2f}, and {path['above']:.0%} of the batches are above "
        "zero.",
        f"So smoothing decides the stop. The test loss there, over the least: no smoothing: "
        f"{without}; " + "; ".join(f"{b}: {_ratio(s)}" for b, s in smoothing.items()) + ".",
        "And so does what is done where the variance is zero or nearly so, with smoothing 0.9: "
        + "; ".join(f"{d}: {_ratio(s)}" for d, s in division.items())
        + ".",
    ]


def _early(flow: Mapping[str, Any]) -> str:
    """Where gradient descent crosses zero."""
    step, ratio = flow["crossing"]
    words = f"rate x steps of {flow['rate'] * flow['turn']:.0f}, after {flow['turn']:,.0f} steps"
    if math.isnan(step):
        return (
            f"With all images in each step the criterion stays below zero; the turn is at {words}."
        )
    return (
        "With all images in each step there is no noise for smoothing to act on, and evidence is "
        f"early by itself: the raw criterion is above zero from step {step:,.0f} on (a fifth of "
        f"the width), where the test loss is {ratio:.2f} times the least, which lies at {words}. "
        f"It is {flow['against']:.2f} times that of validation; the paper has 1.32 and calls that "
        "slight. The claim in the table, written before, asks for more than 1 only."
    )


def _flow(flow: Mapping[str, Any], beside: Mapping[str, Any] | None) -> str:
    """What stands for gradient descent, and how well."""
    count = sum(flow["gradients"].values())
    words = (
        f"Gradient descent of rate {flow['rate']:g} follows gradient flow: the largest curvature "
        f"on the way is {flow['sharpness']:.0f} (a fifth of the width), and steps of this rate "
        f"are stable up to {2 / flow['rate']:.0f}. So the flow stands for the steps, with "
        f"{count:,} gradients for both runs in the place of {2 * flow['steps']:,}."
    )
    if beside is None:
        return words
    one, other = (
        "never" if math.isnan(stop) else f"at step {stop:,.0f}" for stop in beside["stops"]
    )
    return (
        f"{words} Where both are cheap (a tenth of the width, {beside['images']:,} images, "
        f"{beside['steps']:,} steps) their test losses differ by at most {beside['test_loss']:.1%} "
        f"and the mean of f by at most {beside['ratio']:.0%} after a tenth of the steps; evidence "
        f"stops {one} of the descent and {other} of the flow."
    )


def _epsilons(name: str, path: Mapping[str, Any], sector: Mapping[str, Any]) -> str:
    """What each epsilon does to MNIST and to SECTOR."""
    words = "; ".join(
        f"{d}: MNIST {_ratio(stops)}, SECTOR {_ratio(sector['division'][d])}"
        for d, stops in path["division"].items()
    )
    return (
        f"No epsilon serves both MNIST ({name}) and SECTOR ({sector['runs']} runs of the quick "
        f"preset). The test loss at the stop, over the least, with smoothing 0.9: {words}."
    )


def from_readings(found: Sequence[Universe]) -> list[str]:
    """What is seen in the values under all readings."""
    lines = []
    for each in found:
        if each.experiment == "quadratic" and "noise level" in each.choices:
            lines.append(_levels(each))
    damped = [each for each in found if "epsilon of RMSprop" in each.choices]  # largest first
    return lines + [_factors(each) for each in damped[:1]]


def _levels(found: Universe) -> str:
    """Of the quadratics: what the noise level does."""
    shares: dict[str, list[float]] = {}
    for place in range(len(found.claims)):
        for level, share in found.by_choice(place)["noise level"].items():
            shares.setdefault(level, []).append(share)
    words = "; ".join(f"{level}: {statistics.fmean(each):.0%}" for level, each in shares.items())
    return (
        "The noise level of the quadratics cancels where the start scales with it. Share of all "
        f"readings, unit start included, in which the stop is near the minimum, by Lambda: {words}."
    )


def _factors(found: Universe) -> str:
    """That the form of epsilon decides whether RMSprop switches weights off."""
    choice = found.choices.index("epsilon of RMSprop")
    largest: dict[str, float] = {}
    for names, (cell,) in found.rows:
        largest[names[choice]] = max(largest.get(names[choice], 0.0), cell[2])
    words = "; ".join(
        f"{name}: {share:.0%}" if share >= 0.005 or not share else f"{name}: {share:.1g}"
        for name, share in largest.items()
    )
    return (
        "Whether RMSprop switches weights off is a matter of its epsilon. Largest share of factors "
        f"below 1e-5 under any reading ({found.size.split(',')[0]}): {words}."
    )
