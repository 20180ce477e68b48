"""Charts as SVG elements, in the colours of the page around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Series", "chart", "is_wide"]

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 46
WIDE = 8  # ratio of the largest and the smallest number from which an axis is logarithmic


@dataclass(frozen=True)
class Series:
    """Numbers to draw."""

    name: str  # in the legend; "" for none
    x: Sequence[float]
    y: Sequence[float]
    style: str = "a"  # name of the colour in the style sheet: "a", "b", "c", ... or "soft"
    low: Sequence[float] = ()  # of a band around the line
    high: Sequence[float] = ()
    points: bool = False  # whether to draw points, not a line


@dataclass(frozen=True)
class Axis:
    """A map from numbers to places; kind "steps" is logarithmic beyond 1 and -1."""

    low: float
    high: float
    first: float
    last: float
    kind: str = "linear"

    def place(self, number: float) -> float:
        """Return the place of a number."""
        low, high, at = (self._scaled(v) for v in (self.low, self.high, number))
        return round(self.first + (at - low) / ((high - low) or 1) * (self.last - self.first), 1)

    def _scaled(self, number: float) -> float:
        if self.kind == "log":
            return math.log10(max(number, 1e-300))
        return math.asinh(number) if self.kind == "steps" else number

    def ticks(self) -> list[float]:
        """Return round numbers inside of the axis."""
        low, high = self.low, self.high
        if self.kind == "linear":
            size = 10 ** math.floor(math.log10((high - low) or 1))
            size *= next((f for f in (0.2, 0.5, 1, 2) if (high - low) / (f * size) <= 6), 2)
            first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
            return [round(i * size, 12) for i in range(first, last + 1)]
        first = 0 if self.kind == "steps" else math.floor(math.log10(low))
        last = math.ceil(math.log10(max(abs(low), abs(high), 1.0 if first == 0 else low)))
        powers = [10.0**power for power in range(first, last + 1)][:: 1 + (last - first) // 7]
        for parts in ((1, 2, 5), (1, 3), (1,)):
            numbers = [part * power for power in powers for part in parts]
            if self.kind == "steps":
                numbers = [*(-n for n in reversed(numbers)), 0.0, *numbers]
            inside = [n for n in numbers if low - abs(low) / 1e3 <= n <= high + abs(high) / 1e3]
            if len(inside) <= 8:
                break
        return inside


def is_wide(numbers: Sequence[float]) -> bool:
    """Return whether positive numbers are easier to read on a logarithmic axis."""
    finite = [number for number in numbers if math.isfinite(number)]
    return bool(finite) and min(finite) > 0 and max(finite) > WIDE * min(finite)


def chart(
    series: Sequence[Series],
    title: str,
    x: str,
    y: str,
    *,
    signed: bool = False,
    steps: bool = False,
    diagonal: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    under: Callable[[float], str] | None = None,
    limits: tuple[float, float] | None = None,
) -> str:
    """Draw lines with bands, or points.

    Args:
        series: what to draw.
        title: for screen readers.
        x, y: names of the axes.
        signed: whether y is logarithmic beyond 1 and -1.
        steps: whether x is.
        diagonal: draw the line x = y; both axes have the same limits.
        marks: places of vertical lines, with their names.
        under: the text below the number of a tick of x.
        limits: of both axes; None: those of the numbers.
    """
    values = [v for s in series for v in (*s.y, *s.high) if math.isfinite(v)]
    places = [v for s in series for v in s.x if math.isfinite(v)] + [at for at, _ in marks]
    if not values or not places or not math.isfinite(max(values) - min(values)):
        return ""
    log = is_wide([v for s in series for v in s.y]) and not diagonal and not signed
    lows = [v for s in series for v in s.low if math.isfinite(v)]
    bottom, top = min(values), max(values)
    if log:
        above = [v for v in lows if v > 0]
        bottom = max(min([bottom, *above]), bottom / WIDE)
    else:
        bottom = min([bottom, *lows, *([0.0] if 0 <= bottom < 0.5 * top else [])])
    ends = limits or (min(places), max(places))
    if diagonal:
        ends = limits or (min(*places, bottom), max(*places, top))
        bottom, top = ends
    across = Axis(*ends, LEFT, WIDTH - RIGHT, "steps" if steps else "linear")
    kind = "steps" if signed else "log" if log else "linear"
    up = Axis(bottom, top, HEIGHT - BOTTOM, TOP, kind)
    parts = [*_grid(across, up, under), _legend(series)]
    if diagonal:
        parts.append(_path([*zip(ends, ends, strict=True)], across, up, "soft dash"))
    for at, name in marks:
        place = across.place(at)
        side = "end" if place > WIDTH / 2 else "start"
        parts.append(f'<path class="mark" d="M{place} {TOP}V{HEIGHT - BOTTOM}"/>')
        shift = -4 if side == "end" else 4
        parts.append(_text(place + shift, TOP + 12, name, side))
    for each in series:
        parts += _drawn(each, across, up)
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x, "middle"))
    label = f"translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"
    parts.append(f'<text transform="{label}" text-anchor="middle">{escape(y)}</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _drawn(series: Series, across: Axis, up: Axis) -> list[str]:
    if series.points:
        return [
            f'<circle class="{series.style}" cx="{across.place(x)}" cy="{up.place(y)}" r="3"/>'
            for x, y in zip(series.x, series.y, strict=True)
            if math.isfinite(x) and math.isfinite(y)
        ]
    parts = []
    edges = [*zip(series.x, series.low, series.high, strict=True)] if len(series.low) else []
    edges = [edge for edge in edges if all(map(math.isfinite, edge))]
    if edges:
        inside = [(x, max(low, up.low), min(high, up.high)) for x, low, high in edges]
        around = [(x, high) for x, _, high in inside] + [(x, low) for x, low, _ in inside[::-1]]
        parts.append(_path(around, across, up, f"{series.style} band"))
    pairs = [p for p in zip(series.x, series.y, strict=True) if all(map(math.isfinite, p))]
    return [*parts, _path(pairs, across, up, series.style)]


def _path(pairs: Sequence[tuple[float, float]], across: Axis, up: Axis, style: str) -> str:
    d = "L".join(f"{across.place(x)} {up.place(y)}" for x, y in pairs)
    return f'<path class="{style}" d="M{d}"/>'


def _grid(across: Axis, up: Axis, under: Callable[[float], str] | None) -> list[str]:
    parts = []
    for tick in up.ticks():
        place = up.place(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {place}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 5, place + 4, f"{tick:.4g}", "end"))
    for tick in across.ticks():
        place = across.place(tick)
        parts.append(_text(place, HEIGHT - BOTTOM + 15, f"{tick:,.4g}", "middle"))
        if under is not None:
            parts.append(_text(place, HEIGHT - BOTTOM + 28, under(tick), "middle", "small"))
    return parts


def _legend(series: Sequence[Series]) -> str:
    parts, at = [], float(LEFT)
    for each in series:
        if each.name:
            parts.append(f'<path class="{each.style}" d="M{at} 13h14"/>')
            parts.append(_text(at + 18, 17, each.name, "start"))
            at += 32 + 6.4 * len(each.name)
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'
