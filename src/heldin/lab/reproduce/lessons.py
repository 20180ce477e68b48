"""What the paper does not say and the runs show: numbers, and the sentences they make."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .ledger import criteria, first_above, smooth
from .readings import DIVISION, SMOOTHING

__all__ = ["from_full", "from_sector", "from_tenth", "sentences"]


def _stop(one: Any, smoothing: float, division: str | float) -> tuple[float, float]:
    """The step at which a reading stops, and the test loss there over the least."""
    import numpy

    stop = float(first_above(smooth(criteria(one.log, division), smoothing, 0.0), one.log["steps"]))
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


# --- in words --------------------------------------------------------------------------------


def _ratios(found: Sequence[Sequence[float]]) -> str:
    known = [ratio for _, ratio in found if not math.isnan(ratio)]
    if not known:
        return "never stops"
    words = f"{statistics.median(known):.2f} of the least test loss"
    lost = len(found) - len(known)
    return words + (f" (no stop in {lost} of {len(found)} runs)" if lost else "")


def _about(path: Mapping[str, Any], size: str, rows: str) -> list[str]:
    low, high = path["windows"]
    turn = statistics.median(path["turn"])
    return [
        f"The test loss of the perceptron turns at rate x steps of about {path['rate'] * turn:.0f} "
        f"({size}, {rows}: step {turn:.0f} of {path['steps']}; seeds: {path['seeds']}).",
        f"After the first tenth of that run the criterion of a batch has mean {path['mean']:.2f} "
        f"and standard deviation {path['deviation']:.2f}; its means over 100 steps lie between "
        f"{low:.2f} and {high:.2f} (5 % to 95 %), and {path['above']:.0%} of the single values are "
        "above zero. It does not cross zero at the minimum of the test loss: it stays just below, "
        "and noise carries it over.",
        "So smoothing decides the stop. With 0/0 left out: "
        + "; ".join(f"{b}: {_ratios(stops)}" for b, stops in path["smoothing"].items())
        + ".",
        "And so does the division (smoothing 0.9): "
        + "; ".join(f"{name}: {_ratios(stops)}" for name, stops in path["division"].items())
        + ".",
    ]


def sentences(facts: Mapping[str, Any]) -> list[str]:
    """Each with its number; those whose runs are not there are missing."""
    found = []
    full = {k.removesuffix(", evidence"): v for k, v in facts.items() if k.startswith("full, rate")}
    for name, each in full.items():
        found += _about(each, f"full size, {name.removeprefix('full, ')}", "all 50,000 images")
    if tenth := facts.get("tenth"):
        where = f"a tenth of the width, rate {tenth['rate']:g}"
        found += _about(tenth, where, "all 50,000 images")
    if sector := facts.get("sector"):
        words = "; ".join(f"{name}: {_ratios(stops)}" for name, stops in sector["division"].items())
        found.append(
            f"No epsilon serves both MNIST and SECTOR. On SECTOR ({sector['runs']} runs of the "
            f"quick preset, smoothing 0.9): {words}. Compare the sentence before."
        )
    for name, each in facts.items():
        if name.startswith("sampled"):
            first = " and ".join(f"{value:.2f}" for value in each["zeros"])
            found += [
                f"Full size, {name.removeprefix('sampled, ')}: in {each['steps']} steps the "
                "criterion of all weights was computed beside that of a random block; the mean "
                f"difference is {each['bias']:+.4f}, the mean absolute one "
                f"{each['difference']:.4f}, the correlation {each['correlation']:.4f}, while the "
                f"criterion itself has standard deviation {each['spread']:.2f}.",
                f"Zeros for 0/0 do not stop that run at once: the criterion is {first} in the "
                "first two steps (an earlier sentence of ours said otherwise).",
            ]
    return found
